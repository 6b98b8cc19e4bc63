# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints in DCP's format, by any writer, without executing anything in them.

Boxes of tensors are read without the rest of their chunk. Whatever is wrong with a file is a
:class:`CheckpointError` that names the file and the key. Checks no checksums and moves no data between ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..layout import Box
from .boxes import intersect, numel, overlap
from .errors import CheckpointError
from .records import Item, open_file
from .unpickle import unpickle_metadata

METADATA_FILE = ".metadata"


def load_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """Read and check a checkpoint's ``.metadata``.

    Raises:
        CheckpointError: there is none, or it is damaged, or it names a class or a path that it has no use for.
    """
    path = Path(folder) / METADATA_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path}: expected a checkpoint's metadata, got no such file. A checkpoint without it was never committed: "
            "name the folder of one that was, or load an earlier one."
        )
    with open_file(path, str(path)) as stream:
        metadata = unpickle_metadata(stream, str(path))
    problem = _malformed(metadata)
    if problem:
        raise CheckpointError(
            f"{path}: expected the metadata of a DCP checkpoint, got {problem}. "
            "The file is damaged: restore it, or load an earlier checkpoint."
        )
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    assert isinstance(metadata, Metadata)  # _malformed has looked
    return metadata


def tensor_entry(metadata: Metadata, key: str) -> TensorStorageMetadata:
    """Return what the metadata says of a tensor."""
    entry = _entry(metadata, key)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{key}: expected a tensor, got a byte entry. Read it with load_entry.")
    return entry


