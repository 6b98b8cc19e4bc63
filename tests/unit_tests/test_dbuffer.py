# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A buffer holds the elements that its layout and placements say, and redistributes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate

from megatron.core.distributed.fsdp.experimental import DBuffer, Flat, collectives
from megatron.core.distributed.fsdp.experimental.allocator import ResizingAllocator
from megatron.core.distributed.fsdp.experimental.layout import GroupLayout, plan_layout
from megatron.core.distributed.fsdp.experimental.shard_mesh import ShardMesh
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting

SHAPES = [(5, 3), (4,), (2, 3, 2), (1, 7)]
HERE = torch.device(DEVICE)


def _tensors(rank: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _buffer(placement: Any, *, dtype: torch.dtype = torch.float32, transient: bool = False) -> DBuffer:
    mesh = ShardMesh(init_device_mesh(DEVICE, (dist.get_world_size(),)))
    layout = plan_layout(SHAPES, dist.get_world_size())
    return _make(layout, mesh, [placement], dtype=dtype, is_transient=transient)


def _make(layout: GroupLayout, mesh: ShardMesh, placements: Any, **options: Any) -> DBuffer:
    settings = {"dtype": torch.float32, "device": HERE, "name": "test", "allocator": ResizingAllocator()}
    return DBuffer(layout, mesh, placements, **{**settings, **options})


def _gather_round_trip() -> None:
    mesh = ShardMesh(init_device_mesh(DEVICE, (dist.get_world_size(),)))
    layout = plan_layout(SHAPES, dist.get_world_size())
    shards = _make(layout, mesh, [Flat()], name="shards")
    for index, tensor in enumerate(_tensors()):
        shards.distribute(index, tensor)
    full = _buffer(Replicate(), transient=True)
    assert not full.has_storage
    pieces = full.pieces
    for _ in range(2):
        full.allocate()
        full.local.fill_(torch.nan)
        shards.redistribute(full)
        for piece, expected in zip(pieces, _tensors(), strict=True):
            assert torch.equal(piece, expected), "views made once see the refilled storage"
        back = _buffer(Flat())
        full.redistribute(back)
        for piece, expected in zip(back.pieces, shards.pieces, strict=True):
            assert torch.equal(piece, expected)
        full.release()
        assert not full.has_storage and full.local.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gather_and_slice(world_size: int) -> None:
    run_ranks(world_size, _gather_round_trip)


def _reduce(reduce_op: str, dtype: torch.dtype) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    partial = _buffer(Partial(reduce_op), dtype=dtype)
    for piece, tensor in zip(partial.pieces, _tensors(rank), strict=True):
        piece.copy_(tensor)
    everyone = [_tensors(other) for other in range(world_size)]
    scale = world_size if reduce_op == "avg" else 1
    expected = [sum(part.to(dtype).double() for part in parts) / scale for parts in zip(*everyone, strict=True)]
    copy = _buffer(Partial(reduce_op), dtype=dtype)
    copy.copy_from(partial)
    full = _buffer(Replicate(), dtype=dtype)
    copy.redistribute(full)
    shards = _buffer(Flat(), dtype=dtype)
    partial.redistribute(shards)
    close = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    for index, tensor in enumerate(expected):
        torch.testing.assert_close(full.pieces[index].double(), tensor, **close)
        owned = shards.owned(index)
        flat = tensor.reshape(-1)[owned.start : owned.stop]
        torch.testing.assert_close(shards.pieces[index].reshape(-1).double(), flat, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce_op", ["avg", "sum"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pb001_gloo_avg_is_mean(world_size: int, reduce_op: str, dtype: torch.dtype) -> None:
    run_ranks(world_size, _reduce, reduce_op, dtype)


def _subgroup_average() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        value = torch.full((4,), float(dist.get_rank()))
        collectives.all_reduce(value, "avg", group, what="value")
        assert torch.equal(value, torch.ones(4))


def test_pb001_average_in_a_subgroup() -> None:
    run_ranks(3, _subgroup_average)


def _size_one_reduction_does_not_alias() -> None:
    """PB-002: on one rank, reducing twice into an accumulator gives twice the value, not a growing one."""
    partial, shards, total = _buffer(Partial("avg")), _buffer(Flat()), _buffer(Flat())
    for _ in range(4):
        partial.local.fill_(1.0)
        partial.redistribute(shards)
        total.local.add_(shards.local)
    assert torch.equal(total.local, torch.full_like(total.local, 4.0))


def test_pb002_size_one_group() -> None:
    run_ranks(1, _size_one_reduction_does_not_alias)


def _uneven(numels: list[int]) -> None:
    rank = dist.get_rank()
    parts = collectives.all_gather_uneven(
        torch.full((numels[rank],), float(rank)), numels, [dist.group.WORLD], what="parts"
    )
    assert [part.tolist() for part in parts] == [[float(r)] * n for r, n in enumerate(numels)]


@pytest.mark.parametrize("numels", [[3, 0, 1], [0, 0, 0], [0, 0, 5]])
def test_uneven_gather(numels: list[int]) -> None:
    run_ranks(3, _uneven, numels)


def _mismatched_dtype() -> None:
    _buffer(Flat()).redistribute(_buffer(Replicate(), dtype=torch.bfloat16))


def _wrong_placements() -> None:
    mesh = ShardMesh(init_device_mesh(DEVICE, (dist.get_world_size(),)))
    _make(plan_layout(SHAPES, 7), mesh, [Flat()], name="bad")


def _bad_reduction() -> None:
    _buffer(Partial("max")).redistribute(_buffer(Flat()))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_mismatched_dtype, "expected equal dtypes"),
        (_wrong_placements, "buffer bad: expected one placement for each of 1 mesh axes and 2 shards"),
        (_bad_reduction, "gradient reduction: expected sum or avg, got 'max'"),
    ],
)
def test_bad_arguments(function: Any, message: str) -> None:
    for text in run_ranks_expecting(2, ValueError, function):
        assert message in text


