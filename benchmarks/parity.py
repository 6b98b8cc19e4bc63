# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Compares FSDP v2 with megatron-core's DDP on 1 to 4 ranks: the largest relative difference over 50 fp32 iterations.

    python benchmarks/parity.py --ranks 1 2 3 4

Every run is `pretrain_gpt.py` with the same flags, seed and global batch; prints one line for each number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = (
    "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --seq-length 48 --max-position-embeddings 48 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --make-vocab-size-divisible-by 1 --global-batch-size 24 --micro-batch-size 2 --split 98,2,0 "
    "--num-workers 0 --train-iters 50 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 5 "
    "--weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-interval 100 --eval-iters 1 --seed 7"
).split()


def train(ranks: int, is_fsdp_v2: bool, port: int) -> list[tuple[float, float]]:
    """Return (lm loss, gradient norm) of every iteration."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
        command += ["--master_port", str(port), str(ROOT / "pretrain_gpt.py"), *FLAGS, "--log-json", str(log)]
        command += ["--use-megatron-fsdp-v2"] if is_fsdp_v2 else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [(row["lm_loss"], row["grad_norm"]) for row in rows if "grad_norm" in row and "lm_loss" in row]


def difference(expected: list[tuple[float, float]], found: list[tuple[float, float]]) -> str:
    """Return the largest relative differences of losses and norms, as text."""
    worst = [max(abs(a[i] - b[i]) / abs(a[i]) for a, b in zip(expected, found, strict=True)) for i in (0, 1)]
    return f"{worst[0]:.1e} lm loss, {worst[1]:.1e} grad norm"


def main() -> None:
    """Run DDP and FSDP v2 on every number of ranks and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--port", type=int, default=29500)
    arguments = parser.parse_args()
    alone = train(1, False, arguments.port)
    for ranks in arguments.ranks:
        ddp, ours = train(ranks, False, arguments.port), train(ranks, True, arguments.port)
        print(
            f"{ranks} rank(s), {len(ours)} iterations: FSDP v2 against DDP on as many ranks {difference(ddp, ours)}; "
            f"against DDP on one rank {difference(alone, ours)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
