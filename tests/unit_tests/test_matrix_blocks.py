# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which elements of a parameter, or of its pieces, make which matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed.fsdp.experimental import matrix_blocks
from megatron.core.distributed.fsdp.experimental.matrix_blocks import JoinedPieces, MatrixBlock, blocks_of
from megatron.core.distributed.fsdp.experimental.model_cut import ModelCut

ONE = JoinedPieces()


def _split_rows(full: torch.Tensor, parts: Sequence[int]) -> list[torch.Tensor]:
    """Return the matrices that are fused in [rows, columns], by going through its rows one by one."""
    period = [part for part, rows in enumerate(parts) for _ in range(rows)]
    return [
        torch.stack([row for index, row in enumerate(full) if period[index % len(period)] == part])
        for part in range(len(parts))
    ]


def _matrices_of(block: MatrixBlock, pieces: Sequence[torch.Tensor], joined: JoinedPieces) -> list[torch.Tensor]:
    """Return what a rule would see, from the pieces of all ranks."""
    runs = torch.cat([piece.reshape(-1)[block.start : block.start + block.numel] for piece in pieces])
    views = block.views(runs, joined)
    assert all(view._base is runs or view.untyped_storage().data_ptr() == runs.data_ptr() for view in views)
    shapes = block.matrices(joined)
    assert [math.prod(shape) for shape in shapes] == [view.numel() for view in views]
    matrices = [view.reshape(shape) for view, shape in zip(views, shapes, strict=True)]
    return [matrix if matrix.shape[0] > 1 else matrix[0] for matrix in matrices]


def _check_blocks(blocks: Sequence[MatrixBlock], numel: int) -> None:
    """Blocks follow each other without gaps."""
    end = 0
    for block in blocks:
        assert block.start == end and block.numel > 0
        end += block.numel
    assert end == numel


@given(  # type: ignore[misc]
    st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.data()
)
def test_interleaved_parts_are_taken_apart(
    parts: list[int], repeats: int, columns: int, is_stack: bool, data: Any
) -> None:
    count = data.draw(st.integers(1, 3)) if is_stack else 1
    rows = sum(parts) * repeats
    shape = (count, rows, columns) if is_stack else (rows, columns)
    full = torch.arange(count * rows * columns).view(count, rows, columns)
    blocks = blocks_of(shape, is_stack=is_stack, parts=parts, joined=ONE, name="qkv")
    _check_blocks(blocks, full.numel())
    found = [matrix for block in blocks for matrix in _matrices_of(block, [full], ONE)]
    expected = [torch.stack(of_part) for of_part in zip(*(_split_rows(one, parts) for one in full), strict=True)]
    assert len(found) == len(expected)
    for matrix, wanted in zip(found, expected, strict=True):
        assert torch.equal(matrix.reshape(wanted.shape), wanted)


def test_parts_that_do_not_repeat_are_blocks_of_their_own() -> None:
    blocks = blocks_of((10, 3), parts=(4, 6), joined=ONE, name="gate_up")
    assert blocks == [MatrixBlock(0, 1, 4, 3), MatrixBlock(12, 1, 6, 3)]


def test_one_part_is_no_part() -> None:
    assert blocks_of((10, 3), parts=(5,), joined=ONE, name="w") == [MatrixBlock(0, 1, 10, 3)]


@given(  # type: ignore[misc]
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 1),
)
def test_pieces_are_joined(size: int, stride: int, block_rows: int, other: int, dim: int) -> None:
    stride = stride if dim == 0 else 1
    shape = [size * stride * block_rows, other] if dim == 0 else [other, size * block_rows]
    full = torch.arange(math.prod(shape)).view(shape)
    pieces = [ModelCut(1, dim, stride, size, rank).take(full) for rank in range(size)]
    joined = JoinedPieces(size, dim, stride)
    (block,) = blocks_of(pieces[0].shape, joined=joined, name="w")
    (found,) = _matrices_of(block, pieces, joined)
    assert torch.equal(found, full)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("parts", [(1, 1), (2, 1, 1)])
def test_interleaved_parts_of_pieces_are_joined(size: int, parts: tuple[int, ...]) -> None:
    """Queries, keys and values, group by group: tensor parallelism deals out whole groups."""
    full = torch.arange(2 * size * sum(parts) * 3).view(-1, 3)
    joined = JoinedPieces(size, 0, 1)
    pieces = list(full.chunk(size))
    (block,) = blocks_of(pieces[0].shape, parts=parts, joined=joined, name="qkv")
    found = _matrices_of(block, pieces, joined)
    assert all(map(torch.equal, found, _split_rows(full, parts)))


