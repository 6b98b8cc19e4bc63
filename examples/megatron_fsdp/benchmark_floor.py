# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Captures the floor of a step: forward and backward of a bare module in one CUDA graph. Knows of no runtime."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture_floor(
    optimizer: torch.optim.Optimizer,
    iteration: Callable[..., torch.Tensor],
    example_inputs: tuple[torch.Tensor, ...],
    *,
    warmup: int,
) -> Callable[..., torch.Tensor]:
    """Return a function that runs the iteration and then steps the optimizer; from a call on by replaying a graph.

    Args:
        optimizer: over one rank's part of the weights, whose gradients are there; the iteration knows nothing of it.
        iteration: forward and backward, and zeroing.
        example_inputs: what it is captured with.
        warmup: number of calls before the one that captures.
    """
    stream = torch.cuda.Stream()
    num_eager = 0
    captured: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = None

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        nonlocal num_eager, captured
        if num_eager < warmup:
            num_eager += 1
            loss = _run_on(stream, iteration, inputs)
        else:
            captured = captured or _capture(stream, iteration, example_inputs)
            graph, loss = captured
            graph.replay()
        optimizer.step()
        return loss

    return run


def _run_on(
    stream: torch.cuda.Stream, iteration: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Run an iteration on the stream of the capture, as PyTorch asks for before one."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = iteration(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    return loss


def _capture(
    stream: torch.cuda.Stream, iteration: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile, which only this mode permits.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loss = iteration(*inputs)
    return graph, loss
