# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A captured iteration gives the bits of eager ones, leaves eager ones usable, and needs no more memory with time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    capture_iteration,
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
NUM_REPLAYS = 10 if IS_DRY else 1000
RATE = float(torch.tensor(1e-2))
"""What a graph makes of a learning rate; see `capture_iteration`."""


class Run:
    """A model, its optimizer, and one training step of it on this rank's data."""

    def __init__(
        self, strategy: str, outer: str | None = None, num_microbatches: int = 1, recipe: dict[str, Any] | None = None
    ) -> None:
        world_size = dist.get_world_size()
        mesh = init_device_mesh(DEVICE, (world_size,) if outer is None else (world_size, 1))
        placements = Placements.from_strategy(strategy, outer=outer)
        policy = MixedPrecisionPolicy(torch.float32, grad_comm_dtype=torch.bfloat16, **(recipe or {}))
        torch.manual_seed(0)
        blocks = [nn.Sequential(Block(WIDTH), nn.Dropout(0.1)) for _ in range(4)]
        self.model: Any = nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH)).to(DEVICE, torch.bfloat16)
        with fully_shard_context() as self.context:
            for block in self.model[:-1]:
                fully_shard(block, mesh, placements, mixed_precision_policy=policy)
            fully_shard(self.model, mesh, placements, mixed_precision_policy=policy)
        self.optimizer: Any = self.make_optimizer()
        self.num_microbatches = num_microbatches
        torch.manual_seed(1 + dist.get_rank())

    def make_optimizer(self) -> Any:
        """Return the adapted optimizer."""
        return fully_shard_optimizer(torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True, capturable=True))

    def step(self, inputs: torch.Tensor, max_norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one iteration; return loss and gradient norm."""
        total = torch.zeros((), device=DEVICE)
        parts = inputs.chunk(self.num_microbatches)
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            with nullcontext() if is_last else microbatch(self.context, is_last=False):
                loss = self.model(part).float().square().mean()
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def state(self) -> list[torch.Tensor]:
        """Return copies of this rank's weights and moments."""
        weights = [parameter.to_local().detach().clone() for parameter in self.model.parameters()]
        moments = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
        return [*weights, *moments]


def _batch(seed: int, rows: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(rows, WIDTH, generator=generator).to(DEVICE, torch.bfloat16)


def _train(run: Run, step: Any, steps: int = 12) -> list[torch.Tensor]:
    """Train with what may change between replays: data, rate, clipping norm, shapes, an evaluation."""
    seen = []
    for index in range(steps):
        for group in run.optimizer.param_groups:
            group["lr"] = RATE if index < 6 else RATE / 2
        max_norm = torch.tensor(0.01 if index % 2 else 10.0, device=DEVICE)
        seen += step(_batch(index, 24 if index in (8, 9) else 12), max_norm)
        if index in (3, 7):
            run.model.eval()
            with torch.no_grad():
                seen.append(run.model(_batch(50)).float().sum())
            run.model.train()
    return [*seen, *run.state()]


def equals_eager(
    strategy: str,
    outer: str | None,
    num_microbatches: int,
    recipe: dict[str, Any] | None = None,
    kind: type[Run] = Run,
) -> str:
    """Losses, norms, evaluations, weights and moments have the same bits."""
    eager = kind(strategy, outer, num_microbatches, recipe)
    expected = _train(eager, eager.step)
    run = kind(strategy, outer, num_microbatches, recipe)
    with graphs_on_the_host() if IS_DRY else nullcontext():
        example = (_batch(0), torch.tensor(1.0, device=DEVICE))
        captured = capture_iteration(run.model, run.optimizer, run.step, example)
        found = _train(run, captured)
    differ = [index for index, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
    assert not differ, f"{len(differ)} of {len(found)} tensors differ: {differ[:10]}"
    assert captured.num_captures == 2, captured.num_captures
    captured.release()
    return f"{len(found)} tensors equal, {captured.num_captures} captures"


def leaves_eager_usable() -> str:
    """A step that cannot be captured is refused, and the same model then trains as if nothing had been tried."""
    eager = Run("optim_grads_params")
    expected = _train(eager, eager.step, 6)
    run = Run("optim_grads_params")

    def careless(inputs: torch.Tensor, max_norm: torch.Tensor) -> Any:
        loss = run.model(inputs).float().square().mean()
        loss.backward()
        loss.item()
        norm = clip_grad_norm_(run.model.parameters(), max_norm)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.detach(), norm

    num_calls = 0

    def step(inputs: torch.Tensor, max_norm: torch.Tensor) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 3:
            return captured(inputs, max_norm)
        try:
            captured(inputs, max_norm)
        except RuntimeError as error:
            assert "expected a step_fn that only issues work to the device" in str(error), error
        else:
            raise AssertionError("item() was captured")
        return run.step(inputs, max_norm)

    with graphs_on_the_host() if IS_DRY else nullcontext():
        captured = capture_iteration(run.model, run.optimizer, careless, (_batch(0), torch.ones((), device=DEVICE)))
        found = _train(run, step, 6)
    differ = [index for index, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
    assert not differ, f"eager steps differ after a failed capture: {differ[:10]}"
    return f"refused three times; {len(found)} tensors equal"


def does_not_grow() -> str:
    """Memory is the same after one replay and after many."""
    run = Run("optim_grads_params")
    max_norm = torch.ones((), device=DEVICE)
    with graphs_on_the_host() if IS_DRY else nullcontext():
        captured = capture_iteration(run.model, run.optimizer, run.step, (_batch(0), max_norm))
        inputs = _batch(1)
        for _ in range(5):
            loss, _ = captured(inputs, max_norm)
        before = _memory()
        for _ in range(NUM_REPLAYS):
            loss, _ = captured(inputs, max_norm)
    after = _memory()
    assert torch.isfinite(loss), loss
    assert before == after, f"{before} before {NUM_REPLAYS} replays, {after} after"
    captured.release()
    return f"{NUM_REPLAYS} replays, (allocated, reserved) bytes {after}"


def _memory() -> tuple[int, int]:
    if IS_DRY:
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


_CASES = [
    *((strategy, None, 1) for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
    ("optim_grads_params", None, 3),
    ("optim_grads_params", "no_shard", 3),
    ("optim_grads_params", "optim", 1),
]
CHECKS = [
    *(Check("pb111_graph_equals_eager_" + "_".join(map(str, case)), equals_eager, case) for case in _CASES),
    Check("graphs_do_not_grow", does_not_grow),
    Check("failed_capture_leaves_eager_usable", leaves_eager_usable),
]
