# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The error of everything that is wrong with a checkpoint, its files or its contents."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or read, or does not fit; the message names the file or the keys."""


def write_error(path: Path, error: OSError, needed_bytes: int | None = None) -> CheckpointError:
    """Return the error of a failed write to `path`, with the bytes that were needed, if known, and those free."""
    existing = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("."))
    needed = "" if needed_bytes is None else f" {needed_bytes} bytes"
    return CheckpointError(
        f"{path}: expected to write{needed}, got {error.strerror or error} with {shutil.disk_usage(existing).free} "
        f"bytes free in {existing}. Free space there, mend its permissions, or save elsewhere."
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system into one that names what was written."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error
