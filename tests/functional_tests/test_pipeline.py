# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages, also with several chunks a rank: the training of megatron-core's DDP, and of one rank.

Stages draw other initial weights than one rank does. So DDP and FSDP v2 are compared under one layout, and layouts
with each other from a checkpoint on. Embedding and output layer are tied: first and last stage share a weight.
"""

from pathlib import Path

import pytest
import torch

from .golden import read_flags
from .launch_script import Run, launch_forked, launch_once, launch_ranks_apart
from .tensors import load_tensors

# That of fp32 sums in another order: 1.5e-7 at most over these iterations.
TOLERANCE = 1e-6
NUM_ITERATIONS = 4
V2 = ("--use-megatron-fsdp-v2",)
BOOLEANS = ("--mock-data", "--log-num-zeros-in-grad")
DATA = ("--mock-data", "--vocab-size")
"""Of megatron-core's mock data every rank makes indices of millions of samples; those of the byte corpus are kept."""
PIPELINE = ("--pipeline-model-parallel-size", "2")
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1")
ZERO1 = ("--data-parallel-sharding-strategy", "optim")


def _flags() -> tuple[str, ...]:
    given = dict(zip(*[iter(word for word in read_flags("dp2_ddp")[0] if word not in BOOLEANS)] * 2, strict=True))
    given |= {"--num-layers": "4", "--train-iters": "4", "--eval-interval": "4", "--eval-iters": "1"}
    given |= {"--global-batch-size": "8", "--lr-warmup-iters": "1"}
    words = (word for pair in given.items() if pair[0] not in DATA for word in pair)
    return (*words, *(word for word in BOOLEANS if word not in DATA))


FLAGS = _flags()


def assert_same(expected: Run, found: Run, num_iterations: int = NUM_ITERATIONS, norms: float = TOLERANCE) -> None:
    for name, tolerance in (("lm_loss", TOLERANCE), ("grad_norm", norms), ("validation_loss", TOLERANCE)):
        count = 2 if name == "validation_loss" else num_iterations
        want, have = expected.series(name)[-count:], found.series(name)
        assert len(have) == len(want) == count
        assert have == pytest.approx(want, rel=tolerance), name


