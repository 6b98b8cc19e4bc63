# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Where the storage of transient full-size buffers comes from.

It decides neither when storage is needed nor on which stream: the caller allocates and releases on the buffer's home
stream, and the device allocator returns the memory to that stream.
"""

from __future__ import annotations

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
    """

    def allocate(self, tensor: torch.Tensor) -> None:
        """Back `tensor` with storage of undefined contents."""
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def release(self, tensor: torch.Tensor) -> None:
        """Free the storage."""
        tensor.untyped_storage().resize_(0)
