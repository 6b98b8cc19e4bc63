# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Kills a training that saves all the time, again and again, and checks what is left after each kill.

    python -m tests.reliability.kill_during_save --kills 50 --seed 0 --ranks 2

Every life resumes from what the one before has left. It is killed, one rank or all, at a random moment or at a named
step of a save. Then the training folder has to name a committed checkpoint, not older than the last save that had
ended; every committed checkpoint has to be whole, and hold exactly the numbers of its iteration; and the next life has
to remove the leftovers and resume from it. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError, folder
from megatron.core.distributed.fsdp.experimental.checkpoint.reader import load_entry, load_metadata, read_box
from tests.reliability.trainer import KEPT, TIMEOUT_S, Life, Suicide, expected_entries, expected_generator, run

MOMENT_S = 0.4
"""Random kills come within this time after a life resumes."""

STEPS = [name for name in folder.STEPS if name != "set_aside"]
STEPS_OF_ALL_RANKS = ("file_opened", "data_synced")


@dataclass(frozen=True)
class Kill:
    """How a life ends.

    Attributes:
        victims: ranks that are killed.
        delay_s: when, after the life resumes or, with `at_start`, begins; None if `suicide` is the way.
        at_start: the life may not even have resumed.
        suicide: a rank kills itself at a step; the other victims are killed as soon as it is seen to be dead.
    """

    victims: tuple[int, ...]
    delay_s: float | None = None
    at_start: bool = False
    suicide: Suicide | None = None

    def __str__(self) -> str:
        if self.suicide is not None:
            return f"{self.suicide.step} #{self.suicide.count}"
        return f"{self.delay_s:.3f} s after {'start' if self.at_start else 'resume'}"


@dataclass
class Outcome:
    """What a life has reported, and what was wrong with it and with what it has left."""

    kill: Kill | None
    messages: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    latest: int = 0

    def reported(self, kind: str) -> list[tuple[Any, ...]]:
        """Return what all ranks have reported of one kind."""
        return [message[1:] for _, message in self.messages if message[0] == kind]

    @property
    def last_saved(self) -> int:
        """The last iteration whose save has ended on rank 0."""
        return max((message[1] for rank, message in self.messages if message[0] == "saved" and rank == 0), default=0)

    @property
    def during(self) -> str:
        """What the training was doing at its end."""
        begun = [message[1:] for rank, message in self.messages if message[0] == "begins" and rank == 0]
        if not begun:
            return "start"
        iteration, in_background = begun[-1]
        if iteration == self.last_saved:
            return "training"
        return "background save" if in_background else "sync save"


def plan(kills: int, ranks: int, seed: int) -> list[Kill]:
    """Return the kills of a run: about half at random moments, the others at the named steps in turn."""
    rng = random.Random(seed)
    steps = rng.sample(STEPS, len(STEPS))
    planned = []
    for number in range(kills):
        victims = tuple(range(ranks)) if rng.random() < 0.5 else (rng.randrange(ranks),)
        if number % 2:
            name = steps[number // 2 % len(steps)]
            rank = rng.choice(victims) if name in STEPS_OF_ALL_RANKS else 0
            suicide = Suicide(rank, name, rng.randint(1, 5))
            planned.append(Kill(victims if rank in victims else (rank,), suicide=suicide))
        else:
            is_at_start = len(victims) == ranks and rng.random() < 0.2  # A rank alone would wait for the others.
            planned.append(Kill(victims, rng.uniform(0, MOMENT_S), at_start=is_at_start))
    return planned


def live(life: Life, kill: Kill | None) -> Outcome:
    """Run one life to its end; survivors of a kill have to end by themselves."""
    context: Any = multiprocessing.get_context("forkserver")
    outcome, begin = Outcome(kill), time.monotonic()
    ranks_of: dict[Any, int] = {}
    processes = []
    for rank in range(life.ranks):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=run, args=(life, rank, theirs)))
        processes[-1].start()
        theirs.close()
        ranks_of[ours] = rank
    kill_at: float | None = None
    is_killed = kill is None
    while ranks_of and time.monotonic() < begin + TIMEOUT_S:
        wait_s = 0.2 if is_killed or kill_at is None else max(0.0, min(0.2, kill_at - time.monotonic()))
        for connection in multiprocessing.connection.wait(list(ranks_of), wait_s):
            try:
                outcome.messages.append((ranks_of[connection], connection.recv()))
            except EOFError:
                ranks_of.pop(connection)
        if kill is not None and kill_at is None:
            kill_at = _moment(kill, life, outcome, begin, set(ranks_of.values()))
        if kill is not None and not is_killed and kill_at is not None and time.monotonic() >= kill_at:
            is_killed = True
            for rank in kill.victims:
                processes[rank].kill()
    for rank, process in enumerate(processes):
        process.join(max(0.0, begin + TIMEOUT_S - time.monotonic()))
        if process.is_alive():
            outcome.problems.append(f"rank {rank} hangs")
            process.kill()
            process.join()
    return outcome


