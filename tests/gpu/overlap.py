# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Communication runs beside compute, as seen in a profiler trace, and the host never waits.

The share is that of the time of NCCL's kernels during which a kernel of another kind runs on the same GPU.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from megatron.core.distributed.fsdp.experimental import fully_shard, fully_shard_optimizer
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

KERNEL_CATEGORY = "cpu_op" if IS_DRY else "kernel"
COMMUNICATION = "c10d::" if IS_DRY else "nccl"
BARRIER = ("barrier", "AllReduce")

Interval = tuple[float, float]


class Layer(nn.Module):
    """A residual layer of aligned sizes, so that its matrix products are fast ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches of time without overlaps, in order. [(0, 2), (5, 6), (1, 3)] is [(0, 3), (5, 6)]."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def share_within(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return which part of the time in `intervals` lies in `others`, too; [(2, 6)] within [(0, 3), (5, 9)]: 0.5."""
    ours, theirs = union(intervals), union(others)
    common = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in ours for begin, stop in theirs)
    return common / sum(end - start for start, end in ours)


def _trace_of(step: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the kernels, or the host's operations, of NUM_STEPS steps that all ranks begin together."""
    activities = [ProfilerActivity.CPU] if IS_DRY else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=NUM_STEPS, repeat=1),
            on_trace_ready=lambda profiled: profiled.export_chrome_trace(str(path)),
        ) as profiled:
            for _ in range(1 + NUM_STEPS):
                # A rank that starts late would make the others' first gather last as long.
                dist.barrier()
                step()
                synchronize()
                profiled.step()
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and event.get("cat") == KERNEL_CATEGORY]


def communication_overlaps_compute() -> str:
    """At least half of the time of all gathers and reductions is hidden."""
    assert share_within([(2, 6)], [(5, 9), (0, 3)]) == 0.5
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
    kernels: dict[str, list[Interval]] = defaultdict(list)
    compute: list[Interval] = []
    for event in _trace_of(step):
        if not any(word in event["name"] for word in BARRIER):
            intervals = kernels[event["name"]] if COMMUNICATION in event["name"] else compute
            intervals.append((event["ts"], event["ts"] + event["dur"]))
    communication = [interval for intervals in kernels.values() for interval in intervals]
    # A gather in forward, one in backward and a reduction.
    assert len(communication) >= 3 * NUM_LAYERS * NUM_STEPS, {name: len(found) for name, found in kernels.items()}
    share = share_within(communication, compute)
    details = [f"{len(found)} {name} {share_within(found, compute):.2f}" for name, found in kernels.items()]
    measured = f"share {share:.2f}, at least {MIN_SHARE} ({', '.join(details)})"
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
