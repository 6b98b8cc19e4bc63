# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`BackgroundSave`: one save at a time in a thread of its own, whose error surfaces in the thread that trains.

It does not know what it runs, and no rank knows here of another.

[Note: exit]
Each save has a thread that is not a daemon. The interpreter joins such threads before it takes anything down, so that a
save that is under way at exit is finished, process groups still at hand. One thread waiting for all saves would
have to be a daemon, cut off in the middle of a write, or be told of the exit by a private function of `threading`.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable

from .errors import CheckpointError


class BackgroundSave:
    """Runs one save at a time beside the training. Used by one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: list[BaseException] = []
        weakref.finalize(self, _print_unseen, self._failed)

    @property
    def is_running(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, save: Callable[[], object]) -> None:
        """Wait for the save before, and begin `save`.

        Raises:
            CheckpointError: the one before has failed, nobody has polled since, and `save` is not begun.
        """
        self.wait()
        self._thread = threading.Thread(target=_run, args=(save, self._failed), name="mfsdp-save", daemon=False)
        self._thread.start()

    def poll(self) -> None:
        """Raise the error of a save that has failed, once. Called at every step boundary; does not wait.

        Raises:
            CheckpointError: a save has failed.
        """
        if self.is_running or not self._failed:
            return
        error = self._failed.pop()
        if isinstance(error, CheckpointError):
            raise error
        raise CheckpointError(
            f"save in the background: expected it to finish, got {type(error).__name__}: {error}. The checkpoint "
            "before it is whole. Mend the cause; the next save is a new one."
        ) from error

    def wait(self) -> None:
        """Wait for the save that is under way, if there is one.

        Raises:
            CheckpointError: as `poll`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()


def _run(save: Callable[[], object], failed: list[BaseException]) -> None:
    """Run `save` and keep its error. No method: the error's frames would keep its object alive, and so unreported."""
    try:
        save()
    except BaseException as error:  # DCP's CheckpointException is no Exception. `poll` raises it.
        failed.append(error)


def _print_unseen(failed: list[BaseException]) -> None:
    """Print the error of a save that nobody has polled, at exit or with the last reference to a `BackgroundSave`."""
    for error in failed:
        print("A checkpoint was not saved:", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
