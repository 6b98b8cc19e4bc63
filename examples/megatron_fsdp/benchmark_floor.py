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
    """Return a function that replays the iteration on the example inputs and then steps the optimizer.

    Args:
        optimizer: over one rank's part of the weights, whose gradients are there; the iteration knows nothing of it.
        iteration: forward and backward, and zeroing.
        example_inputs: what it is called with.
        warmup: how often it is called before the capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            iteration(*example_inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile, which only this mode permits.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = iteration(*example_inputs)

    def replay(*inputs: torch.Tensor) -> torch.Tensor:
        graph.replay()
        optimizer.step()
        return loss

    return replay
