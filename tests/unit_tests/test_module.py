# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A unit's life: phases, hooks, recomputation, evaluation, errors, reuse, external schedulers and deletion."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    FsdpModule,
    clip_grad_norm_,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.models import Block, build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest, compare_gradients, full_gradients
from tests.unit_tests.trace import CollectiveLog


def _blocks(forward: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]) -> tuple[nn.Module, nn.Module]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([Block(6) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self.layers, x)

    reference = Model()
    return shard_layers(copy.deepcopy(reference)), reference


def _chain(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _recompute(reentrant: bool) -> Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]:
    def forward(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    return forward


def _recompute_all(reentrant: bool) -> Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]:
    return lambda layers, x: checkpoint(_chain, layers, x, use_reentrant=reentrant)


def _twice_in_recomputed_parts(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    x = checkpoint(_chain, layers, x, use_reentrant=True)
    return checkpoint(_chain, layers, x, use_reentrant=True)


FORWARDS: dict[str, Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]] = {
    "chain": _chain,
    "recompute_units": _recompute(False),
    "recompute_units_reentrant": _recompute(True),
    "recompute_all": _recompute_all(False),
    "recompute_all_reentrant": _recompute_all(True),
    "called_twice": lambda layers, x: layers[2](layers[0](layers[1](layers[0](x)))),
    "parallel_calls": lambda layers, x: layers[1](layers[0](x) + layers[0](2 * x)) + layers[2](x),
    "reverse_order": lambda layers, x: layers[0](layers[1](layers[2](x))),
    "twice_reentrant": _twice_in_recomputed_parts,
    "skipped_unit": lambda layers, x: layers[2](layers[0](x)),
}


def _gradients_of(name: str) -> None:
    model, reference = _blocks(FORWARDS[name])

    def step(module: nn.Module, batch: torch.Tensor) -> None:
        module(batch.requires_grad_()).square().sum().backward()

    compare_gradients(model, reference, step)


@pytest.mark.parametrize("name", FORWARDS)
def test_ways_to_call_units(name: str) -> None:
    """PB-012, PB-066: reuse, recomputation, other orders and unused units give the gradients of one process."""
    run_ranks(2, _gradients_of, name)


def _two_forwards(order: str) -> None:
    """PB-084: several forwards before the backwards, in either order or at once."""
    model, reference = _blocks(_chain)

    def step(module: nn.Module, batch: torch.Tensor) -> None:
        losses = [module(batch).square().sum(), module(batch * 0.5).sin().sum()]
        if order == "joint":
            (losses[0] + losses[1]).backward()
            return
        for loss in losses if order == "same" else losses[::-1]:
            loss.backward()

    compare_gradients(model, reference, step)


@pytest.mark.parametrize("order", ["same", "reversed", "joint"])
def test_pb084_forward_forward_backward_backward(order: str) -> None:
    run_ranks(2, _two_forwards, order)


@dataclass
class _Output:
    hidden: torch.Tensor
    other: Any = None


class _Named(NamedTuple):
    other: Any
    hidden: torch.Tensor


class _Structured(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block(6)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.block(x))


STRUCTURES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda t: (t, None), lambda out: out[0]),
    "list": (lambda t: [None, [t]], lambda out: out[1][0]),
    "dict": (lambda t: {"a": {"b": t}}, lambda out: out["a"]["b"]),
    "dataclass": (lambda t: _Output(t), lambda out: out.hidden),
    "namedtuple": (lambda t: _Named(None, t), lambda out: out.hidden),
    "partly_without_gradient": (lambda t: {"a": [t.detach(), (t, 3)], "b": None}, lambda out: out["a"][1][0]),
}


def _structured(name: str) -> None:
    wrap, unwrap = STRUCTURES[name]
    reference = _Structured(wrap)
    model = copy.deepcopy(reference)
    model.layers = nn.ModuleList()
    fully_shard(model.block)
    fully_shard(model)
    compare_gradients(model, reference, lambda module, batch: unwrap(module(batch)).square().sum().backward())


@pytest.mark.parametrize("name", STRUCTURES)
def test_pb089_structured_outputs(name: str) -> None:
    run_ranks(2, _structured, name)


