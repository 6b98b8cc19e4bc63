# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of megatron-core's training loop for Megatron-FSDP v2: flags, what they mean, and which are refused."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as _StockConfig,
)

from megatron.core.distributed.fsdp.mcore_fsdp_v2_config import (
    DistributedDataParallelConfig,
    check_ddp_config,
    check_model_config,
    check_overlap,
    check_pipeline,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_experts import check_expert_strategies
from megatron.core.distributed.fsdp.megatron_training import Seam
from megatron.core.optimizer.fully_sharded_optimizer_config import check_config, check_optimizer
from megatron.core.optimizer.fully_sharded_optimizer_muon import check_muon

FORMAT = "fsdp_dtensor"
_FLAGS = {
    "--expert-data-parallel-sharding-strategy": "expert_data_parallel_sharding_strategy",
    "--expert-outer-dp-sharding-strategy": "expert_outer_dp_sharding_strategy",
    "--megatron-fsdp-static-gradients": "megatron_fsdp_static_gradients",
    "--fsdp-trace-pool": "megatron_fsdp_trace_pool",
    "--megatron-fsdp-min-unit-numel": "megatron_fsdp_min_unit_numel",
}
"""Flags of FSDP v2 alone, and the fields of its config that they set."""

MUON_FLAGS = {"--muon-split-gate-up": "muon_split_gate_up", "--muon-router-adam": "muon_router_adam"}
"""Flags of FSDP v2's Muon alone, and the fields of its config that they set; the loop has the others."""

_REFUSED: dict[str, tuple[Any, str]] = {
    "use_megatron_fsdp": (False, "--use-megatron-fsdp"),
    "use_torch_fsdp2": (False, "--use-torch-fsdp2"),
    "data_parallel_random_init": (False, "--data-parallel-random-init"),
    "init_model_with_meta_device": (False, "--init-model-with-meta-device"),
    "overlap_param_gather_with_optimizer_step": (False, "--overlap-param-gather-with-optimizer-step"),
    "async_save": (False, "--async-save"),
    "non_persistent_save_interval": (None, "--non-persistent-save-interval"),
    "ckpt_convert_format": (None, "--ckpt-convert-format"),
    "dump_param_to_param_group_map": (None, "--dump-param-to-param-group-map"),
    "save_params_interval": (None, "--save-params-interval"),
    "save_wgrads_interval": (None, "--save-wgrads-interval"),
    "check_weight_hash_across_dp_replicas_interval": (None, "--check-weight-hash-across-dp-replicas-interval"),
    "moe_use_upcycling": (False, "--moe-use-upcycling"),
    "qk_clip": (False, "--qk-clip"),
    "perform_rl_step": (False, "--perform-rl-step"),
    "skip_train": (False, "--skip-train"),
}
"""Arguments that read or replace whole parameters, or that have not been tried: their value without the flag."""

_FORCED = ("fsdp_manual_registration", "fsdp_double_buffer")
"""What the loop turns on beside --use-nccl-ub, for buffers that FSDP v2 does not have."""

_NOT_OURS = {
    "use_megatron_fsdp": False,
    "use_custom_fsdp": False,
    "megatron_fsdp_use_decoupled_grad": False,  # follows from the optimizer
    "align_param_gather": False,  # units gather when they run, whatever other stages do
}
"""Fields of the config that the loop sets for itself."""


def seams(prepared: Callable[[], None]) -> tuple[Seam, ...]:
    """Return the seams of the arguments.

    Args:
        prepared: called when valid arguments ask for FSDP v2.
    """

    def validating(stock: Any) -> Any:
        @functools.wraps(stock)
        def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Any:
            defaults = {} if defaults is None else defaults
            if not hasattr(args, "use_megatron_fsdp_v2"):
                raise RuntimeError(
                    "enable_megatron_fsdp_v2: expected a call before arguments are parsed, got arguments that were "
                    "parsed before it. Make it the first line of the script."
                )
            if not args.use_megatron_fsdp_v2:
                _check_unused(args)
                return stock(args, defaults)
            found = _validate(stock, args, defaults)
            prepared()
            return found

        return validate_args

    return (
        Seam("arguments", "add_megatron_arguments", _declaring, ("parser",)),
        Seam("arguments", "validate_args", validating, ("args", "defaults")),
    )


def _declaring(stock: Any) -> Any:
    @functools.wraps(stock)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = stock(parser)
        add = parser.add_argument_group("Megatron-FSDP v2").add_argument
        add("--use-megatron-fsdp-v2", action="store_true", help="shard the model with Megatron-FSDP v2")
        add(
            "--expert-data-parallel-sharding-strategy",
            help="what is sharded of experts that ranks share, if another than --data-parallel-sharding-strategy says",
        )
        add(
            "--expert-outer-dp-sharding-strategy",
            help="the same for --outer-dp-sharding-strategy",
        )
        add(
            "--megatron-fsdp-static-gradients",
            action="store_true",
            help="keep the memory of gradients between steps, so that their addresses do not change",
        )
        add(
            "--fsdp-trace-pool",
            action="store_true",
            dest="megatron_fsdp_trace_pool",
            help="plan fixed places for gathered weights and packed gradients from the first iteration",
        )
        add(
            "--megatron-fsdp-min-unit-numel",
            type=int,
            default=0,
            help="join neighbouring layers until they have so many parameters",
        )
        add(
            "--muon-split-gate-up",
            action="store_true",
            help="with --optimizer muon: orthogonalise the two matrices of a gated MLP's first layer one by one",
        )
        add(
            "--muon-router-adam",
            action="store_true",
            help="with --optimizer muon: leave the routers of experts to Adam",
        )
        return parser

    return add_megatron_arguments


def _check_unused(args: argparse.Namespace) -> None:
    given = [flag for flag, name in {**_FLAGS, **MUON_FLAGS}.items() if getattr(args, name)]
    if given:
        raise ValueError(
            f"Flag without effect: expected --use-megatron-fsdp-v2, got a run without it for {given}. Add it, or drop "
            "them."
        )


def _validate(stock: Any, args: argparse.Namespace, defaults: dict[str, Any]) -> Any:
    """Check the arguments, let the loop do so as for its own FSDP, and check what came out.

    Raises:
        NotImplementedError: one that FSDP v2 does not support, or that would have no effect.
        ValueError: some contradict each other.
    """
    for name, (default, flag) in _REFUSED.items():
        if getattr(args, name) != default:
            raise NotImplementedError(
                f"{flag}: expected it off with --use-megatron-fsdp-v2, got {getattr(args, name)!r}; they do not work "
                "together. Drop one of the two."
            )
    if args.ckpt_format != FORMAT and _is_given("--ckpt-format"):
        raise NotImplementedError(
            f"--ckpt-format: expected {FORMAT} with --use-megatron-fsdp-v2, got {args.ckpt_format}; the loop has no "
            "other for sharded models. Drop it."
        )
    check_optimizer(args.optimizer)
    if args.optimizer != "muon" and (given := [flag for flag, name in MUON_FLAGS.items() if getattr(args, name)]):
        raise ValueError(
            f"Flag without effect: expected --optimizer muon, got a run without it for {given}. Add it, or drop them."
        )
    asked = {name: getattr(args, name) for name in _FORCED}
    if args.optimizer == "muon":
        # The loop's own Muon is none for sharded models, which it says of its own FSDP; ours takes what Adam does.
        asked["optimizer"], args.optimizer = args.optimizer, "adam"
    # The loop takes our wrapper for its own, at all the places where a sharded model differs.
    args.use_megatron_fsdp = True
    args.ckpt_format = FORMAT
    args.overlap_grad_reduce = args.overlap_param_gather = True
    args = stock(args, defaults)
    for name, value in asked.items():
        setattr(args, name, value)
    _check_layout(args)
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.training import get_megatron_optimizer_config

    config = core_transformer_config_from_args(args)
    check_model_config(config)
    check_pipeline(config)
    check_ddp_config(ddp_config(args))
    check_expert_strategies(ddp_config(args), config)
    check_overlap(config, ddp_config(args))
    optimizer_config = get_megatron_optimizer_config(args)[0]
    check_muon(optimizer_config)
    check_config(optimizer_config)
    return args


def _check_layout(args: argparse.Namespace) -> None:
    if args.log_params_norm and max(args.pipeline_model_parallel_size, args.expert_model_parallel_size) > 1:
        raise NotImplementedError(
            "--log-params-norm: expected no pipeline stages and no expert parallelism with --use-megatron-fsdp-v2, got "
            f"{args.pipeline_model_parallel_size} and {args.expert_model_parallel_size}; the loop would log the norm "
            "of a part of the model. Drop it."
        )
    if (args.save or args.load) and args.virtual_pipeline_model_parallel_size is not None:
        raise NotImplementedError(
            "--save and --load: expected one chunk of the model on each stage with --use-megatron-fsdp-v2, got "
            f"{args.virtual_pipeline_model_parallel_size}; the loop loads one. Drop "
            "--num-layers-per-virtual-pipeline-stage or what else makes several, or train with pretrain_gpt.py."
        )


def _is_given(flag: str) -> bool:
    # As the loop's own parser, which takes no abbreviations.
    return any(word.partition("=")[0] == flag for word in sys.argv[1:])


def ddp_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """Return the data-parallel config that validated arguments mean."""
    from megatron.training.training import get_megatron_ddp_config

    stock = get_megatron_ddp_config(args)
    return DistributedDataParallelConfig(
        **({field.name: getattr(stock, field.name) for field in fields(_StockConfig)} | _NOT_OURS),
        use_megatron_fsdp_v2=True,
        megatron_fsdp_create_all_gather_group=args.create_all_gather_group,
        **{name: getattr(args, name) for name in _FLAGS.values()},
    )
