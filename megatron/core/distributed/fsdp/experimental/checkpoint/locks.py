# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which staging folders somebody is writing now, in any process of this machine: a lock that ends with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import writing


@contextmanager
def being_written(staging: Path) -> Iterator[None]:
    """Make a staging folder and mark it as one that somebody writes, in any process, while the block runs.

    Raises:
        CheckpointError: it cannot be made.
    """
    with writing(staging):
        staging.mkdir(parents=True)
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: `is_being_written` finds none there either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_being_written(folder: Path) -> bool:
    """Return whether some process is inside `being_written` for a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone, or no folder
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
