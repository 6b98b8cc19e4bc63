# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Trains the same GPT twice with pretrain_gpt.py in bf16, with dropout: eager, and as replays of one CUDA graph.

    python -m tests.gpu.same_losses --ranks 2 --iterations 200

Losses, gradient norms and validation losses of all iterations have to be equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    *("--use-megatron-fsdp-v2", "--bf16", "--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--seq-length", "256", "--max-position-embeddings", "256", "--micro-batch-size", "4", "--lr", "1e-3"),
    *(
        "--split",
        "98,2,0",
        "--attention-dropout",
        "0.1",
        "--hidden-dropout",
        "0.1",
        "--min-lr",
        "1e-4",
        "--lr-warmup-fraction",
        "0.1",
    ),
    *("--log-interval", "1", "--eval-interval", "50", "--eval-iters", "2"),
)
GRAPH = ("--cuda-graph-impl", "full_iteration")
NAMES = ("lm_loss", "grad_norm", "learning_rate", "validation_loss")


def train(flags: Sequence[str], ranks: int, folder: Path, name: str) -> tuple[dict[str, list[float]], float]:
    """Run the script; return its series, and the seconds it took."""
    log = folder / f"{name}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    started_s = time.monotonic()
    finished = subprocess.run(
        [*command, "pretrain_gpt.py", *flags, "--log-json", str(log)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if finished.returncode != 0:
        raise SystemExit(f"FAILED  same_losses: {name} run\n{finished.stderr[-4000:]}")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {key: [record[key] for record in records if key in record] for key in NAMES}, time.monotonic() - started_s


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=200)
    arguments = parser.parse_args()
    flags = (*MODEL, "--train-iters", str(arguments.iterations), "--global-batch-size", str(8 * arguments.ranks))
    with tempfile.TemporaryDirectory() as folder:
        eager, eager_s = train(flags, arguments.ranks, Path(folder), "eager")
        graph, graph_s = train((*flags, *GRAPH), arguments.ranks, Path(folder), "graph")
    assert len(eager["lm_loss"]) == arguments.iterations and eager["validation_loss"], "nothing to compare"
    differ = [
        (key, eager[key].index(a)) for key in NAMES for a, b in zip(eager[key], graph[key], strict=True) if a != b
    ]
    status = "FAILED " if differ else "ok     "
    print(
        f"{status} same_losses, {arguments.ranks} rank(s): {arguments.iterations} iterations, loss "
        f"{eager['lm_loss'][0]:.4f} to {eager['lm_loss'][-1]:.4f}, validation {eager['validation_loss'][-1]:.6f}; "
        f"{eager_s:.0f} s eager, {graph_s:.0f} s with a graph; first differences: {differ[:4]}"
    )
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
