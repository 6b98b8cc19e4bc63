# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The folders of checkpoints: how one becomes committed, is found again and goes; the entry to its manifest.

One process, the standard library only. It does not know what is in the files, and no rank knows here of another.

[Note: the order of a commit]
A folder under its final name is committed: all of it is on the disk. Whatever interrupts a save leaves such folders as
they were, because every step depends on those before it being on the disk:

    data files, each fsynced -> .metadata -> manifest.json -> fsync of the staging folder -> rename to the final name
    -> fsync of the parent -> latest_checkpointed_iteration.txt by a temporary file and rename -> old ones are deleted

Deleting begins with a rename, too, so that half a checkpoint never has a final name. `step` names each of these points;
tests kill the process there through `on_step`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from .errors import CheckpointError, write_error, writing
from .locks import is_being_written
from .manifest import FORMAT, MANIFEST, METADATA, FileRecord, manifest_text, read_manifest, verify_files
from .threads import in_threads

__all__ = [
    "FORMAT",
    "LATEST",
    "MANIFEST",
    "METADATA",
    "STEPS",
    "FileRecord",
    "check_replaceable",
    "clean_interrupted",
    "commit",
    "committed_iterations",
    "iteration_folder",
    "keep_last",
    "read_latest",
    "read_manifest",
    "remove_checkpoint",
    "staging_path",
    "step",
    "verify_files",
    "write_error",
    "write_latest",
    "write_manifest",
]

LATEST = "latest_checkpointed_iteration.txt"

STEPS = (
    "file_opened",
    "data_synced",
    "metadata_synced",
    "manifest_synced",
    "staging_synced",
    "set_aside",
    "committed",
    "parent_synced",
    "latest_written",
    "latest_moved",
    "delete_renamed",
    "deleted",
)
"""What `step` is called with, in the order of a save; each says what has just been done.

An older checkpoint of the same name is set aside only where two folders cannot exchange names in one step.
"""

on_step: Callable[[str], None] | None = None
"""Called at each step. For tests: it may raise, or end the process."""

_NEXT_LATEST = f"{LATEST}.incomplete-0"
_TOKEN = re.compile(r"[0-9a-z]+")
_INTERRUPTED = re.compile(r".+\.(incomplete|deleted)-[0-9a-z]+")
_SET_ASIDE = re.compile(r"(?P<final>.+)\.replaced-[0-9a-z]+")
_OF_A_CHECKPOINT = re.compile(r".*\.distcp|(__\d+)?\.metadata(\.tmp)?|manifest\.json|metadata\.json|common\.pt")
_ITERATION = re.compile(r"iter_(\d{7,})")
_AT_CURRENT_FOLDER = -100
_RENAME_EXCHANGE = 2
_DELETING_THREADS = 8


def step(name: str) -> None:
    """Tell `on_step` what has just been done."""
    if on_step is not None:
        on_step(name)


def staging_path(final: Path, token: str) -> Path:
    """Return where the checkpoint `final` is written before it is committed: beside it.

    Args:
        final: the name it will have.
        token: lower-case letters and digits, the same on all ranks and new for each save.

    Raises:
        ValueError: another token, or a final name that would be taken for an interrupted save.
    """
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"token of a save: expected lower-case letters and digits, got {token!r}. Use token_hex().")
    if _INTERRUPTED.fullmatch(final.name) or _SET_ASIDE.fullmatch(final.name) or not final.name:
        raise ValueError(
            f"name of a checkpoint: expected one that no interrupted save has, got {final.name!r}. Choose another."
        )
    return final.with_name(f"{final.name}.incomplete-{token}")


def write_manifest(folder: Path, checksums: Mapping[str, FileRecord]) -> None:
    """Write the manifest of all other files of `folder` and fsync it.

    Raises:
        CheckpointError: it cannot be written.
    """
    _write_synced(folder / MANIFEST, manifest_text(checksums))
    step("manifest_synced")


def check_replaceable(final: Path) -> None:
    """Check that a checkpoint may get the name `final`: what has it now, if anything, is a checkpoint and would go.

    Raises:
        CheckpointError: it is a file, a link, or a folder with other things in it.
    """
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise CheckpointError(f"{final}: expected no file or link of that name, got one. Save under another name.")
    strange = _strange_entry(final) if final.exists() else None
    if strange is not None:
        raise CheckpointError(
            f"{final}: expected no folder of that name, or a checkpoint's, which the new one would replace, got "
            f"{strange} in it. Save under another name."
        )


def commit(staging: Path, final: Path) -> None:
    """Give a written checkpoint its final name, in place of an older one of that name, which is deleted.

    Raises:
        CheckpointError: as `publish` and `settle`.
    """
    settle(final, publish(staging, final))


def publish(staging: Path, final: Path) -> Path | None:
    """Give a written checkpoint its final name; whatever fails, `final` is as it was before.

    Returns:
        Where an older one of that name lies now.

    Raises:
        CheckpointError: it has no manifest, what has its name is not a checkpoint only, or it cannot be renamed.
    """
    if not (staging / MANIFEST).is_file():
        raise CheckpointError(f"commit of {staging}: expected a {MANIFEST}, got none. Finish writing it first.")
    check_replaceable(final)
    with writing(final):
        _sync_folder(staging)
        step("staging_synced")
        replaced = _replace(staging, final) if final.exists() else None
        if replaced is None:
            staging.rename(final)
    return replaced


