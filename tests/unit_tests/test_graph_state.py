# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What may change around a captured iteration: settings, state, gradients, gathered weights; and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    capture_iteration,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.experimental.checkpoint import set_settings, settings_by_name
from megatron.core.distributed.fsdp.experimental.graph import MAX_GRAPHS
from megatron.core.distributed.fsdp.experimental.graph_state import constant
from tests.unit_tests.graph_double import RepeatingDevice, graphs_on_the_host
from tests.unit_tests.launch import DEVICE, run_ranks
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers


class _Training:
    """A model, an optimizer and a captured iteration of it that has been warmed up."""

    def __init__(self, step: Callable[..., Any] | None = None, warmup: int = 1, **settings: Any) -> None:
        self.model = shard_layers(build("mlp"))
        self.layers = list(self.model.layers)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=0.5, fused=True, capturable=True, **settings)
        self.optimizer: Any = fully_shard_optimizer(adamw)
        self.batch = make_batch(self.model, 6, seed=1)
        self.do = step
        self.captured = capture_iteration(self.model, self.optimizer, self.step, self.batch, warmup=warmup)
        for _ in range(warmup):
            self()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        loss = self.backward(inputs, targets)
        extra = None if self.do is None else self.do(self)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach() if extra is None else extra

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, inputs, targets)
        loss.backward()
        return loss

    def __call__(self) -> Any:
        return self.captured(*self.batch)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.to_local().clone() for parameter in self.model.parameters()]

    @property
    def group(self) -> Any:
        return self.optimizer.param_groups[0]

    @property
    def groups(self) -> list[Any]:
        return [group for unit in (self.model, *self.layers) for group in unit.parameter_groups]


def _on_one_rank(function: Callable[[], None]) -> Callable[[], None]:
    """Return a test that runs a function on one rank, with a double of CUDA graphs."""

    def test() -> None:
        run_ranks(1, _with_double, function)

    return test


def _with_double(function: Callable[[], None]) -> None:
    with graphs_on_the_host():
        function()


def _settings() -> None:
    training = _Training()
    training()
    changes: list[tuple[str, Callable[[], Any]]] = [
        ("a list", lambda: training.group.update(betas=[0.5, 0.9])),
        ("an item of a list", lambda: training.group["betas"].__setitem__(0, 0.6)),
        ("a tensor on the host", lambda: training.group.update(mark=torch.tensor(1.0))),
        ("its value", lambda: training.group["mark"].fill_(2.0)),
        ("a dict", lambda: training.group.update(marks={"a": 1})),
        ("an item of a dict", lambda: training.group["marks"].update(a=2)),
        ("the mode of a module", lambda: training.layers[0].eval()),
        ("gathering ahead", lambda: training.layers[0].set_modules_to_forward_prefetch([training.layers[2]])),
        ("what is kept", lambda: training.layers[0].set_reshard_after_forward(False)),
        ("another order", lambda: setattr(training.model.context.learnt_order, "num_changes", 1)),
    ]
    for number, (what, change) in enumerate(changes, start=1):
        change()
        training()
        assert training.captured.num_captures == number + 1, what
        training()
        assert training.captured.num_captures == number + 1, f"{what} stays"


test_settings_that_a_graph_has_as_constants_are_captured_anew = _on_one_rank(_settings)


def test_constants_tell_settings_apart() -> None:
    device_tensor = torch.ones((), device="meta")
    assert constant([1, (2, [3])]) == (1, (2, (3,)))
    assert constant(torch.tensor(1.0)) == constant(torch.tensor(1.0)) != constant(torch.tensor(2.0))
    assert constant(device_tensor) is device_tensor


def _rates() -> None:
    training = _Training()
    training()
    training.group["lr"] = torch.tensor(0.25)
    training()
    before = training.weights()
    training.group["lr"] = 0.5
    training()
    moved = [float((a - b).abs().max()) for a, b in zip(before, training.weights(), strict=True)]
    other = _Training()
    other()
    other.group["lr"] = 0.25
    other()
    before = other.weights()
    other.group["lr"] = 0.5
    other()
    assert moved == [float((a - b).abs().max()) for a, b in zip(before, other.weights(), strict=True)]


test_a_learning_rate_that_was_a_tensor_in_between_is_followed = _on_one_rank(_rates)


def _scheduler_inside() -> None:
    def sets(training: _Training) -> None:
        training.group["lr"] = 0.1

    def fills(training: _Training) -> None:
        training.group["lr"].fill_(0.1)

    for step in (sets, fills):
        with pytest.raises(RuntimeError, match=r"learning rate of param_groups\[0\]: expected step_fn to leave it"):
            _Training(step)


