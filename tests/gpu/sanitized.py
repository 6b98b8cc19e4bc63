# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A short run on one rank for compute-sanitizer, which slows kernels down: eager units, units with graphs, one graph.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python -m tests.gpu.sanitized

NCCL asks whether it has kernels for other GPUs, which are no errors of memory.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import capture_iteration
from tests.gpu.checks import IS_DRY
from tests.gpu.unit_graphs import Run, batch
from tests.unit_tests.graph_double import graphs_on_the_host
from tests.unit_tests.launch import DEVICE

WIDTH = 64
NUM_STEPS = 8


def train(*, cuda_graph: bool) -> list[torch.Tensor]:
    """Train two layers, two microbatches a step; return losses and gradient norms."""
    with graphs_on_the_host() if IS_DRY and cuda_graph else nullcontext():
        run = Run("optim_grads_params", None, 2, cuda_graph=cuda_graph, width=WIDTH, num_layers=2)
        return [value for index in range(NUM_STEPS) for value in run.step(batch(index, 16, WIDTH))]


def train_captured() -> list[torch.Tensor]:
    """The same in one graph of the whole iteration."""
    run = Run("optim_grads_params", None, 2, cuda_graph=False, width=WIDTH, num_layers=2, capturable=True)
    step: Any = capture_iteration(run.model, run.optimizer, run.step, (batch(0, 16, WIDTH),))
    values = [value for index in range(NUM_STEPS) for value in step(batch(index, 16, WIDTH))]
    step.release()
    return values


def main() -> None:
    """Run all of it and print the last values."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    dist.init_process_group("gloo" if IS_DRY else "nccl", rank=0, world_size=1)
    eager, units = train(cuda_graph=False), train(cuda_graph=True)
    assert all(map(torch.equal, eager, units)), (eager, units)
    whole = eager if IS_DRY else train_captured()
    print(f"{DEVICE}: loss {float(eager[-2]):.6f}, in one graph {float(whole[-2]):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
