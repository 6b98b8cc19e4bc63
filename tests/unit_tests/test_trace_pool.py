# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""With fixed places training has the same bits, calls no allocator, and is right or loud where its order changes."""

from __future__ import annotations

import gc
import itertools
import time
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
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.experimental.allocator import ResizingAllocator, default_allocator
from megatron.core.distributed.fsdp.experimental.context_memory import MAX_POSTPONED, MAX_RECORDED_STEPS
from megatron.core.distributed.fsdp.experimental.device import HostStream, observe
from megatron.core.distributed.fsdp.experimental.trace_pool import TracePool
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks, run_ranks_expecting
from tests.unit_tests.models import Block, shard_layers
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks
from tests.unit_tests.trace import Trace

WIDTH = 6
NUM_STEPS = 5


# --- the pool alone ---------------------------------------------------------------------------------------------------


class _Buffer:
    """As little of a `DBuffer` as a pool sees."""

    def __init__(self, number: int, numel: int, dtype: torch.dtype, pool: TracePool) -> None:
        self.name = f"buffer {number}"
        self.place: Any = None
        self.num_plan_views = 0
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
        pool.activate({})
        with _no_calls():
            _play(buffers, recorded)
        for events in later:
            _play(buffers, events)
            pool.deactivate()
            assert pool.num_bytes == 0
            _play(buffers, events)
            pool.activate({})
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


def _pb112() -> None:
    """Five equal units and a larger one, a root with parameters: every one has a place of its own size."""

    def build() -> nn.Module:
        model = _Tower()
        model.layers[2] = nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), nn.Linear(30, WIDTH))
        return model

    ours, theirs = _train(build(), pool=True), _train(build(), pool=False)
    assert _equal(ours, theirs) and ours[2].pool.num_fallbacks == 0


def test_pb112_a_larger_unit_in_a_pool() -> None:
    run_ranks(2, _pb112)


