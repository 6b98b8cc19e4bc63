# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Adapted optimizers step local shards as the plain ones step whole tensors, and refuse what they cannot do right."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    FsdpDTensor,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    gather_full,
    grad_norm,
    microbatch,
)
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers

ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def _train_against_plain(name: str) -> None:
    plain = build("mlp")
    model = shard_layers(build("mlp"))
    ours = fully_shard_optimizer(ELEMENTWISE[name](model.parameters()))
    theirs = ELEMENTWISE[name](plain.parameters())
    for step in range(12):
        gradients = {
            n: torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for n, p in plain.named_parameters()
        }
        for (n, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            whole.grad = gradients[n]
            owned = sharded.geometry.layout.owned(sharded.geometry.index, dist.get_rank())
            sharded.grad = torch.zeros_like(sharded)
            sharded.grad._local_tensor.reshape(-1).copy_(gradients[n].reshape(-1)[owned.start : owned.stop])
        ours.step()
        theirs.step()
    for (n, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), whole), n
        for key, value in theirs.state[whole].items():
            state = ours.state_dict()["state"][list(dict(model.named_parameters())).index(n)][key]
            if isinstance(value, torch.Tensor) and value.shape == whole.shape:
                assert isinstance(state, FsdpDTensor)
                # A fused kernel computes what is left over of a vector's lanes without fused multiply-adds, and that is
                # other elements where a shard begins at an odd one: one rounding more a step.
                rtol = 12 * torch.finfo(value.dtype).eps if "fused" in name else 0
                torch.testing.assert_close(
                    gather_full(state, sharded), value, rtol=rtol, atol=0, msg=lambda text, at=(n, key): f"{at}: {text}"
                )


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_bit_equal(name: str) -> None:
    """Given the same gradients, the shards and their state take the very bits of the whole tensors."""
    run_ranks(2, _train_against_plain, name)


def _parameter_groups() -> None:
    """Groups keep their own lr and weight decay, and a scheduler moves them."""
    plain = build("mlp")
    model = shard_layers(copy.deepcopy(plain))

    def make(module: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in module.parameters() if p.ndim > 1]
        other = [p for p in module.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": other, "lr": 0.001, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)

    ours, theirs = fully_shard_optimizer(make(model)), make(plain)
    assert [len(g["params"]) for g in ours.param_groups] == [3, 4]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in (ours, theirs)]
    world_size = dist.get_world_size()
    for step in range(6):
        inputs, targets = make_batch(model, 4 * world_size, seed=step)
        mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        loss_of(model, inputs[mine], targets[mine]).backward()
        loss_of(plain, inputs, targets).backward()
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    for (name, sharded), whole in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), whole[1], rtol=1e-5, atol=1e-6, msg=name)


def test_parameter_groups_and_scheduler() -> None:
    run_ranks(2, _parameter_groups)


