# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Cases about weights and optimizers: no stale weight computes, no foreign parameter is stepped, no rule is bent."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    FsdpDTensor,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    gather_full,
)
from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.mcore import build_tower, optimizer_config, start, wrap
from tests.unit_tests.models import Mlp, build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest

BF16, FP32 = torch.bfloat16, torch.float32
WIDE_GRADIENTS = MixedPrecisionPolicy(FP32, main_grads_dtype=FP32)


# --- PB-019 -----------------------------------------------------------------------------------------------------------


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def _decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)


class _Trainer:
    """A bfloat16 model over float32 main weights, and one way to step it."""

    def __init__(self, path: str) -> None:
        self.path = path
        if path == "mcore":
            start()
            self.model = wrap(build_tower(BF16), grad_reduce_in_fp32=True)
            self.net = self.model.module.net
            base = _adamw(self.model.parameters())
            self.optimizer: Any = FullyShardedOptimizer(base, optimizer_config(), None, None, [self.model])
            return
        self.net = self.model = shard_layers(build_tower(BF16).net, mixed_precision_policy=WIDE_GRADIENTS)
        self.optimizer = _adamw(self.model.parameters())
        if path not in ("plain", "plain_closure", "plain_scheduler"):
            fully_shard_optimizer(self.optimizer)
        self.scheduler = _decay(self.optimizer)

    def step(self, loss: Callable[[], torch.Tensor]) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        if self.path == "plain_closure":
            self.optimizer.step(closure)
            return
        closure()
        self.optimizer.step()
        if self.path.endswith("scheduler"):
            self.scheduler.step()


def _rounded(weights: dict[str, torch.Tensor]) -> Mlp:
    model = Mlp().bfloat16()
    model.load_state_dict(weights)
    return model


def _never_stale(path: str) -> None:
    trainer = _Trainer(path)
    model, rank = trainer.net, dist.get_rank()
    main = {name: nn.Parameter(p.full_tensor()) for name, p in model.named_parameters()}
    reference = _adamw(main.values())
    scheduler = _decay(reference)
    before = None
    for step in range(10):
        batches = [make_batch(model, 4, seed=10 * step + other) for other in range(dist.get_world_size())]
        inputs = batches[rank][0].bfloat16()
        out = trainer.model(inputs)
        weights = {name: p.full_tensor() for name, p in model.named_parameters()}
        assert torch.equal(out, _rounded(weights)(inputs)), step
        assert before is None or not torch.equal(weights["scale"], before["scale"])
        before = weights
        trainer.step(lambda: loss_of(trainer.model, inputs, batches[rank][1]))  # noqa: B023 - called at once
        assert_at_rest(model)
        reference.zero_grad()
        for inputs, targets in batches:
            compute = _rounded({name: weight.detach() for name, weight in main.items()})
            loss_of(compute, inputs.bfloat16(), targets).backward()
            for name, parameter in compute.named_parameters():
                gradient = parameter.grad.float() / len(batches)
                main[name].grad = gradient if main[name].grad is None else main[name].grad + gradient
        reference.step()
        if path.endswith("scheduler"):
            scheduler.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), main[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("path", ["plain", "plain_scheduler", "plain_closure", "adapted", "adapted_scheduler", "mcore"])
def test_pb019_every_step_reaches_the_next_forward(path: str) -> None:
    run_ranks(2, _never_stale, path)


# --- PB-020 -----------------------------------------------------------------------------------------------------------


def _by_load(target: Any, source: Any) -> None:
    target.load_state_dict(source.state_dict())


def _by_load_of_children(target: Any, source: Any) -> None:
    for layer, other in zip(target.layers, source.layers, strict=True):
        layer.load_state_dict(other.state_dict())
    target.load_state_dict({"scale": source.scale}, strict=False)


def _by_copy(target: Any, source: Any) -> None:
    with torch.no_grad():
        for parameter, other in zip(target.parameters(), source.parameters(), strict=True):
            parameter.copy_(other)


def _by_data(target: Any, source: Any) -> None:
    for parameter, other in zip(target.parameters(), source.parameters(), strict=True):
        parameter.data.copy_(other.data)


def _by_local_copy(target: Any, source: Any) -> None:
    with torch.no_grad():
        for parameter, other in zip(target.parameters(), source.parameters(), strict=True):
            parameter.to_local().copy_(other.to_local())


ROUTES: dict[str, Callable[[Any, Any], None]] = {
    "load_state_dict": _by_load,
    "load_state_dict_of_children": _by_load_of_children,
    "copy_": _by_copy,
    "data": _by_data,
    "to_local": _by_local_copy,
}


def _loaded(route: str, first: str) -> None:
    """`first` is what the fresh model has done before the load: weights kept for backward must be refreshed, too."""
    source, target = (
        shard_layers(build("mlp", seed=seed).bfloat16(), mixed_precision_policy=WIDE_GRADIENTS) for seed in (1, 2)
    )
    inputs, targets = make_batch(source, 4, seed=dist.get_rank())
    optimizer = fully_shard_optimizer(_adamw(source.parameters()))
    loss_of(source, inputs.bfloat16(), targets).backward()
    optimizer.step()  # main weights are no bfloat16 numbers any more
    if first == "forward":
        target(inputs.bfloat16())
    elif first == "backward":
        loss_of(target, inputs.bfloat16(), targets).backward()
        target.zero_grad()
    ROUTES[route](target, source)
    assert torch.equal(target(inputs.bfloat16()), source(inputs.bfloat16()))
    for parameter, other in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(parameter.to_local(), other.to_local())


@pytest.mark.parametrize("first", ["nothing", "forward", "backward"])
@pytest.mark.parametrize("route", ROUTES)
def test_pb020_every_load_reaches_the_next_forward(route: str, first: str) -> None:
    run_ranks(2, _loaded, route, first)


def _folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


def _distributed_checkpoint(direction: str) -> str:
    model = shard_layers(build("mlp"))
    before = [parameter.full_tensor() for parameter in model.parameters()]
    folder = _folder()
    with pytest.raises(dcp.api.CheckpointException) as raised:
        if direction == "save":
            dcp.save(model.state_dict(), checkpoint_id=folder)
        else:
            dcp.save({name: p.full_tensor() + 1 for name, p in model.named_parameters()}, checkpoint_id=folder)
            dcp.load(model.state_dict(), checkpoint_id=folder)
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))
    return str(raised.value)


@pytest.mark.parametrize("direction", ["save", "load"])
def test_pb020_distributed_checkpoints_are_refused(direction: str) -> None:
    for message in run_ranks(2, _distributed_checkpoint, direction):
        assert re.search(
            r"torch\.distributed\.checkpoint of the sharded tensor [\w.#]+: expected a full tensor", message
        )
        assert "Save full_tensor(), or torch.save a state_dict() on every rank." in message


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
        assert f"expected an element-wise optimizer such as AdamW or SGD, got {name}" in message


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "own"])
def test_pb033_plain_matrix_optimizers_raise_before_they_change_a_weight(name: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _matrix_rule, name, False):
        assert "of the sharded parameter" in message and "Call full_tensor() first" in message
