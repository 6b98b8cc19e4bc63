# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Decides whether model and ranks can be divided as the flags of parallelism say. Builds no groups."""

import argparse


def data_parallel_size(args: argparse.Namespace, world_size: int) -> int:
    """Return how many copies of the model there are, counting each of its shards once.

    Raises:
        ValueError: The ranks cannot be divided so.
    """
    size = args.tensor_model_parallel_size
    if world_size % size:
        raise ValueError(
            f"Tensor parallelism: expected a divisor of the {world_size} rank(s), got {size} for "
            "--tensor-model-parallel-size. Change it or the number of ranks."
        )
    return world_size // size


def check_tensor_parallelism(args: argparse.Namespace) -> None:
    """Check that every layer can be shared; called when the model's sizes are complete.

    Raises:
        ValueError: A size cannot be divided.
    """
    size = args.tensor_model_parallel_size
    divided = {
        "--num-attention-heads": args.num_attention_heads,
        "--num-query-groups": args.num_query_groups,
        "--ffn-hidden-size": args.ffn_hidden_size,
    }
    if args.sequence_parallel:
        divided["--seq-length"] = args.seq_length
    for flag, value in divided.items():
        if value % size:
            raise ValueError(
                f"Tensor parallelism: expected a multiple of --tensor-model-parallel-size {size}, got {value} for "
                f"{flag}. Change one of them."
            )
