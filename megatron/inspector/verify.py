# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt verify``: whether a checkpoint is whole. Mends nothing.

With a manifest every byte is checked. Without one, ``.metadata`` tells what has to be there, and the checksums
inside torch's archives find changed bytes of tensors and byte entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron.core.distributed.fsdp.experimental.checkpoint.boxes import numel, overlap
from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint.folder import read_manifest, verify_files
from megatron.core.distributed.fsdp.experimental.checkpoint.reader import check_chunk, chunk_box, open_item
from megatron.inspector.opened import Checkpoint, latest_in
from megatron.inspector.text import Bar, progress, safe

# What Megatron-Core writes beside DCP's files.
_OTHER_FILES = {".metadata", "manifest.json", "common.pt", "metadata.json"}


def verify(folder: Path, *, checksums: bool) -> int:
    """Print what is wrong with a checkpoint; return 0 when nothing is, else 1."""
    folder = latest_in(folder)
    problems = find_problems(folder, checksums=checksums)
    for problem in problems:
        print(safe(problem))
    kind = "sizes and contents" if checksums else "sizes"
    number = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    print(f"{folder}: {number if problems else f'whole, by {kind}'}")
    return int(bool(problems))


def find_problems(folder: Path, *, checksums: bool) -> list[str]:
    """Return what is wrong with a checkpoint, one line each.

    Args:
        folder: the checkpoint's.
        checksums: read every byte.
    """
    files = [path for path in folder.iterdir() if path.is_file()]
    with progress(sum(path.stat().st_size for path in files), "verified") as bar:
        problems = verify_files(folder, checksums=checksums, progress=bar.update)
        try:
            has_manifest = read_manifest(folder) is not None
            checkpoint = Checkpoint(folder)
        except CheckpointError as error:
            return problems or [str(error)]
        if not has_manifest:
            problems += _strays(checkpoint)
        for key in [*checkpoint.tensors, *checkpoint.entries]:
            problems += _key_problems(checkpoint, key, checksums=checksums and not has_manifest, bar=bar)
    return list(dict.fromkeys(problems))


def _strays(checkpoint: Checkpoint) -> list[str]:
    known = {*_OTHER_FILES, *(info.relative_path for info in checkpoint.metadata.storage_data.values())}
    paths = sorted(path for path in checkpoint.folder.rglob("*") if path.is_file())
    return [
        f"{path}: expected only files that .metadata names, got this one besides"
        for path in paths
        if str(path.relative_to(checkpoint.folder)) not in known
    ]


def _key_problems(checkpoint: Checkpoint, key: str, *, checksums: bool, bar: Bar) -> Iterator[str]:
    entry = checkpoint.tensors.get(key)
    if entry is not None:
        yield from _box_problems(key, entry)
    chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes] if entry else [None]
    for chunk in chunks:
        index = MetadataIndex(key, chunk.offsets if chunk else None)
        try:
            with open_item(checkpoint.folder, checkpoint.metadata, index) as item:
                if checksums:
                    for name in item.damaged_records():
                        yield f"{item.where}: expected the checksum in its archive, got another for {name}"
                    bar.update(item.length)
                if entry and chunk:
                    check_chunk(item, key, entry, chunk)
                else:
                    item.load()
        except CheckpointError as error:
            yield str(error)


def _box_problems(key: str, entry: TensorStorageMetadata) -> Iterator[str]:
    boxes = [chunk_box(chunk) for chunk in entry.chunks]
    clash = overlap(boxes)
    if clash:
        yield f"{key}: expected chunks that do not overlap, got those at {clash[0].offsets} and {clash[1].offsets}"
    stored, whole = sum(numel(box) for box in boxes), math.prod(entry.size)
    if stored != whole:
        yield f"{key}: expected chunks of {whole} elements together, got {stored}"