def _two_axes() -> None:
    mesh = ShardMesh(init_device_mesh(DEVICE, (2, 2)))
    layout = plan_layout(SHAPES, 4)
    outer, inner = divmod(dist.get_rank(), 2)
    assert mesh.position([Flat(), Flat()]) == (2 * inner + outer, 1)
    assert mesh.position([Replicate(), Flat()]) == (inner, 2)
    assert mesh.position([Replicate(), Replicate()]) == (0, 4)
    with pytest.raises(ValueError, match=r"expected the axes that cut to be the first of \(1, 0\)"):
        mesh.position([Flat(), Replicate()])
    both = _make(layout, mesh, [Flat(), Flat()])
    for index, tensor in enumerate(_tensors()):
        both.distribute(index, tensor)
    half, full, at_once, refreshed = (
        _make(layout, mesh, placements, dtype=dtype)
        for placements, dtype in (
            ([Replicate(), Flat()], torch.float32),
            ([Replicate(), Replicate()], torch.float32),
            ([Replicate(), Replicate()], torch.float32),
            ([Replicate(), Replicate()], torch.float64),
        )
    )
    both.redistribute(half)
    half.redistribute(full)
    both.redistribute(at_once)
    refreshed.refresh_from(both)
    for index, expected in enumerate(_tensors()):
        assert torch.equal(full.pieces[index], expected)
        assert torch.equal(at_once.pieces[index], expected)
        assert torch.equal(refreshed.pieces[index], expected.double())
    sliced = _make(layout, mesh, [Flat(), Flat()])
    full.redistribute(sliced)
    assert all(torch.equal(a, b) for a, b in zip(sliced.pieces, both.pieces, strict=True))


def test_two_axes_join_neighbours() -> None:
    run_ranks(4, _two_axes)


TARGETS = {
    "flat": (Flat(), Flat()),
    "inner_flat": (Replicate(), Flat()),
    "outer_flat": (Flat(), Replicate()),
    "full": (Replicate(), Replicate()),
}


def _reduced_over_two_axes(name: str, shape: tuple[int, int]) -> None:
    """A sum over both axes, however the result lies; the layout is cut by the axes that cut the result."""
    target_at = TARGETS[name]
    axes = [axis for axis in (1, 0) if isinstance(target_at[axis], Flat)]
    mesh = ShardMesh(init_device_mesh(DEVICE, shape), axes)
    layout = plan_layout(SHAPES, mesh.num_shards)
    world_size = dist.get_world_size()
    partial = _make(layout, mesh, [Partial("sum"), Partial("avg")])
    for piece, tensor in zip(partial.pieces, _tensors(dist.get_rank()), strict=True):
        piece.copy_(tensor)
    target = _make(layout, mesh, target_at)
    partial.redistribute(target)
    full = _make(layout, mesh, [Replicate(), Replicate()])
    target.redistribute(full)
    everyone = [_tensors(rank) for rank in range(world_size)]
    for piece, parts in zip(full.pieces, zip(*everyone, strict=True), strict=True):
        torch.testing.assert_close(piece, sum(parts) / shape[1])


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("name", TARGETS)
def test_reductions_over_two_axes(name: str, shape: tuple[int, int]) -> None:
    run_ranks(shape[0] * shape[1], _reduced_over_two_axes, name, shape)


def _mixture() -> None:
    mesh = ShardMesh(init_device_mesh(DEVICE, (1, 1)))
    layout = plan_layout(SHAPES, 1)
    source, target = (_make(layout, mesh, at) for at in ([Partial("sum"), Flat()], [Replicate(), Replicate()]))
    source.redistribute(target)


def test_gather_and_reduction_at_once_is_refused() -> None:
    (text,) = run_ranks_expecting(1, ValueError, _mixture)
    assert "expected gathers, reductions or slices, got a mixture" in text
