# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Communication runs beside compute, as seen in a profiler trace, and the host never waits.

The share is that of the time of NCCL's kernels during which a kernel of another kind runs on the same GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.distributed.fsdp.experimental import fully_shard, fully_shard_optimizer
from megatron.pretrain.profiling import ScheduleProfiler
from megatron.pretrain.timeline import ALL_GATHER, LANES, REDUCE_SCATTER, Exposure
from tests.gpu.checks import IS_DRY, Check
from tests.gpu.streams import synchronize
from tests.unit_tests.launch import DEVICE
from tests.unit_tests.models import Block

NUM_LAYERS = 12
WIDTH = 16 if IS_DRY else 2048
NUM_ROWS = 8 if IS_DRY else 16384
NUM_STEPS = 2
MIN_SHARE = 0.5
"""Of the 12 layers' collectives only the first gather and the last reduction have no compute beside them."""


class Layer(nn.Module):
    """A residual layer of aligned sizes, so that its matrix products are fast ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _recorded(step: Callable[[], None]) -> Exposure:
    """Return what communication costs in NUM_STEPS steps of this rank; all ranks begin each of them together."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = ScheduleProfiler(Path(folder), "overlap", skip=1, num_steps=NUM_STEPS, is_writer=True)
        for _ in range(1 + NUM_STEPS):
            # A rank that starts late would make the others' first gather last as long.
            dist.barrier()
            synchronize()
            with profiler.step():
                step()
    numbers = {lane: sum(len(recorded.lanes[lane]) for recorded in profiler.steps) for lane in LANES}
    # A gather in forward and one in backward, and a reduction.
    assert numbers[ALL_GATHER] >= 2 * NUM_LAYERS * NUM_STEPS, numbers
    assert numbers[REDUCE_SCATTER] >= NUM_LAYERS * NUM_STEPS, numbers
    assert profiler.exposure is not None
    return profiler.exposure


def communication_overlaps_compute() -> str:
    """At least half of the time of all gathers and reductions is hidden."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(NUM_LAYERS)]).to(DEVICE, torch.bfloat16)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    batch = torch.randn(NUM_ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()

    step()
    exposure = _recorded(step)
    share = 1 - exposure.communication.exposed_ms / exposure.communication.busy_ms
    measured = f"share {share:.2f}, at least {MIN_SHARE} ({exposure})"
    assert share > MIN_SHARE or IS_DRY, measured
    return measured


@contextmanager
def _synchronisation_raises() -> Iterator[None]:
    if IS_DRY:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def host_does_not_wait() -> str:
    """Synchronisation is an error in the third step."""
    model = nn.Sequential(*[Block(64) for _ in range(3)]).to(DEVICE)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    batch = torch.randn(4, 64, device=DEVICE)
    for step in range(3):
        with _synchronisation_raises() if step == 2 else nullcontext():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return "a step ran" if IS_DRY else "a step ran with synchronisation made an error"


CHECKS = [
    Check("communication_overlaps_compute", communication_overlaps_compute, min_ranks=2),
    Check("host_does_not_wait", host_does_not_wait),
]
