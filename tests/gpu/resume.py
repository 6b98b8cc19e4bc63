# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT with pretrain_gpt.py in bf16 without a break, and with a save in the background and a resume.

    python -m tests.gpu.resume --ranks 2 --iterations 40

The first half of the broken run is replayed from a CUDA graph where there is one, the second half runs eagerly. Losses,
gradient norms and validation losses have to be those of the run without a break, to the last bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu.same_losses import GRAPH, MODEL, NAMES, train


def main() -> None:
    """Train, break, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=40)
    arguments = parser.parse_args()
    half = arguments.iterations // 2
    flags = (*MODEL, "--train-iters", str(arguments.iterations), "--global-batch-size", str(8 * arguments.ranks))
    graph = GRAPH if torch.cuda.is_available() else ()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = str(Path(folder) / "checkpoints")
        straight, _ = train(flags, arguments.ranks, Path(folder), "straight")
        breaks = ("--save", checkpoints, "--save-interval", str(half), "--async-save", "--exit-interval", str(half))
        first, save_s = train((*flags, *graph, *breaks), arguments.ranks, Path(folder), "first half")
        second, load_s = train((*flags, "--load", checkpoints), arguments.ranks, Path(folder), "second half")
    assert len(second["lm_loss"]) == arguments.iterations - half, "the second half is not one"
    joined = {key: first[key] + second[key] for key in NAMES}
    differ = [
        (key, next((i for i, (a, b) in enumerate(zip(straight[key], joined[key], strict=False)) if a != b), "length"))
        for key in NAMES
        if straight[key] != joined[key]
    ]
    status = "FAILED " if differ else "ok     "
    print(
        f"{status} resume, {arguments.ranks} rank(s): {half} iterations{' in a graph' if graph else ''}, a save in the "
        f"background, {arguments.iterations - half} iterations after a load, loss {joined['lm_loss'][0]:.4f} to "
        f"{joined['lm_loss'][-1]:.4f}; {save_s:.0f} s and {load_s:.0f} s; first differences: {differ[:4]}"
    )
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
