# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Training on 1 to 4 ranks equals training in one process: losses, norms, gradients, weights, optimizer state."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp.experimental import MixedPrecisionPolicy, SchedulePolicy
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import MODELS
from tests.unit_tests.oracle import Recipe, assert_parity, run_reference, run_sharded


def _check(recipe: Recipe, world_size: int, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    reference = run_reference(recipe, world_size)
    for run in run_ranks(world_size, run_sharded, recipe):
        assert_parity(run, reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_models_and_world_sizes(model: str, world_size: int) -> None:
    _check(Recipe(model=model), world_size)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_accumulation(optimizer: str, set_to_none: bool, microbatches: int) -> None:
    recipe = Recipe(optimizer=optimizer, set_to_none=set_to_none, microbatches=microbatches)
    _check(recipe, 2)


@pytest.mark.parametrize(
    "shard",
    [
        {"schedule_policy": SchedulePolicy(forward_prefetch_units=0, backward_prefetch_units=0)},
        {"schedule_policy": SchedulePolicy(forward_prefetch_units=3, backward_prefetch_units=3)},
        {"schedule_policy": SchedulePolicy(forward_prefetch_units=9, forward_prefetch_numel=200)},
        {"schedule_policy": SchedulePolicy(reshard_after_forward=True)},
        {"schedule_policy": SchedulePolicy(reshard_after_forward=False)},
    ],
    ids=["no_prefetch", "deep_prefetch", "numel_budget", "reshard", "keep"],
)
def test_schedules_do_not_change_numbers(shard: dict[str, SchedulePolicy]) -> None:
    _check(Recipe(model="tied", shard=shard), 2)


def test_unified_stream_and_no_clipping() -> None:
    recipe = Recipe(model="tied", context={"unify_communication_stream": True}, max_norm=None)
    _check(recipe, 2)


def test_float64_is_exact_to_rounding() -> None:
    recipe = Recipe(model="tied", dtype=torch.float64, policy=MixedPrecisionPolicy(None))
    _check(recipe, 3, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_compute_follows_wide_reference(dtype: torch.dtype) -> None:
    """Half-precision compute over fp32 main weights stays near the fp32 run; its error is that of the compute dtype."""
    recipe = Recipe(model="tied", dtype=dtype, steps=20, max_norm=None)
    reference = run_reference(Recipe(model="tied", steps=20, max_norm=None), 2)
    for run in run_ranks(2, run_sharded, recipe):
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(reference.losses), rtol=0.03, atol=0.03)
        assert run.losses[-1] < run.losses[0]
        assert all(weight.dtype is torch.float32 for weight in run.weights.values())
