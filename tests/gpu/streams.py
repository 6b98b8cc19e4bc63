# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The runtime's streams, tampered with: delay kernels at each use, one wait left out, or everything in order.

A file that asks for streams, `schedule.py` or `matrix_pipeline.py`, has its two functions replaced inside a block. It
knows nothing of models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from megatron.core.distributed.fsdp.experimental import schedule
from tests.gpu.checks import IS_DRY

COMMUNICATION_SLEEP_CYCLES = 20_000_000
"""About 10 ms at 2 GHz: longer than the host takes to issue the few units that a missing wait would let pass."""
COMPUTE_SLEEP_CYCLES = 100_000_000
"""About 50 ms: longer than the host takes to issue a forward or a backward of the models here."""


def sleep(cycles: int) -> None:
    """Let the current stream do nothing for a while."""
    if not IS_DRY:
        torch.cuda._sleep(cycles)


def synchronize() -> None:
    """Wait until all streams are done."""
    if not IS_DRY:
        torch.cuda.synchronize()


@dataclass
class Tampering:
    """What to do to the streams.

    Attributes:
        slow: names of communication streams that sleep whenever the runtime turns to them.
        dropped_wait: name of the function of that file whose waits do nothing.
        is_synchronised: whether the host waits for all streams before and after each use of a communication stream.
        sites: functions that have waited.
    """

    slow: tuple[str, ...] = ()
    dropped_wait: str | None = None
    is_synchronised: bool = False
    sites: set[str] = field(default_factory=set)

    def drops(self) -> bool:
        """Return whether the wait that is being made is to be left out."""
        site = sys._getframe(2).f_code.co_name
        self.sites.add(site)
        return site == self.dropped_wait


class _Stream:
    """A stream as `schedule.py` uses it."""

    def __init__(self, inner: Any, tampering: Tampering, name: str) -> None:
        self.inner = inner
        self._tampering = tampering
        self._name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and bool(self.inner == other.inner)

    def __enter__(self) -> _Stream:
        if self._tampering.is_synchronised:
            synchronize()
        self.inner.__enter__()
        if self._name in self._tampering.slow:
            sleep(COMMUNICATION_SLEEP_CYCLES)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.inner.__exit__(*exception)
        if self._tampering.is_synchronised:
            synchronize()

    def record_event(self) -> Any:
        return self.inner.record_event()

    def wait_event(self, event: Any) -> None:
        if not self._tampering.drops():
            self.inner.wait_event(event)

    def wait_stream(self, stream: _Stream) -> None:
        if not self._tampering.drops():
            self.inner.wait_stream(stream.inner)


@contextmanager
def tampered(tampering: Tampering, file: Any = schedule) -> Iterator[None]:
    """Give what a file builds, and what it runs, inside the block tampered streams."""
    new_stream, current_stream = file.new_stream, file.current_stream
    with (
        patch.object(file, "new_stream", lambda device, name: _Stream(new_stream(device, name), tampering, name)),
        patch.object(file, "current_stream", lambda device: _Stream(current_stream(device), tampering, "compute")),
    ):
        yield
