# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""One saved item inside a ``.distcp`` file: where its elements lie, and boxes of them read without the rest.

An item is a zip archive by torch.save at some offset of the file. A plain tensor's elements lie in it uncompressed and
in order, so a box of them is read by its runs; anything else (quantised, strided, compressed, big-endian) is loaded
whole by torch. Does not know keys, chunks or metadata.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from ..layout import Box
from .errors import CheckpointError
from .opcodes import check_opcodes
from .unpickle import load_torch_file

BLOCK_BYTES = 8 << 20
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = min(max(0, at), self._length)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view[: max(0, self._length - self._at)])
        self._at += count
        return int(count)


@dataclass(frozen=True)
class _Plain:
    """A contiguous tensor's place: where its elements begin in the file, their dtype, and its shape."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Described:
    """What a pickled tensor says of itself: the name of its record, and its place in it in elements."""

    record: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _NotPlainError(Exception):
    """The item is not a plain tensor: torch has to load it whole."""


class _Rebuild:
    """Stands for torch's functions that rebuild a tensor; has no attributes that a pickle could set."""

    __slots__ = ()

    def __call__(self, storage: tuple[str, Any], offset: int, shape: Any, stride: Any, *rest: Any) -> _Described:
        if not all(type(number) is int and number >= 0 for number in (offset, *shape, *stride)):
            raise _NotPlainError
        # rest: requires_grad, hooks, then for version 3 a dtype, then flags such as "conjugated".
        dtypes = [value for value in (storage[1], *rest[2:]) if isinstance(value, torch.dtype)]
        if len(dtypes) != 1 or any(value for value in rest[2:] if not isinstance(value, torch.dtype)):
            raise _NotPlainError
        return _Described(storage[0], dtypes[0], offset, tuple(shape), tuple(stride))


