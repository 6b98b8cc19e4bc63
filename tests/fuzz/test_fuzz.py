# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer, and planted bugs that it has to find. CONTRIBUTING.md has the command of the long run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz.bugs import BUGS
from tests.fuzz.generate import generate
from tests.fuzz.program import STRATEGIES, Program, program_from_json
from tests.fuzz.search import find_failures

NUM_PROGRAMS = 80
MAX_PROGRAMS_TO_FIND_A_BUG = 100


def test_random_programs_equal_one_process() -> None:
    failures = find_failures([generate(seed) for seed in range(NUM_PROGRAMS)], max_failures=1)
    assert not failures, [f"python -m tests.fuzz --seed {f.program.seed}: {f.text}" for f in failures]


def test_random_programs_in_a_pool_equal_one_process() -> None:
    """Or are refused, which none of these is; those without a context cannot have a pool.

    Where that has an effect, weights are gathered in process groups of their own as well.
    """
    programs = [generate(seed) for seed in range(NUM_PROGRAMS)]
    pooled = [
        replace(program, has_pool=True, is_separate=_may_be_separate(program))
        for program in programs
        if not program.is_implicit
    ]
    assert len(pooled) > NUM_PROGRAMS / 2
    assert any(program.is_separate and program.world_size > 1 for program in pooled)
    failures = find_failures(pooled, max_failures=1)
    assert not failures, [f"python -m tests.fuzz --program '{f.program.to_json()}': {f.text}" for f in failures]


def _may_be_separate(program: Program) -> bool:
    has_gathers = all(STRATEGIES[name][0] == "optim_grads_params" for name in program.strategies)
    return has_gathers and not program.is_unified


def test_random_programs_with_joint_units_equal_one_process() -> None:
    programs = [replace(generate(seed), joins=True) for seed in range(NUM_PROGRAMS)]
    failures = find_failures(programs, max_failures=1)
    assert not failures, [f"python -m tests.fuzz --program '{f.program.to_json()}': {f.text}" for f in failures]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    programs = [generate(seed) for seed in range(MAX_PROGRAMS_TO_FIND_A_BUG)]
    assert find_failures(programs, bug=bug, max_failures=1, batch_size=5), bug


def test_programs_can_be_replayed() -> None:
    for seed in range(20):
        program = generate(seed)
        assert generate(seed) == program
        assert program_from_json(program.to_json()) == program
