# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt list`` and ``show``: the keys of a checkpoint, and one of them. Both read only what they print."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron.inspector.opened import Checkpoint, tensor_bytes
from megatron.inspector.text import bytes_text, dtype_text, progress, safe, table
from megatron.inspector.values import lines

_MAX_LINES = 200
_BLOCK_NUMEL = 1 << 20


def list_keys(folder: Path, *, as_json: bool) -> int:
    """Print every key with its shape, dtype, bytes and chunks, and totals."""
    checkpoint = Checkpoint(folder)
    tensors = {key: _described(entry) for key, entry in checkpoint.tensors.items()}
    entries = {key: {"bytes": checkpoint.stored_bytes(key)} for key in checkpoint.entries}
    totals = {
        "tensors": len(tensors),
        "elements": sum(math.prod(entry.size) for entry in checkpoint.tensors.values()),
        "tensor_bytes": sum(tensor_bytes(entry) for entry in checkpoint.tensors.values()),
        "byte_entries": len(entries),
        "byte_entry_bytes": sum(entry["bytes"] for entry in entries.values()),
    }
    if as_json:
        content = {"folder": str(checkpoint.folder), "tensors": tensors, "byte_entries": entries, "totals": totals}
        print(json.dumps(content, indent=1))
        return 0
    rows = [
        (
            safe(key),
            str(tuple(entry.size)),
            dtype_text(entry.properties.dtype),
            bytes_text(tensor_bytes(entry)),
            str(len(entry.chunks)),
        )
        for key, entry in checkpoint.tensors.items()
    ]
    rows += [(safe(key), "", "bytes", bytes_text(entry["bytes"]), "") for key, entry in entries.items()]
    print(table(("key", "shape", "dtype", "size", "chunks"), rows, right=(3, 4)))
    print(
        f"{totals['tensors']} tensors: {totals['elements']:,} elements, {bytes_text(totals['tensor_bytes'])}; "
        f"{totals['byte_entries']} byte entries: {bytes_text(totals['byte_entry_bytes'])}"
    )
    return 0


def _described(entry: TensorStorageMetadata) -> dict[str, object]:
    return {
        "shape": list(entry.size),
        "dtype": dtype_text(entry.properties.dtype),
        "bytes": tensor_bytes(entry),
        "chunks": len(entry.chunks),
    }


def show_key(folder: Path, key: str, *, max_memory: int, num_first: int) -> int:
    """Print one tensor's shape, chunks and statistics, or a byte entry's value."""
    checkpoint = Checkpoint(folder, max_memory)
    if key not in checkpoint.tensors:
        value = checkpoint.entry(key)  # which says that there is no such key
        print(
            f"{safe(key)}: {type(value).__module__}.{type(value).__qualname__}, byte entry of "
            f"{bytes_text(checkpoint.stored_bytes(key))}"
        )
        print("\n".join(f"  {line}" for line in lines(value, _MAX_LINES)))
        return 0
    entry = checkpoint.tensors[key]
    print(f"{safe(key)}: {tuple(entry.size)} {dtype_text(entry.properties.dtype)}, {bytes_text(tensor_bytes(entry))}")
    rows = []
    for chunk in entry.chunks[:_MAX_LINES]:
        info = checkpoint.metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        place = f"{safe(info.relative_path)} at {info.offset}" if info else "not stored"
        rows.append((str(tuple(chunk.offsets)), str(tuple(chunk.sizes)), place))
    print(table(("chunk at", "sizes", "stored in"), rows))
    if len(entry.chunks) > _MAX_LINES:
        print(f"… and {len(entry.chunks) - _MAX_LINES} more chunks")
    statistics = _measure(checkpoint, key, num_first)
    extremes = "none" if statistics.low is None else f"{statistics.low:.9g} / {statistics.high:.9g}"
    print(f"L2 norm {math.sqrt(statistics.squares):.9g}, min / max {extremes}, not finite {statistics.num_not_finite}")
    print(f"first values: {', '.join(statistics.first)}")
    return 0


@dataclass
class _Statistics:
    """Of the finite elements: sum of squares, extremes (None for none, and for complex ones); and the first few."""

    squares: float
    low: float | None
    high: float | None
    num_not_finite: int
    first: list[str]


def _measure(checkpoint: Checkpoint, key: str, num_first: int) -> _Statistics:
    found = _Statistics(0.0, None, None, 0, [])
    with progress(tensor_bytes(checkpoint.tensors[key]), key) as bar:
        for box in checkpoint.slab_boxes(key):
            slab = checkpoint.read(key, box).reshape(-1)
            found.first += [_number(value) for value in _wide(slab[: num_first - len(found.first)]).tolist()]
            for block in torch.split(slab, _BLOCK_NUMEL):
                _add(found, _wide(block))
            bar.update(slab.nbytes)
    return found


def _add(found: _Statistics, block: torch.Tensor) -> None:
    finite = block[torch.isfinite(block)]
    found.num_not_finite += block.numel() - finite.numel()
    if finite.numel() == 0:
        return
    found.squares += float(finite.abs().to(torch.float64).square().sum())
    if not finite.is_complex():
        low, high = float(finite.min()), float(finite.max())
        found.low = low if found.low is None else min(found.low, low)
        found.high = high if found.high is None else max(found.high, high)


def _number(value: complex) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _wide(block: torch.Tensor) -> torch.Tensor:
    """Return values in a dtype that all arithmetic knows; small floats are not on the CPU's list."""
    if block.is_complex():
        return block.to(torch.complex128)
    return block.to(torch.float64) if block.is_floating_point() else block.to(torch.int64)
