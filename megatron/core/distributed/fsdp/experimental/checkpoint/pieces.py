# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads tensors from boxes of others: layers from a stack, experts from their group, halves of a fused matrix.

Each rank reads what it owns: nothing is put together first, and nothing is sent. Which piece lies where is said by the
caller, who has checked shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ..chunks import elements_at, owned_boxes
from ..dtensor import FsdpDTensor
from ..layout import Box
from .boxes import intersect, numel, overlap, slabs
from .read import OpenCheckpoint
from .reader import chunk_box, read_box, tensor_entry

_BLOCK_NUMEL = 1 << 23
"""Elements that are read at once."""


@dataclass(frozen=True)
class Piece:
    """Rows of a target, and where they lie.

    Example: rows [4, 8) of a target of (8, 3) that are the lower half of layer 5 of ``w`` of (L, 4, 3) are
    ``Piece("w", leading=(5,), rows=range(4, 8))``.

    Attributes:
        key: the saved tensor's.
        leading: indices of the dims that it has before the target's own.
        rows: which rows of the target it holds; None for all, also of a target without dims.
    """

    key: str
    leading: tuple[int, ...] = ()
    rows: range | None = None

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that the saved tensor has after its leading dims.

        Args:
            shape: the target's.
        """
        return tuple(shape) if self.rows is None else (len(self.rows), *shape[1:])


def is_whole(opened: OpenCheckpoint, key: str) -> bool:
    """Return whether the chunks of a saved tensor hold every element once."""
    entry = tensor_entry(opened.metadata, key)
    boxes = [chunk_box(chunk) for chunk in entry.chunks]
    return sum(map(numel, boxes)) == math.prod(entry.size) and overlap(boxes) is None


def read_pieces(opened: OpenCheckpoint, targets: Sequence[tuple[torch.Tensor, Sequence[Piece]]]) -> None:
    """Read targets in place, each rank what it holds of them; every rank must call it.

    Args:
        opened: the checkpoint.
        targets: `FsdpDTensor`, or plain tensors, with pieces that hold all of each.

    Raises:
        CheckpointError: a file is damaged in a way that its size does not show; on every rank. Targets that were read
            before it have changed.
    """
    for target, _ in targets:
        if isinstance(target, FsdpDTensor):  # counts as written on every rank alike, whoever gets elements
            target.geometry.notify_use(writes=True)
    with opened.ranks.together(f"load of {opened.path}"), torch.no_grad():
        for target, pieces in targets:
            for box, elements in _local_parts(target):
                for piece in pieces:
                    _read_piece(opened, piece, tuple(target.shape), box, elements)


def _read_piece(opened: OpenCheckpoint, piece: Piece, shape: tuple[int, ...], box: Box, elements: torch.Tensor) -> None:
    """Read what a piece holds of a box of a target of `shape`."""
    first = 0 if piece.rows is None else piece.rows.start
    region = Box((first, *[0] * (len(shape) - 1))[: len(shape)], piece.sizes(shape))
    common = intersect(box, region)
    if common is None:
        return
    for slab in slabs(common.sizes, _BLOCK_NUMEL):
        begin = [offset + more for offset, more in zip(common.offsets, slab.offsets, strict=True)]
        view = elements
        for dim, size in enumerate(slab.sizes):
            view = view.narrow(dim, begin[dim] - box.offsets[dim], size)
        offsets = [at - start for at, start in zip(begin, region.offsets, strict=True)]
        sizes = [*[1] * len(piece.leading), *slab.sizes]
        values = read_box(opened.path, opened.metadata, piece.key, [*piece.leading, *offsets], sizes)
        view.copy_(values.view(slab.sizes))


def _local_parts(target: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a target that lie on this rank, with their elements."""
    if not isinstance(target, FsdpDTensor):
        yield Box((0,) * target.ndim, tuple(target.shape)), target
        return
    for box in owned_boxes(target.geometry):
        index = MetadataIndex(target.geometry.fqn, torch.Size(box.offsets))
        yield box, elements_at(target._local_tensor, target.geometry, index)
