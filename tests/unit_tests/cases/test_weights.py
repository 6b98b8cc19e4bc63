# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Cases about weights: none that computes is stale, sizes are logical, none comes in after fully_shard."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.core.distributed.fsdp.experimental import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
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


def _distributed_checkpoint() -> None:
    """Weights that torch's own checkpoint has read in place are those of the next forward."""
    model, source = (shard_layers(build("mlp", seed=seed)) for seed in (0, 3))
    inputs = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
    folder = _folder()
    dcp.save(source.state_dict(), checkpoint_id=folder)
    assert not torch.equal(model(inputs), source(inputs))
    dcp.load(model.state_dict(), checkpoint_id=folder)
    assert torch.equal(model(inputs), source(inputs))


def test_pb020_distributed_checkpoints_reach_the_next_forward() -> None:
    run_ranks(2, _distributed_checkpoint)


# --- PB-120 -----------------------------------------------------------------------------------------------------------


def _logical_attributes() -> None:
    """What tools read off a model to size an adapter is what it was before fully_shard."""
    plain, model = build("tied"), shard_layers(build("tied"))
    for (name, module), other in zip(model.named_modules(), plain.modules(), strict=True):
        for attribute in ("in_features", "out_features", "num_embeddings", "embedding_dim", "normalized_shape"):
            assert getattr(module, attribute, None) == getattr(other, attribute, None), (name, attribute)
        assert isinstance(module, type(other))
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.shape == other.shape == parameter.size() and parameter.numel() == other.numel(), name
        assert parameter.shape[0] == other.shape[0] and len(parameter) == len(other) and parameter.dim() == other.dim()
        assert parameter.stride() == other.stride() and parameter.is_contiguous()
        assert parameter.device == other.device and parameter.dtype is other.dtype
        assert parameter.element_size() == other.element_size() and parameter.is_leaf and parameter.requires_grad
        assert not parameter.is_meta and not parameter.is_sparse and parameter.is_floating_point()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    narrow = shard_layers(build("mlp").bfloat16())
    assert {p.dtype for p in narrow.parameters()} == {torch.float32}  # the main weights
    assert narrow.layers[0].in_features == 7 and narrow.layers[0].out_features == 13


@pytest.mark.parametrize("world_size", [2, 3])
def test_pb120_sizes_device_and_dtype_are_logical(world_size: int) -> None:
    run_ranks(world_size, _logical_attributes)


def _parameter_added(where: str, has_run: bool) -> None:
    model = shard_layers(build("mlp"))
    x = torch.full((1, Mlp.in_features), dist.get_rank() + 1.0)
    if has_run:
        model(x)
    model.get_submodule(where).register_parameter("adapter", nn.Parameter(torch.ones(2)))
    model(x)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("where", ["", "layers.1"])
def test_pb120_parameter_added_after_wrap_is_refused(where: str, has_run: bool) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _parameter_added, where, has_run):
        # Units inside the root have their names from the first forward on.
        unit = (where or "FsdpMlp") if has_run or not where else "FsdpLinear"
        assert f"parameters of unit {unit}: expected" in message and "got adapter," in message
        assert "Add and replace parameters before fully_shard" in message


class _Adapter(nn.Module):
    """A low-rank pair beside a layer, as fine-tuning tools put it in the layer's place."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(13, 2, bias=False), nn.Linear(2, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def _add_child(model: Any) -> None:
    model.layers[1].adapter = nn.Linear(13, 11)
    model.layers[1].register_forward_hook(lambda module, args, output: output + module.adapter(args[0]))


def _put_adapter_around(model: Any) -> None:
    model.layers[1] = _Adapter(model.layers[1])


def _replace_layer(model: Any) -> None:
    model.layers[1] = nn.Linear(13, 11)


ADDITIONS: dict[str, Callable[[Any], None]] = {
    "child": _add_child,
    "around": _put_adapter_around,
    "replacement": _replace_layer,
}


def _module_added(how: str, in_one_unit: bool, has_run: bool) -> None:
    """Parameters that come in as modules would train on every rank's own gradients."""
    model = build("mlp")
    if not in_one_unit:
        for layer in model.layers:
            fully_shard(layer)
    fully_shard(model)
    x = torch.full((1, Mlp.in_features), dist.get_rank() + 1.0)
    if has_run:
        model(x).sum().backward()
    ADDITIONS[how](model)
    model(x).sum().backward()


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("in_one_unit", [False, True], ids=["units", "one_unit"])
@pytest.mark.parametrize("how", ADDITIONS)
def test_pb120_module_added_after_wrap_is_refused(how: str, in_one_unit: bool, has_run: bool) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _module_added, how, in_one_unit, has_run):
        is_named = has_run or in_one_unit or how != "child"
        assert ("layers.1" if is_named else "FsdpLinear") in message and "before fully_shard" in message