def settle(final: Path, replaced: Path | None) -> None:
    """Bring a published checkpoint's name to the disk, and delete what had it before.

    Raises:
        CheckpointError: one of these failed; the checkpoint is there.
    """
    step("committed")
    try:
        with writing(final):
            _sync_folder(final.parent)
            step("parent_synced")
        if replaced is not None:
            remove_checkpoint(replaced)
    except CheckpointError as error:
        raise CheckpointError(f"{final}: committed, but what comes after it failed: {error}") from error


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, which loses its name first.

    Raises:
        CheckpointError: it cannot be deleted.
    """
    base = path.name.partition(".incomplete-")[0].partition(".replaced-")[0]
    doomed = path.with_name(f"{base}.deleted-{secrets.token_hex(4)}")
    with writing(path):
        path.rename(doomed)
        step("delete_renamed")
        _delete(doomed)
        step("deleted")


def clean_interrupted(parent: Path) -> list[Path]:
    """Remove what interrupted saves and deletions have left in a folder, but not what is being written there.

    A checkpoint that an interrupted save had set aside to take its name gets the name back. Folders with anything else
    than files of a checkpoint stay, whatever they are called.

    Returns:
        What was removed, sorted.

    Raises:
        CheckpointError: something cannot be removed.
    """
    if not parent.is_dir():
        return []
    removed = []
    for path in sorted(parent.iterdir()):
        aside = _SET_ASIDE.fullmatch(path.name)
        with writing(path):
            if path.name == _NEXT_LATEST:
                path.unlink()
                removed.append(path)
            elif not (aside or _INTERRUPTED.fullmatch(path.name)) or not _is_ours(path) or is_being_written(path):
                continue
            elif aside and not path.with_name(aside["final"]).exists():
                path.rename(path.with_name(aside["final"]))
            else:
                _delete(path)
                removed.append(path)
    return removed


def iteration_folder(save_dir: Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint: ``iter_0000020`` for 20, as Megatron names it."""
    return save_dir / f"iter_{iteration:07d}"


def committed_iterations(save_dir: Path) -> list[int]:
    """Return the iterations whose checkpoints lie in a training folder, ascending."""
    if not save_dir.is_dir():
        return []
    found = [_ITERATION.fullmatch(path.name) for path in save_dir.iterdir() if (path / METADATA).is_file()]
    return sorted(int(match[1]) for match in found if match)


def read_latest(save_dir: Path) -> int | None:
    """Return the iteration that a training folder names as its latest, or None where there is no such file.

    Raises:
        CheckpointError: the file does not hold a number.
    """
    path = save_dir / LATEST
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, got {error.strerror}. Mend the file.") from error
    if not re.fullmatch(r"[0-9]+", text):
        there = ", ".join(map(str, committed_iterations(save_dir))) or "none"
        raise CheckpointError(
            f"{path}: expected the number of an iteration, got {text[:40]!r}. Write one of those that have a "
            f"checkpoint here: {there}; or name a checkpoint's own folder."
        )
    return int(text)


def write_latest(save_dir: Path, iteration: int) -> None:
    """Let a training folder name `iteration` as its latest; whatever happens, it names that or what it named before.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = save_dir / LATEST
    temporary = save_dir / _NEXT_LATEST
    _write_synced(temporary, str(iteration))
    step("latest_written")
    with writing(path):
        temporary.replace(path)
        _sync_folder(save_dir)
    step("latest_moved")


def keep_last(save_dir: Path, n: int) -> list[Path]:
    """Delete all but the last `n` checkpoints of a training folder up to its latest.

    Left alone are the latest itself, those of later iterations, which another run has made, and those without a
    manifest, which another program has written.

    Returns:
        What was deleted, oldest first.

    Raises:
        ValueError: `n` is less than 1.
        CheckpointError: one cannot be deleted.
    """
    if n < 1:
        raise ValueError(f"keep_last: expected to keep at least 1 checkpoint, got {n}.")
    latest = read_latest(save_dir)
    ours = [i for i in committed_iterations(save_dir) if (iteration_folder(save_dir, i) / MANIFEST).is_file()]
    counted = [iteration for iteration in ours if latest is None or iteration <= latest]
    doomed = [iteration_folder(save_dir, iteration) for iteration in counted[:-n] if iteration != latest]
    for path in doomed:
        remove_checkpoint(path)
    return doomed


def _write_synced(path: Path, text: str) -> None:
    with writing(path), path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some network file systems have no fsync of folders: they write them at once.
            raise
    finally:
        os.close(descriptor)


def _delete(folder: Path) -> None:
    """Delete a folder; its data files at the same time, since the system takes long to free what they hold."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix == ".distcp" and path.is_file()]

    def unlink(first: int) -> None:
        for path in files[first::_DELETING_THREADS]:
            path.unlink()

    in_threads([partial(unlink, first) for first in range(min(_DELETING_THREADS, len(files)))])
    shutil.rmtree(folder)


def _is_ours(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and _strange_entry(path) is None


def _strange_entry(folder: Path) -> str | None:
    """Return the name of something in a folder that is no file of a checkpoint, or None."""
    entries = sorted(folder.iterdir())
    return next((e.name for e in entries if not _OF_A_CHECKPOINT.fullmatch(e.name) or not e.is_file()), None)


def _replace(staging: Path, final: Path) -> Path:
    """Let `staging` take the name of a committed `final`; return where the older one lies now."""
    if _exchange(staging, final):
        return staging
    aside = final.with_name(f"{final.name}.replaced-{secrets.token_hex(4)}")
    final.rename(aside)
    step("set_aside")
    try:
        staging.rename(final)
    except OSError:
        aside.rename(final)
        raise
    return aside


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders exchange names in one step; return whether the system and its file system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_CURRENT_FOLDER, names[0], _AT_CURRENT_FOLDER, names[1], _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))
