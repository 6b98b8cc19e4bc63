# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A sharded parameter, and whatever is derived from it, is right or raises: never quietly wrong (PB-048)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron.core.distributed.fsdp.experimental import (
    FsdpDTensor,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    gather_full,
    grad_norm,
)
from tests.unit_tests.launch import DEVICE, run_ranks
from tests.unit_tests.oracle import assert_same_on_all_ranks
from tests.unit_tests.trace import CollectiveLog

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

# A row-aligned matrix, one that is cut inside rows, a vector, five dims (PB-050), fewer rows than ranks.
SHAPES = {"rows": (6, 16), "cut": (5, 3), "vector": (7,), "five_dims": (5, 3, 2, 2, 2), "one_row": (1, 17)}


class _Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self) -> torch.Tensor:
        return sum(parameter.square().sum() for parameter in self.parameters())  # type: ignore[return-value]


def _sharded() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model = _Holder()
    originals = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model)
    # The module is kept alive through the parameters' closure below.
    _sharded.model = model  # type: ignore[attr-defined]
    return dict(model.named_parameters()), originals


def _logical_attributes() -> None:
    parameters, originals = _sharded()
    for name, parameter in parameters.items():
        assert isinstance(parameter, FsdpDTensor) and isinstance(parameter, nn.Parameter)
        assert parameter.shape == originals[name].shape and parameter.stride() == originals[name].stride()
        assert parameter.ndim == originals[name].ndim and parameter.numel() == originals[name].numel()
        assert parameter.dtype is torch.float32 and parameter.device.type == DEVICE and parameter.requires_grad
        assert repr(parameter)


@pytest.mark.parametrize("world_size", [1, 3])
def test_pb120_shapes_are_logical(world_size: int) -> None:
    run_ranks(world_size, _logical_attributes)


DERIVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "clone": lambda t: t.clone(),
    "double": lambda t: t * 2,
    "reflected": lambda t: 1 - t,
    "plus_itself": lambda t: t + t,
    "zeros_like": torch.zeros_like,
    "half": lambda t: t.to(torch.bfloat16),
    "chain": lambda t: (t.detach().abs() + 1).sqrt().neg(),
    "comparison": lambda t: t > 0,
    "foreach": lambda t: torch._foreach_mul([t, t], 3.0)[1],
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "where": lambda t: torch.where(t > 0, t, t * 0.5),
}


def _derived(name: str) -> None:
    parameters, originals = _sharded()
    with torch.no_grad():
        for key, parameter in parameters.items():
            result = DERIVED[name](parameter)
            assert isinstance(result, FsdpDTensor), type(result)
            assert torch.equal(result.full_tensor(), DERIVED[name](originals[key])), key
            replicated = result.redistribute(placements=[Replicate()])
            assert torch.equal(replicated.to_local(), DERIVED[name](originals[key])), key
            assert torch.equal(gather_full(result, parameter), DERIVED[name](originals[key]))


@pytest.mark.parametrize("name", DERIVED)
def test_derived_tensors_keep_the_cut(name: str) -> None:
    run_ranks(3, _derived, name)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda t: t.flatten(1).t(),
    "row": lambda t: t[0],
    "view": lambda t: t.view(-1),
    "matmul": lambda t: t.flatten(1) @ t.flatten(1).t(),
    "softmax": lambda t: torch.softmax(t, dim=0),
    "softmax_of_rows": lambda t: torch.softmax(t, dim=-1),
    "cumsum": lambda t: t.cumsum(-1),
    "sum_of_rows": lambda t: t.sum(dim=-1),
    "sum_of_columns": lambda t: t.sum(dim=0),
    "flip": lambda t: t.flip(0),
    "sort": lambda t: t.sort(dim=0),
    "mean": lambda t: t.mean(),
    "cat": lambda t: torch.cat([t, t]),
    "plain_operand": lambda t: t * torch.ones(t.shape),
    "random_fill": lambda t: nn.init.normal_(t),
    "other_placement": lambda t: t.redistribute(placements=[Shard(1)]),
    "gradient_placements": lambda t: t.full_tensor(grad_placements=[Replicate()]),
    "canonical_operand": lambda t: t + _canonical(t),
    "replicated_operand": lambda t: t + t.redistribute(placements=[Replicate()]),
    "foreach_operand": lambda t: torch._foreach_add([t], [_canonical(t)]),
    "square_transpose": lambda t: t.mT,
    "deepcopy": lambda t: copy.deepcopy(t),
    "equal": lambda t: torch.equal(t, t),
    "largest": lambda t: t.amax(),
    "any": lambda t: (t > 0).any(),
    "nonzero": lambda t: torch.count_nonzero(t),
    "maximum_norm": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "keyword_operand": lambda t: torch.add(t, other=torch.ones(t.shape)),
    "hook": lambda t: t.register_hook(lambda grad: None),
    "sum_with_gradient": lambda t: torch.enable_grad()(lambda: t.sum())(),
}