def _state_round_trip() -> None:
    """state_dict() holds DTensors of logical shape; loading it goes on with the same bits."""
    model, twin = shard_layers(build("mlp")), shard_layers(build("mlp"))
    ours, other = (fully_shard_optimizer(torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (model, twin))

    def step(module: Any, optimizer: Any, seed: int) -> None:
        inputs, targets = make_batch(module, 4, seed=10 * seed + dist.get_rank())
        loss_of(module, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(3):
        step(model, ours, seed)
    saved = copy.deepcopy(ours.state_dict())
    for index, parameter in enumerate(model.parameters()):
        assert isinstance(saved["state"][index]["exp_avg"], FsdpDTensor)
        assert saved["state"][index]["exp_avg"].shape == parameter.shape
        assert ours.state[parameter]["exp_avg"].shape == parameter.to_local().shape
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    step(model, ours, 7)
    step(twin, other, 7)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


def test_state_dict_round_trip() -> None:
    run_ranks(2, _state_round_trip)


def _full_state() -> None:
    model = shard_layers(build("mlp"))
    plain = build("mlp")
    theirs = torch.optim.AdamW(plain.parameters())
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    fully_shard_optimizer(torch.optim.AdamW(model.parameters())).load_state_dict(theirs.state_dict())


def test_state_without_names_is_refused() -> None:
    for message in run_ranks_expecting(2, ValueError, _full_state):
        assert "expected 1 groups with this optimizer's parameters, got 1, none of which holds" in message


def _plain_gradient() -> None:
    model = _sharded_linear_kept()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()


def test_gradient_of_a_whole_tensor_is_refused() -> None:
    for message in run_ranks_expecting(2, ValueError, _plain_gradient):
        assert "expected a DTensor cut like its parameter, got Tensor of shape (2, 3)" in message


def _mixed_dtypes(precision: str) -> None:
    """PB-103: gradients of another dtype than the main weights are cast for the step and keep their dtype after it."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5, bias=False).bfloat16()
    plain = copy.deepcopy(model).float()
    dtype = getattr(torch, precision)
    fully_shard(model, mixed_precision_policy=MixedPrecisionPolicy(torch.float32, main_grads_dtype=dtype))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).sum().backward()
        gradient = model.weight.grad
        assert gradient.dtype is dtype and model.weight.dtype is torch.float32
        plain.weight.grad = gradient.full_tensor().float()
        optimizer.step()
        reference.step()
        assert model.weight.grad is gradient and gradient.dtype is dtype
        optimizer.zero_grad()
    assert torch.equal(model.weight.full_tensor(), plain.weight)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_pb103_gradient_dtype(precision: str) -> None:
    run_ranks(2, _mixed_dtypes, precision)


class _Decoupled(torch.optim.Optimizer):
    """An optimizer that reads `decoupled_grad`, as TransformerEngine's FusedAdam can."""

    use_decoupled_grad = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is None
                if parameter.decoupled_grad is not None:
                    assert parameter.decoupled_grad.dtype is torch.bfloat16
                    parameter.sub_(parameter.decoupled_grad.float(), alpha=group["lr"])


def _precision_aware() -> None:
    """PB-040: norm and clipping see the same gradients that a precision-aware optimizer is handed."""
    model = nn.Linear(2, 2, bias=False).bfloat16()
    start = model.weight.detach().float()
    policy = MixedPrecisionPolicy(torch.float32, main_grads_dtype=torch.bfloat16)
    fully_shard(model, mixed_precision_policy=policy)
    optimizer = fully_shard_optimizer(_Decoupled(model.parameters()), precision_aware=True)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(2.0)
    optimizer.step()
    torch.testing.assert_close(model.weight.full_tensor(), start - 0.5 * 0.5, rtol=0, atol=2e-3)
    optimizer.zero_grad()
    optimizer.step()
    torch.testing.assert_close(model.weight.full_tensor(), start - 0.5 * 0.5, rtol=0, atol=2e-3)


def test_pb040_precision_aware() -> None:
    run_ranks(2, _precision_aware)


def _sharded_linear() -> Any:
    return fully_shard(nn.Linear(3, 2))


def _built_before() -> None:
    """PB-028."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    fully_shard_optimizer(optimizer)


def _foreign() -> None:
    model = _sharded_linear()
    fully_shard_optimizer(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1))


def _dead_model() -> None:
    parameters = list(_sharded_linear().parameters())
    fully_shard_optimizer(torch.optim.SGD(parameters, lr=0.1))


def _twice() -> None:
    optimizer = fully_shard_optimizer(torch.optim.SGD(_sharded_linear_kept().parameters(), lr=0.1))
    fully_shard_optimizer(optimizer)


def _sharded_linear_kept() -> Any:
    _sharded_linear_kept.model = _sharded_linear()  # type: ignore[attr-defined]
    return _sharded_linear_kept.model  # type: ignore[attr-defined]


def _scheduler_first() -> None:
    optimizer = torch.optim.SGD(_sharded_linear_kept().parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fully_shard_optimizer(optimizer)


def _closure() -> None:
    optimizer = fully_shard_optimizer(torch.optim.SGD(_sharded_linear_kept().parameters(), lr=0.1))
    optimizer.step(lambda: 0.0)


def _unfinished() -> None:
    """PB-013: stepping on gradients of an accumulation that has not ended."""
    model = _sharded_linear_kept()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with microbatch(model.context, is_last=False):
        model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def _no_decoupled_gradients() -> None:
    fully_shard_optimizer(torch.optim.SGD(_sharded_linear_kept().parameters(), lr=0.1), precision_aware=True)


def _decoupled_gradients_unasked() -> None:
    fully_shard_optimizer(_Decoupled(_sharded_linear_kept().parameters()))


def _not_elementwise(name: str) -> None:
    """PB-033: rules that look beyond an element compute something else on shards."""
    parameters = [p for p in _sharded_linear_kept().parameters() if p.ndim == 2]
    fully_shard_optimizer(getattr(torch.optim, name)(parameters))


REFUSED: dict[str, tuple[type[Exception], Callable[[], Any], str]] = {
    "not_an_optimizer": (TypeError, lambda: fully_shard_optimizer("adam"), "expected a torch.optim.Optimizer, got str"),  # type: ignore[arg-type]
    "built_before": (
        ValueError,
        _built_before,
        "the original weight that unit Linear#0 has replaced. Build the optimizer after",
    ),
    "foreign": (ValueError, _foreign, "got parameter 2 of param_groups[0], shape (3,), which belongs to no unit"),
    "dead_model": (ValueError, _dead_model, "whose model is gone"),
    "twice": (RuntimeError, _twice, "expected an optimizer that is not adapted yet"),
    "scheduler_first": (RuntimeError, _scheduler_first, "Adapt the optimizer first and build the scheduler after"),
    "closure": (ValueError, _closure, "step: expected no closure, got one"),
    "unfinished": (RuntimeError, _unfinished, "expected gradients of all microbatches"),
    "precision_aware": (
        ValueError,
        _no_decoupled_gradients,
        "expected an optimizer with use_decoupled_grad=True, got SGD",
    ),
    "decoupled_unasked": (
        ValueError,
        _decoupled_gradients_unasked,
        "expected True for an optimizer with use_decoupled_grad=True, got False for _Decoupled",
    ),
    **{
        name.lower(): (ValueError, (lambda name=name: _not_elementwise(name)), "expected an element-wise optimizer")
        for name in ("Adafactor", "LBFGS", "Muon")
    },
}


def _refuse(name: str) -> str:
    error, function, _ = REFUSED[name]
    with pytest.raises(error) as raised:
        function()
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    for message in run_ranks(2, _refuse, name):
        assert REFUSED[name][2] in message


def _failed_step() -> None:
    """A step that raises leaves groups and state with the sharded parameters."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError("broken")

    model = _sharded_linear()
    optimizer = fully_shard_optimizer(Broken(model.parameters(), lr=0.1))
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)] == [True] * 2


