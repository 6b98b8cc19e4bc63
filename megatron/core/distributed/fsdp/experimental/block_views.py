# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The blocks of a matrix, encoded and decoded piece by piece, so that temporary memory stays small.

How blocks are scaled is decided in `number_formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .float_bits import ElementBits, magnitude_bits, noise

HOST_PIECE_NUMEL = 1 << 17
"""Elements of a piece on a host: its temporary memory stays in a core's cache."""

DEVICE_PIECE_NUMEL = 1 << 25
"""Elements of a piece elsewhere: enough that the time of a launch does not matter, 128 MiB of float32."""


@dataclass(frozen=True)
class Span:
    """A run of rows, or of columns: whole blocks of one size, or a part of one block.

    Attributes:
        start: first element.
        stop: one after the last element.
        size: elements of each block, as far as it lies in the run.
        block: the first block's index.
    """

    start: int
    stop: int
    size: int
    block: int

    @property
    def num_blocks(self) -> int:
        """Blocks that the run has a part of."""
        return (self.stop - self.start) // self.size


def spans(total: int, block: int, limit: int) -> list[Span]:
    """Cut `total` elements into runs of about `limit` elements, the shorter last block apart.

    Blocks longer than the limit are cut. Example: 70 elements in blocks of 16 and a limit of 40 are the runs [0, 32),
    [32, 64) and [64, 70) of 2, 2 and 1 blocks.
    """
    if block > limit:
        firsts = range(0, total, block)
        return [
            Span(start, stop, stop - start, first // block)
            for first in firsts
            for start in range(first, min(first + block, total), limit)
            for stop in [min(start + limit, first + block, total)]
        ]
    whole = total - total % block
    step = limit // block * block
    runs = [Span(start, min(start + step, whole), block, start // block) for start in range(0, whole, step)]
    return [*runs, Span(whole, total, total - whole, whole // block)] if whole < total else runs


@dataclass(frozen=True)
class Piece:
    """Some rows and some columns of a matrix in blocks."""

    rows: Span
    columns: Span

    def elements(self, flat: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Return a view of a matrix's elements: [blocks down, rows of a block, blocks across, columns of a block]."""
        part = flat.view(-1, num_columns)[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]
        return part.view(self.rows.num_blocks, self.rows.size, self.columns.num_blocks, self.columns.size)

    def blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Return a view of what a matrix has once a block, [blocks down, blocks across], as [down, 1, across, 1]."""
        down = slice(self.rows.block, self.rows.block + self.rows.num_blocks)
        across = slice(self.columns.block, self.columns.block + self.columns.num_blocks)
        return values[down, None, across, None]

    def indices(self, num_columns: int, device: torch.device) -> torch.Tensor:
        """Return the row-major indices of the elements, int64, shaped as they are."""
        rows = torch.arange(self.rows.start, self.rows.stop, device=device) * num_columns
        columns = torch.arange(self.columns.start, self.columns.stop, device=device)
        shape = (self.rows.num_blocks, self.rows.size, self.columns.num_blocks, self.columns.size)
        return (rows[:, None] + columns).view(shape)


@dataclass(frozen=True)
class Grid:
    """A matrix of [rows, columns] elements in blocks of [block_rows, block_columns]; the last ones may be smaller."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Blocks down and across."""
        return -(-self.rows // self.block_rows), -(-self.columns // self.block_columns)

    def pieces(self, device: torch.device) -> Iterator[Piece]:
        """Yield pieces that cover all elements."""
        numel = HOST_PIECE_NUMEL if device.type == "cpu" else DEVICE_PIECE_NUMEL
        across = spans(self.columns, self.block_columns, max(1, numel // self.block_rows))
        width = max((span.stop - span.start for span in across), default=1)
        for rows in spans(self.rows, self.block_rows, max(self.block_rows, numel // width)):
            for columns in across:
                yield Piece(rows, columns)

    def amax_bits(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bits of the largest magnitude of each block, int32, [blocks down, blocks across].

        A NaN or an infinity in a block gives at least the bits of infinity.

        Args:
            values: [rows * columns], float32 or a narrower floating-point dtype.
        """
        largest = torch.zeros(self.num_blocks, dtype=torch.int32, device=values.device)
        for piece in self.pieces(values.device):
            bits = magnitude_bits(piece.elements(values, self.columns).to(torch.float32))
            part = bits.amax(dim=3, keepdim=True)
            part = part.amax(dim=1, keepdim=True) if piece.rows.size > 1 else part
            known = piece.blocks(largest)
            torch.maximum(known, part, out=known)
        return largest


@dataclass(frozen=True)
class Noise:
    """What stochastic rounding depends on, besides the values: the seed, and the index of a run's first element."""

    seed: int
    start: int


def encode_blocks(
    grid: Grid,
    values: torch.Tensor,
    *,
    scale: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    factors: torch.Tensor,
    element: ElementBits,
    codes: torch.Tensor,
    source: Noise | None,
) -> None:
    """Scale values by their blocks' factors and round them to elements, one a byte.

    Args:
        grid: the blocks of the values.
        values: [n], float32 or a narrower floating-point dtype.
        scale: `torch.mul` or `torch.div`.
        factors: [blocks down, blocks across], float32.
        element: what to round to.
        codes: [n], uint8; overwritten.
        source: for stochastic rounding; None for rounding to nearest.
    """
    for piece in grid.pieces(values.device):
        part = piece.elements(values, grid.columns).to(torch.float32)
        words = None
        if source is not None:
            words = noise(piece.indices(grid.columns, values.device).add_(source.start), part, source.seed)
        element.encode(scale(part, piece.blocks(factors)), piece.elements(codes, grid.columns), words)


def decode_blocks(
    grid: Grid, codes: torch.Tensor, *, element: ElementBits, plane: torch.Tensor, out: torch.Tensor
) -> None:
    """Multiply elements, one a byte in the high bits, by their blocks' scales.

    Args:
        grid: the blocks of the elements.
        codes: [n], uint8.
        element: what they are.
        plane: [blocks down, blocks across], float32.
        out: [n], a floating-point dtype; overwritten.
    """
    for piece in grid.pieces(out.device):
        values = element.decode(piece.elements(codes, grid.columns))
        torch.mul(values, piece.blocks(plane), out=piece.elements(out, grid.columns))
