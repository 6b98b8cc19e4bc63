# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""--cuda-graph-impl full_iteration: the loop around the graph, with a double in its place; tests/gpu runs real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from .golden import read_flags
from .launch_script import Run, launch_once, launch_ranks_apart

V2 = "--use-megatron-fsdp-v2"
GRAPH = ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "2")
NAMES = ("lm_loss", "grad_norm", "learning_rate", "validation_loss")
# A learning rate that float32 holds, since a graph reads it so.
RATE = ("--lr", "0.125", "--min-lr", "0.125", "--lr-decay-style", "constant")


def _flags() -> tuple[str, ...]:
    words = list(read_flags("dp2_ddp")[0])
    words.remove("--log-num-zeros-in-grad")
    for name in ("--lr", "--min-lr", "--lr-decay-style", "--lr-warmup-iters", "--train-iters"):
        index = words.index(name)
        del words[index : index + 2]
    return (V2, *words, *RATE, "--train-iters", "8", "--eval-interval", "4")


def _train(flags: tuple[str, ...], num_captures: int) -> Run:
    run = launch_once(flags, 1, "tests/functional_tests/graph_on_the_host.py")
    assert f"captures: {num_captures}" in run.stderr
    return run


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_iterations_in_a_graph_train_as_others(optimizer: str) -> None:
    flags = (*_flags(), *(("--optimizer", "muon", "--muon-nesterov") if optimizer == "muon" else ()))
    expected, found = _train(flags, 0), _train((*flags, *GRAPH), 1)
    for name in NAMES:
        assert found.series(name) and found.series(name) == expected.series(name), name


def test_is_refused_without_a_gpu() -> None:
    (run,) = launch_ranks_apart((*_flags(), *GRAPH), 1)
    assert run.returncode != 0
    assert "CUDA graphs: expected a GPU, got a host without one for --cuda-graph-impl full_iteration" in run.stderr


def test_resumed_iterations_in_a_graph_are_those_of_a_straight_run(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    straight = _train((*_flags(), *GRAPH), 1)
    _train((*_flags(), *GRAPH, "--save", folder, "--save-interval", "4", "--exit-interval", "4"), 1)
    resumed = _train((*_flags(), *GRAPH, "--load", folder), 1)
    for name in NAMES:
        found = resumed.series(name)
        assert found and found == straight.series(name)[-len(found) :], name
