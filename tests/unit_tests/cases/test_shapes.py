# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""PB-099: empty, one-element and strided parameters, units without parameters, containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp.experimental import fully_shard
from tests.unit_tests.cases.compare import compare_training
from tests.unit_tests.launch import run_ranks, run_ranks_expecting


class _Empty(nn.Module):
    """Parameters without elements, and of one element, beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.flat_nothing = nn.Parameter(torch.empty(0))
        self.one = nn.Parameter(torch.full((1,), 0.5))
        self.cube = nn.Parameter(torch.full((1, 1, 1), 2.0))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.one + self.cube[0, 0] + self.nothing.sum() + self.flat_nothing.sum()


class _OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum()


class _Strided(nn.Module):
    """A transposed weight, and a convolution in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.linspace(-1, 1, 42).view(7, 6).t())
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.out = nn.Linear(7, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 3, 2, 1).expand(-1, -1, -1, 2).contiguous(memory_format=torch.channels_last)
        return self.out((x @ self.transposed).tanh()) + self.convolution(image).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "empty": _Empty,
    "only_empty": lambda: nn.Sequential(nn.Linear(6, 6), _OnlyEmpty(), nn.Linear(6, 6)),
    "strided": lambda: nn.Sequential(_Strided(), _Strided()),
    "without_parameters": lambda: nn.Sequential(nn.Sequential(nn.Tanh()), nn.Linear(6, 6), nn.Sequential(nn.Tanh())),
}


def _shard(model: Any) -> None:
    for child in model.children() if isinstance(model, nn.Sequential) else ():
        fully_shard(child)
    fully_shard(model)


def _step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    return loss


def _trains(name: str) -> None:
    torch.manual_seed(0)
    compare_training(MODELS[name](), _shard, _step)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_pb099_unusual_shapes_train(name: str, world_size: int) -> None:
    run_ranks(world_size, _trains, name)


def _scalar() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    fully_shard(model)


def _container(container: Callable[[], nn.Module]) -> None:
    fully_shard(container())


def test_pb099_scalars_are_refused() -> None:
    for message in run_ranks_expecting(2, ValueError, _scalar):
        assert "got the scalar temperature. Give it shape (1,)" in message


def _list() -> nn.Module:
    return nn.ModuleList([nn.Linear(2, 2)])


def _dict() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(2, 2)})


@pytest.mark.parametrize("container", [_list, _dict])
def test_pb099_containers_without_a_forward_are_refused(container: Callable[[], nn.Module]) -> None:
    for message in run_ranks_expecting(2, ValueError, _container, container):
        assert "expected a module with a forward, got Module" in message and "would never be gathered" in message


def _root_container() -> None:
    """A container whose modules are units is a root: it has nothing to gather, and gives its units one context."""
    model = nn.ModuleList([fully_shard(nn.Linear(6, 6)) for _ in range(2)])
    fully_shard(model)
    units: list[Any] = list(model)
    assert units[0].context is units[1].context and not model.parameter_groups
    units[1](units[0](torch.ones(1, 6))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_pb099_container_of_units_is_a_root() -> None:
    run_ranks(2, _root_container)