def chunk_box(chunk: ChunkStorageMetadata) -> Box:
    """Return a saved chunk's box."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


@contextlib.contextmanager
def open_item(folder: str | os.PathLike[str], metadata: Metadata, index: MetadataIndex) -> Iterator[Item]:
    """Open a saved item by its key, and offsets if it is a tensor's chunk.

    Raises:
        CheckpointError: no storage, no file, a file too short, or one written through DCP's stream extensions.
    """
    at = f" at {tuple(index.offset)}" if index.offset is not None else ""
    info = (metadata.storage_data or {}).get(index)
    if info is None:
        raise CheckpointError(
            f"{index.fqn}{at}: expected to find where it is stored, got nothing in {Path(folder) / METADATA_FILE}. "
            "The save lost it: load an earlier checkpoint."
        )
    path = Path(folder) / info.relative_path
    where = f"{index.fqn}{at} in {path}"
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{where}: expected plain bytes, got a stream written through {list(info.transform_descriptors)}. "
            "Save without DCP's stream extensions."
        )
    with open_file(path, where) as file:
        try:
            yield Item(file, info.offset, info.length, where)
        except OSError as error:
            raise CheckpointError(
                f"{where}: expected to read it, got {error.strerror or error}. "
                "Restore the file, or load an earlier checkpoint."
            ) from error


def read_box(
    folder: str | os.PathLike[str], metadata: Metadata, key: str, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Read any box of a saved tensor in this process.

    Args:
        folder: the checkpoint's.
        metadata: from :func:`load_metadata`.
        key: a tensor's.
        offsets: the box's first index per dim.
        sizes: the box's number of indices per dim.

    Returns:
        ``[*sizes]``, the saved dtype, on the CPU. Memory: the box and a block of 8 MiB; and a whole saved chunk for a
        tensor that is not plain (quantised, strided, compressed).

    Raises:
        CheckpointError: the box lies outside the tensor, the chunks do not cover it or overlap in it, or damage.
    """
    entry = tensor_entry(metadata, key)
    wanted = Box(tuple(offsets), tuple(sizes))
    if len(wanted.offsets) != len(entry.size) or any(
        offset < 0 or size < 0 or offset + size > limit
        for offset, size, limit in zip(wanted.offsets, wanted.sizes, entry.size, strict=True)
    ):
        raise CheckpointError(
            f"{key}: expected a box within {tuple(entry.size)}, got offsets {wanted.offsets} and sizes {wanted.sizes}."
        )
    found = [(chunk, intersect(chunk_box(chunk), wanted)) for chunk in entry.chunks]
    parts = [(chunk, part) for chunk, part in found if part is not None]
    clash = overlap([part for _, part in parts])
    covered = sum(numel(part) for _, part in parts)
    if clash or covered != numel(wanted):
        got = f"chunks that overlap at {clash[1].offsets}" if clash else f"{covered} of {numel(wanted)} elements"
        raise CheckpointError(
            f"{key}: expected saved chunks that cover offsets {wanted.offsets}, sizes {wanted.sizes}, once, got {got}. "
            "The save lost data: load an earlier checkpoint."
        )
    result = torch.empty(wanted.sizes, dtype=entry.properties.dtype)
    for chunk, part in parts:
        target = result
        for dim, (begin, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            target = target.narrow(dim, begin - wanted.offsets[dim], size)
        relative = tuple(begin - first for begin, first in zip(part.offsets, chunk.offsets, strict=True))
        with open_item(folder, metadata, MetadataIndex(key, chunk.offsets)) as item:
            read_chunk(item, key, entry, chunk, Box(relative, part.sizes), target)
    return result


def read_chunk(
    item: Item,
    key: str,
    entry: TensorStorageMetadata,
    chunk: ChunkStorageMetadata,
    box: Box,
    target: torch.Tensor,
) -> None:
    """Copy a box, in the chunk's coordinates, of a saved chunk into a tensor of its sizes, after checking the chunk."""
    check_chunk(item, key, entry, chunk)
    item.read(box, target, tuple(chunk.sizes))


def check_chunk(item: Item, key: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> None:
    """Raise CheckpointError unless a file's tensor has the dtype and the shape that the metadata gives the chunk."""
    saved = item.describe()
    # Megatron-core's torch_dist gives a stacked layer leading dims of 1 that its file does not have.
    if saved.dtype != entry.properties.dtype or _without_ones(saved.shape) != _without_ones(chunk.sizes):
        raise CheckpointError(
            f"{key} at {tuple(chunk.offsets)}: expected {entry.properties.dtype} of {tuple(chunk.sizes)} by the "
            f"metadata, got {saved.dtype} of {saved.shape} in the file. They do not belong together: restore both."
        )


def load_entry(folder: str | os.PathLike[str], metadata: Metadata, key: str) -> object:
    """Read a byte entry: plain Python and numpy values, tensors, ``argparse.Namespace``.

    Raises:
        CheckpointError: the key is a tensor's or unknown, or damage, or a pickle that names any other class.
    """
    if not isinstance(_entry(metadata, key), BytesStorageMetadata):
        raise CheckpointError(f"{key}: expected a byte entry, got a tensor. Read it with read_box.")
    with open_item(folder, metadata, MetadataIndex(key)) as item:
        value: object = item.load()
    return value


class SafeReader(StorageReader):
    """DCP's FileSystemReader for files that need not be trusted: for ``dcp.load(..., storage_reader=SafeReader(dir))``.

    The metadata is read at once, so that its errors are not wrapped by DCP. Reads a box without the rest of its chunk.

    Args:
        path: the checkpoint's folder.
        metadata: if it has been read already.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata | None = None) -> None:
        super().__init__()
        self._path = Path(path)
        self._metadata = load_metadata(path) if metadata is None else metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether an id can be a folder of the file system."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another checkpoint, if one is named."""
        if checkpoint_id is not None and Path(checkpoint_id) != self._path:
            self._path = Path(checkpoint_id)
            self._metadata = load_metadata(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Return the metadata."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the metadata to read by."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan into the planner's tensors; the future is complete.

        Raises:
            CheckpointError: damage, or a pickle that names a class that is not allowed.
        """
        for read_item in sorted(plan.items, key=self._place):
            with open_item(self._path, self._metadata, read_item.storage_index) as item:
                if read_item.type == LoadItemType.BYTE_IO:
                    # DCP's planners unpickle what they are given: give them what has been read safely and written here.
                    stream = io.BytesIO()
                    torch.save(item.load(), stream)
                    stream.seek(0)
                    planner.load_bytes(read_item, stream)
                else:
                    self._read_tensor(read_item, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, read_item: ReadItem) -> tuple[str, int]:
        info = (self._metadata.storage_data or {}).get(read_item.storage_index)
        return (info.relative_path, info.offset) if info else ("", 0)

    def _read_tensor(self, read_item: ReadItem, item: Item, planner: LoadPlanner) -> None:
        key = read_item.storage_index.fqn
        entry = tensor_entry(self._metadata, key)
        chunk = next((chunk for chunk in entry.chunks if chunk.offsets == read_item.storage_index.offset), None)
        if chunk is None:
            raise CheckpointError(f"{key}: expected a saved chunk at {read_item.storage_index.offset}, got none.")
        target = planner.resolve_tensor(read_item).detach()
        if target.size() != read_item.lengths:
            raise CheckpointError(
                f"{key}: expected a target of {tuple(read_item.lengths)}, got {tuple(target.size())} from the planner."
            )
        box = Box(tuple(read_item.storage_offsets), tuple(read_item.lengths))
        read_chunk(item, key, entry, chunk, box, target)
        planner.commit_tensor(read_item, target)


def _entry(metadata: Metadata, key: str) -> object:
    try:
        return metadata.state_dict_metadata[key]
    except KeyError:
        raise CheckpointError(
            f"{key}: expected a key of the checkpoint, got one that it does not have. `mfsdp-ckpt list` shows its keys."
        ) from None


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _malformed(metadata: object) -> str | None:
    """Say what is wrong with unpickled metadata: pickles can lack or mix anything."""
    if not isinstance(metadata, Metadata):
        return f"a {type(metadata).__name__}"
    entries = getattr(metadata, "state_dict_metadata", None)
    storage = getattr(metadata, "storage_data", None)
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        return "no entries or no storage"
    for key, entry in entries.items():
        if not isinstance(key, str) or not (isinstance(entry, BytesStorageMetadata) or _is_tensor(entry)):
            return f"a malformed entry for {key!r}"
    for index, info in storage.items():
        if not isinstance(index, MetadataIndex) or not isinstance(getattr(index, "fqn", None), str):
            return "a malformed key of its storage"
        if not _is_place(info):
            return f"a malformed place or a path outside the folder for {index.fqn}"
    return None


def _is_tensor(entry: object) -> bool:
    if not isinstance(entry, TensorStorageMetadata) or not isinstance(getattr(entry, "chunks", None), list):
        return False
    size = getattr(entry, "size", None)
    dtype = getattr(getattr(entry, "properties", None), "dtype", None)
    return (
        isinstance(size, torch.Size)
        and isinstance(dtype, torch.dtype)
        and all(_is_chunk(chunk, size) for chunk in entry.chunks)
    )


def _is_chunk(chunk: object, size: torch.Size) -> bool:
    # A torch.Size, but Megatron-FSDP v1 writes plain tuples.
    offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
    return (
        isinstance(offsets, tuple)
        and isinstance(sizes, tuple)
        and all(type(number) is int for number in (*offsets, *sizes))
        and len(offsets) == len(sizes) == len(size)
        and all(
            min(first, count) >= 0 and first + count <= limit
            for first, count, limit in zip(offsets, sizes, size, strict=True)
        )
    )


def _is_place(info: object) -> bool:
    path = getattr(info, "relative_path", None)
    numbers = (getattr(info, "offset", None), getattr(info, "length", None))
    return (
        isinstance(info, _StorageInfo)
        and isinstance(path, str)
        and not PurePath(path).is_absolute()
        and ".." not in PurePath(path).parts
        and "\0" not in path
        and all(type(number) is int and number >= 0 for number in numbers)
    )
