# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint opened by one process without process groups: its keys, and its tensors in slabs. Writes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron.core.distributed.fsdp.experimental.checkpoint.boxes import slabs
from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint.folder import METADATA, iteration_folder, read_latest
from megatron.core.distributed.fsdp.experimental.checkpoint.reader import (
    load_entry,
    load_metadata,
    open_item,
    read_box,
    tensor_entry,
)
from megatron.core.distributed.fsdp.experimental.layout import Box

# Larger slabs are not read faster, and of a command's memory several slabs and what is computed from them live at once.
_MAX_SLAB_BYTES = 16 << 20
_SLABS_IN_MEMORY = 8


class Checkpoint:
    """One checkpoint's folder and metadata.

    Args:
        folder: the checkpoint's; or a training's, for its latest checkpoint.
        max_memory: bytes that a command may use for tensors.

    Attributes:
        tensors: what the metadata says of each tensor, by key, sorted.
        entries: the keys of byte entries, sorted.
    """

    def __init__(self, folder: Path, max_memory: int = 1 << 30) -> None:
        self.folder = latest_in(folder)
        self.metadata = load_metadata(self.folder)
        self._max_memory = max_memory
        items = sorted(self.metadata.state_dict_metadata.items())
        self.tensors = {key: entry for key, entry in items if isinstance(entry, TensorStorageMetadata)}
        self.entries = [key for key, _ in items if key not in self.tensors]

    def stored_bytes(self, key: str) -> int:
        """Return the bytes that a key takes in the files."""
        entry = self.tensors.get(key)
        indices = [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks] if entry else [MetadataIndex(key)]
        found = [self.metadata.storage_data.get(index) for index in indices]
        return sum(info.length for info in found if info is not None)

    def slab_boxes(self, key: str, box: Box | None = None) -> Iterator[Box]:
        """Cut a tensor, or a box of it, into boxes small enough for memory, in row-major order."""
        entry = tensor_entry(self.metadata, key)
        whole = box or Box((0,) * len(entry.size), tuple(entry.size))
        item_bytes = max(entry.properties.dtype.itemsize, 1)
        limit = max(1, min(self._max_memory // _SLABS_IN_MEMORY, _MAX_SLAB_BYTES) // item_bytes)
        self._check_streamable(key, entry)
        for slab in slabs(whole.sizes, limit):
            yield Box(tuple(map(sum, zip(slab.offsets, whole.offsets, strict=True))), slab.sizes)

    def read(self, key: str, box: Box) -> torch.Tensor:
        """Read a box of a tensor."""
        return read_box(self.folder, self.metadata, key, box.offsets, box.sizes)

    def entry(self, key: str) -> object:
        """Read a byte entry."""
        return load_entry(self.folder, self.metadata, key)

    def _check_streamable(self, key: str, entry: TensorStorageMetadata) -> None:
        for chunk in entry.chunks:
            # The bytes of the file, and the tensor that torch makes of them.
            needed = 2 * math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if needed <= self._max_memory:
                continue
            with open_item(self.folder, self.metadata, MetadataIndex(key, chunk.offsets)) as item:
                if not item.is_plain():
                    raise CheckpointError(
                        f"{key}: expected a chunk that can be read in parts or fits --max-memory {self._max_memory}, "
                        f"got {needed} bytes for a quantised, strided or compressed tensor. Raise --max-memory."
                    )


def tensor_bytes(entry: TensorStorageMetadata) -> int:
    """Return the bytes of a whole tensor in memory."""
    return math.prod(entry.size) * entry.properties.dtype.itemsize


def latest_in(folder: Path) -> Path:
    """Return the folder, or of a training's folder that of its latest checkpoint.

    Raises:
        CheckpointError: it is no folder, or the latest checkpoint is not named there.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected the folder of a checkpoint, got no folder.")
    if (folder / METADATA).exists():
        return folder
    iteration = read_latest(folder)
    return folder if iteration is None else iteration_folder(folder, iteration)
