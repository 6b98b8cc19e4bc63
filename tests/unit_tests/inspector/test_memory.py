# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Commands stay within memory that is smaller than a tensor; `benchmarks/inspector_memory.py` does it large."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.unit_tests.checkpoint.files import save

MIB = 1 << 20
SIZE = 128 * MIB
# Measures the growth over what the program itself takes, with the code of all commands in memory. The budget is 16 MiB;
# allocators keep some of what is freed.
PROGRAM = """
import sys
import torch
from megatron.inspector.command import main
def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10
def run(one, other):
    budget = ["--max-memory", "16MiB"]
    return [
        main(["diff", one, other, *budget]),
        main(["show", one, "w", *budget]),
        main(["export", one, "--output", one + ".out", "--dtype", "bf16", *budget]),
    ]
run(*sys.argv[1:3])
before = peak()
print(run(*sys.argv[3:5]), peak() - before)
"""


def test_a_tensor_of_128_mib_under_16_mib(tmp_path: Path) -> None:
    folders = []
    for rows in (1, SIZE // 4096):
        for last in (0, 1):
            whole = torch.zeros(rows, 1024)
            whole[-1, -1] = last
            folders.append(str(save(tmp_path / f"{rows}.{last}", {"w": whole})))
    command = [sys.executable, "-c", PROGRAM, *folders]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "1 of 33554432" in result.stdout and f"({SIZE // 4096 - 1}, 1023)" in result.stdout
    codes, _, growth = result.stdout.splitlines()[-1].rpartition(" ")
    assert codes == "[1, 0, 0]" and int(growth) < SIZE // 2, int(growth) / MIB
