# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Cases about how a sharded model looks: operations on parameters, many dims, tied weights, inspection."""

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

from megatron.core.distributed.fsdp.experimental import FsdpDTensor, fully_shard, fully_shard_optimizer
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import MODELS, build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest
from tests.unit_tests.trace import CollectiveLog

# --- PB-048 -----------------------------------------------------------------------------------------------------------

RIGHT: dict[str, Callable[[Any], Any]] = {
    "itself": lambda t: t,
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "clone_of_detached": lambda t: t.detach().clone(),
    "equality": lambda t: t == t.clone(),
    "inequality": lambda t: t != 2 * t,
    "sum": lambda t: t.sum(),
    "sum_of_clone": lambda t: t.detach().clone().sum(),
    "sum_in_float64": lambda t: t.sum(dtype=torch.float64),
    "norm": lambda t: t.norm(),
    "norm_of_order_1": lambda t: t.norm(1),
    "vector_norm_of_order_3": lambda t: torch.linalg.vector_norm(t, 3),
    "arithmetic_after_sum": lambda t: t.square().sum().sqrt() * 2,
    "divided_by_norm": lambda t: t / (1 + t.norm()),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "equal": lambda t: torch.equal(t, t),
    "equal_method": lambda t: t.equal(t.clone()),
    "allclose": lambda t: torch.allclose(t, t),
    "equality_with_full": lambda t: t == t.full_tensor().expand(2, *t.shape),
    "all": lambda t: (t == t).all(),
    "sum_of_rows": lambda t: t.sum(-1, keepdim=True),
    "norm_of_order_0": lambda t: t.norm(0),
    "mean": lambda t: t.mean(),
    "maximum": lambda t: t.max(),
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy(),
    "row": lambda t: t[0],
    "iteration": lambda t: list(t),
    "flatten": lambda t: t.reshape(1, -1),
    "parameters_to_vector": lambda t: nn.utils.parameters_to_vector([t]),
}


def _parameters(model_name: str) -> tuple[Any, list[tuple[str, Any, torch.Tensor]]]:
    """Return the model, which parameters do not keep alive, and every parameter with its whole value."""
    model, plain = shard_layers(build(model_name)), build(model_name)
    whole = dict(plain.named_parameters())
    return model, [(name, p, whole[name].detach()) for name, p in model.named_parameters()]


def _right(model_name: str) -> None:
    model, parameters = _parameters(model_name)
    for name, operation in RIGHT.items():
        for fqn, parameter, whole in parameters:
            with torch.no_grad():
                expected, result = operation(whole), operation(parameter)
                is_shared = isinstance(result, DTensor)
                redistributed = result.redistribute(placements=[Replicate()]).to_local() if is_shared else result
                for found in (result.full_tensor() if is_shared else result, redistributed):
                    where = f"{name} of {fqn}"
                    torch.testing.assert_close(
                        found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, where=where: f"{where}: {text}"
                    )
    assert_at_rest(model)


@pytest.mark.parametrize("model_name", MODELS)
def test_pb048_operations_that_are_right_for_every_parameter(model_name: str) -> None:
    run_ranks(3, _right, model_name)


def _refused(model_name: str) -> None:
    model, parameters = _parameters(model_name)
    for operation in REFUSED.values():
        for fqn, parameter, _ in parameters:
            with pytest.raises(RuntimeError, match=rf"of the sharded parameter .*{fqn.split('.')[-1]}: expected"):
                operation(parameter.detach())
    assert_at_rest(model)


@pytest.mark.parametrize("model_name", MODELS)
def test_pb048_operations_that_raise_for_every_parameter(model_name: str) -> None:
    run_ranks(3, _refused, model_name)


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t.item(),
    "float": float,
    "int": lambda t: float(int(1000 * t)) / 1000,
    "mean": lambda t: t.mean().item(),
    "comparison": lambda t: float(bool(t > 0)),
}


def _scalars(model_name: str) -> None:
    """A sum or norm read as a number is that of the whole parameter, or raises: never this rank's part (PB-037)."""
    _, parameters = _parameters(model_name)
    wrong = []
    for fqn, parameter, whole in parameters:
        for statistic in (torch.sum, torch.norm):
            for name, read in READS.items():
                expected = read(statistic(whole))
                try:
                    found = read(statistic(parameter.detach()))
                except RuntimeError as error:
                    assert fqn.split(".")[-1] in str(error), error
                    continue
                if found != pytest.approx(expected, rel=1e-5, abs=2e-3 if name == "int" else 1e-6):
                    wrong.append(f"{name} of {statistic.__name__} of {fqn}: {found} for {expected}")
    assert not wrong, wrong


