# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checks Megatron-FSDP v2 with TransformerEngine's own weights and kernels, and trains with pretrain_gpt.py in FP8.

    python -m tests.gpu.transformer_engine [--only NAME ...] [--iterations 200]

A line for each check (ok, FAILED or not run), a table of training runs, and a summary; the exit status is 0 if nothing
failed. It needs one GPU of compute capability 9.0 or newer, TransformerEngine, and megatron-core 0.19.2 for the runs.
Without these it says so and runs nothing. Training runs get ready side by side, and then train one after another; the
table's seconds are those of a run's turn. tests/gpu/transformer_engine.sh installs TransformerEngine from files.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tests.gpu.checks import print_line

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    *("--use-megatron-fsdp-v2", "--bf16", "--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16"),
    *("--seq-length", "512", "--max-position-embeddings", "512", "--micro-batch-size", "4", "--global-batch-size", "8"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--ffn-hidden-size", "4096", "--attention-dropout", "0", "--hidden-dropout", "0", "--lr", "6e-4", "--min-lr"),
    *("6e-5", "--lr-warmup-iters", "20", "--split", "98,2,0", "--eval-interval", "100000", "--eval-iters", "1"),
    *("--log-interval", "10", "--data-parallel-sharding-strategy", "optim_grads_params"),
    *("--transformer-impl", "transformer_engine"),
)
_TENSORWISE = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
_BLOCKWISE = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
_DELAYED = ("--fp8-format", "hybrid", "--fp8-recipe", "delayed")
_GATHER = ("--fp8-param-gather",)
RUNS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "tensorwise": _TENSORWISE,
    "tensorwise, gathered": (*_TENSORWISE, *_GATHER),
    "blockwise": _BLOCKWISE,
    "blockwise, gathered": (*_BLOCKWISE, *_GATHER),
    "delayed, gathered": (*_DELAYED, *_GATHER),
    "tensorwise, gathered, pool": (*_TENSORWISE, *_GATHER, "--fsdp-trace-pool"),
    "tensorwise, gathered, transposes": (*_TENSORWISE, *_GATHER, "--keep-fp8-transpose-cache"),
}
SAME_LOSSES = (
    ("tensorwise", "tensorwise, gathered"),
    ("blockwise", "blockwise, gathered"),
    ("tensorwise, gathered", "tensorwise, gathered, pool"),
    ("tensorwise, gathered", "tensorwise, gathered, transposes"),
)
WORKER = "--worker"
AT_ONCE = 3
"""Training runs: one that trains, and others that get ready or wait."""
READY_AFTER = 10
"""Iterations: one interval of the log. What is compiled has been compiled then, and memory is what it will be."""


def main() -> int:
    """Run the checks and the training runs that were asked for; return the exit status."""
    if sys.argv[1:2] == [WORKER]:
        return _train_here(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of checks and of runs, 'checks' or 'runs'; all by default")
    parser.add_argument("--iterations", type=int, default=200, help="of a training run, 20 or more; 0 for none")
    parser.add_argument("--last-start-s", type=float, default=1e9, help="no training run goes on later than that")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    if missing := _missing():
        print_line("not run", "transformer_engine", missing, started_s)
        return 0
    only = ("checks", "runs") if arguments.only is None else arguments.only
    wanted = [name for name in RUNS if arguments.iterations and ("runs" in only or name in only)]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Queue(wanted, arguments.iterations, folder)) as runs,
    ):
        # Runs get ready meanwhile.
        runs.fill()
        from tests.gpu import transformer_engine_checks as checks

        failed = []
        for name, check in checks.CHECKS.items():
            if "checks" in only or name in only:
                failed += _run_check(name, check)
        torch.cuda.empty_cache()
        failed += _train_all(runs, started_s + arguments.last_start_s)
    print(f"== transformer_engine, {time.monotonic() - started_s:.0f} s: {f'FAILED {failed}' if failed else 'all ok'}")
    return bool(failed)


