# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The data files of one rank: its items are spread over files, each written by a thread of its own.

It does not plan what is written, and splits no items. DCP has threads, too, but loses their errors.

[Note: no copy on the host]
torch.save writes the whole storage of a tensor. One that lies in a part of its storage, as in a flat buffer or in
staged memory, is not copied for that: `_alone` gives its bytes a storage of their own. Tensors of a device go through
pinned memory, in each thread as much as its largest tensor needs.
"""

from __future__ import annotations

import heapq
import io
import math
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ..device import current_stream, finish_stream, host_buffer
from .stream import FileStream, SyncedFiles
from .threads import in_threads

LEAST_FILE_BYTES = 64 << 20
"""There is one file for each so many bytes, up to one for each thread."""


def planned_bytes(items: Iterable[WriteItem]) -> int:
    """Return the bytes of the tensors among `items`; what objects take is not known before they are pickled."""
    tensors = [item.tensor_data for item in items if item.tensor_data is not None]
    return sum(math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize for tensor in tensors)


def split(items: Sequence[WriteItem], num_threads: int) -> list[list[WriteItem]]:
    """Return the items of each file: of about as many bytes, objects in the first file, tensors in their order."""
    num_files = max(1, min(num_threads, planned_bytes(items) // LEAST_FILE_BYTES))
    sizes = [planned_bytes([item]) for item in items]
    heap = [(0, number) for number in range(num_files)]
    number_of: dict[int, int] = {}
    for index in sorted(range(len(items)), key=lambda index: -sizes[index]):
        filled, number = heap[0]
        heapq.heapreplace(heap, (filled + sizes[index], number))
        number_of[index] = number if items[index].tensor_data is not None else 0
    found: list[list[WriteItem]] = [[] for _ in range(num_files)]
    for index in sorted(range(len(items)), key=lambda index: items[index].tensor_data is not None):
        found[number_of[index]].append(items[index])
    return found


def write_items(
    folder: Path, prefix: str, items: Sequence[WriteItem], planner: SavePlanner, files: SyncedFiles, num_threads: int
) -> list[WriteResult]:
    """Write and fsync a rank's items.

    Args:
        folder: where the files are made.
        prefix: of their names.
        items: at least one.
        planner: makes the values, in this thread; one after another where there is one file, else all of them first.
        files: opens the files.
        num_threads: at least 1, and as many files at most.

    Returns:
        Where each item lies.

    Raises:
        OSError: a file cannot be written.
    """
    parts = split(items, num_threads)
    is_over = threading.Event()
    values: list[Iterable[Any]] = [map(planner.resolve_data, part) for part in parts]
    if len(parts) > 1:
        values = [list(part) for part in values]
        _finish_devices([value for part in values for value in part])

    def write(number: int) -> list[WriteResult]:
        name, results = f"{prefix}{number}{DEFAULT_SUFFIX}", []
        memory = _HostMemory(max(planned_bytes([item]) for item in parts[number]))
        try:
            with files.create_stream(folder / name, "wb") as stream:
                for item, value in zip(parts[number], values[number], strict=True):
                    if is_over.is_set():
                        break
                    begin = stream.tell()
                    _write(stream, value, memory)
                    length = stream.tell() - begin
                    results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
        except BaseException:
            is_over.set()  # Nobody will read what other threads would still write.
            raise
        return results

    written = in_threads([partial(write, number) for number in range(len(parts))])
    return [result for results in written for result in results]


class _HostMemory:
    """Host memory of one thread, for one tensor at a time."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._buffer: torch.Tensor | None = None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a device's tensor, until the next call."""
        if self._buffer is None:
            self._buffer = host_buffer(self._num_bytes, tensor.device)
        # On this thread's current stream: waits for it.
        return self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _finish_devices(values: Iterable[Any]) -> None:
    """Wait for this thread's streams, on which values were made: threads have streams of their own."""
    for device in {value.device for value in values if isinstance(value, torch.Tensor)}:
        finish_stream(current_stream(device))


def _write(stream: FileStream, value: Any, memory: _HostMemory) -> None:
    if isinstance(value, io.BytesIO):
        stream.write(value.getbuffer())
        return
    tensor: torch.Tensor = value.detach()
    stream.save(_alone(tensor if tensor.device.type == "cpu" else memory.copy(tensor)))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host with nothing else in its storage; of the same memory where it is contiguous."""
    if tensor.untyped_storage().size() == tensor.nbytes:
        return tensor
    if tensor.numel() == 0 or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    memory = tensor.view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
