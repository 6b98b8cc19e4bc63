# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A stream's size and checksum are those of its file, however the checksum was found."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.experimental.checkpoint import stream
from megatron.core.distributed.fsdp.experimental.checkpoint.manifest import checksum_file
from megatron.core.distributed.fsdp.experimental.checkpoint.stream import FileStream, combine_crc32

_LARGE = stream.RECORD_BYTES


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what the stream has summed up itself."""
    lengths: list[int] = []

    def count(data: Any, checksum: int) -> int:
        lengths.append(memoryview(data).nbytes)
        return zlib.crc32(data, checksum)

    monkeypatch.setattr(stream, "zlib", type("zlib", (), {"crc32": staticmethod(count)}))
    return lengths


@pytest.fixture
def without_crc32() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def _assert_is_of_file(written: FileStream, path: Path) -> None:
    record = written.record()
    written.close()
    assert record == checksum_file(path)


def test_checksums_combine() -> None:
    assert (zlib.crc32(b"ab"), zlib.crc32(b"c"), zlib.crc32(b"abc")) == (0x9E83486D, 0x06B9DF6F, 0x352441C2)
    assert combine_crc32(0x9E83486D, 0x06B9DF6F, 1) == 0x352441C2
    draw = random.Random(0)
    for length in (0, 1, 7, 64, 255, 1 << 10, (1 << 16) + 3, 3_000_001):
        first, second = draw.randbytes(draw.randrange(100)), draw.randbytes(length)
        assert combine_crc32(zlib.crc32(first), zlib.crc32(second), length) == zlib.crc32(first + second)


def test_the_checksum_of_a_large_tensor_is_that_of_its_archive(tmp_path: Path, summed: list[int]) -> None:
    written = FileStream(tmp_path / "f")
    written.write(b"before")
    for numel in (_LARGE // 4, 3, _LARGE // 4 + 5):
        written.save(torch.randn(numel))
    written.write(b"x" * (_LARGE + 1))  # no archive's: summed up
    assert max(summed) == _LARGE + 1 and sum(length > 1000 for length in summed) == 1
    _assert_is_of_file(written, tmp_path / "f")


@pytest.mark.usefixtures("without_crc32")
def test_archives_without_checksums_are_summed_up(tmp_path: Path, summed: list[int]) -> None:
    written = FileStream(tmp_path / "f")
    written.save(torch.randn(_LARGE // 4))
    assert max(summed) == _LARGE
    _assert_is_of_file(written, tmp_path / "f")


_RECORD = random.Random(1).randbytes(_LARGE)


@pytest.mark.parametrize("form", ["<4sIII", "<4sIQQ"])
def test_descriptors_of_both_forms_are_taken(form: str, tmp_path: Path, summed: list[int]) -> None:
    written = FileStream(tmp_path / "f")
    archive = stream._Archive(written)
    archive.write(_RECORD)
    archive.write(struct.pack(form, b"PK\7\x08", zlib.crc32(_RECORD), _LARGE, _LARGE))
    assert summed == [struct.calcsize(form)]
    _assert_is_of_file(written, tmp_path / "f")


@pytest.mark.parametrize(
    "after",
    [
        None,
        b"",
        b"something else",
        b"x" * 16,
        struct.pack("<4sIII", b"PK\7\x08", 1, _LARGE, _LARGE - 1),
        struct.pack("<4sIII", b"PK\7\x09", 1, _LARGE, _LARGE),
        _RECORD,
    ],
    ids=["end", "nothing", "other length", "other bytes", "other size", "other signature", "a record"],
)
def test_what_no_descriptor_follows_is_read_again(after: bytes | None, tmp_path: Path, summed: list[int]) -> None:
    written = FileStream(tmp_path / "f")
    archive = stream._Archive(written)
    archive.write(b"head")
    archive.write(_RECORD)
    if after is not None:
        archive.write(after)
    record = written.record()
    assert sum(summed) == written.tell() == record.size
    _assert_is_of_file(written, tmp_path / "f")
