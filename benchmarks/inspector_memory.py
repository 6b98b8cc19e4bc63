# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of ``mfsdp-ckpt diff`` on two checkpoints that are larger than its budget; not a test.

    python benchmarks/inspector_memory.py --size 1GiB --max-memory 256MiB --limit 512MiB

Half of each checkpoint is one tensor in one chunk; the other half are 8 tensors, of which one differs in one element.
Exits with 1 if the command's peak resident memory (ru_maxrss of the process) is not below the limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from megatron.inspector.text import bytes_text, parse_bytes

NUM_SMALL = 8
CHANGED = "model.small.3"
WIDTH = 1024


def write(folder: Path, size: int, *, changed: bool) -> None:
    """Save a checkpoint of about ``size`` bytes."""
    rows = size // 2 // (4 * WIDTH)
    generator = torch.Generator().manual_seed(0)
    state = {"model.large": torch.randn(rows, WIDTH, generator=generator)}
    for index in range(NUM_SMALL):
        state[f"model.small.{index}"] = torch.randn(rows // NUM_SMALL, WIDTH, generator=generator)
    if changed:
        state[CHANGED][-1, 5] += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=folder)


def peak_of_diff(first: Path, second: Path, max_memory: str) -> tuple[int, str]:
    """Compare in a process of its own; return its peak resident bytes and what it printed."""
    command = [sys.executable, "-m", "megatron.inspector", "diff", str(first), str(second), "--max-memory", max_memory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 1:
        raise RuntimeError(f"diff: expected exit code 1, got {process.returncode}: {printed}")
    return usage.ru_maxrss * 1024, printed


def main() -> int:
    """Write two checkpoints, compare them, and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GiB", help="of each checkpoint")
    parser.add_argument("--max-memory", default="256MiB", help="given to the command")
    parser.add_argument("--limit", default="512MiB", help="of the command's resident memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in "ab"]
        for path in paths:
            # Not here: Linux counts what a process had in memory as the first of the peak of those that it starts.
            writer = multiprocessing.get_context("spawn").Process(
                target=write, args=(path, parse_bytes(args.size)), kwargs={"changed": path.name == "b"}
            )
            writer.start()
            writer.join()
            if writer.exitcode:
                raise RuntimeError(f"write: expected exit code 0, got {writer.exitcode}")
        begin = time.perf_counter()
        peak, printed = peak_of_diff(*paths, args.max_memory)
        seconds = time.perf_counter() - begin
    print(printed, end="")
    limit = parse_bytes(args.limit)
    print(f"peak {bytes_text(peak)} of {bytes_text(limit)}, {seconds:.1f} s, two of {args.size}")
    return int(peak >= limit)


if __name__ == "__main__":
    sys.exit(main())