def _partly_used() -> None:
    """PB-009: a parameter that gets no gradient this step contributes zeros; the count is right in the next step."""
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.use_b = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) if self.use_b else self.a(x)

    reference = Two()
    model = fully_shard(copy.deepcopy(reference))
    compare_gradients(model, reference, lambda module, batch: module(batch).square().sum().backward())
    assert not model.b.weight.grad.full_tensor().any()
    model.use_b = reference.use_b = True
    compare_gradients(model, reference, lambda module, batch: module(batch).square().sum().backward())


def test_pb009_partly_used_unit() -> None:
    run_ranks(2, _partly_used)


def _partly_used_then_accumulated() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            return self.parts[name](x)

    both = fully_shard(Both())
    x = torch.full((1, 2), dist.get_rank() + 1.0)
    for name in ("a", "b", "b"):
        both(x, name).sum().backward()
        assert_at_rest(both)
    assert both.parts["a"].weight.grad.full_tensor().tolist() == [[1.5, 1.5]]
    assert both.parts["b"].weight.grad.full_tensor().tolist() == [[3.0, 3.0]]


def test_partly_used_unit_keeps_what_has_accumulated() -> None:
    run_ranks(2, _partly_used_then_accumulated)


def _manual_gradients() -> None:
    """`.grad` is the truth: cleared by hand, replaced by hand, or scaled in place, as in torch."""
    model = fully_shard(nn.Linear(2, 2))
    x = torch.full((1, 2), dist.get_rank() + 1.0)

    def backward() -> None:
        model(x).sum().backward()

    backward()
    model.weight.grad = None
    backward()
    assert model.weight.grad.full_tensor().unique().tolist() == [1.5]
    assert model.bias.grad.full_tensor().unique().tolist() == [2.0]
    model.weight.grad = model.weight.grad * 10
    model.bias.grad.zero_()
    backward()
    assert model.weight.grad.full_tensor().unique().tolist() == [16.5]
    assert model.bias.grad.full_tensor().unique().tolist() == [1.0]


def test_gradients_changed_by_hand() -> None:
    run_ranks(2, _manual_gradients)


def _evaluation_between_steps() -> None:
    model = shard_layers(build("tied"))
    plain = build("tied")
    inputs, targets = make_batch(model, 4, seed=0)
    for grad_mode in (torch.no_grad, torch.inference_mode):
        with grad_mode(), CollectiveLog() as log:
            assert torch.equal(model.eval()(inputs), plain.eval()(inputs))
        assert_at_rest(model)
        assert len([entry for entry in log.entries if entry[0] == "all_gather"]) == 4
        loss_of(model.train(), inputs, targets).backward()
        assert_at_rest(model)


def test_evaluation_between_steps() -> None:
    run_ranks(2, _evaluation_between_steps)


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.fail_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == self.fail_at:
                raise KeyError("a bad batch")
            x = layer(x)
        return x


def _forward_raises() -> None:
    """An exception in forward reaches the user, and the model trains on afterwards."""
    model = shard_layers(_Fails())
    for fail_at in (0, 1, 2):
        model.fail_at = fail_at if fail_at < 2 else None
        if model.fail_at is not None:
            with pytest.raises(KeyError, match="a bad batch"):
                model(torch.ones(1, 3))
            assert model.phase is FsdpModule.Phase.RESTING and model.context.num_units_in_forward == 0
    model(torch.ones(1, 3)).sum().backward()
    assert_at_rest(model)


def test_exception_in_forward() -> None:
    run_ranks(2, _forward_raises)


def _backward_raises() -> None:
    """An exception half-way through backward reaches the user; the next step's gradients are right."""
    torch.manual_seed(0)
    reference = nn.Sequential(*[Block(6) for _ in range(3)])
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    fails = True

    def fail(grad: torch.Tensor) -> None:
        if fails:
            raise ZeroDivisionError("half-way")

    for module in (model, reference):
        module[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError, match="half-way"):
        model(torch.ones(2, 6)).sum().backward()
    fails = False
    compare_gradients(model, reference, lambda module, batch: module(batch).square().sum().backward())


def test_exception_in_backward() -> None:
    run_ranks(2, _backward_raises)


