# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`CheckpointSaver` writes what was there at the call while training goes on, and tells every rank if it could not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import CheckpointError, CheckpointSaver, load_checkpoint
from megatron.core.distributed.fsdp.experimental.checkpoint import background_writer, write_checkpoint
from megatron.core.distributed.fsdp.experimental.checkpoint import folder as folders
from tests.unit_tests.checkpoint.files import fill_disk
from tests.unit_tests.checkpoint.test_load import CUT, OTHER
from tests.unit_tests.checkpoint.zoo import assert_same, everything, make, train
from tests.unit_tests.launch import run_ranks

REPOSITORY = Path(__file__).resolve().parents[3]


@contextmanager
def _held_writes() -> Iterator[threading.Event]:
    """Let no file be written before the event is set."""
    may_write = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "on_step", lambda name: may_write.wait(60))
        try:
            yield may_write
        finally:
            may_write.set()


def _assert_holds(path: Path, whole: dict[str, Any], extra: Any = None) -> None:
    model, optimizer = make(OTHER, "adam")
    assert load_checkpoint(model, optimizer, path, verify="checksums").extra == extra
    assert_same(model, optimizer, whole)


def _train_meanwhile(folder: str) -> None:
    model, optimizer = make(CUT, "adam")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    saver = CheckpointSaver(model)
    for number in range(2):  # The second save uses the memory of the first.
        train(model, optimizer, range(2))
        path, extra = Path(folder, f"{number}"), {"list": [number]}
        with _held_writes() as may_write:
            whole, state = everything(model, optimizer), dict(schedule.state_dict())
            saver.save(optimizer, path, extra=extra, scheduler=schedule)
            extra["list"].append("later")
            train(model, optimizer, range(2, 5))
            schedule.step()
            saver.poll()
            assert not path.exists()
            may_write.set()
            saver.wait()
        _assert_holds(path, whole, {"list": [number]})
        model_again, optimizer_again = make(OTHER, "adam")
        schedule_again = torch.optim.lr_scheduler.ExponentialLR(optimizer_again, 0.5)
        load_checkpoint(model_again, optimizer_again, path, scheduler=schedule_again)
        assert schedule_again.last_epoch == state["last_epoch"] == number


def test_training_goes_on_and_values_are_those_of_the_call(tmp_path: Path) -> None:
    run_ranks(2, _train_meanwhile, str(tmp_path), timeout_s=60)


def _save_again(folder: str) -> None:
    model, optimizer = make(CUT, "adam")
    saver = CheckpointSaver(model)
    first, second = Path(folder, "first"), Path(folder, "second")
    with _held_writes() as may_write:
        before = everything(model, optimizer)
        saver.save(optimizer, first)
        train(model, optimizer, range(2))
        after = everything(model, optimizer)
        timer = threading.Timer(0.3, may_write.set)
        timer.start()
        begin = time.monotonic()
        saver.save(optimizer, second)
        assert time.monotonic() - begin > 0.2 and first.exists()
        timer.join()
        saver.wait()
    _assert_holds(first, before)
    _assert_holds(second, after)
    with pytest.raises(CheckpointError, match="expected no checkpoint there yet"):
        saver.save(optimizer, second)
        saver.wait()
    saver.save(optimizer, second, overwrite=True)
    saver.wait()


def test_the_next_save_waits(tmp_path: Path) -> None:
    run_ranks(2, _save_again, str(tmp_path), timeout_s=60)


def _write_late(*arguments: Any, **options: Any) -> None:
    """Let a rank's thread end later than the others'."""
    try:
        write_checkpoint(*arguments, **options)
    finally:
        time.sleep(0.3)


def _poll(saver: CheckpointSaver, step: Callable[[], object]) -> None:
    """Train until the error comes, which has to be at the same step of every rank: a step takes all of them."""
    for _ in range(10_000):
        step()
        saver.poll()
    raise AssertionError("no error in 10,000 steps")


def _fail(folder: str, failing: int, way: str) -> None:
    rank, folder_path = dist.get_rank(), Path(folder)
    model, optimizer = make(CUT, "adam")
    saver = CheckpointSaver(model)
    good, bad, later = (folder_path / name for name in ("good", "bad", "later"))
    whole = everything(model, optimizer)
    saver.save(optimizer, good)
    saver.wait()
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            fill_disk(patch, ".distcp")
        if rank == 1:
            patch.setattr(background_writer, "write_checkpoint", _write_late)
        saver.save(optimizer, bad)
        with pytest.raises(CheckpointError, match="No space left on device"):
            if way == "poll":
                _poll(saver, lambda: train(model, optimizer, range(1)))
            elif way == "wait":
                saver.wait()
            else:
                saver.save(optimizer, later)
    saver.poll()
    saver.wait()
    dist.barrier()
    assert sorted(os.listdir(folder_path)) == ["good"]
    train(model, optimizer, range(2))
    last = everything(model, optimizer)
    saver.save(optimizer, later)
    saver.wait()
    _assert_holds(good, whole)
    _assert_holds(later, last)


@pytest.mark.parametrize("way", ["poll", "wait", "save"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_save_surfaces_on_every_rank_and_training_goes_on(failing: int, way: str, tmp_path: Path) -> None:
    run_ranks(2, _fail, str(tmp_path), failing, way, timeout_s=60)


def _collect_wrongly(folder: str) -> None:
    model, optimizer = make(CUT, "adam")
    saver = CheckpointSaver(model)
    with pytest.raises(CheckpointError, match="keys of save_checkpoint: expected the same on all 2 ranks"):
        saver.save(optimizer if dist.get_rank() else None, Path(folder, "c"))
    model.layers[0].unshard()
    with pytest.raises(CheckpointError, match="expected a unit at rest, got gathered parameters"):
        saver.save(optimizer, Path(folder, "c"))
    model.layers[0].reshard()
    assert os.listdir(folder) == []
    saver.save(optimizer, Path(folder, "c"))
    saver.wait()


def test_what_cannot_be_saved_is_said_at_the_call(tmp_path: Path) -> None:
    run_ranks(2, _collect_wrongly, str(tmp_path), timeout_s=60)


PROGRAM = """
import os, sys, time
import torch.distributed as dist
from megatron.core.distributed.fsdp.experimental import CheckpointSaver
from megatron.core.distributed.fsdp.experimental.checkpoint import data_files, folder, write
from tests.unit_tests.checkpoint.zoo import Cut, make, train

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store", 1), rank=0, world_size=1)
model, optimizer = make(Cut(), "adam")
train(model, optimizer, range(2))
folder.on_step = lambda name: time.sleep(0.05)
data_files.LEAST_FILE_BYTES, write.num_threads = 1, lambda hosts, index: 3
CheckpointSaver(model).save(optimizer, sys.argv[1] + "/c")
print("at the end of the program the checkpoint exists:", os.path.exists(sys.argv[1] + "/c"))
"""


def test_the_exit_waits_for_a_save(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0 and "the checkpoint exists: False" in run.stdout, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    assert folders.verify_files(tmp_path / "c", checksums=True, needs_manifest=True) == []
    assert (tmp_path / "c" / "__0_2.distcp").is_file()
