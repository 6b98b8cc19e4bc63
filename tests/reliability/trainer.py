# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A rank that trains and saves all the time, for `kill_during_save.py` to kill. Its numbers can be computed anew."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.distributed.fsdp.experimental.checkpoint import folder
from megatron.core.distributed.fsdp.experimental.checkpoint.background import BackgroundSave
from megatron.core.distributed.fsdp.experimental.checkpoint.staging import HostStaging
from megatron.core.distributed.fsdp.experimental.checkpoint.writer import CheckpointWriter

KEPT = 2
NUMEL = 30_000
TIMEOUT_S = 60


@dataclass(frozen=True)
class Suicide:
    """A rank kills itself when a step of a save has come for the `count`th time."""

    rank: int
    step: str
    count: int


@dataclass(frozen=True)
class Life:
    """One start of the training: it ends when killed, or after `max_saves`."""

    number: int
    ranks: int
    work_dir: Path
    suicide: Suicide | None = None
    max_saves: int | None = None

    @property
    def save_dir(self) -> Path:
        """Where checkpoints go."""
        return self.work_dir / "checkpoints"


class Saver:
    """What a training loop keeps for its saves, sync or in the background."""

    def __init__(self, life: Life, report: Callable[..., None]) -> None:
        self.life = life
        self.report = report
        self.group: Any = dist.new_group(backend="gloo")  # Of its own: training communicates meanwhile.
        self.staging = HostStaging()
        self.background = BackgroundSave()

    def save(self, iteration: int, state: dict[str, Any], in_background: bool) -> None:
        """Save a checkpoint and make it the latest; the only place that knows how."""
        self.background.wait()  # It reads the memory that `stage` overwrites.
        self.report("begins", iteration, in_background)
        if in_background:
            staged = self.staging.stage(state)
            self.background.start(lambda: self._write(iteration, staged))
        else:
            self._write(iteration, state)

    def _write(self, iteration: int, state: dict[str, Any]) -> None:
        final = folder.iteration_folder(self.life.save_dir, iteration)
        staging = folder.staging_path(final, f"{self.life.number}")
        dcp.save(state, storage_writer=CheckpointWriter(staging), process_group=self.group)
        if dist.get_rank() == 0:
            folder.commit(staging, final)
            folder.write_latest(self.life.save_dir, iteration)
            folder.keep_last(self.life.save_dir, KEPT)
        self.report("saved", iteration)
        dist.barrier(self.group)


def initial_state(rank: int) -> dict[str, Any]:
    """Return the state of a rank before the first iteration."""
    return {
        "shared": torch.arange(NUMEL),
        f"rank{rank}": torch.arange(NUMEL // 3) * (rank + 7),
        "moments": {"shared": torch.zeros(NUMEL)},
        "iteration": 0,
    }


def train_step(state: dict[str, Any], rank: int) -> None:
    """Train one iteration: the numbers depend on all earlier ones."""
    for name in ("shared", f"rank{rank}"):
        state[name].mul_(1103515245).add_(12345).remainder_(1 << 31)
    state["moments"]["shared"].mul_(0.9).add_(state["shared"].float() / (1 << 31))
    state["iteration"] += 1


def differing_keys(state: dict[str, Any], rank: int, iteration: int) -> list[str]:
    """Return the keys whose values are not exactly those that `iteration` iterations give."""
    expected = initial_state(rank)
    for _ in range(iteration):
        train_step(expected, rank)
    moments = state.pop("moments"), expected.pop("moments")
    pairs = {key: (state[key], expected[key]) for key in expected} | {"moments": tuple(m["shared"] for m in moments)}
    state["moments"] = moments[0]
    is_equal = {key: torch.equal(*pair) if key != "iteration" else pair[0] == pair[1] for key, pair in pairs.items()}
    return [key for key, equal in is_equal.items() if not equal]


def run(life: Life, rank: int, connection: Connection) -> None:
    """Be one rank of a life, and report what happens through `connection`."""
    lock = threading.Lock()

    def report(*message: Any) -> None:
        with lock:
            connection.send(message)

    if life.suicide is not None and life.suicide.rank == rank:
        folder.on_step = _killing_at(life.suicide)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(life.work_dir / f"store{life.number}"), life.ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=life.ranks, timeout=timedelta(seconds=TIMEOUT_S)
        )
        _train(life, rank, report)
    except (RuntimeError, CheckpointException) as error:  # Another rank is dead.
        report("stops", f"{type(error).__name__}: {error}")


def _train(life: Life, rank: int, report: Callable[..., None]) -> None:
    saver = Saver(life, report)
    if rank == 0:
        life.save_dir.mkdir(exist_ok=True)
        removed = [path.name for path in folder.clean_interrupted(life.save_dir)]
        report("cleans", removed, sorted(path.name for path in life.save_dir.iterdir()))
    dist.barrier()
    state, start = initial_state(rank), folder.read_latest(life.save_dir) or 0
    if start:
        dcp.load(state, checkpoint_id=folder.iteration_folder(life.save_dir, start))
    report("resumes", start, differing_keys(state, rank, start))
    for iteration in itertools.count(start + 1):
        train_step(state, rank)
        dist.all_reduce(state["shared"].sum())
        saver.background.poll()
        saver.save(iteration, state, in_background=iteration % 2 == 0)
        if iteration - start == life.max_saves:
            break
    saver.background.wait()
    report("ends", iteration)


def _killing_at(suicide: Suicide) -> Callable[[str], None]:
    left = suicide.count

    def on_step(name: str) -> None:
        nonlocal left
        left -= name == suicide.step
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_step
