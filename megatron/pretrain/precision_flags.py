# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares and checks the flags of precision: dtypes, loss scaling, and the precision-aware optimizer.

What a loss scaler does with them is megatron-core's affair.
"""

import argparse
import importlib.util

from megatron.pretrain.values import above_zero, integer, one_of

DYNAMIC_SCALE_FLAGS = ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis")
MOMENT_FLAGS = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
_MOMENT_DTYPES = ("fp32", "bf16")

_count = integer(1)


def add_precision_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of precision."""
    add = parser.add_argument_group("precision").add_argument
    add("--bf16", action="store_true", help="weights and activations in bfloat16, fp32 master weights")
    add(
        "--fp16",
        action="store_true",
        help="weights, activations and gradients in float16, fp32 master weights; the loss is scaled",
    )
    add("--grad-reduce-in-bf16", action="store_true", help="accumulate and reduce gradients in bfloat16 too")
    add(
        "--accumulate-allreduce-grads-in-fp32",
        action="store_true",
        help="with --fp16: accumulate and reduce gradients in fp32, as is done without it",
    )
    add("--loss-scale", type=above_zero, help="constant factor on the loss; default with --fp16: a dynamic one")
    add("--initial-loss-scale", type=above_zero, default=2.0**32, help="dynamic loss scale at the start")
    add("--min-loss-scale", type=above_zero, default=1.0, help="lowest dynamic loss scale")
    add(
        "--loss-scale-window",
        type=_count,
        default=1000,
        help="iterations without an overflow until the dynamic loss scale doubles",
    )
    add("--hysteresis", type=_count, default=2, help="overflows until the dynamic loss scale halves")
    add(
        "--use-precision-aware-optimizer",
        action="store_true",
        help="Megatron-FSDP v2 with TransformerEngine: its fused Adam steps on gradients in their own dtype",
    )
    for flag, moment in zip(MOMENT_FLAGS, ("first", "second"), strict=True):
        add(
            flag,
            type=one_of(*_MOMENT_DTYPES),
            default="fp32",
            help=f"with it: dtype in which the {moment} moment is kept",
        )


def compute_dtype(args: argparse.Namespace) -> str:
    """Return the name of the dtype of weights and activations."""
    if args.fp16:
        return "fp16"
    return "bf16" if args.bf16 else "fp32"


def gradient_dtype(args: argparse.Namespace) -> str:
    """Return the name of the dtype in which gradients accumulate and are reduced, if nothing else is said of it."""
    if args.fp16 and not args.accumulate_allreduce_grads_in_fp32:
        return "fp16"
    return "bf16" if args.grad_reduce_in_bf16 else "fp32"


def has_dynamic_scale(args: argparse.Namespace) -> bool:
    """Whether overflows are a sign to lower the loss scale, and no error."""
    return bool(args.fp16 and args.loss_scale is None)


def complete_precision(args: argparse.Namespace) -> None:
    """Check the flags of precision, and fill in what follows from them.

    Raises:
        ValueError: Two of them contradict each other, or a dtype that loses what loss scaling has saved.
        NotImplementedError: A precision-aware optimizer where there is none.
    """
    if args.fp16 and args.bf16:
        _fail("Precision", "--fp16 or --bf16", "both", "--fp16", "Drop one of them")
    if args.min_loss_scale > args.initial_loss_scale:
        _fail(
            "Loss scale",
            f"at most --initial-loss-scale {args.initial_loss_scale:g}",
            f"{args.min_loss_scale:g}",
            "--min-loss-scale",
            "Lower it",
        )
    if has_dynamic_scale(args):
        args.check_for_nan_in_loss_and_grad = False
    if args.use_precision_aware_optimizer and importlib.util.find_spec("transformer_engine") is None:
        raise NotImplementedError(
            "Optimizer: expected TransformerEngine, whose fused Adam steps on gradients of another dtype than the "
            "weights', got a Python without it for --use-precision-aware-optimizer. Install transformer-engine, or "
            "drop the flag: --megatron-fsdp-main-grads-dtype and --megatron-fsdp-main-params-dtype do without."
        )


def check_fsdp_dtypes(args: argparse.Namespace) -> None:
    """Check Megatron-FSDP v2's dtypes against those of the model and of reductions.

    Raises:
        ValueError: Two of them contradict each other.
    """
    main_params, compute = args.megatron_fsdp_main_params_dtype, compute_dtype(args)
    # In float16 gradients would vanish once they are unscaled, and so would Adam's epsilon.
    allowed = {"fp32": ("fp32", "auto"), "bf16": ("fp32", "bf16", "auto"), "fp16": ("fp32",)}[compute]
    if main_params not in allowed:
        _fail(
            "Master weights",
            "fp32 with --fp16, in which unscaled gradients would vanish"
            if compute == "fp16"
            else f"one of {', '.join(allowed)} (no narrower than the {compute} of the model)",
            main_params,
            "--megatron-fsdp-main-params-dtype",
            "Drop the flag, or add --bf16" if compute == "fp32" else "Drop the flag",
        )
    main_grads, reduced = args.megatron_fsdp_main_grads_dtype, gradient_dtype(args)
    if reduced == "fp32" and main_grads not in ("fp32", "auto"):
        without, cure = "without --grad-reduce-in-bf16", "Drop the flag, or add --bf16 --grad-reduce-in-bf16"
        if compute == "bf16":
            cure = "Add --grad-reduce-in-bf16"
        elif compute == "fp16":
            without, cure = "with --accumulate-allreduce-grads-in-fp32", "Drop one of the two"
        _fail("Gradients", f"fp32 or auto {without}", main_grads, "--megatron-fsdp-main-grads-dtype", cure)
    if main_grads == "auto":
        main_grads = reduced
    sent = args.megatron_fsdp_grad_comm_dtype
    if main_grads != "fp32" and sent not in (main_grads, "auto"):
        _fail(
            "Gradients",
            f"{main_grads} or auto with gradients that accumulate in {main_grads}",
            sent,
            "--megatron-fsdp-grad-comm-dtype",
            "Drop the flag, or add --megatron-fsdp-main-grads-dtype fp32",
        )


def optimizer_dtypes(args: argparse.Namespace) -> dict[str, str]:
    """Return what a precision-aware optimizer is told: its dtypes by the names of megatron-core's fields."""
    named = {
        "main_params_dtype": (args.megatron_fsdp_main_params_dtype, compute_dtype(args)),
        "main_grads_dtype": (args.megatron_fsdp_main_grads_dtype, gradient_dtype(args)),
        "exp_avg_dtype": (args.exp_avg_dtype, "fp32"),
        "exp_avg_sq_dtype": (args.exp_avg_sq_dtype, "fp32"),
    }
    return {field: automatic if name == "auto" else name for field, (name, automatic) in named.items()}


def _fail(what: str, expected: str, found: str, flag: str, cure: str) -> None:
    raise ValueError(f"{what}: expected {expected}, got {found} for {flag}. {cure}.")
