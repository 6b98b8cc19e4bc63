# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs pretrain_gpt.py on n ranks without torchrun: processes are forked from one that has imported megatron-core.

Imports take longer than most of the tests' training. How torchrun starts the script is tested elsewhere.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.unit_tests import mcore  # noqa: F401 - tells the server what to import

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch", "torch.distributed.tensor", "torch.optim", "tests.unit_tests.mcore"),
        *("megatron.pretrain.main", "megatron.pretrain.training", "megatron.pretrain.checkpointing"),
    ]
)
REPOSITORY = Path(__file__).resolve().parents[2]
_GRACE_S = 10.0
SCRIPT = "pretrain_gpt.py"


def run_forked(
    words: Sequence[str],
    num_ranks: int,
    port: int,
    folder: Path,
    timeout_s: float,
    ends_others: bool = True,
    script: str = SCRIPT,
) -> list[tuple[int, str, str]]:
    """Run the script on every rank.

    Args:
        words: Flags.
        num_ranks: Number of ranks.
        port: For the ranks' first meeting.
        folder: Where their output is kept.
        timeout_s: For all of it.
        ends_others: Once a rank has failed, end the others soon.
        script: What is run, from the repository's root.

    Returns:
        Every rank's exit status, output and error output.
    """
    variables = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        _context.Process(
            target=_run_rank,
            args=(tuple(words), {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}, str(folder), rank, script),
        )
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        while running := [process for process in ranks if process.is_alive()]:
            if ends_others and any(process.exitcode for process in ranks):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            left = deadline - time.monotonic()
            if left <= 0 or not multiprocessing.connection.wait([process.sentinel for process in running], left):
                break
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [
        (process.exitcode or 0, *((folder / f"{name}{rank}").read_text() for name in ("stdout", "stderr")))
        for rank, process in enumerate(ranks)
    ]


def _run_rank(words: tuple[str, ...], variables: dict[str, str], folder: str, rank: int, script: str) -> None:
    os.environ.update(variables)
    os.chdir(REPOSITORY)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    torch.set_num_threads(1)
    gc.freeze()  # as in launch.py of the unit tests
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
