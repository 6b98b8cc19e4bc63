# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed.checkpoint asks of a sharded tensor: which boxes of it lie on this rank, and their elements.

Boxes follow from the layout: no rank asks another. It reads and writes no files.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .geometry import ShardGeometry
from .layout import Box, boxes


def owned_boxes(geometry: ShardGeometry) -> list[Box]:
    """Return the boxes that hold exactly this rank's elements, in their order; none on a rank without elements."""
    owned, piece, cut = geometry.owned, geometry.piece_shape, geometry.model_cut
    found = boxes(piece, owned.start, owned.stop)
    return found if cut is None else [part for box in found for part in cut.boxes(box, piece)]


def chunk_list(geometry: ShardGeometry) -> list[ChunkStorageMetadata]:
    """Return this rank's boxes as DCP describes them."""
    return [_chunk(box) for box in owned_boxes(geometry)]


def write_items(fqn: str, local: torch.Tensor, geometry: ShardGeometry) -> list[WriteItem]:
    """Return what this rank has to write of a tensor that is saved as `fqn`; replicas return the same.

    Args:
        fqn: the key.
        local: this rank's elements; gives the dtype.
        geometry: which elements these are.
    """
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(_chunk(box), properties, geometry.shape),
        )
        for box in owned_boxes(geometry) or _whole_if_empty(geometry)
    ]


def _whole_if_empty(geometry: ShardGeometry) -> list[Box]:
    """Return the one box of a tensor without elements, so that checkpoints know of it."""
    shape = tuple(geometry.shape)
    return [] if math.prod(shape) else [Box((0,) * len(shape), shape)]


def elements_at(local: torch.Tensor, geometry: ShardGeometry, index: MetadataIndex) -> torch.Tensor:
    """Return the elements of one box, shaped as it is, sharing memory with `local`.

    Raises:
        ValueError: this rank has no box at these offsets.
    """
    start = 0
    for box in owned_boxes(geometry) or _whole_if_empty(geometry):
        numel = math.prod(box.sizes)
        if index.offset is not None and tuple(index.offset) == box.offsets:
            return local.view(-1)[start : start + numel].view(box.sizes)
        start += numel
    raise ValueError(
        f"box of {geometry.fqn}: expected one of those on this rank, got offsets {index.offset}. Plan with the tensor "
        "that is saved or loaded."
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
