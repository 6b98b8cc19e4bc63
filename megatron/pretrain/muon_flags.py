# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares and checks the flags of Muon, by the names that they have in Megatron-LM, old and new.

What Muon computes, and which parameters are matrices, is Megatron-FSDP v2's affair.
"""

import argparse
from dataclasses import fields
from typing import Any

from megatron.pretrain.values import above_zero, decay, integer, one_of

OPTIMIZERS = ("adam", "sgd", "muon")
NESTEROV_FLAGS = ("--muon-nesterov", "--muon-use-nesterov")
"""The flag's names in newer and in older releases of Megatron-LM."""
MUON_FLAGS = (
    *("--muon-momentum", *NESTEROV_FLAGS, "--muon-no-split-qkv", "--muon-split-gate-up", "--muon-router-adam"),
    *("--muon-scale-mode", "--muon-extra-scale-factor", "--muon-num-ns-steps", "--muon-coefficient-type"),
    *("--muon-fp32-matmul-prec", "--muon-tp-mode"),
)
_FIELDS = (
    *("muon_momentum", "muon_split_qkv", "muon_split_gate_up", "muon_router_adam", "muon_scale_mode"),
    *("muon_extra_scale_factor", "muon_num_ns_steps", "muon_coefficient_type", "muon_fp32_matmul_prec", "muon_tp_mode"),
)


def optimizer_name(word: str) -> str:
    """Convert the name of an optimizer."""
    if word == "dist_muon":
        raise argparse.ArgumentTypeError(
            "expected muon, which shards what it keeps and computes each matrix on one rank, got 'dist_muon'"
        )
    return one_of(*OPTIMIZERS)(word)


def add_muon_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of Muon."""
    add = parser.add_argument_group("Muon, with Megatron-FSDP v2").add_argument
    add("--muon-momentum", type=decay, default=0.9, help="share of the old momentum that a step keeps")
    add(
        *NESTEROV_FLAGS,
        action="store_true",
        dest="muon_nesterov",
        help="orthogonalise the gradient moved towards the momentum, not the momentum",
    )
    add(
        "--muon-no-split-qkv",
        action="store_false",
        dest="muon_split_qkv",
        help="orthogonalise queries, keys and values as one matrix",
    )
    add(
        "--muon-split-gate-up",
        action="store_true",
        help="orthogonalise the two matrices of --swiglu's first layer one by one",
    )
    add("--muon-router-adam", action="store_true", help="leave the routers of experts to Adam")
    add(
        "--muon-scale-mode",
        type=one_of("spectral", "unit_rms_norm", "shape_scaling"),
        default="spectral",
        help="what an update of a matrix is multiplied by, from its shape",
    )
    add("--muon-extra-scale-factor", type=above_zero, default=1.0, help="what it is multiplied by besides")
    add("--muon-num-ns-steps", type=integer(1, 99), default=5, help="Newton-Schulz steps")
    add(
        "--muon-coefficient-type",
        type=one_of("simple", "quintic", "polar_express"),
        default="quintic",
        help="coefficients of these steps",
    )
    add(
        "--muon-fp32-matmul-prec",
        type=one_of("medium", "high", "highest"),
        default="medium",
        help="their products: medium in bfloat16, high in TF32, highest in float32",
    )
    add(
        "--muon-tp-mode",
        type=one_of("blockwise", "duplicated", "distributed"),
        default="blockwise",
        help="what tensor parallelism has cut is orthogonalised piece by piece (blockwise) or as a whole, each matrix "
        "by one rank (duplicated)",
    )


def check_muon_flags(args: argparse.Namespace) -> None:
    """Check that there is a Muon for the run.

    Raises:
        ValueError: There is none.
        NotImplementedError: It does not do what is asked.
    """
    if args.optimizer != "muon":
        return
    if not args.use_megatron_fsdp_v2:
        raise ValueError(
            "Optimizer: expected --use-megatron-fsdp-v2, whose Muon this script trains with, got a run without it for "
            "--optimizer muon. Add it; with megatron-core's DDP Muon needs the package emerging_optimizers and was not "
            "tried."
        )
    if args.fp16:
        raise NotImplementedError(
            "Optimizer: expected --bf16 or fp32 with Muon, as in megatron-core, got --fp16 for --optimizer muon. Drop "
            "one of the two."
        )
    if args.muon_tp_mode == "distributed":
        raise NotImplementedError(
            "Optimizer: expected blockwise or duplicated, got distributed for --muon-tp-mode. Write duplicated: each "
            "whole matrix is computed once, by one rank, so that nothing is done twice."
        )


def uses_tensor_parallelism(args: argparse.Namespace) -> bool:
    """Whether layers, or experts, are cut by tensor parallelism."""
    return bool(args.tensor_model_parallel_size > 1 or (args.expert_tensor_parallel_size or 1) > 1)


def muon_fields(args: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """Return the fields of an optimizer config that Muon's flags set; none with another optimizer.

    Args:
        args: Validated arguments.
        config: Its class, whose fields have other names in older releases of megatron-core.
    """
    if args.optimizer != "muon":
        return {}
    known = {field.name for field in fields(config)}
    nesterov = "muon_nesterov" if "muon_nesterov" in known else "muon_use_nesterov"
    return {**{name: getattr(args, name) for name in _FIELDS}, nesterov: args.muon_nesterov}
