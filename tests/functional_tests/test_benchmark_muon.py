# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of Muon times every runtime that a host has, alone or under torchrun, and all of them train alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .launch_script import REPOSITORY, free_port

SCRIPT = "benchmarks/muon.py"
NAMES = ("muon", "adamw", "fsdp2_full")


def _start(*words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port()))
    command = [sys.executable, *(torchrun if ranks > 1 else ()), SCRIPT, *words]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_runtime_is_timed(ranks: int, tmp_path: Path) -> None:
    output = tmp_path / "new" / "muon.jsonl"
    words = ("--device", "cpu", "--models", "tiny", "--layers", "2", "--steps", "2", "--warmup", "1")
    run = _start(*words, "--output", str(output), ranks=ranks)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["runtime"] for row in rows] == [*NAMES]
    lines = run.stdout.splitlines()
    assert f"cpu, {ranks} rank(s), travel in fp32" in lines[0]
    assert [line.split("|")[2].strip() for line in lines[3:6]] == [*NAMES]
    own, adamw, full = rows
    # 2 layers, 5 steps: q and o 64 x 64, k and v 32 x 64, three of 176 x 64.
    assert own["operations"] == 2 * 5 * 2 * (2 * 64**2 * 192 + 2 * 32**2 * 160 + 3 * 64**2 * 416)
    for row in (own, full):
        for rate in ("own", "square"):
            ideal_ms = row["operations"] / ranks / row[f"{rate}_tflops"] / 1e9
            assert row[f"ratio_{rate}"] == pytest.approx(row["ms"] / ideal_ms)
    assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in rows)
    assert own["span"] >= own["imbalance"] >= 1 and own["buffer_bytes"] > 0
    if ranks == 1:
        assert own["sent_bytes"] == own["returned_bytes"] == 0 and "exposed_ms" not in own
    else:
        assert own["sent_bytes"] == 2 * own["returned_bytes"] > 0, "fp32 to owners, bf16 back"
        assert own["exposed_share"] == pytest.approx(own["exposed_ms"] / own["ms"])
    # The two have taken the same steps; AdamW others.
    assert full["weights_norm"] == pytest.approx(own["weights_norm"], rel=1e-8)
    assert abs(adamw["weights_norm"] / own["weights_norm"] - 1) > 1e-6


def test_counts_below_one_are_refused() -> None:
    run = _start("--models", "tiny", "--layers", "0")
    assert run.returncode == 2
    assert "--steps, --warmup, --package-mib, --layers: expected numbers of at least 1." in run.stderr
