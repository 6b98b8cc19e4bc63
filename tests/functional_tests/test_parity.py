# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The same global batch gives the same training, however it is spread over ranks.

Ranks hold different samples, so a reduction that is missing or counted twice shows at once. The
tolerance is that of fp32 sums in another order, measured at 2.2e-7 over these 50 iterations.
"""

import pytest

from .golden import read_flags
from .launch_script import Run, launch_once

TOLERANCE = 1e-6
FLAGS, _ = read_flags("dp2_ddp")
NUM_ITERATIONS = 50
V2 = "--use-megatron-fsdp-v2"
WRAPPERS = {"ddp": (), "fsdp_v2": (V2,)}


def assert_same_training(expected: Run, found: Run, tolerance: float = TOLERANCE) -> None:
    for name, num_values in (("lm_loss", NUM_ITERATIONS), ("grad_norm", NUM_ITERATIONS), ("validation_loss", 2)):
        want, have = expected.series(name), found.series(name)
        assert len(want) == len(have) == num_values
        for iteration, (a, b) in enumerate(zip(want, have, strict=True), start=1):
            limit = tolerance * abs(a)
            assert abs(a - b) <= limit, f"{name}, iteration {iteration}: {a!r} and {b!r}"
    assert expected.series("learning_rate") == found.series("learning_rate")


@pytest.fixture(scope="module")
def one_rank() -> Run:
    """megatron-core's DDP alone: no reduction at all."""
    return launch_once(FLAGS, 1)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_ranks_train_as_one(wrapper: str, one_rank: Run) -> None:
    assert_same_training(one_rank, launch_once((*WRAPPERS[wrapper], *FLAGS), 2))


def test_four_ranks_with_fsdp_v2_train_as_one(one_rank: Run) -> None:
    assert_same_training(one_rank, launch_once((V2, *FLAGS), 4))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_three_ranks_with_other_microbatches_train_as_one(wrapper: str, one_rank: Run) -> None:
    flags = (*WRAPPERS[wrapper], *FLAGS, "--micro-batch-size", "4", "--calculate-per-token-loss")
    assert_same_training(one_rank, launch_once(flags, 3))


def test_distributed_optimizer_with_both_overlaps_trains_as_ddp(one_rank: Run) -> None:
    flags = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    assert_same_training(one_rank, launch_once((*FLAGS, *flags, "--ddp-bucket-size", "5000"), 2))


def test_recomputing_and_loading_in_processes_change_no_bit(one_rank: Run) -> None:
    flags = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    flags = (*FLAGS, *flags, "--num-workers", "1", "--no-check-for-nan-in-loss-and-grad")
    assert_same_training(one_rank, launch_once(flags, 1), tolerance=0.0)


def test_fsdp_v2_in_bfloat16_trains_as_ddp_in_bfloat16() -> None:
    flags = (*FLAGS, "--bf16", "--train-iters", "10", "--eval-iters", "0")
    flags = tuple(word for word in flags if word not in ("--eval-interval", "30"))
    ddp, v2 = launch_once(flags, 2), launch_once((V2, *flags), 2)
    # An fp32 master weight that differs in its last bit may round to another bfloat16 weight.
    assert v2.series("lm_loss") == pytest.approx(ddp.series("lm_loss"), rel=1e-4)
    assert v2.series("grad_norm") == pytest.approx(ddp.series("grad_norm"), rel=2e-3)
    assert len(v2.series("lm_loss")) == 10


def test_the_loss_falls(one_rank: Run) -> None:
    losses = one_rank.series("lm_loss")
    assert losses[0] == pytest.approx(5.7, abs=0.1)  # ln(301) = 5.71
    assert losses[-1] < 3.2
