# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark measures every runtime on the same training, and says which ones failed and why.

A module that stands for megatron-fsdp fails, is killed or hangs; the real one needs CUDA.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .launch_script import REPOSITORY

SCRIPT = "examples/megatron_fsdp/benchmark.py"
TRAINED = ("ddp", "fsdp2", "fsdp_v2")
WARMUP, STEPS = 4, 4
NUMBERS = (
    "ms",
    "ms_min",
    "ms_max",
    "host_ms",
    "forward_backward_host_ms",
    "optimizer_host_ms",
    "tokens_per_s_per_rank",
)
ON_GPUS_ONLY = ("peak_allocated_bytes", "peak_reserved_bytes", "device_allocations", "allocated_ratio")


def table_rows(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(set(names)) == len(names)
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run as a user starts it; megatron-fsdp is a module that raises."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "megatron_fsdp.py").write_text("raise ValueError('planted at import\\nand a second line')\n")
    flags = [*("--models", "tiny", "--steps", str(STEPS), "--warmup", str(WARMUP))]
    flags += ["--runtimes", "megatron_fsdp", "plain", "floor", *TRAINED, "--accumulation", "2", "--tokens", "16"]
    flags += ["--commit", "abc123", "--plot", str(folder / "out/plot.png")]
    flags += ["--output", str(folder / "out/numbers.json"), "--markdown", str(folder / "out/table.md")]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, SCRIPT, *flags]
    run = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    return run, folder / "out"


