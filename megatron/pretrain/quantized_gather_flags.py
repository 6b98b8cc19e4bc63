# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares and checks the flags of weights that are gathered in a low-bit format.

What a format is, and which weights are quantized, is Megatron-FSDP v2's affair.
"""

import argparse
from typing import Any

from megatron.pretrain.values import one_of

FORMATS = ("fp8", "mxfp8", "nvfp4")
QUANTIZED_GATHER_FLAGS = (
    "--quantized-gather-rounding",
    "--quantized-gather-scaling",
)


def add_quantized_gather_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of low-bit weights."""
    add = parser.add_argument_group("low-bit weights").add_argument
    add(
        "--quantized-gather",
        type=one_of(*FORMATS),
        help="Megatron-FSDP v2: keep and gather the matrices of layers in this format; they are computed with in the "
        "dtype of the model",
    )
    add(
        "--quantized-gather-rounding",
        type=one_of("nearest", "stochastic"),
        default="nearest",
        help="how a weight becomes one of the format's values; stochastic is seeded by --seed",
    )
    add(
        "--quantized-gather-scaling",
        type=one_of("tensor", "row", "block"),
        default="tensor",
        help="with fp8: what shares a scale; a block has 128 x 128 elements",
    )


def check_quantized_gather_flags(args: argparse.Namespace) -> None:
    """Check the flags of quantized gathers against others.

    Raises:
        ValueError: No layer would be quantized, or weights are low-bit ones already.
    """
    if args.quantized_gather is None:
        return
    if args.fp8_param_gather or args.fp4_param_gather:
        raise ValueError(
            f"Low-bit weights: expected no --fp8-param-gather or --fp4-param-gather, whose weights travel in their own "
            f"format, got one for --quantized-gather {args.quantized_gather}. Drop one of the two."
        )
    kept = args.num_layers_at_start_in_bf16 + args.num_layers_at_end_in_bf16
    if args.first_last_layers_bf16 and kept >= args.num_layers:
        raise ValueError(
            f"Low-bit weights: expected fewer than the {args.num_layers} layers kept in the model's dtype, got {kept} "
            "for --first-last-layers-bf16. Lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or drop "
            "the flag."
        )


def quantization_recipe(args: argparse.Namespace) -> Any:
    """Return the recipe that the flags mean; None without low-bit weights."""
    if args.quantized_gather is None:
        return None
    from megatron.core.distributed.fsdp.mcore_fsdp_v2_precision import QUANTIZED_GATHERS

    options: dict[str, Any] = {"rounding": args.quantized_gather_rounding}
    if args.quantized_gather_rounding == "stochastic":
        options["seed"] = args.seed
    if args.quantized_gather == "fp8":
        options["scaling"] = args.quantized_gather_scaling
    return QUANTIZED_GATHERS[args.quantized_gather](**options)
