# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What goes in and out of a unit's forward: views, kept tensors, other methods, users' hooks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import fully_shard, fully_shard_optimizer, register_fsdp_forward_method
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import build, shard_layers
from tests.unit_tests.oracle import assert_at_rest, compare_gradients, full_gradients


class _Inner(nn.Module):
    """Two linear layers with a norm; `end` makes its output."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor] = lambda y: y) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)
        self.end = end
        self.kept: Any = None
        self.keeps: Callable[[torch.Tensor], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x).tanh())
        if self.keeps is not None:
            self.kept = self.keeps(hidden)
        return self.end(self.down(hidden))


def _pair(end: Callable[[torch.Tensor], torch.Tensor] = lambda y: y) -> tuple[Any, Any]:
    torch.manual_seed(0)
    reference = nn.Sequential(*[_Inner(end) for _ in range(3)])
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model), reference


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda y: y.view(-1, 6),
    "row": lambda y: y[:],
    "transposed_twice": lambda y: y.t().t(),
    "not_a_view": lambda y: y * 2,
}


def _edited_outputs(name: str) -> None:
    """An output that is edited in place outside, also where it is a view of what the unit computed."""
    model, reference = _pair(VIEWS[name])

    def step(module: Any, batch: torch.Tensor) -> None:
        x = batch
        for layer in module:
            x = layer(x)
            x.add_(1).mul_(0.5)
        x.square().sum().backward()

    compare_gradients(model, reference, step)


@pytest.mark.parametrize("name", VIEWS)
def test_outputs_edited_in_place(name: str) -> None:
    run_ranks(2, _edited_outputs, name)


@dataclass
class _Tape:
    losses: list[torch.Tensor] = field(default_factory=list)


KEEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attribute": lambda hidden: hidden.square().mean(),
    "list": lambda hidden: [hidden.square().mean()],
    "mapping": lambda hidden: {"loss": hidden.square().mean()},
    "dataclass": lambda hidden: _Tape([hidden.square().mean()]),
}


def _kept(name: str, with_output: bool) -> None:
    """A tensor left in an attribute leads into the unit as an output does, alone or beside the output."""
    model, reference = _pair()

    def step(module: Any, batch: torch.Tensor) -> None:
        for layer in module:
            layer.keeps = KEEPS[name]
        out = module(batch)
        loss = out.square().sum() if with_output else out.new_zeros(())
        for layer in module:
            kept = layer.kept if isinstance(layer.kept, torch.Tensor) else next(iter(_values(layer.kept)))
            loss = loss + kept
        loss.backward()

    compare_gradients(model, reference, step)


def _values(kept: Any) -> Any:
    if isinstance(kept, _Tape):
        return kept.losses
    return kept.values() if isinstance(kept, dict) else kept


@pytest.mark.parametrize("with_output", [True, False], ids=["with_output", "alone"])
@pytest.mark.parametrize("name", KEEPS)
def test_tensors_kept_in_attributes(name: str, with_output: bool) -> None:
    run_ranks(2, _kept, name, with_output)


class _Fields:
    """Counts who reads a dataclass's fields."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("field"):
            type(self).reads += 1
        return super().__getattribute__(name)


def _reads_of(num_fields: int) -> int:
    settings: Any = make_dataclass("Settings", [(f"field{i}", int, i) for i in range(num_fields)], bases=(_Fields,))
    model, _ = _pair()
    for layer in model:
        layer.settings = settings()
    for index in range(2):
        settings.reads = 0
        model(torch.full((2, 6), float(index))).sum().backward()
    return int(settings.reads)


def _large_settings() -> None:
    assert _reads_of(64) >= 64
    assert _reads_of(65) == 0


def test_fields_of_large_dataclasses_cost_nothing_in_a_forward() -> None:
    """megatron-core's modules each have its config in an attribute, of some 200 fields."""
    run_ranks(1, _large_settings)


class _Recorder(nn.Module):
    """Keeps a loss of its own on a tape that is shared with the modules inside, before and after it calls them."""

    def __init__(self, tape: _Tape, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.tape, self.inner, self.up = tape, inner, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x).tanh()
        self.tape.losses.append(x.square().mean())
        y: torch.Tensor = x if self.inner is None else x + self.inner(x)
        self.tape.losses.append((x * y).mean())
        return y