test_a_learning_rate_set_inside_is_refused = _on_one_rank(_scheduler_inside)


def _replaced_state() -> None:
    training = _Training()
    training()
    other = make_batch(training.model, 4, seed=2)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.captured(*other)
    assert training.captured.num_captures == 2
    training()
    assert training.captured.num_captures == 3, "the first graph has addresses of state that is gone"


test_state_replaced_before_another_shape_is_noticed_by_all_graphs = _on_one_rank(_replaced_state)


def _made_in_captures(training: _Training, calls: int) -> list[torch.Tensor]:
    """Return tensors of optimizer state that are as they were made inside a capture."""
    capture, made = RepeatingDevice.capture, []

    def watched(device: Any, function: Any) -> Any:
        before = {id(value) for state in training.optimizer.state.values() for value in state.values()}
        result = capture(device, function)
        now = [value for state in training.optimizer.state.values() for value in state.values()]
        made.extend(value for value in now if id(value) not in before)
        return result

    with patch.object(RepeatingDevice, "capture", watched):
        for _ in range(calls):
            training()
    alive = [value for state in training.optimizer.state.values() for value in state.values()]
    return [value for value in made if any(value is other for other in alive)]


def _without_state() -> None:
    training = _Training()
    weight = training.layers[1].weight
    del training.optimizer.state[weight]
    assert not _made_in_captures(training, 3)
    assert "exp_avg" in training.optimizer.state[weight] and training.captured.num_captures == 1


test_state_is_made_outside_of_graphs = _on_one_rank(_without_state)


def _new_param_group() -> None:
    training = _Training()
    training()
    moved = training.group["params"].pop()
    training.optimizer.state.pop(moved)
    training.optimizer.add_param_group({"params": [moved], "lr": 0.0})
    before = moved.to_local().clone()
    assert not _made_in_captures(training, 3)
    assert training.captured.num_captures == 2
    assert torch.equal(before, moved.to_local()), "its own learning rate"


test_a_new_param_group_is_followed = _on_one_rank(_new_param_group)


def _host_state() -> None:
    def counts(training: _Training) -> None:
        training.group["count"] = training.group.get("count", 0) + 1

    with pytest.raises(
        RuntimeError, match=r"expected a step that changes its state in place on cpu, got a new 'count'"
    ):
        _Training(counts)()

    def replaces(training: _Training) -> None:
        for state in training.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()

    training = _Training(replaces)
    before = [state["exp_avg"] for state in training.optimizer.state.values()]
    with pytest.raises(RuntimeError, match="got a new 'exp_avg'"):
        training()
    assert all(a is b["exp_avg"] for a, b in zip(before, training.optimizer.state.values(), strict=True))

    training = _Training()
    next(iter(training.optimizer.state.values()))["elsewhere"] = torch.zeros((), device="meta")
    with pytest.raises(RuntimeError, match=r"got state on \['cpu', 'meta'\].*capturable=True"):
        training()
    model = shard_layers(build("mlp"))
    adamw: Any = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    adamw.capturable = False
    with pytest.raises(ValueError, match=r"expected capturable=True, got False in param_groups \[0\]"):
        capture_iteration(model, adamw, lambda: None, ())


test_state_that_a_replay_could_not_follow_is_refused = _on_one_rank(_host_state)


def _stale_after_failure() -> None:
    def raises(training: _Training) -> None:
        if is_broken:
            raise error

    is_broken = False
    for error in (ValueError("no graph can hold this"), KeyboardInterrupt()):
        is_broken = False
        training = _Training(raises)
        is_broken = True
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RuntimeError):
            training()
        assert all(group.is_stale for group in training.groups), "compute weights were refreshed by nothing"
        assert all(parameter.grad is None for parameter in training.model.parameters())
        assert all(unit.is_resting() and unit.unshard_event is None for unit in (training.model, *training.layers))


test_a_failed_capture_leaves_compute_weights_to_be_made_anew = _on_one_rank(_stale_after_failure)


def _named_error() -> None:
    def raises(training: _Training) -> None:
        try:
            raise KeyError("handled")
        except KeyError:
            if is_broken:
                raise ValueError("the culprit") from None

    is_broken = False
    training = _Training(raises)
    is_broken = True
    try:
        raise LookupError("the caller's own")
    except LookupError:
        with pytest.raises(RuntimeError, match=r"got ValueError at .*: the culprit"):
            training()


test_the_error_of_the_step_is_named = _on_one_rank(_named_error)


