# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models on PyTorch DCP: atomic, verified, and readable without executing anything in them."""

from .errors import CheckpointError

__all__ = ["CheckpointError"]
