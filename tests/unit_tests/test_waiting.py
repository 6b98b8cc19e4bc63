# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""While a gradient waits for a reduction, whatever clears gradients sees it, and whatever reads it is refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import Placements, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.experimental.waiting import WaitingGradient
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import full_gradients

LAYOUTS: list[tuple[str, str | None]] = [("no_shard", None), ("optim", None), ("optim_grads_params", "no_shard")]


def _sharded(strategy: str, outer: str | None) -> Any:
    mesh = lasting_mesh((dist.get_world_size(),) if outer is None else (2, dist.get_world_size() // 2))
    return shard_layers(build("mlp"), mesh=mesh, placements=Placements.from_strategy(strategy, outer=outer))


def _backward(model: Any, seed: int, is_last: bool) -> None:
    inputs, targets = make_batch(model, 4, seed=10 * seed + dist.get_rank())
    with microbatch(model.context, is_last=is_last):
        loss_of(model, inputs, targets).backward()


def _by_hand(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = None


def _around(model: Any) -> nn.Module:
    return nn.Sequential(model)


CLEARINGS: dict[str, Callable[[Any], None]] = {
    "wrapper": lambda model: _around(model).zero_grad(),
    "wrapper_zero": lambda model: _around(model).zero_grad(set_to_none=False),
    "plain_optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(),
    "plain_zero": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False),
    "plain_foreach_zero": lambda model: torch.optim.SGD(model.parameters(), 0.1, foreach=True).zero_grad(False),
    "by_hand": _by_hand,
}


def _cleared(strategy: str, outer: str | None) -> None:
    for name, clear in CLEARINGS.items():
        model, fresh = _sharded(strategy, outer), _sharded(strategy, outer)
        _backward(model, 0, is_last=False)
        assert all(isinstance(parameter.grad, WaitingGradient) for parameter in model.parameters()), name
        clear(model)
        assert all(parameter.grad is None for parameter in model.parameters()), name
        groups = [group for unit in (*model.layers, model) for group in unit.parameter_groups]
        assert not any(group.has_unreduced_gradients for group in groups), name
        for each in (model, fresh):
            _backward(each, 1, is_last=False)
            _backward(each, 2, is_last=True)
        expected = full_gradients(fresh)
        assert all(torch.equal(gradient, expected[key]) for key, gradient in full_gradients(model).items()), name


@pytest.mark.parametrize(("strategy", "outer"), LAYOUTS)
def test_whatever_clears_gradients_clears_those_that_wait(strategy: str, outer: str | None) -> None:
    run_ranks(2 if outer is None else 4, _cleared, strategy, outer)


def _one_cleared() -> None:
    """Clearing one parameter leaves the others' sums; new gradients of that one wait again."""
    model, fresh = _sharded("no_shard", None), _sharded("no_shard", None)
    first: Any = model.layers[0].weight if hasattr(model.layers[0], "weight") else next(model.parameters())
    _backward(model, 0, is_last=False)
    first.grad = None
    assert first.grad is None
    _backward(model, 1, is_last=False)
    assert isinstance(first.grad, WaitingGradient)
    _backward(model, 2, is_last=True)
    for seed in range(3):
        _backward(fresh, seed, is_last=seed == 2)
    later = _sharded("no_shard", None)
    for seed in (1, 2):
        _backward(later, seed, is_last=seed == 2)
    found, every, last = full_gradients(model), full_gradients(fresh), full_gradients(later)
    name = next(name for name, parameter in model.named_parameters() if parameter is first)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, last[key] if key == name else every[key], rtol=1e-6, atol=1e-7)


def test_one_parameter_is_cleared_alone() -> None:
    run_ranks(2, _one_cleared)


READINGS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda gradient: gradient.norm(),
    "add": lambda gradient: gradient + 1,
    "mul_": lambda gradient: gradient.mul_(0.5),
    "foreach_norm": lambda gradient: torch._foreach_norm([gradient]),
    "to_local": lambda gradient: gradient.to_local(),
    "full_tensor": lambda gradient: gradient.full_tensor(),
    "data": lambda gradient: gradient.data,
    "item": lambda gradient: gradient.sum().item(),
    "pickle": pickle.dumps,
    "save": lambda gradient: torch.save(gradient, io.BytesIO()),
}


def _read(name: str) -> None:
    model = _sharded("optim", None)
    _backward(model, 0, is_last=False)
    parameter = next(model.parameters())
    gradient: Any = parameter.grad
    assert (gradient.shape, gradient.dtype, gradient.device.type) == (parameter.shape, torch.float32, DEVICE)
    assert gradient.numel() == parameter.numel() and not gradient.is_sparse and "WaitingGradient" in repr(gradient)
    with pytest.raises(RuntimeError, match=r"of the gradient of \S+: expected a gradient that has been reduced"):
        READINGS[name](gradient)
    _backward(model, 1, is_last=True)
    assert not isinstance(parameter.grad, WaitingGradient)


@pytest.mark.parametrize("name", READINGS)
def test_values_that_wait_are_not_read(name: str) -> None:
    run_ranks(2, _read, name)


def _adapted() -> None:
    """`set_to_none=False` of an adapted optimizer, and a frozen parameter, which has no gradient."""
    model = _sharded("no_shard", None)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    _backward(model, 0, is_last=False)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in model.parameters())
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    _backward(model, 0, is_last=False)
    assert frozen.grad is None
    others = list(model.parameters())[1:]
    assert all(isinstance(parameter.grad, WaitingGradient) for parameter in others)
    optimizer.zero_grad()


def test_adapted_optimizers_and_frozen_parameters() -> None:
    run_ranks(2, _adapted)
