# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints with torch alone, so that two of them can be compared."""

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return weights and state of the optimizer, whole, by key."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("rng_state.")
    }
    load(dict(found), storage_reader=FileSystemReader(folder), no_dist=True)
    return found
