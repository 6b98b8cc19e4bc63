# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Compares one training step under several data-parallel runtimes, and prints a Markdown table.

    python examples/megatron_fsdp/benchmark.py --output runs/benchmark.json --plot runs/benchmark.png
    python examples/megatron_fsdp/benchmark.py --models llama1b --tokens 512 1024 2048 4096 8192
    python examples/megatron_fsdp/benchmark.py --models llama1b --accumulation 1 4 8
    python examples/megatron_fsdp/benchmark.py --models tiny    # on two CPU cores, in less than a minute

Every row is measured in processes of its own, one after another. A runtime that fails is a row that gives its error,
the others go on, and the exit status is 1; one that this machine cannot run is a row only. docs/benchmarks.md explains
the columns, `benchmark_runtimes.py` shows how each runtime is set up, `benchmark_models.py` what is trained.
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
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path

import torch
from benchmark_models import FOR_CPUS, MODELS
from benchmark_plot import draw
from benchmark_report import Row, compared, table
from benchmark_runtimes import NEEDS_CUDA, NEEDS_PACKAGE, RUNTIMES, SLOW_ON_CPUS, VARIANTS
from benchmark_step import SETTLED_STEPS

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

LOG_LINES_SHOWN = 60


@dataclass(frozen=True)
class Case:
    """What one row measures; `tokens_asked` is None for the model's own number."""

    model: str
    tokens_asked: int | None
    accumulation: int
    runtime: str

    @property
    def name(self) -> str:
        """A file name."""
        tokens = "" if self.tokens_asked is None else f"-{self.tokens_asked}"
        return f"{self.model}{tokens}-x{self.accumulation}-{self.runtime}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    has_gpu = torch.cuda.is_available()
    models = [name for name in MODELS if name not in FOR_CPUS] if has_gpu else ["tiny"]
    runtimes = [name for name in RUNTIMES if has_gpu or name not in SLOW_ON_CPUS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=models, help="default here: %(default)s")
    choices = [*RUNTIMES, *VARIANTS]
    parser.add_argument("--runtimes", nargs="+", choices=choices, default=runtimes, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of a sample (default: the model's own)")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1], help="microbatches a step (default: 1)")
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before them (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write all numbers to this JSON file, again after every row")
    parser.add_argument("--markdown", type=Path, help="write what is printed at the end to this file, too")
    parser.add_argument("--plot", type=Path, help="draw times and memory to this .png, .pdf or .svg file")
    parser.add_argument("--profile", type=Path, help="write trace and timeline of 2 steps of every row to this folder")
    parser.add_argument("--timeout-s", type=float, default=600, help="limit for one row (default: %(default)s)")
    parser.add_argument("--commit", help="name of the measured commit (default: what git says)")
    arguments = parser.parse_args(words)
    for flag, least in (("steps", arguments.steps), ("accumulation", min(arguments.accumulation))):
        if least < 1:
            parser.error(f"--{flag}: expected at least 1, got {least}.")
    fixed = [name for name in arguments.models if not MODELS[name].has_tokens]
    if arguments.tokens is not None and fixed:
        parser.error(f"--tokens: expected models whose number of tokens can be chosen, got {fixed[0]}.")
    if arguments.tokens is not None and min(arguments.tokens) < 1:
        parser.error(f"--tokens: expected at least 1, got {min(arguments.tokens)}.")
    if arguments.warmup <= SETTLED_STEPS:
        least = SETTLED_STEPS + 1
        parser.error(f"--warmup: expected at least {least}, got {arguments.warmup}; graphs are captured in that step.")
    return arguments


def command(arguments: argparse.Namespace, case: Case, folder: Path) -> list[str]:
    """Return the command that measures one case and leaves its result in `folder`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.nproc_per_node)]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(FOLDER / "benchmark_step.py")]
    words += ["--model", case.model, "--runtime", case.runtime, "--folder", str(folder), "--name", case.name]
    words += ["--accumulation", str(case.accumulation)]
    words += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    words += ["--tokens", str(case.tokens_asked)] if case.tokens_asked is not None else []
    return words + (["--profile", str(arguments.profile)] if arguments.profile else [])


def environment() -> dict[str, str]:
    """Return the workers' environment: this checkout is importable, after whatever the caller put first."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}


def find_obstacle(case: Case) -> str | None:
    """Return why this machine cannot run a case, or None if it can."""
    for package in (MODELS[case.model].needs, NEEDS_PACKAGE.get(case.runtime)):
        if package is not None and importlib.util.find_spec(package) is None:
            return f"not installed: {package}"
    return "needs CUDA" if case.runtime in NEEDS_CUDA and not torch.cuda.is_available() else None


def measure(arguments: argparse.Namespace, case: Case) -> Row:
    """Run one case in processes of its own and return its row."""
    row: Row = asdict(case)
    obstacle = find_obstacle(case)
    if obstacle is not None:
        return {**row, "status": obstacle}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        words = command(arguments, case, folder)
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
                print(f"--- {case.name}: measured, then exit status {process.returncode}", file=sys.stderr)
            return {**row, "status": "ok", **json.loads(result.read_text())}
        error = f"no result within {arguments.timeout_s:g} s" if is_late else find_error(folder, lines)
    print(f"--- {case.name}, end of its output:", *lines[-LOG_LINES_SHOWN:], sep="\n", file=sys.stderr)
    return {**row, "status": "failed", "error": error}


def find_error(folder: Path, lines: list[str]) -> str:
    """Return the exception that was raised first, in one line, or the output's last words if a rank was killed."""
    raised = sorted(folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
    if raised:
        return raised[0].read_text()
    spoken = [line.strip() for line in lines if any(character.isalnum() for character in line)]
    return spoken[-1] if spoken else "no output"


def describe_commit() -> str:
    """Return what git calls the measured commit."""
    if shutil.which("git") is None:
        return "unknown"
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout.strip() or "unknown"


def describe_packages() -> str:
    """Return the versions of the packages that some rows need; a copy outside of any package has none."""

    def describe(name: str) -> str:
        if importlib.util.find_spec(name) is None:
            return "not installed"
        return next((found.version for found in importlib.metadata.distributions(name=name)), "unknown")

    packages = [*NEEDS_PACKAGE.values(), *(model.needs for model in MODELS.values() if model.needs is not None)]
    return ", ".join(f"{name.replace('_', '-')} {describe(name)}" for name in dict.fromkeys(packages))


def write(path: Path, text: str) -> None:
    """Write a file, and its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main(words: Sequence[str] | None = None) -> int:
    """Measure every case, print the table, and return the exit status."""
    arguments = parse(words)
    report = {
        "date": date.today().isoformat(),
        "commit": arguments.commit or describe_commit(),
        "machine": "unknown",
        "packages": describe_packages(),
        "command": shlex.join(["examples/megatron_fsdp/benchmark.py", *(sys.argv[1:] if words is None else words)]),
    }
    rows: list[Row] = []
    for values in product(arguments.models, arguments.tokens or [None], arguments.accumulation, arguments.runtimes):
        case = Case(*values)
        rows.append(measure(arguments, case))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if "schedule" in rows[-1]:
            print(f"{case.name}: {rows[-1]['schedule']['description']}", file=sys.stderr, flush=True)
        report["machine"] = rows[-1].get("machine", report["machine"])
        if arguments.output:
            write(arguments.output, json.dumps({**report, "rows": compared(rows)}, indent=1) + "\n")
    heading = f"{report['date']}, commit {report['commit']}, {report['machine']}, {report['packages']}"
    text = (
        f"{heading}\n\n"
        f"`{report['command']}`: median (min-max) of {arguments.steps} steps after {arguments.warmup}.\n\n"
        f"{table(compared(rows))}\n"
    )
    print(text, end="", flush=True)
    if arguments.markdown:
        write(arguments.markdown, text)
    if arguments.plot:
        draw(compared(rows), arguments.plot, heading)
    return int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
