# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Observers of the runtime: a log of collectives, a vector clock per stream that finds races, what stderr got."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.distributed.fsdp.experimental import device

Clock = dict[str, int]


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Yield a list that holds, after the block, what this process has written to descriptor 2 inside it."""
    printed: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            printed.append(file.read())


class CollectiveLog:
    """Records (operation, dtype, numel, ranks) of every collective inside the block.

    Args:
        comparisons: whether to record also where ranks compare the orders that they have learnt, once in many steps.
    """

    def __init__(self, comparisons: bool = False) -> None:
        self.entries: list[tuple[str, str, int, int]] = []
        self._comparisons = comparisons

    def __enter__(self) -> CollectiveLog:
        self._block = device.observe(self)
        self._block.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._block.__exit__(None, None, None)

    def new_stream(self, name: str) -> device.Stream:
        return device.HostStream()

    def current_stream(self) -> device.Stream:
        return device.HostStream()

    def access(self, operation: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        pass

    def collective(self, operation: str, dtype: torch.dtype, numel: int, ranks: int) -> None:
        if self._comparisons or (operation, dtype, numel) != ("all_reduce", torch.int64, 4):
            self.entries.append((operation, str(dtype), numel, ranks))


@dataclass
class _Event:
    clock: Clock

    def query(self) -> bool:
        return True


class TraceStream:
    """A host stream that knows which operations of other streams it is ordered after."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace = trace
        self.name = name
        self.clock: Clock = defaultdict(int)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        """As torch.Stream: unequal to None is False."""
        return other is not None and self is not other

    def __hash__(self) -> int:
        return id(self)

    def __enter__(self) -> TraceStream:
        self.trace.stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.trace.stack.pop()

    def record_event(self) -> _Event:
        return _Event(dict(self.clock))

    def wait_event(self, event: _Event) -> None:
        if self.trace.drops(_call_site()):
            return
        for name, time in event.clock.items():
            self.clock[name] = max(self.clock[name], time)

    def wait_stream(self, stream: TraceStream) -> None:
        if self.trace.drops(_call_site()):
            return
        for name, time in stream.clock.items():
            self.clock[name] = max(self.clock[name], time)


@dataclass
class _Use:
    operation: str
    stream: str
    time: int

    def is_before(self, clock: Clock) -> bool:
        return self.time <= clock.get(self.stream, 0)


@dataclass
class _Buffer:
    write: _Use | None = None
    reads: list[_Use] = field(default_factory=list)


class Trace:
    """Sees every stream and buffer use; two unordered uses of a buffer, one of them a write, are a race.

    Args:
        dropped_wait: a wait site, as listed in `wait_sites`, whose waits do nothing.

    Attributes:
        sharing: given a buffer's name, those of others that have memory in common with it; a write to one is a write to
            all of them.
    """

    def __init__(self, dropped_wait: str | None = None) -> None:
        self.compute = TraceStream(self, "compute")
        self.stack: list[TraceStream] = [self.compute]
        self.events: list[tuple[str, str, tuple[str, ...]]] = []
        self.races: list[str] = []
        self.wait_sites: list[str] = []
        self.sharing: Callable[[str], Iterable[str]] = lambda name: ()
        self._dropped_wait = dropped_wait
        self._buffers: dict[str, _Buffer] = defaultdict(_Buffer)

    def new_stream(self, name: str) -> TraceStream:
        return TraceStream(self, name)

    def current_stream(self) -> TraceStream:
        return self.stack[-1]

    def drops(self, site: str) -> bool:
        if site not in self.wait_sites:
            self.wait_sites.append(site)
        return site == self._dropped_wait

    def access(self, operation: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        stream = self.stack[-1]
        stream.clock[stream.name] += 1
        use = _Use(operation, stream.name, stream.clock[stream.name])
        self.events.append((stream.name, operation, (*reads, *writes)))
        for name in reads:
            buffer = self._buffers[name]
            self._require_order(name, use, stream.clock, [buffer.write])
            buffer.reads.append(use)
        for name in dict.fromkeys([*writes, *(other for written in writes for other in self.sharing(written))]):
            buffer = self._buffers[name]
            self._require_order(name, use, stream.clock, [buffer.write, *buffer.reads])
            buffer.write, buffer.reads = use, []

    def _require_order(self, name: str, use: _Use, clock: Clock, earlier: list[_Use | None]) -> None:
        for other in earlier:
            if other is not None and not other.is_before(clock):
                self.races.append(
                    f"{name}: {use.operation} on {use.stream} is not ordered after {other.operation} on {other.stream}"
                )

    def collective(self, operation: str, dtype: torch.dtype, numel: int, ranks: int) -> None:
        pass


def _call_site() -> str:
    frame: Any = sys._getframe(2)
    return (
        f"{frame.f_code.co_qualname if hasattr(frame.f_code, 'co_qualname') else frame.f_code.co_name}:{frame.f_lineno}"
    )
