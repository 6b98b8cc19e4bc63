# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Where the storage of buffers comes from, and how much of it there is.

It decides neither when storage is needed nor on which stream: the caller allocates and releases on the buffer's home
stream, and the device allocator returns the memory to that stream.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch


class StorageAllocator(Protocol):
    """Gives a flat tensor its storage and takes it back, without changing the tensor or its views."""

    def allocate(self, tensor: torch.Tensor) -> None:
        """Back `tensor` with storage of undefined contents."""
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Take the storage back; `tensor` and its views must not be read until the next `allocate`."""
        ...


class ResizingAllocator:
    """Takes storage from the device allocator at each use, by resizing the tensor's own storage.

    The Storage object survives, so views made once, autograd's saved views included, see the refilled memory.

    Attributes:
        allocated_bytes: storage of all buffers that are alive now.
        peak_bytes: the largest `allocated_bytes` since `reset_peak`.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def allocate(self, tensor: torch.Tensor) -> None:
        """Back `tensor` with storage of undefined contents."""
        num_bytes = tensor.numel() * tensor.element_size()
        tensor.untyped_storage().resize_(num_bytes)
        self._count(tensor, num_bytes)

    def release(self, tensor: torch.Tensor) -> None:
        """Free the storage."""
        tensor.untyped_storage().resize_(0)
        self._count(tensor, 0)

    def reset_peak(self) -> None:
        """Let `peak_bytes` start again at what is allocated now."""
        self.peak_bytes = self.allocated_bytes

    def _count(self, tensor: torch.Tensor, num_bytes: int) -> None:
        key = id(tensor)
        if key not in self._sizes:
            weakref.finalize(tensor, self._forget, key).atexit = False
        self.allocated_bytes += num_bytes - self._sizes.get(key, 0)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self._sizes[key] = num_bytes

    def _forget(self, key: int) -> None:
        self.allocated_bytes -= self._sizes.pop(key)


default_allocator = ResizingAllocator()
"""What all units of this process take their storage from."""
