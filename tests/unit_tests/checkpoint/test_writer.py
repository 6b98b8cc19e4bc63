# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What CheckpointWriter writes is DCP's, whole and checksummed, or an error on every rank, whenever it is stopped."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError, folder, writer
from megatron.core.distributed.fsdp.experimental.checkpoint.writer import CheckpointWriter
from tests.unit_tests.checkpoint.files import fill_disk
from tests.unit_tests.launch import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class _Interrupted(Exception):
    pass


def _state(value: float, numel: int = 1000) -> dict[str, Any]:
    weight = torch.full((numel,), value)
    return {"model": {"weight": weight, "view": weight[10:20], "empty": torch.empty(0, 3)}, "args": Namespace(lr=value)}


def _save(final: Path, state: dict[str, Any], token: str = "0a", *, no_dist: bool = True) -> None:
    staging = folder.staging_path(final, token)
    dcp.save(state, storage_writer=CheckpointWriter(staging), no_dist=no_dist)
    folder.commit(staging, final)


def _load(path: Path, numel: int = 1000) -> dict[str, Any]:
    target = _state(-1.0, numel)
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def _assert_holds(path: Path, value: float) -> None:
    assert folder.verify_files(path, checksums=True, needs_manifest=True) == []
    loaded, expected = _load(path), _state(value)
    for name, tensor in expected["model"].items():
        assert torch.equal(loaded["model"][name], tensor), name
    assert loaded["args"] == expected["args"]


def _failure(save: Callable[[], object]) -> Any:
    """Return the only error of a save that fails, as DCP has gathered it."""
    with pytest.raises(CheckpointException) as raised:
        save()
    failures = raised.value.failures
    assert len(failures) == 1
    return next(iter(failures.values()))[0]


def test_stock_dcp_reads_what_is_written(tmp_path: Path) -> None:
    _save(tmp_path / "c", _state(3.0))
    _assert_holds(tmp_path / "c", 3.0)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]


def test_metadata_holds_classes_of_dcp_only_and_no_path(tmp_path: Path) -> None:
    _save(tmp_path / "c", _state(3.0))
    content = (tmp_path / "c" / ".metadata").read_bytes()
    assert b"megatron" not in content and b"incomplete" not in content and str(tmp_path).encode() not in content
    metadata = pickle.loads(content)
    assert metadata.storage_meta.checkpoint_id == folder.FORMAT
    assert {entry.relative_path for entry in metadata.storage_data.values()} == {"__0_0.distcp"}


def test_everything_is_on_the_disk_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def check(name: str) -> None:
        if name == "manifest_synced":
            files = [path.stat() for path in folder.staging_path(tmp_path / "c", "0a").iterdir()]
            assert len(files) == 3 and all(synced[status.st_ino] == status.st_size for status in files)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(folder, "on_step", check)
    _save(tmp_path / "c", _state(1.0))


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "c", _state(1.0))
    error = _failure(lambda: dcp.save(_state(2.0), storage_writer=CheckpointWriter(tmp_path / "c"), no_dist=True))
    assert isinstance(error, CheckpointError) and "expected an empty folder" in str(error)
    _assert_holds(tmp_path / "c", 1.0)


def test_a_save_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a save with collectives"):
        CheckpointWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)


# --- interruptions ---


def _whole_save(save_dir: Path, iteration: int) -> None:
    """Save, let the folder name it as the latest, and delete the one before."""
    _save(folder.iteration_folder(save_dir, iteration), _state(float(iteration)), f"{iteration}")
    folder.write_latest(save_dir, iteration)
    folder.keep_last(save_dir, 1)