def _moment(kill: Kill, life: Life, outcome: Outcome, begin: float, living: set[int]) -> float | None:
    """Return when to kill, or None as long as that is not known."""
    if kill.suicide is not None:
        return None if kill.suicide.rank in living else time.monotonic()
    assert kill.delay_s is not None, "there are two ways"
    if kill.at_start:
        return begin + kill.delay_s
    return time.monotonic() + kill.delay_s if len(outcome.reported("resumes")) == life.ranks else None


def check(life: Life, outcome: Outcome, before: Outcome | None) -> None:
    """Find what is wrong after a life; `before` is what the life before has left."""
    problems = outcome.problems
    for removed, names in outcome.reported("cleans"):
        if not all("." in name for name in removed) or any(".incomplete-" in n or ".deleted-" in n for n in names):
            problems.append(f"cleaning has removed {removed} and left {names}")
    for iteration, differing in outcome.reported("resumes"):
        if before is not None and iteration != before.latest:
            problems.append(f"resumed from {iteration}, the latest was {before.latest}")
        if differing:
            problems.append(f"resumed from {iteration} with wrong {differing}")
    problems += [f"stopped: {text}" for (text,) in outcome.reported("stops") if outcome.kill is None]
    if outcome.kill is None and len(outcome.reported("ends")) != life.ranks:
        problems.append("has not ended")
    try:
        outcome.latest = folder.read_latest(life.save_dir) or 0
    except CheckpointError as error:
        problems.append(str(error))
    if outcome.latest < max(outcome.last_saved, before.latest if before else 0):
        problems.append(f"latest is {outcome.latest}, {outcome.last_saved} was saved")
    committed = folder.committed_iterations(life.save_dir)
    if outcome.latest and outcome.latest not in committed:
        problems.append(f"latest is {outcome.latest}, of {committed}")
    if len(committed) > KEPT + 2:
        problems.append(f"{len(committed)} checkpoints are left")
    for iteration in committed:
        problems += check_checkpoint(life, iteration)


def check_checkpoint(life: Life, iteration: int) -> list[str]:
    """Return what is wrong with a committed checkpoint."""
    path = folder.iteration_folder(life.save_dir, iteration)
    problems = folder.verify_files(path, checksums=True, needs_manifest=True)
    if problems:
        return problems
    metadata = load_metadata(path)
    expected = expected_entries(life.ranks, iteration)
    objects = {"info", "extra", "optimizer.settings", *(f"rng.{rank}" for rank in range(life.ranks))}
    wrong = sorted(metadata.state_dict_metadata.keys() ^ (expected.keys() | objects))
    for key in expected.keys() - set(wrong):
        found = read_box(path, metadata, key, (0,) * expected[key].ndim, expected[key].shape)
        wrong += [] if torch.equal(found, expected[key]) else [key]
    entries: dict[str, Any] = {key: load_entry(path, metadata, key) for key in objects - set(wrong)}
    for rank in range(life.ranks):
        generator = entries.get(f"rng.{rank}")
        is_right = generator and torch.equal(generator.torch[0], expected_generator(rank, iteration))
        wrong += [] if is_right else [f"rng.{rank}"]
    wrong += [] if "extra" in entries and entries["extra"].value == {"iteration": iteration} else ["extra"]
    return [f"{path.name}: wrong {key}" for key in sorted(set(wrong))]


def leftovers(save_dir: Path) -> int:
    """Return how much an interrupted save has left."""
    names = [path.name for path in save_dir.iterdir()] if save_dir.is_dir() else []
    return sum(".incomplete-" in name or ".deleted-" in name for name in names)


def run_lives(kills: int, seed: int, ranks: int, work_dir: Path) -> list[Outcome]:
    """Run all lives, the last of which ends by itself, and print a line for each."""
    print(f"{'life':>4}  {'killed at':<28} {'ranks':<6} {'during':<16} {'saves':>5} {'latest':>6} {'left':>4}  result")
    outcomes: list[Outcome] = []
    for number, kill in enumerate([*plan(kills, ranks, seed), None]):
        life = Life(number, ranks, work_dir, kill.suicide if kill else None, None if kill else 4)
        outcome = live(life, kill)
        check(life, outcome, outcomes[-1] if outcomes else None)
        outcomes.append(outcome)
        victims = "-" if kill is None else ",".join(map(str, kill.victims))
        result = " ".join("; ".join(outcome.problems).split()) or "ok"
        saves = len(set(outcome.reported("saved")))
        print(
            f"{number:>4}  {kill or 'not killed'!s:<28} {victims:<6} {outcome.during:<16} {saves:>5} "
            f"{outcome.latest:>6} {leftovers(life.save_dir):>4}  {result}",
            flush=True,
        )
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.reliability.trainer"])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp-kills-") as work_dir:
        outcomes = run_lives(options.kills, options.seed, options.ranks, Path(work_dir))
    killed = [outcome for outcome in outcomes if outcome.kill]
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    during = ", ".join(f"{count} during {what}" for what, count in sorted(Counter(o.during for o in killed).items()))
    print(f"{len(killed)} kills ({during}) in {time.monotonic() - begin:.0f} s: {wrong} lives with something wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
