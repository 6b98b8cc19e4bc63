# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs programs in batches on worlds of several sizes at a time, and finds out which one has failed, and how."""

from __future__ import annotations

import itertools
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tests.fuzz.bugs import plant
from tests.fuzz.program import Program
from tests.fuzz.reference import difference, run_reference, tolerance
from tests.fuzz.sharded import run_sharded
from tests.unit_tests.launch import run_ranks

BATCH_SIZE = 25
BATCH_TIMEOUT_S = 120
SINGLE_TIMEOUT_S = 30
MEETING_S = 5


@dataclass(frozen=True)
class Failure:
    """A program that went wrong, and what was seen."""

    program: Program
    text: str

    @property
    def kind(self) -> str:
        """The first word of the text: race, loss, gradient, weight, error, ranks (which differ) or batch."""
        return self.text.split(maxsplit=1)[0].rstrip(":")


def find_failures(
    programs: Iterable[Program],
    *,
    bug: str | None = None,
    max_failures: int | None = None,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[Sequence[str | None]], None] = lambda outcomes: None,
) -> list[Failure]:
    """Run programs, each world size in a thread of its own, and return those that failed.

    Args:
        programs: what to run.
        bug: key of `bugs.BUGS` to plant in the runtime, or None.
        max_failures: how many failures are enough to stop.
        batch_size: programs per call of the workers.
        on_progress: told what came of the programs that have just been run, in any thread.
    """
    by_world: dict[int, list[Program]] = {}
    for program in programs:
        by_world.setdefault(program.world_size, []).append(program)

    found: list[Failure] = []

    def search(waiting: Sequence[Program]) -> None:
        while waiting and (max_failures is None or len(found) < max_failures):
            outcomes = _run_batch(waiting[:batch_size], bug)
            found.extend(Failure(p, text) for p, text in zip(waiting, outcomes, strict=False) if text is not None)
            waiting = waiting[len(outcomes) :]
            on_progress(outcomes)

    with ThreadPoolExecutor(max(1, len(by_world))) as threads:
        list(threads.map(search, by_world.values()))
    return sorted(found, key=lambda failure: failure.program.seed)


def run_program(program: Program, *, bug: str | None = None) -> str | None:
    """Run one program; return what went wrong, or None."""
    # New workers take a while to start, which is no part of the program's time.
    run_ranks(program.world_size, play, [], None, timeout_s=BATCH_TIMEOUT_S)
    try:
        return _merge(run_ranks(program.world_size, play, [program], bug, timeout_s=SINGLE_TIMEOUT_S))[0]
    except AssertionError as error:
        return f"ranks: {error}"


def _run_batch(programs: Sequence[Program], bug: str | None) -> list[str | None]:
    """Run programs of one world size up to the first that raises; return their outcomes, at least one."""
    if len(programs) == 1:
        return [run_program(programs[0], bug=bug)]
    try:
        answers = run_ranks(programs[0].world_size, play, list(programs), bug, timeout_s=BATCH_TIMEOUT_S)
        return _merge(answers)
    except AssertionError as error:
        outcomes: list[str | None] = []
        for program in programs:
            outcomes.append(run_program(program, bug=bug))
            if outcomes[-1] is not None:
                return outcomes
        outcomes[-1] = f"batch: no program fails alone, but from seed {programs[0].seed} on: {error}"
        return outcomes


def _merge(answers: Sequence[list[str | None]]) -> list[str | None]:
    """Return one outcome per program that all ranks have run: the first rank's complaint, or None."""
    return [next((text for text in texts if text is not None), None) for texts in zip(*answers, strict=False)]


def play(programs: Sequence[Program], bug: str | None) -> list[str | None]:
    """Run programs on this rank; return what went wrong with each, up to the first that raises.

    Raises:
        AssertionError: a program raised here and not on all other ranks, which may be stuck now.
    """
    # Reentrant checkpoints say that no input needs a gradient, which is what a program may ask for.
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad", category=UserWarning)
    outcomes: list[str | None] = []
    with plant(bug):
        for program in programs:
            try:
                outcomes.append(_check(program))
            except Exception as error:
                if not _all_ranks_arrive():
                    raise AssertionError(f"rank {dist.get_rank()} alone has failed") from error
                outcomes.append(f"error: {traceback.format_exc()}")
                break
    return outcomes


def _all_ranks_arrive() -> bool:
    """Return whether every rank calls this within some seconds; needs no collective."""
    store = dist.distributed_c10d._get_default_store()
    number = next(_meetings)
    store.set(f"fuzz-{number}-{dist.get_rank()}", "")
    try:
        store.wait([f"fuzz-{number}-{rank}" for rank in range(dist.get_world_size())], timedelta(seconds=MEETING_S))
    except RuntimeError:
        return False
    return True


_meetings = itertools.count()


def _check(program: Program) -> str | None:
    record = run_sharded(program)
    rank = dist.get_rank()
    # One rank compares, another one for every program.
    if rank != program.seed % program.world_size:
        return f"race: {record.races[0]}" if record.races else None
    return difference(record, run_reference(program, rank), tolerance(program))