def _gathered() -> None:
    seen: list[bool] = []
    training = _Training()
    training.layers[2].unshard()
    begin = training.captured._step_fn

    def step(*inputs: torch.Tensor) -> Any:
        seen.extend(group.full_weight.has_storage for group in training.groups if group.gathers)
        return begin(*inputs)

    training.captured._step_fn = step
    training()
    assert seen and not any(seen), "a graph would read memory from outside"


test_weights_gathered_before_a_capture_are_gathered_in_it = _on_one_rank(_gathered)


def _kept_gradients() -> None:
    training = _Training()
    model, optimizer = training.model, training.optimizer

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=to_none)
        loss = training.backward(inputs, targets)
        optimizer.step()
        return loss.detach()

    for to_none in (True, False):
        captured = capture_iteration(model, optimizer, step, training.batch, warmup=1)
        captured(*training.batch)
        if to_none:
            captured(*training.batch)
            assert captured.num_captures == 1
        else:
            with pytest.raises(RuntimeError, match="expected it to clear gradients to None, got some from before it"):
                captured(*training.batch)
    model.set_requires_gradient_sync(False)
    training.backward(*training.batch)
    with pytest.raises(RuntimeError, match=r"expected no gradients from before step_fn, got some of .* that wait"):
        training()


test_gradients_from_before_a_capture = _on_one_rank(_kept_gradients)


def _inputs_and_results() -> None:
    training = _Training()
    inputs, targets = training.batch
    with pytest.raises(ValueError, match=r"expected tensors without requires_grad, got it set for \[0\]"):
        training.captured(inputs.clone().requires_grad_(), targets)

    @dataclass
    class Result:
        loss: torch.Tensor

    with pytest.raises(TypeError, match=r"expected tensors in tuples, lists and dicts, got \['Result'\]"):
        _Training(lambda training: Result(torch.zeros(())))

    weight = torch.ones((), requires_grad=True)
    training = _Training(lambda training: {"loss": weight * 2, "name": "a"})
    result = training()
    assert float(result["loss"].detach()) == 2 and result["name"] == "a" and not result["loss"].requires_grad


test_inputs_and_results_that_a_replay_could_not_give = _on_one_rank(_inputs_and_results)


def _too_many() -> None:
    training = _Training()
    with pytest.warns(UserWarning, match=f"got more than {MAX_GRAPHS} kinds of them"):
        for size in range(1, MAX_GRAPHS + 2):
            training.captured(*make_batch(training.model, size, seed=size))


test_inputs_that_never_come_back_are_warned_of = _on_one_rank(_too_many)


def _freed() -> None:
    training = _Training()
    training()
    references = [weakref.ref(training.model), weakref.ref(training.captured)]
    gc.disable()
    try:
        step = training.captured._step_fn
        assert step.__self__ is training
        training.captured.release()
        del step
        training.captured = None  # type: ignore[assignment]
        assert references[1]() is None
    finally:
        gc.enable()


test_a_captured_iteration_is_freed_without_a_search_for_cycles = _on_one_rank(_freed)


def _pool() -> None:
    mesh = init_device_mesh(DEVICE, (1,))
    model = build("mlp")
    with fully_shard_context(trace_pool=True) as context:
        for layer in model.layers:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True, capturable=True)
    optimizer: Any = fully_shard_optimizer(adamw)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = make_batch(model, 6, seed=1)
    captured = capture_iteration(model, optimizer, step, batch, warmup=3)
    for _ in range(5):
        captured(*batch)
    assert context.pool is not None and context.pool.is_active and captured.num_captures == 1
    context.release_memory_pool()
    captured(*batch)
    captured(*batch)
    assert captured.num_captures == 2, "graphs have addresses that the pool has given back"


test_a_pool_that_moves_is_captured_anew = _on_one_rank(_pool)


def _loaded_settings() -> None:
    training = _Training()
    named = {parameter.geometry.fqn: parameter for parameter in training.group["params"]}
    saved = settings_by_name(training.optimizer, named)
    for settings in saved.values():
        settings.update(capturable=False, fused=None, foreach=True, differentiable=True, weight_decay=0.25)
    set_settings(training.optimizer, named, saved)
    how = {name: training.group[name] for name in ("capturable", "fused", "foreach", "differentiable", "weight_decay")}
    assert how == {"capturable": True, "fused": True, "foreach": None, "differentiable": False, "weight_decay": 0.25}


test_a_checkpoint_does_not_say_how_a_step_is_computed = _on_one_rank(_loaded_settings)
