# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of this folder's files on n ranks and prints a line for each.

    FSDP_TEST_DEVICE=cuda python -m tests.gpu.checks --ranks 2 races memory overlap

Without FSDP_TEST_DEVICE ranks are gloo processes on the host: everything runs, and what only a GPU can show is not
asked for. A check is a function that raises, or returns what it measured; it runs on every rank.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.unit_tests.launch import DEVICE, run_ranks

IS_DRY = DEVICE == "cpu"
TIMEOUT_S = 60
Measured = str


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what the line says.
        function: importable by the ranks.
        args: its arguments.
        min_ranks: fewer ranks have nothing to show.
    """

    name: str
    function: Callable[..., Measured]
    args: tuple[Any, ...] = ()
    min_ranks: int = 1


def print_line(status: str, name: str, detail: str, started_s: float) -> None:
    """Print the line of one check."""
    print(f"{status:<7} {name} [{time.monotonic() - started_s:.1f} s] {detail}", flush=True)


def exit_on_termination() -> None:
    """Let an outer time-out end this process by an exception, so that it ends its ranks."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def run_checks(checks: Sequence[tuple[str, Check]], ranks: int) -> int:
    """Run checks one after another, print a line for each and a summary; return how many failed."""
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {DEVICE}"
    failed: list[str] = []
    left_out = 0
    for file, check in checks:
        name = f"{file}.{check.name}, {where}:"
        started_s = time.monotonic()
        if ranks < check.min_ranks:
            left_out += 1
            print_line("not run", name, f"needs {check.min_ranks} ranks", started_s)
            continue
        try:
            measured, *_ = run_ranks(ranks, check.function, *check.args, timeout_s=TIMEOUT_S)
        except AssertionError as error:
            failed.append(name)
            print_line("FAILED", name, str(error), started_s)
        else:
            print_line("ok", name, measured, started_s)
    print(f"{where}: {len(checks) - left_out - len(failed)} ok, {len(failed)} failed, {left_out} not run", flush=True)
    return len(failed)


def main() -> None:
    """Run the checks of the named files."""
    parser = argparse.ArgumentParser(description="Run checks of the runtime on n ranks.")
    parser.add_argument("files", nargs="+", help="files of this folder that define CHECKS")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--only", default="", help="run checks whose name contains this")
    arguments = parser.parse_args()
    exit_on_termination()
    checks = [
        (file, check) for file in arguments.files for check in importlib.import_module(f"tests.gpu.{file}").CHECKS
    ]
    chosen = [(file, check) for file, check in checks if arguments.only in check.name]
    if not chosen:
        parser.error(f"--only: expected part of one of {[check.name for _, check in checks]}, got {arguments.only!r}")
    sys.exit(1 if run_checks(chosen, arguments.ranks) else 0)


if __name__ == "__main__":
    main()
