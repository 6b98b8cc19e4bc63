# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checks Megatron .bin/.idx pairs before megatron-core reads them, without any collective.

megatron-core finds a missing or cut file on the rank that builds the indices, while the others wait
in a barrier. These checks run on every rank alike and cost one pass over the .idx file; the tokens
in .bin are not read.

Layout of .idx (little-endian): 9 bytes magic, version u64 = 1, dtype code u8, sequences u64,
documents u64 (the number of document boundaries), then per sequence its length i32, per sequence
its byte offset i64, per boundary its sequence index i64, and in multimodal files one mode byte per
sequence.

Worked example, lengths 3, 4, 5 of 2-byte tokens: byte offsets 0, 6, 14, and .bin holds 24 bytes. Boundaries 0, 1, 3 are
two documents, of one sequence and of two.
"""

import os
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import DType

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_INTEGER_CODES = (1, 2, 3, 4, 5, 8)


@dataclass(frozen=True)
class IndexedFiles:
    """A sound pair."""

    prefix: str
    sequence_lengths: npt.NDArray[np.int32]


def check_indexed_files(prefix: str, flag: str) -> IndexedFiles:
    """Check that both files exist, that .idx is whole and that .bin holds what it promises.

    Args:
        prefix: Path without .bin or .idx.
        flag: Where the prefix comes from, for the message.

    Raises:
        FileNotFoundError: One of the two is missing.
        ValueError: .idx is not an index, is cut, or does not describe .bin.
    """
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            raise FileNotFoundError(
                f"Data: expected a file {prefix}{suffix}, got none for {flag}. "
                "Give the path without .bin or .idx, and check that every node sees it."
            )
    header = _read_header(prefix, flag)
    _, _, code, num_sequences, num_boundaries = header
    expected_bytes = _HEADER.size + num_sequences * 12 + num_boundaries * 8
    found_bytes = os.path.getsize(f"{prefix}.idx")
    if found_bytes not in (expected_bytes, expected_bytes + num_sequences):
        _fail(
            prefix,
            ".idx",
            f"{expected_bytes} bytes for {num_sequences} sequences",
            f"{found_bytes} bytes",
            flag,
        )
    body = np.memmap(f"{prefix}.idx", mode="r", dtype=np.uint8, offset=_HEADER.size)
    lengths = body[: num_sequences * 4].view(np.int32)
    offsets = body[num_sequences * 4 : num_sequences * 12].view(np.int64)
    boundaries = body[num_sequences * 12 : num_sequences * 12 + num_boundaries * 8].view(np.int64)
    if lengths.min() < 0:
        _fail(prefix, ".idx", "lengths >= 0", f"length {lengths.min()}", flag)
    _check_boundaries(boundaries, num_sequences, prefix, flag)
    _check_offsets(offsets, lengths, DType.size(int(code)), prefix, flag)
    return IndexedFiles(prefix, np.array(lengths))


def _check_boundaries(boundaries: npt.NDArray[np.int64], num_sequences: int, prefix: str, flag: str) -> None:
    first, last = (boundaries[0], boundaries[-1]) if len(boundaries) else ("none", "none")
    if first != 0:
        _fail(prefix, ".idx", "0 as the first document boundary", f"{first}", flag)
    if last != num_sequences:
        _fail(prefix, ".idx", f"{num_sequences} as the last document boundary", f"{last}", flag)
    # Neighbours are compared, not subtracted: a difference may not fit into 64 bits.
    falls = np.flatnonzero(boundaries[1:] < boundaries[:-1])
    if len(falls):
        before, after = boundaries[falls[0] : falls[0] + 2]
        _fail(prefix, ".idx", "document boundaries that never fall", f"{after} after {before}", flag)


def _check_offsets(
    offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32], item_bytes: int, prefix: str, flag: str
) -> None:
    """Compare with the file size first: then no offset up to the end can exceed 64 bits."""
    total_bytes = int(lengths.sum(dtype=np.int64)) * item_bytes
    found_bytes = os.path.getsize(f"{prefix}.bin")
    if found_bytes != total_bytes:
        _fail(prefix, ".bin", f"{total_bytes} bytes for the sequences in .idx", f"{found_bytes} bytes", flag)
    expected = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=expected[1:])
    expected *= item_bytes
    moved = np.flatnonzero(offsets != expected)
    if len(moved):
        index = moved[0]
        _fail(prefix, ".idx", f"byte offset {expected[index]} of sequence {index}", f"{offsets[index]}", flag)


def _read_header(prefix: str, flag: str) -> tuple[bytes, int, int, int, int]:
    with open(f"{prefix}.idx", "rb") as stream:
        words = stream.read(_HEADER.size)
    if words[:9] != _MAGIC:
        _fail(prefix, ".idx", f"an index that starts with {_MAGIC!r}", repr(words[:9]), flag)
    if len(words) < _HEADER.size:
        _fail(prefix, ".idx", f"a header of {_HEADER.size} bytes", f"{len(words)} bytes", flag)
    header: tuple[bytes, int, int, int, int] = _HEADER.unpack(words)
    if header[1] != 1:
        _fail(prefix, ".idx", "version 1", f"version {header[1]}", flag)
    if header[2] not in _INTEGER_CODES:
        _fail(prefix, ".idx", f"an integer dtype code {_INTEGER_CODES}", f"code {header[2]}", flag)
    if header[3] == 0:
        _fail(prefix, ".idx", "at least one sequence", "none", flag)
    return header


def _fail(prefix: str, suffix: str, expected: str, found: str, flag: str) -> None:
    raise ValueError(
        f"Data: expected {expected}, got {found} in {prefix}{suffix} for {flag}. "
        "The file is damaged or belongs to another: build or copy the pair again."
    )