@pytest.mark.parametrize("model_name", ["mlp", "one_element"])
def test_pb048_sums_and_norms_read_as_numbers(model_name: str) -> None:
    run_ranks(3, _scalars, model_name)


NAMED_REFUSALS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "float_of_one_element": ("one_element", float),
    "int_of_one_element": ("one_element", int),
    "transpose": ("mlp", lambda t: t.T if t.ndim == 2 else t.t()),
    "matrix_transpose": ("mlp", lambda t: t.mT if t.ndim == 2 else t.t()),
}


def _named_refusal(name: str) -> None:
    model_name, operation = NAMED_REFUSALS[name]
    _, parameters = _parameters(model_name)
    for fqn, parameter, _ in parameters:
        with pytest.raises(RuntimeError, match=rf"of the sharded parameter .*{fqn.split('.')[-1]}: expected"):
            operation(parameter.detach())


@pytest.mark.parametrize("name", NAMED_REFUSALS)
def test_pb048_attributes_and_casts_name_the_parameter(name: str) -> None:
    run_ranks(3, _named_refusal, name)


# --- PB-050 -----------------------------------------------------------------------------------------------------------


class _FiveDims(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, 2, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv3d(x, self.weight, stride=2)


DIMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(3, 5, 3), (2, 3, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 5, (3, 2)), (2, 3, 5, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 7, 2), (2, 2, 3, 4, 3)),
    "grouped_conv2d": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 5, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 4, 4)),
    "five_dims": (_FiveDims, (2, 3, 4, 4, 4)),
}


def _many_dims(name: str) -> None:
    make, shape = DIMS[name]
    torch.manual_seed(3)
    plain = make()
    model = fully_shard(copy.deepcopy(plain))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = 0
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        local = parameter.to_local()
        assert parameter.shape == whole.shape and parameter.stride() == whole.stride()
        owned = parameter.geometry.layout.owned(parameter.geometry.index, rank)
        assert torch.equal(local.reshape(-1), whole.detach().reshape(-1)[owned.start : owned.stop])
        if local.ndim > 1 or whole.ndim == 1:  # whole rows: trailing dims are kept
            assert local.shape[1:] == whole.shape[1:] and local.is_contiguous()
            rows += local.shape[0]
        else:
            assert local.ndim == 1
    batches = torch.randn(world_size, *shape, generator=torch.Generator().manual_seed(1))
    out = model(batches[rank])
    assert torch.equal(out, plain(batches[rank]))
    out.square().sum().backward()
    for batch in batches:
        (plain(batch).square().sum() / world_size).backward()
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad.shape == whole.shape and parameter.grad.to_local().shape == parameter.to_local().shape
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-5)
    _save_and_load(model, make, weights_only=False)


def _save_and_load(model: Any, make: Callable[[], nn.Module], **options: Any) -> None:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, **options)
    torch.manual_seed(4)
    fresh = fully_shard(make())
    for name, parameter in fresh.named_parameters():
        assert not torch.equal(parameter.full_tensor(), model.get_parameter(name).full_tensor())
        assert isinstance(loaded[name], FsdpDTensor) and loaded[name].shape == parameter.shape
        assert loaded[name].stride() == parameter.stride()
        assert loaded[name].to_local().shape == parameter.to_local().shape
    fresh.load_state_dict(loaded)
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter.full_tensor(), model.get_parameter(name).full_tensor())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", DIMS)
def test_pb050_more_than_two_dims(name: str, world_size: int) -> None:
    run_ranks(world_size, _many_dims, name)


def _default_load(name: str) -> None:
    torch.manual_seed(3)
    _save_and_load(fully_shard(DIMS[name][0]()), DIMS[name][0])


@pytest.mark.parametrize("name", ["conv2d", "five_dims"])
def test_pb050_saved_state_loads_with_torchs_defaults(name: str) -> None:
    run_ranks(2, _default_load, name)


