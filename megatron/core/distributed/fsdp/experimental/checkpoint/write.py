# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Writes one state dict as a committed checkpoint: staging folder, DCP, manifest, rename; or nothing at all.

It knows no model: state dicts are built elsewhere.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from .errors import CheckpointError
from .folder import (
    check_replaceable,
    clean_interrupted,
    publish,
    remove_checkpoint,
    settle,
    staging_path,
)
from .locks import being_written
from .planner import CompleteSavePlanner
from .ranks import Ranks
from .writer import CheckpointWriter

_MAX_THREADS = 4


def write_checkpoint(
    state_dict: Mapping[str, Any],
    path: Path,
    ranks: Ranks,
    *,
    overwrite: bool = False,
    after_commit: Callable[[], None] | None = None,
) -> None:
    """Write a state dict; every rank must call it. If it fails before it is committed, `path` is as it was.

    Args:
        state_dict: nested dicts; DTensors and tensors are written as such, other values as byte entries. The same keys
            on every rank.
        path: the checkpoint's folder, on a file system that all ranks share.
        ranks: who takes part.
        overwrite: replace a checkpoint that lies there.
        after_commit: called on the first rank once the checkpoint is on the disk.

    Raises:
        CheckpointError: it cannot be written, or was committed and what follows failed, which the error says; on
            every rank.
    """
    what = f"save of {path}"
    tokens, hosts = zip(*ranks.gather([secrets.token_hex(4), socket.gethostname()], what), strict=True)
    staging = staging_path(path, tokens[0])
    ranks.first(lambda: _prepare(path, overwrite), what)
    with ExitStack() as held:
        ranks.first(lambda: held.enter_context(being_written(staging)), what)
        try:
            with ranks.together(what):
                save(
                    dict(state_dict),
                    storage_writer=CheckpointWriter(staging, num_threads(hosts, ranks.index)),
                    planner=CompleteSavePlanner(),
                    process_group=ranks.group,
                )
            replaced = ranks.first(lambda: publish(staging, path), what)
        except CheckpointError:
            if ranks.index == 0 and staging.exists():
                remove_checkpoint(staging)
            raise
    ranks.first(lambda: _finish(path, replaced, after_commit), what)


def num_threads(hosts: Sequence[str], index: int) -> int:
    """Return how many files a rank writes at once: its share of the host's cores, at most.

    Args:
        hosts: the name of each rank's host.
        index: of the rank.
    """
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // hosts.count(hosts[index])))


def _finish(path: Path, replaced: Path | None, after_commit: Callable[[], None] | None) -> None:
    """Do what follows a commit, all of it, whatever fails."""
    try:
        settle(path, replaced)
    finally:
        if after_commit is not None:
            after_commit()


def _prepare(path: Path, overwrite: bool) -> None:
    check_replaceable(path)
    if path.exists() and not overwrite:
        raise CheckpointError(
            f"{path}: expected no checkpoint there yet, got one. Save under another name, or pass overwrite=True."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a folder that checkpoints can be written into, got {error.strerror} for {path.parent}. "
            "Save elsewhere."
        ) from error
    clean_interrupted(path.parent)
