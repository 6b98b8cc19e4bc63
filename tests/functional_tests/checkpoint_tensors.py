# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, to compare those of several layouts bit for bit."""

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read weights and moments of one iteration, whole, with torch's reader."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("rng_state.")
    }
    load(dict(found), storage_reader=FileSystemReader(folder), no_dist=True)
    return found
