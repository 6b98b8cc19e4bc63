# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""No torch optimizer steps while gradients of its parameters wait for a reduction; others are not concerned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import Placements, microbatch, step_guard
from megatron.core.distributed.fsdp.experimental.waiting import WaitingGradient
from tests.unit_tests.launch import DEVICE, run_ranks
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers

LAYOUTS: list[tuple[str, str | None]] = [
    *((strategy, None) for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
    ("optim_grads_params", "no_shard"),
    ("optim_grads_params", "optim"),
]
MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


def _sharded(strategy: str, outer: str | None) -> Any:
    mesh = init_device_mesh(DEVICE, (2,) if outer is None else (2, 2))
    return shard_layers(build("mlp"), mesh=mesh, placements=Placements.from_strategy(strategy, outer=outer))


def _backward(model: Any, is_last: bool) -> torch.Tensor:
    inputs, targets = make_batch(model, 4, seed=dist.get_rank())
    with microbatch(model.context, is_last=is_last):
        loss = loss_of(model, inputs, targets)
        loss.backward()
    return loss


def _weights(model: Any) -> list[torch.Tensor]:
    return [parameter.full_tensor().clone() for parameter in model.parameters()]


def _is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def _unfinished(strategy: str, outer: str | None, name: str) -> None:
    """The last microbatch is missing: `.grad` waits, or is a part of the sum."""
    model = _sharded(strategy, outer)
    optimizer = MAKERS[name](model.parameters())
    other = MAKERS[name]([nn.Parameter(torch.ones(2))])
    before = _weights(model)
    _backward(model, is_last=False)
    if strategy in ("no_shard", "optim"):
        assert all(isinstance(parameter.grad, WaitingGradient) for parameter in model.parameters())
    match = r"\.step: expected (reduced gradients|gradients of all microbatches), got .* for groups .*is_last=True"
    for step in (optimizer.step, lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1).optimizer.step()):
        with pytest.raises(RuntimeError, match=match):
            step()
    assert _is_equal(_weights(model), before) and not optimizer.state
    other.step()
    _backward(model, is_last=True)
    optimizer.step()
    assert not any(map(torch.equal, _weights(model), before))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("strategy", "outer"), LAYOUTS)
def test_plain_optimizers_wait_for_the_last_microbatch(strategy: str, outer: str | None, name: str) -> None:
    run_ranks(2 if outer is None else 4, _unfinished, strategy, outer, name)


def _without_sync() -> None:
    model = _sharded("optim_grads_params", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = _weights(model)
    model.set_requires_gradient_sync(False)
    _backward(model, is_last=True)
    with pytest.raises(RuntimeError, match=r"SGD\.step: expected reduced gradients, .* set_requires_gradient_sync"):
        optimizer.step()
    assert _is_equal(_weights(model), before)
    model.set_requires_gradient_sync(True)
    _backward(model, is_last=True)
    optimizer.step()


def test_plain_optimizers_wait_for_gradient_sync() -> None:
    run_ranks(2, _without_sync)


def _closures() -> None:
    """A closure may end what was begun before it; what it leaves unfinished is not stepped on."""
    model = _sharded("optim", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = _weights(model)
    for call in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        with pytest.raises(RuntimeError, match="expected reduced gradients"):
            call(lambda: _backward(model, is_last=False))
        assert _is_equal(_weights(model), before)
    for call in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        _backward(model, is_last=False)
        before = _weights(model)
        loss = call(lambda: _backward(model, is_last=True))
        assert loss is not None and loss.ndim == 0
        assert not any(map(torch.equal, _weights(model), before))
        optimizer.zero_grad()


def test_closures_are_checked_when_they_have_run() -> None:
    run_ranks(2, _closures)


def _other_models() -> None:
    """An optimizer is held to its own parameters' model, as long as that lives."""
    models = [_sharded("optim", None) for _ in range(2)]
    optimizers = [torch.optim.SGD(list(model.parameters()), lr=0.1) for model in models]
    _backward(models[0], is_last=False)
    _backward(models[1], is_last=True)
    before = _weights(models[1])
    optimizers[1].step()
    assert not any(map(torch.equal, _weights(models[1]), before))
    with pytest.raises(RuntimeError, match="expected reduced gradients"):
        optimizers[0].step()
    models.clear()
    optimizers[0].step()


def test_only_the_optimizers_own_model_counts() -> None:
    run_ranks(2, _other_models)


def test_the_hook_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(step_guard, "_handle", None)
    monkeypatch.setattr(
        step_guard, "register_optimizer_step_pre_hook", lambda hook: registered.append(hook) or "handle"
    )
    for _ in range(3):
        step_guard.watch_steps()
    assert registered == [step_guard._before_step]


def test_other_optimizers_get_their_arguments_as_they_are() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    closure = object()
    assert step_guard._before_step(optimizer, (optimizer, closure), {}) is None
    assert step_guard._before_step(optimizer, (optimizer,), {"closure": closure}) is None
