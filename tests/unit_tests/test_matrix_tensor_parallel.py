# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Matrices that tensor parallelism has cut: as a whole, bit by bit as without it, or piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    STRATEGIES,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_muon,
)
from megatron.core.distributed.fsdp.experimental.model_cut import ModelCut
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks, run_ranks_expecting
from tests.unit_tests.matrix_oracle import PlainMuon, Split, step_plainly

TP, NUM_STEPS = 2, 10
GROUPS, GROUP = 4, (4, 2, 1)
"""Of queries, keys and values: rows of each group."""

SHAPES = {"rows": (10, 9), "columns": (9, 14), "gate_up": (20, 9), "qkv": (28, 9), "whole": (7, 9)}
CUTS = {"rows": (0, 1), "columns": (1, 1), "gate_up": (0, 2), "qkv": (0, 1)}
"""Dim and stride of those that tensor parallelism cuts."""

JOINED_PARTS = {"gate_up": (10, 10), "qkv": GROUP}
PIECE_PARTS = {"gate_up": (5, 5), "qkv": GROUP}
"""Rows of fused matrices, in a parameter or in its piece."""


class _Weights(nn.Module):
    """The weights, or this rank's pieces of them; a forward that gives them gradients."""

    def __init__(self, cuts: dict[str, ModelCut]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            full = torch.randn(shape, generator=generator)
            parameter: Any = nn.Parameter(cuts[name].take(full) if name in cuts else full)
            if name in cuts:
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = cuts[name].dim, cuts[name].stride
            self.register_parameter(name, parameter)

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((gradients[name] * p).sum() for name, p in self.named_parameters())  # type: ignore[return-value]


def _gradients(step: int, dp_rank: int, dp_size: int) -> dict[str, torch.Tensor]:
    """Multiples of 2**-8 times the number of ranks, whose averages are exact."""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    return {
        name: torch.randint(-256, 256, shape, generator=generator) * dp_size / 256 for name, shape in SHAPES.items()
    }


def _cuts(rank: int) -> dict[str, ModelCut]:
    return {name: ModelCut(1, dim, stride, TP, rank) for name, (dim, stride) in CUTS.items()}


def _take(full: dict[str, torch.Tensor], cuts: dict[str, ModelCut]) -> dict[str, torch.Tensor]:
    return {name: cuts[name].take(value) if name in cuts else value for name, value in full.items()}


def _qkv(full: torch.Tensor) -> list[torch.Tensor]:
    return list(full.view(1, -1, sum(GROUP), 9).split(list(GROUP), dim=2))


def _reference(dp_size: int, cuts: dict[str, ModelCut], has_parts: bool) -> dict[str, torch.Tensor]:
    """Train whole weights, or with `cuts` pieces as if each were a matrix; in one process."""
    model: Any = _Weights(cuts)
    momenta: dict[Any, torch.Tensor] = {}
    split: dict[Any, Split] = {model.gate_up: lambda full: list(full.chunk(2)), model.qkv: _qkv} if has_parts else {}
    for step in range(NUM_STEPS):
        every = [_take(_gradients(step, rank, dp_size), cuts) for rank in range(dp_size)]
        for name, parameter in model.named_parameters():
            parameter.grad = sum(gradients[name] for gradients in every) / dp_size
        step_plainly(model.parameters(), momenta, PlainMuon(), split)
    return {name: p.detach() for name, p in model.named_parameters()}


def _model(strategy: str, mesh: Any, cuts: dict[str, ModelCut]) -> Any:
    with fully_shard_context(DEVICE):
        return fully_shard(_Weights(cuts), mesh, Placements.from_strategy(strategy, dp_axes=("dp",)))


def _train(strategy: str, joins_pieces: bool, has_parts: bool, dp_size: int) -> tuple[dict[str, torch.Tensor], Any]:
    mesh = lasting_mesh((dp_size, TP), ("dp", "tp"))
    dp_rank, cuts = mesh.get_local_rank("dp"), _cuts(mesh.get_local_rank("tp"))
    model = _model(strategy, mesh, cuts)
    parts = (JOINED_PARTS if joins_pieces else PIECE_PARTS) if has_parts else {}
    optimizer = fully_shard_muon(
        model, 0.01, report=None, parts=parts, joins_pieces=joins_pieces, package_bytes=500, weight_decay=0.1
    )
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(_take(_gradients(step, dp_rank, dp_size), cuts)).backward()
        optimizer.step()
    return {name: p.full_tensor() for name, p in model.named_parameters()}, optimizer


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: Any) -> None:
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, (what, different)


def _joined() -> None:
    dp_size = dist.get_world_size() // TP
    for has_parts in (True, False):
        expected = _reference(dp_size, {}, has_parts)
        for strategy in STRATEGIES:
            found, optimizer = _train(strategy, True, has_parts, dp_size)
            _assert_equal(found, expected, (strategy, has_parts))
            cut, whole = sorted(optimizer.works, key=lambda work: -work.plan.num_pieces)
            assert (cut.plan.num_pieces, whole.plan.num_pieces) == (TP, 1)
            # Owners are all ranks of both axes, though no more than there are matrices.
            assert len(set(cut.plan.owners)) >= min(dist.get_world_size(), 3)


def _one_by_one() -> None:
    dp_size = dist.get_world_size() // TP
    for has_parts in (True, False):
        pieces = [_reference(dp_size, _cuts(rank), has_parts) for rank in range(TP)]
        cuts = _cuts(0)
        expected = {
            name: cuts[name].join([piece[name] for piece in pieces]) if name in cuts else pieces[0][name]
            for name in SHAPES
        }
        for strategy in STRATEGIES:
            found, optimizer = _train(strategy, False, has_parts, dp_size)
            _assert_equal(found, expected, (strategy, has_parts))
            assert {work.plan.num_pieces for work in optimizer.works} == {1}
        whole = _reference(dp_size, {}, has_parts)
        assert not any(torch.allclose(expected[name], whole[name], atol=1e-4) for name in CUTS)


@pytest.mark.parametrize("world_size", [2, 4])
def test_joined_pieces_are_stepped_as_without_tensor_parallelism(world_size: int) -> None:
    run_ranks(world_size, _joined)


@pytest.mark.parametrize("world_size", [2, 4])
def test_pieces_are_stepped_one_by_one(world_size: int) -> None:
    run_ranks(world_size, _one_by_one)


def _stack() -> None:
    mesh = lasting_mesh((1, TP), ("dp", "tp"))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parameter: Any = nn.Parameter(torch.randn(3, 4, 6))
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 1, 1
            self.experts = parameter

    with fully_shard_context(DEVICE):
        model = fully_shard(Experts(), mesh, Placements.from_strategy("optim", dp_axes=("dp",)))
    fully_shard_muon(model, report=None, joins_pieces=True)


def test_stacks_of_pieces_are_not_joined() -> None:
    for message in run_ranks_expecting(2, ValueError, _stack):
        assert message == (
            "joins_pieces of experts: expected 2-D parameters, got shape (3, 4, 6). Set joins_pieces=False there."
        )