LAYOUTS = {
    "one microbatch": (2, PIPELINE, ("--global-batch-size", "2"), ZERO1),
    "four microbatches": (2, PIPELINE, (), ()),
    "data parallelism": (4, PIPELINE, ("--global-batch-size", "16"), ()),
    "zero1": (4, PIPELINE, ("--global-batch-size", "16"), (*ZERO1, "--fsdp-trace-pool")),
    "instances": (4, PIPELINE, ("--global-batch-size", "8"), ("--num-distributed-optimizer-instances", "2")),
    "per token": (2, PIPELINE, ("--calculate-per-token-loss",), ("--data-parallel-sharding-strategy", "no_shard")),
    "untied": (2, PIPELINE, ("--untie-embeddings-and-output-weights",), ()),
    "chunks": (2, (*PIPELINE, *CHUNKS), (), ()),
    "chunks, data parallelism": (4, (*PIPELINE, *CHUNKS), ("--global-batch-size", "16"), ZERO1),
    "tensor parallelism": (4, PIPELINE, ("--tensor-model-parallel-size", "2", "--sequence-parallel"), ()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_ddp_does(name: str) -> None:
    num_ranks, layout, both, v2 = LAYOUTS[name]
    flags = (*FLAGS, *layout, *both)
    ddp = launch_once(flags, num_ranks)
    found = launch_once((*V2, *flags, *v2), num_ranks)
    assert_same(ddp, found)
    # A tied weight counts once.
    assert found.series("num_zeros") == ddp.series("num_zeros")


def test_bf16_with_chunks_trains_as_ddp_does() -> None:
    flags = (*FLAGS, *PIPELINE, *CHUNKS, "--bf16")
    ddp, found = launch_once(flags, 2), launch_once((*V2, *flags), 2)
    # An fp32 master weight that differs in its last bit may round to another bfloat16 weight.
    assert found.series("lm_loss") == pytest.approx(ddp.series("lm_loss"), rel=1e-4)
    assert found.series("grad_norm") == pytest.approx(ddp.series("grad_norm"), rel=2e-3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run of one rank, and its checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("one")
    return launch_once((*V2, *FLAGS, "--save", str(folder), "--save-interval", "2"), 1), folder


def _resume(folder: Path, iteration: int, num_ranks: int, *flags: str) -> Run:
    return launch_once((*V2, *FLAGS, *flags, "--load", str(folder), "--ckpt-step", str(iteration)), num_ranks)


def test_a_run_of_one_rank_goes_on_in_stages_and_back(saved: tuple[Run, Path], tmp_path: Path) -> None:
    one, folder = saved
    save = ("--save", str(tmp_path), "--save-interval", "3", "--async-save")
    assert_same(one, _resume(folder, 2, 4, *PIPELINE, *save), 2)
    for num_ranks in (1, 2):
        assert_same(one, _resume(tmp_path, 3, num_ranks), 1)
    assert_same(one, _resume(tmp_path, 3, 2, *PIPELINE, *CHUNKS), 1)


def test_moments_move_between_numbers_of_stages_bit_for_bit(saved: tuple[Run, Path], tmp_path: Path) -> None:
    at = "iter_0000002"
    expected = load_tensors(saved[1] / at)
    assert any(key.endswith("layers.3.mlp.linear_fc2.weight.exp_avg_sq") for key in expected)
    source = saved[1]
    for name, num_ranks, flags in (("two", 2, (*PIPELINE, *CHUNKS)), ("one", 1, ())):
        target = tmp_path / name
        words = (*V2, *FLAGS, *flags, "--load", str(source), "--ckpt-step", "2", "--save", str(target))
        run = launch_forked(words, num_ranks, script="tests/functional_tests/load_and_save.py")
        assert run.returncode == 0, run.stderr[-4000:]
        found = load_tensors(target / at)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
        source = target


def test_stages_go_on_from_stages_of_ddp(tmp_path: Path) -> None:
    flags = (*FLAGS, *PIPELINE)
    ddp = launch_once((*flags, *CHUNKS, "--save", str(tmp_path), "--save-interval", "2"), 2)
    for num_ranks, layout in ((2, PIPELINE), (1, ())):
        assert_same(ddp, _resume(tmp_path, 2, num_ranks, *layout, "--no-load-rng"), 2)


def test_another_model_is_refused_by_all_stages(saved: tuple[Run, Path]) -> None:
    flags = (*V2, *FLAGS, *PIPELINE, "--num-layers", "2", "--load", str(saved[1]))
    for run in launch_ranks_apart(flags, 2):
        assert run.returncode != 0
        last = run.stderr.splitlines()[-1]
        assert "layers.3.mlp.linear_fc1.weight: in the checkpoint, and not in the model or optimizer" in last, last


def test_gradients_that_are_no_numbers_end_all_stages() -> None:
    for run in launch_ranks_apart((*V2, *FLAGS, *PIPELINE, "--lr", "1e30"), 2):
        assert run.returncode != 0
        assert "RuntimeError: gradients: expected finite values, got nan or inf" in run.stderr, run.stderr[-2000:]


def test_losses_that_are_no_numbers_end_all_stages() -> None:
    """Those of an evaluation: the last stage alone computes them."""
    flags = (
        *V2,
        *FLAGS,
        *PIPELINE,
        "--lr",
        "1e30",
        "--train-iters",
        "2",
        "--eval-interval",
        "1",
        "--lr-warmup-iters",
        "0",
    )
    for run in launch_ranks_apart(flags, 2):
        assert run.returncode != 0
        assert "RuntimeError: Loss: expected a finite sum, got " in run.stderr, run.stderr[-2000:]
