# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ModelCut`: how tensor parallelism has cut one tensor before data parallelism does: integer arithmetic and reshapes.

What a rank's modules compute with is its piece; the tensor itself consists of the pieces of all ranks of one mesh axis.

[Note: strided pieces]
A fused matrix whose halves are cut one by one, as the first linear layer of a gated MLP, has stride 2: a piece holds
this rank's block of the first half, then its block of the second. In general the tensor's dim is (stride, ranks, block)
and a piece is (stride, block).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .layout import Box


@dataclass(frozen=True)
class ModelCut:
    """How one tensor is cut along an axis of the mesh that is not data-parallel.

    Attributes:
        axis: index of the mesh axis.
        dim: dim of the tensor that is cut.
        stride: see [Note: strided pieces].
        size: ranks along the axis.
        rank: this one's place among them.
    """

    axis: int
    dim: int
    stride: int
    size: int
    rank: int

    def shape(self, piece: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor, given that of a piece."""
        return (*piece[: self.dim], piece[self.dim] * self.size, *piece[self.dim + 1 :])

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a tensor; contiguous."""
        before, after = full.shape[: self.dim], full.shape[self.dim + 1 :]
        block = full.shape[self.dim] // (self.stride * self.size)
        blocks = full.reshape(*before, self.stride, self.size, block, *after)
        return blocks.select(self.dim + 1, self.rank).flatten(self.dim, self.dim + 1).contiguous()

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor, given the pieces of all ranks in order."""
        shape = pieces[0].shape
        split = (*shape[: self.dim], self.stride, shape[self.dim] // self.stride, *shape[self.dim + 1 :])
        return torch.stack([piece.reshape(split) for piece in pieces], self.dim + 1).flatten(self.dim, self.dim + 2)

    def boxes(self, box: Box, piece: Sequence[int]) -> Iterator[Box]:
        """Yield where the elements of a box of the piece lie in the tensor, in the same order.

        Args:
            box: of this rank's piece.
            piece: its shape.
        """
        block = piece[self.dim] // self.stride
        start, stop = box.offsets[self.dim], box.offsets[self.dim] + box.sizes[self.dim]
        while start < stop:
            part = start // block
            end = min(stop, (part + 1) * block)
            offset = part * block * self.size + self.rank * block + start - part * block
            yield Box(_replaced(box.offsets, self.dim, offset), _replaced(box.sizes, self.dim, end - start))
            start = end

    def rows(self, start: int, stop: int, piece: Sequence[int], name: str) -> tuple[int, int, ModelCut]:
        """Return which rows of the piece belong to rows ``[start, stop)`` of the tensor, and how those are cut.

        Args:
            start: first row of the tensor.
            stop: row after the last one.
            piece: shape of the piece.
            name: of the tensor, for errors.

        Raises:
            ValueError: rows are cut, and these are not those of whole parts, of which there are `stride`.
        """
        if self.dim > 0:
            return start, stop, self
        block = piece[0] // self.stride
        whole = block * self.size
        if start % whole or stop % whole or stop <= start:
            raise ValueError(
                f"rows of {name}: expected a multiple of {whole}, of which each rank of tensor parallelism holds a "
                f"part, got [{start}, {stop}). Name whole parts."
            )
        first, last = start // whole, stop // whole
        return first * block, last * block, ModelCut(self.axis, 0, last - first, self.size, self.rank)


def find_model_cut(parameter: Any, name: str, axis: int, size: int, rank: int) -> ModelCut | None:
    """Return how a parameter is a piece of a larger one, by the attributes that megatron-core gives it.

    Args:
        parameter: with ``tensor_model_parallel`` True for a piece, ``partition_dim`` and ``partition_stride``; without
            them it is the same on all ranks of the axis.
        name: for errors.
        axis: index of the mesh axis.
        size: ranks along it.
        rank: this one's place among them.

    Raises:
        ValueError: the attributes do not fit the parameter.
    """
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
    is_possible = 0 <= dim < parameter.ndim and stride >= 1 and parameter.shape[dim] % stride == 0
    if not is_possible or (stride > 1 and dim > 0):
        raise ValueError(
            f"partition_dim and partition_stride of {name}: expected a dim of {tuple(parameter.shape)} that the stride "
            f"divides, and stride 1 for other dims than 0, got {dim} and {stride}. Set them as "
            "set_tensor_model_parallel_attributes does."
        )
    return ModelCut(axis, dim, stride, size, rank)


def _replaced(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
