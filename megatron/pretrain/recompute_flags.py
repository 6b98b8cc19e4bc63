# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares the flags that trade activation memory for computation, and decides whether they fit the model.

megatron-core's layers do the recomputing; nothing is sharded or gathered here.
"""

import argparse

from megatron.pretrain.pipeline import num_layers_of_chunk
from megatron.pretrain.values import integer, one_of

CORE_ATTENTION = "core_attn"
_REFUSED = {
    # Its class asks TransformerEngine for the state of FP8 in any case, whose dense layers have no norms of their own.
    "layernorm": "megatron-core recomputes norms with TransformerEngine only, where they are parts of other kernels",
    "moe_act": "it belongs to experts in grouped products, which this script does not offer",
    "shared_experts": "it belongs to experts that every token goes to, which this script does not offer",
    "mla_up_proj": "it belongs to multi-latent attention, which this script does not offer",
    "gdn_norm_out": "it belongs to gated delta nets, which this script does not offer",
}
"""Megatron-LM's modules that cannot be recomputed here, and why."""
MODULES = (CORE_ATTENTION, "mlp", "moe")
FULL_RECOMPUTE_FLAGS = ("--recompute-method", "--recompute-num-layers", "--distribute-saved-activations")
SELECTIVE_RECOMPUTE_FLAGS = ("--recompute-modules",)


def add_recompute_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them, in a group of their own."""
    add = parser.add_argument_group("activation recompute").add_argument
    add(
        "--recompute-granularity",
        type=one_of("full", "selective"),
        help="what backward computes anew instead of keeping it: whole layers, or the parts in --recompute-modules",
    )
    add("--recompute-activations", action="store_true", help="the same as --recompute-granularity selective")
    add(
        "--recompute-modules",
        nargs="+",
        type=one_of(*MODULES, *_REFUSED),
        help=f"with selective: which parts of a layer, of {', '.join(MODULES)}; default {CORE_ATTENTION}",
    )
    add("--recompute-method", type=one_of("uniform", "block"), help="with full: chunks of layers, or the first layers")
    add(
        "--recompute-num-layers",
        type=integer(1),
        help="with full: layers per chunk, or how many of the first layers; default 1",
    )
    add(
        "--distribute-saved-activations",
        action="store_true",
        help="with full: each tensor-parallel rank keeps a part of what the others keep, too, and gathers it to "
        "recompute",
    )


def recompute_config(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of megatron-core's config that say what is recomputed."""
    return {
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
        "recompute_modules": args.recompute_modules,
        "distribute_saved_activations": args.distribute_saved_activations,
    }


def choose_granularity(args: argparse.Namespace) -> None:
    """Turn --recompute-activations into the granularity that it stands for; called before all other checks.

    Raises:
        ValueError: both are given.
    """
    if not args.recompute_activations:
        return
    if args.recompute_granularity is not None:
        found = f"--recompute-granularity {args.recompute_granularity}"
        _fail("--recompute-activations or --recompute-granularity", found, "--recompute-activations", "Drop one")
    args.recompute_granularity = "selective"


def complete_recompute(args: argparse.Namespace) -> None:
    """Check that the model has what is to be recomputed, and fill in what follows from others.

    Raises:
        ValueError: Layers, modules or ranks that the run does not have, or a mode that saves nothing.
    """
    if args.recompute_granularity is None:
        return
    if args.cuda_graph_impl != "none" and args.hidden_dropout + args.attention_dropout > 0:
        # In a graph megatron-core keeps the generators themselves, which have gone on by the time of the backward.
        found = f"--cuda-graph-impl {args.cuda_graph_impl} with dropout"
        cure = "Write --hidden-dropout 0 --attention-dropout 0, or drop one of the two"
        _fail("no dropout in a graph, where it would be drawn anew", found, "--recompute-granularity", cure)
    if args.recompute_granularity == "full":
        _complete_full(args)
    else:
        _complete_selective(args)


def check_layers_for_recompute(args: argparse.Namespace) -> None:
    """Check what depends on the kind of layers; called when that is known, before ranks meet.

    Raises:
        ValueError: TransformerEngine's attention would be recomputed with other dropout than in forward.
    """
    draws_twice = args.sequence_parallel and args.hidden_dropout > 0 and args.attention_dropout > 0
    draws_again = args.recompute_granularity == "full" or CORE_ATTENTION in (args.recompute_modules or ())
    if args.transformer_impl == "transformer_engine" and draws_twice and draws_again:
        # megatron-core forks its generator around all layers, and its attention once more inside of that: where a
        # layer is recomputed the outer fork is over, and the inner one begins with another state.
        _fail(
            "--transformer-impl local, or no dropout, where attention is recomputed with --sequence-parallel",
            "transformer_engine",
            "--transformer-impl",
            "Write --attention-dropout 0 or --hidden-dropout 0",
        )


def _complete_full(args: argparse.Namespace) -> None:
    if args.recompute_method is None:
        _fail("uniform or block", "none", "--recompute-method", "Add it")
    if args.recompute_num_layers is None:
        args.recompute_num_layers = 1
    of_chunk = num_layers_of_chunk(args)
    limit = f"the {of_chunk} of a chunk" if args.pipeline_model_parallel_size > 1 else f"--num-layers {of_chunk}"
    found, flag = str(args.recompute_num_layers), "--recompute-num-layers"
    if args.recompute_num_layers > of_chunk:
        _fail(f"at most {limit}", found, flag, "Lower it")
    if args.recompute_method == "uniform" and of_chunk % args.recompute_num_layers:
        # megatron-core 0.16 looks for layers that the last chunk lacks.
        _fail(f"a divisor of {limit} with --recompute-method uniform", found, flag, "Change it, or write block")
    if not args.distribute_saved_activations:
        return
    flag = "--distribute-saved-activations"
    if args.tensor_model_parallel_size == 1:
        _fail("--tensor-model-parallel-size above 1", "1", flag, "Raise it, or drop the flag")
    if args.sequence_parallel:
        cure = "Drop one"
        _fail("activations that are whole on every rank", "--sequence-parallel, which cuts them already", flag, cure)


def _complete_selective(args: argparse.Namespace) -> None:
    if args.recompute_modules is None:
        args.recompute_modules = [CORE_ATTENTION]
    flag = "--recompute-modules"
    for name in args.recompute_modules:
        if args.recompute_modules.count(name) > 1:
            _fail("each module once", name, flag, "Drop one")
        if name in _REFUSED:
            _fail(f"one of {', '.join(MODULES)} ({_REFUSED[name]})", name, flag, "Drop it")
    if "moe" in args.recompute_modules and args.num_experts is None:
        _fail("modules of the model's layers", "moe without --num-experts", flag, "Write mlp")
    if "mlp" not in args.recompute_modules:
        return
    if args.num_experts is not None:
        _fail("modules of the model's layers", "mlp with --num-experts, which replaces it", flag, "Write moe")
    if not args.disable_bias_linear:
        # Its bias leaves the recomputed part as it came in, and megatron-core's backward then never ends.
        _fail("a model without biases for mlp", "one with biases", flag, "Add --disable-bias-linear, or drop mlp")


def _fail(expected: str, found: str, flag: str, cure: str) -> None:
    raise ValueError(f"Recompute: expected {expected}, got {found} for {flag}. {cure}.")
