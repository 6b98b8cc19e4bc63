# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints for tests, made by DCP itself in one process, and pickles that would execute something."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.distributed.fsdp.experimental.checkpoint.stream import FileStream


def save(folder: Path, state: Mapping[str, Any]) -> Path:
    """Save by plain DCP, without a process group; return the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(dict(state), checkpoint_id=folder)
    return folder


def save_chunks(
    folder: Path, key: str, whole: torch.Tensor, boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Path:
    """Save a tensor as several ranks do: every box an item of one file, even where boxes overlap or leave gaps."""
    folder.mkdir(parents=True)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    chunks = []
    with open(folder / "__0_0.distcp", "wb") as file:
        for offsets, sizes in boxes:
            part = whole
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            begin = file.tell()
            torch.save(part.clone(), file)
            storage[MetadataIndex(key, offsets)] = _StorageInfo("__0_0.distcp", begin, file.tell() - begin)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.size(), chunks)
    write_metadata(folder, Metadata({key: entry}, storage_data=storage))
    return folder


def save_item(folder: Path, key: str, value: object, entry: TensorStorageMetadata | None = None) -> Path:
    """Save one value with nothing asked, as a byte entry, or as the one chunk of a tensor."""
    folder.mkdir(parents=True)
    stream = io.BytesIO()
    torch.save(value, stream)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue())
    info = _StorageInfo("__0_0.distcp", 0, len(stream.getvalue()))
    index = MetadataIndex(key, entry.chunks[0].offsets if entry else None)
    write_metadata(folder, Metadata({key: entry or BytesStorageMetadata()}, storage_data={index: info}))
    return folder


def write_metadata(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def tensor_metadata(folder: Path) -> Metadata:
    """Return the metadata without any of the code under test."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return metadata


def fill_disk(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Let files whose names end so be written to a device that is full."""
    opened = FileStream.__init__

    def on_full_disk(self: Any, path: Path) -> None:
        opened(self, Path("/dev/full") if path.name.endswith(suffix) else path)

    monkeypatch.setattr(FileStream, "__init__", on_full_disk)


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.witness}",)