def _canonical(tensor: Any) -> DTensor:
    """A DTensor of equal shape and local size whose rows are cut as torch cuts them."""
    return DTensor.from_local(
        torch.zeros_like(tensor._local_tensor), tensor.device_mesh, [Shard(0)], run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def _refused(name: str) -> None:
    parameters, _ = _sharded()
    for key in ("rows", "cut"):
        try:
            with torch.no_grad():
                REFUSED[name](parameters[key])
        except (RuntimeError, NotImplementedError, IndexError) as error:
            assert str(error)
        else:
            raise AssertionError(f"{name} of {key} went through")


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_would_get_wrong_raises(name: str) -> None:
    run_ranks(3, _refused, name)


def _message() -> None:
    parameters, _ = _sharded()
    with pytest.raises(RuntimeError, match=r"softmax of the sharded parameter .*cut.*Call full_tensor\(\) first"):
        torch.softmax(parameters["cut"], dim=0)
    with pytest.raises(RuntimeError, match=r"add of the sharded parameter .*cut: expected operands of its shape"):
        parameters["cut"] + _canonical(parameters["cut"])
    with pytest.raises(ValueError, match=r"gather_full: expected a tensor cut like .*rows"):
        gather_full(parameters["cut"], parameters["rows"])
    with pytest.raises(NotImplementedError, match=r"redistribute of .*cut: expected its own placements or Replicate"):
        parameters["cut"].redistribute(placements=[Shard(1)])
    assert parameters["cut"].redistribute(placements=[Shard(0)]) is parameters["cut"]


def test_messages_name_parameter_and_cure() -> None:
    run_ranks(2, _message)


def _reductions() -> None:
    parameters, originals = _sharded()
    for name, parameter in parameters.items():
        total = parameter.detach().sum()
        torch.testing.assert_close(total.full_tensor(), originals[name].sum())
        torch.testing.assert_close(parameter.detach().norm().full_tensor(), originals[name].norm())
        parameter.grad = parameter.detach() * 2
    torch.testing.assert_close(
        torch.nn.utils.get_total_norm([p.grad for p in parameters.values()]),
        torch.nn.utils.get_total_norm([2 * p for p in originals.values()]),
    )
    torch.testing.assert_close(
        grad_norm(list(parameters.values())), torch.nn.utils.get_total_norm([2 * p for p in originals.values()])
    )


def test_reductions_to_scalars() -> None:
    run_ranks(3, _reductions)


WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda p: p.copy_(torch.full_like(p, 0.25)),
    "fill_": lambda p: p.fill_(0.25),
    "data": lambda p: p.data.fill_(0.25),
    "detach": lambda p: p.detach().fill_(0.25),
    "to_local": lambda p: p.to_local().fill_(0.25),
    "out": lambda p: torch.add(torch.zeros_like(p), 0.25, out=p),
    "augmented": lambda p: p.__imul__(0.0).__iadd__(0.25),
    "foreach": lambda p: (torch._foreach_mul_([p], 0.0), torch._foreach_add_([p], 0.25)),
    "init": lambda p: nn.init.constant_(p, 0.25),
}