def _shared_tape(used: tuple[int, ...]) -> None:
    """Whose kept tensor it is does not depend on who else can see it: no other unit computes gradients for it."""
    torch.manual_seed(0)
    tape = _Tape()
    reference = _Recorder(tape, _Recorder(tape))
    model = _Recorder(tape, _Recorder(tape))
    model.load_state_dict(reference.state_dict())
    fully_shard(model.inner)
    fully_shard(model)

    def step(module: Any, batch: torch.Tensor) -> None:
        tape.losses.clear()
        module(batch)
        sum(tape.losses[index] for index in used).backward()

    compare_gradients(model, reference, step)
    assert all((parameter.grad is not None) == (used != (0,)) for parameter in model.inner.parameters())


@pytest.mark.parametrize("used", [(0,), (0, 2), (1, 3), (0, 1, 2, 3)])
def test_tensors_kept_where_several_units_can_see_them(used: tuple[int, ...]) -> None:
    run_ranks(2, _shared_tape, used)


def _captured(with_output: bool) -> None:
    """Feature distillation: a user's hook keeps what a module inside a unit computes."""
    model, reference = _pair()
    features: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for module, is_reference in ((model, False), (reference, True)):
        for layer in module:
            layer.norm.register_forward_hook(lambda m, a, out, kept=features[is_reference]: kept.append(out))

    def step(module: Any, batch: torch.Tensor) -> None:
        kept = features[module is reference]
        kept.clear()
        out = module(batch)
        loss = sum(feature.square().sum() for feature in kept)
        (loss + out.square().sum() if with_output else loss).backward()

    compare_gradients(model, reference, step)


@pytest.mark.parametrize("with_output", [True, False], ids=["with_output", "alone"])
def test_features_captured_by_hooks(with_output: bool) -> None:
    run_ranks(2, _captured, with_output)


_SMUGGLED: list[torch.Tensor] = []


class _Smuggler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        _SMUGGLED[:] = [hidden]
        return self.down(hidden)


def _smuggled() -> None:
    """A tensor that leaves by a way that nobody watches is an error that names the unit, and nothing stays open."""
    model = nn.Sequential(_Smuggler())
    unit = fully_shard(model[0])
    fully_shard(model)
    unit(torch.ones(2, 6))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    stray = r"gradients of units \['0'\]: expected them within the units' own backward"
    (smuggled,) = _SMUGGLED
    for attempt in (optimizer.step, lambda: unit(torch.ones(2, 6))):
        smuggled.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=stray):
            attempt()
        assert unit.up.weight.grad is None
    unit(torch.ones(2, 6)).sum().backward()
    assert_at_rest(model)


def test_tensors_that_escape_are_noticed() -> None:
    run_ranks(2, _smuggled)


