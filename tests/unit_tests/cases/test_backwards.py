# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Backwards that are not one per forward: recomputed, repeated, partial, or missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.unit_tests.cases.compare import assert_close, compare_training
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.models import Block, build, shard_layers
from tests.unit_tests.oracle import assert_at_rest, full_gradients
from tests.unit_tests.trace import CollectiveLog


class _Chain(nn.Module):
    """Blocks and a last layer of one element, fewer than ranks; with `reentrant` given, layers are recomputed."""

    def __init__(self, reentrant: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(6), nn.Sequential(Block(6), nn.Dropout(dropout)), _Gain()])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class _Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain).tanh()


def _mean_square(module: Any, batch: torch.Tensor) -> torch.Tensor:
    """A leaf that needs a gradient, so that reentrant checkpoints have one."""
    loss = module(batch.requires_grad_()).square().mean()
    loss.backward()
    return loss


def _recomputed(reentrant: bool, dropout: float, optimizer: str) -> None:
    compare_training(_Chain(reentrant, dropout), shard_layers, _mean_square, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_pb066_recomputed_units_close(reentrant: bool, dropout: float, optimizer: str) -> None:
    run_ranks(2, _recomputed, reentrant, dropout, optimizer)


class _Saves(nn.Module):
    """Recomputes its blocks, all but the products: inside its units, around each of them, or around all at once."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_RecomputesInside() if where == "inside" else Block(6) for _ in range(3)])
        self.where = where

    def chain(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _recompute_but_products(layer, x) if self.where == "outside" else layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _recompute_but_products(self.chain, x) if self.where == "across" else self.chain(x)


class _RecomputesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _recompute_but_products(self.block, x)


def _recompute_but_products(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
    out: torch.Tensor = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    return out


def _selectively_recomputed(where: str) -> None:
    compare_training(_Saves(where), shard_layers, _mean_square)


@pytest.mark.parametrize("where", ["inside", "outside", "across"])
def test_pb066_selective_recomputation(where: str) -> None:
    run_ranks(2, _selectively_recomputed, where)


# --- PB-086 -----------------------------------------------------------------------------------------------------------


def _two_losses(clears_between: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        out = module(batch)
        first, second = out.square().mean(), out.sin().mean()
        first.backward(retain_graph=True)
        if clears_between:
            module.zero_grad()
        second.backward()
        return first + second

    return step


def _retained(clears_between: bool, optimizer: str) -> None:
    compare_training(_Chain(None), shard_layers, _two_losses(clears_between), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clears_between", [False, True])
def test_pb086_two_losses_over_one_graph(clears_between: bool, optimizer: str) -> None:
    run_ranks(2, _retained, clears_between, optimizer)


def _retained_collectives() -> None:
    """Each backward over the retained graph reduces each unit once."""
    reference = _Chain(None)
    model: Any = shard_layers(copy.deepcopy(reference))
    batches = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(0))
    loss = model(batches[dist.get_rank()]).square().mean()
    for retain_graph in (True, True, False):
        with CollectiveLog() as log:
            loss.backward(retain_graph=retain_graph)
        assert_at_rest(model)
        assert [entry[0] for entry in log.entries].count("reduce_scatter") == len(model.layers)
    for batch in batches:
        (3 * reference(batch).square().mean() / len(batches)).backward()
    for name, gradient in full_gradients(model).items():
        expected = reference.get_parameter(name).grad
        assert expected is not None
        assert_close(gradient, expected, name)


def test_pb086_each_backward_reduces_once() -> None:
    run_ranks(2, _retained_collectives)


def _gradients_of_inputs() -> None:
    """torch.autograd.grad of an activation and of an input, then an ordinary backward over the same graph."""
    reference = _Chain(None)
    model = shard_layers(copy.deepcopy(reference))
    batches = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(0))
    found: list[tuple[torch.Tensor, ...]] = []
    for module, batch in ((model, batches[dist.get_rank()]), (reference, batches[dist.get_rank()])):
        x = batch.clone().requires_grad_()
        hidden = module.layers[0](x)
        loss = module.layers[2](module.layers[1](hidden)).square().mean()
        found.append(torch.autograd.grad(loss, [hidden, x], retain_graph=True))
        if module is model:
            assert_at_rest(model)
            assert not any(gradient.any() for gradient in full_gradients(model).values())
        found.append(torch.autograd.grad(loss, hidden, retain_graph=True))
        loss.backward()
    for ours, theirs in zip(found[0] + found[1], found[2] + found[3], strict=True):
        assert torch.equal(ours, theirs)
    assert_at_rest(model)
    reference.zero_grad()
    for batch in batches:
        (reference(batch).square().mean() / len(batches)).backward()
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert_close(full_gradients(model)[name], parameter.grad, name)


def test_pb086_autograd_grad_of_inputs_leaves_parameters_alone() -> None:
    run_ranks(2, _gradients_of_inputs)


def _gradients_of_weights(how: str) -> None:
    model: Any = shard_layers(build("mlp"))
    loss = model(torch.ones(2, 7)).sum()
    weight = model.layers[0].weight
    if how == "grad":
        torch.autograd.grad(loss, [weight])
    elif how == "grad_allow_unused":
        torch.autograd.grad(loss, [weight], allow_unused=True)
    else:
        loss.backward(inputs=[weight])


@pytest.mark.parametrize("how", ["grad", "grad_allow_unused", "backward"])
def test_pb086_gradients_of_some_weights_only_are_refused(how: str) -> None:
    """Sharded parameters are not in the graph: torch would return nothing, or call them unused."""
    for message in run_ranks_expecting(2, RuntimeError, _gradients_of_weights, how):
        assert message.startswith(f"{how.partition('_')[0]} of the sharded parameter layers.0.weight: expected")


# --- PB-091 -----------------------------------------------------------------------------------------------------------


class _Returns(nn.Module):
    """Units whose outputs carry no gradient of theirs: unchanged inputs, outputs that nobody uses, constants."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6), _Passes(how), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x, _ = self.layers[1](x)
        return self.layers[2](x)


class _Passes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.used, self.idle, self.how = nn.Linear(6, 6), nn.Linear(6, 6), how

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.how == "input":
            return x, x
        if self.how == "input_and_unused":
            return x, self.idle(x)
        if self.how == "second_unused":
            return self.used(x), self.idle(x)
        if self.how == "detached_second":
            return self.used(x), self.idle(x).detach()
        return x + self.used(x).detach(), self.idle(x)


def _without_gradient(how: str, optimizer: str) -> None:
    compare_training(_Returns(how), shard_layers, _mean_square, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("how", ["input", "input_and_unused", "second_unused", "detached_second", "detached"])
def test_pb091_outputs_without_gradient(how: str, optimizer: str) -> None:
    run_ranks(2, _without_gradient, how, optimizer)


class _InTurn(nn.Module):
    """One of two encoders runs in each step; with `zeroed` the other one runs, too, and counts for nothing."""

    def __init__(self, zeroed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)])
        self.zeroed = zeroed

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        first, second = self.layers[turn], self.layers[1 - turn]
        x = first(x) + 0 * second(x) if self.zeroed else first(x)
        return self.layers[2](x.tanh())


def _encoders_in_turn(zeroed: bool, optimizer: str) -> None:
    step_of_sharded, step_of_reference = iter(range(10)), iter(range(20))

    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        index = next(step_of_sharded) if module is not reference else next(step_of_reference) // 2
        loss = module(batch, index % 2).square().mean()
        loss.backward()
        return loss

    reference = _InTurn(zeroed)
    compare_training(reference, shard_layers, step, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("zeroed", [False, True])
def test_pb091_encoders_used_in_turn(zeroed: bool, optimizer: str) -> None:
    run_ranks(2, _encoders_in_turn, zeroed, optimizer)
