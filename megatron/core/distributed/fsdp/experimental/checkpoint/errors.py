# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The error of everything that is wrong with a checkpoint, its files or its contents."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or read, or does not fit; the message names the file or the keys."""