class _Coder(nn.Module):
    """A model that is used through two methods besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = nn.Linear(6, 4), nn.Linear(4, 6)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x).tanh()

    def decode(self, *, code: torch.Tensor) -> torch.Tensor:
        return self.out_of(code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(code=self.encode(x))

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x)) + self.out_of.bias


def _methods(name: str) -> None:
    torch.manual_seed(0)
    reference = _Coder()
    model = fully_shard(copy.deepcopy(reference))
    other = fully_shard(_Coder())
    for method in ("encode", "decode", "sample"):
        register_fsdp_forward_method(model, method)
    register_fsdp_forward_method(model, "encode")

    def step(module: Any, batch: torch.Tensor) -> None:
        if name == "pair":
            out = module.decode(code=module.encode(batch))
        elif name == "recomputed":
            out = checkpoint(module.encode, batch, use_reentrant=False)
        else:
            out = module.sample(batch)
        out.square().sum().backward()

    compare_gradients(model, reference, step)
    with pytest.raises(RuntimeError, match=r"linear of the sharded parameter .*into\.weight"):
        other.encode(torch.ones(1, 6))


@pytest.mark.parametrize("name", ["pair", "sample", "recomputed"])
def test_pb063_methods_other_than_forward(name: str) -> None:
    run_ranks(2, _methods, name)


def _failing_method() -> None:
    class Fails(_Coder):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError(f"{type(self.into.weight).__name__}")

    model = fully_shard(Fails())
    register_fsdp_forward_method(model, "encode")
    with pytest.raises(ArithmeticError, match="Parameter"):
        model.encode(torch.ones(1, 6))
    assert_at_rest(model)


def test_pb063_a_failing_method_leaves_the_unit_at_rest() -> None:
    run_ranks(2, _failing_method)


def _bad_methods() -> None:
    model = fully_shard(_Coder())
    for name in ("forward", "nothing", "into", "unshard"):
        with pytest.raises(ValueError, match=f"expected an ordinary method of its class besides forward, got '{name}'"):
            register_fsdp_forward_method(model, name)
    with pytest.raises(TypeError, match="expected a unit, got Linear"):
        register_fsdp_forward_method(model.into, "forward")
    stateless = torch.func.functional_call
    with pytest.raises(RuntimeError, match="expected the one that fully_shard put there"):
        stateless(model, {"into.bias": torch.zeros(4)}, (torch.ones(1, 6),))


def test_pb063_other_ways_around_the_hooks_are_refused() -> None:
    run_ranks(1, _bad_methods)


def _aliased() -> None:
    class Table(nn.Module):
        def __init__(self, how: Callable[[torch.Tensor], Any]) -> None:
            super().__init__()
            self.bias, self.weight, self.how = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(4, 3)), how

        def forward(self) -> Any:
            return self.how(self.weight)

    for how in (lambda w: w, lambda w: w[1:], lambda w: {"rows": (w.view(-1),)}, lambda w: w.detach()):
        model = fully_shard(Table(how))
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(RuntimeError, match="got a view of its parameter weight"):
                model()
        assert_at_rest(model)
    model = fully_shard(Table(lambda w: w.clone()))
    model().sum().backward()
    assert full_gradients(model)["weight"].equal(torch.ones(4, 3))


def test_views_of_weights_as_outputs_are_refused() -> None:
    run_ranks(2, _aliased)


def _users_hooks() -> None:
    """Hooks of the user on units, registered before and after sharding, see what they see on an ordinary module."""
    torch.manual_seed(0)
    reference = _Inner()
    model = copy.deepcopy(reference)
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def register(module: Any, kept: list[Any], when: str) -> None:
        module.register_forward_pre_hook(lambda m, args: kept.append((when, "pre", args[0].clone())))
        module.register_forward_hook(lambda m, args, out: out * 2)
        module.register_full_backward_pre_hook(lambda m, grads: kept.append((when, "backward pre", grads[0].clone())))
        module.register_full_backward_hook(lambda m, into, out: kept.append((when, "backward", into[0].clone())))

    for module in (reference, model):
        register(module, seen[module is reference], "before")
    fully_shard(model)
    for module in (reference, model):
        register(module, seen[module is reference], "after")
    x = torch.ones(2, 6) + dist.get_rank()
    for module in (reference, model):
        module(x.clone().requires_grad_()).square().sum().backward()
    assert_at_rest(model)
    assert [item[:2] for item in seen[False]] == [item[:2] for item in seen[True]]
    for ours, theirs in zip(seen[False], seen[True], strict=True):
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-6, atol=1e-6)


def test_users_hooks_on_a_unit() -> None:
    run_ranks(2, _users_hooks)


def _odd_moments() -> None:
    """state_dict and load_state_dict while weights are gathered would hand out, or fill, memory that is released."""
    model, _ = _pair()
    saved = model.state_dict()
    errors: list[str] = []

    def attempt(*args: Any) -> None:
        for call in (model.state_dict, lambda: model.load_state_dict(saved)):
            with pytest.raises(RuntimeError, match="expected a unit at rest, got gathered parameters") as caught:
                call()
            errors.append(str(caught.value))

    handle = model[1].norm.register_forward_hook(attempt)
    out = model(torch.ones(2, 6))
    handle.remove()
    between = model.state_dict()
    assert all(torch.equal(between[name].full_tensor(), saved[name].full_tensor()) for name in saved)
    out.register_hook(lambda grad: attempt())
    out.sum().backward()
    model[0].unshard()
    attempt()
    model[0].reshard()
    assert len(errors) == 6
    assert_at_rest(model)


def test_state_dict_at_odd_moments() -> None:
    run_ranks(2, _odd_moments)


def _copies() -> None:
    model = shard_layers(build("mlp"))
    model(torch.ones(1, 7))
    with pytest.raises(RuntimeError, match=r"deepcopy of unit FsdpMlp: .* Copy the model before fully_shard"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"deepcopy of unit layers\.0"):
        copy.deepcopy(nn.Sequential(model.layers[0]))
    with pytest.raises(RuntimeError, match=r"pickle of unit FsdpMlp: .* Save its state_dict"):
        torch.save(model, io.BytesIO())
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(1.0)
            average[name].lerp_(parameter, 0.25)
    for name, parameter in build("mlp").named_parameters():
        torch.testing.assert_close(average[name].full_tensor(), parameter + 0.25)


def test_copies_and_averages() -> None:
    run_ranks(2, _copies)
