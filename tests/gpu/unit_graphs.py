# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Units with graphs of their own give the bits of eager ones, and need hardly more memory and no more with time."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    clip_grad_norm_,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from tests.gpu.checks import IS_DRY, Check
from tests.unit_tests.graph_double import graphs_on_the_host
from tests.unit_tests.launch import DEVICE
from tests.unit_tests.models import Block

WIDTH = 8 if IS_DRY else 256
NUM_STEPS = 20 if IS_DRY else 200
BACKEND = "aot_eager" if IS_DRY else "inductor"
MAX_TAX = 1.10
"""Memory taken from the driver at the peak, with graphs over that of eager units without a pool."""


class Run:
    """A model with or without graphs, its optimizer, and one training step of it on this rank's data."""

    def __init__(
        self,
        strategy: str = "optim_grads_params",
        outer: str | None = None,
        num_microbatches: int = 1,
        *,
        cuda_graph: bool,
        is_compiled: bool = False,
        width: int = WIDTH,
        num_layers: int = 4,
        capturable: bool = False,
        recipe: dict[str, Any] | None = None,
    ) -> None:
        world_size = dist.get_world_size()
        mesh = init_device_mesh(DEVICE, (world_size,) if outer is None else (world_size, 1))
        options: dict[str, Any] = {
            "placements": Placements.from_strategy(strategy, outer=outer),
            "mixed_precision_policy": MixedPrecisionPolicy(
                torch.float32, grad_comm_dtype=torch.bfloat16, **(recipe or {})
            ),
        }
        torch.manual_seed(0)
        blocks = [nn.Sequential(Block(width), nn.Dropout(0.1)) for _ in range(num_layers)]
        self.model: Any = nn.Sequential(*blocks, nn.Linear(width, width)).to(DEVICE, torch.bfloat16)
        if is_compiled:
            # What another run has compiled would be taken for this one. And a kernel compiled for any number of rows,
            # as a second number asks for, adds in another order: eager calls would go over to it, replays would not.
            torch._dynamo.reset()
            for block in blocks:
                block.forward = torch.compile(block.forward, backend=BACKEND, dynamic=False)  # type: ignore[method-assign]
        with fully_shard_context(trace_pool=cuda_graph) as self.context:
            for block in self.model[:-1]:
                fully_shard(block, mesh, **options, cuda_graph=cuda_graph)
            fully_shard(self.model, mesh, **options)
        self.optimizer: Any = fully_shard_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=2**-7, fused=True, capturable=capturable)
        )
        self.num_microbatches = num_microbatches
        torch.manual_seed(1 + dist.get_rank())

    def step(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Run one iteration; return loss and gradient norm."""
        total = torch.zeros((), device=DEVICE)
        parts = inputs.chunk(self.num_microbatches)
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            with nullcontext() if is_last else microbatch(self.context, is_last=False):
                loss = self.model(part).float().square().mean()
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [total, norm]

    def state(self) -> list[torch.Tensor]:
        """Return copies of this rank's weights and moments."""
        weights = [parameter.to_local().detach().clone() for parameter in self.model.parameters()]
        moments = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
        return [*weights, *moments]


def batch(seed: int, rows: int = 16, width: int = WIDTH) -> torch.Tensor:
    """Return this rank's inputs of one step."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(rows, width, generator=generator).to(DEVICE, torch.bfloat16)


def _train(run: Run, steps: int = 12) -> list[torch.Tensor]:
    """Train with what may change between replays: data, shapes, an evaluation."""
    seen = []
    for index in range(steps):
        seen += run.step(batch(index, 8 if index in (7, 8) else 16))
        if index in (3, 9):
            run.model.eval()
            with torch.no_grad():
                seen.append(run.model(batch(50)).float().sum())
            run.model.train()
    return [*seen, *run.state()]


def equals_eager(
    strategy: str,
    outer: str | None,
    num_microbatches: int,
    is_compiled: bool = False,
    recipe: dict[str, Any] | None = None,
) -> str:
    """Losses, norms, evaluations, weights and moments have the same bits."""
    options: dict[str, Any] = {"is_compiled": is_compiled, "recipe": recipe}
    expected = _train(Run(strategy, outer, num_microbatches, cuda_graph=False, **options))
    with graphs_on_the_host(watches_values=not is_compiled) if IS_DRY else nullcontext():
        run = Run(strategy, outer, num_microbatches, cuda_graph=True, **options)
        found = _train(run)
    differ = [index for index, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
    assert not differ, f"{len(differ)} of {len(found)} tensors differ: {differ[:10]}"
    graphs: Any = run.context.graphs
    # Two graphs for each of four layers, of the main shape at least.
    assert graphs.num_captures >= 8 and graphs.num_replays >= 5 * graphs.num_captures, graphs.num_replays
    return f"{len(found)} tensors equal, {graphs.num_captures} captures, {graphs.num_replays} replays"


def costs_little(rows: int, width: int, num_layers: int) -> str:
    """Peak memory and host time of a step, with and without graphs; memory does not grow with time."""
    peaks, times, losses = [], [], []
    for cuda_graph in (False, True):
        _forget_memory()
        with graphs_on_the_host() if IS_DRY else nullcontext():
            run = Run(cuda_graph=cuda_graph, width=width, num_layers=num_layers)
            inputs = batch(1, rows, width)
            for _ in range(10):
                loss, _ = run.step(inputs)
            before = _memory()
            start_s = time.perf_counter()
            for _ in range(NUM_STEPS):
                loss, _ = run.step(inputs)
            times.append((time.perf_counter() - start_s) / NUM_STEPS)
            after = _memory()
            assert before == after, f"{before} before {NUM_STEPS} steps, {after} after, cuda_graph={cuda_graph}"
            peaks.append(_peak())
            losses.append(loss)
        del run
    assert torch.equal(*losses), losses
    tax = peaks[1] / peaks[0]
    assert tax <= MAX_TAX, f"{peaks[1]} bytes with graphs, {peaks[0]} without: {tax:.3f}"
    return (
        f"{peaks[0] / 2**20:.0f} MiB of the GPU, with graphs {peaks[1] / 2**20:.0f} ({tax:.3f}); "
        f"host time of a step {times[0] * 1e3:.2f} ms, with graphs {times[1] * 1e3:.2f}"
    )


def _memory() -> tuple[int, int]:
    if IS_DRY:
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _forget_memory() -> None:
    if not IS_DRY:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    return 1 if IS_DRY else torch.cuda.max_memory_reserved()


_CASES = [
    *(
        (strategy, None, count)
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")
        for count in (1, 4)
    ),
    ("optim_grads_params", "no_shard", 4),
    ("optim_grads_params", "optim", 1),
]
CHECKS = [
    *(Check("unit_graphs_equal_eager_" + "_".join(map(str, case)), equals_eager, case) for case in _CASES),
    Check("compiled_unit_graphs_equal_eager", equals_eager, ("optim_grads_params", None, 4, True)),
    Check("unit_graphs_cost_little", costs_little, (16, 8, 4) if IS_DRY else (8192, 1024, 16)),
]
