# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Decides whether layers and microbatches can be divided over pipeline stages, and over several chunks a rank.

It looks at nothing but the arguments. What a stage computes is said in ``model.py``, what it hands on in ``stages.py``.
"""

import argparse


def complete_pipeline(args: argparse.Namespace) -> None:
    """Set how many chunks of the model each rank has: `virtual_pipeline_model_parallel_size`, None for a single one.

    Raises:
        ValueError: Layers cannot be divided so.
        NotImplementedError: The iteration is to be captured.
    """
    stages = args.pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = None
    if stages == 1:
        return
    if args.cuda_graph_impl != "none":
        raise NotImplementedError(
            "Pipeline parallelism: expected --cuda-graph-impl none, in which stages wait for each other, got "
            f"{args.cuda_graph_impl} for --pipeline-model-parallel-size {stages}. Drop one of them."
        )
    if args.num_layers % stages:
        _fail(f"a multiple of --pipeline-model-parallel-size {stages}", args.num_layers, "--num-layers")
    of_rank = args.num_layers // stages
    per_chunk, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if per_chunk is not None and chunks is not None:
        _fail("a number of layers or of chunks", "both", "--num-virtual-stages-per-pipeline-rank")
    if per_chunk is not None:
        if of_rank % per_chunk or per_chunk == of_rank:
            expected = f"a divisor of a rank's {of_rank} layer(s), less than all of them"
            _fail(expected, per_chunk, "--num-layers-per-virtual-pipeline-stage")
        chunks = of_rank // per_chunk
    elif chunks is not None and (of_rank % chunks or chunks == 1):
        _fail(f"a divisor of a rank's {of_rank} layer(s), above 1", chunks, "--num-virtual-stages-per-pipeline-rank")
    args.virtual_pipeline_model_parallel_size = chunks


def check_microbatches(args: argparse.Namespace, num_copies: int) -> None:
    """Check that the interleaved schedule can go round the stages; called when the batch is complete.

    Args:
        args: The arguments.
        num_copies: Data-parallel ranks.

    Raises:
        ValueError: It cannot.
    """
    if args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    count = args.global_batch_size // (args.micro_batch_size * num_copies)
    if count % stages:
        _fail(
            f"microbatches in a multiple of --pipeline-model-parallel-size {stages}, as ranks with several chunks "
            "need them",
            f"{args.global_batch_size} samples, {count} microbatch(es) a rank,",
            "--global-batch-size",
        )


def num_chunks(args: argparse.Namespace) -> int:
    """Return how many chunks of the model each rank has."""
    return args.virtual_pipeline_model_parallel_size or 1


def num_layers_of_chunk(args: argparse.Namespace) -> int:
    """Return how many layers each chunk has."""
    return int(args.num_layers) // (args.pipeline_model_parallel_size * num_chunks(args))


def _fail(expected: str, found: object, flag: str) -> None:
    raise ValueError(f"Pipeline parallelism: expected {expected}, got {found} for {flag}. Change one of them.")