def _stale_root() -> None:
    """A root that keeps its weights for backward must not use them after a step has changed them."""
    model, plain = shard_layers(build("mlp")), build("mlp")
    x = torch.ones(2, 7)
    model(x)  # no backward follows: the root's weights stay gathered
    assert model.unshard_event is not None
    for module in (model, plain):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) + 1
    fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5)).step()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert torch.equal(model(x), plain(x))


def test_weights_kept_for_backward_are_refreshed_after_a_step() -> None:
    run_ranks(2, _stale_root)


def _external_scheduler() -> None:
    """Without hooks, a scheduler calls the four points itself; the numbers are those of the hooks."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    hooked, driven = copy.deepcopy(plain), copy.deepcopy(plain)
    fully_shard(hooked)
    fully_shard(driven, register_hooks=False)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    hooked(x).square().sum().backward()
    done: list[FsdpModule] = []
    driven.register_post_backward_hook(done.append)
    driven.context.finalize()
    driven.pre_forward()
    out = driven(x)
    driven.post_forward(needs_backward=True)
    out.register_hook(lambda grad: driven.pre_backward())
    out.square().sum().backward()
    assert done == [driven]
    assert driven.phase is FsdpModule.Phase.RESTING
    for name, gradient in full_gradients(hooked).items():
        assert torch.equal(gradient, full_gradients(driven)[name])


def test_external_scheduler() -> None:
    run_ranks(2, _external_scheduler)


def _explicit_unshard() -> None:
    model = shard_layers(build("mlp"))
    model.context.finalize()
    model.layers[0].unshard(prefetch="forward")
    assert type(model.layers[0].weight) is nn.Parameter and model.layers[1].unshard_event is not None
    assert torch.equal(model.layers[0].weight, build("mlp").layers[0].weight)
    model.layers[0].reshard()
    model.layers[1].reshard()
    model.layers[2].unshard(prefetch="backward")
    assert model.layers[1].unshard_event is not None
    model.context.reshard_idle_units()
    for layer in model.layers:
        layer.reshard()
    assert_at_rest(model)
    with pytest.raises(ValueError, match="unshard prefetch: expected 'none', 'forward' or 'backward', got 'both'"):
        model.layers[0].unshard(prefetch="both")


def test_explicit_unshard_and_reshard() -> None:
    run_ranks(2, _explicit_unshard)


def _phase_error() -> None:
    model = shard_layers(build("mlp"))
    model.context.finalize()
    model.layers[1].pre_forward()
    model.layers[1].pre_forward()


def test_phase_error_names_the_unit() -> None:
    for message in run_ranks_expecting(1, RuntimeError, _phase_error):
        assert "phase of unit layers.1: expected a move allowed from FORWARD, got FORWARD" in message


def _frozen_units_are_released() -> list[int]:
    """PB-113: frozen units return to shards as backward passes them, not at its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4).requires_grad_(False) for _ in range(5)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    live: list[int] = []

    def count(grad: torch.Tensor) -> None:
        live.append(sum(layer.unshard_event is not None for layer in model))

    x = torch.randn(2, 4)
    hidden = x
    for layer in model:
        hidden = layer(hidden)
        hidden.register_hook(count)
    hidden.sum().backward()
    assert_at_rest(model)
    return live


def test_pb113_frozen_units_are_released() -> None:
    """At each unit's output gradient: the unit itself, the next one gathered ahead, and none left behind."""
    for live in run_ranks(2, _frozen_units_are_released):
        assert len(live) == 6 and max(live) <= 2


def _deletion(how: str) -> None:
    """PB-114: without the cyclic collector, deleting the model frees its buffers at once."""
    model = shard_layers(build("tied"))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    inputs, targets = make_batch(model, 4, seed=dist.get_rank())
    gc.collect()
    gc.disable()
    try:
        loss = loss_of(model, inputs, targets)
        if how == "after_exception":
            with pytest.raises(ZeroDivisionError):
                loss.register_hook(lambda grad: 1 / 0)
                loss.backward()
        elif how != "before_backward":
            loss.backward()
            optimizer.step()
        if how != "with_loss":
            del loss
        units = [module for module in model.modules() if isinstance(module, FsdpModule)]
        alive = [weakref.ref(group.main_weight.local) for unit in units for group in unit.parameter_groups]
        alive += [weakref.ref(group.full_weight.local) for unit in units for group in unit.parameter_groups]
        alive += [weakref.ref(unit) for unit in units] + [weakref.ref(model.context)]
        del units
        del optimizer
        del model
        # gloo's own thread lets go of the last gather's tensors a moment after the gather.
        deadline = time.monotonic() + 5
        while any(reference() is not None for reference in alive) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not [reference for reference in alive if reference() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["after_step", "with_loss", "before_backward", "after_exception"])
