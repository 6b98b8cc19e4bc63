# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""With fixed places training has the same bits, calls no allocator, and is right or loud where its order changes."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    STRATEGIES,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.experimental.allocator import ResizingAllocator, default_allocator
from megatron.core.distributed.fsdp.experimental.context_memory import MAX_RECORDED_STEPS
from megatron.core.distributed.fsdp.experimental.device import HostStream
from megatron.core.distributed.fsdp.experimental.trace_pool import TracePool
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks, run_ranks_expecting
from tests.unit_tests.models import Block, build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks

WIDTH = 6
NUM_STEPS = 5


# --- the pool alone ---------------------------------------------------------------------------------------------------


class _Buffer:
    """As little of a `DBuffer` as a pool sees."""

    def __init__(self, number: int, numel: int, dtype: torch.dtype, pool: TracePool) -> None:
        self.name = f"buffer {number}"
        self.place: Any = None
        self.local = torch.empty(numel, dtype=dtype)
        self.pool = pool
        pool.release(self)

    def move_to(self, local: torch.Tensor) -> None:
        assert (local.shape, local.dtype) == (self.local.shape, self.local.dtype)
        self.local = local


def _play(buffers: Sequence[_Buffer], events: Sequence[tuple[int, bool]]) -> None:
    """Allocate, fill and release; what is alive keeps its contents, and lies apart from all else that is."""
    alive: set[int] = set()

    def check() -> None:
        runs = sorted((b.local.data_ptr(), b.local.nbytes) for b in map(buffers.__getitem__, alive) if b.local.numel())
        assert all(at + size <= other for (at, size), (other, _) in itertools.pairwise(runs))
        for number in alive:
            assert (buffers[number].local == number).all()

    for number, is_allocation in events:
        if is_allocation:
            buffers[number].pool.allocate(buffers[number])
            buffers[number].local.fill_(number)
            alive.add(number)
        elif number in alive:
            buffers[number].pool.release(buffers[number])
            alive.remove(number)
        check()
    for number in alive:
        buffers[number].pool.release(buffers[number])


_EVENTS = st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=40)


@given(st.lists(st.integers(0, 700), min_size=8, max_size=8), _EVENTS, st.lists(_EVENTS, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_whatever_follows_the_recorded_iteration(
    sizes: list[int], recorded: list[tuple[int, bool]], later: list[list[tuple[int, bool]]]
) -> None:
    """Any events after any others: buffers that are alive never share memory, and the recorded ones never allocate."""
    pool = TracePool(ResizingAllocator(), torch.device("cpu"), (HostStream(),))
    buffers = [_Buffer(n, size, (torch.float32, torch.int16)[n % 2], pool) for n, size in enumerate(sizes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _play(buffers, recorded)
        assert pool.is_quiet
        pool.activate()
        with _no_calls():
            _play(buffers, recorded)
        for events in later:
            _play(buffers, events)
            pool.deactivate()
            assert pool.num_bytes == 0
            _play(buffers, events)
            pool.activate()
        with _no_calls():
            _play(buffers, recorded)


@contextmanager
def _counted_calls() -> Iterator[list[str]]:
    """Yield a list of the calls of the allocator that all storage comes from."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("allocate", "release"):
            original = getattr(ResizingAllocator, name)

            def count(self: Any, block: Any, original: Any = original, name: str = name) -> None:
                calls.append(f"{name} {block.name}")
                original(self, block)

            patch.setattr(ResizingAllocator, name, count)
        yield calls


@contextmanager
def _no_calls() -> Iterator[None]:
    with _counted_calls() as calls:
        yield
    assert calls == []


# --- training ---------------------------------------------------------------------------------------------------------


class _Tower(nn.Module):
    """Blocks below a root with parameters; some are frozen, and forward may recompute."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.layers = nn.ModuleList([Block(WIDTH) for _ in range(4)])
        self.layers[1].requires_grad_(False)
        self.layers[2].up.requires_grad_(False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            if self.recompute == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return x


def _train(
    model: Any,
    *,
    pool: bool,
    mesh: tuple[int, ...] | None = None,
    microbatches: int = 1,
    after_step: Callable[[Any, torch.Tensor], object] | None = None,
    **shard: Any,
) -> tuple[list[float], list[torch.Tensor], Any, list[int]]:
    """Return losses, full weights, the context and how often the allocator was called in each step."""
    dtype = next(model.parameters()).dtype
    with fully_shard_context(DEVICE, trace_pool=pool) as context:
        shard_layers(model, mesh=None if mesh is None else lasting_mesh(mesh), **shard)
    optimizer = fully_shard_optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))
    losses, counts = [], []
    for step in range(NUM_STEPS):
        with _counted_calls() as calls:
            optimizer.zero_grad()
            for index in range(microbatches):
                generator = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank())
                batch = torch.randn(3, WIDTH, generator=generator).to(DEVICE, dtype)
                with microbatch(context, is_last=index == microbatches - 1):
                    loss = model(batch).float().square().mean()
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
        counts.append(len(calls))
        assert_at_rest(model)
        if after_step is not None:
            after_step(model, torch.full((2, WIDTH), 1.0 + step, dtype=dtype, device=DEVICE))
    return losses, [p.full_tensor().detach().clone() for p in model.parameters()], context, counts


def _equal(ours: Any, theirs: Any) -> bool:
    return bool(ours[0] == theirs[0] and all(map(torch.equal, ours[1], theirs[1])))


def _evaluate(model: Any, batch: torch.Tensor) -> None:
    with torch.no_grad():
        model(batch)


def _same_bits(strategy: str, outer: str | None, mesh: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    placements = Placements.from_strategy(strategy, outer=outer)
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    for recompute, microbatches in itertools.product(("none", "reentrant", "not reentrant"), (1, 3)):
        options: dict[str, Any] = {
            "mesh": mesh,
            "microbatches": microbatches,
            "placements": placements,
            "mixed_precision_policy": policy,
            "after_step": _evaluate,
        }
        theirs = _train(_Tower(recompute).to(dtype), pool=False, **options)
        ours = _train(_Tower(recompute).to(dtype), pool=True, **options)
        what = (strategy, outer, recompute, microbatches)
        assert _equal(ours, theirs), what
        pool = ours[2].pool
        assert pool.is_active and pool.num_fallbacks == 0 and ours[3][0] > 0, what
        assert ours[3][2:] == [0] * (NUM_STEPS - 2), (what, ours[3])
        assert_same_on_all_ranks(pool.slots)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_bits_and_no_allocator(strategy: str) -> None:
    """Every strategy, with and without accumulation and both kinds of recomputation, evaluated between steps."""
    run_ranks(2, _same_bits, strategy, None, None, torch.bfloat16)


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_same_bits_and_no_allocator_with_an_outer_axis(outer: str, mesh: tuple[int, int]) -> None:
    run_ranks(2, _same_bits, "optim_grads_params", outer, mesh, torch.float32)
