# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checks that the files which the flags name can be written, before the run rather than at its end.

Only the last rank writes, but every rank checks, so that a bad path raises on all of them and none waits. Nothing is
left behind but the folders.
"""

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path

PLOT_SUFFIXES = (".png", ".pdf", ".svg")
_LIBRARIES = {"--plot": "matplotlib", "--profile-schedule": "matplotlib", "--tensorboard-dir": "tensorboard"}


def check_outputs(args: argparse.Namespace) -> None:
    """Check where the run will write; called on every rank before the process groups exist.

    Raises:
        ValueError: A path cannot be written, --plot has a suffix that is no picture's, or a library is missing.
    """
    if args.plot and Path(args.plot).suffix.lower() not in PLOT_SUFFIXES:
        _fail("Plot", f"a path that ends in {', '.join(PLOT_SUFFIXES)}", args.plot, "--plot", "Change the suffix")
    for flag, path in (("--plot", args.plot), ("--log-json", args.log_json)):
        if path:
            _check_library(flag)
            _check_file(flag, Path(path))
    if args.save:
        check_folder("--save", Path(args.save))
    if args.profile_schedule:
        _check_library("--profile-schedule")
        check_folder("--profile-schedule", Path(args.profile_schedule))
    if args.tensorboard_dir:
        _check_library("--tensorboard-dir")
        check_folder("--tensorboard-dir", Path(args.tensorboard_dir))


def _fail(what: str, expected: str, found: str, flag: str, cure: str) -> None:
    raise ValueError(f"{what}: expected {expected}, got {found} for {flag}. {cure}.")


def _check_library(flag: str) -> None:
    name = _LIBRARIES.get(flag)
    if name and importlib.util.find_spec(name) is None:
        _fail("Output", f"an installed {name}", "none", flag, f"Install {name} or drop the flag")


def check_folder(flag: str, folder: Path) -> None:
    """Check that a folder can be made and written.

    Raises:
        ValueError: It cannot; the message names ``flag``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _fail("Output", "a folder that can be made and written", f"{folder} ({error.strerror})", flag, "Name another")


def _check_file(flag: str, path: Path) -> None:
    if path.is_dir():
        _fail("Output", "a path of a file", f"the folder {path}", flag, "Add a file name")
    if not path.exists():
        check_folder(flag, path.parent)
    elif not os.access(path, os.W_OK):
        _fail("Output", "a file that can be written", f"the read-only {path}", flag, "Name another")