def _killed_in_child(work: Callable[[], object], wanted: str, count: int) -> None:
    """Run `work` in a fork of this process, which kills itself when `wanted` comes for the `count`th time."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        folder.on_step = _at(wanted, count, lambda: os.kill(os.getpid(), signal.SIGKILL))
        work()
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _at(wanted: str, count: int, act: Callable[[], object]) -> Callable[[str], None]:
    left = [count]

    def on_step(name: str) -> None:
        left[0] -= name == wanted
        if name == wanted and left[0] == 0:
            act()

    return on_step


def _raise() -> None:
    raise _Interrupted


# `file_opened` comes for the data and for `.metadata`.
POINTS = [("file_opened", 2), *((name, 1) for name in folder.STEPS if name != "set_aside")]


@pytest.mark.parametrize("way", ["exception", "kill"])
@pytest.mark.parametrize(("name", "count"), POINTS, ids=[f"{name}-{count}" for name, count in POINTS])
def test_an_interruption_at_any_step_leaves_the_old_or_the_new(
    name: str, count: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _whole_save(tmp_path, 1)
    if way == "kill":
        _killed_in_child(lambda: _whole_save(tmp_path, 2), name, count)
    else:
        monkeypatch.setattr(folder, "on_step", _at(name, count, _raise))
        with pytest.raises((_Interrupted, CheckpointException)):
            _whole_save(tmp_path, 2)
        monkeypatch.undo()
    is_moved = folder.STEPS.index(name) >= folder.STEPS.index("latest_moved")
    assert folder.read_latest(tmp_path) == (2 if is_moved else 1)
    for iteration in folder.committed_iterations(tmp_path):
        _assert_holds(folder.iteration_folder(tmp_path, iteration), float(iteration))
    assert folder.read_latest(tmp_path) in folder.committed_iterations(tmp_path)
    folder.clean_interrupted(tmp_path)
    _whole_save(tmp_path, 2)  # As the run that resumes from 1 does, or in place of itself.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", folder.LATEST]
    _assert_holds(tmp_path / "iter_0000002", 2.0)


# --- disks and permissions ---


@pytest.mark.parametrize("suffix", [".distcp", ".metadata.tmp"])
@pytest.mark.parametrize("numel", [1, 100_000])
def test_a_full_disk_is_named(suffix: str, numel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "c", _state(1.0))
    fill_disk(monkeypatch, suffix)
    error = _failure(lambda: _save(tmp_path / "c", {"weight": torch.ones(numel)}, "ff"))
    assert isinstance(error, CheckpointError)
    needed = f" {4 * numel} bytes" if suffix == ".distcp" else ""
    assert f"expected to write{needed}, got No space left on device with " in str(error)
    assert f"bytes free in {tmp_path / 'c.incomplete-ff'}" in str(error)
    _assert_holds(tmp_path / "c", 1.0)
    monkeypatch.undo()
    folder.clean_interrupted(tmp_path)
    _save(tmp_path / "c", _state(2.0), "fe")
    _assert_holds(tmp_path / "c", 2.0)


def test_a_limit_on_files_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        error = _failure(lambda: _save(tmp_path / "c", _state(1.0, 1 << 19)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(error, CheckpointError) and f"got {os.strerror(errno.EFBIG)} with" in str(error)


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: Namespace(total=10_000, free=4039))
    error = _failure(lambda: _save(tmp_path / "c", _state(1.0)))
    assert "expected 4040 bytes free for the checkpoint, got 4039." in str(error)  # 1000 and 10 of 4 bytes.
    assert list(folder.staging_path(tmp_path / "c", "0a").iterdir()) == []
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: Namespace(total=0, free=0))
    _save(tmp_path / "d", _state(1.0))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    error = _failure(lambda: _save(tmp_path / "file" / "c", _state(1.0)))
    assert isinstance(error, CheckpointError) and f"{tmp_path / 'file' / 'c.incomplete-0a'}: expected to" in str(error)
    assert "Not a directory" in str(error) and f"bytes free in {tmp_path}." in str(error)


def test_errors_that_are_not_of_the_disk_stay(tmp_path: Path) -> None:
    error = _failure(lambda: _save(tmp_path / "c", {"function": lambda: None}))
    assert not isinstance(error, CheckpointError) and "pickle" in str(error)


# --- nothing is left out ---


def test_an_item_that_a_rank_leaves_out_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_items = writer.write_items
    monkeypatch.setattr(writer, "write_items", lambda *given: write_items(*given)[1:])
    error = _failure(lambda: _save(tmp_path / "c", _state(1.0)))
    assert isinstance(error, CheckpointError) and "got 1 not written: args" in str(error)
    assert not (folder.staging_path(tmp_path / "c", "0a") / ".metadata").exists()


def test_a_rank_whose_results_are_missing_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = CheckpointWriter.finish
    monkeypatch.setattr(CheckpointWriter, "finish", lambda self, metadata, results: finish(self, metadata, [[]]))
    state = {f"t{i}": torch.ones(1) for i in range(7)}
    error = _failure(lambda: _save(tmp_path / "c", state))
    assert "expected all 7 planned items to be written, got 7 not written: t0, t1, t2, t3, t4, ..." in str(error)


# --- two ranks ---


def _rank_state(value: float) -> dict[str, Any]:
    return {"shared": torch.full((50,), value), f"own{dist.get_rank()}": torch.full((dist.get_rank() + 3,), value)}


def _save_on_ranks(final: str) -> None:
    _save_collectively(Path(final), 1.0, "aa")
    path = Path(final)
    assert folder.verify_files(path, checksums=True, needs_manifest=True) == []
    assert sorted(folder.read_manifest(path) or {}) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    target = {"shared": torch.zeros(50), "own0": torch.zeros(3), "own1": torch.zeros(4)}
    dcp.load(target, checkpoint_id=path)
    assert all(tensor.eq(1).all() for tensor in target.values())


def _save_collectively(final: Path, value: float, token: str) -> None:
    staging = folder.staging_path(final, token)
    dcp.save(_rank_state(value), storage_writer=CheckpointWriter(staging))
    if dist.get_rank() == 0:
        folder.commit(staging, final)
    dist.barrier()


def _fail_on_one_rank(save_dir: str, failing: int) -> float:
    path, start = Path(save_dir) / "c", time.monotonic()
    _save_collectively(path, 1.0, "a0")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing:
            fill_disk(patch, ".distcp")
        error = _failure(lambda: _save_collectively(path, 2.0, "a1"))
        assert isinstance(error, CheckpointError) and "No space left on device" in str(error)
    loaded = {"shared": torch.zeros(50)}
    dcp.load(loaded, checkpoint_id=path)
    assert loaded["shared"].eq(1).all()
    _save_collectively(path, 3.0, "a2")  # The ranks still agree on what comes next.
    dcp.load(loaded, checkpoint_id=path)
    assert loaded["shared"].eq(3).all()
    return time.monotonic() - start


def _save_on_one_rank_only(final: str) -> None:
    state = {"t": torch.ones(3)} if dist.get_rank() == 0 else {}
    staging = folder.staging_path(Path(final), "aa")
    dcp.save(state, storage_writer=CheckpointWriter(staging))
    assert sorted(path.name for path in staging.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]


def test_two_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _save_on_ranks, str(tmp_path / "c"))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_one_of_all(failing: int, tmp_path: Path) -> None:
    assert max(run_ranks(2, _fail_on_one_rank, str(tmp_path), failing)) < 10


def test_a_rank_with_nothing_to_write_has_no_file(tmp_path: Path) -> None:
    run_ranks(2, _save_on_one_rank_only, str(tmp_path / "c"))


def test_damage_of_the_data_is_found(tmp_path: Path) -> None:
    _save(tmp_path / "c", _state(1.0))
    path = tmp_path / "c" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    _load(tmp_path / "c")  # Stock DCP notices nothing.
    assert folder.verify_files(tmp_path / "c", checksums=False) == []
    assert "expected crc32" in folder.verify_files(tmp_path / "c", checksums=True)[0]