def test_pb114_deletion_frees_at_once(how: str) -> None:
    run_ranks(2, _deletion, how)


class _LowRank(nn.Module):
    """A frozen weight beside a trainable low-rank pair: the pair has its gradients before the frozen weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class _DetachedUse(nn.Module):
    """The weight is read once more, without gradient, by an operation whose backward comes after the weight's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.detach()).sin() + nn.functional.linear(x, self.weight)


class _TwoInputs(nn.Module):
    """Two inputs and two outputs whose gradients come one after another, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, *, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.first(x), "b": self.second(y)}


def _late_reads(name: str) -> None:
    torch.manual_seed(0)
    if name == "two_inputs":
        reference: nn.Module = nn.ModuleList([nn.Linear(6, 6), _TwoInputs(), nn.Linear(6, 6)])

        def run(module: Any, batch: torch.Tensor) -> torch.Tensor:
            x = module[0](batch)
            out = module[1](x=x, y=x.sin())
            return module[2](out["a"]) + (out["b"] * out["a"].sum()).cos()

    else:
        kind = {"low_rank": _LowRank, "detached_use": _DetachedUse}[name]
        reference = nn.ModuleList([kind() for _ in range(3)])

        def run(module: Any, batch: torch.Tensor) -> torch.Tensor:
            for layer in module:
                batch = layer(batch)
            return batch

    model: Any = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    compare_gradients(model, reference, lambda module, batch: run(module, batch).square().sum().backward())


@pytest.mark.parametrize("name", ["low_rank", "detached_use", "two_inputs"])
def test_weights_stay_until_the_unit_has_read_them(name: str) -> None:
    """PB-098: a unit keeps its weights until its inputs have their gradients, not only its parameters."""
    run_ranks(2, _late_reads, name)


def _leaf_inputs() -> None:
    """A leaf that is an input in every step does not collect hooks, whether backward runs or not."""
    model = fully_shard(nn.Linear(3, 3))
    prompt = torch.randn(2, 3, requires_grad=True)
    for step in range(4):
        out = model(prompt).sum()
        if step % 2:
            out.backward()
            assert_at_rest(model)
        del out
    assert not prompt._backward_hooks
    assert prompt.grad is not None


def test_leaf_inputs_do_not_collect_hooks() -> None:
    run_ranks(2, _leaf_inputs)


def _inner_units_keep_the_outer_gathered() -> None:
    """A frozen outer unit whose own operation lies between trainable inner ones is read until backward ends."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 6)
            self.scale = nn.Linear(6, 6).requires_grad_(False)
            self.head = nn.Linear(6, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.scale(self.embedding(tokens)))

    torch.manual_seed(0)
    reference = Outer()
    model = copy.deepcopy(reference)
    fully_shard(model.embedding)
    fully_shard(model.head)
    fully_shard(model)
    for module in (model, reference):
        module(torch.tensor([[0, 3, 4]])).square().sum().backward()
    assert_at_rest(model)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(full_gradients(model)[name], parameter.grad)


def test_outer_unit_with_frozen_weights_between_inner_ones() -> None:
    run_ranks(2, _inner_units_keep_the_outer_gathered)


