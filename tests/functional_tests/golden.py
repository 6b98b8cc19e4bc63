# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Compares runs with stored values, and stores them anew:

    OMP_NUM_THREADS=1 python -m tests.functional_tests.golden dp2_ddp

Values are kept as printed in the log. With the torch version and the CPU instruction set that made
them they must be equal in every printed digit; elsewhere kernels add up in another order, and they
must be equal to TOLERANCE: torch 2.11 differs from 2.13 by one last digit in 50 lines.
"""

import json
import platform
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from .launch_script import Run, launch_once

CPU_INFO = Path("/proc/cpuinfo")
CASES = Path(__file__).parent / "test_cases" / "gpt"
TOLERANCE = 1e-5
_folders: list[tempfile.TemporaryDirectory[str]] = []


def case_names() -> list[str]:
    return sorted(path.parent.name for path in CASES.glob("*/model_config.yaml"))


def read_flags(name: str) -> tuple[tuple[str, ...], int]:
    """Return the flags of a case and its number of ranks."""
    config = _read_config(name)
    return _words(config["MODEL_ARGS"]), config["NUM_RANKS"]


def _read_config(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CASES / name / "model_config.yaml").read_text()))


def _words(flags: dict[str, Any]) -> tuple[str, ...]:
    words: list[str] = []
    for flag, value in flags.items():
        words += [flag] if value is True else [flag, str(value)]
    return tuple(words)


def environment() -> dict[str, str]:
    return {
        "torch": torch.__version__.split("+")[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": _cpu_model(),
    }


def _cpu_model() -> str:
    """Return the processor's name: two of one capability may round a last digit differently."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read_golden(name: str) -> dict[str, Any]:
    path = CASES / name / "golden_values.json"
    assert path.exists(), f"no {path}: run python -m tests.functional_tests.golden {name}"
    return dict(json.loads(path.read_text()))


def compare(golden: dict[str, Any], found: dict[str, list[str]], here: dict[str, str]) -> None:
    """Compare printed values with stored ones.

    Raises:
        AssertionError: With the first value that differs.
    """
    is_exact = golden["environment"] == here
    for key, expected in golden["values"].items():
        assert len(found[key]) == len(expected), f"{key}: {len(found[key])} of {len(expected)}"
        for index, (want, have) in enumerate(zip(expected, found[key], strict=True)):
            where = f"{key}, value {index + 1}: expected {want}, got {have}"
            if is_exact:
                assert have == want, f"{where} (exactly, on {here})"
            else:
                # grad norm is printed with three decimals.
                limit = TOLERANCE * abs(float(want)) + (2e-3 if key == "grad norm" else 0.0)
                assert abs(float(have) - float(want)) <= limit, f"{where} (within {limit:.1e})"


def run_case(name: str) -> Run:
    return launch_once((*read_flags(name)[0], *load_flags(name)), read_flags(name)[1])


def load_flags(name: str) -> tuple[str, ...]:
    """Return the flags by which a case with SAVED_BY goes on from what that run has saved, which is started first."""
    saved_by = _read_config(name).get("SAVED_BY")
    if saved_by is None:
        return ()
    return "--load", _save((*read_flags(name)[0], *_words(saved_by["MODEL_ARGS"])), saved_by["NUM_RANKS"])


@cache
def _save(flags: tuple[str, ...], num_ranks: int) -> str:
    """Run the script to save; return the folder, which lasts as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="fsdp-golden-")
    _folders.append(folder)
    launch_once((*flags, "--save", folder.name), num_ranks)
    return folder.name


def store(name: str) -> None:
    content = {"environment": environment(), "values": run_case(name).printed()}
    (CASES / name / "golden_values.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    for case in sys.argv[1:] or case_names():
        store(case)
