# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors that are equal on all ranks whose values are, and computed without waiting for the device."""

from __future__ import annotations

import torch

_CHUNK = 1 << 18
"""Words that a checksum mixes at a time: bounds its temporary memory to 10 MiB."""

MULTIPLIER = 0x2545F4914F6CDD1D
"""An odd number with its bits well spread, so that sums of different orders differ."""


def checksum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 checksum of a tensor's bits in logical order, 0-d, on its device.

    Sums of integers are exact, so that equal values give equal checksums whatever the kernels, NaN included.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    words = flat.view(torch.int64)
    total = words.new_zeros(())
    weights = torch.arange(1, 2 * min(words.numel(), _CHUNK) + 1, 2, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        # The shift brings high bits down: products keep a number's trailing zeros, of which floats have many.
        total = total * MULTIPLIER + ((chunk ^ (chunk >> 31)) * weights[: chunk.numel()]).sum()
    return total
