# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checks Megatron-FSDP v2 with TransformerEngine's own weights and kernels, and trains with pretrain_gpt.py in FP8.

    python -m tests.gpu.transformer_engine [--only NAME ...] [--iterations 200]

A line for each check (ok, FAILED or not run), a table of training runs, and a summary; the exit status is 0 if nothing
failed. It needs one GPU of compute capability 9.0 or newer, TransformerEngine, and megatron-core 0.19.2 for the runs.
Without these it says so and runs nothing. tests/gpu/transformer_engine.sh installs TransformerEngine from files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
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


def main() -> int:
    """Run the checks and the training runs that were asked for; return the exit status."""
    if sys.argv[1:2] == [WORKER]:
        return _train_here(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of checks, and 'runs'; all by default")
    parser.add_argument("--iterations", type=int, default=200, help="of a training run; 0 for none")
    parser.add_argument("--last-start-s", type=float, default=1e9, help="no training run begins later than that")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    if missing := _missing():
        print_line("not run", "transformer_engine", missing, started_s)
        return 0
    from tests.gpu import transformer_engine_checks as checks

    failed = []
    for name, check in checks.CHECKS.items():
        if arguments.only is None or name in arguments.only:
            failed += _run_check(name, check)
    if arguments.iterations and (arguments.only is None or "runs" in arguments.only):
        torch.cuda.empty_cache()
        failed += _train_all(arguments.iterations, started_s + arguments.last_start_s)
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


def _train_all(iterations: int, last_start_s: float) -> list[str]:
    """Train in every precision, print a table, and return what failed."""
    failed, losses = [], {}
    print(f"{'run':34} {'loss':>22} {'ms':>7} {'peak MiB':>9} {'gathered MB':>12} {'seconds':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, flags) in enumerate(RUNS.items()):
            started_s = time.monotonic()
            if started_s > last_start_s:
                print(f"{name:34} not run, no time left")
                continue
            answer = _train(flags, iterations, Path(folder) / f"{number}.json")
            if isinstance(answer, str):
                print(f"FAILED {name}: {answer}", flush=True)
                failed.append(name)
                continue
            found, peak_mib, gathered_mb = answer
            losses[name] = [record["lm_loss"] for record in found]
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


def _train(flags: Sequence[str], iterations: int, log: Path) -> tuple[list[dict[str, float]], float, float] | str:
    """Train in another process; return its log, peak memory in MiB and gathered MB an iteration, or what went wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", "--no-python"]
    script = [sys.executable, "-m", "tests.gpu.transformer_engine", WORKER]
    words = [*MODEL, *flags, "--train-iters", str(iterations), "--log-json", str(log)]
    # Otherwise attention adds gradients in any order, and no two runs have the same losses.
    exact = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    environment = {"OMP_NUM_THREADS": "1", **exact, **os.environ}
    try:
        finished = subprocess.run(
            [*command, *script, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "no end after 120 s"
    if finished.returncode:
        lines = [line for line in finished.stderr.splitlines() if "Error" in line or "File" in line]
        return "\n".join(lines[-12:])[-2500:] or finished.stderr[-2000:]
    measured = json.loads(next(line for line in finished.stdout.splitlines() if line.startswith('{"peak_mib"')))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    training = [record for record in records if "lm_loss" in record and record["lm_loss"] is not None]
    return training, measured["peak_mib"], measured["gathered_bytes"] / 1e6 / iterations


def _train_here(words: Sequence[str]) -> int:
    """Run pretrain_gpt.py's program in this process, and print what it took."""
    from megatron.core.distributed.fsdp.experimental import collectives
    from megatron.pretrain.main import ignore_expected_warnings, pretrain, read_command

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