def test_failed_step_restores_the_groups() -> None:
    run_ranks(1, _failed_step)


def _added_group() -> None:
    """Parameters added later are stepped, and their compute weights refreshed, like the first ones."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model[0].parameters(), lr=0.5))
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.25})
    with pytest.raises(ValueError, match="which belongs to no unit"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    before = model(x)
    before.sum().backward()
    optimizer.step()
    weights = [layer.weight.full_tensor().bfloat16() for layer in model]
    biases = [layer.bias.full_tensor().bfloat16() for layer in model]
    expected = nn.functional.linear(nn.functional.linear(x, weights[0], biases[0]), weights[1], biases[1])
    assert torch.equal(model(x), expected) and not torch.equal(expected, before)


def test_group_added_after_adapting() -> None:
    run_ranks(2, _added_group)


def _step_hooks() -> None:
    """Step hooks of the user see sharded parameters, not the lent locals."""
    model = _sharded_linear()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[bool] = []

    def hook(opt: Any, args: Any, kwargs: Any) -> None:
        seen.append(all(isinstance(p, FsdpDTensor) for p in opt.param_groups[0]["params"]))

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert seen == [True, True]


def test_step_hooks_see_sharded_parameters() -> None:
    run_ranks(1, _step_hooks)


def _norms(model_name: str, norm_type: float, max_norm: float) -> None:
    """PB-037: norm and clipped gradients are those of the whole gradients, a plain number on every rank."""
    model, plain = shard_layers(build(model_name)), build(model_name)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    inputs, targets = make_batch(model, 2 * world_size, seed=0)
    loss_of(model, inputs[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]).backward()
    loss_of(plain, inputs, targets).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    found = clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert type(found) is torch.Tensor and found.ndim == 0
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for (name, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        if whole.grad is not None:
            torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("model_name", ["mlp", "frozen", "one_element"])
def test_pb037_clip_grad_norm(model_name: str, norm_type: float) -> None:
    run_ranks(3, _norms, model_name, norm_type, 0.05)


def test_clipping_above_the_norm_changes_nothing() -> None:
    run_ranks(2, _norms, "mlp", 2.0, 1e9)


def _bad_clips() -> None:
    model = _sharded_linear()
    model(torch.full((1, 3), math.nan if dist.get_rank() == 0 else 1.0)).sum().backward()
    with pytest.raises(ValueError, match="expected max_norm > 0 and norm_type > 0, got 0 and 2"):
        clip_grad_norm_(model.parameters(), 0)
    with pytest.raises(RuntimeError, match="expected a finite gradient norm, got nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert math.isnan(clip_grad_norm_(model.parameters(), 1.0))


def test_clip_errors_on_every_rank() -> None:
    run_ranks(2, _bad_clips)


def _no_gradients() -> None:
    """PB-080: without gradients or elements every rank still takes part in every collective."""
    model = shard_layers(build("one_element"))
    assert grad_norm(list(model.parameters())).item() == 0.0
    assert grad_norm([]).item() == 0.0
    model(torch.ones(2, 1)).sum().backward()
    assert clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(2.0)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    optimizer.step()
    frozen = fully_shard(nn.Linear(2, 2).requires_grad_(False))
    assert grad_norm(list(frozen.parameters())).item() == 0.0


def test_pb080_empty_shards() -> None:
    run_ranks(4, _no_gradients)


def _mixed_with_plain() -> None:
    """PB-039: a plain parameter, equal on every rank, counts once beside sharded ones."""
    model = _sharded_linear()
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.full((2,), 3.0)
    model.weight.grad = torch.ones_like(model.weight)
    model.bias.grad = torch.ones_like(model.bias)
    assert grad_norm([*model.parameters(), plain]).item() == pytest.approx(math.sqrt(8 + 18))


def test_pb039_plain_parameters_count_once() -> None:
    run_ranks(2, _mixed_with_plain)


def test_closure_message_on_every_rank() -> None:
    for message in run_ranks_expecting(2, ValueError, _closure):
        assert "Compute the loss before the step" in message
