# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every sharding strategy gives the numbers of one process, and communicates exactly what its placements say."""

from __future__ import annotations

import gc
import io
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.experimental.allocator import default_allocator
from tests.unit_tests.accounting import Cost
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks
from tests.unit_tests.oracle import Recipe, Run, assert_parity, run_reference, run_sharded
from tests.unit_tests.trace import CollectiveLog

PRECISION = 1e-6 if DEVICE == "cpu" else 1e-5
"""Of float32 after ten steps: kernels of GPUs sum in another order where batches have other sizes."""
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = MixedPrecisionPolicy(torch.float32, main_grads_dtype=torch.float32)
LAYOUTS: list[tuple[str, str | None, tuple[int, ...]]] = [
    *((strategy, None, (n,)) for strategy in STRATEGIES for n in (1, 2, 3, 4)),
    *(("optim_grads_params", outer, shape) for outer in ("no_shard", "optim") for shape in ((2, 2), (2, 1), (1, 2))),
]
VARIANTS = list(itertools.product((1, 3), (True, False), ("sgd", "adam"), (torch.float32, torch.bfloat16)))
HALF = [variant for index, variant in enumerate(VARIANTS) if index.bit_count() % 2 == 0]
"""What two axes and more than two ranks run, for the sake of time: every three settings occur in all combinations."""


def _recipe(variant: tuple[int, bool, str, torch.dtype], **changes: Any) -> Recipe:
    microbatches, set_to_none, optimizer, dtype = variant
    policy = None if dtype is torch.float32 else BF16
    recipe = Recipe(optimizer=optimizer, microbatches=microbatches, set_to_none=set_to_none, dtype=dtype, policy=policy)
    return replace(recipe, **changes)


def _world_size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _run_all(recipes: list[Recipe]) -> bytes:
    """Train all recipes; bytes, since each tensor that a process hands over keeps a file open."""
    buffer = io.BytesIO()
    torch.save([run_sharded(recipe) for recipe in recipes], buffer)
    return buffer.getvalue()


@cache
def _runs(strategy: str, outer: str | None, shape: tuple[int, ...]) -> dict[Any, list[Run]]:
    """Return every rank's run of every variant."""
    placements = Placements.from_strategy(strategy, outer=outer)
    variants = VARIANTS if shape in ((1,), (2,)) else HALF
    recipes = [_recipe(variant, mesh=shape, shard={"placements": placements}) for variant in variants]
    answers = run_ranks(_world_size(shape), _run_all, recipes)
    by_rank = [torch.load(io.BytesIO(answer), weights_only=False) for answer in answers]
    return dict(zip(variants, zip(*by_rank, strict=True), strict=True))


@cache
def _reference(variant: tuple[int, bool, str, torch.dtype], world_size: int) -> Run:
    return run_reference(_recipe(variant), world_size)


