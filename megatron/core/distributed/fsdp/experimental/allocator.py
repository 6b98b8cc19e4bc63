# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Where the storage of buffers comes from, and how much of it there is.

It decides neither when storage is needed nor on which stream: the caller allocates and releases on the buffer's home
stream, and the device allocator returns the memory to that stream. `trace_pool.py` has a strategy with fixed places.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch


class Block(Protocol):
    """What an allocator sees of a buffer.

    Attributes:
        name: says which one it is.
        local: [local_numel]; the flat tensor that needs storage.
        place: what an allocator that knows the buffer remembers of it; None at first.
        num_plan_views: views of `local` that the buffer has made for its plans.
    """

    name: str
    local: torch.Tensor
    place: Any
    num_plan_views: int

    def move_to(self, local: torch.Tensor) -> None:
        """Lie in another flat tensor of the same size and dtype from now on, with all views; contents are lost."""
        ...


class StorageAllocator(Protocol):
    """Gives a buffer its storage and takes it back."""

    def allocate(self, block: Block) -> None:
        """Back `block.local` with storage of undefined contents."""
        ...

    def release(self, block: Block) -> None:
        """Take the storage back; `block.local` and its views must not be read until the next `allocate`."""
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

    def allocate(self, block: Block) -> None:
        """Back `block.local` with storage of undefined contents."""
        num_bytes = block.local.numel() * block.local.element_size()
        block.local.untyped_storage().resize_(num_bytes)
        self._count(block.local, num_bytes)

    def release(self, block: Block) -> None:
        """Free the storage."""
        block.local.untyped_storage().resize_(0)
        self._count(block.local, 0)

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
"""What all units of this process take their storage from, directly or through a pool."""


def num_storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors share a tensor's storage: more than ours if somebody else, or a graph, holds a view."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
