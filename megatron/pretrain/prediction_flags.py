# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares the flags of layers that predict further tokens (MTP), and decides whether they fit the run.

It builds no layers: ``model.py`` does.
"""

import argparse

from megatron.pretrain.values import integer, number

PREDICTION_FLAGS = ("--mtp-loss-scaling-factor",)


def add_prediction_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them, in a group of their own."""
    add = parser.add_argument_group("multi-token prediction").add_argument
    add(
        "--mtp-num-layers",
        type=integer(1),
        help="layers after the model's, each of which predicts one token further ahead than the one before it",
    )
    add(
        "--mtp-loss-scaling-factor",
        type=number(0.0),
        default=0.1,
        help="weight of the mean loss of these layers beside the model's own",
    )


def prediction_config(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of megatron-core's config that describe these layers."""
    return {"mtp_num_layers": args.mtp_num_layers, "mtp_loss_scaling_factor": args.mtp_loss_scaling_factor}


def check_prediction(args: argparse.Namespace) -> None:
    """Check that the layers fit model and layout; called when both are complete.

    Raises:
        ValueError: A flag that they contradict.
    """
    count, flag = args.mtp_num_layers, "--mtp-num-layers"
    if count is None:
        return
    if args.position_embedding_type == "learned_absolute":
        # As Megatron-LM: the first position would stand for what lies beyond the sequence, too.
        cure = "Change the positions, or drop the layers"
        _fail("--position-embedding-type rope or none", "learned_absolute", flag, cure)
    if count >= args.seq_length // args.context_parallel_size:
        # Every depth loses a token; without any its loss is no number.
        _fail("fewer layers than a rank has tokens of a sequence", str(count), flag, "Lower it")
    if args.cuda_graph_impl != "none":
        _fail("--cuda-graph-impl none", args.cuda_graph_impl, flag, "Drop one of them")
    if args.recompute_granularity == "full" and args.recompute_method == "uniform" and args.recompute_num_layers > 1:
        found = str(args.recompute_num_layers)
        _fail("--recompute-num-layers 1 with --recompute-method uniform", found, flag, "Change one")


def _fail(expected: str, found: str, flag: str, cure: str) -> None:
    raise ValueError(f"Multi-token prediction: expected {expected}, got {found} for {flag}. {cure}.")
