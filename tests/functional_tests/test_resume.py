# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs that go on from a checkpoint print what the straight run does; by torchrun, as a user starts them.

tests/unit_tests/pretrain/test_checkpointing.py tries the flags without torchrun.
"""

import re
import time

import pytest

from .golden import load_flags, read_flags, run_case
from .launch_script import Run, launch_once, launch_ranks_apart

FLAGS, RANKS = read_flags("dp2_resume")
SAVED = 20
_TIMES = re.compile(r"^ \[[^]]*\] |elapsed time per iteration \(ms\): \S+ \|")


def _lines(run: Run, after: int) -> list[str]:
    """Return the log lines of iterations after one, and those of evaluations from there on, without times."""
    lines = [_TIMES.sub("", line) for line in run.stdout.splitlines()]
    lines = [line for line in lines if line.startswith("iteration") or "validation loss" in line]
    first = next(i for i, line in enumerate(lines) if re.match(rf"iteration +{after + 1}/", line))
    return lines[first:]


def _close(one: Run, other: Run) -> None:
    pairs = [run.printed() for run in (one, other)]
    for key in ("lm loss", "validation loss"):
        count = min(len(printed[key]) for printed in pairs)
        assert count > 0
        first, second = ([float(value) for value in printed[key][-count:]] for printed in pairs)
        # Sums of the same microbatches in another order.
        assert first == pytest.approx(second, rel=1e-5)


def test_a_resumed_run_prints_the_lines_of_the_straight_one() -> None:
    straight, resumed = launch_once(FLAGS, RANKS), run_case("dp2_resume")
    expected = _lines(straight, SAVED)
    assert len([line for line in expected if line.startswith("iteration")]) == 40 - SAVED
    assert _lines(resumed, SAVED) == expected
    _close(straight, run_case("dp2_save_dp4_load"))


def test_another_model_ends_both_ranks_within_seconds() -> None:
    begin = time.monotonic()
    for run in launch_ranks_apart((*FLAGS, *load_flags("dp2_resume"), "--num-layers", "3"), RANKS):
        assert run.returncode != 0
        assert "expected a checkpoint of this model and optimizer, got " in run.stderr.splitlines()[-1], run.stderr
        assert "decoder.layers.2.mlp.linear_fc1.weight_w: not in the checkpoint" in run.stderr.splitlines()[-1]
    assert time.monotonic() - begin < 60
