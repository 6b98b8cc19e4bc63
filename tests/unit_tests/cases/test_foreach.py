# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""PB-102: foreach, fused and per-tensor optimizers over sharded parameters, on one mesh and on two."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import clip_grad_norm_, fully_shard, fully_shard_optimizer
from tests.unit_tests.cases.compare import assert_close
from tests.unit_tests.launch import run_ranks, run_ranks_expecting

WAYS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "per_tensor": {"foreach": False},
    "fused": {"fused": True},
}


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6, bias=False))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.roll(1, dims=1)).square().mean()


def _batches(step: int) -> torch.Tensor:
    return torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(step))


def _reference_backward(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    model.zero_grad()
    for batch in batches:
        (_loss(model, batch) / len(batches)).backward()


def _assert_same(model: nn.Module, reference: nn.Module, what: str) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        any_tensor: Any = ours
        assert_close(any_tensor.full_tensor(), theirs.detach(), f"{what} {name}")


def _one_mesh(way: str, adapts: bool) -> None:
    reference = _build()
    model = copy.deepcopy(reference)
    fully_shard(model[0])
    fully_shard(model)
    ours: Any = torch.optim.AdamW(model.parameters(), lr=0.01, **WAYS[way])
    if adapts:
        fully_shard_optimizer(ours)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(10):
        batches = _batches(step)
        _reference_backward(reference, list(batches))
        ours.zero_grad()
        _loss(model, batches[dist.get_rank()]).backward()
        ours.step()
        theirs.step()
        _assert_same(model, reference, f"step {step}")


@pytest.mark.parametrize("adapts", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("way", WAYS)
def test_pb102_every_way_to_step_sharded_parameters(way: str, adapts: bool) -> None:
    run_ranks(4, _one_mesh, way, adapts)


def _two_meshes(adapts: bool) -> None:
    """A dense model over four ranks and an expert over pairs of them, in one optimizer and one gradient norm."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "dp"))
    # Both pairs train the same expert on the same two batches, so that all ranks agree on the norm.
    mine = rank % 2
    references = [_build(), _build()]
    dense, expert = fully_shard(_build()), fully_shard(_build(), mesh["dp"])
    for options in WAYS.values():
        parameters = [*dense.parameters(), *expert.parameters()]
        plain = [p for reference in references for p in reference.parameters()]
        ours: Any = torch.optim.AdamW(parameters, lr=0.01, **options)
        if adapts:
            fully_shard_optimizer(ours)
        theirs = torch.optim.AdamW(plain, lr=0.01)
        for step in range(5):
            batches = _batches(step)
            _reference_backward(references[0], list(batches))
            _reference_backward(references[1], list(batches[:2]))
            ours.zero_grad()
            (_loss(dense, batches[rank]) + _loss(expert, batches[mine])).backward()
            norm = clip_grad_norm_(parameters, 0.1)
            assert_close(norm, nn.utils.clip_grad_norm_(plain, 0.1), "norm")
            ours.step()
            theirs.step()
            _assert_same(dense, references[0], f"dense {options} step {step}")
            _assert_same(expert, references[1], f"expert {options} step {step}")


@pytest.mark.parametrize("adapts", [False, True], ids=["plain", "adapted"])
def test_pb102_two_meshes_in_one_optimizer(adapts: bool) -> None:
    run_ranks(4, _two_meshes, adapts)


def _foreign(how: str) -> None:
    model = fully_shard(_build())
    bias = nn.Parameter(torch.zeros(3))
    if how == "built":
        fully_shard_optimizer(torch.optim.AdamW([*model.parameters(), bias]))
    else:
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        optimizer.add_param_group({"params": [bias]})


@pytest.mark.parametrize(("how", "where"), [("built", "parameter 3 of param_groups[0]"), ("added", "param_groups[1]")])
def test_pb102_plain_parameters_in_an_adapted_optimizer_are_refused(how: str, where: str) -> None:
    for message in run_ranks_expecting(2, ValueError, _foreign, how):
        assert where in message and "which belongs to no unit" in message
        assert "give it an optimizer of its own" in message


def _plain_per_tensor() -> None:
    """Tensor by tensor, torch itself takes sharded and plain parameters in one group."""
    reference, plain = _build(), nn.Parameter(torch.ones(6))
    model, bias = fully_shard(copy.deepcopy(reference)), nn.Parameter(torch.ones(6))
    ours = torch.optim.AdamW([*model.parameters(), bias], lr=0.01, foreach=False)
    theirs = torch.optim.AdamW([*reference.parameters(), plain], lr=0.01, foreach=False)
    for step in range(3):
        batches = _batches(step)
        _reference_backward(reference, list(batches))
        _loss(model, batches[dist.get_rank()]).backward()
        bias.grad = plain.grad = torch.full((6,), float(step))
        ours.step()
        theirs.step()
        ours.zero_grad()
        _assert_same(model, reference, f"step {step}")
    assert torch.equal(bias, plain)


def test_pb102_plain_and_sharded_parameters_tensor_by_tensor() -> None:
    run_ranks(2, _plain_per_tensor)
