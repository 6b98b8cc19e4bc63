# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `capture_iteration` without a GPU: a double stands in for CUDA graphs. tests/gpu/graphs.py has the rest."""

from __future__ import annotations
