# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Cases about optimizers: state starts and loads without a trace, no foreign parameter is stepped, no rule is bent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    FsdpDTensor,
    fully_shard,
    fully_shard_muon,
    fully_shard_optimizer,
    gather_full,
)
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.matrix_oracle import PlainMuon, give_gradients, step_plainly, weight_of
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers

# --- PB-022 -----------------------------------------------------------------------------------------------------------

STATEFUL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "sgd_tensor_lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9, weight_decay=0.1),
}


def _give_gradients(model: Any, plain: nn.Module, seed: int) -> None:
    """Give both models the very same gradients, so that everything after them is comparable bit by bit."""
    generator = torch.Generator().manual_seed(seed)
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        whole.grad = torch.randn(whole.shape, generator=generator)
        owned = sharded.geometry.layout.owned(sharded.geometry.index, dist.get_rank())
        sharded.grad = torch.zeros_like(sharded)
        sharded.grad.to_local().view(-1).copy_(whole.grad.view(-1)[owned.start : owned.stop])


def _assert_same_training(model: Any, ours: Any, plain: nn.Module, theirs: Any) -> None:
    assert [{k: v for k, v in g.items() if k != "params"} for g in ours.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in theirs.param_groups
    ]
    saved = ours.state_dict()["state"]
    for index, (sharded, whole) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        assert torch.equal(sharded.full_tensor(), whole.detach())
        assert saved[index].keys() == theirs.state[whole].keys()
        for key, value in theirs.state[whole].items():
            found = saved[index][key]
            assert torch.equal(gather_full(found, sharded) if isinstance(found, FsdpDTensor) else found, value), key


def _first_steps(name: str) -> None:
    model, plain = shard_layers(build("mlp")), build("mlp")
    ours, theirs = fully_shard_optimizer(STATEFUL[name](model.parameters())), STATEFUL[name](plain.parameters())
    assert not ours.state and not ours.state_dict()["state"]  # neither adapting nor looking makes state
    _give_gradients(model, plain, 0)
    ours.step()
    theirs.step()
    _assert_same_training(model, ours, plain, theirs)
    if "step" in theirs.state[plain.scale]:
        assert ours.state[model.scale]["step"].item() == 1
    weights, saved = copy.deepcopy({n: p.detach() for n, p in model.named_parameters()}), ours.state_dict()
    fresh = shard_layers(build("mlp", seed=4))
    fresh.load_state_dict(weights)
    loaded = fully_shard_optimizer(STATEFUL[name](fresh.parameters()))
    for group in loaded.param_groups:
        group.update(lr=7.0, weight_decay=3.0)
    loaded.load_state_dict(copy.deepcopy(saved))
    _assert_same_training(fresh, loaded, plain, theirs)
    for seed in (1, 2):
        _give_gradients(fresh, plain, seed)
        loaded.step()
        theirs.step()
        _assert_same_training(fresh, loaded, plain, theirs)


@pytest.mark.parametrize("name", STATEFUL)
def test_pb022_first_steps_after_a_start_and_after_a_load(name: str) -> None:
    run_ranks(2, _first_steps, name)


# --- PB-028 -----------------------------------------------------------------------------------------------------------


def _built_before(groups: str, adapts: bool) -> None:
    """Whatever raises, no weight has moved."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    old = list(model.parameters())
    optimizer = torch.optim.SGD(old[:2] if groups == "mixed" else old, lr=0.1)
    fully_shard(model[0])
    fully_shard(model)
    new = list(model.parameters())
    before = [parameter.full_tensor() for parameter in new]
    try:
        if groups == "mixed":
            optimizer.add_param_group({"params": new[2:], "lr": 0.5})
        elif groups == "mixed_in_one":
            torch.optim.SGD([*new, *old], lr=0.1)
        if adapts:
            fully_shard_optimizer(optimizer)
        for _ in range(3):
            model(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
            optimizer.step()
    finally:
        assert all(torch.equal(p.full_tensor(), value) for p, value in zip(new, before, strict=True))


@pytest.mark.parametrize("groups", ["old", "mixed"])
def test_pb028_adapting_an_optimizer_over_originals_is_refused(groups: str) -> None:
    for message in run_ranks_expecting(2, ValueError, _built_before, groups, True):
        assert "expected sharded parameters, got parameter 0 of param_groups[0]: the original weight" in message
        assert "that unit Linear#0 has replaced. Build the optimizer after fully_shard." in message


@pytest.mark.parametrize("groups", ["old", "mixed", "mixed_in_one"])
def test_pb028_plain_optimizer_over_originals_raises_before_it_changes_a_weight(groups: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _built_before, groups, False):
        assert "of the original weight: expected a use of the module's current parameter" in message
        assert "that unit Linear#0 has replaced by shards." in message and "build optimizers after" in message


# --- PB-031 -----------------------------------------------------------------------------------------------------------

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class _Alike(nn.Module):
    """Three weights that nothing but their names tells apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _three_groups(rule: str, order: tuple[int, ...], scale: float) -> tuple[Any, torch.optim.Optimizer]:
    model = shard_layers(_Alike())
    groups = [
        {
            "params": [layer.weight],
            "lr": 0.1 * (index + 1) * scale,
            "weight_decay": 0.01 * index * scale,
            "max_lr": index * scale,
        }
        for index, layer in enumerate(model.layers)
    ]
    return model, fully_shard_optimizer(RULES[rule]([groups[index] for index in order]))