@pytest.mark.parametrize("size", [2, 3])
def test_parts_that_are_cut_one_by_one_are_joined(size: int) -> None:
    """Gate and up: each piece holds a share of either."""
    full = torch.arange(2 * size * 2 * 3).view(-1, 3)
    half = size * 2
    joined = JoinedPieces(size, 0, 2)
    pieces = [ModelCut(1, 0, 2, size, rank).take(full) for rank in range(size)]
    blocks = blocks_of(pieces[0].shape, parts=(half, half), joined=joined, name="gate_up")
    _check_blocks(blocks, pieces[0].numel())
    found = [matrix for block in blocks for matrix in _matrices_of(block, pieces, joined)]
    assert len(found) == 2 and torch.equal(found[0], full[:half]) and torch.equal(found[1], full[half:])


def test_parts_of_pieces_of_columns_are_joined() -> None:
    full = torch.arange(6 * 8).view(6, 8)
    joined = JoinedPieces(2, 1)
    pieces = [piece.contiguous() for piece in full.chunk(2, dim=1)]
    (block,) = blocks_of(pieces[0].shape, parts=(2, 1), joined=joined, name="w")
    assert all(map(torch.equal, _matrices_of(block, pieces, joined), _split_rows(full, (2, 1))))


def test_parts_of_the_worked_example() -> None:
    """Two pieces of 6 rows, parts (2, 1): rows 0 1 3 4 of the first piece and of the second make one matrix."""
    joined = JoinedPieces(2, 0)
    (block,) = blocks_of((6, 5), parts=(2, 1), joined=joined, name="w")
    rows = torch.arange(12).view(12, 1).expand(12, 5)
    first, second = block.views(rows.reshape(-1), joined)
    assert first.shape == (1, 2, 2, 2, 5) and second.shape == (1, 2, 2, 1, 5)
    assert block.matrices(joined) == [(1, 8, 5), (1, 4, 5)]
    assert first.reshape(8, 5)[:, 0].tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    assert second.reshape(4, 5)[:, 0].tolist() == [2, 5, 8, 11]


def test_convolutions_count_all_but_the_first_dim_as_columns() -> None:
    assert blocks_of((8, 3, 2, 5), joined=ONE, name="conv") == [MatrixBlock(0, 1, 8, 30)]


def test_stacks_are_computed_with_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_blocks, "MAX_STACK_NUMEL", 30)
    blocks = blocks_of((5, 3, 4), is_stack=True, joined=ONE, name="experts")
    assert [(block.start, block.count) for block in blocks] == [(0, 2), (24, 2), (48, 1)]
    _check_blocks(blocks, 60)
    # One matrix that is larger than a batch is a batch of its own.
    assert [block.count for block in blocks_of((2, 10, 10), is_stack=True, joined=ONE, name="experts")] == [1, 1]


@given(st.integers(0, 40), st.integers(0, 40))  # type: ignore[misc]
def test_owned_part_of_a_block(start: int, length: int) -> None:
    block, stop = MatrixBlock(10, 1, 4, 3), start + length
    inside = [element - 10 for element in range(10, 22) if start <= element < stop]
    first, last = block.owned(start, stop)
    assert list(range(first, last)) == inside


SHAPE_ERRORS = [((7,), False), ((3, 7), True), ((0, 7), False), ((2, 0, 7), True), ((), False)]


@pytest.mark.parametrize(("shape", "is_stack"), SHAPE_ERRORS)
def test_shapes_without_matrices_are_refused(shape: tuple[int, ...], is_stack: bool) -> None:
    kind = "a stack of matrices, 3-D" if is_stack else "a matrix, 2-D or more"
    with pytest.raises(ValueError) as raised:
        blocks_of(shape, is_stack=is_stack, joined=ONE, name="layers.0.norm")
    assert str(raised.value) == (
        f"matrices of layers.0.norm: expected {kind}, got shape {shape}. Leave it to the other rule."
    )


@pytest.mark.parametrize("parts", [(3, 4), (8, 5), (0, 4), (-1, 5), (13,)])
def test_parts_that_do_not_fit_are_refused(parts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as raised:
        blocks_of((12, 5), parts=parts, joined=ONE, name="qkv")
    assert str(raised.value) == (
        f"parts of qkv: expected numbers of rows whose sum divides its 12 rows, got {parts}. Give the rows of each "
        "fused matrix, per group where they interleave."
    )


@pytest.mark.parametrize("parts", [(2, 1), (8, 4), (6, 6, 12)])
def test_parts_of_strided_pieces_are_the_whole_halves(parts: tuple[int, ...]) -> None:
    """With stride 2 two halves are cut one by one; the parts have to be these halves."""
    with pytest.raises(ValueError) as raised:
        blocks_of((6, 5), parts=parts, joined=JoinedPieces(2, 0, 2), name="up")
    assert str(raised.value).startswith(
        f"parts of up: expected numbers of rows whose sum divides its 6 rows, got {parts} for pieces of stride 2. Give"
    )
