# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The same training in one process and on n ranks, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    FsdpModule,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_context,
    fully_shard_optimizer,
    gather_full,
    microbatch,
)
from tests.unit_tests.launch import DEVICE, lasting_mesh
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.trace import CollectiveLog

SAMPLES_PER_RANK = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


@dataclass(frozen=True)
class Recipe:
    """One training run; the defaults are the shortest that exercise everything."""

    model: str = "mlp"
    optimizer: str = "adamw"
    steps: int = 10
    microbatches: int = 1
    set_to_none: bool = True
    max_norm: float | None = 1.0
    dtype: torch.dtype = torch.float32
    device: str = DEVICE
    policy: MixedPrecisionPolicy | None = None
    mesh: tuple[int, ...] | None = None
    context: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """What a run leaves behind, in full tensors on the host; `gradients` are those of the last step, after clipping."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]


def run_reference(
    recipe: Recipe, world_size: int, compute: Callable[[str, torch.Tensor], torch.Tensor] | None = None
) -> Run:
    """Train in this process on the global batch: the ranks' microbatches, one after another.

    With `compute` forward and backward see what it makes of each named weight, and the weight gets that one's gradient.
    """
    model = build(recipe.model).to(recipe.device, recipe.dtype)
    optimizer = OPTIMIZERS[recipe.optimizer]([p for p in model.parameters() if p.requires_grad])
    call = model if compute is None else _Seen(model, compute)
    losses, norms = [], []
    share = world_size * recipe.microbatches
    for step in range(recipe.steps):
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        total = 0.0
        for index in range(recipe.microbatches):
            for rank in range(world_size):
                inputs, targets = _slice(model, recipe, step, index, rank, world_size)
                loss = loss_of(call, inputs, targets)
                (loss / share).backward()
                total += loss.item() / share
        losses.append(total)
        if recipe.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
            norms.append(norm.item())
        optimizer.step()
    named = dict(model.named_parameters())
    return Run(
        losses,
        norms,
        {name: None if p.grad is None else p.grad.cpu() for name, p in named.items()},
        {name: p.detach().cpu() for name, p in named.items()},
        {
            name: {key: value.cpu() for key, value in optimizer.state[p].items() if isinstance(value, torch.Tensor)}
            for name, p in named.items()
            if p in optimizer.state
        },
    )


class _Seen:
    """A model whose forward sees other weights."""

    def __init__(self, model: nn.Module, compute: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._model, self._compute = model, compute

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = {
            name: parameter + (self._compute(name, parameter.detach()) - parameter).detach()
            for name, parameter in self._model.named_parameters()
        }
        return torch.func.functional_call(self._model, weights, (inputs,))


def run_sharded(recipe: Recipe) -> Run:
    """Train on this rank's share with FSDP; check the resting state after every step, and the log of collectives."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(recipe.model).to(recipe.device, recipe.dtype)
    mesh = None if recipe.mesh is None else lasting_mesh(recipe.mesh)
    with fully_shard_context(recipe.device, **recipe.context) as context:
        shard_layers(model, mesh=mesh, mixed_precision_policy=recipe.policy, **recipe.shard)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(OPTIMIZERS[recipe.optimizer](trainable))
    losses, norms, communicated = [], [], []
    for step in range(recipe.steps):
        with CollectiveLog() as log:
            optimizer.zero_grad(set_to_none=recipe.set_to_none)
            total = torch.zeros((), dtype=torch.float64, device=recipe.device)
            for index in range(recipe.microbatches):
                inputs, targets = _slice(model, recipe, step, index, rank, world_size)
                with microbatch(context, is_last=index == recipe.microbatches - 1):
                    loss = loss_of(model, inputs, targets)
                    (loss / recipe.microbatches).backward()
                total += loss.detach() / recipe.microbatches
            if recipe.max_norm is not None:
                norms.append(clip_grad_norm_(trainable, recipe.max_norm).item())
            optimizer.step()
        assert_at_rest(model)
        communicated.append(log.entries)
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    assert_same_on_all_ranks(communicated)
    named = dict(model.named_parameters())
    state: dict[str, dict[str, torch.Tensor]] = {}
    names = {id(p): name for name, p in named.items()}
    saved = optimizer.state_dict()["state"]
    for index, parameter in enumerate(trainable):
        state[names[id(parameter)]] = {
            key: (gather_full(value, parameter) if value.shape == parameter.shape else value).cpu()
            for key, value in saved.get(index, {}).items()
            if isinstance(value, torch.Tensor)
        }
    return Run(
        losses,
        norms,
        {name: None if p.grad is None else p.grad.full_tensor().cpu() for name, p in named.items()},
        {name: p.full_tensor().cpu() for name, p in named.items()},
        state,
    )