def _write_is_seen(name: str) -> None:
    """PB-019, PB-020: whatever writes a main weight in place, the next forward computes with it."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).bfloat16()
    fully_shard(model, mixed_precision_policy=MixedPrecisionPolicy(torch.float32))
    x = torch.ones(2, 5, dtype=torch.bfloat16)
    for _ in range(2):
        with torch.no_grad():
            model(x)
            WRITES[name](model.weight)
            assert torch.equal(model(x), torch.full((2, 3), 1.25, dtype=torch.bfloat16))
            model.weight.zero_()
            assert not model(x).any()


@pytest.mark.parametrize("name", WRITES)
def test_in_place_writes_reach_the_next_forward(name: str) -> None:
    run_ranks(2, _write_is_seen, name)


def _pickled() -> None:
    parameters, originals = _sharded()
    for name, parameter in parameters.items():
        buffer = io.BytesIO()
        torch.save(parameter.detach(), buffer)
        buffer.seek(0)
        for copied in (pickle.loads(pickle.dumps(parameter)), torch.load(buffer, weights_only=False)):
            assert isinstance(copied, FsdpDTensor) and torch.equal(copied.full_tensor(), originals[name])
            assert copied._local_tensor.untyped_storage().nbytes() == 4 * copied._local_tensor.numel()


def test_pickled_tensors_keep_the_cut() -> None:
    run_ranks(2, _pickled)


def _rank_zero_alone() -> None:
    """PB-082: looking at a sharded model on one rank communicates nothing."""
    model = _Holder()
    fully_shard(model)
    if dist.get_rank() == 0:
        assert repr(model) and model.state_dict() and list(model.named_parameters())
        for parameter in model.parameters():
            assert parameter.shape and parameter.to_local() is not None and parameter.grad is None and repr(parameter)


def test_pb082_inspection_is_free_of_collectives() -> None:
    run_ranks(2, _rank_zero_alone)


def _read_on_one_rank(strategy: str, dtype: torch.dtype) -> None:
    """PB-082: nor does it make this rank communicate later, where weights are kept or refreshed from shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).to(DEVICE, dtype)
    fully_shard(model, placements=Placements.from_strategy(strategy))
    with CollectiveLog() as log:
        for _ in range(2):
            loss = model(torch.ones(2, 5, dtype=dtype)).sum()
            if dist.get_rank() == 0:
                assert all(bool(parameter.to_local().isfinite().all()) for parameter in model.parameters())
            loss.backward()
    assert_same_on_all_ranks(log.entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pb082_a_local_read_on_one_rank_changes_nothing(strategy: str, dtype: torch.dtype) -> None:
    run_ranks(2, _read_on_one_rank, strategy, dtype)


LOCAL_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "to_local": lambda model, value: model.weight.to_local().fill_(value),
    "detach": lambda model, value: model.weight.detach().to_local().fill_(value),
    "state_dict": lambda model, value: model.state_dict()["weight"].to_local().fill_(value),
    "view": lambda model, value: model.weight.to_local()[:].fill_(value),
    "said": lambda model, value: (model.weight.to_local().data.fill_(value), model.weight.add_(0)),
}


def _local_write(name: str, strategy: str) -> None:
    """PB-020: writes through local tensors reach compute weights that only communication refreshes, too."""
    model = nn.Linear(5, 3, bias=False).bfloat16()
    fully_shard(model, placements=Placements.from_strategy(strategy))
    x = torch.ones(2, 5, dtype=torch.bfloat16)
    with torch.no_grad():
        for value in (0.25, 0.5):
            LOCAL_WRITES[name](model, value)
            for _ in range(2):
                assert torch.equal(model(x), torch.full((2, 3), 5 * value, dtype=torch.bfloat16))
        copy_of_weights: Any = model.weight.detach().clone()
        with CollectiveLog() as log:
            if dist.get_rank() == 0:
                copy_of_weights.to_local().zero_()
            model(x)
        assert_same_on_all_ranks(log.entries)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOCAL_WRITES)
def test_local_writes_reach_the_next_forward(name: str, strategy: str) -> None:
    run_ranks(2, _local_write, name, strategy)
