# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files piece by piece; knows neither checkpoints nor models.

The ``safetensors`` package writes tensors that are in memory as a whole. The format is small enough to write as its
elements come: the header's length in 8 bytes, the header in JSON, the elements of all tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError

EXPORT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


class Source(Protocol):
    """A tensor to write."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype in the file."""

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield its elements in row-major order, in tensors of any shape and of its dtype."""


@dataclass(frozen=True)
class Shard:
    """One file of several: its name, and the names of its tensors."""

    file: str
    names: list[str]


def source_bytes(source: Source) -> int:
    """Return the bytes that a tensor takes in a file."""
    return math.prod(source.shape) * source.dtype.itemsize


def plan_shards(sources: Mapping[str, Source], max_bytes: int) -> list[Shard]:
    """Fill files in the order of the tensors; a file holds more than ``max_bytes`` only if it is of one tensor."""
    groups: list[list[str]] = []
    filled = 0
    for name, source in sources.items():
        size = source_bytes(source)
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return [Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def write_file(path: Path, sources: Mapping[str, Source], names: Sequence[str]) -> Iterator[int]:
    """Write a file; yields the number of bytes of each piece.

    Raises:
        CheckpointError: a dtype that the format does not have.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        source = sources[name]
        if source.dtype not in _NAMES:
            raise CheckpointError(
                f"{name}: expected a dtype that safetensors has, got {source.dtype}. Choose one by --dtype."
            )
        begin, end = end, end + source_bytes(source)
        header[name] = {"dtype": _NAMES[source.dtype], "shape": list(source.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            for piece in sources[name].pieces():
                file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                yield piece.nbytes
    assert path.stat().st_size == 8 + len(text) + end  # else a source gave more or less than its shape
