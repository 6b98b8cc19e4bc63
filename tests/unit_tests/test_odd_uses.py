# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Uses that have broken the runtime once: mutable inputs, handed-on inputs, odd moments, odd optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.experimental import (
    SchedulePolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.oracle import assert_at_rest, compare_gradients, full_gradients


class _Collects(nn.Module):
    """Appends a loss term to what it is given, and hands on a tensor that all layers read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.how = nn.Linear(6, 6), how

    def forward(self, x: torch.Tensor, shared: torch.Tensor, found: Any) -> Any:
        hidden = self.a(x + shared)
        term = hidden.square().mean()
        if self.how == "list":
            found.append(term)
        else:
            found[len(found)] = term
        return hidden.tanh(), shared


def _collected(how: str) -> int:
    torch.manual_seed(0)
    reference = nn.ModuleList([nn.Linear(6, 6), *[_Collects(how) for _ in range(5)]])
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    live: list[int] = []

    def step(module: Any, batch: torch.Tensor) -> None:
        found: Any = [] if how == "list" else {}
        x, shared = batch, module[0](batch)
        for layer in module[1:]:
            x, shared = layer(x, shared, found)
            if module is model:
                x.register_hook(lambda grad: live.append(sum(unit.unshard_event is not None for unit in model)))
        assert len(found) == 5
        terms = found if how == "list" else found.values()
        assert not any(hasattr(term, "_fsdp_lent") for term in terms)
        (x.square().sum() + shared.sum() + sum(terms)).backward()

    compare_gradients(model, reference, step)
    return max(live)


@pytest.mark.parametrize("how", ["list", "dict"])
def test_losses_collected_in_an_argument(how: str) -> None:
    assert max(run_ranks(2, _collected, how)) <= 3


class _Skips(nn.Module):
    """Layer drop: hands its input on, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.skips = nn.Linear(6, 6), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.skips else self.a(x).tanh()


def _dropped_layers() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), _Skips(), nn.Linear(6, 6), _Skips())
    model: Any = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    world_size = dist.get_world_size()
    for step in range(2):
        batches = torch.randn(world_size, 4, 6, generator=torch.Generator().manual_seed(step))
        reference.zero_grad()
        model.zero_grad()
        for rank, batch in enumerate(batches):
            reference[1].skips = reference[3].skips = rank == 1
            (reference(batch).square().sum() / world_size).backward()
        model[1].skips = model[3].skips = dist.get_rank() == 1
        model(batches[dist.get_rank()]).square().sum().backward()
        assert_at_rest(model)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-5, atol=1e-6, msg=name)


def test_pb073_layers_dropped_on_one_rank() -> None:
    run_ranks(2, _dropped_layers)


def _kept_input_on_one_rank() -> None:
    """A line that keeps an input for logging changes nothing, on however many ranks it runs."""

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.last = nn.Linear(6, 6), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x if dist.get_rank() == 0 else None
            return self.a(x).tanh()

    torch.manual_seed(0)
    reference = nn.Sequential(*[Logs() for _ in range(3)])
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def step(module: Any, batch: torch.Tensor) -> None:
        for layer in module:
            batch = layer(batch * 2)
        batch.square().sum().backward()

    compare_gradients(model, reference, step)


def test_inputs_kept_on_one_rank() -> None:
    run_ranks(2, _kept_input_on_one_rank)


class _WithAux(nn.Module):
    """Gives an output and a loss that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.a(x).tanh()
        return y, y.square().mean()


class _OptionalMiddle(nn.Module):
    """Between two units lies a layer of the root's that one rank leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = _WithAux(), nn.Linear(6, 6), nn.Linear(6, 6)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, aux = self.first(x)
        loss: torch.Tensor = self.last(y if self.skips else self.middle(y)).square().sum() + aux
        return loss


def _second_output() -> None:
    """The unit that uses an output ends before the one that made it begins, also where that has used it itself."""
    torch.manual_seed(0)
    reference = _OptionalMiddle()
    model = copy.deepcopy(reference)
    for module in (model.first, model.last, model):
        fully_shard(module, schedule_policy=SchedulePolicy(backward_prefetch_units=0))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = torch.randn(world_size, 4, 6, generator=torch.Generator().manual_seed(0))
    for index, batch in enumerate(batches):
        reference.skips = index == 1
        (reference(batch) / world_size).backward()
    model.skips = rank == 1
    model(batches[rank]).backward()
    assert_at_rest(model)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-5, atol=1e-6, msg=name)


