# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares and checks the flags of FP8 and FP4, which TransformerEngine's layers compute in.

What a recipe means is TransformerEngine's affair; how weights are sharded, Megatron-FSDP v2's.
"""

import argparse
import importlib.util

from megatron.pretrain.values import integer, one_of

FP8_FLAGS = ("--fp8-recipe", "--fp8-param-gather")
DELAYED_FLAGS = (
    *("--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"),
    *("--no-fp8-wgrad", "--tp-only-amax-red"),
)
EDGE_FLAGS = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")

_index = integer(0)


def add_low_bit_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of FP8 and FP4."""
    add = parser.add_argument_group("FP8 and FP4, with TransformerEngine").add_argument
    add(
        "--fp8-format",
        type=one_of("e4m3", "hybrid"),
        help="linear layers compute in FP8: e4m3, or hybrid with gradients in e5m2",
    )
    add(
        "--fp8-recipe",
        type=one_of(*_RECIPES),
        default="delayed",
        help="what is scaled, and by which maxima: whole tensors by earlier ones (delayed) or their own (tensorwise), "
        "blocks of 128 (blockwise) or, on Blackwell, of 32 (mxfp8)",
    )
    add(
        "--fp8-param-gather",
        action="store_true",
        help="keep the linear layers' weights in FP8 beside the fp32 master weights, and gather that",
    )
    add("--fp8-margin", type=_index, default=0, help="powers of two that delayed scales stay below the maximum")
    add("--fp8-amax-history-len", type=integer(1), default=1, help="iterations whose maxima delayed scales follow from")
    add(
        "--fp8-amax-compute-algo",
        type=one_of("most_recent", "max"),
        default="most_recent",
        help="which of them: most_recent or max",
    )
    add("--no-fp8-wgrad", action="store_false", dest="fp8_wgrad", help="gradients of weights in higher precision")
    add("--tp-only-amax-red", action="store_true", help="share maxima between tensor-parallel ranks only")
    add("--first-last-layers-bf16", action="store_true", help="keep the first and last layers in bf16")
    for flag, which in zip(EDGE_FLAGS, ("first", "last"), strict=True):
        add(flag, type=_index, default=1, help=f"with it: how many of the {which}")
    add("--fp4-format", type=one_of("e2m1"), help="linear layers compute in FP4 (NVFP4, on Blackwell)")
    add("--fp4-param-gather", action="store_true", help="keep the linear layers' weights in FP4, and gather that")
    add(
        "--keep-fp8-transpose-cache",
        action="store_true",
        help="keep transposed FP8 weights until the next step: more memory, fewer transposes",
    )


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def computes_in_low_bits(args: argparse.Namespace) -> bool:
    """Whether linear layers compute in FP8 or FP4."""
    return args.fp8_format is not None or args.fp4_format is not None


def has_delayed_scales(args: argparse.Namespace) -> bool:
    """Whether scales follow from the maxima of earlier iterations."""
    return args.fp8_format is not None and args.fp8_recipe == "delayed"


def keeps_transposes(args: argparse.Namespace) -> bool:
    """Whether there are transposed weights that could be kept: the other formats have planes for both directions."""
    return bool(args.fp8_param_gather and args.fp8_recipe != "mxfp8")


def complete_low_bits(args: argparse.Namespace) -> None:
    """Check the flags of FP8 and FP4 against each other and against the host.

    Raises:
        ValueError: Two of them contradict each other.
        NotImplementedError: There is no TransformerEngine, or nothing of the kind was tried.
    """
    if not computes_in_low_bits(args):
        return
    flag, found = ("--fp8-format", args.fp8_format) if args.fp8_format else ("--fp4-format", args.fp4_format)
    if args.fp8_format and args.fp4_format:
        _fail("one of --fp8-format and --fp4-format", "both", flag, "Drop one of them")
    if args.transformer_impl == "local":
        _fail("TransformerEngine's layers", "--transformer-impl local", flag, "Drop one of the two")
    if not has_transformer_engine():
        raise NotImplementedError(
            "Low precision: expected TransformerEngine, whose layers compute in it, got a Python without it for "
            f"{flag} {found}. Install transformer-engine, or drop the flag."
        )
    if not args.bf16:
        raise NotImplementedError(
            f"Low precision: expected --bf16 beside it, got a run without it for {flag}. Add --bf16; nothing else was "
            "tried."
        )
    if args.first_last_layers_bf16:
        _check_edges(args)


def _check_edges(args: argparse.Namespace) -> None:
    if has_delayed_scales(args):
        _fail(
            "another recipe than delayed, whose maxima are shared after all layers",
            "--fp8-recipe delayed",
            "--first-last-layers-bf16",
            "Change one",
        )
    limit = args.num_layers // args.pipeline_model_parallel_size
    for flag in EDGE_FLAGS:
        count = getattr(args, flag[2:].replace("-", "_"))
        if count > limit:
            _fail(f"at most the {limit} layers of a stage", str(count), flag, "Lower it")


def check_low_bit_shapes(args: argparse.Namespace) -> None:
    """Check that all products have sizes that FP8 and FP4 kernels take; called when model and batch are complete.

    Raises:
        ValueError: One of them has not.
    """
    if not computes_in_low_bits(args):
        return
    multiple = 16 if args.fp8_format and args.fp8_recipe != "mxfp8" else 32
    ranks, heads = args.tensor_model_parallel_size, args.num_attention_heads
    cuts = args.context_parallel_size * (ranks if args.sequence_parallel else 1)
    sizes = {
        "--hidden-size": args.hidden_size,
        "--num-attention-heads": heads * args.kv_channels // ranks,
        "--kv-channels": (heads + 2 * args.num_query_groups) * args.kv_channels // ranks,
        "--micro-batch-size": args.micro_batch_size * args.seq_length // cuts,
    }
    if args.num_experts is None:
        sizes["--ffn-hidden-size"] = args.ffn_hidden_size // ranks
    else:
        sizes["--moe-ffn-hidden-size"] = args.moe_ffn_hidden_size // args.expert_tensor_parallel_size
    for flag, size in sizes.items():
        if size % multiple:
            what = "tokens" if flag == "--micro-batch-size" else "elements"
            _fail(f"a multiple of {multiple} {what} on each rank", str(size), flag, "Change it")


def low_bit_config(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of megatron-core's model config that say in which precision layers compute."""
    if not computes_in_low_bits(args):
        return {}
    if args.fp4_format is not None:
        return {"fp4": args.fp4_format, "fp4_param": args.fp4_param_gather}
    return {
        "fp8": args.fp8_format,
        "fp8_recipe": args.fp8_recipe,
        "fp8_param": args.fp8_param_gather,
        "fp8_margin": args.fp8_margin,
        "fp8_amax_history_len": args.fp8_amax_history_len,
        "fp8_amax_compute_algo": args.fp8_amax_compute_algo,
        "fp8_wgrad": args.fp8_wgrad,
        "tp_only_amax_red": args.tp_only_amax_red,
    }


def low_bit_gathers(args: argparse.Namespace) -> dict[str, bool]:
    """Return the fields of the data-parallel config of the same meaning, as far as they differ from its defaults."""
    fields = ("fp8_param_gather", "fp4_param_gather", "keep_fp8_transpose_cache")
    return {name: True for name in fields if getattr(args, name)}


def _fail(what: str, found: str, flag: str, cure: str) -> None:
    raise ValueError(f"Low precision: expected {what}, got {found} for {flag}. {cure}.")
