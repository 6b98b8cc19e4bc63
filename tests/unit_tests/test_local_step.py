# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a step lends follows whatever the user does to param_groups, state and gradients between steps."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.experimental.waiting import WaitingGradient
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers

FIRST, SECOND = "layers.0.weight", "layers.1.weight"


def _halve_state(optimizer: Any, named: dict[str, Any]) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _replace_entry(optimizer: Any, named: dict[str, Any]) -> None:
    old = optimizer.state[named[FIRST]]
    optimizer.state[named[FIRST]] = {key: value * 0.25 for key, value in old.items()}


def _swap_entries(optimizer: Any, named: dict[str, Any]) -> None:
    """The same dicts, in another order of parameters."""
    state = optimizer.state
    optimizer.state = defaultdict(dict, reversed(list(state.items())))


def _forget_one(optimizer: Any, named: dict[str, Any]) -> None:
    del optimizer.state[named[FIRST]]


def _clear_state(optimizer: Any, named: dict[str, Any]) -> None:
    optimizer.state.clear()


def _new_state(optimizer: Any, named: dict[str, Any]) -> None:
    optimizer.state = defaultdict(dict)


def _load_state(optimizer: Any, named: dict[str, Any]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg_sq"] = state["exp_avg_sq"] * 4
    optimizer.load_state_dict(saved)


def _reverse_parameters(optimizer: Any, named: dict[str, Any]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def _other_list(optimizer: Any, named: dict[str, Any]) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def _move_parameter(optimizer: Any, named: dict[str, Any]) -> None:
    groups = optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop(0))


def _new_group(optimizer: Any, named: dict[str, Any]) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.2})


