# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which matrices a parameter consists of, and in which runs of its elements they lie: integers and views.

Who computes with them is matrix_plan.py's business; what is computed, a `MatrixRule`'s.

[Note: pieces and blocks]
Data parallelism cuts a parameter, or its piece where tensor parallelism has cut it before, into runs of elements. A
block is a run of elements of that piece that one rank computes with at a time: the whole of an ordinary matrix, one
half of a fused gate and up projection, some experts of a stack. Inside a block the matrices may interleave, as queries,
keys and values of Megatron's fused projection do, group by group; a block is then taken apart by views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_STACK_NUMEL = 1 << 24
"""Elements of a stack that are computed with in one batch, one matrix at least. It depends on shapes only: batched
kernels may round otherwise for another number of matrices, so that number may not depend on the number of ranks."""


@dataclass(frozen=True)
class JoinedPieces:
    """How the pieces of tensor parallelism make a parameter.

    Attributes:
        size: number of pieces.
        dim: 0 if they are rows, 1 if they are columns.
        stride: see [Note: strided pieces] of model_cut.py.
    """

    size: int = 1
    dim: int = 0
    stride: int = 1


@dataclass(frozen=True)
class MatrixBlock:
    """A run of elements of a piece that one owner computes with.

    Attributes:
        start: first element, counted from the piece's own first.
        count: matrices of a stack, each of `rows` x `columns`; 1 for what is no stack.
        rows: of each.
        columns: of each.
        parts: rows of the matrices that interleave, repeated as often as they fit; empty for one matrix.
        stride: runs of rows that tensor parallelism has cut one by one; 1 for a block that is one such run.
    """

    start: int
    count: int
    rows: int
    columns: int
    parts: tuple[int, ...] = ()
    stride: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.count * self.rows * self.columns

    def matrices(self, joined: JoinedPieces) -> list[tuple[int, int, int]]:
        """Return (count, rows, columns) of each of its matrices, or stacks of matrices, pieces joined."""
        periods = self.rows // sum(self.parts) if self.parts else 1
        return [
            (
                self.count,
                part * periods * (joined.size if joined.dim == 0 else 1),
                self.columns * (joined.size if joined.dim == 1 else 1),
            )
            for part in self.parts or (self.rows,)
        ]

    def views(self, pieces: torch.Tensor, joined: JoinedPieces) -> list[torch.Tensor]:
        """Return a view of each of its matrices, which `reshape` makes a matrix.

        Example: two pieces of 6 rows, parts (2, 1): rows 0 1 3 4 of the first piece and of the second make one matrix
        of 8 rows; its view is [count, pieces, periods, part, columns].

        Args:
            pieces: [size * numel], the blocks of all pieces, one after another.
            joined: how they make the parameter.
        """
        shape = (joined.size, self.count)
        if self.parts:
            period = sum(self.parts)
            tensor = pieces.view(*shape, self.rows // period, period, self.columns)
            views = list(torch.split(tensor, list(self.parts), dim=3))
        else:
            views = [pieces.view(*shape, self.stride, self.rows // self.stride, self.columns)]
            if joined.dim == 0:
                return [view.permute(1, 2, 0, 3, 4) for view in views]
        if joined.dim == 0:
            return [view.permute(1, 0, 2, 3, 4) for view in views]
        return [view.permute(1, 2, 3, 0, 4) for view in views]

    def owned(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of this block, counted from its own first element, within a run of the piece's elements."""
        first = min(max(start - self.start, 0), self.numel)
        return first, max(first, min(stop - self.start, self.numel))


def blocks_of(
    shape: Sequence[int], *, is_stack: bool = False, parts: Sequence[int] = (), joined: JoinedPieces, name: str
) -> list[MatrixBlock]:
    """Return the blocks of a parameter, or of its piece.

    Args:
        shape: of the parameter or piece; with more than two dims a convolution's, of which all but the first are
            columns.
        is_stack: dim 0 counts matrices.
        parts: rows of each matrix that is fused in the parameter, repeated as often as they fit.
        joined: how pieces make the parameter.
        name: of the parameter, for errors.

    Raises:
        ValueError: a shape that holds no matrix, or parts that do not fit it.
    """
    count = shape[0] if is_stack else 1
    of_one = tuple(shape[1:]) if is_stack else tuple(shape)
    if len(of_one) < 2 or min(shape) < 1:
        kind = "a stack of matrices, 3-D" if is_stack else "a matrix, 2-D or more"
        raise ValueError(f"matrices of {name}: expected {kind}, got shape {tuple(shape)}. Leave it to the other rule.")
    rows, columns = of_one[0], math.prod(of_one[1:])
    parts = _piece_parts(rows, tuple(parts), joined, name)
    if parts and not is_stack and sum(parts) == rows:
        starts = [sum(parts[:index]) * columns for index in range(len(parts))]
        return [MatrixBlock(start, 1, part, columns) for start, part in zip(starts, parts, strict=True)]
    batch = max(1, MAX_STACK_NUMEL // (rows * columns))
    stride = joined.stride if joined.dim == 0 and joined.size > 1 else 1
    return [
        MatrixBlock(first * rows * columns, min(batch, count - first), rows, columns, parts, stride)
        for first in range(0, count, batch)
    ]


def _piece_parts(rows: int, parts: tuple[int, ...], joined: JoinedPieces, name: str) -> tuple[int, ...]:
    """Return which rows of a piece belong to which matrix.

    Pieces of parts that are cut one by one hold a share of each; of others, whole repetitions.
    """
    if not parts:
        return ()
    is_cut_each = joined.dim == 0 and joined.size > 1 and joined.stride > 1
    found = parts
    if is_cut_each and joined.stride == len(parts) and sum(parts) == rows * joined.size:
        found = tuple(part // joined.size for part in parts)
    if min(parts) < 1 or rows % sum(found) or (is_cut_each and (found is parts or len(set(found)) > 1)):
        raise ValueError(
            f"parts of {name}: expected numbers of rows whose sum divides its {rows} rows, got {parts}"
            + (f" for pieces of stride {joined.stride}" if is_cut_each else "")
            + ". Give the rows of each fused matrix, per group where they interleave."
        )
    return found if len(found) > 1 else ()
