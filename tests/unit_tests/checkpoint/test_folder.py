# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints: committed by one rename, found again, checked, and never lost to an interruption."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError, folder
from megatron.core.distributed.fsdp.experimental.checkpoint.manifest import checksum_file

FILES = {"__0_0.distcp": b"first rank", "__1_0.distcp": b"second rank", ".metadata": b"what is where"}


class _Interrupted(Exception):
    pass


def _write(path: Path, text: str = "") -> Path:
    """Write a checkpoint without committing it."""
    path.mkdir(parents=True)
    for name, content in FILES.items():
        (path / name).write_bytes(content + text.encode())
    folder.write_manifest(path, {name: checksum_file(path / name) for name in FILES})
    return path


def _committed(save_dir: Path, *iterations: int) -> None:
    for iteration in iterations:
        final = folder.iteration_folder(save_dir, iteration)
        folder.commit(_write(folder.staging_path(final, "0a")), final)


def _names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def _interrupt_at(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    def on_step(name: str) -> None:
        if name == wanted:
            raise _Interrupted

    monkeypatch.setattr(folder, "on_step", on_step)


def test_a_checkpoint_lies_beside_its_final_name_until_it_is_committed(tmp_path: Path) -> None:
    final = tmp_path / "iter_0000010"
    staging = _write(folder.staging_path(final, "ab12"))
    assert _names(tmp_path) == ["iter_0000010.incomplete-ab12"] and folder.committed_iterations(tmp_path) == []
    folder.commit(staging, final)
    assert _names(tmp_path) == ["iter_0000010"] and folder.committed_iterations(tmp_path) == [10]
    assert folder.verify_files(final, checksums=True) == []


def test_steps_come_in_the_order_of_the_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(folder, "on_step", seen.append)
    _committed(tmp_path, 1, 2)
    folder.write_latest(tmp_path, 2)
    folder.keep_last(tmp_path, 1)
    assert seen == [
        *["manifest_synced", "staging_synced", "committed", "parent_synced"] * 2,
        *["latest_written", "latest_moved", "delete_renamed", "deleted"],
    ]
    assert set(seen) <= set(folder.STEPS)


@pytest.mark.parametrize("token", ["", "A", "a-b", "a/b"])
def test_bad_tokens_are_refused(token: str) -> None:
    with pytest.raises(ValueError, match="expected lower-case letters and digits"):
        folder.staging_path(Path("x"), token)


@pytest.mark.parametrize("name", ["x.incomplete-1", "x.deleted-ab", "x.replaced-ab", "/"])
def test_names_of_interrupted_saves_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected one that no interrupted save has"):
        folder.staging_path(Path(name), "a")


def test_commit_needs_a_manifest_and_a_parent(tmp_path: Path) -> None:
    staging = folder.staging_path(tmp_path / "c", "a")
    staging.mkdir()
    with pytest.raises(CheckpointError, match=r"expected a manifest.json, got none"):
        folder.commit(staging, tmp_path / "c")
    staging.rmdir()
    _write(staging)
    with pytest.raises(CheckpointError, match=r"expected to write, got No such file .* bytes free in"):
        folder.commit(staging, tmp_path / "absent" / "c")


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    staging = _write(folder.staging_path(tmp_path / "c", "a"))
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(staging)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".metadata").touch()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    (tmp_path / "nested" / "a.distcp").mkdir(parents=True)
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match="expected no file or link of that name"):
            folder.commit(staging, tmp_path / name)
    for name, strange in {"home": "thesis.txt", "nested": "a.distcp"}.items():
        with pytest.raises(CheckpointError, match=f"got {strange} in it. Save under another name"):
            folder.commit(staging, tmp_path / name)
    (tmp_path / "empty").mkdir()
    folder.commit(staging, tmp_path / "empty")
    assert _names(tmp_path) == ["empty", "file", "home", "link", "nested"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_replaces_one_of_its_name(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    final = tmp_path / "c"
    folder.commit(_write(folder.staging_path(final, "a"), "old"), final)
    folder.commit(_write(folder.staging_path(final, "b"), "new"), final)
    assert _names(tmp_path) == ["c"] and (final / "__0_0.distcp").read_bytes() == b"first ranknew"


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize(
    "wanted", ["staging_synced", "set_aside", "committed", "parent_synced", "delete_renamed", "deleted"]
)
def test_an_interrupted_replacement_leaves_one_of_the_two(
    wanted: str, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    elif wanted == "set_aside":
        return
    final = tmp_path / "c"
    folder.commit(_write(folder.staging_path(final, "a"), "old"), final)
    staging = _write(folder.staging_path(final, "b"), "new")
    _interrupt_at(monkeypatch, wanted)
    with pytest.raises(_Interrupted):
        folder.commit(staging, final)
    if can_exchange:  # At every moment, not only after cleaning.
        assert folder.verify_files(final, checksums=True) == []
    folder.clean_interrupted(tmp_path)
    assert _names(tmp_path) == ["c"] and folder.verify_files(final, checksums=True) == []
    is_old = (final / "__0_0.distcp").read_bytes() == b"first rankold"
    assert is_old == (wanted in ("staging_synced", "set_aside"))


def test_a_failed_rename_gives_the_older_checkpoint_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    final = tmp_path / "c"
    folder.commit(_write(folder.staging_path(final, "a"), "old"), final)
    staging = _write(folder.staging_path(final, "b"), "new")
    monkeypatch.setattr(folder, "on_step", lambda name: name == "set_aside" and staging.rename(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="No such file"):
        folder.commit(staging, final)
    assert (final / "__0_0.distcp").read_bytes() == b"first rankold"


def test_errors_of_an_exchange_are_told_from_file_systems_that_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        folder._exchange(tmp_path / "a", tmp_path / "b")
    assert raised.value.filename == str(tmp_path / "a") and raised.value.filename2 == str(tmp_path / "b")
    monkeypatch.setattr(folder.ctypes, "get_errno", lambda: errno.EINVAL)
    assert not folder._exchange(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(folder.ctypes, "CDLL", lambda *args, **kwargs: object())
    assert not folder._exchange(tmp_path / "a", tmp_path / "b")


def test_cleaning_leaves_everything_but_leftovers(tmp_path: Path) -> None:
    _committed(tmp_path, 10)
    folder.write_latest(tmp_path, 10)
    for name in ("my.incomplete-Run", "incomplete-1", "iter_0000030", "notes", "data.incomplete-1", "d.replaced-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "something").touch()
    (tmp_path / "file.deleted-1").touch()
    (tmp_path / "c.incomplete-1").symlink_to(tmp_path / "iter_0000010")
    leftovers = ["iter_0000020.incomplete-ab", "iter_0000005.deleted-01"]
    for name in leftovers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"part")
    (tmp_path / f"{folder.LATEST}.incomplete-0").write_text("2")
    kept = ["iter_0000010", "iter_0000030", folder.LATEST, "notes"]
    kept += [
        "my.incomplete-Run",
        "incomplete-1",
        "data.incomplete-1",
        "d.replaced-1",
        "file.deleted-1",
        "c.incomplete-1",
    ]
    removed = [path.name for path in folder.clean_interrupted(tmp_path)]
    assert removed == sorted([*leftovers, f"{folder.LATEST}.incomplete-0"])
    assert _names(tmp_path) == sorted(kept) and folder.clean_interrupted(tmp_path) == []
    assert folder.clean_interrupted(tmp_path / "absent") == []


def test_a_deleted_checkpoint_loses_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _committed(tmp_path, 10)
    _interrupt_at(monkeypatch, "delete_renamed")
    with pytest.raises(_Interrupted):
        folder.remove_checkpoint(folder.iteration_folder(tmp_path, 10))
    assert folder.committed_iterations(tmp_path) == [] and len(folder.clean_interrupted(tmp_path)) == 1
    with pytest.raises(CheckpointError, match="No such file"):
        folder.remove_checkpoint(folder.iteration_folder(tmp_path, 10))


def test_deleting_many_files_takes_several_threads_and_says_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _committed(tmp_path, 10, 20)
    path, threads, unlink = folder.iteration_folder(tmp_path, 10), set(), Path.unlink
    for number in range(20):
        (path / f"__2_{number}.distcp").touch()

    def record(self: Path) -> None:
        if self.name == "__2_7.distcp":
            raise PermissionError(13, "Permission denied")
        threads.add(threading.current_thread())
        unlink(self)

    monkeypatch.setattr(Path, "unlink", record)
    with pytest.raises(CheckpointError, match="iter_0000010: expected to write, got Permission denied with"):
        folder.remove_checkpoint(path)
    assert len(threads) == 8 and folder.committed_iterations(tmp_path) == [20]
    monkeypatch.undo()
    assert len(folder.clean_interrupted(tmp_path)) == 1 and _names(tmp_path) == ["iter_0000020"]


@pytest.mark.parametrize("wanted", ["latest_written", "latest_moved"])
def test_latest_is_the_old_or_the_new(wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder.read_latest(tmp_path) is None
    folder.write_latest(tmp_path, 3)
    assert (tmp_path / folder.LATEST).read_text() == "3"
    _interrupt_at(monkeypatch, wanted)
    with pytest.raises(_Interrupted):
        folder.write_latest(tmp_path, 12)
    assert folder.read_latest(tmp_path) == (3 if wanted == "latest_written" else 12)


@pytest.mark.parametrize("text", ["", "release", "-3", "1.5", "\0\0"])
def test_a_damaged_latest_names_what_there_is(text: str, tmp_path: Path) -> None:
    _committed(tmp_path, 10, 20)
    (tmp_path / folder.LATEST).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{folder.LATEST}: expected the number of an iteration.*here: 10, 20;"):
        folder.read_latest(tmp_path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / folder.LATEST).mkdir()
    with pytest.raises(CheckpointError, match="expected a readable file, got Is a directory"):
        folder.read_latest(tmp_path)
    with pytest.raises(CheckpointError, match="got Is a directory"):
        folder.write_latest(tmp_path, 1)
    (tmp_path / folder.MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match="expected a readable manifest, got Is a directory"):
        folder.read_manifest(tmp_path)


def test_iterations_are_found_by_name_and_metadata(tmp_path: Path) -> None:
    _committed(tmp_path, 20, 10, 12345678)
    (tmp_path / "iter_0000030").mkdir()  # Nothing in it.
    (tmp_path / "iter_5").mkdir()
    (tmp_path / "iter_5" / ".metadata").touch()
    assert folder.committed_iterations(tmp_path) == [10, 20, 12345678]
    assert folder.committed_iterations(tmp_path / "absent") == []


def test_keep_last_keeps_the_latest_and_what_others_have_made(tmp_path: Path) -> None:
    _committed(tmp_path, 10, 20, 30, 40, 50)
    folder.write_latest(tmp_path, 40)
    (folder.iteration_folder(tmp_path, 10) / folder.MANIFEST).unlink()
    deleted = folder.keep_last(tmp_path, 2)
    assert [path.name for path in deleted] == ["iter_0000020"]
    assert folder.committed_iterations(tmp_path) == [10, 30, 40, 50]
    assert folder.keep_last(tmp_path, 5) == []
    with pytest.raises(ValueError, match="expected to keep at least 1 checkpoint, got 0"):
        folder.keep_last(tmp_path, 0)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_truncate, _zero, _flip, Path.unlink, _replace_by_folder])
@pytest.mark.parametrize("name", [*FILES, folder.MANIFEST])
def test_every_damage_of_every_file_is_found(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    _committed(tmp_path, 1)
    path = folder.iteration_folder(tmp_path, 1)
    damage(path / name)
    problems = folder.verify_files(path, checksums=True, needs_manifest=True)
    assert len(problems) == 1 and str(path / name) in problems[0] and "expected" in problems[0]
    sizes_only = folder.verify_files(path, checksums=False, needs_manifest=True)
    assert sizes_only == ([] if name in FILES and damage in (_zero, _flip) else problems)


def test_strange_and_unlisted_files_are_found(tmp_path: Path) -> None:
    _committed(tmp_path, 1)
    path = folder.iteration_folder(tmp_path, 1)
    (path / "__2_0.distcp").touch()
    assert folder.verify_files(path, checksums=False) == [
        f"{path / '__2_0.distcp'}: expected only the files of manifest.json, got this one besides"
    ]
    assert folder.verify_files(path, checksums=False, only=FILES) == []
    folder.write_manifest(path, {"__0_0.distcp": checksum_file(path / "__0_0.distcp")})
    problems = folder.verify_files(path, checksums=False, only=[".metadata"])
    assert problems == [f"{path / '.metadata'}: expected it in manifest.json, got no such entry"]
    assert folder.verify_files(tmp_path / "no", checksums=False) == [
        f"{tmp_path / 'no'}: expected the folder of a checkpoint, got none"
    ]


def test_without_a_manifest_sizes_of_the_metadata_count(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert folder.verify_files(tmp_path, checksums=True) == []
    least = {"__0_0.distcp": 10, "__1_0.distcp": 12, "__2_0.distcp": 1}
    assert folder.verify_files(tmp_path, checksums=True, least_sizes=least) == [
        f"{tmp_path / '__1_0.distcp'}: expected a file of at least 12 bytes, got 11 bytes",
        f"{tmp_path / '__2_0.distcp'}: expected a file of at least 1 bytes, got no file",
    ]


def test_progress_counts_the_bytes_that_are_read(tmp_path: Path) -> None:
    _committed(tmp_path, 1)
    read: list[int] = []
    folder.verify_files(folder.iteration_folder(tmp_path, 1), checksums=True, only=FILES, progress=read.append)
    assert sum(read) == sum(map(len, FILES.values()))
    read.clear()
    folder.verify_files(folder.iteration_folder(tmp_path, 1), checksums=False, progress=read.append)
    assert read == []


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    records = {"b": folder.FileRecord(3, "00c0ffee"), "a": folder.FileRecord(0, "00000000")}
    folder.write_manifest(tmp_path, records)
    assert folder.read_manifest(tmp_path) == records
    assert json.loads((tmp_path / folder.MANIFEST).read_text())["files"]["b"] == {"size": 3, "crc32": "00c0ffee"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "\xff",
        '{"format": "other", "version": 1, "files": {}}',
        '{"format": "mfsdp-checkpoint", "version": 2, "files": {}}',
        '{"format": "mfsdp-checkpoint", "version": 1, "files": []}',
        '{"format": "mfsdp-checkpoint", "version": 1, "files": {"../x": {"size": 1, "crc32": "00000000"}}}',
        '{"format": "mfsdp-checkpoint", "version": 1, "files": {"x": {"size": -1, "crc32": "00000000"}}}',
        '{"format": "mfsdp-checkpoint", "version": 1, "files": {"x": {"size": true, "crc32": "00000000"}}}',
        '{"format": "mfsdp-checkpoint", "version": 1, "files": {"x": {"size": 1, "crc32": "0"}}}',
        '{"format": "mfsdp-checkpoint", "version": 1, "files": {"x": 3}}',
    ],
)
def test_damaged_manifests_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / folder.MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="expected a manifest of format mfsdp-checkpoint version 1"):
        folder.read_manifest(tmp_path)


def test_file_systems_without_fsync_of_folders_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(folder.os, "fsync", refuse)
    code = errno.EINVAL
    folder._sync_folder(tmp_path)
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        folder._sync_folder(tmp_path)
