# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A weight that two modules use: tied, read by the parent, or computed with by a container."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.distributed.fsdp.experimental import FsdpModule, fully_shard
from tests.unit_tests.cases.compare import compare_training
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.oracle import assert_at_rest


class _Tied(nn.Module):
    """Ten rows, which no group of three or four ranks shares evenly, for an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(10, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.emb(tokens)).tanh())


def _tied_units(inner: tuple[str, ...]) -> None:
    model = _Tied()
    for name in inner[:-1]:
        fully_shard(model.get_submodule(name))
    with pytest.raises(ValueError, match="Shard the smallest module that holds both uses as one unit"):
        fully_shard(model.get_submodule(inner[-1]))
    assert not isinstance(model.get_submodule(inner[-1]), FsdpModule)
    fully_shard(model.get_submodule(inner[-1]))


@pytest.mark.parametrize("inner", [("emb", "head"), ("head", "emb"), ("emb", ""), ("head", "")], ids=str)
def test_pb055_weight_tied_across_units_is_refused(inner: tuple[str, ...]) -> None:
    for message in run_ranks_expecting(3, ValueError, _tied_units, inner):
        assert f"which unit {'Embedding' if inner[0] == 'emb' else 'Linear'}#0 has sharded already" in message
        assert "a weight tied across two units" in message


def _next_token_loss(module: Any, batch: torch.Tensor) -> torch.Tensor:
    tokens = (batch.abs() * 100).long() % 10
    loss = F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss


def _tied_in_one_unit(optimizer: str) -> None:
    def shard(model: Any) -> None:
        fully_shard(model.mid)
        fully_shard(model)

    model = compare_training(_Tied(), shard, _next_token_loss, optimizer=optimizer)
    assert model.emb.weight is model.head.weight


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_pb055_every_row_of_a_tied_weight_is_updated_in_one_unit(world_size: int, optimizer: str) -> None:
    run_ranks(world_size, _tied_in_one_unit, optimizer)


class _Parent(nn.Module):
    """Reads a weight of one of its children in its own forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.norm, self.gain = nn.Embedding(10, 6), nn.LayerNorm(6), _Gain()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.how == "linear":
            return F.linear(x, self.emb.weight)
        if self.how == "after_the_child":
            return x * self.norm.weight
        if self.how == "one_element":
            return x * self.gain.value
        return torch.ones(1) * self.gain.value


class _Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


def _sharded_parent(how: str) -> Any:
    model: Any = _Parent(how)
    for child in (model.emb, model.norm, model.gain):
        fully_shard(child)
    return fully_shard(model)


def _parent_reads(how: str) -> None:
    _sharded_parent(how)(torch.ones(2, 6))


def _child_runs_after_a_refusal(how: str) -> None:
    model = _sharded_parent(how)
    with pytest.raises(RuntimeError, match="inside its unit's forward"):
        model(torch.ones(2, 6))
    model.norm(torch.ones(2, 6)).sum().backward()
    assert_at_rest(model)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("linear", "linear of the sharded parameter emb.weight"),
        ("after_the_child", "mul of the sharded parameter norm.weight"),
        ("one_element", "mul of the sharded parameter gain.value"),
        ("both_one_element", "mul of the sharded parameter gain.value"),
    ],
)
def test_pb062_parent_that_reads_a_childs_weight_is_refused(how: str, name: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _parent_reads, how):
        assert name in message and "inside its unit's forward" in message
    run_ranks(2, _child_runs_after_a_refusal, how)


class _Grouped(nn.Module):
    """Computes with its children's weights in one product, without calling the children."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,koi->bo", x, torch.stack([self.a.weight, self.b.weight])).tanh()


def _container(optimizer: str) -> None:
    def shard(model: nn.Sequential) -> None:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)

    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = module(batch).square().mean()
        loss.backward()
        return loss

    compare_training(nn.Sequential(_Grouped(), _Grouped()), shard, step, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_pb109_container_computes_with_its_childrens_weights(optimizer: str) -> None:
    run_ranks(2, _container, optimizer)


def _children_as_units() -> None:
    model: Any = copy.deepcopy(_Grouped())
    fully_shard(model.a)
    fully_shard(model.b)
    fully_shard(model)(torch.ones(2, 6))


def test_pb109_weights_of_children_that_are_units_are_refused() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _children_as_units):
        assert "stack of the sharded parameter a.weight" in message and "inside its unit's forward" in message
