# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What captures work into a graph and replays it. It knows nothing of models and steps."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class GraphDevice(Protocol):
    """What captures and replays; CUDA, or a double in tests."""

    def run(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the stream that captures, and let the current stream wait for it."""
        ...

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what replays the work that `function` issues, and what it returned; executes none of that work."""
        ...

    def renew(self) -> None:
        """Let later captures take their memory from a pool of their own."""
        ...


class CudaGraphDevice:
    """CUDA graphs of one device, which share one memory pool.

    Args:
        device: a CUDA device.
        generators: those that the captured work uses besides the device's default one.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self._device = device
        self._generators = [torch.cuda.default_generators[device.index], *generators]
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the stream that captures, and let the current stream wait for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return function()
        finally:
            # Also where it has raised: what it has issued until then still runs.
            current.wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what replays the work that `function` issues, and what it returned; executes none of that work."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators[1:]:
            graph.register_generator_state(generator)
        before = [generator.clone_state() for generator in self._generators]
        try:
            # NCCL's watchdog queries events on a thread of its own, which a global capture would take for a mistake.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            # Otherwise they wait for the end of a capture that has failed, and serve nobody until then.
            for generator, state in zip(self._generators, before, strict=True):
                generator.graphsafe_set_state(state)
            raise
        return graph.replay, result

    def renew(self) -> None:
        """Let later captures take their memory from a pool of their own."""
        # The stream stays: libraries keep memory for each one that they have seen.
        self._pool = torch.cuda.graph_pool_handle()


def graph_device(device: torch.device, generators: Sequence[torch.Generator], what: str, instead: str) -> GraphDevice:
    """Return what captures on `device`; arguments as `CudaGraphDevice`, and two for the error.

    Args:
        device: where the work runs.
        generators: see `CudaGraphDevice`.
        what: who asks.
        instead: what to do on a device without graphs.

    Raises:
        NotImplementedError: the device has no CUDA graphs.
    """
    if device.type != "cuda":
        raise NotImplementedError(f"{what}: expected a model on a CUDA device, got one on {device}. {instead}")
    return CudaGraphDevice(device, generators)


class FailedCaptureError(Exception):
    """What could not be captured; its text says what went wrong first, and where."""


def capture(device: GraphDevice, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Return what replays the work that `function` issues, and what it returned.

    Raises:
        FailedCaptureError: it did what no graph can hold.
    """
    first: list[BaseException] = []

    def run() -> Any:
        try:
            return function()
        except BaseException as error:
            first.append(error)
            raise

    try:
        return device.capture(run)
    except Exception as error:
        # The end of a capture that has failed raises once more, in other words.
        raise FailedCaptureError(_describe(first.pop() if first else error)) from error


def _describe(error: BaseException) -> str:
    trace = traceback.extract_tb(error.__traceback__)
    where = f" at {trace[-1].filename}:{trace[-1].lineno}" if trace else ""
    return f"{type(error).__name__}{where}: {str(error).partition(chr(10))[0]}"
