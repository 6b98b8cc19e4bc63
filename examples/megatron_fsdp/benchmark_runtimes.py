# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""How each runtime that `benchmark.py` compares is set up: one recipe each. Measures nothing.

A recipe gets the fp32 decoder, the same on every rank. All compute in bf16; those that train keep fp32 weights (only
`plain_adamw` has bf16 ones) and step AdamW; those that shard (ZeRO-3) have one unit per layer and one for the rest,
and send gradients in bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from decoder import Decoder, Layer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Setup:
    """What a training loop needs of a runtime."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return the optimizer that all runtimes share, fused on GPUs."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=torch.cuda.is_available())


def plain(model: Decoder, mesh: DeviceMesh) -> Setup:
    """No communication and no optimizer: what the bare module costs."""
    return Setup(model.bfloat16())


def plain_adamw(model: Decoder, mesh: DeviceMesh) -> Setup:
    """No communication: every rank steps AdamW over its own bf16 weights, which are plain tensors."""
    model.bfloat16()
    return Setup(model, adamw(model.parameters()))


def ddp(model: Decoder, mesh: DeviceMesh) -> Setup:
    """PyTorch's DistributedDataParallel: fp32 weights, gradients and reductions, bf16 compute by autocast."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Setup(wrapped, adamw(wrapped.parameters()), partial(torch.autocast, mesh.device_type, torch.bfloat16))


def fsdp2(model: Decoder, mesh: DeviceMesh) -> Setup:
    """PyTorch's fully_shard: fp32 shards, bf16 compute and reductions."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Setup(model, adamw(model.parameters()))


def megatron_fsdp(model: Decoder, mesh: DeviceMesh) -> Setup:
    """Megatron-FSDP v1 as PyPI has it: ZeRO-3, fp32 main weights and gradients, bf16 compute and reductions.

    It overlaps communication by default, makes its own mesh over all ranks, and needs CUDA.
    """
    # It prefers the configuration class of an installed megatron-core, whose fields are those of another release:
    # 0.6.1 fails on megatron-core 0.16.1's. Without megatron-core, which nothing here needs, it uses its own.
    sys.modules["megatron.core"] = None  # type: ignore[assignment]
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16
    )
    model.bfloat16()
    wrapped = fully_shard_model(
        model,
        fsdp_unit_modules=[Layer],
        zero_dp_strategy="optim_grads_params",
        mixed_precision_policy=policy,
    )
    return Setup(wrapped, fully_shard_optimizer(adamw(wrapped.parameters())))


def fsdp_v2(
    model: Decoder, mesh: DeviceMesh, *, strategy: str = "optim_grads_params", outer: str | None = None
) -> Setup:
    """Megatron-FSDP v2, this repository: fp32 main weights and gradients, bf16 compute and reductions.

    With an outer strategy all ranks lie along the outer of two axes.
    """
    from megatron.core.distributed.fsdp.experimental import (
        MixedPrecisionPolicy,
        Placements,
        fully_shard,
        fully_shard_context,
        fully_shard_optimizer,
    )

    policy = MixedPrecisionPolicy(torch.float32, grad_comm_dtype=torch.bfloat16)
    placements = Placements.from_strategy(strategy, outer=outer)
    if outer is not None:
        mesh = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("outer", "inner"))
    model.bfloat16()
    with fully_shard_context():
        for layer in model.layers:
            fully_shard(layer, mesh, placements, mixed_precision_policy=policy)
        fully_shard(model, mesh, placements, mixed_precision_policy=policy)
    return Setup(model, fully_shard_optimizer(adamw(model.parameters())))


RUNTIMES: dict[str, Callable[[Decoder, DeviceMesh], Setup]] = {
    recipe.__name__: recipe for recipe in (plain, plain_adamw, ddp, fsdp2, megatron_fsdp, fsdp_v2)
}
STRATEGIES: dict[str, Callable[[Decoder, DeviceMesh], Setup]] = {
    "fsdp_v2_no_shard": partial(fsdp_v2, strategy="no_shard"),
    "fsdp_v2_optim": partial(fsdp_v2, strategy="optim"),
    "fsdp_v2_optim_grads": partial(fsdp_v2, strategy="optim_grads"),
    "fsdp_v2_hsdp": partial(fsdp_v2, outer="no_shard"),
    "fsdp_v2_hfsdp": partial(fsdp_v2, outer="optim"),
}
"""Other strategies than ZeRO-3 of this repository, which are measured when they are asked for."""
OPTIONAL_MODULES = {"megatron_fsdp": "megatron_fsdp"}
"""The modules that runtimes need and a machine may lack."""
