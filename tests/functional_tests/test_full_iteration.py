# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""--cuda-graph-impl full_iteration: the loop around the graph, with a double in its place; tests/gpu runs real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .forked import REPOSITORY
from .golden import read_flags
from .launch_script import launch_ranks_apart

V2 = "--use-megatron-fsdp-v2"
GRAPH = ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "2")
# A learning rate that float32 holds, since a graph reads it so.
RATE = ("--lr", "0.125", "--min-lr", "0.125", "--lr-decay-style", "constant")


def _flags() -> tuple[str, ...]:
    words = list(read_flags("dp2_ddp")[0])
    words.remove("--log-num-zeros-in-grad")
    for name in ("--lr", "--min-lr", "--lr-decay-style", "--lr-warmup-iters", "--train-iters"):
        index = words.index(name)
        del words[index : index + 2]
    return (V2, *words, *RATE, "--train-iters", "8", "--eval-interval", "4")


def _train(flags: tuple[str, ...], log: Path) -> tuple[list[dict[str, float]], str]:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.functional_tests.graph_on_the_host", *flags, "--log-json", str(log)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads(line) for line in log.read_text().splitlines()], finished.stderr


def test_iterations_in_a_graph_train_as_others(tmp_path: Path) -> None:
    expected, printed = _train(_flags(), tmp_path / "eager.json")
    assert "captures: 0" in printed
    records, printed = _train((*_flags(), *GRAPH), tmp_path / "graph.json")
    assert "captures: 1" in printed
    for name in ("lm_loss", "grad_norm", "learning_rate", "validation_loss"):
        found = [record[name] for record in records if name in record]
        assert found and found == [record[name] for record in expected if name in record], name


def test_is_refused_without_a_gpu() -> None:
    (run,) = launch_ranks_apart((*_flags(), *GRAPH), 1)
    assert run.returncode != 0
    assert "CUDA graphs: expected a GPU, got a host without one for --cuda-graph-impl full_iteration" in run.stderr


def test_resumed_iterations_in_a_graph_are_those_of_a_straight_run(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "4", "--exit-interval", "4")
    straight, _ = _train((*_flags(), *GRAPH), tmp_path / "straight.json")
    _train((*_flags(), *GRAPH, *save), tmp_path / "first.json")
    resumed, printed = _train((*_flags(), *GRAPH, "--load", save[1]), tmp_path / "resumed.json")
    assert "captures: 1" in printed
    for name in ("lm_loss", "grad_norm", "learning_rate", "validation_loss"):
        found, expected = ([record[name] for record in run if name in record] for run in (resumed, straight))
        assert found and found == expected[-len(found) :], name
