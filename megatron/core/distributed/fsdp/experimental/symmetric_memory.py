# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`SymmetricAllocator`: storage that ranks register with each other, so that collectives reach it directly.

It has not run on hardware yet. What is registered stays so: it is for arenas of a trace pool, which are allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from . import collectives
from .allocator import Block, StorageAllocator
from .device import symmetric_pool


class SymmetricAllocator:
    """Takes storage from torch's pool of symmetric memory, and registers it; every rank must call it alike.

    Args:
        below: allocates.
        groups: returns the process groups whose collectives use the storage.
    """

    def __init__(self, below: StorageAllocator, groups: Callable[[], Iterable[dist.ProcessGroup]]) -> None:
        self._below = below
        self._groups = groups

    def allocate(self, block: Block) -> None:
        """Back `block.local` with registered storage of undefined contents."""
        with symmetric_pool(block.local.device):
            self._below.allocate(block)
        for group in self._groups():
            collectives.register(block.local, group, what=block.name)

    def release(self, block: Block) -> None:
        """Give the storage back to torch's pool."""
        self._below.release(block)


def check_symmetric_memory(device: torch.device, trace_pool: bool) -> None:
    """Refuse symmetric memory where there is none.

    Raises:
        NotImplementedError: on the host, or with a torch that is too old.
        ValueError: without a trace pool.
    """
    if device.type != "cuda":
        raise NotImplementedError(
            f"use_symmetric_memory: expected a CUDA device, got {device.type}, on which there is none. Leave it out."
        )
    if not hasattr(symmetric, "is_symm_mem_tensor"):
        raise NotImplementedError(
            f"use_symmetric_memory: expected torch 2.12 or newer, got {torch.__version__}. Update torch, or leave it "
            "out."
        )
    if not trace_pool:
        raise ValueError(
            "use_symmetric_memory: expected trace_pool=True, got False, with which memory would be registered at every "
            "use. Set both."
        )