class _TensorUnpickler(pickle.Unpickler):
    _found = {
        ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
        ("torch._utils", "_rebuild_tensor_v3"): _Rebuild(),
        ("collections", "OrderedDict"): OrderedDict,
        ("torch.storage", "UntypedStorage"): "untyped",
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
        **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._found:
            raise _NotPlainError
        return self._found[module, name]

    def persistent_load(self, pid: Any) -> tuple[str, Any]:
        _, kind, key, *_ = pid
        return f"data/{key}", kind


class Item:
    """One item of an open file, ``[offset, offset + length)``; read from one thread at a time.

    Args:
        file: the open file.
        offset: the item's first byte.
        length: the item's bytes.
        where: names the key and the file in errors.

    Attributes:
        length: its bytes.
        where: as given.
    """

    def __init__(self, file: BufferedReader, offset: int, length: int, where: str) -> None:
        self._file = file
        self._slice = _Slice(file, offset, length)
        self._offset = offset
        self.where = where
        self._whole: torch.Tensor | None = None
        self._described: _Plain | None = None
        size = file.seek(0, io.SEEK_END)
        if size < offset + length:
            raise CheckpointError(
                f"{where}: expected at least {offset + length} bytes, got {size}: the file is truncated. "
                "Restore it, or load an earlier checkpoint."
            )
        self.length = length

    def load(self) -> Any:
        """Return the whole item, as torch.load(weights_only=True) does."""
        self._slice.seek(0)
        return load_torch_file(io.BytesIO(self._slice.read(self.length) or b""), self.where)

    def is_plain(self) -> bool:
        """Say whether boxes of it are read without the rest."""
        return self._find() is not None

    def describe(self) -> _Plain:
        """Return the saved tensor's dtype and shape, and where it begins if it can be read in parts (else -1)."""
        if self._described is None:
            self._described = self._find() or self._load_whole()
        return self._described

    def _load_whole(self) -> _Plain:
        if self._whole is None:
            value = self.load()
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{self.where}: expected a tensor, got {type(value).__name__}. The metadata and the file do not "
                    "belong together: restore both."
                )
            self._whole = value
        return _Plain(-1, self._whole.dtype, tuple(self._whole.shape))

    def read(self, box: Box, target: torch.Tensor, shape: Sequence[int]) -> None:
        """Copy a box of the saved tensor, seen in another shape of as many elements, into a tensor of the box's sizes.

        Memory: one block of ``BLOCK_BYTES``, for a plain tensor; else the item.
        """
        plain = self.describe()
        if plain.begin < 0:
            assert self._whole is not None  # describe has loaded it
            part = self._whole.reshape(tuple(shape))
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            target.copy_(part)
            return
        self._read_rows(target, tuple(shape), box.offsets, plain.begin, plain.dtype)

    def damaged_records(self) -> Iterator[str]:
        """Yield the names of the archive's records whose checksum does not fit, where the archive has checksums."""
        with self._archive() as archive:
            infos = archive.infolist()
            if not any(info.CRC for info in infos):
                return
            for info in infos:
                begin, crc = self._record_begin(info), 0
                for at in range(0, info.compress_size, BLOCK_BYTES):
                    crc = zlib.crc32(
                        self._bytes(begin + at, min(BLOCK_BYTES, info.compress_size - at)).numpy().data, crc
                    )
                if info.compress_type == zipfile.ZIP_STORED and crc != info.CRC:
                    yield info.filename

    def _archive(self) -> zipfile.ZipFile:
        self._slice.seek(0)
        try:
            return zipfile.ZipFile(self._slice)
        except Exception as error:  # damaged archives raise anything
            raise CheckpointError(
                f"{self.where}: expected a zip archive by torch.save, got what cannot be opened ({error}). "
                "The file is damaged: restore it, or load an earlier checkpoint."
            ) from error

    def _find(self) -> _Plain | None:
        with self._archive() as archive:
            names = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1 or sys.byteorder != "little":
                return None
            prefix = pickles[0].removesuffix("data.pkl")
            try:
                order = self._record(names[prefix + "byteorder"]) if prefix + "byteorder" in names else b"little"
                pickled = self._record(names[pickles[0]])
                check_opcodes(pickled)
                saved = _TensorUnpickler(io.BytesIO(pickled)).load()
            except CheckpointError:
                raise
            except Exception:  # whatever it is, torch's own loader decides, and says what is wrong with it
                return None
            if order != b"little" or not isinstance(saved, _Described) or not _is_contiguous(saved):
                return None
            record = names.get(prefix + saved.record)
            if record is None or record.compress_type != zipfile.ZIP_STORED:
                return None
            if (saved.offset + math.prod(saved.shape)) * saved.dtype.itemsize > record.file_size:
                raise CheckpointError(
                    f"{self.where}: expected {math.prod(saved.shape)} elements of {saved.dtype}, got a record of "
                    f"{record.file_size} bytes. The file is damaged: restore it, or load an earlier checkpoint."
                )
            return _Plain(self._record_begin(record) + saved.offset * saved.dtype.itemsize, saved.dtype, saved.shape)

    def _record(self, info: zipfile.ZipInfo) -> bytes:
        return self._bytes(self._record_begin(info), info.compress_size).numpy().tobytes()

    def _record_begin(self, info: zipfile.ZipInfo) -> int:
        """Return where a record's bytes begin in the file: after its own header, whose padding only it knows."""
        header = self._bytes(self._offset + info.header_offset, _LOCAL_HEADER.size).numpy().tobytes()
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        begin: int = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if signature != b"PK\3\4" or begin + info.compress_size > self.length:
            raise CheckpointError(
                f"{self.where}: expected record {info.filename} within the archive, got a damaged header. "
                "Restore the file, or load an earlier checkpoint."
            )
        return self._offset + begin

    def _bytes(self, begin: int, count: int) -> torch.Tensor:
        buffer = torch.empty(count, dtype=torch.uint8)
        self._fill(buffer, begin)
        return buffer

    def _fill(self, buffer: torch.Tensor, begin: int) -> None:
        """Read the file from ``begin`` into a contiguous [n] uint8 tensor."""
        end, count = self._offset + self.length, 0
        if self._offset <= begin <= end:  # damaged archives lead anywhere
            self._file.seek(begin)
            count = self._file.readinto(buffer.numpy().data[: end - begin])
        if count != buffer.numel():
            raise CheckpointError(
                f"{self.where}: expected {buffer.numel()} bytes at {begin}, got {count}: the file is truncated. "
                "Restore it, or load an earlier checkpoint."
            )

    def _read_rows(
        self, target: torch.Tensor, shape: tuple[int, ...], offsets: Sequence[int], begin: int, dtype: torch.dtype
    ) -> None:
        """Read the box at ``offsets`` of a tensor that begins at byte ``begin`` into ``target``, in blocks of rows."""
        if target.numel() == 0:
            return
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        first = begin + (offsets[0] * row_bytes if shape else 0)
        if tuple(target.shape[1:]) == shape[1:] and _takes_bytes(target, dtype):
            self._fill(target.detach().reshape(-1).view(torch.uint8), first)
            return
        if not shape:
            target.copy_(self._bytes(first, dtype.itemsize).view(dtype).reshape(()))
            return
        if row_bytes > BLOCK_BYTES and len(shape) > 1:
            for index in range(target.shape[0]):
                self._read_rows(target[index], shape[1:], offsets[1:], first + index * row_bytes, dtype)
            return
        count = max(1, BLOCK_BYTES // row_bytes)
        for row in range(0, target.shape[0], count):
            rows = min(count, target.shape[0] - row)
            block = self._bytes(first + row * row_bytes, rows * row_bytes).view(dtype).view(rows, *shape[1:])
            for dim in range(1, len(shape)):
                block = block.narrow(dim, offsets[dim], target.shape[dim])
            target[row : row + rows].copy_(block)


def open_file(path: Path, where: str) -> BufferedReader:
    """Open a checkpoint's file to read; errors name the key and the file."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise CheckpointError(
            f"{where}: expected a readable file, got {error.strerror or error}. "
            "Restore the file, or load an earlier checkpoint."
        ) from error


def _is_contiguous(saved: _Described) -> bool:
    expected = [math.prod(saved.shape[dim + 1 :]) for dim in range(len(saved.shape))]
    sizes = zip(saved.shape, saved.stride, expected, strict=True)
    return 0 in saved.shape or all(size == 1 or stride == wanted for size, stride, wanted in sizes)


def _takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Say whether a tensor's memory can be read into as it is."""
    return type(target) in (torch.Tensor, torch.nn.Parameter) and (
        target.dtype == dtype
        and target.device.type == "cpu"
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
    )
