# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Training in float16 under FSDP v2 skips, scales and learns as under megatron-core's DDP with the same layout.

Ranks hold different samples. Gradients are float16: added up in another order one may round to another of 1024 steps,
so that losses and norms differ by a few 1e-5 after some iterations. Which iterations overflow must be the same.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from .launch_script import Run, launch_forked, launch_once

NUM_ITERATIONS = 8
V2 = "--use-megatron-fsdp-v2"
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --attention-dropout 0 --hidden-dropout 0 "
    "--make-vocab-size-divisible-by 2 --num-workers 0 --micro-batch-size 2 "
    f"--train-iters {NUM_ITERATIONS} --lr 1e-2 --lr-warmup-iters 3 --log-interval 1 --eval-iters 0 "
    "--use-cpu-initialization --seed 7"
)
ACCUMULATES = "--global-batch-size 8"
DYNAMIC = "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 2"
CONSTANT = "--fp16 --loss-scale 4096 --accumulate-allreduce-grads-in-fp32"
ZERO1 = f"{V2} --data-parallel-sharding-strategy optim"
TP = "--tensor-model-parallel-size 2 --swiglu"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
EP = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
    "--moe-router-dtype fp32"
)


def _words(*flags: str) -> tuple[str, ...]:
    return tuple(word for part in (*flags, RUN) for word in part.split())


def assert_same_training(found: Run, expected: Run) -> None:
    for name in ("loss_scale", "learning_rate"):
        assert len(found.series(name)) == NUM_ITERATIONS
        assert found.series(name) == expected.series(name), name
    for name in ("lm_loss", "grad_norm"):
        for have, want in zip(found.series(name), expected.series(name), strict=True):
            assert have == (None if want is None else pytest.approx(want, rel=5e-4)), name


@pytest.mark.parametrize(
    ("wrapper", "layout", "scale"),
    [
        # Under ZeRO-3 each microbatch is reduced, so that sums that overflow are others, unless there is only one.
        (V2, "", DYNAMIC),
        (ZERO1, ACCUMULATES, DYNAMIC),
        (V2, f"{TP} {ACCUMULATES}", DYNAMIC),
        (ZERO1, f"{PP} {ACCUMULATES}", DYNAMIC),
        # megatron-core's DDP has one scaler for experts and another for the rest, which must not come apart.
        (V2, EP, CONSTANT),
    ],
)
def test_trains_as_ddp(wrapper: str, layout: str, scale: str) -> None:
    found, expected = (launch_once(_words(*flags, layout, scale), 2) for flags in ((wrapper,), ()))
    assert_same_training(found, expected)
    skipped = [loss is None for loss in found.series("lm_loss")]
    assert skipped == [False] * NUM_ITERATIONS if scale == CONSTANT else 3 <= sum(skipped) <= 6
    # The schedule stands still while updates are skipped, and a skipped iteration has no norm.
    rates = [0.0, *found.series("learning_rate")]
    assert [after == before for before, after in pairwise(rates[:6])] == skipped[:5]
    assert [norm is None for norm in found.series("grad_norm")] == skipped
    assert f"number of skipped iterations: {int(skipped[0]):3d} | number of nan iterations:   0 |" in found.stdout


@pytest.mark.parametrize(
    ("layout", "name"), [(TP, "linear_fc1.weight"), (PP, "weight"), (CP, "weight"), (EP, "local_experts")]
)
def test_pb043_an_overflow_on_one_rank_skips_under_every_layout(layout: str, name: str) -> None:
    flags = (name, *_words(V2, layout, "--fp16 --initial-loss-scale 1024 --hysteresis 1"))
    run = launch_forked(flags, 2, script="tests/functional_tests/overflow_on_one_rank.py")
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stderr.count("skipped on all ranks") == 2 * 2
    assert run.series("loss_scale") == [1024, 1024, 512, 512, 256, 256, 256, 256]
    assert [loss is None for loss in run.series("lm_loss")] == [number in (3, 5) for number in range(1, 9)]


def test_fsdp_v2_takes_over_the_loss_scaler_of_ddp(tmp_path: Path) -> None:
    """Four iterations and four more have the scales and losses of eight in a row.

    All of the first four are skipped, so that there is a scale to take over, and no moment.
    """
    flags = _words(ACCUMULATES, DYNAMIC)
    saved = launch_forked((*flags, "--save", str(tmp_path), "--exit-interval", "4"), 2)
    assert saved.returncode == 0, saved.stderr[-4000:]
    found = launch_forked((*flags, *ZERO1.split(), "--load", str(tmp_path), "--no-load-rng"), 2)
    assert found.returncode == 0, found.stderr[-4000:]
    expected = launch_once(flags, 2)
    assert saved.series("lm_loss") == [None] * 4
    for name in ("loss_scale", "learning_rate"):
        assert saved.series(name) + found.series(name) == expected.series(name), name
    assert len(set(expected.series("loss_scale")[4:])) > 1
    for have, want in zip(found.series("lm_loss"), expected.series("lm_loss")[4:], strict=True):
        assert have == (None if want is None else pytest.approx(want, rel=5e-4))
