# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares which modules this overlay adds beside an installed megatron-core; other metadata is in pyproject.toml."""

from setuptools import setup

setup(
    packages=[
        "megatron.core.distributed.fsdp.experimental",
        "megatron.core.distributed.fsdp.experimental.checkpoint",
        "megatron.inspector",
        "megatron.pretrain",
    ],
    py_modules=[
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_adapter",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_checkpoint",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_config",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_experts",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_finalize",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_mesh",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_overlap",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_precision",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_shared_weights",
        "megatron.core.distributed.fsdp.mcore_fsdp_v2_units",
        "megatron.core.distributed.fsdp.megatron_training",
        "megatron.core.distributed.fsdp.megatron_training_arguments",
        "megatron.core.distributed.fsdp.megatron_training_model",
        "megatron.core.distributed.fsdp.torch_dist_checkpoint",
        "megatron.core.distributed.fsdp.torch_dist_groups",
        "megatron.core.distributed.fsdp.torch_dist_names",
        "megatron.core.optimizer.fully_sharded_optimizer",
        "megatron.core.optimizer.fully_sharded_optimizer_config",
        "megatron.core.optimizer.fully_sharded_optimizer_gradients",
        "megatron.core.optimizer.fully_sharded_optimizer_muon",
        "megatron.core.optimizer.fully_sharded_optimizer_state",
    ],
    package_data={"megatron.core.distributed.fsdp.experimental": ["py.typed"]},
)