def test_pb073_layer_left_out_behind_a_unit_with_two_outputs() -> None:
    run_ranks(2, _second_output)


WRITES: dict[str, Callable[[Any], None]] = {
    "plain_step": lambda m: torch.optim.SGD(m.parameters(), 0.5).step(),
    "in_place": lambda m: [p.mul_(3) for p in m.parameters()] and None,
    "load": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}) and None,
}


def _written_in_between(name: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    loss = model(torch.ones(1, 4)).sum()
    with torch.no_grad():
        WRITES[name](model)
    loss.backward()


@pytest.mark.parametrize("name", WRITES)
def test_weights_written_between_forward_and_backward(name: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _written_in_between, name):
        assert "got weights that an optimizer has stepped, or somebody has written, since" in message


def _frozen_in_between() -> None:
    model = fully_shard(nn.Linear(4, 4))
    loss = model(torch.ones(1, 4)).sum()
    model.bias.requires_grad_(False)
    loss.backward()


def test_freezing_between_forward_and_backward_is_refused() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _frozen_in_between):
        assert "expected the parameters that were trainable in its forward" in message


def _frozen_while_gathered() -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.unshard()
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="expected a change while the unit is at rest, got one of gathered"):
        model.reshard()
    model.reshard()
    model(torch.ones(1, 4)).sum().backward()
    assert full_gradients(model)["weight"].equal(torch.ones(4, 4))


def test_freezing_gathered_parameters_is_refused() -> None:
    run_ranks(2, _frozen_while_gathered)


def _held() -> None:
    """Gradients held back without sync: cleared by zero_grad, not clipped, not frozen over."""
    model = fully_shard(nn.Linear(4, 4))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    x = torch.ones(1, 4)
    for clear in (optimizer.zero_grad, model.zero_grad):
        model.set_requires_gradient_sync(False)
        model(100 * x).sum().backward()
        with pytest.raises(RuntimeError, match=r"gradient norm of .*: expected reduced gradients, got some"):
            clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(RuntimeError, match="expected a change while no gradients are held back"):
            model.requires_grad_(False)
        clear()
        model.set_requires_gradient_sync(True)
        model(x).sum().backward()
        assert full_gradients(model)["weight"].equal(torch.ones(4, 4))
        optimizer.zero_grad()


def test_pb013_held_gradients_are_cleared_and_not_overlooked() -> None:
    run_ranks(2, _held)


def _detached_gradients() -> None:
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    detached, local = model.weight.grad.detach(), model.weight.grad.to_local()
    kept = local.clone()
    model.zero_grad()
    model(7 * torch.ones(1, 4)).sum().backward()
    assert detached.full_tensor().equal(torch.ones(4, 4)) and torch.equal(local, kept)
    assert full_gradients(model)["weight"].equal(7 * torch.ones(4, 4))


def test_detached_gradients_are_not_overwritten() -> None:
    run_ranks(2, _detached_gradients)


class _Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return self(self.a(x), depth - 1) if depth else x


def _recursive(is_root: bool) -> None:
    model = fully_shard(_Tree())
    (model if is_root else fully_shard(nn.Sequential(model)))(torch.ones(1, 4))


@pytest.mark.parametrize("is_root", [True, False])
def test_recursive_units_are_refused(is_root: bool) -> None:
    for message in run_ranks_expecting(2, NotImplementedError, _recursive, is_root):
        assert "expected one at a time, got a call from within itself. Shard the module around" in message


def _interrupted_inner_unit() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.stops = nn.Linear(4, 4), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.stops:
                raise KeyboardInterrupt
            return self.a(x)

    model: Any = nn.Sequential(nn.Linear(4, 4), Stops())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.context.finalize()
    with pytest.raises(KeyboardInterrupt):
        model[1](torch.ones(1, 4))
    model[1].stops = False
    model(torch.ones(1, 4)).sum().backward()
    assert_at_rest(model)
    assert model.context.num_units_in_forward == 0