class _Addresses:
    """Where the gathered weights of each layer lay at each of its forwards."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[int, list[int]] = {}
        for number, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(lambda module, args, number=number: self.note(number, module))

    def note(self, number: int, module: Any) -> None:
        self.seen.setdefault(number, []).append(next(module.parameters()).data_ptr())


def _fixed_addresses() -> None:
    model = _AnyOrder()
    addresses: list[_Addresses] = []
    bytes_at_rest: list[int] = []

    def after_step(model: Any, batch: torch.Tensor) -> None:
        if not addresses:
            addresses.append(_Addresses(model))
        bytes_at_rest.append(default_allocator.allocated_bytes)

    before = default_allocator.allocated_bytes
    *_, context, _ = _train(model, pool=True, after_step=after_step)
    assert all(len(set(seen)) == 1 and len(seen) == NUM_STEPS - 1 for seen in addresses[0].seen.values())
    assert len(set().union(*addresses[0].seen.values())) == 2, "two layers are gathered at a time"
    pool = context.pool
    assert bytes_at_rest[1:] == [bytes_at_rest[0] + pool.num_bytes] * (NUM_STEPS - 1)
    assert pool.num_bytes == sum(arena.peak_bytes for arena in pool.plan.arenas)
    reference = weakref.ref(context)
    gc.collect()
    gc.disable()
    try:
        del model, context, pool
        addresses.clear()
        time.sleep(0.2)
        assert reference() is None and default_allocator.allocated_bytes == before
    finally:
        gc.enable()


def test_addresses_and_bytes() -> None:
    """Addresses stay, two for all layers; the pool takes what is alive at the peak; deletion frees it at once."""
    run_ranks(2, _fixed_addresses)


MAX_PEAK = 1.07
"""Weights and gradients have arenas of their own, whose peaks come at different times; slots are rounded up."""


def _peaks() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        peaks = []
        for pool in (False, True):
            gc.collect()
            before = default_allocator.allocated_bytes
            model = _Wide().to(dtype)
            kept = _train(model, pool=pool)
            peaks.append(_peak_of_a_step(kept[2], model, dtype) - before)
            del model, kept
        assert peaks[0] < peaks[1] <= MAX_PEAK * peaks[0], (dtype, peaks)


def _peak_of_a_step(context: Any, model: Any, dtype: torch.dtype) -> int:
    """Return the bytes alive at the peak of one more step, whose gradients replace those of the last one."""
    assert context.pool is None or context.pool.is_active
    model.zero_grad()
    default_allocator.reset_peak()
    model(torch.ones(2, WIDTH, dtype=dtype, device=DEVICE)).float().sum().backward()
    return default_allocator.peak_bytes


class _Wide(nn.Module):
    """Units that are large beside what slots are rounded up to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out_of = (nn.Parameter(torch.randn(shape)) for shape in ((WIDTH, 64), (64, WIDTH)))
        self.layers = nn.ModuleList([Block(64) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.into
        for layer in self.layers:
            x = layer(x)
        return x @ self.out_of


def test_peak_is_near_that_of_the_resizing_allocator() -> None:
    run_ranks(2, _peaks)


# --- other orders -----------------------------------------------------------------------------------------------------


class _AnyOrder(nn.Module):
    """Layers run in the order that is set: several times, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.layers = nn.ModuleList([Block(WIDTH) for _ in range(5)])
        self.order: Sequence[int] = range(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for index in self.order:
            x = self.layers[index](x)
        return x


def _set_order(orders: Sequence[Sequence[int]]) -> Callable[[Any, torch.Tensor], None]:
    """Return what sets the order of the next step, after an evaluation in an order of its own."""
    waiting = list(orders)

    def after_step(model: Any, batch: torch.Tensor) -> None:
        if waiting:
            model.order = waiting.pop(0)
        order, model.order = model.order, list(model.order)[::-2]
        with torch.inference_mode():
            model(batch)
        model.order = order

    return after_step


def _other_orders(orders: Sequence[Sequence[int]], policy: SchedulePolicy, microbatches: int) -> int:
    options: dict[str, Any] = {"schedule_policy": policy, "microbatches": microbatches}
    theirs = _train(_AnyOrder(), pool=False, after_step=_set_order(orders), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = _train(_AnyOrder(), pool=True, after_step=_set_order(orders), **options)
    assert _equal(ours, theirs), (orders, policy, microbatches)
    messages = [str(item.message) for item in caught if "trace_pool" in str(item.message)]
    number = int(ours[2].pool.num_fallbacks)
    assert len(messages) == min(number, 1), messages
    assert all(".full_weight: its place was taken" in message for message in messages), messages
    return number


ORDERS: dict[str, list[Sequence[int]]] = {
    "twice": [[0, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 3, 4]],
    "reversed": [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [0, 1, 2, 3, 4]],
    "fewer": [[0, 4], [1, 3], [0, 1, 2, 3, 4]],
}


def _all_orders(name: str) -> None:
    numbers = [
        _other_orders(ORDERS[name], policy, microbatches)
        for policy in (
            SchedulePolicy(),
            SchedulePolicy(forward_prefetch_units=2, backward_prefetch_units=0),
            SchedulePolicy(reshard_after_forward=True),
        )
        for microbatches in (1, 2)
    ]
    assert sum(numbers) > 0
    assert_same_on_all_ranks(numbers)


@pytest.mark.parametrize("name", ORDERS)
def test_other_orders_have_the_same_bits(name: str) -> None:
    """Also for evaluation in inference mode; whoever finds its place taken gets another, or waits, with one warning."""
    run_ranks(2, _all_orders, name)


def _train_by_hand(pool: bool, play: Callable[[Any, Any], None]) -> tuple[list[torch.Tensor], Any]:
    model = _AnyOrder()
    with fully_shard_context(DEVICE, trace_pool=pool) as context:
        shard_layers(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    play(model, optimizer)
    return [p.full_tensor().detach().clone() for p in model.parameters()], context


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def _step(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(_batch(step)).square().mean().backward()
    optimizer.step()


def _gathered_by_hand(model: Any, optimizer: Any) -> None:
    for step in range(4):
        _step(model, optimizer, step)
        if step == 0:
            continue
        units = [*model.layers, model]
        for unit in units:
            unit.unshard()
        weights = [[p.clone() for p in unit.parameters()] for unit in units]
        model(_batch(step))
        for unit, copies in zip(model.layers, weights[:-1], strict=True):
            unit.unshard()
            assert all(map(torch.equal, unit.parameters(), copies))
            assert len(copies) == 5
        for unit in units:
            unit.reshard()


def _two_graphs(model: Any, optimizer: Any) -> None:
    """Graphs that live across the end of the recorded iteration, of which one never has a backward."""
    kept = []
    for step in range(5):
        optimizer.zero_grad()
        losses = [model(_batch(10 * step + index)).square().mean() for index in range(2)]
        kept.append(model(_batch(100 + step)))
        for loss in losses:
            loss.backward()
        optimizer.step()
        if step % 2:
            kept.clear()


def _unfrozen(model: Any, optimizer: Any) -> None:
    """Buffers that the recorded iteration had not."""
    model.layers[1].requires_grad_(False)
    for step in range(5):
        if step == 2:
            model.layers[1].requires_grad_(True)
        _step(model, optimizer, step)


def _without_sync(model: Any, optimizer: Any) -> None:
    for step in range(4):
        model.set_requires_gradient_sync(step < 2)
        model(_batch(step)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        _step(model, optimizer, 10 + step)


def _interrupted(model: Any, optimizer: Any) -> None:
    """An exception in the middle of forward, and of backward."""

    class _Stop(Exception):
        pass

    def stop(*args: Any) -> None:
        raise _Stop

    for step in range(5):
        _step(model, optimizer, step)
        with pytest.raises(_Stop):
            handle = model.layers[2].up.register_forward_pre_hook(stop)
            try:
                model(_batch(step))
            finally:
                handle.remove()
        handle = model.layers[2].up.register_forward_hook(lambda module, args, out: out.register_hook(stop) and None)
        loss = model(_batch(step)).square().mean()
        handle.remove()
        with pytest.raises(_Stop):
            loss.backward()
        assert_at_rest(model)


def _plays(play: Callable[[Any, Any], None], falls_back: bool) -> None:
    theirs, _ = _train_by_hand(False, play)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, context = _train_by_hand(True, play)
    assert all(map(torch.equal, ours, theirs))
    assert context.pool.is_active and (context.pool.num_fallbacks > 0) == falls_back, context.pool.num_fallbacks


@pytest.mark.parametrize(
    ("play", "falls_back"),
    [
        (_gathered_by_hand, True),
        (_two_graphs, False),
        (_unfrozen, True),
        (_without_sync, True),
        (_interrupted, True),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_odd_uses_have_the_same_bits(play: Callable[[Any, Any], None], falls_back: bool) -> None:
    run_ranks(2, _plays, play, falls_back)


class _Parallel(nn.Module):
    """Two layers in turn, or side by side; then both are in backward at one time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.is_parallel = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_parallel:
            return self.layers[0](x) + self.layers[2](x)
        for layer in self.layers:
            x = layer(x)
        return x


def _two_in_one_place() -> None:
    model = _Parallel()
    with fully_shard_context(DEVICE, trace_pool=True):
        shard_layers(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        _step(model, optimizer, step)
    model.is_parallel = True
    _step(model, optimizer, 3)


def test_two_units_in_use_that_share_a_place_are_refused() -> None:
    """Neither can move, since graphs hold views of both: an error rather than wrong weights."""
    for message in run_ranks_expecting(2, RuntimeError, _two_in_one_place):
        assert "layers.0.0.full_weight whose memory a graph holds while its place was taken by layers.2.0" in message
        assert "Build this model with trace_pool=False" in message


# --- when it records, plans and rests ---------------------------------------------------------------------------------


def _released() -> None:
    model = _AnyOrder()
    with fully_shard_context(DEVICE, trace_pool=True) as context:
        shard_layers(model)
    pool = context.pool
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    twin = _AnyOrder()
    twin_optimizer = torch.optim.SGD(shard_layers(twin).parameters(), lr=0.1)
    context.release_memory_pool()
    assert pool.plan is None, "nothing to release while the first iteration is recorded"
    for step in range(4):
        for each, steps in ((model, optimizer), (twin, twin_optimizer)):
            _step(each, steps, step)
        if step == 0:
            rest = default_allocator.allocated_bytes
            assert pool.num_bytes == 0
            continue
        held = pool.num_bytes
        assert held > 0 and default_allocator.allocated_bytes == rest + held
        plan = pool.plan
        context.release_memory_pool()
        context.release_memory_pool()
        assert pool.num_bytes == 0 and default_allocator.allocated_bytes == rest
        with torch.no_grad():
            assert torch.equal(model(_batch(9)), twin(_batch(9)))
        assert pool.num_bytes == 0, "an evaluation takes memory of its own"
        loss = model(_batch(9)).sum()
        assert pool.plan is plan and pool.num_bytes == held and pool.num_fallbacks == 0
        with pytest.raises(RuntimeError, match=r"expected all units at rest .* got \['Fsdp_AnyOrder.0.full_weight', "):
            context.release_memory_pool()
        context.reshard_idle_units()
        with pytest.raises(
            RuntimeError, match=r"no graph that needs their weights, got \['layers\.\d\.0\.full_weight', "
        ):
            context.release_memory_pool()
        del loss
        context.release_memory_pool()
    assert all(
        torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(*map(_parameters, (model, twin)), strict=True)
    )


def _parameters(model: nn.Module) -> list[Any]:
    return list(model.parameters())


def _never_quiet() -> list[str]:
    model = _AnyOrder()
    with fully_shard_context(DEVICE, trace_pool=True) as context:
        shard_layers(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(MAX_POSTPONED + 2):
            _step(model, optimizer, step)
            model.layers[1].unshard()
    assert not context.pool.is_active
    return [str(item.message) for item in caught]


def test_a_pool_that_cannot_begin_says_so() -> None:
    for messages in run_ranks(2, _never_quiet):
        assert len(messages) == 1
        assert f"got ['layers.1.0.full_weight'] in use at {MAX_POSTPONED} forwards" in messages[0]


def test_release_and_resume() -> None:
    run_ranks(2, _released)


def _two_roots(trains_second: bool, num_steps: int) -> tuple[list[bool], int]:
    """As generator and discriminator: two roots, stepped one after another, or only the first."""
    first, second = _AnyOrder(), _AnyOrder()
    with fully_shard_context(DEVICE, trace_pool=True) as context:
        shard_layers(first)
        shard_layers(second)
    optimizers = [fully_shard_optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (first, second)]
    active = []
    for step in range(num_steps):
        second(first(_batch(step)).detach()).square().mean().backward()
        if trains_second:
            optimizers[1].step()
        optimizers[1].zero_grad()
        second(first(_batch(step))).square().mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        active.append(context.pool.is_active)
    return active, context.pool.num_fallbacks


def test_an_iteration_ends_when_all_that_ran_is_stepped() -> None:
    for result in run_ranks(2, _two_roots, True, 4):
        assert result == ([False, True, True, True], 0)


def test_an_iteration_ends_after_some_steps_in_any_case() -> None:
    for active, _ in run_ranks(2, _two_roots, False, MAX_RECORDED_STEPS + 2):
        assert active == [False] * MAX_RECORDED_STEPS + [True] * 2


def _evaluated_first() -> None:
    """Evaluations before training are not recorded; without a step nothing is planned."""
    model = _AnyOrder()
    with fully_shard_context(DEVICE, trace_pool=True) as context:
        shard_layers(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(20):
        _evaluate(model, _batch(0))
    assert len(context.pool._events) <= 12
    for _ in range(3):
        model(_batch(0)).sum().backward()
        assert context.pool.plan is None
    optimizer.step()
    _evaluate(model, _batch(0))
    assert context.pool.is_active and context.pool.num_fallbacks == 0


def test_evaluation_before_training() -> None:
    run_ranks(2, _evaluated_first)


def _nothing_to_train() -> None:
    with fully_shard_context(DEVICE, trace_pool=True):
        fully_shard(nn.Linear(2, 2).requires_grad_(False))


def test_a_pool_without_effect_is_refused() -> None:
    for message in run_ranks_expecting(1, ValueError, _nothing_to_train):
        assert "fully_shard_context trace_pool: expected units with trainable parameters, got none" in message


def _static_gradients() -> None:
    with fully_shard_context(DEVICE, trace_pool=True):
        fully_shard(nn.Linear(2, 2), schedule_policy=SchedulePolicy(static_gradients=True))


def test_asking_for_what_a_pool_does_is_refused() -> None:
    for message in run_ranks_expecting(1, ValueError, _static_gradients):
        assert "SchedulePolicy static_gradients: expected False with trace_pool=True" in message


def _no_pool() -> None:
    with fully_shard_context(DEVICE) as context:
        fully_shard(nn.Linear(2, 2))
    context.release_memory_pool()


def test_release_without_a_pool_is_refused() -> None:
    for message in run_ranks_expecting(1, RuntimeError, _no_pool):
        assert "release_memory_pool: expected a context with a pool, got one without" in message


def _another_stream() -> tuple[list[str], int, list[str]]:
    """Train on one stream, and then on another one; the communication streams stay the same."""
    trace = Trace()
    with observe(trace), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _AnyOrder()
        with fully_shard_context("cpu", trace_pool=True) as context:
            shard_layers(model)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            if step < 3:
                _step(model, optimizer, step)
                continue
            side = trace.new_stream("side")
            side.wait_stream(trace.compute)
            with side:
                _step(model, optimizer, step)
    assert context.pool.is_active
    return trace.races, context.pool.num_fallbacks, [str(item.message) for item in caught]


def test_buffers_of_another_stream_lie_elsewhere() -> None:
    """Packed gradients of six units; gathered weights and reduced gradients have the streams that they had."""
    for races, number, messages in run_ranks(2, _another_stream):
        assert races == [] and number == 6
        assert [message for message in messages if ".full_grad: it was asked for on another stream" in message]