def assert_parity(run: Run, reference: Run, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare losses, norms, gradients, weights and optimizer state; a gradient is None in both or in neither."""
    close = {"rtol": rtol, "atol": atol}
    for ours, theirs in ((run.losses, reference.losses), (run.norms, reference.norms)):
        torch.testing.assert_close(
            torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64), **close
        )
    assert run.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(run.weights[name], weight, check_dtype=False, msg=_named(name, "weight"), **close)
        gradient, expected = run.gradients[name], reference.gradients[name]
        assert (gradient is None) == (expected is None), f"gradient of {name}"
        if expected is not None:
            torch.testing.assert_close(gradient, expected, check_dtype=False, msg=_named(name, "gradient"), **close)
    assert run.state.keys() == reference.state.keys()
    for name, expected_state in reference.state.items():
        assert run.state[name].keys() == expected_state.keys(), name
        for key, value in expected_state.items():
            torch.testing.assert_close(run.state[name][key], value, check_dtype=False, msg=_named(name, key), **close)


def assert_at_rest(model: Any) -> None:
    """Require every unit at rest, no gathered storage, no reduction under way, sharded parameters in the module."""
    for unit in (module for module in model.modules() if isinstance(module, FsdpModule)):
        assert unit.phase is FsdpModule.Phase.RESTING, unit.name
        assert unit.unshard_event is None, unit.name
        assert not len(unit.context.reductions)
        assert not unit._fsdp_countdown.has_begun and not unit._fsdp_has_told, unit.name
        assert not unit._fsdp_active_calls and unit._fsdp_open_call is None, unit.name
        for group in unit.parameter_groups:
            assert not (group.gathers and group.full_weight.has_storage), group.name
            kept: Any = getattr(group, "kept_weight", None)
            assert kept is None or not kept.has_storage, kept.name
            if group.gradients is not None:
                at = group.gradients.at
                for buffer in (at.full, at.reduced, at.sliced):
                    assert buffer is None or not buffer.has_storage, buffer.name
                assert all(parameter.grad is None for parameter in group.unsharded_parameters)
    assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the gradients that there are, by name."""
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def compare_gradients(
    model: nn.Module, reference: nn.Module, step: Callable[[nn.Module, torch.Tensor], None], *, steps: int = 3
) -> None:
    """Run `step(module, batch)` on this rank's share with FSDP and on every share in one process; compare gradients."""
    world_size = dist.get_world_size()
    for index in range(steps):
        generator = torch.Generator().manual_seed(index)
        batches = torch.randn(world_size, 4, 6, generator=generator)
        model.zero_grad()
        reference.zero_grad()
        step(model, batches[dist.get_rank()])
        for batch in batches:
            step(reference, batch)
        assert_at_rest(model)
        gradients = full_gradients(model)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad / world_size, rtol=1e-5, atol=1e-6)


def assert_same_on_all_ranks(value: Any) -> None:
    """Require an equal picklable value on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == values[0] for other in values), f"ranks differ: {values}"


def _named(name: str, what: str) -> Callable[[str], str]:
    return lambda message: f"{what} of {name}: {message}"


def _slice(
    model: Any, recipe: Recipe, step: int, index: int, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = make_batch(model, SAMPLES_PER_RANK * world_size, seed=1000 * step + index)
    mine = slice(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)
    inputs, targets = inputs[mine].to(recipe.device), targets[mine].to(recipe.device)
    return (inputs.to(recipe.dtype) if inputs.is_floating_point() else inputs), targets
