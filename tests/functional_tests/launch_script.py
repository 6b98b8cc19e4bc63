# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Starts pretrain_gpt.py as a user does, with torchrun, or faster, and reads what it wrote."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .forked import REPOSITORY, SCRIPT, run_forked

_TRAINING_LINE = re.compile(
    r"iteration +(\d+)/ +\d+ \|.* lm loss: (\S+) \|.* grad norm: (\S+) \|(?: num zeros: (\S+) \|)?"
)
_VALIDATION_LINE = re.compile(r"validation loss at (.+) \| lm loss value: (\S+) \|")


def _loading_itself(flags: Sequence[str]) -> tuple[str, ...]:
    """Return flags of a run that loads its data itself, unless they say otherwise: loader processes cost seconds.

    Each rank starts six of them by default, and hands each a copy of the data's indices. They bring the same batches
    (test_parity.py).
    """
    return (*flags, *(() if "--num-workers" in flags else ("--num-workers", "0")))


@dataclass(frozen=True)
class Run:
    """A finished run: its exit status, its output, and the records of --log-json."""

    returncode: int
    stdout: str
    stderr: str
    records: tuple[dict[str, float], ...]

    def series(self, name: str) -> list[float]:
        """Return one full-precision value per logged iteration."""
        return [record[name] for record in self.records if name in record]

    def printed(self) -> dict[str, list[str]]:
        """Return losses and norms exactly as printed in the log lines."""
        rows = _TRAINING_LINE.findall(self.stdout)
        return {
            "lm loss": [row[1] for row in rows],
            "grad norm": [row[2] for row in rows],
            "num zeros": [row[3] for row in rows if row[3]],
            "validation loss": [row[1] for row in _VALIDATION_LINE.findall(self.stdout)],
        }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(
    flags: Sequence[str],
    num_ranks: int,
    *,
    environment: dict[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Run:
    """Run the script on ``num_ranks`` ranks and wait for it; the run may fail."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.json")
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc_per_node", str(num_ranks), "--master_port", str(free_port())),
            *("pretrain_gpt.py", *_loading_itself(flags), "--log-json", str(log)),
        ]
        finished = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        lines = log.read_text().splitlines() if log.exists() else []
    records = tuple(json.loads(line) for line in lines)
    return Run(finished.returncode, finished.stdout, finished.stderr, records)


def launch_forked(flags: Sequence[str], num_ranks: int, timeout_s: float = 120.0, script: str = SCRIPT) -> Run:
    """Run the script without torchrun, which is faster; the run may fail."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.json")
        words = (*_loading_itself(flags), "--log-json", str(log))
        ranks = run_forked(words, num_ranks, free_port(), Path(folder), timeout_s, script=script)
        lines = log.read_text().splitlines() if log.exists() else []
    codes, outputs, errors = zip(*ranks, strict=True)
    code = next((code for code in codes if code), 0)
    return Run(code, "".join(outputs), "".join(errors), tuple(json.loads(line) for line in lines))


def launch_ranks_apart(flags: Sequence[str], num_ranks: int, timeout_s: float = 60.0) -> list[Run]:
    """Run each rank without torchrun, which would end the others as soon as one has failed."""
    with tempfile.TemporaryDirectory() as folder:
        words = _loading_itself(flags)
        ranks = run_forked(words, num_ranks, free_port(), Path(folder), timeout_s, ends_others=False)
    return [Run(code, stdout, stderr, ()) for code, stdout, stderr in ranks]


@cache
def launch_once(flags: tuple[str, ...], num_ranks: int, script: str = SCRIPT) -> Run:
    """Run the script without torchrun, or return the run that another test made with the same flags.

    Raises:
        AssertionError: The run failed; the message ends with its error output.
    """
    run = launch_forked(flags, num_ranks, script=script)
    assert run.returncode == 0, f"{flags} on {num_ranks} ranks:\n{run.stderr[-4000:]}"
    return run
