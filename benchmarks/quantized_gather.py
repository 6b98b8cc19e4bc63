# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level GPT with weights gathered in each format and prints how far losses end from those in bf16.

    python benchmarks/quantized_gather.py --ranks 2 --iterations 300

Every run is `pretrain_gpt.py` with the same flags, seed and data. "training" is the mean loss of the last tenth of the
iterations, "validation" that of 20 batches after the last one. Further flags are passed on.
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
FORMATS = {
    "bf16": "",
    "fp8": "--quantized-gather fp8",
    "fp8, rows": "--quantized-gather fp8 --quantized-gather-scaling row",
    "fp8, blocks": "--quantized-gather fp8 --quantized-gather-scaling block",
    "mxfp8": "--quantized-gather mxfp8",
    "nvfp4": "--quantized-gather nvfp4",
    "nvfp4, stochastic": "--quantized-gather nvfp4 --quantized-gather-rounding stochastic",
}
FLAGS = (
    "--use-megatron-fsdp-v2 --data-parallel-sharding-strategy optim_grads_params --bf16 --num-layers 2 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 8 --num-workers 0 --lr 1e-3 "
    "--min-lr 0 --lr-warmup-iters 30 --log-interval 1 --eval-iters 20 --seed 1234"
).split()


def train(ranks: int, iterations: int, port: int, flags: list[str]) -> tuple[float, float]:
    """Return the losses of training and validation at the end."""
    length = ["--train-iters", str(iterations), "--eval-interval", str(iterations)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
        command += ["--master_port", str(port), str(ROOT / "pretrain_gpt.py"), *FLAGS, *length]
        command += ["--global-batch-size", str(8 * ranks), "--log-json", str(log), *flags]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    training = [row["lm_loss"] for row in rows if "lm_loss" in row][-max(1, iterations // 10) :]
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    return sum(training) / len(training), validation[-1]


def main() -> None:
    """Train once in each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS], default=[*FORMATS])
    parser.add_argument("--port", type=int, default=29500)
    arguments, further = parser.parse_known_args()
    print(f"{arguments.iterations} iterations on {arguments.ranks} rank(s)", flush=True)
    base = train(arguments.ranks, arguments.iterations, arguments.port, further)
    print(f"{'bf16':18} training {base[0]:.4f}           validation {base[1]:.4f}", flush=True)
    for name in arguments.formats:
        if name != "bf16":
            found = train(arguments.ranks, arguments.iterations, arguments.port, [*FORMATS[name].split(), *further])
            apart = [loss / wanted - 1 for loss, wanted in zip(found, base, strict=True)]
            print(
                f"{name:18} training {found[0]:.4f} ({apart[0]:+.2%})  validation {found[1]:.4f} ({apart[1]:+.2%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
