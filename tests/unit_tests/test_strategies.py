# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every sharding strategy gives the numbers of one process, and communicates exactly what its placements say."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from megatron.core.distributed.fsdp.experimental import MixedPrecisionPolicy, Placements
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.oracle import Recipe, Run, assert_parity, run_reference, run_sharded

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = MixedPrecisionPolicy(torch.float32, main_grads_dtype=torch.float32)
S, R = Shard(0), Replicate()
LAYOUTS: list[tuple[str, str | None, tuple[int, ...]]] = [
    *((strategy, None, (n,)) for strategy in STRATEGIES for n in (1, 2, 3, 4)),
    *(
        ("optim_grads_params", outer, shape)
        for outer in ("no_shard", "optim")
        for shape in ((2, 2), (2, 1), (1, 2), (1, 1))
    ),
]
VARIANTS = list(itertools.product((1, 3), (True, False), ("sgd", "adam"), (torch.float32, torch.bfloat16)))


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
    recipes = [_recipe(variant, mesh=shape, shard={"placements": placements}) for variant in VARIANTS]
    answers = run_ranks(_world_size(shape), _run_all, recipes)
    by_rank = [torch.load(io.BytesIO(answer), weights_only=False) for answer in answers]
    return dict(zip(VARIANTS, zip(*by_rank, strict=True), strict=True))


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
                assert_parity(run, _reference(variant, _world_size(shape)), rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("variant", NARROW, ids=_named)
@pytest.mark.parametrize(("strategy", "outer", "shape"), LAYOUTS, ids=_named)
def test_narrow_training_follows_wide_training(
    strategy: str, outer: str | None, shape: tuple[int, ...], variant: Any
) -> None:
    run = _runs(strategy, outer, shape)[variant][0]
    wide = _reference((*variant[:3], torch.float32), _world_size(shape))
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(wide.losses), rtol=0.02, atol=0.02)
