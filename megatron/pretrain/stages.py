# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline hand to each other besides activations, which megatron-core's schedules send.

It builds no model and runs no schedule.
"""

from collections.abc import Iterator, Sequence
from itertools import tee
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state

SEED_OF_STAGE = 100
"""How far apart the seeds of neighbouring stages are, as in Megatron-LM."""


def seed_of_stage(seed: int) -> int:
    """Return the seed of this rank's stage, so that stages draw different weights and dropout masks."""
    return seed + SEED_OF_STAGE * parallel_state.get_pipeline_model_parallel_rank()


def iterators_of(data: Iterator[Any], num_chunks: int) -> Any:
    """Return what a schedule takes as data: an iterator for each of several chunks, of the same microbatches.

    Chunks come to a microbatch at different times; each batch is loaded once and kept for the last of them. All must
    take the same number, so that `data` goes on from there.
    """
    return data if num_chunks == 1 else list(tee(data, num_chunks))


def losses_on_every_stage(losses: Sequence[torch.Tensor], num_microbatches: int) -> torch.Tensor:
    """Return what the last stage knows about each microbatch; every rank of a pipeline calls it.

    Args:
        losses: [2] float32 for each microbatch, on the last stage; nothing elsewhere.
        num_microbatches: How many there are.

    Returns:
        [microbatches, 2].
    """
    device = torch.cuda.current_device()
    return from_last_stage(torch.stack(list(losses)) if losses else torch.empty(num_microbatches, 2, device=device))


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Return the last stage's values, in place, on all ranks of its pipeline, which all call it."""
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(values, src=dist.get_process_group_ranks(group)[-1], group=group)
    return values
