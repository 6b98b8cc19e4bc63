# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint from another one's tensors, a part in memory at a time, and commits it like any save.

What is made of which tensors is said by the caller.
"""

from __future__ import annotations

import io
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.core.distributed.fsdp.experimental.checkpoint.boxes import slabs
from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint.folder import (
    commit,
    remove_checkpoint,
    staging_path,
    write_error,
    write_manifest,
)
from megatron.core.distributed.fsdp.experimental.checkpoint.manifest import checksum_file, read_manifest
from megatron.core.distributed.fsdp.experimental.checkpoint.planner import CompleteSavePlanner
from megatron.core.distributed.fsdp.experimental.checkpoint.ranks import Ranks
from megatron.core.distributed.fsdp.experimental.checkpoint.read import OpenCheckpoint
from megatron.core.distributed.fsdp.experimental.checkpoint.reader import read_box
from megatron.core.distributed.fsdp.experimental.checkpoint.writer import CheckpointWriter
from megatron.core.distributed.fsdp.experimental.layout import Box
from megatron.inspector.text import progress

# A part is read, converted, and copied by the writer.
_PARTS_IN_MEMORY = 5
_MAX_PART_BYTES = 64 << 20

Path_ = tuple[str, ...]
"""Keys of nested dicts on the way to a value; joined by dots they are its key in the checkpoint."""


@dataclass(frozen=True)
class Part:
    """A box of a new tensor, and where its elements are in the source.

    Example: layer 3's (8, 4) in a stack: ``Part(Box((3, 0, 0), (1, 8, 4)), "layers.3.w", (0, 0))``; and back,
    ``Part(Box((0, 0), (8, 4)), "layers.w", (3, 0, 0))``. Dims are the same from the last one on; others have size 1.

    Attributes:
        box: in the new tensor.
        key: the source's tensor.
        offsets: where the box begins in it.
    """

    box: Box
    key: str
    offsets: tuple[int, ...]

    def source_of(self, box: Box) -> Box:
        """Return where a smaller box of the new tensor is in the source."""
        offsets, sizes = list(self.offsets), [1] * len(self.offsets)
        for dim in range(1, min(len(sizes), len(box.sizes)) + 1):
            offsets[-dim] += box.offsets[-dim] - self.box.offsets[-dim]
            sizes[-dim] = box.sizes[-dim]
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write.

    Attributes:
        shape: its own.
        dtype: its own; the source's elements are converted.
        parts: boxes that make up all of it.
        value: instead of parts, if it is known.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...] = ()
    value: torch.Tensor | None = None


@dataclass
class NewCheckpoint:
    """What to write.

    Attributes:
        tensors: by their paths.
        objects: other values, by their paths.
        files: further files by name, each written by a function of its path.
    """

    tensors: dict[Path_, NewTensor] = field(default_factory=dict)
    objects: dict[Path_, Any] = field(default_factory=dict)
    files: dict[str, Callable[[Path], None]] = field(default_factory=dict)


def open_source(folder: Path) -> OpenCheckpoint:
    """Open a checkpoint in this process alone, after comparing the sizes of its files."""
    return OpenCheckpoint(folder, Ranks(torch.device("cpu")))


def whole(key: str, shape: Sequence[int], leading: Sequence[int] = ()) -> Part:
    """Return all of a new tensor of `shape` from a key, at indices of leading dims that it has before them."""
    return Part(Box((0,) * len(shape), tuple(shape)), key, (*leading, *[0] * len(shape)))


def write_new(new: NewCheckpoint, source: OpenCheckpoint, folder: Path, max_memory: int) -> int:
    """Write and commit a checkpoint; return the bytes of its tensors.

    Args:
        new: what to write.
        source: where the parts are.
        folder: of the new checkpoint; must not exist.
        max_memory: bytes for tensors.

    Raises:
        CheckpointError: it exists, it cannot be written, or the source is damaged; nothing is left then.
    """
    if folder.exists():
        raise CheckpointError(
            f"{folder}: expected a folder that does not exist yet, got one. Name another, or move it."
        )
    staging = staging_path(folder, secrets.token_hex(4))
    planner = _Planner(new, source, max_memory)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with progress(planner.num_bytes, "converted") as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            planner.on_bytes = bar.update
            with Ranks(torch.device("cpu")).together(f"save of {folder}"):
                # One thread: a part is asked for when the one before has been written.
                save({}, storage_writer=CheckpointWriter(staging), planner=planner, no_dist=True)
        _add_files(staging, new.files)
        commit(staging, folder)
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        if staging.exists():
            remove_checkpoint(staging)
    return planner.num_bytes


def _add_files(folder: Path, files: Mapping[str, Callable[[Path], None]]) -> None:
    """Write further files, on the disk and in the manifest."""
    for name, write in files.items():
        write(folder / name)
        with (folder / name).open("rb+") as file:
            os.fsync(file.fileno())
    records = {name: checksum_file(folder / name) for name in files}
    write_manifest(folder, {**(read_manifest(folder) or {}), **records})


class _Planner(CompleteSavePlanner):
    """Plans a save of tensors that do not exist yet, and makes each part when the writer asks for it."""

    def __init__(self, new: NewCheckpoint, source: OpenCheckpoint, max_memory: int) -> None:
        super().__init__()
        self._new = new
        self._source = source
        self._max_bytes = max(1, min(max_memory // _PARTS_IN_MEMORY, _MAX_PART_BYTES))
        self._boxes: dict[MetadataIndex, tuple[NewTensor, Part | None, Box]] = {}
        self._last: torch.Tensor | None = None
        self.on_bytes: Callable[[int], None] = lambda count: None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        shapes = [(torch.Size(tensor.shape), tensor.dtype) for tensor in self._new.tensors.values()]
        return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)

    def create_local_plan(self) -> SavePlan:
        """Return an item for each part, small enough for memory, and for each object."""
        items = [item for path, tensor in self._new.tensors.items() for item in self._items(".".join(path), tensor)]
        items += [WriteItem(MetadataIndex(".".join(path)), WriteItemType.BYTE_IO) for path in self._new.objects]
        paths = [*self._new.tensors, *self._new.objects]
        self.plan = SavePlan(items, planner_data={".".join(path): path for path in paths})
        self._objects = {".".join(path): value for path, value in self._new.objects.items()}
        return self.plan

    def _items(self, key: str, tensor: NewTensor) -> Iterator[WriteItem]:
        properties = TensorProperties(dtype=tensor.dtype)
        for part, box in self._cut(tensor):
            index = MetadataIndex(key, torch.Size(box.offsets))
            self._boxes[index] = tensor, part, box
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, properties, torch.Size(tensor.shape))
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def _cut(self, tensor: NewTensor) -> Iterator[tuple[Part | None, Box]]:
        if tensor.value is not None:
            yield None, Box((0,) * len(tensor.shape), tensor.shape)
        for part in tensor.parts:
            saved: Any = self._source.metadata.state_dict_metadata[part.key]
            itemsize = max(tensor.dtype.itemsize, saved.properties.dtype.itemsize)
            for slab in slabs(part.box.sizes, max(1, self._max_bytes // itemsize)):
                offsets = tuple(first + more for first, more in zip(part.box.offsets, slab.offsets, strict=True))
                yield part, Box(offsets, slab.sizes)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item's bytes, or read its elements."""
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._objects[index.fqn], stream)
            return stream
        tensor, part, box = self._boxes[index]
        if part is None:
            assert tensor.value is not None, "made by _cut"
            return tensor.value
        place = part.source_of(box)
        if self._last is not None:
            self._last.untyped_storage().resize_(0)  # the writer still holds on to it
        values = read_box(self._source.path, self._source.metadata, part.key, place.offsets, place.sizes)
        self._last = values.view(box.sizes).to(tensor.dtype, copy=True)  # memory that can be freed so
        self.on_bytes(self._last.nbytes)
        return self._last