class _WithAside(nn.Module):
    """A root that leaves a loss term aside, made of some of its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.a(x).square().mean()
        return self.b(x)


def _backward_of_what_was_left_aside() -> None:
    """A backward that no output announces still reduces and closes; nothing leaks into the next step."""
    torch.manual_seed(0)
    reference = _WithAside()
    model = fully_shard(copy.deepcopy(reference))

    def aside_only(module: Any, batch: torch.Tensor) -> None:
        module(batch)
        module.aside.backward()
        module.aside = None

    compare_gradients(model, reference, aside_only, steps=1)
    compare_gradients(model, reference, lambda module, batch: module(batch).square().sum().backward(), steps=2)


def test_gradients_that_no_output_announces() -> None:
    run_ranks(2, _backward_of_what_was_left_aside)


class _RecomputesInside(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = Block(6), Block(6), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=self.reentrant))


def _recompute_inside(reentrant: bool) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*[_RecomputesInside(reentrant) for _ in range(3)])
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    compare_gradients(model, reference, lambda module, batch: module(batch.requires_grad_()).square().sum().backward())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_inside_a_unit(reentrant: bool) -> None:
    run_ranks(2, _recompute_inside, reentrant)


class _Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
        x = self.a(x).tanh()
        return self.b(x) if use_b else x


def _recompute_with_other_parameters() -> None:
    """A unit recomputed several times in one backward, each time with other parameters."""
    torch.manual_seed(0)
    reference = _Switch()
    model = fully_shard(copy.deepcopy(reference))

    def step(module: Any, batch: torch.Tensor) -> None:
        x = batch.requires_grad_()
        for use_b in (True, False, False, True, False):
            x = checkpoint(module, x, use_b, use_reentrant=True)
        x.square().sum().backward()

    compare_gradients(model, reference, step)


def test_reentrant_calls_with_other_parameters() -> None:
    run_ranks(2, _recompute_with_other_parameters)


def _unused_in_the_last_microbatch() -> None:
    """PB-013: what counts is the last backward, not the last one of each unit."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    with fully_shard_context(DEVICE) as context:
        for layer in model:
            fully_shard(layer)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with microbatch(context, is_last=False):
        model[1](model[0](torch.ones(1, 6))).sum().backward()
    with pytest.raises(RuntimeError, match="expected gradients of all microbatches"):
        optimizer.step()
    model[0](torch.ones(1, 6)).sum().backward()
    optimizer.step()


def test_unit_unused_in_the_last_microbatch() -> None:
    run_ranks(2, _unused_in_the_last_microbatch)


class _Hides:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def _hidden_output() -> None:
    model = fully_shard(_Structured(_Hides))
    with torch.no_grad():
        model(torch.ones(1, 6))
    model(torch.ones(1, 6))


def test_pb089_unknown_containers_are_refused() -> None:
    for message in run_ranks_expecting(1, TypeError, _hidden_output):
        assert "output of unit Fsdp_Structured" in message and "got _Hides" in message


def _penalty(how: str) -> None:
    """A loss term of the sharded parameters themselves would lose its gradient: it raises."""
    model = fully_shard(nn.Linear(7, 5))
    if how == "assigned":
        model.weight.grad = torch.ones(5, 7)
        model(torch.ones(1, 7)).sum().backward()
    elif how == "sum":
        sum(p.square().sum() for p in model.parameters())
    else:
        (model.weight * 2).full_tensor()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("assigned", ValueError, "weight: expected a DTensor cut like its parameter, got Tensor of shape (5, 7)"),
        ("sum", RuntimeError, "expected detach() or no_grad()"),
        ("full_tensor", RuntimeError, "expected detach() or no_grad()"),
    ],
)
def test_gradients_through_sharded_parameters_are_refused(how: str, error: type[Exception], message: str) -> None:
    for text in run_ranks_expecting(2, error, _penalty, how):
        assert message in text


def _changed_after_wrap(how: str) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    if how == "replace":
        model[0].weight = nn.Parameter(torch.zeros(3, 3))
    elif how == "tie":
        model[1].weight = model[0].weight
    elif how == "add":
        model[0].register_parameter("extra", nn.Parameter(torch.zeros(3)))
    model(torch.ones(1, 3))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("replace", "expected those that it was sharded with, got 0.weight,"),
        ("tie", "expected those that it was sharded with, got 1.weight,"),
        ("add", "expected those that it was sharded with, got 0.extra,"),
    ],
)
def test_parameters_changed_after_wrap_are_refused(how: str, message: str) -> None:
    for text in run_ranks_expecting(1, RuntimeError, _changed_after_wrap, how):
        assert message in text


def _callbacks() -> None:
    """Each unit tells once in every backward, a root and an unused parameter's unit included."""
    model = shard_layers(build("tied"))
    told: list[str] = []
    for unit in (model, *model.layers):
        unit.register_post_backward_hook(lambda unit: told.append(unit.name))
    inputs, targets = make_batch(model, 4, seed=0)
    for _ in range(2):
        loss_of(model, inputs, targets).backward()
    assert told == ["layers.2", "layers.1", "layers.0", "FsdpTiedLm"] * 2


