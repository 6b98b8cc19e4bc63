# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A short run of the kill test, and what its judge must find. `kill_during_save.py` has the command of the long run."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from megatron.core.distributed.fsdp.experimental.checkpoint import folder
from megatron.core.distributed.fsdp.experimental.checkpoint.writer import CheckpointWriter
from tests.reliability.kill_during_save import STEPS, Outcome, check, plan
from tests.reliability.trainer import Life, expected_entries, expected_generator

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_killed_training_resumes_from_its_last_checkpoint() -> None:
    program = [sys.executable, "-W", "ignore", "-m", "tests.reliability.kill_during_save", "--kills", "6"]
    run = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 kills" in run.stdout and "0 lives with something wrong" in run.stdout


def test_fifty_kills_come_at_every_step_and_moment() -> None:
    planned = plan(50, 2, 0)
    assert planned == plan(50, 2, 0) != plan(50, 2, 1)
    assert {kill.suicide.step for kill in planned if kill.suicide} == set(STEPS)
    assert {kill.victims for kill in planned if kill.delay_s} == {(0,), (1,), (0, 1)}


def _save(save_dir: Path, iteration: int, state_of: int) -> None:
    """Save for `iteration` what a rank has after `state_of` iterations."""
    objects = {"info": None, "optimizer.settings": None, "extra": Namespace(value={"iteration": state_of})}
    generator = {"rng.0": Namespace(torch=[expected_generator(0, state_of)])}
    state = {**expected_entries(1, state_of), **objects, **generator}
    final = folder.iteration_folder(save_dir, iteration)
    staging = folder.staging_path(final, "0")
    dcp.save(state, storage_writer=CheckpointWriter(staging), no_dist=True)
    folder.commit(staging, final)
    folder.write_latest(save_dir, iteration)


def _flip_a_byte(save_dir: Path) -> None:
    path = save_dir / "iter_0000002" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda save_dir: None, None),
        (_flip_a_byte, "expected crc32"),
        (lambda save_dir: folder.write_latest(save_dir, 1), "latest is 1, 2 was saved"),
        (lambda save_dir: folder.write_latest(save_dir, 3), r"latest is 3, of \[2\]"),
        (lambda save_dir: (save_dir / folder.LATEST).write_text(""), "expected the number of an iteration"),
        (lambda save_dir: _save(save_dir, 3, 2), "iter_0000003: wrong extra"),
    ],
)
def test_the_judge_finds_what_is_wrong(damage: Callable[[Path], None], problem: str | None, tmp_path: Path) -> None:
    life = Life(0, 1, tmp_path)
    life.save_dir.mkdir()
    _save(life.save_dir, 2, 2)
    damage(life.save_dir)
    outcome = Outcome(plan(1, 1, 0)[0], [(0, ("begins", 2, True)), (0, ("saved", 2))])
    check(life, outcome, None)
    if problem is None:
        assert outcome.problems == [] and outcome.latest == 2
    else:
        assert re.search(problem, outcome.problems[0])


def test_the_judge_compares_a_life_with_the_one_before(tmp_path: Path) -> None:
    life = Life(1, 1, tmp_path)
    life.save_dir.mkdir()
    before = Outcome(None, latest=2)
    _save(life.save_dir, 2, 2)
    outcome = Outcome(None, [(0, ("resumes", 1, ["shared"])), (0, ("cleans", [], ["iter_0000003.incomplete-0"]))])
    check(life, outcome, before)
    assert outcome.problems == [
        "cleaning has removed [] and left ['iter_0000003.incomplete-0']",
        "resumed from 1, the latest was 2",
        "resumed from 1 with wrong ['shared']",
        "has not ended",
    ]