def _named(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(str(item) for item in value)
    return str(value)


@pytest.mark.parametrize(("strategy", "outer", "shape"), LAYOUTS, ids=_named)
def test_wide_training_equals_one_process(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    for variant, runs in _runs(strategy, outer, shape).items():
        if variant[-1] is torch.float32:
            for run in runs:
                assert_parity(run, _reference(variant, _world_size(shape)), rtol=PRECISION, atol=PRECISION)


def _bits(run: Run) -> list[torch.Tensor]:
    states = [value for _, state in sorted(run.state.items()) for _, value in sorted(state.items())]
    return [torch.tensor(run.losses), torch.tensor(run.norms), *run.weights.values(), *states]


@pytest.mark.parametrize(("strategy", "outer", "shape"), LAYOUTS, ids=_named)
def test_all_ranks_hold_the_same_model(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    for runs in _runs(strategy, outer, shape).values():
        for run in runs[1:]:
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(_bits(run), _bits(runs[0]), strict=True))


NARROW = [variant for variant in VARIANTS if variant[-1] is torch.bfloat16]


@pytest.mark.parametrize("shape", [(1,), (2,)], ids=_named)
@pytest.mark.parametrize("variant", NARROW, ids=_named)
def test_narrow_training_is_the_same_for_all_strategies(variant: Any, shape: tuple[int, ...]) -> None:
    """Bit for bit on up to two ranks, where a sum has one order, between strategies that reduce as often."""
    runs = {strategy: _bits(_runs(strategy, None, shape)[variant][0]) for strategy in STRATEGIES}
    pairs = [("optim_grads", "optim_grads_params"), ("no_shard", "optim")]
    if variant[0] == 1:
        pairs.append(("optim", "optim_grads"))
    for one, other in pairs:
        assert all(torch.equal(a, b) for a, b in zip(runs[one], runs[other], strict=True)), f"{one} and {other}"


@pytest.mark.parametrize(("strategy", "outer", "shape"), LAYOUTS, ids=_named)
def test_narrow_training_follows_wide_training(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    runs = _runs(strategy, outer, shape)
    for variant in (variant for variant in NARROW if variant in runs):
        run = runs[variant][0]
        wide = _reference((*variant[:3], torch.float32), _world_size(shape))
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(wide.losses), rtol=0.02, atol=0.02)


DEPTH, WIDTH = 4, 48
NAMED = {
    **{strategy: (strategy, None) for strategy in STRATEGIES},
    "hsdp": ("optim_grads_params", "no_shard"),
    "hfsdp": ("optim_grads_params", "optim"),
    "zero1_over_both": ("optim", "optim"),
    "zero2_and_outer": ("optim_grads", "optim"),
}
ONE_AXIS = [(name, (n,)) for name in STRATEGIES for n in (1, 2, 4)]
TWO_AXES = [(name, shape) for name in list(NAMED)[4:] for shape in ((2, 2), (1, 2), (2, 1), (1, 1))]


def _cost(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    strategy, outer = NAMED[name]
    return Cost(
        Placements.from_strategy(strategy, outer=outer),
        shape,
        DEPTH,
        WIDTH * WIDTH,
        dtype.itemsize,
        4,
        dtype is torch.float32,
    )


def _sharded_tower(cost: Cost, dtype: torch.dtype) -> Any:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]).to(DEVICE, dtype)
    mesh = lasting_mesh(cost.shape)
    with fully_shard_context(DEVICE):
        for layer in model:
            fully_shard(layer, mesh, cost.placements)
        fully_shard(model, mesh, cost.placements)
    return model


def _step(model: Any, optimizer: torch.optim.Optimizer, dtype: torch.dtype, microbatches: int) -> None:
    for index in range(microbatches):
        with microbatch(model.context, is_last=index == microbatches - 1):
            model(torch.ones(2, WIDTH, dtype=dtype, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _for_dtypes(function: Callable[..., Any], name: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        function(name, shape, dtype)


def _counts(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Collectives of a step are those of the formula, none more and none less."""
    cost = _cost(name, shape, dtype)
    model = _sharded_tower(cost, dtype)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters()))
    for microbatches in (1, 3, 1):
        with CollectiveLog() as log:
            _step(model, optimizer, dtype, microbatches)
        expected = cost.collectives(microbatches, str(dtype), str(torch.float32))
        assert Counter(log.entries) == expected
    with torch.no_grad(), CollectiveLog() as log:
        for _ in range(2):
            model(torch.ones(2, WIDTH, dtype=dtype, device=DEVICE))
    refreshes = cost.collectives(0, str(dtype), str(torch.float32))
    gathers = Counter(entry for entry in log.entries) - refreshes
    assert bool(gathers) == cost.gathers, "weights that are whole are not gathered"


@pytest.mark.parametrize(("name", "shape"), [*ONE_AXIS, *TWO_AXES], ids=_named)
def test_collectives_are_those_of_the_formula(name: str, shape: tuple[int, ...]) -> None:
    run_ranks(_world_size(shape), _for_dtypes, _counts, name, shape)


def _memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Bytes at rest and at the peak are those of the formula, and gradients hold none between steps."""
    cost = _cost(name, shape, dtype)
    gc.collect()
    before = default_allocator.allocated_bytes
    model = _sharded_tower(cost, dtype)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    seen = []
    for _ in range(3):
        default_allocator.reset_peak()
        rest = default_allocator.allocated_bytes - before
        assert rest == cost.rest()
        _step(model, optimizer, dtype, 1)
        seen.append(default_allocator.peak_bytes - before - rest)
        assert not any(buffer.has_storage for layer in model for buffer in layer.parameter_groups[0].gradients.at)
    assert seen == [cost.peak_above_rest(counts_autograd=False)] * 3


@pytest.mark.parametrize(("name", "shape"), [*ONE_AXIS, *TWO_AXES], ids=_named)
def test_memory_is_that_of_the_formula(name: str, shape: tuple[int, ...]) -> None:
    run_ranks(_world_size(shape), _for_dtypes, _memory, name, shape)


def test_strategies_are_ordered_by_memory() -> None:
    """ZeRO-3 <= ZeRO-2 <= ZeRO-1 <= no sharding, at rest."""
    rests = [_cost(name, (4,), torch.bfloat16).rest(state_bytes=8) for name in reversed(STRATEGIES)]
    assert rests == sorted(rests) and rests[0] < rests[-1]


def _held_locals(name: str) -> None:
    """What somebody holds of a gradient stays as it is when gradients are cleared and computed anew."""
    model = nn.Linear(4, 4)
    fully_shard(model, placements=Placements.from_strategy(name))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    held, expected = [], []
    for step in range(3):
        model(torch.full((1, 4), 1.0 + step)).sum().backward()
        with torch.set_grad_enabled(step == 1):
            held += [model.weight.grad.to_local(), model.bias.grad.detach().to_local()]
        expected += [local.clone() for local in held[-2:]]
        optimizer.zero_grad()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(held, expected, strict=True))


@pytest.mark.parametrize("name", STRATEGIES)
def test_local_gradients_outlive_zero_grad(name: str) -> None:
    run_ranks(2, _held_locals, name)


def _static_gradients() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, schedule_policy=SchedulePolicy(static_gradients=True))
    pointers = set()
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        pointers.add(model.weight.grad.to_local().data_ptr())
        model.zero_grad()
        assert model.weight.grad is None
        assert model.parameter_groups[0].gradients.at.main.has_storage
    assert len(pointers) == 1


def test_static_gradients_keep_their_addresses() -> None:
    run_ranks(2, _static_gradients)


def _whole_tensors(recipe: Recipe) -> tuple[Run, list[tuple[int, int]]]:
    """Train, and return how many elements of each parameter this rank holds, and how many there are."""
    held: list[tuple[int, int]] = []

    def note(module: nn.Module) -> None:
        held.extend((p._local_tensor.numel(), p.numel()) for p in module.parameters())  # type: ignore[attr-defined]

    run = run_sharded(recipe)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    assert recipe.mesh is not None
    fully_shard(model, lasting_mesh(recipe.mesh), **recipe.shard)
    note(model)
    return run, held


@pytest.mark.parametrize(
    ("strategy", "outer", "shape"),
    [("optim", None, (2,)), ("optim_grads_params", None, (3,)), ("optim_grads_params", "optim", (2, 2))],
    ids=_named,
)
def test_whole_tensors_in_shards_equal_one_process(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    placements = Placements.from_strategy(strategy, outer=outer, tensor_atomic=True)
    recipe = Recipe(mesh=shape, shard={"placements": placements})
    answers = run_ranks(_world_size(shape), _whole_tensors, recipe)
    for run, _ in answers:
        assert_parity(run, run_reference(recipe, _world_size(shape)), rtol=PRECISION, atol=PRECISION)
    for of_one in zip(*(held for _, held in answers), strict=True):
        total = of_one[0][1]
        assert sorted(local for local, _ in of_one) == [0] * (_world_size(shape) - 1) + [total]


def test_whole_tensors_in_low_bits_are_refused() -> None:
    for message in run_ranks(2, _low_bits_in_whole_tensors):
        assert message.startswith("Placements.tensor_atomic: expected False for weights in low bits")


def _low_bits_in_whole_tensors() -> str:
    placements = Placements.from_strategy("optim", tensor_atomic=True)
    with pytest.raises(NotImplementedError) as raised:
        fully_shard(nn.Linear(32, 32), None, placements, MixedPrecisionPolicy(fp8=True))
    return str(raised.value)
