# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Decides whether model and ranks can be divided as the flags of parallelism say. Builds no groups."""

import argparse
import math


def data_parallel_size(args: argparse.Namespace, world_size: int) -> int:
    """Return how many copies of the model there are, counting each of its shards once.

    Raises:
        ValueError: The ranks cannot be divided so.
    """
    sizes = {
        "tensor-model": args.tensor_model_parallel_size,
        "pipeline-model": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
    }
    size = math.prod(sizes.values())
    if world_size % size:
        flags = " ".join(f"--{name}-parallel-size {value}" for name, value in sizes.items() if value > 1)
        raise ValueError(
            f"Parallelism: expected a divisor of the {world_size} rank(s), got {size} for {flags}. Change it or the "
            "number of ranks."
        )
    return world_size // size


def check_tensor_parallelism(args: argparse.Namespace) -> None:
    """Check that every layer can be shared; called when the model's sizes are complete.

    Raises:
        ValueError: A size cannot be divided.
    """
    size = args.tensor_model_parallel_size
    divided: dict[str, int] = {
        "--num-attention-heads": args.num_attention_heads,
        "--num-query-groups": args.num_query_groups,
        "--ffn-hidden-size": args.ffn_hidden_size,
    }
    if args.sequence_parallel:
        divided["--seq-length"] = args.seq_length // args.context_parallel_size
    for flag, value in divided.items():
        if value % size:
            raise ValueError(
                f"Tensor parallelism: expected a multiple of --tensor-model-parallel-size {size}, got {value} for "
                f"{flag}. Change one of them."
            )


def check_context_parallelism(args: argparse.Namespace) -> None:
    """Check that every sequence can be shared.

    Raises:
        ValueError: Its length cannot be divided, or tokens do not attend to all that come before them.
    """
    size = args.context_parallel_size
    if size == 1:
        return
    if args.seq_length % (2 * size):
        raise ValueError(
            f"Context parallelism: expected a multiple of {2 * size}, twice --context-parallel-size {size}, got "
            f"{args.seq_length} for --seq-length. Change one of them."
        )
    if args.eod_mask_loss and not args.calculate_per_token_loss:
        raise ValueError(
            "Context parallelism: expected --calculate-per-token-loss, since ranks have parts of a sequence with "
            f"different numbers of tokens in the loss, got --context-parallel-size {size} without it for "
            "--eod-mask-loss. Add it."
        )
    if args.reset_attention_mask:
        raise ValueError(
            f"Context parallelism: expected one causal mask, got --context-parallel-size {size} for "
            "--reset-attention-mask. Drop one of them."
        )