def _by_layer(model: Any, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return settings and whole state of every layer's weight."""
    found: dict[int, dict[str, Any]] = {}
    saved = optimizer.state_dict()
    for group, keys in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        settings = {name: value for name, value in group.items() if name != "params"}
        for parameter, key in zip(group["params"], keys["params"], strict=True):
            state = {
                name: value.full_tensor().tolist() if isinstance(value, FsdpDTensor) else float(value)
                for name, value in saved["state"].get(key, {}).items()
                if value is not None
            }
            found[id(parameter)] = {**settings, **state}
    return [found[id(layer.weight)] for layer in model.layers]


def _trained_groups(rule: str) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = _three_groups(rule, (0, 1, 2), 1.0)
    model(torch.full((2, 6), dist.get_rank() + 1.0)).sum().backward()
    optimizer.step()
    return model, optimizer


def _restored(rule: str) -> None:
    model, saved = _trained_groups(rule)
    fresh, loaded = _three_groups(rule, (0, 1, 2), 7.0)
    assert _by_layer(fresh, loaded) != _by_layer(model, saved)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert _by_layer(fresh, loaded) == _by_layer(model, saved)


@pytest.mark.parametrize("rule", RULES)
def test_pb031_groups_in_the_same_order_are_restored(rule: str) -> None:
    run_ranks(2, _restored, rule)


def _reordered(rule: str, order: tuple[int, ...]) -> None:
    """Groups follow their parameters, or nothing changes and the error names one."""
    model, saved = _trained_groups(rule)
    fresh, loaded = _three_groups(rule, order, 7.0)
    before = _by_layer(fresh, loaded)
    try:
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    except ValueError as error:
        assert "layers." in str(error) and "weight" in str(error)
        assert _by_layer(fresh, loaded) == before
    else:
        assert _by_layer(fresh, loaded) == _by_layer(model, saved)


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("rule", RULES)
def test_pb031_groups_in_another_order_are_restored_or_refused(rule: str, order: tuple[int, ...]) -> None:
    run_ranks(2, _reordered, rule, order)


# --- PB-033 -----------------------------------------------------------------------------------------------------------


class _Orthogonal(torch.optim.Optimizer):
    """A matrix rule: the nearest orthogonal matrix of the gradient, as Muon's, in the user's own words."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                left, _, right = torch.linalg.svd(parameter.grad, full_matrices=False)
                parameter.sub_(left @ right, alpha=group["lr"])


def _chosen_by_ndim() -> None:
    plain = build("convolutions")
    model = shard_layers(build("convolutions"))
    for matrices in (lambda p: p.ndim == 2, lambda p: p.ndim > 2, lambda p: p.dim() < 2, lambda p: p.shape[0] == 1):
        chosen = [name for name, p in model.named_parameters() if matrices(p)]
        assert chosen == [name for name, p in plain.named_parameters() if matrices(p)] and chosen
    assert {p.to_local().ndim for p in model.parameters() if p.ndim > 1} <= {1, 2, 4}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_pb033_parameters_chosen_by_ndim_are_those_of_the_plain_model(world_size: int) -> None:
    run_ranks(world_size, _chosen_by_ndim)


def _matrix_rule(name: str, adapts: bool) -> None:
    model = shard_layers(build("mlp"))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = _Orthogonal(matrices) if name == "own" else getattr(torch.optim, name)(matrices)
    if adapts:
        fully_shard_optimizer(optimizer)
    inputs, targets = make_batch(model, 4, seed=dist.get_rank())
    loss_of(model, inputs, targets).backward()
    before = [parameter.full_tensor() for parameter in matrices]
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(p.full_tensor(), value) for p, value in zip(matrices, before, strict=True))


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_pb033_torchs_matrix_optimizers_are_not_adapted(name: str) -> None:
    for message in run_ranks_expecting(2, ValueError, _matrix_rule, name, True):
        assert (
            f"expected an element-wise optimizer such as AdamW or SGD, got {name}" in message
            and "For Muon use fully_shard_muon." in message
        )


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "own"])
def test_pb033_plain_matrix_optimizers_raise_before_they_change_a_weight(name: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _matrix_rule, name, False):
        assert "of the sharded parameter" in message and "Call full_tensor() first" in message


def test_pb033_matrix_rule_of_the_users_own_is_refused_when_adapted() -> None:
    for message in run_ranks_expecting(2, (RuntimeError, ValueError), _matrix_rule, "own", True):  # type: ignore[arg-type]
        assert "element-wise" in message


def _muon() -> None:
    """Two ranks: a sum of two gradients is the same in any order, and a half of it is exact."""
    model, plain = shard_layers(build("mlp")), build("mlp")
    optimizer = fully_shard_muon(model, 0.05, report=None)
    matrices = [parameter for parameter in plain.parameters() if parameter.ndim == 2]
    rest = torch.optim.AdamW([p for p in plain.parameters() if p.ndim == 1], lr=3e-4, weight_decay=0.1)
    momenta: dict[Any, torch.Tensor] = {}
    for step in range(10):
        batches = [make_batch(model, 4, seed=2 * step + rank) for rank in range(2)]
        optimizer.zero_grad()
        loss_of(model, *batches[dist.get_rank()]).backward()
        plain.zero_grad()
        for batch in batches:
            (loss_of(plain, *batch) / 2).backward()
        optimizer.step()
        step_plainly(matrices, momenta, PlainMuon(lr=0.05), {})
        rest.step()
    for (name, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), whole), name


def test_pb033_sharded_muon_steps_whole_matrices() -> None:
    run_ranks(2, _muon)


def test_pb033_muon_of_shards_is_another() -> None:
    """What the case is about: local shards taken for matrices give other weights, without an error."""
    weight, half = weight_of(12, 7), weight_of(12, 7)
    give_gradients([weight], 0)
    give_gradients([half], 0)
    step_plainly([weight], {}, PlainMuon(), {})
    step_plainly([half], {}, PlainMuon(), {half: lambda full: list(full.chunk(2))})
    assert not torch.allclose(weight, half, atol=1e-3)