def test_post_backward_hook_fires_once_for_every_unit() -> None:
    run_ranks(1, _callbacks)


def _nested_memory() -> int:
    """Units around units are released as backward passes them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))) for _ in range(6)])
    for outer in model:
        fully_shard(outer[1])
        fully_shard(outer)
    fully_shard(model)
    live: list[int] = []

    def count(grad: torch.Tensor) -> None:
        live.append(sum(outer.unshard_event is not None for outer in model))

    hidden = torch.randn(2, 4)
    for outer in model:
        hidden = outer(hidden)
        hidden.register_hook(count)
    hidden.sum().backward()
    assert_at_rest(model)
    return max(live)


def test_outer_units_are_released_in_backward() -> None:
    assert max(run_ranks(2, _nested_memory)) <= 3


def _one_block_evaluated() -> None:
    model = shard_layers(build("mlp"))
    with torch.no_grad():
        model.layers[0](torch.ones(1, 7))
    assert_at_rest(model)


def test_evaluating_one_block_leaves_nothing_gathered() -> None:
    run_ranks(2, _one_block_evaluated)


def _two_roots_share_a_unit() -> None:
    shared = nn.Linear(3, 3)
    with fully_shard_context(DEVICE):
        fully_shard(shared)
        roots = [fully_shard(nn.Sequential(shared)) for _ in range(2)]
    assert roots


def test_unit_in_two_roots_is_refused() -> None:
    for message in run_ranks_expecting(1, ValueError, _two_roots_share_a_unit):
        assert "expected each unit inside one root" in message


class _SkipsBranch(nn.Module):
    """Stochastic depth: a branch that some ranks skip."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk, self.skips = nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.trunk(x).tanh()
        return x if self.skips else x + self.branch(x)


def _parameters_skipped_on_one_rank() -> None:
    """PB-073: units reduce in one order although one rank uses fewer parameters; what is unused counts zero."""
    torch.manual_seed(0)
    reference = nn.Sequential(*[_SkipsBranch() for _ in range(4)])
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    world_size = dist.get_world_size()
    for step in range(3):
        batches = torch.randn(world_size, 4, 6, generator=torch.Generator().manual_seed(step))
        reference.zero_grad()
        model.zero_grad()
        for rank, batch in enumerate(batches):
            reference[1].skips = reference[2].skips = rank == 1
            reference(batch).square().sum().backward()
        model[1].skips = model[2].skips = dist.get_rank() == 1
        model(batches[dist.get_rank()]).square().sum().backward()
        assert_at_rest(model)
        for name, gradient in full_gradients(model).items():
            expected = reference.get_parameter(name).grad / world_size
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_pb073_parameters_skipped_on_one_rank() -> None:
    run_ranks(2, _parameters_skipped_on_one_rank)


def _gradient_surgery() -> None:
    """Gradients that somebody holds stay what they are when the next backward comes (PCGrad and the like)."""
    model, reference = _blocks(_chain)
    batches = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(0))
    losses: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (lambda y: y.square().sum(), lambda y: y.sin().sum())
    held = []
    for loss in losses:
        model.zero_grad()
        loss(model(batches[dist.get_rank()])).backward()
        held.append([parameter.grad for parameter in model.parameters()])
    for index, parameter in enumerate(reference.parameters()):
        for which, loss in enumerate(losses):
            reference.zero_grad()
            for batch in batches:
                (loss(reference(batch)) / len(batches)).backward()
            torch.testing.assert_close(held[which][index].full_tensor(), parameter.grad, rtol=1e-5, atol=1e-6)


def test_held_gradients_are_not_overwritten() -> None:
    run_ranks(2, _gradient_surgery)


def _buffers_stay() -> None:
    """Without anybody holding gradients, every step reduces into the same memory."""
    model = shard_layers(build("mlp"))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    seen = []
    for step in range(4):
        inputs, targets = make_batch(model, 4, seed=10 * step + dist.get_rank())
        loss_of(model, inputs, targets).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        units = [module for module in model.modules() if isinstance(module, FsdpModule)]
        seen.append([id(group.gradients.at.main) for unit in units for group in unit.parameter_groups])
    assert all(ids == seen[0] for ids in seen)