def test_a_failing_runtime_is_a_row_and_the_others_go_on(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    run, _ = finished
    failed, *others = table_rows(run.stdout)
    assert failed["ms (min-max)"] == "failed: ValueError: planted at import"
    assert "and a second line" in run.stderr  # the end of the failed run's own output
    assert [row["runtime"] for row in others] == ["plain", "floor", *TRAINED]
    assert others[1]["ms (min-max)"] == "needs CUDA"
    assert run.returncode == 1


def test_all_numbers_are_there_and_agree(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = finished
    report = json.loads((folder / "numbers.json").read_text())
    assert report["commit"] == "abc123" and "torch" in report["machine"] and SCRIPT in report["command"]
    rows: dict[str, dict[str, Any]] = {row["runtime"]: row for row in report["rows"]}
    assert [row["status"] for row in rows.values()] == ["failed", "ok", "needs CUDA", "ok", "ok", "ok"]
    for name in ("plain", *TRAINED):
        row = rows[name]
        assert all(row[number] > 0 for number in NUMBERS)
        assert all(row[number] is None for number in ON_GPUS_ONLY)
        assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["host_ms"] <= row["ms_max"]
        assert row["tokens_per_s_per_rank"] == pytest.approx(2 * 16 / (row["ms"] / 1e3))
        assert (row["tokens"], row["accumulation"], row["floor_ratio"]) == (16, 2, None)
        assert row["ms_ratio"] == pytest.approx(row["ms"] / rows["fsdp2"]["ms"])
    bare = rows["plain"]["forward_backward_host_ms"]
    for name in TRAINED:
        added = 1e3 * (rows[name]["forward_backward_host_ms"] - bare)
        assert rows[name]["added_us_per_unit"] == pytest.approx(added / 3)  # two layers and the rest
    assert rows["plain"]["added_us_per_unit"] is None


def test_all_runtimes_train_the_same_model(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = finished
    rows = {row["runtime"]: row for row in json.loads((folder / "numbers.json").read_text())["rows"]}
    first = rows["plain"]["first_loss"]
    assert rows["fsdp2"]["first_loss"] == rows["fsdp_v2"]["first_loss"] == first
    # Autocast computes the loss in fp32; the others round it to bf16, in steps of 1/32 at this size.
    assert rows["ddp"]["first_loss"] == pytest.approx(first, abs=1 / 32)
    assert rows["plain"]["last_loss"] == first
    for name in TRAINED:
        assert rows[name]["last_loss"] < first - 1 / 32
    assert rows["ddp"]["last_loss"] == pytest.approx(rows["fsdp2"]["last_loss"], abs=1 / 32)
    # FSDP2 sums microbatches in bf16 and reduces once, FSDP v2 reduces each and sums in fp32.
    assert rows["fsdp_v2"]["last_loss"] == pytest.approx(rows["fsdp2"]["last_loss"], abs=1 / 32)


def test_the_table_shows_the_numbers(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    run, folder = finished
    assert (folder / "table.md").read_text() == run.stdout
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    numbers = {row["runtime"]: row for row in json.loads((folder / "numbers.json").read_text())["rows"]}
    for row in table_rows(run.stdout):
        if numbers[row["runtime"]]["status"] != "ok":
            continue
        want = numbers[row["runtime"]]
        assert row["ms (min-max)"] == f"{want['ms']:.2f} ({want['ms_min']:.2f}-{want['ms_max']:.2f})"
        assert row["ms / fsdp2"] == f"{want['ms_ratio']:.2f}"
        assert row["host ms"] == f"{want['host_ms']:.2f}"
        assert row["loss first → last"] == f"{want['first_loss']:.3f} → {want['last_loss']:.3f}"
        assert row["tokens"] == "16" and row["microbatches"] == "2"
        assert row["allocated GiB"] == row["cudaMallocs"] == row["ms / floor"] == "-"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "examples/megatron_fsdp")
    return importlib.import_module("benchmark")


def test_a_runtime_that_is_not_installed_is_no_failure(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", None)
    flags = ["--models", "tiny", "--runtimes", "megatron_fsdp", "plain_adamw", "--nproc-per-node", "1"]
    assert benchmark.main([*flags, "--steps", "2", "--warmup", "4", "--profile", str(tmp_path / "traces")]) == 0
    captured = capsys.readouterr()
    assert "tiny-x1-plain_adamw: no communication in 2 steps of " in captured.err
    missing, measured = table_rows(captured.out)
    assert missing["ms (min-max)"] == "not installed: megatron_fsdp"
    assert float(measured["optimizer"]) > 0 and measured["ms / fsdp2"] == measured["added µs/unit"] == "-"
    trace = json.loads(gzip.decompress((tmp_path / "traces/tiny-x1-plain_adamw.json.gz").read_bytes()))
    steps = [event for event in trace["traceEvents"] if event.get("name", "").startswith("Optimizer.step#AdamW")]
    assert len({event["ts"] for event in steps if event["ph"] == "X"}) == 2
    assert (tmp_path / "traces/tiny-x1-plain_adamw.html").exists()


@pytest.mark.parametrize(
    ("source", "timeout_s", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "60", "Signal 9 (SIGKILL)"),
        ("import time; time.sleep(100)", "3", "no result within 3 s"),
    ],
    ids=["killed", "hangs"],
)
def test_a_rank_that_dies_or_hangs_is_a_failure(
    source: str,
    timeout_s: str,
    error: str,
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "megatron_fsdp.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ["--models", "tiny", "--runtimes", "megatron_fsdp", "--nproc-per-node", "1", "--timeout-s", timeout_s]
    assert benchmark.main(flags) == 1
    (row,) = table_rows(capsys.readouterr().out)
    assert row["ms (min-max)"].startswith("failed: ") and error in row["ms (min-max)"]


def test_a_process_that_aborts_at_its_end_has_measured(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
import atexit, os
atexit.register(os.abort)
def MixedPrecisionPolicy(**options): return options
def fully_shard_model(model, **options): return model
def fully_shard_optimizer(optimizer): return optimizer
"""
    (tmp_path / "megatron_fsdp.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = [
        "--models",
        "tiny",
        "--runtimes",
        "megatron_fsdp",
        "--nproc-per-node",
        "2",
        "--steps",
        "1",
        "--warmup",
        "4",
    ]
    assert benchmark.main(flags) == 0
    captured = capsys.readouterr()
    (row,) = table_rows(captured.out)
    assert float(row["host ms"]) > 0 and "measured, then exit status 1" in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps: expected at least 1, got 0."),
        (["--accumulation", "1", "0"], "--accumulation: expected at least 1, got 0."),
        (["--tokens", "0"], "--tokens: expected at least 1, got 0."),
        (
            ["--models", "tiny", "dit", "--tokens", "9"],
            "--tokens: expected models whose number of tokens can be chosen, got dit.",
        ),
        (["--warmup", "3"], "--warmup: expected at least 4, got 3; graphs are captured in that step."),
    ],
)
def test_numbers_without_a_meaning_are_refused(
    flags: list[str], message: str, benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(flags)
    assert message in capsys.readouterr().err
