# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Fuzzes the runtime.

python -m tests.fuzz --programs 2000 --seed 0     the long run
python -m tests.fuzz --seed 1234                  one program
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.fuzz.bugs import BUGS
from tests.fuzz.generate import generate
from tests.fuzz.known import KNOWN
from tests.fuzz.program import program_from_json
from tests.fuzz.search import Failure, find_failures
from tests.fuzz.shrink import shrink


def main() -> int:
    """Run what the command line says; return 1 if a program went wrong."""
    arguments = _parse()
    if arguments.program is not None:
        programs = [program_from_json(arguments.program)]
    else:
        seeds = range(arguments.seed, arguments.seed + arguments.programs)
        programs = [generate(seed, known=arguments.known) for seed in seeds]
        if arguments.joint:
            programs = [replace(program, joins=True) for program in programs]
    count = num_wrong = 0
    start = time.monotonic()

    def tell(outcomes: Sequence[str | None]) -> None:
        nonlocal count, num_wrong
        count += len(outcomes)
        num_wrong += sum(outcome is not None for outcome in outcomes)
        seconds = time.monotonic() - start
        print(f"\r{count} of {len(programs)} programs, {num_wrong} wrong, {seconds:.0f} s", end="", file=sys.stderr)

    failures = find_failures(programs, bug=arguments.bug, max_failures=arguments.max_failures, on_progress=tell)
    seconds = time.monotonic() - start
    print(file=sys.stderr)
    for failure in failures:
        _report(failure, arguments)
    first = min((failure.program.seed for failure in failures), default=None)
    print(f"{count} programs from seed {programs[0].seed}: {num_wrong} wrong, first {first}, {seconds:.0f} s")
    return 1 if failures else 0


def _report(failure: Failure, arguments: argparse.Namespace) -> None:
    options = "".join(f" --known {name}" for name in arguments.known)
    options += f" --bug {arguments.bug}" if arguments.bug else ""
    print(f"\nseed {failure.program.seed}: {failure.text}", flush=True)
    if arguments.program is None:
        joint = " --joint" if arguments.joint else ""
        print(f"replay: python -m tests.fuzz --seed {failure.program.seed}{joint}{options}")
    smallest = shrink(failure, bug=arguments.bug, max_tries=arguments.shrink)
    print(f"shrunk: {smallest.text}")
    print(f"replay: python -m tests.fuzz{options} --program '{smallest.program.to_json()}'")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1, help="how many programs, of consecutive seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--joint", action="store_true", help="let leaves beside each other form one unit")
    parser.add_argument("--program", help="a program as JSON, in place of seeds")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant a bug in the runtime")
    parser.add_argument("--known", action="append", default=[], choices=sorted(KNOWN), help="include a known failure")
    parser.add_argument("--max-failures", type=int, default=5, help="stop after so many")
    parser.add_argument("--shrink", type=int, default=200, help="programs tried to make a failure smaller; 0 for none")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
