# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`BackgroundWriter`: writes state dicts while training goes on, on every rank; it knows no model.

[Note: polls agree]
Ranks' threads end at different moments. If one rank raised at a step that the others begin, these would wait for it in
the step's collectives. So while a write is under way a poll asks all ranks whether theirs has ended, by one number each
on the host, and what came of it is seen by all of them at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import collectives
from .background import BackgroundSave
from .errors import CheckpointError
from .ranks import Ranks
from .staging import HostStaging
from .write import write_checkpoint


class BackgroundWriter:
    """Stages a state dict on the host and writes it in a thread; one at a time. `wait` before groups are destroyed.

    The next write waits for the one before, and so does the interpreter at its exit. Ranks talk through gloo groups of
    their own, one of them in the thread, so every rank must make the writer.
    """

    def __init__(self) -> None:
        self._staging = HostStaging()
        self._background = BackgroundSave()
        self._is_under_way = False
        threads, self._polls = (dist.new_group(backend="gloo") if dist.is_initialized() else None for _ in range(2))
        self.ranks = Ranks(torch.device("cpu"), threads)

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
            collect: called when the write before is over; raises on all ranks or on none.
            path: the checkpoint's folder.
            overwrite: replace a checkpoint that lies there.
            after_commit: called on the first rank once the checkpoint is on the disk.

        Raises:
            CheckpointError: the write before has failed; on every rank. The new one is not begun.
        """
        self._wait(f"the save before {path}")
        state = collect()
        staged: dict[str, Any] = {}
        with self.ranks.together(f"copy to the host for {path}"):
            staged = self._staging.stage(state)

        def write() -> None:
            try:
                write_checkpoint(staged, path, self.ranks, overwrite=overwrite, after_commit=after_commit)
            except CheckpointError:
                raise
            except Exception as error:
                if self.ranks.group is None or dist.is_initialized():
                    raise
                raise CheckpointError(
                    f"save of {path}: expected process groups until it is over, got destroy_process_group() before. "
                    "Call wait() first."
                ) from error

        self._background.start(write)
        self._is_under_way = True

    def poll(self) -> None:
        """Raise the error of a write that has failed, once; does not wait for a write.

        Every rank must call it equally often between writes: while one is under way, ranks tell each other.

        Raises:
            CheckpointError: a write has failed; on every rank.
        """
        if not self._is_under_way:
            return
        has_ended = torch.tensor([not self._background.is_running], dtype=torch.int32)
        if self._polls is not None:
            collectives.all_reduce(has_ended, "min", self._polls, what="poll of a save in the background")
        if has_ended.item():
            self.wait()

    def wait(self) -> None:
        """Wait for the write that is under way.

        Raises:
            CheckpointError: it has failed; on every rank.
        """
        self._wait("a save in the background")

    def _wait(self, what: str) -> None:
        self._is_under_way = False
        with self.ranks.together(what):
            self._background.wait()
