# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Byte entries: whether two are the same, and a short text of one that is safe to print."""

from __future__ import annotations

import argparse
import io
import math
import reprlib
import types

import numpy as np
import torch

from megatron.inspector.text import safe


def is_same(first: object, second: object, equal_nan: bool) -> bool:
    """Compare two values part by part; types have to be equal, and NaN is NaN if asked."""
    if isinstance(first, np.generic) and isinstance(second, np.generic):
        return first.dtype == second.dtype and is_same(first.item(), second.item(), equal_nan)
    if type(first) is not type(second):
        return False
    if isinstance(first, (argparse.Namespace, types.SimpleNamespace)):
        return is_same(vars(first), vars(second), equal_nan)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key], equal_nan) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(
            is_same(one, other, equal_nan) for one, other in zip(first, second, strict=True)
        )
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and is_same(first.tolist(), second.tolist(), equal_nan)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and is_same(first.tolist(), second.tolist(), equal_nan)
    if isinstance(first, io.BytesIO) and isinstance(second, io.BytesIO):
        return first.getvalue() == second.getvalue()
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first) and math.isnan(second):
        return equal_nan
    if hasattr(first, "__dict__") and type(first).__eq__ is object.__eq__:
        return is_same(vars(first), vars(second), equal_nan)
    return bool(first == second)


def short_text(value: object, max_chars: int = 60) -> str:
    """Write a value in one line of limited length."""
    text = safe(_plain(value, max_chars))
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _plain(value: object, max_chars: int) -> str:
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return f"Namespace with {len(vars(value))} values"
    if isinstance(value, io.BytesIO):
        return f"stream of {len(value.getvalue())} bytes"
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    writer = reprlib.Repr()
    writer.maxstring = writer.maxother = writer.maxlong = max_chars
    return writer.repr(value)


def lines(value: object, max_lines: int) -> list[str]:
    """Write a value for reading, one line for each part of a mapping or Namespace."""
    parts = vars(value) if isinstance(value, (argparse.Namespace, types.SimpleNamespace)) else value
    if not isinstance(parts, dict):
        return [short_text(value, 400)]
    found = [
        f"{short_text(key) if not isinstance(key, str) else safe(key)}: {short_text(part, 100)}"
        for key, part in parts.items()
    ]
    rest = len(found) - max_lines
    return found[:max_lines] + ([f"… and {rest} more"] if rest > 0 else [])