# --- PB-056 -----------------------------------------------------------------------------------------------------------


class _Tied(nn.Module):
    """One weight under several names: in the root itself, in a child and in a grandchild."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6)))
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.names = self.used = names
        self.seen: list[set[int]] = []
        source = self.get_parameter(names[0])
        for name in names[1:]:
            path, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(path), attribute, source)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(_ids(self))
        if "first.weight" in self.used:
            x = self.first(x).tanh()
        if "inner.0.weight" in self.used:
            x = self.inner[0](x).tanh()
        if "inner.2.0.weight" in self.used:
            x = self.inner[2](x).tanh()
        return x @ self.weight if "weight" in self.used else x


def _ids(model: _Tied) -> set[int]:
    return {id(model.get_parameter(name)) for name in model.names}


TIES = {
    "siblings": ("first.weight", "inner.0.weight"),
    "parent_and_child": ("weight", "first.weight"),
    "child_and_grandchild": ("inner.0.weight", "inner.2.0.weight"),
    "three_ways": ("weight", "first.weight", "inner.0.weight"),
    "four_ways": ("first.weight", "inner.0.weight", "inner.2.0.weight", "weight"),
}


def _tied(names: tuple[str, ...], used: tuple[str, ...]) -> None:
    """The gradient sums the uses, one reduction carries it, and all names switch together."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain = _Tied(names), _Tied(names)
    model.used = plain.used = used
    fully_shard(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    ours = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    assert len(ours.param_groups[0]["params"]) == 8 - len(names)  # seven without ties
    resting = _ids(model)
    for step in range(10):
        batches = torch.randn(world_size, 4, 6, generator=torch.Generator().manual_seed(step))
        ours.zero_grad()
        theirs.zero_grad()
        with CollectiveLog() as log:
            model(batches[rank]).square().mean().backward()
        assert [entry[0] for entry in log.entries].count("reduce_scatter") == 1
        assert_at_rest(model)
        for batch in batches:
            (plain(batch).square().mean() / world_size).backward()
        for name, parameter in plain.named_parameters():
            gradient = model.get_parameter(name).grad.full_tensor()
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
        ours.step()
        theirs.step()
        assert _ids(model) == resting
    assert len(resting) == 1 and all(len(ids) == 1 and ids != resting for ids in model.seen)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), weight)


USED: dict[str, Callable[[tuple[str, ...]], tuple[str, ...]]] = {
    "all": lambda names: names,
    "first": lambda names: names[:1],
    "last": lambda names: names[-1:],
}


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("tie", TIES)
def test_pb056_ties_inside_one_unit(tie: str, used: str) -> None:
    run_ranks(2, _tied, TIES[tie], USED[used](TIES[tie]))


# --- PB-082 -----------------------------------------------------------------------------------------------------------


def _inspect(model: Any, optimizer: Any) -> None:
    assert repr(model) and str(model) and len(list(model.modules())) > 3
    assert list(model.named_parameters()) and list(model.named_buffers()) == [] and model.state_dict()
    assert optimizer.state_dict()["state"] and repr(optimizer)
    for parameter in model.parameters():
        assert repr(parameter) and parameter.shape and parameter.numel() and parameter.device.type == "cpu"
        assert parameter.to_local() is not None and parameter.detach().clone() is not None
        assert repr(parameter.grad) and parameter.grad.shape == parameter.shape
        assert parameter.grad.to_local().shape == parameter.to_local().shape
        assert bool((parameter.grad.to_local() == parameter.grad.to_local()).all())


def _rank_zero_looks() -> None:
    """Rank 0 alone looks at a model in training, between its steps; a collective there would hang or be logged."""
    model = shard_layers(build("mlp"))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(3):
        inputs, targets = make_batch(model, 4, seed=10 * step + dist.get_rank())
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            with CollectiveLog() as log:
                _inspect(model, optimizer)
            assert log.entries == []
        assert_at_rest(model)
    with CollectiveLog() as log:
        full = [parameter.full_tensor() for parameter in model.parameters()]
    assert len(full) == 7 and [entry[0] for entry in log.entries] == ["all_gather"] * 7  # what is documented to gather


def test_pb082_rank_zero_alone_may_look_at_a_model_in_training() -> None:
    run_ranks(2, _rank_zero_looks, timeout_s=30)