def _other_settings(optimizer: Any, named: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        group.update(lr=group["lr"] * 0.5, weight_decay=0.3)


def _gradient_of_none(optimizer: Any, named: dict[str, Any]) -> None:
    named[SECOND].grad = None


CHANGES: tuple[Callable[[Any, dict[str, Any]], None], ...] = (
    _halve_state,
    _replace_entry,
    _swap_entries,
    _forget_one,
    _clear_state,
    _new_state,
    _load_state,
    _reverse_parameters,
    _other_list,
    _move_parameter,
    _new_group,
    _other_settings,
    _gradient_of_none,
)


def _adamw(model: Any) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    last = [named.pop("scale")]
    return torch.optim.AdamW([{"params": list(named.values())}, {"params": last, "lr": 0.05}], lr=0.1)


def _follows(change: Callable[[Any, dict[str, Any]], None]) -> None:
    """Change the adapted and a plain optimizer alike; the next steps have the same bits."""
    model, plain = shard_layers(build("mlp")), build("mlp")
    ours, theirs = fully_shard_optimizer(_adamw(model)), _adamw(plain)
    rank = dist.get_rank()

    def step(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
            whole.grad = torch.randn(whole.shape, generator=generator)
            owned = sharded.geometry.layout.owned(sharded.geometry.index, rank)
            sharded.grad = torch.zeros_like(sharded)
            sharded.grad._local_tensor.view(-1).copy_(whole.grad.flatten()[owned.start : owned.stop])
        if change is _gradient_of_none:
            change(ours, dict(model.named_parameters()))
            change(theirs, dict(plain.named_parameters()))
        ours.step()
        theirs.step()

    step(0)
    step(1)
    change(ours, dict(model.named_parameters()))
    change(theirs, dict(plain.named_parameters()))
    for seed in (2, 3):
        step(seed)
        for (name, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(sharded.full_tensor(), whole), name
            assert (sharded in ours.state) == (whole in theirs.state), name
    assert [len(group["params"]) for group in ours.param_groups] == [len(g["params"]) for g in theirs.param_groups]
    assert all(hasattr(p, "geometry") for group in ours.param_groups for p in group["params"])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changes_between_steps_are_followed(change: Callable[[Any, dict[str, Any]], None]) -> None:
    run_ranks(2, _follows, change)


def _foreign_list() -> None:
    model = shard_layers(build("mlp"))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    for use in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
        with pytest.raises(
            ValueError, match=r"got parameter 7 of param_groups\[0\], shape \(3,\), which belongs to no"
        ):
            use()
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()


def test_foreign_parameters_put_into_the_list_are_refused() -> None:
    run_ranks(1, _foreign_list)


def _units_of_two() -> None:
    """Parameters of another unit, put into the list after adapting, are stepped and their weights refreshed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(list(model[0].parameters()), lr=0.5))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    model(x).sum().backward()
    optimizer.step()
    weights = [(layer.weight.full_tensor().bfloat16(), layer.bias.full_tensor().bfloat16()) for layer in model]
    expected = nn.functional.linear(nn.functional.linear(x, *weights[0]), *weights[1])
    assert torch.equal(model(x), expected)
    with microbatch(model.context, is_last=False):
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match="expected gradients of all microbatches"):
        optimizer.step()


def test_parameters_of_another_unit_put_into_the_list() -> None:
    run_ranks(2, _units_of_two)


# --- zero_grad --------------------------------------------------------------------------------------------------------


def _backward(model: Any, is_last: bool, seed: int = 0) -> None:
    inputs, targets = make_batch(model, 4, seed=10 * seed + dist.get_rank())
    with microbatch(model.context, is_last=is_last):
        loss_of(model, inputs, targets).backward()


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def _zero_grad(strategy: str, set_to_none: bool, waits: bool) -> None:
    """One optimizer's zero_grad leaves the gradients of the other's parameters, in the same groups, as they are."""
    placements = Placements.from_strategy(strategy)
    model, other, twin = (shard_layers(build("mlp"), placements=placements) for _ in range(3))
    named = dict(model.named_parameters())
    mine = [parameter for name, parameter in named.items() if name.endswith("weight")]
    rest = [parameter for name, parameter in named.items() if not name.endswith("weight")]
    optimizer, neighbour = (fully_shard_optimizer(torch.optim.SGD(part, lr=0.1)) for part in (mine, rest))
    _backward(model, is_last=not waits)
    _backward(other, is_last=not waits)
    had = {name for name, parameter in named.items() if parameter.grad is not None}
    optimizer.zero_grad(set_to_none)
    for name, parameter in named.items():
        if name.endswith("weight"):
            assert parameter.grad is None if set_to_none else not isinstance(parameter.grad, WaitingGradient)
        else:
            assert (parameter.grad is not None) == (name in had)
    for each in (model, other, twin):
        _backward(each, is_last=True, seed=1)
    found, both, second = _gradients(model), _gradients(other), _gradients(twin)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, (second if name.endswith("weight") else both)[name], rtol=1e-6, atol=1e-7)
        assert not torch.allclose(both[name], second[name])
    neighbour.zero_grad(set_to_none)
    optimizer.zero_grad(set_to_none)
    if set_to_none:
        assert all(parameter.grad is None for parameter in named.values())
        groups = [group for unit in (*model.layers, model) for group in unit.parameter_groups]
        assert not any(group.gradients.at.main.has_storage for group in groups if group.gradients)
    else:
        assert not any(bool(gradient.any()) for gradient in _gradients(model).values())


@pytest.mark.parametrize("waits", [False, True], ids=["final", "waiting"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_zero_grad_clears_its_own_parameters_only(strategy: str, set_to_none: bool, waits: bool) -> None:
    run_ranks(2, _zero_grad, strategy, set_to_none, waits)


# --- decoupled gradients, fused kernels, memory -----------------------------------------------------------------------


class _ClearsDecoupled(torch.optim.Optimizer):
    """Clears only what it reads, as TransformerEngine's FusedAdam does."""

    use_decoupled_grad = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.decoupled_grad.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.decoupled_grad is not None:
                    parameter.sub_(parameter.decoupled_grad, alpha=group["lr"])


def _decoupled() -> None:
    model: Any = fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = fully_shard_optimizer(_ClearsDecoupled(model.parameters()), precision_aware=True)
    before = model.weight.full_tensor().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert not bool(model.weight.grad.full_tensor().any())
    optimizer.zero_grad()
    assert model.weight.grad is None
    optimizer.step()
    assert torch.equal(model.weight.full_tensor(), before - 0.5)


def test_gradients_of_precision_aware_optimizers_are_cleared() -> None:
    run_ranks(2, _decoupled)


def _fused_kernel(lists: list[torch.Tensor], rates: list[float]) -> None:
    """Update nothing if the last tensor has no element, as in TransformerEngine issue 3207."""
    if lists and lists[-1].numel():
        for tensor, rate in zip(lists, rates, strict=True):
            tensor.sub_(tensor.grad, alpha=rate)


class FusedSGD(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            tensors = [parameter for parameter in group["params"] if parameter.grad is not None]
            _fused_kernel(tensors, [group["lr"]] * len(tensors))


FusedSGD.__module__ = "transformer_engine.pytorch.optimizers"


def _empty_last() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
    plain = copy.deepcopy(model)
    fully_shard(model)
    parameters = sorted(model.parameters(), key=lambda p: -p.to_local().numel())
    optimizer = fully_shard_optimizer(FusedSGD(parameters))
    x = torch.ones(1, 4)
    model(x).sum().backward()
    plain(x).sum().backward()
    optimizer.step()
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), whole - 0.5 * whole.grad)
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert any(parameter.to_local().numel() == 0 for parameter in parameters)


def test_fused_kernels_are_not_given_an_empty_tensor_last() -> None:
    run_ranks(3, _empty_last)


def _memory() -> None:
    """Neither a loan nor its gradients outlive the step, and the optimizer goes with its model."""
    model = shard_layers(build("mlp"), mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16))
    optimizer: Any = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    seen: list[Any] = []

    def hook(opt: Any, *_: Any) -> None:
        seen.extend(weakref.ref(local.grad) for _, local, _ in opt._fsdp_step._lent if local.grad is not None)

    for seed in range(2):
        _backward(model, is_last=True, seed=seed)
        optimizer.step()
        hook(optimizer)
        optimizer.zero_grad()
    assert not seen
    groups = [group for unit in (*model.layers, model) for group in unit.parameter_groups]
    assert not any(group.gradients.at.main.has_storage for group in groups)
    gc.collect()
    gc.disable()
    try:
        references = [weakref.ref(parameter) for parameter in model.parameters()]
        groups.clear()
        del model, optimizer
        assert not any(reference() for reference in references)
    finally:
        gc.enable()


def test_nothing_outlives_a_step_or_the_optimizer() -> None:
    run_ranks(2, _memory)
