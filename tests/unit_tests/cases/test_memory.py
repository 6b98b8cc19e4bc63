# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters beside trainable ones, what stays gathered in backward, odd sizes, and what deletion frees."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    FsdpModule,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.experimental.boundary import ForwardCall
from tests.unit_tests.cases.compare import compare_training
from tests.unit_tests.launch import DEVICE, run_ranks
from tests.unit_tests.models import shard_layers
from tests.unit_tests.oracle import assert_at_rest


def _mean_square(module: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = module(batch).square().mean()
    if loss.requires_grad:
        loss.backward()
    return loss


def _units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FsdpModule)]


# --- PB-098 -----------------------------------------------------------------------------------------------------------


class _LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) + self.up(self.down(x))).tanh()


class _FineTuned(nn.Module):
    """Units and a root, each of them trainable, frozen, or both."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([self.emb, _LowRank(), _LowRank()])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        if how == "all_frozen":
            self.requires_grad_(False)
        if how in ("frozen_root", "frozen_root_and_embedding"):
            self.scale.requires_grad_(False)
        if how in ("frozen_embedding", "frozen_root_and_embedding"):
            self.emb.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb((x.detach()[:, :3].abs() * 100).long() % 7) * self.scale
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def _partly_frozen(how: str, optimizer: str) -> None:
    model = compare_training(_FineTuned(how), shard_layers, _mean_square, optimizer=optimizer)
    for unit in _units(model):
        for group in unit.parameter_groups:
            assert (group.gradients is not None) == group.requires_grad
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("how", ["pairs", "frozen_embedding", "frozen_root", "frozen_root_and_embedding", "all_frozen"])
def test_pb098_frozen_parameters_have_no_gradient_buffers(how: str, optimizer: str) -> None:
    run_ranks(2, _partly_frozen, how, optimizer)


def _all_frozen_passes_gradients() -> None:
    """A frozen model between trainable parts passes gradients on."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)
    found = []
    for shards in (False, True):
        if shards:
            fully_shard(plain[0])
            fully_shard(plain)
        x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
        plain(x).square().sum().backward()
        found.append(x.grad)
    assert_at_rest(plain)
    assert torch.equal(found[0], found[1])


def test_pb098_frozen_model_passes_gradients_to_its_input() -> None:
    run_ranks(2, _all_frozen_passes_gradients)


# --- PB-112, PB-113 ---------------------------------------------------------------------------------------------------


class _Odd(nn.Module):
    """Five equal units, one four times as large among them, and parameters of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(6, 12, bias=False), nn.Tanh(), nn.Linear(12, 6, bias=False))
        equal = [nn.Linear(6, 6, bias=False) for _ in range(5)]
        self.layers = nn.ModuleList([*equal[:2], wide, *equal[2:]])
        self.scale, self.shift = nn.Parameter(torch.linspace(0.5, 1.5, 6)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * self.scale).tanh() + self.shift
        return x


def _odd_unit(optimizer: str) -> None:
    model = compare_training(_Odd(), shard_layers, _mean_square, optimizer=optimizer)
    assert [layer.num_parameter_elements for layer in model.layers] == [36, 36, 144, 36, 36, 36]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_pb112_unit_larger_than_the_others(optimizer: str) -> None:
    run_ranks(2, _odd_unit, optimizer)


def _gathered_bytes(model: nn.Module) -> int:
    groups = [group for unit in _units(model) for group in unit.parameter_groups]
    return sum(group.full_weight.local.untyped_storage().nbytes() for group in groups)


def _frozen_memory(adapter_at: str, input_needs_gradient: bool) -> tuple[list[int], int]:
    """Return gathered bytes at each gradient between units, and the bytes of one unit."""
    torch.manual_seed(0)
    frozen: list[nn.Module] = [nn.Linear(16, 16).requires_grad_(False) for _ in range(6)]
    adapter = nn.Linear(16, 16)
    layers = {"first": [adapter, *frozen], "last": [*frozen, adapter], "middle": [*frozen[:3], adapter, *frozen[3:]]}
    model = nn.Sequential(*layers[adapter_at])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    gathered: list[int] = []
    for _ in range(2):
        hidden = torch.ones(2, 16, requires_grad=input_needs_gradient)
        for layer in model:
            hidden = layer(hidden).tanh()
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: gathered.append(_gathered_bytes(model)))
            else:
                assert _gathered_bytes(model) <= 2 * 4 * 16 * 17
        hidden.sum().backward()
        assert_at_rest(model)
        assert _gathered_bytes(model) == 0
    return gathered, 4 * 16 * 17


@pytest.mark.parametrize("input_needs_gradient", [False, True])
@pytest.mark.parametrize("adapter_at", ["first", "middle", "last"])
def test_pb113_gathered_storage_in_backward_is_two_units(adapter_at: str, input_needs_gradient: bool) -> None:
    """The unit whose backward is about to begin or has just ended, and the one gathered ahead."""
    num_hooks = 7 if input_needs_gradient else {"first": 7, "middle": 4, "last": 1}[adapter_at]
    for gathered, unit_bytes in run_ranks(2, _frozen_memory, adapter_at, input_needs_gradient):
        assert len(gathered) == 2 * num_hooks
        assert max(gathered) <= 2 * unit_bytes


# --- PB-114 -----------------------------------------------------------------------------------------------------------


class _Fails(nn.Module):
    """Raises inside a unit's forward, or in the backward between two units, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), _Stage(), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fails_in = nn.Linear(6, 6), "nothing"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.fails_in == "forward":
            raise ZeroDivisionError("a bad batch")
        if self.fails_in == "backward":
            x.register_hook(_fail)
        return x


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError("a bad gradient")


