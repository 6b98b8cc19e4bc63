# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""How the inspector writes: sizes, tables, names from untrusted files, progress. Decides nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


class Bar(Protocol):
    """What commands use of a progress bar."""

    def update(self, count: int) -> None:
        """Move on by a number of bytes."""

    def __enter__(self) -> Bar: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def parse_bytes(text: str) -> int:
    """Read a number of bytes: ``4096``, ``256MiB``, ``5GB``.

    Raises:
        ValueError: it is none, or none above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    unit = {**_UNITS, **_BINARY}.get(match[2]) if match else None
    count = int(float(match[1]) * unit) if match and unit else 0
    if count < 1:
        raise ValueError(f"size: expected a number of bytes such as 256MiB or 5GB, got {text!r}")
    return count


def bytes_text(count: float) -> str:
    """Write a number of bytes for people: ``1.50 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def dtype_text(dtype: torch.dtype) -> str:
    """Write a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def safe(text: str) -> str:
    """Make a name from a file safe for a terminal: what is not printable is escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Lay out rows in columns; those numbered in ``right`` are aligned to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def cell(column: int, text: str) -> str:
        return text.rjust(widths[column]) if column in right else text.ljust(widths[column])

    return "\n".join("  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines)


def progress(total_bytes: int, what: str) -> Bar:
    """Return a bar of bytes on stderr, which is silent unless that is a terminal."""
    bar: Bar = tqdm(
        total=total_bytes, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty()
    )
    return bar
