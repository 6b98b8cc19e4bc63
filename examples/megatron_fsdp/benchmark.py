# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Compares one training step of a decoder LM under several data-parallel runtimes, and prints a Markdown table.

    python examples/megatron_fsdp/benchmark.py --models small llama1b llama7b --output runs/benchmark.json
    python examples/megatron_fsdp/benchmark.py --models tiny    # on two CPU cores, in half a minute

Every (model, runtime) pair runs in processes of its own, one after another. A runtime that fails is a row that gives
its error, the others go on, and the exit status is 1; one that is not installed is a row only. docs/benchmarks.md
explains the columns, `benchmark_runtimes.py` shows how each runtime is set up.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from benchmark_runtimes import OPTIONAL_MODULES, RUNTIMES, STRATEGIES
from benchmark_step import SETTLED_STEPS
from decoder import SHAPES

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

Row = dict[str, Any]
"""model, runtime, status ("ok", "failed", "not installed"), and either an error or numbers."""

BASE, BARE = "fsdp2", "plain"
"""The runtime that ratios refer to, and the one whose host time is the module's own."""

GIB = 2**30
LOG_LINES_SHOWN = 60
HEADINGS = (
    *("model", "runtime", "ms (min-max)", f"ms / {BASE}", "tokens/s/GPU", "host ms", "fwd+bwd", "optimizer"),
    *("added µs/unit", "allocated GiB", f"allocated / {BASE}", "reserved GiB", "reserved / allocated", "cudaMallocs"),
    "loss first → last",
)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    models = [name for name in SHAPES if name != "tiny"] if torch.cuda.is_available() else ["tiny"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=models, help="default here: %(default)s")
    choices = [*RUNTIMES, *STRATEGIES]
    parser.add_argument("--runtimes", nargs="+", choices=choices, default=list(RUNTIMES), help="default: %(default)s")
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before them (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write all numbers to this JSON file, again after every row")
    parser.add_argument("--markdown", type=Path, help="write what is printed at the end to this file, too")
    parser.add_argument("--profile", type=Path, help="write a chrome trace of 2 steps of every row to this folder")
    parser.add_argument("--timeout-s", type=float, default=600, help="limit for one row (default: %(default)s)")
    parser.add_argument("--commit", help="name of the measured commit (default: what git says)")
    arguments = parser.parse_args(words)
    if arguments.steps < 1:
        parser.error(f"--steps: expected at least 1, got {arguments.steps}.")
    if arguments.warmup < SETTLED_STEPS:
        parser.error(
            f"--warmup: expected at least {SETTLED_STEPS}, got {arguments.warmup}; memory is counted from then."
        )
    return arguments


def command(arguments: argparse.Namespace, model: str, runtime: str, folder: Path) -> list[str]:
    """Return the command that measures one pair and leaves its result in `folder`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.nproc_per_node)]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(FOLDER / "benchmark_step.py")]
    words += ["--model", model, "--runtime", runtime, "--folder", str(folder)]
    words += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    return words + (["--profile", str(arguments.profile)] if arguments.profile else [])


def environment() -> dict[str, str]:
    """Return the workers' environment: this checkout is importable, after whatever the caller put first."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}


def measure(arguments: argparse.Namespace, model: str, runtime: str) -> Row:
    """Run one pair in processes of its own and return its row."""
    row: Row = {"model": model, "runtime": runtime}
    module = OPTIONAL_MODULES.get(runtime)
    if module is not None and importlib.util.find_spec(module) is None:
        return {**row, "status": "not installed"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        words = command(arguments, model, runtime, folder)
        with log.open("w") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment())
            try:
                process.wait(arguments.timeout_s)
                is_late = False
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                process.terminate()  # torchrun then ends its workers
                process.wait()
        lines = log.read_text(errors="replace").splitlines()
        result = folder / "result.json"
        if result.exists():  # all ranks have measured; gloo may abort a process while it ends (docs/LOG.md)
            if process.returncode != 0:
                print(f"--- {model}, {runtime}: measured, then exit status {process.returncode}", file=sys.stderr)
            return {**row, "status": "ok", **json.loads(result.read_text())}
        error = f"no result within {arguments.timeout_s:g} s" if is_late else find_error(folder, lines)
    print(f"--- {model}, {runtime}, end of its output:", *lines[-LOG_LINES_SHOWN:], sep="\n", file=sys.stderr)
    return {**row, "status": "failed", "error": error}


def find_error(folder: Path, lines: list[str]) -> str:
    """Return the exception that was raised first, in one line, or the output's last words if a rank was killed."""
    raised = sorted(folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
    if raised:
        return raised[0].read_text()
    spoken = [line.strip() for line in lines if any(character.isalnum() for character in line)]
    return spoken[-1] if spoken else "no output"


def compared(rows: list[Row]) -> list[Row]:
    """Return the rows with ratios to `BASE` and, against `BARE`, the host time that a runtime adds per unit."""
    measured = {(row["model"], row["runtime"]): row for row in rows if row["status"] == "ok"}
    result = []
    for row in rows:
        base, bare = measured.get((row["model"], BASE)), measured.get((row["model"], BARE))
        more: Row = {}
        if row["status"] == "ok":
            has_memory = base is not None and row["peak_allocated_bytes"] is not None
            added = row["forward_backward_host_ms"] - bare["forward_backward_host_ms"] if bare else None
            more = {
                "ms_ratio": row["ms"] / base["ms"] if base else None,
                "allocated_ratio": row["peak_allocated_bytes"] / base["peak_allocated_bytes"] if has_memory else None,
                "added_us_per_unit": None if added is None or row is bare else 1e3 * added / row["units"],
            }
        result.append({**row, **more})
    return result


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown; a dash is a number that this machine or this selection of runtimes cannot give."""

    def number(value: float | None, digits: int = 2, unit: float = 1) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for row in rows:
        if row["status"] != "ok":
            text = f"failed: {row['error']}".replace("|", "\\|") if "error" in row else row["status"]
            lines.append((row["model"], row["runtime"], text, *("-",) * (len(HEADINGS) - 3)))
            continue
        allocated, reserved = row["peak_allocated_bytes"], row["peak_reserved_bytes"]
        cells = (
            *(row["model"], row["runtime"], f"{row['ms']:.2f} ({row['ms_min']:.2f}-{row['ms_max']:.2f})"),
            *(number(row["ms_ratio"]), number(row["tokens_per_s_per_rank"], 0), number(row["host_ms"])),
            *(number(row["forward_backward_host_ms"]), number(row["optimizer_host_ms"])),
            *(number(row["added_us_per_unit"], 0), number(allocated, unit=GIB), number(row["allocated_ratio"])),
            *(number(reserved, unit=GIB), number(None if reserved is None else reserved / allocated)),
            *(number(row["device_allocations"], 0), f"{row['first_loss']:.3f} → {row['last_loss']:.3f}"),
        )
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def describe_commit() -> str:
    """Return what git calls the measured commit."""
    if shutil.which("git") is None:
        return "unknown"
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout.strip() or "unknown"


def describe_megatron_fsdp() -> str:
    """Return the version of Megatron-FSDP v1; a copy outside of any package has none."""
    if importlib.util.find_spec("megatron_fsdp") is None:
        return "not installed"
    return next((found.version for found in importlib.metadata.distributions(name="megatron-fsdp")), "unknown")


def main(words: Sequence[str] | None = None) -> int:
    """Measure every pair, print the table, and return the exit status."""
    arguments = parse(words)
    report = {
        "date": date.today().isoformat(),
        "commit": arguments.commit or describe_commit(),
        "machine": "unknown",
        "megatron_fsdp": describe_megatron_fsdp(),
        "command": shlex.join(["examples/megatron_fsdp/benchmark.py", *(sys.argv[1:] if words is None else words)]),
    }
    rows: list[Row] = []
    for model in arguments.models:
        for runtime in arguments.runtimes:
            rows.append(measure(arguments, model, runtime))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            report["machine"] = rows[-1].get("machine", report["machine"])
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps({**report, "rows": compared(rows)}, indent=1) + "\n")
    text = (
        f"{report['date']}, commit {report['commit']}, {report['machine']}, megatron-fsdp {report['megatron_fsdp']}\n\n"
        f"`{report['command']}`: median (min-max) of {arguments.steps} steps after {arguments.warmup}.\n\n"
        f"{table(compared(rows))}\n"
    )
    print(text, end="", flush=True)
    if arguments.markdown:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(text)
    return int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