def test_interrupted_inner_unit_is_used_again() -> None:
    run_ranks(2, _interrupted_inner_unit)


def _failing_callback() -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.register_post_backward_hook(lambda unit: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    assert_at_rest(model)


def test_failing_callback_at_the_end_of_backward() -> None:
    run_ranks(2, _failing_callback)


def _deleted_model() -> None:
    model = fully_shard(nn.Linear(4, 4))
    loss = model(torch.ones(1, 4)).sum()
    del model
    loss.backward()


def test_backward_of_a_deleted_model_is_refused() -> None:
    for message in run_ranks_expecting(1, RuntimeError, _deleted_model):
        assert "expected its model to be alive, got one that was deleted" in message


def _large_attributes() -> int:
    """A vocabulary in an attribute, also a cyclic one, is not searched for tensors at every forward."""
    from megatron.core.distributed.fsdp.experimental import hooks

    model: Any = nn.Sequential(nn.Linear(4, 4))
    model.words = {index: [str(index)] for index in range(10_000)}
    model.cycle = {"inside": {}}
    model.cycle["inside"]["self"] = model.cycle
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    return sum(1 for _ in hooks._tensors_near(model.words)) + sum(1 for _ in hooks._tensors_near(model.cycle))


def test_large_attributes_cost_nothing() -> None:
    assert run_ranks(1, _large_attributes) == [0]


def _other_tensors() -> None:
    """Outputs that are DTensors, and models under vmap."""

    class Wraps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(super().forward(x), mesh, [Replicate()])

    model = fully_shard(nn.Linear(4, 4))
    mesh: Any = model.weight.device_mesh
    wraps: Any = fully_shard(Wraps(4, 4))
    wraps(torch.ones(1, 4)).to_local().sum().backward()
    assert full_gradients(wraps)["weight"].equal(torch.ones(4, 4))
    with torch.no_grad():
        assert torch.vmap(model)(torch.ones(3, 4)).shape == (3, 4)


def test_outputs_of_other_tensor_types() -> None:
    run_ranks(1, _other_tensors)


def _adapters_in_steps() -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    model[0].lora = nn.ModuleDict()
    model[0].lora["a"] = nn.Linear(4, 4)


def test_pb120_adapter_added_below_an_empty_module_is_refused() -> None:
    for message in run_ranks_expecting(1, RuntimeError, _adapters_in_steps):
        assert "Add and replace parameters before fully_shard" in message


def _hooks_on_parameters() -> None:
    model = fully_shard(nn.Linear(4, 4))
    for register in (model.weight.register_hook, model.weight.register_post_accumulate_grad_hook):
        with pytest.raises(RuntimeError, match=r"of the sharded parameter .*weight: expected none, since"):
            register(lambda grad: None)
    with pytest.raises(ValueError, match="expected a DTensor cut like its parameter, got Tensor of shape"):
        model.weight.grad = torch.zeros(4, 4)


def test_hooks_and_plain_gradients_on_parameters_are_refused() -> None:
    run_ranks(1, _hooks_on_parameters)


def _scalars() -> None:
    model = fully_shard(nn.Linear(5, 3))
    whole = model.weight.full_tensor().norm()
    norm = model.weight.detach().norm()
    for value in (norm.item(), float(norm), norm.data.item(), norm.T.item(), (norm * 1).item(), float(f"{norm:.9f}")):
        assert value == pytest.approx(whole.item(), rel=1e-6)
    total = torch.zeros(())
    total += norm**2
    assert total.item() == pytest.approx(whole.item() ** 2, rel=1e-6)
    assert "full_tensor() on every rank gives the value" in repr(norm)
    for build in (torch.tensor, torch.as_tensor):
        with pytest.raises(RuntimeError, match="expected numbers or plain tensors, got a PendingScalar"):
            build([norm])
    with pytest.raises(RuntimeError, match="expected full_tensor"):
        norm.to_local()


def test_pb037_sums_and_norms_are_those_of_all_ranks() -> None:
    run_ranks(2, _scalars)


class _Rule(torch.optim.Optimizer):
    """A third-party optimizer; `rule` updates one parameter."""

    def __init__(self, parameters: Any, rule: Callable[[Any], None]) -> None:
        super().__init__(parameters, {})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.rule(parameter)


class FusedLamb(_Rule):
    pass


RULES: dict[str, tuple[Callable[[Any], None], str]] = {
    "norm": (lambda p: p.sub_(p.grad / p.norm()), "got norm, which needs whole tensors"),
    "svd": (lambda p: p.sub_(torch.linalg.qr(p.grad)[0]), "which needs whole tensors"),
    "transposed": (lambda p: p.sub_(p.grad.T.T), "which needs whole tensors"),
    "numel": (lambda p: p.mul_(1 / p.numel()), "got a look at numel of a shard"),
    "shape": (lambda p: p.mul_(p.shape[0]), "got a look at shape of a shard"),
}


def _bad_rule(name: str) -> None:
    model = fully_shard(nn.Linear(5, 3))
    optimizer = fully_shard_optimizer(_Rule(model.parameters(), RULES[name][0]))
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", RULES)
def test_pb033_rules_that_look_beyond_elements_are_refused(name: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _bad_rule, name):
        assert "_Rule.step: expected" in message and RULES[name][1] in message


def _good_rule() -> None:
    torch.manual_seed(0)
    reference = nn.Linear(5, 3)
    model = fully_shard(copy.deepcopy(reference))

    def lion(parameter: Any) -> None:
        parameter.mul_(0.99).add_(torch.sign(parameter.grad.mul(0.9)), alpha=-0.1)

    optimizers = [fully_shard_optimizer(_Rule(model.parameters(), lion)), _Rule(reference.parameters(), lion)]
    for module, optimizer in zip((model, reference), optimizers, strict=True):
        module(torch.ones(1, 5)).sum().backward()
        optimizer.step()
    for name, parameter in reference.named_parameters():
        found: Any = model.get_parameter(name)
        assert torch.equal(found.full_tensor(), parameter)
    with pytest.raises(ValueError, match="expected an element-wise optimizer such as AdamW or SGD, got FusedLamb"):
        fully_shard_optimizer(FusedLamb(model.parameters(), lion))


def test_pb033_elementwise_rules_of_ones_own() -> None:
    run_ranks(2, _good_rule)


def _state_of_another_model() -> None:
    models = [fully_shard(nn.Linear(*size)) for size in ((4, 4), (9, 3))]
    ours, theirs = (fully_shard_optimizer(torch.optim.AdamW(model.parameters())) for model in models)
    for optimizer in (ours, theirs):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    theirs.load_state_dict(ours.state_dict())


def test_pb031_state_of_another_shape_is_refused() -> None:
    for message in run_ranks_expecting(2, ValueError, _state_of_another_model):
        assert "optimizer state" in message and "expected shape" in message and "cut into 2, got" in message


def _saved_and_loaded() -> None:
    model = fully_shard(nn.Linear(4, 4))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer))


def test_optimizer_state_is_loaded_from_a_file() -> None:
    run_ranks(2, _saved_and_loaded)


def _set_before_the_first_forward(what: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    other = dist.get_rank() == 1
    if what == "frozen":
        model.requires_grad_(other)
    elif what == "sync":
        model.set_requires_gradient_sync(other)
    elif what == "reshard":
        model.set_reshard_after_forward(other)
    else:
        model.set_modules_to_forward_prefetch([model] if other else [])
    model(torch.ones(1, 4))


@pytest.mark.parametrize("what", ["frozen", "sync", "reshard", "prefetch"])
def test_settings_that_differ_between_ranks_are_named(what: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _set_before_the_first_forward, what):
        assert "FsdpLinear" in message and "expected the same" in message


def _contexts_without_units() -> None:
    """Ranks of one group build a model, the others nothing: nobody waits for them."""
    mesh = torch.distributed.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "dp"))
    with fully_shard_context(DEVICE):
        if dist.get_rank() < 2:
            model = fully_shard(nn.Linear(4, 4), mesh["dp"])
    if dist.get_rank() < 2:
        model(torch.ones(1, 4)).sum().backward()


def test_context_without_units() -> None:
    run_ranks(4, _contexts_without_units)