def test_gradients_that_nobody_holds_keep_their_memory() -> None:
    run_ranks(2, _buffers_stay)


def _failed_then_another_backward() -> None:
    """A backward that raised leaves nothing behind for the next one, even without a forward in between."""
    torch.manual_seed(0)
    model = nn.Sequential(*[_Switch() for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def forward(fails: bool) -> torch.Tensor:
        x = torch.ones(2, 6)
        for index, layer in enumerate(model):
            x = layer(x, index == 0)
            if fails and index == 1:
                x.register_hook(lambda grad: 1 / 0)
        return x.square().sum()

    first, second = forward(True), forward(False)
    with pytest.raises(ZeroDivisionError):
        first.backward()
    model.zero_grad()
    second.backward()
    assert_at_rest(model)
    found = full_gradients(model)
    model.zero_grad()
    forward(False).backward()
    for name, gradient in full_gradients(model).items():
        assert torch.equal(found[name], gradient), name


def test_backward_after_a_failed_backward() -> None:
    run_ranks(2, _failed_then_another_backward)


def _step_before_backward() -> None:
    model = shard_layers(build("mlp"))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [model(torch.ones(1, 7)).sum() for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    losses[1].backward()


def test_step_between_forward_and_backward_is_refused() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _step_before_backward):
        assert "got weights that an optimizer has stepped, or somebody has written, since" in message


class _FineTuned(nn.Module):
    """The usual adapter set-up: frozen embedding, adapters in the layers, frozen norm before a trainable head."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6).requires_grad_(False)
        self.layers = nn.ModuleList([_LowRank() for _ in range(3)])
        self.norm = nn.Linear(6, 6).requires_grad_(False)
        self.head, self.reentrant = nn.Linear(6, 3), reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).requires_grad_()
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def _fine_tuned(reentrant: bool | None, twice: bool) -> None:
    torch.manual_seed(0)
    reference = _FineTuned(reentrant)
    model = shard_layers(copy.deepcopy(reference))
    tokens = torch.tensor([[0, 3, 4]])
    for module in (model, reference):
        out = module(tokens)
        if twice:
            out.sin().sum().backward(retain_graph=True)
        out.square().sum().backward()
    assert_at_rest(model)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(full_gradients(model)[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("reentrant", "twice"), [(None, False), (None, True), (False, False), (True, False)])
def test_fine_tuning_with_frozen_parts_of_the_root(reentrant: bool | None, twice: bool) -> None:
    """PB-086 as well: a second backward over a retained graph."""
    run_ranks(2, _fine_tuned, reentrant, twice)


class _Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.interrupts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.interrupts:
            raise KeyboardInterrupt
        return self.layers[1](x)


def _interrupted_forward() -> None:
    model = shard_layers(_Interrupted())
    model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 3))
    model.interrupts = False
    model(torch.ones(1, 3)).sum().backward()
    assert_at_rest(model)
    assert model.context.num_units_in_forward == 0


def test_interrupted_forward() -> None:
    run_ranks(2, _interrupted_forward)


def _shared_inputs() -> int:
    """An encoder's output, and a plain tensor, that every decoder reads: decoders are released one by one."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, *, memory: dict[str, torch.Tensor]) -> torch.Tensor:
            return x + self.own(x).tanh() + self.other(memory["encoded"]) * memory["bias"]

    torch.manual_seed(0)
    reference = nn.ModuleDict(
        {"encoder": nn.Linear(6, 6), "bias": nn.Linear(6, 6), "decoders": nn.ModuleList([Decoder() for _ in range(6)])}
    )
    model = copy.deepcopy(reference)
    live: list[int] = []

    def run(module: Any, batch: torch.Tensor) -> None:
        memory = {"encoded": module["encoder"](batch), "bias": module["bias"](batch).sin()}
        x = batch
        for decoder in module["decoders"]:
            x = decoder(x, memory=memory)
            if module is model:
                x.register_hook(lambda grad: live.append(sum(d.unshard_event is not None for d in model["decoders"])))
        x.square().sum().backward()

    for unit in (model["encoder"], model["bias"], *model["decoders"]):
        fully_shard(unit)
    fully_shard(model)
    compare_gradients(model, reference, run)
    return max(live)


def test_inputs_shared_by_many_units() -> None:
    assert max(run_ranks(2, _shared_inputs)) <= 3


def _teacher_in_backward() -> None:
    teacher, student = shard_layers(build("mlp")), shard_layers(build("mlp", seed=1))
    x = torch.ones(2, 7)

    def ask(grad: torch.Tensor) -> None:
        with torch.no_grad():
            teacher(x)

    out = student(x)
    out.register_hook(ask)
    out.sum().backward()
    assert_at_rest(teacher)
    assert_at_rest(student)


def test_forward_of_another_model_inside_a_backward() -> None:
    run_ranks(2, _teacher_in_backward)


def _outputs_are_ordinary() -> None:
    unit = fully_shard(nn.Linear(3, 3))
    buffer = io.BytesIO()
    out = unit(torch.ones(1, 3))
    torch.save(out.detach(), buffer)
    torch.save({"out": out}, buffer)
    frozen = fully_shard(_Structured(lambda t: (t.detach(), _Hides(t))).requires_grad_(False))
    frozen(torch.ones(1, 6))


def test_outputs_can_be_saved_and_frozen_units_may_return_anything() -> None:
    run_ranks(1, _outputs_are_ordinary)


def _hash_order() -> list[Any]:
    """PB-072: collectives are issued in one order whatever ids and hashes are."""
    torch.manual_seed(0)
    keep = [object() for _ in range(1000 * dist.get_rank())]
    model = nn.Sequential(*[nn.Linear(3 + index, 4 + index) for index in range(12)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    with CollectiveLog() as log:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert keep is not None
    return log.entries


def test_pb072_collective_order_is_the_same_everywhere() -> None:
    first, *others = run_ranks(3, _hash_order)
    assert len(first) == 1 + 2 * 12 * 3  # the agreement of ranks comes first
    assert all(log == first for log in others)


def _hooks_bypassed() -> None:
    """PB-062, PB-063: a sharded parameter used outside its unit's forward raises, it is never stale storage."""
    model = shard_layers(build("mlp"))
    with pytest.raises(RuntimeError, match=r"linear of the sharded parameter .*weight.*inside its unit's forward"):
        model.layers[0].forward(torch.ones(1, 7))
    model(torch.ones(1, 7))  # names are those of the root's first forward
    with pytest.raises(RuntimeError, match=r"linear of the sharded parameter layers\.0\.weight: .*inside its unit"):
        nn.functional.linear(torch.ones(1, 7), model.layers[0].weight)
    with pytest.raises(RuntimeError, match=r"mul of the sharded parameter scale: .*inside its unit's forward"):
        torch.ones(2, 7) * model.scale


def test_pb062_parameter_used_outside_its_unit() -> None:
    run_ranks(2, _hooks_bypassed)


def _wide_reference() -> None:
    """PB-023: 64 microbatches of mixed magnitude accumulate in float32 although compute and gradients are bf16."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False).bfloat16()
    plain = copy.deepcopy(model)
    fully_shard(model)
    total = torch.zeros(4, 8)
    for index in range(64):
        share = []
        for rank in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(100 * index + rank)
            x = torch.randn(2, 8, generator=generator).mul_(10.0 ** (index % 5 - 2)).bfloat16()
            plain.zero_grad()
            plain(x).sum().backward()
            share.append(plain.weight.grad.float())
            if rank == dist.get_rank():
                model(x).sum().backward()
        total += sum(share) / len(share)
    assert model.weight.grad.dtype is torch.float32
    torch.testing.assert_close(model.weight.grad.full_tensor(), total, rtol=1e-6, atol=1e-5)


def test_pb023_accumulates_in_the_main_gradient_dtype() -> None:
    run_ranks(2, _wide_reference)


def _profiled() -> set[str]:
    model = shard_layers(build("mlp"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(1, 7)).sum().backward()
    return {event.name for event in profile.events() if event.name.startswith("fsdp.")}


def test_profiler_ranges_name_the_units() -> None:
    for names in run_ranks(1, _profiled):
        units = ["FsdpMlp", "layers.0", "layers.1", "layers.2"]
        assert names == {f"fsdp.{what} {unit}" for what in ("unshard", "reduce") for unit in units}
