# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Writes one state dict as a committed checkpoint: staging folder, DCP, manifest, rename; or nothing at all.

It knows no model: state dicts are built elsewhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from .errors import CheckpointError
from .folder import check_replaceable, clean_interrupted, commit, remove_checkpoint, staging_path
from .planner import CompleteSavePlanner
from .ranks import Ranks
from .writer import CheckpointWriter


def write_checkpoint(
    state_dict: Mapping[str, Any],
    path: Path,
    ranks: Ranks,
    *,
    overwrite: bool = False,
    after_commit: Callable[[], None] | None = None,
) -> None:
    """Write a state dict; every rank must call it. Whatever fails, `path` is as it was before.

    Args:
        state_dict: nested dicts; DTensors and tensors are written as such, other values as byte entries. The same keys
            on every rank.
        path: the checkpoint's folder, on a file system that all ranks share.
        ranks: who takes part.
        overwrite: replace a checkpoint that lies there.
        after_commit: called on the first rank once the checkpoint is on the disk.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    what = f"save of {path}"
    token = ranks.gather(secrets.token_hex(4), what)[0]
    staging = staging_path(path, token)
    ranks.first(lambda: _prepare(path, overwrite), what)
    try:
        with ranks.together(what):
            save(
                dict(state_dict),
                storage_writer=CheckpointWriter(staging),
                planner=CompleteSavePlanner(),
                process_group=ranks.group,
            )
        ranks.first(lambda: commit(staging, path), what)
    except CheckpointError:
        if ranks.index == 0 and staging.exists():
            remove_checkpoint(staging)
        raise
    if after_commit is not None:
        ranks.first(after_commit, what)


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
