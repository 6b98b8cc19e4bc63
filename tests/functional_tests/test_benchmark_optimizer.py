# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer benchmark steps every contestant, alone or under torchrun, and prints their times and ratios."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .launch_script import REPOSITORY, free_port

SCRIPT = "examples/megatron_fsdp/benchmark_optimizer.py"


def _start(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, SCRIPT, *words]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def _torchrun(ranks: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_contestant_is_timed(ranks: int) -> None:
    words = ("--device", "cpu", "--tensors", "3", "14", "--steps", "3", "--warmup", "1", "--clock", "wall")
    run = _start(*words, launcher=_torchrun(ranks) if ranks > 1 else ())
    assert run.returncode == 0, run.stderr
    title, _, head, _, *rows = run.stdout.splitlines()
    assert f"cpu, {ranks} ranks, wall time" in title
    assert [cell.strip() for cell in head.strip("|").split("|")][:3] == ["tensors", "optimizer", "plain ms"]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:2] for row in cells] == [[n, kind] for n in ("3", "14") for kind in ("fused", "foreach")]
    for row in cells:
        plain, adapted, ratio, contract, other = map(float, row[2:])
        assert min(plain, adapted, contract) > 0
        # Times are printed to the microsecond, ratios to the hundredth.
        assert ratio == pytest.approx(adapted / plain, rel=0.02, abs=0.01)
        assert other == pytest.approx(contract / plain, rel=0.02, abs=0.01)


def test_counts_below_one_are_refused() -> None:
    run = _start("--tensors", "0")
    assert (
        run.returncode == 2 and "--tensors, --numel, --steps, --warmup: expected numbers of at least 1." in run.stderr
    )
