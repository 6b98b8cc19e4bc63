# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Records some steps of one rank with torch's profiler, and leaves their trace and their timeline in a folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megatron.pretrain.timeline import STEP_PREFIX, Exposure, Step, measure, read_steps
from megatron.pretrain.timeline_page import draw_picture, write_page


class ScheduleProfiler:
    """Records steps; other ranks, and steps before and after, run as without it.

    A step that is recorded ends when the device is done, so that all of its work is seen as its own.

    Args:
        folder: Where ``NAME.json.gz`` (for chrome://tracing or Perfetto), ``NAME.png`` and ``NAME.html`` are written.
        name: Of the files.
        skip: Number of steps before the first one that is recorded, at least 1: the profiler warms up in the last.
        num_steps: How many are recorded.
        is_writer: Whether this rank records; for the others this object does nothing.
    """

    def __init__(self, folder: Path, name: str, *, skip: int, num_steps: int, is_writer: bool) -> None:
        self.exposure: Exposure | None = None
        self.steps: list[Step] = []
        self._path = folder / name
        self._skip = skip
        self._num_done = 0
        self._profiler: profile | None = None
        if is_writer:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(
                activities=activities,
                schedule=schedule(wait=skip - 1, warmup=1, active=num_steps, repeat=1),
                on_trace_ready=self._write,
            )
            self._profiler.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step."""
        if self._profiler is None:
            yield
            return
        self._wait_for_device()
        with record_function(f"{STEP_PREFIX}{self._num_done + 1}"):
            yield
            self._wait_for_device()
        self._num_done += 1
        self._profiler.step()
        if self.exposure is not None:
            self.close()

    def close(self) -> None:
        """End the recording; a run that ends early leaves the steps that it has come to."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def report(self) -> str:
        """Return, after the recording, how much communication is exposed and where to see it."""
        if self.exposure is None:
            return f"Schedule: nothing was recorded, the run ended after {self._num_done} step(s)"
        return f"Schedule: {self.exposure}\nTimeline: {self._path}.html"

    def __enter__(self) -> ScheduleProfiler:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _wait_for_device(self) -> None:
        if self._num_done >= self._skip and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _write(self, profiler: profile) -> None:
        """Write the files."""
        if self._num_done <= self._skip:
            return
        trace = self._path.with_name(f"{self._path.name}.json.gz")
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        self.steps = read_steps(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
        self.exposure = measure(self.steps)
        title = f"{self._path.name}, rank 0"
        draw_picture(self.steps, self._path.with_name(f"{self._path.name}.png"), title)
        write_page(self.steps, self._path.with_name(f"{self._path.name}.html"), title)
