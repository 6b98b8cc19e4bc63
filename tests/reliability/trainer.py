# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A rank that trains a sharded model and saves all the time, for `kill_during_save.py` to kill.

Its numbers can be computed anew: plain training in one process gives the same bits.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    CheckpointSaver,
    Placements,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.experimental.checkpoint import data_files, folder, write

KEPT = 2
DRAWN = 3
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


class Part(nn.Module):
    """Weights whose gradient is the input: sums of few-digit numbers, so that no order of adding rounds them."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.weight * inputs.view(self.weight.shape)).sum()


class Model(nn.Module):
    """Two units within a third one; shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(61, 43), Part(7, 5, 3, 11)])
        self.own = Part(1, 17)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, iteration: int, rank: int, ranks: int) -> torch.Tensor:
        self.seen += 1
        losses = [
            part(_inputs(part.weight.numel() + number, iteration, rank, ranks)[number:])
            for number, part in enumerate([*self.parts, self.own])
        ]
        return torch.stack(losses).sum()


def _inputs(numel: int, iteration: int, rank: int, ranks: int) -> torch.Tensor:
    """Return multiples of ranks / 8, so that their mean over ranks is exact, too."""
    return ((torch.arange(numel) * 5 + iteration * 7 + rank * 3) % 16 - 8) * (ranks / 8)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)


@cache
def expected_entries(ranks: int, iteration: int) -> dict[str, Any]:
    """Return what a checkpoint of an iteration holds, by key, from a training of one process without any sharding.

    Random generators are not among it, but `expected_generator`'s.
    """
    if iteration == 0:
        return {}
    model = Model()
    optimizer = _optimizer(model)
    start = iteration - 1
    if start:
        before = expected_entries(ranks, start)
        model.load_state_dict({name: before[f"model.{name}"].clone() for name in model.state_dict()})
        for name, parameter in model.named_parameters():
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {key: before[f"optimizer.state.{name}.{key}"].clone() for key in keys}
    for number, parameter in enumerate(model.parameters()):
        every = [_inputs(parameter.numel() + number, iteration, rank, ranks)[number:] for rank in range(ranks)]
        parameter.grad = torch.stack(every).mean(0).view(parameter.shape)
    optimizer.step()
    states = {
        f"optimizer.state.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    weights = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    return {**weights, "model.seen": torch.tensor(iteration), **states}


def expected_generator(rank: int, iteration: int) -> torch.Tensor:
    """Return the state of a rank's random number generator after an iteration."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(iteration):
        torch.rand(DRAWN, generator=generator)
    return generator.get_state()


class Training:
    """The sharded model, its optimizer, and its saves."""

    def __init__(self, life: Life, rank: int, report: Callable[..., None]) -> None:
        self.life, self.rank, self.report = life, rank, report
        torch.manual_seed(rank)
        mesh = init_device_mesh("cpu", (life.ranks,))
        placements = Placements.from_strategy("optim_grads_params")
        self.model: Any = Model()
        for unit in (*self.model.parts, self.model):
            fully_shard(unit, mesh, placements)
        self.optimizer: Any = fully_shard_optimizer(_optimizer(self.model))
        self.saver = CheckpointSaver(self.model)

    def step(self, iteration: int) -> None:
        """Train one iteration: the numbers depend on all earlier ones."""
        torch.rand(DRAWN)
        self.model(iteration, self.rank, self.life.ranks).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, iteration: int, in_background: bool) -> None:
        """Save a checkpoint and make it the latest; the only place that knows how."""
        path, extra = folder.iteration_folder(self.life.save_dir, iteration), {"iteration": iteration}

        def after_commit() -> None:
            folder.write_latest(self.life.save_dir, iteration)
            folder.keep_last(self.life.save_dir, KEPT)
            self.report("saved", iteration)

        self.saver.wait()
        self.report("begins", iteration, in_background)
        # A life that was killed before the latest moved has left one of this iteration: hence overwrite.
        options: dict[str, Any] = {"extra": extra, "overwrite": True, "after_commit": after_commit}
        if in_background:
            self.saver.save(self.optimizer, path, **options)
        else:
            save_checkpoint(self.model, self.optimizer, path, **options)

    def load(self, iteration: int) -> list[str]:
        """Load the checkpoint of an iteration; return the keys of what is not exactly as it was."""
        path = folder.iteration_folder(self.life.save_dir, iteration)
        report = load_checkpoint(self.model, self.optimizer, path)
        found = {f"model.{name}": (None, buffer) for name, buffer in self.model.named_buffers()}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = (parameter, parameter.to_local())
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.state.{name}.{key}"] = (parameter if value.ndim else None, value)
        expected = expected_entries(self.life.ranks, iteration)
        wrong = sorted(found.keys() ^ expected.keys())
        for key in found.keys() & expected.keys():
            parameter, local = found[key]
            owned = (
                slice(None)
                if parameter is None
                else slice(parameter.geometry.owned.start, parameter.geometry.owned.stop)
            )
            wrong += [] if torch.equal(local.reshape(-1), expected[key].reshape(-1)[owned]) else [key]
        wrong += [] if torch.equal(torch.get_rng_state(), expected_generator(self.rank, iteration)) else ["rng"]
        return wrong + ([] if report.extra == {"iteration": iteration} else ["extra"])


def run(life: Life, rank: int, connection: Connection) -> None:
    """Be one rank of a life, and report what happens through `connection`."""
    lock = threading.Lock()

    def report(*message: Any) -> None:
        with lock:
            connection.send(message)

    if life.suicide is not None and life.suicide.rank == rank:
        folder.on_step = _killing_at(life.suicide)
    if life.number % 2:  # As where checkpoints are large: several files a rank.
        data_files.LEAST_FILE_BYTES = 1
        write.num_threads = lambda hosts, index: 3
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
    training = Training(life, rank, report)
    if rank == 0:
        life.save_dir.mkdir(exist_ok=True)
        removed = [path.name for path in folder.clean_interrupted(life.save_dir)]
        report("cleans", removed, sorted(path.name for path in life.save_dir.iterdir()))
    dist.barrier()
    start = folder.read_latest(life.save_dir) or 0
    report("resumes", start, training.load(start) if start else [])
    for iteration in itertools.count(start + 1):
        training.step(iteration)
        training.saver.poll()
        training.save(iteration, in_background=iteration % 2 == 0)
        if iteration - start == life.max_saves:
            break
    training.saver.wait()
    report("ends", iteration)


def _killing_at(suicide: Suicide) -> Callable[[str], None]:
    left = suicide.count

    def on_step(name: str) -> None:
        nonlocal left
        left -= name == suicide.step
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_step
