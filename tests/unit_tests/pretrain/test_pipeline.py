# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""How layers and microbatches are divided over stages, and what stages hand to each other."""

import argparse
import re

import pytest

from megatron.core import parallel_state
from megatron.pretrain.arguments import parse_arguments
from megatron.pretrain.pipeline import num_chunks, num_layers_of_chunk
from megatron.pretrain.stages import iterators_of, seed_of_stage
from megatron.pretrain.validation import validate

STAGES = "--num-layers 8 --pipeline-model-parallel-size 2"
PER_CHUNK, CHUNKS = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"


def checked(line: str, world_size: int = 2) -> argparse.Namespace:
    args = parse_arguments(line.split())
    validate(args, world_size)
    return args


@pytest.mark.parametrize(
    ("line", "chunks", "layers"),
    [
        ("--num-layers 8", 1, 8),
        (STAGES, 1, 4),
        (f"{STAGES} {PER_CHUNK} 1 --global-batch-size 16", 4, 1),
        (f"{STAGES} {PER_CHUNK} 2 --global-batch-size 16", 2, 2),
        (f"{STAGES} {CHUNKS} 4 --global-batch-size 16", 4, 1),
    ],
)
def test_chunks_of_layers(line: str, chunks: int, layers: int) -> None:
    args = checked(line)
    assert (num_chunks(args), num_layers_of_chunk(args)) == (chunks, layers)
    assert args.virtual_pipeline_model_parallel_size == (None if chunks == 1 else chunks)


def test_stages_are_no_copies() -> None:
    assert checked(f"{STAGES} --micro-batch-size 3", world_size=6).global_batch_size == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-layers 5 --pipeline-model-parallel-size 2", "a multiple of --pipeline-model-parallel-size 2, got 5 for "
         "--num-layers"),
        (f"{STAGES} {PER_CHUNK} 3", f"a divisor of a rank's 4 layer(s), less than all of them, got 3 for {PER_CHUNK}"),
        (f"{STAGES} {PER_CHUNK} 4", f"a divisor of a rank's 4 layer(s), less than all of them, got 4 for {PER_CHUNK}"),
        (f"{STAGES} {CHUNKS} 3", f"a divisor of a rank's 4 layer(s), above 1, got 3 for {CHUNKS}"),
        (f"{STAGES} {CHUNKS} 1", f"a divisor of a rank's 4 layer(s), above 1, got 1 for {CHUNKS}"),
        (f"{STAGES} {CHUNKS} 2 {PER_CHUNK} 2", f"a number of layers or of chunks, got both for {CHUNKS}"),
        (f"{STAGES} {CHUNKS} 2 --micro-batch-size 2 --global-batch-size 6", "microbatches in a multiple of "
         "--pipeline-model-parallel-size 2, as ranks with several chunks need them, got 6 samples, 3 microbatch(es) a "
         "rank, for --global-batch-size"),
        (f"--num-layers 4 {CHUNKS} 2", f"--pipeline-model-parallel-size above 1, got a run without it for {CHUNKS}"),
        (f"{STAGES} --recompute-granularity full --recompute-method block --recompute-num-layers 5",
         "at most the 4 of a chunk, got 5 for --recompute-num-layers"),
        ("--pipeline-model-parallel-size 4", "a divisor of the 2 rank(s), got 4 for --pipeline-model-parallel-size 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"expected {message}")):
        checked(line)


def test_stages_are_not_captured() -> None:
    with pytest.raises(NotImplementedError, match=r"graph-impl none, .*, got full_iteration for --pipe"):
        checked(f"{STAGES} --use-megatron-fsdp-v2 --cuda-graph-impl full_iteration")


def test_chunks_see_the_same_microbatches() -> None:
    loaded = []

    def load() -> "object":
        for index in range(4):
            loaded.append(index)
            yield index

    data = load()
    first, second = iterators_of(data, 2)
    assert [next(first), next(first)] == [next(second), next(second)] == [0, 1]
    assert loaded == [0, 1], "each is loaded once"
    assert next(data) == 2, "the next iteration goes on from there"
    assert iterators_of(data, 1) is data


def test_neighbouring_stages_have_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    for stage in range(3):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        seeds.append(seed_of_stage(7))
    assert seeds == [7, 107, 207]
