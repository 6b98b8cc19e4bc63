# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FileStream` and `SyncedFiles`: files that are on the disk once they count as written, with size and checksum.

They do not know what is written.

[Note: one checksum a byte]
torch.save writes a zip archive, which holds a CRC-32 of each record, in a data descriptor after the record's bytes. The
manifest wants the CRC-32 of the whole file. Computing it again costs as much as a third of writing to memory; but the
checksum of two strings in a row follows from theirs and the length of the second (`combine_crc32`). So a large record
is taken from its descriptor. Where none of that size follows, its bytes are read again from the file.
"""

from __future__ import annotations

import functools
import io
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from .folder import step
from .manifest import FileRecord

RECORD_BYTES = 256 << 10
"""Records at least as large have their checksum taken from the archive."""

_BUFFER_BYTES = 1 << 20
_BLOCK_BYTES = 4 << 20
_CRC_POLYNOMIAL = 0xEDB88320
_DESCRIPTORS = (struct.Struct("<4sIII"), struct.Struct("<4sIQQ"))
"""What follows a record of an archive: signature, CRC-32, compressed and plain size, the sizes in 4 or 8 bytes."""


def combine_crc32(first: int, second: int, num_bytes: int) -> int:
    """Return the CRC-32 of two strings in a row from that of each and the length of the second.

    A checksum is a polynomial over bits, and n bytes more multiply it by x to the power of 8n: with 0x9E83486D of "ab"
    and 0x06B9DF6F of "c", 1 byte, it is 0x352441C2, that of "abc".
    """
    return _multiply(first, _power_of_x(8 * num_bytes)) ^ second


@functools.lru_cache(maxsize=256)
def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30  # The highest bit is the constant term: 1, and x.
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(one: int, other: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_CRC_POLYNOMIAL if other & 1 else 0)
    return product


class FileStream(io.RawIOBase):
    """A file that is being written, its size and checksum so far, and its first error."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", _BUFFER_BYTES)
        self._size = 0
        self._checksum = 0
        self._pending_bytes = 0  # the last so many have no checksum yet
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, with their checksum."""
        self._write(memoryview(data), is_record=False)
        return memoryview(data).nbytes

    def save(self, tensor: torch.Tensor) -> None:
        """Write a tensor as torch.save does."""
        archive: Any = _Archive(self)
        torch.save(tensor, archive)

    def record(self) -> FileRecord:
        """Return the size and checksum of what has been written."""
        if self._pending_bytes:
            self._take_pending(None)
        return FileRecord(self._size, f"{self._checksum:08x}")

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._size

    def flush(self) -> None:
        """Bring what was written to the system."""
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        """Bring what was written to the disk and close the file, once."""
        if self._file.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, view: memoryview, *, is_record: bool) -> None:
        """Write bytes; `is_record` says that they may be a record of an archive."""
        try:
            self._file.write(view)
            if self._pending_bytes:
                self._take_pending(view)
        except OSError as error:
            self.error = self.error or error
            raise
        self._size += view.nbytes
        if is_record and view.nbytes >= RECORD_BYTES and torch.serialization.get_crc32_options():
            self._pending_bytes = view.nbytes
        else:
            self._checksum = zlib.crc32(view, self._checksum)

    def _take_pending(self, descriptor: memoryview | None) -> None:
        """Add the last record to the checksum; `descriptor` is what follows it."""
        count, self._pending_bytes = self._pending_bytes, 0
        for form in _DESCRIPTORS:
            if descriptor is not None and descriptor.nbytes == form.size:
                signature, checksum, *sizes = form.unpack(descriptor)
                if signature == b"PK\7\x08" and sizes == [count, count] and torch.serialization.get_crc32_options():
                    self._checksum = combine_crc32(self._checksum, checksum, count)
                    return
        self._file.flush()
        for begin in range(self._size - count, self._size, _BLOCK_BYTES):
            block = os.pread(self._file.fileno(), min(_BLOCK_BYTES, self._size - begin), begin)
            self._checksum = zlib.crc32(block, self._checksum)


class _Archive:
    """What torch.save writes one archive to."""

    def __init__(self, stream: FileStream) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._stream._write(view, is_record=True)
        return view.nbytes

    def flush(self) -> None:
        """Leave it in the buffer: more archives follow."""


class SyncedFiles(FileSystem):
    """DCP's access to files: each is synced before it counts as written, and then has a record. Any thread may write.

    Attributes:
        records: of each file that has been written, by name.
        error: the first error of any file.
    """

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a new file for writing; after the block it is on the disk."""
        assert mode == "wb", "a writer only writes"
        stream = FileStream(Path(path))
        try:
            step("file_opened")
            yield stream
            record = stream.record()
        finally:
            self.error = self.error or stream.error
            stream.close()
        self.records[Path(path).name] = record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and its record."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)
