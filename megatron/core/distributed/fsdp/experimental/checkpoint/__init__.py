# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models on PyTorch DCP: atomic, verified, and readable without executing anything in them."""

from .checkpoint import CheckpointSaver, load_checkpoint, save_checkpoint
from .errors import CheckpointError
from .read import LoadReport

__all__ = ["CheckpointError", "CheckpointSaver", "LoadReport", "load_checkpoint", "save_checkpoint"]