def _fail_once(model: Any, where: str) -> None:
    """In a function of its own, so that no frame of the exception outlives it."""
    model.layers[1].fails_in = where
    try:
        model(torch.ones(2, 6)).sum().backward()
    except ZeroDivisionError:
        return
    raise AssertionError(f"no exception in {where}")


def _deleted_after_exception(where: str, steps_after: int) -> None:
    model: Any = shard_layers(_Fails())
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    gc.collect()
    gc.disable()
    try:
        _fail_once(model, where)
        model.layers[1].fails_in = "nothing"
        for _ in range(steps_after):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        groups = [group for unit in _units(model) for group in unit.parameter_groups]
        buffers = [b for group in groups for b in (group.main_weight, group.full_weight, group.gradients.at.main)]
        alive = [weakref.ref(buffer.local) for buffer in buffers]
        alive += [weakref.ref(unit) for unit in _units(model)] + [weakref.ref(model.context)]
        del groups, buffers, optimizer, model
        # gloo's own thread lets go of the last gather's tensors a moment after the gather.
        deadline = time.monotonic() + 5
        while any(reference() is not None for reference in alive) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not [reference for reference in alive if reference() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("steps_after", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_pb114_deletion_after_an_exception_frees_at_once(where: str, steps_after: int) -> None:
    run_ranks(2, _deleted_after_exception, where, steps_after)


class _Branching(nn.Module):
    """Returns, keeps and collects tensors, some of which are made before the unit inside runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)
        self.kept: Any = None

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        early = self.first(x).tanh()
        self.kept = early.mean()
        losses.append(early.square().mean())
        return {"early": early, "inner": self.inner(early), "input": x}


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "trained": lambda layers, x: _run_branches(layers, x).backward(),
    "never_backward": lambda layers, x: _run_branches(layers, x) and None,
    "retained": lambda layers, x: _run_branches(layers, x).backward(retain_graph=True),
    "input_gradient": lambda layers, x: torch.autograd.grad(_run_branches(layers, x), x) and None,
}


def _run_branches(layers: Any, x: torch.Tensor) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    for layer in layers:
        out = layer(x, losses)
        x = out["inner"] + out["input"]
    total: torch.Tensor = x.sum() + out["early"].sum() + sum(losses) + sum(layer.kept for layer in layers)
    for layer in layers:
        layer.kept = None
    return total


def _calls_die_with_their_graph(how: str) -> None:
    layers = [_Branching() for _ in range(3)]
    with fully_shard_context(DEVICE):
        for layer in layers:
            fully_shard(layer.inner)
            fully_shard(layer)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            CALLS[how](layers, torch.ones(2, 6, requires_grad=True))
            assert not any(type(item) is ForwardCall for item in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize("how", CALLS)
def test_what_a_forward_notes_dies_with_its_graph(how: str) -> None:
    """Nothing grows from step to step, with the garbage collector off."""
    run_ranks(1, _calls_die_with_their_graph, how)
