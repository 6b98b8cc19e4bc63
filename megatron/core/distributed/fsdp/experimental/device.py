# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Streams, events and profiler ranges, on an accelerator or on the host; what an observer may see of them.

The only file that knows which kind of device it is on. It does not communicate and holds no buffers.

[Note: host streams]
Collectives are always issued synchronously with respect to their stream. On an accelerator that call returns once
the work is enqueued, on the host once it is done. A host stream is therefore a real stream on which everything
that was issued has already happened: recording and waiting are correct, and empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream's work. torch's own events satisfy it."""

    def query(self) -> bool:
        """Return whether everything before the event has finished."""
        ...


class Stream(Protocol):
    """An ordered queue of device work. `torch.Stream` satisfies it."""

    def __enter__(self) -> Any:
        """Make this the current stream."""
        ...

    def __exit__(self, kind: Any, value: Any, traceback: Any, /) -> Any:
        """Restore the previous current stream."""
        ...

    def record_event(self) -> Event:
        """Return an event after the work issued so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream start only after `event`."""
        ...

    def wait_stream(self, stream: Any) -> None:
        """Let later work of this stream start only after the work issued so far on `stream`."""
        ...


class HostEvent:
    """An event on the host: what came before it has finished."""

    def query(self) -> bool:
        """Return True."""
        return True


class HostStream:
    """A stream on the host: its work has finished when the issuing call returns."""

    _event = HostEvent()

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def record_event(self) -> Event:
        """Return an event that has already happened."""
        return self._event

    def wait_event(self, event: Event) -> None:
        """Do nothing: the event has happened."""

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing: the stream's work has finished."""


class Observer(Protocol):
    """Sees every stream, every use of a buffer and every collective. Tests use one to prove schedules free of races."""

    def new_stream(self, name: str) -> Stream:
        """Return the stream to use in place of a host stream called `name`."""
        ...

    def current_stream(self) -> Stream:
        """Return the current stream in place of the host stream."""
        ...

    def access(self, operation: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        """See `operation` issued on the current stream, using the named buffers."""
        ...

    def collective(self, operation: str, dtype: torch.dtype, numel: int, ranks: int) -> None:
        """See a collective over `ranks` ranks on `numel` elements of its larger side."""
        ...


_host_stream = HostStream()
_observer: Observer | None = None


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Let `observer` see what is issued, and provide the host's streams, inside the block."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


def report_access(operation: str, *, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> None:
    """Tell the observer, if there is one, which buffers `operation` reads and writes on the current stream."""
    if _observer is not None:
        _observer.access(operation, reads, writes)


def report_collective(operation: str, dtype: torch.dtype, numel: int, ranks: int) -> None:
    """Tell the observer, if there is one, of a collective."""
    if _observer is not None:
        _observer.collective(operation, dtype, numel, ranks)


def new_stream(device: torch.device, name: str) -> Stream:
    """Return a new stream on `device` for communication; on the host, one whose work is always finished."""
    if device.type == "cpu":
        return _host_stream if _observer is None else _observer.new_stream(name)
    stream: Stream = torch.Stream(device=device, priority=-1)
    return stream


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which the caller's work on `device` is issued now."""
    if device.type == "cpu":
        return _host_stream if _observer is None else _observer.current_stream()
    # torch.accelerator.current_stream, which asks about the device first, costs the host four times as much.
    stream: Stream = torch._C._accelerator_getStream(device.index)
    return stream


def is_capturing(device: torch.device) -> bool:
    """Return whether the caller's work on `device` is being captured in a graph, so that nobody may wait for it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def finish_stream(stream: Stream) -> None:
    """Let the host wait until the work issued so far on `stream` has finished; on the host it has."""
    if isinstance(stream, torch.Stream):
        stream.synchronize()


def release_idle_memory(device: torch.device) -> None:
    """Give memory that torch's allocator keeps and nobody uses back to the device; the host keeps none."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


@contextmanager
def symmetric_pool(device: torch.device) -> Iterator[None]:
    """Let what is allocated on `device` inside the block come from torch's pool of symmetric memory (torch >= 2.12)."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")
    with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
        yield


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised host memory, [num_bytes] uint8, into which `device` can copy while the host goes on."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")


def current_device(device_type: str) -> torch.device:
    """Return the device of this process for a mesh of `device_type`."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def resolve_device(device: torch.device | str) -> torch.device:
    """Return `device` with its index: ``cuda`` means the current CUDA device of this process."""
    device = torch.device(device)
    return current_device(device.type) if device.index is None else device


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the state of the host's random generator and of the device's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_state(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    """Set what `random_state` has returned."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


_no_range: AbstractContextManager[None] = nullcontext()


def profile_range(label: str) -> AbstractContextManager[Any]:
    """Return a context that names a stretch of work in torch's profiler; free when none is running."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(label)
    return _no_range