def _missing() -> str:
    """Return what is not there; empty if all is."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "needs TransformerEngine"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return "needs a GPU of compute capability 9.0"
    return ""


def _run_check(name: str, check: Callable[[], str]) -> list[str]:
    """Run one check and print its line; return its name if it failed."""
    started_s = time.monotonic()
    try:
        detail = check()
    # Whatever goes wrong is this check's failure, and the others are to run.
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        shown = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:600]}"
        print_line("FAILED", name, shown, started_s)
        return [name]
    print_line("ok", name, detail, started_s)
    return []


# --- training runs ----------------------------------------------------------------------------------------------------


class Run:
    """A training run in a process of its own, which stops after its first iterations until it is told to go on.

    Args:
        name: of `RUNS`.
        iterations: in all.
        folder: of its files.
    """

    def __init__(self, name: str, iterations: int, folder: Path) -> None:
        self.name, self._iterations, self._folder = name, iterations, folder
        folder.mkdir()
        # Otherwise attention adds gradients in any order, and no two runs have the same losses.
        exact = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
        words = [*MODEL, *RUNS[name], "--train-iters", str(iterations), "--log-json", str(folder / "log.json")]
        self._outputs = [(folder / kind).open("w") for kind in ("out", "err")]
        self._process = subprocess.Popen(
            # Runs that start at once would write the same indices of samples.
            [sys.executable, "-m", "tests.gpu.transformer_engine", WORKER, *words, "--data-cache-path", str(folder)],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **exact, **os.environ},
            stdin=subprocess.PIPE,
            stdout=self._outputs[0],
            stderr=self._outputs[1],
        )

    def finish(self) -> tuple[list[dict[str, float]], float, float] | str:
        """Let it go on; return its log, peak memory in MiB and gathered MB an iteration, or what went wrong."""
        try:
            self._process.communicate(b"go on", timeout=120)
        except subprocess.TimeoutExpired:
            return "no end after 120 s"
        errors = (self._folder / "err").read_text()
        if self._process.returncode:
            lines = [line for line in errors.splitlines() if "Error" in line or "File" in line]
            return "\n".join(lines[-12:])[-2500:] or errors[-2000:]
        lines = (self._folder / "out").read_text().splitlines()
        measured = json.loads(next(line for line in lines if line.startswith('{"peak_mib"')))
        records = [json.loads(line) for line in (self._folder / "log.json").read_text().splitlines()]
        training = [record for record in records if "lm_loss" in record and record["lm_loss"] is not None]
        return training, measured["peak_mib"], measured["gathered_bytes"] / 1e6 / self._iterations

    def stop(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.wait()
        for output in self._outputs:
            output.close()


class Queue:
    """Training runs, a few of which get ready while one trains: that takes longer than to train.

    Args:
        names: of `RUNS`, in order.
        iterations: of each.
        folder: of all files.
    """

    def __init__(self, names: Sequence[str], iterations: int, folder: str) -> None:
        self._waiting, self._iterations, self._folder = list(names), iterations, Path(folder)
        self._ready: list[Run] = []

    def fill(self) -> None:
        """Start runs up to as many as may be there at once."""
        while self._waiting and len(self._ready) < AT_ONCE:
            name = self._waiting.pop(0)
            self._ready.append(Run(name, self._iterations, self._folder / str(len(self._waiting))))

    def __iter__(self) -> Iterator[Run]:
        """Yield runs that have been started; each is ended before the next one."""
        while self._ready:
            yield self._ready[0]
            self._ready.pop(0).stop()
            self.fill()

    def close(self) -> None:
        """End all runs that are there."""
        for run in self._ready:
            run.stop()


def _train_all(runs: Queue, last_start_s: float) -> list[str]:
    """Let the runs train one after another, print a table, and return what failed."""
    failed, losses = [], {}
    print(f"{'run':34} {'loss':>22} {'ms':>7} {'peak MiB':>9} {'gathered MB':>12} {'seconds':>8}")
    for run in runs:
        started_s, name = time.monotonic(), run.name
        if started_s > last_start_s:
            print(f"{name:34} not run, no time left")
            continue
        answer = run.finish()
        if isinstance(answer, str):
            print(f"FAILED {name}: {answer}", flush=True)
            failed.append(name)
            continue
        found, peak_mib, gathered_mb = answer
        losses[name] = [record["lm_loss"] for record in found]
        # The first iterations compile, and the next ones have waited.
        step_ms = min(record["elapsed_ms"] for record in found[1:])
        print(
            f"{name:34} {losses[name][0]:10.5f} {losses[name][-1]:11.7f} {step_ms:7.1f} {peak_mib:9.0f} "
            f"{gathered_mb:12.1f} {time.monotonic() - started_s:8.0f}",
            flush=True,
        )
    for one, other in SAME_LOSSES:
        if one in losses and other in losses:
            first = next((i for i, (a, b) in enumerate(zip(losses[one], losses[other], strict=True)) if a != b), None)
            where = "" if first is None else f", first {10 * (first + 1)} iterations in"
            status = "same" if first is None else "DIFFERENT"
            print(f"{status} losses: {one} | {other}{where}")
            # Sums of gradients have one order on one rank, so that nothing may differ.
            failed += [] if first is None else [f"{one} | {other}"]
    return failed


def _train_here(words: Sequence[str]) -> int:
    """Run pretrain_gpt.py's program in this process, and print what it took."""
    from megatron.core.distributed.fsdp.experimental import collectives
    from megatron.pretrain import training
    from megatron.pretrain.main import ignore_expected_warnings, pretrain, read_command

    step, train_step = itertools.count(), training.train_step

    def waiting(state: training.TrainState) -> training.StepResult:
        # The end of the process that asks leaves nothing to read.
        if next(step) == READY_AFTER and not sys.stdin.read():
            sys.exit("expected to be told to go on, got the end of input")
        return train_step(state)

    training.train_step = waiting
    # Nobody reads it, and it compiles once more.
    training.report_evaluation = lambda *args, **options: None
    gathered = [0]
    all_gather = collectives.all_gather

    def counting(output: torch.Tensor, *args: object, **options: object) -> None:
        gathered[0] += output.numel() * output.element_size()
        all_gather(output, *args, **options)

    collectives.all_gather = counting
    command = read_command(list(words), os.environ)
    ignore_expected_warnings()
    if not torch.cuda.is_available():
        from megatron.pretrain.cpu import install

        install()
    pretrain(command)
    peak_mib = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_initialized() else 0.0
    print(json.dumps({"peak_mib": peak_mib, "gathered_bytes": gathered[0]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
