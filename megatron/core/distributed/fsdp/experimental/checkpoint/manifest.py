# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint, and the check of its files against it.

One process, the standard library only. It writes nothing.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError

METADATA = ".metadata"
MANIFEST = "manifest.json"

FORMAT = "mfsdp-checkpoint"
"""Of checkpoints with a manifest; their `.metadata` says so, too, as `storage_meta.checkpoint_id`."""

_VERSION = 1
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file.

    Attributes:
        size: in bytes.
        crc32: of its bytes, 8 hexadecimal digits.
    """

    size: int
    crc32: str


def manifest_text(records: Mapping[str, FileRecord]) -> str:
    """Return what `manifest.json` holds for these files; it does not list itself, but has a checksum of the list."""
    files = {name: {"size": record.size, "crc32": record.crc32} for name, record in sorted(records.items())}
    checksum = f"{zlib.crc32(json.dumps(files).encode()):08x}"
    return json.dumps({"format": FORMAT, "version": _VERSION, "files": files, "files_crc32": checksum}, indent=1)


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """Return the manifest of a checkpoint, or None where its writer makes none.

    Raises:
        CheckpointError: there is one that cannot be read or is damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable manifest, got {error.strerror}. Mend the file.") from error
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r}")
        records = {_plain(name): _record(entry) for name, entry in content["files"].items()}
        if manifest_text(records).encode() != text:
            raise ValueError("other text than was written")
        return records
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected a manifest of format {FORMAT} version {_VERSION}, got {type(error).__name__}: {error}. "
            "The file is damaged or of a newer version: load another checkpoint."
        ) from error


def verify_files(
    folder: Path,
    *,
    checksums: bool,
    only: Iterable[str] | None = None,
    least_sizes: Mapping[str, int] | None = None,
    needs_manifest: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Compare the files of a checkpoint with its manifest.

    Args:
        folder: of the checkpoint.
        checksums: read every byte; otherwise sizes only.
        only: names of the files to look at; default all, and that there are no others.
        least_sizes: bytes that each file must have at least, from `.metadata`; what there is without a manifest.
        needs_manifest: a manifest that is missing is a problem, since `.metadata` says that there was one.
        progress: called with the number of bytes read, for each block.

    Returns:
        The problems, one line each, sorted by file; empty when all is well.
    """
    if not folder.is_dir():
        return [f"{folder}: expected the folder of a checkpoint, got none"]
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    if manifest is None and needs_manifest:
        return [f"{folder / MANIFEST}: expected a manifest, got no file"]
    records = manifest or {}
    least = {METADATA: 1, **(least_sizes or {})}
    names = sorted({*records, *least})
    if only is not None:
        wanted = set(only)
        names = [name for name in names if name in wanted]
    problems = []
    for name in names:
        problem = _size_problem(folder / name, records.get(name), least.get(name, 0))
        if problem is None and manifest is not None and name not in records:
            problem = f"{folder / name}: expected it in {MANIFEST}, got no such entry"
        if problem is None and checksums and name in records:
            problem = _checksum_problem(folder / name, records[name], progress)
        problems += [problem] if problem else []
    if manifest is not None and only is None:
        others = sorted(path for path in folder.iterdir() if path.name not in {*names, MANIFEST})
        problems += [f"{path}: expected only the files of {MANIFEST}, got this one besides" for path in others]
    return problems


def checksum_file(path: Path, progress: Callable[[int], None] | None = None) -> FileRecord:
    """Read a file in blocks and return its size and checksum.

    Raises:
        OSError: it cannot be read.
    """
    size = checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
            if progress is not None:
                progress(len(block))
    return FileRecord(size, f"{checksum:08x}")


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"file name {name!r}")
    return name


def _record(entry: Mapping[str, object]) -> FileRecord:
    size, checksum = entry["size"], entry["crc32"]
    if type(size) is not int or size < 0 or not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{8}", checksum):
        raise ValueError(f"size {size!r}, crc32 {checksum!r}")
    return FileRecord(size, checksum)


def _size_problem(path: Path, record: FileRecord | None, least: int) -> str | None:
    expected = f"a file of {record.size} bytes" if record else f"a file of at least {least} bytes"
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        return f"{path}: expected {expected}, got {error.strerror}"
    if size is None:
        return f"{path}: expected {expected}, got {'something else' if path.exists() else 'no file'}"
    is_right = size >= least and (record is None or size == record.size)
    return None if is_right else f"{path}: expected {expected}, got {size} bytes"


def _checksum_problem(path: Path, record: FileRecord, progress: Callable[[int], None] | None) -> str | None:
    try:
        found = checksum_file(path, progress)
    except OSError as error:
        return f"{path}: expected a readable file, got {error.strerror}"
    return None if found == record else f"{path}: expected crc32 {record.crc32}, got {found.crc32}"
