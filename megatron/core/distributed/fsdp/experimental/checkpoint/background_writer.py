# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`BackgroundWriter`: writes state dicts while training goes on, on every rank; it knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .background import BackgroundSave
from .ranks import Ranks
from .staging import HostStaging
from .write import write_checkpoint


class BackgroundWriter:
    """Stages a state dict on the host and writes it in a thread; one at a time.

    The next write waits for the one before, and so does the interpreter at its exit. Ranks talk through a gloo group of
    their own, so every rank must make the writer.
    """

    def __init__(self) -> None:
        self._staging = HostStaging()
        self._background = BackgroundSave()
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.ranks = Ranks(torch.device("cpu"), group)

    def write(
        self,
        collect: Callable[[], Mapping[str, Any]],
        path: Path,
        *,
        overwrite: bool = False,
        after_commit: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write what `collect` returns; it may be changed again once this call is back.

        Args:
            collect: called when the write before is over; its errors are raised here.
            path: the checkpoint's folder.
            overwrite: replace a checkpoint that lies there.
            after_commit: called on the first rank once the checkpoint is on the disk.

        Raises:
            CheckpointError: the write before has failed; on every rank. The new one is not begun.
        """
        with self.ranks.together(f"the save before {path}"):
            self._background.wait()
        staged = self._staging.stage(collect())
        self._background.start(
            lambda: write_checkpoint(staged, path, self.ranks, overwrite=overwrite, after_commit=after_commit)
        )

    def poll(self) -> None:
        """Raise the error of a write that has failed, once; does not wait. Ranks may see it a step apart.

        Raises:
            CheckpointError: a write has failed.
        """
        self._background.poll()

    def wait(self) -> None:
        """Wait for the write that is under way.

        Raises:
            CheckpointError: it has failed; on every rank.
        """
        with self.ranks.together("a save in the background"):
            self._background.wait()
