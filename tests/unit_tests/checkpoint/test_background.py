# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Saves beside the training: one at a time, errors once and in the training's thread, none lost at exit."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint.background import BackgroundSave


def _fail() -> None:
    raise OSError(28, "No space left on device")


def test_a_save_runs_beside_the_caller() -> None:
    background, may_end, threads = BackgroundSave(), threading.Event(), []

    def save() -> None:
        threads.append(threading.current_thread())
        assert may_end.wait(10)

    background.start(save)
    assert background.is_running
    background.poll()
    may_end.set()
    background.wait()
    assert not background.is_running and threads != [threading.current_thread()] and not threads[0].daemon
    background.wait()


def test_start_waits_for_the_save_before() -> None:
    background, log = BackgroundSave(), []
    may_end = threading.Event()

    def first() -> None:
        threading.Timer(0.05, may_end.set).start()
        assert may_end.wait(10)
        log.append("first ends")

    background.start(first)
    background.start(lambda: log.append("second"))
    background.wait()
    assert log == ["first ends", "second"]


def test_an_error_is_raised_once_and_the_next_save_runs() -> None:
    background, done = BackgroundSave(), []
    background.start(_fail)
    while background.is_running:
        background.poll()
    with pytest.raises(CheckpointError, match=r"expected it to finish, got OSError: .*No space left") as raised:
        background.poll()
    assert isinstance(raised.value.__cause__, OSError)
    background.poll()
    background.wait()
    background.start(lambda: done.append(1))
    background.wait()
    assert done == [1]


def test_start_raises_the_error_before_and_begins_nothing() -> None:
    background, done = BackgroundSave(), []
    background.start(_fail)
    with pytest.raises(CheckpointError):
        background.start(lambda: done.append(1))
    assert not done and not background.is_running


def test_our_own_error_is_raised_as_it_is() -> None:
    error = CheckpointError("iter_0000001: expected A, got B. Do C.")

    def save() -> None:
        raise error

    background = BackgroundSave()
    background.start(save)
    with pytest.raises(CheckpointError) as raised:
        background.wait()
    assert raised.value is error


def test_errors_that_are_no_exceptions_are_seen() -> None:
    def save() -> None:
        raise CheckpointException("write", {})

    background = BackgroundSave()
    background.start(save)
    with pytest.raises(CheckpointError, match="CheckpointException"):
        background.wait()


def test_an_error_that_nobody_has_seen_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    background = BackgroundSave()
    background.start(_fail)
    background._thread.join()  # type: ignore[union-attr]
    del background
    gc.collect()
    assert "A checkpoint was not saved:" in capsys.readouterr().err


SCRIPT = """
import sys, time
sys.modules["torch"] = None  # Not needed for this file, and slow to import.
import importlib.util, types
folder = sys.argv[1]
package = types.ModuleType("checkpoint"); package.__path__ = [folder]; sys.modules["checkpoint"] = package
from checkpoint.background import BackgroundSave
background = BackgroundSave()
def save():
    time.sleep(0.3)
    print("written", flush=True)
    if sys.argv[2] == "fail":
        raise OSError(28, "No space left on device")
background.start(save)
if sys.argv[2] == "error":
    raise RuntimeError("training failed")
"""


@pytest.mark.parametrize("way", ["end", "error", "fail"])
def test_exit_waits_for_a_save(way: str) -> None:
    from megatron.core.distributed.fsdp.experimental.checkpoint import background

    folder = str(Path(background.__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, way], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "written\n", run.stderr
    assert run.returncode == (1 if way == "error" else 0)
    assert ("A checkpoint was not saved:" in run.stderr and "No space left" in run.stderr) == (way == "fail")
