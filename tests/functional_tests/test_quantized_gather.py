# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Training with weights gathered in low bits learns as in bf16, and the same under every strategy and layout."""

from __future__ import annotations

import pytest

from .launch_script import Run, launch_once

SMALL = (
    "--use-megatron-fsdp-v2 --bf16 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 8 --global-batch-size 16 --lr 1e-3 --min-lr 0 --log-interval 1 --seed 1234"
)
LONG = "--train-iters 300 --lr-warmup-iters 30 --eval-iters 20 --eval-interval 300"
SHORT = "--train-iters 5 --eval-iters 0"
FP8, MXFP8, NVFP4 = (f"--quantized-gather {name}" for name in ("fp8", "mxfp8", "nvfp4"))


def run_of(*flags: str, ranks: int = 2) -> Run:
    return launch_once(tuple(" ".join((SMALL, *flags)).split()), ranks)


def _end_of(flags: str) -> tuple[float, float]:
    """Return the mean training loss of the last 30 iterations, and the validation loss after them."""
    run = run_of(LONG, "--data-parallel-sharding-strategy optim_grads_params", flags)
    losses = run.series("lm_loss")
    assert len(losses) == 300 and losses[0] > 5
    return sum(losses[-30:]) / 30, run.series("validation_loss")[-1]


@pytest.mark.parametrize(("flags", "within"), [(FP8, 0.005), (MXFP8, 0.005), (NVFP4, 0.02)])
def test_a_language_model_learns_as_well_as_in_bf16(flags: str, within: float) -> None:
    found, expected = _end_of(flags), _end_of("")
    assert found != expected, "weights were quantized"
    assert found == pytest.approx(expected, rel=within)


@pytest.mark.parametrize("flags", [FP8, NVFP4])
def test_strategies_print_the_same_digits(flags: str) -> None:
    """With one microbatch a step, on two ranks, where every sum has one order."""
    runs = [
        run_of(SHORT, flags, f"--data-parallel-sharding-strategy {strategy}")
        for strategy in ("no_shard", "optim", "optim_grads_params")
    ]
    runs.append(run_of(SHORT, flags, "--data-parallel-sharding-strategy optim_grads_params --fsdp-trace-pool"))
    first = runs[0].printed()
    assert len(first["lm loss"]) == 5
    assert all(run.printed() == first for run in runs[1:])


LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "experts": "--num-experts 2 --disable-bias-linear --expert-model-parallel-size 2",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_follow_the_run_in_bf16(layout: str) -> None:
    """To the precision of the format: what is quantized, by magnitudes that ranks agree on, is each rank's piece."""
    sharded = "--data-parallel-sharding-strategy optim_grads_params"
    plain, quantized = (run_of(SHORT, sharded, LAYOUTS[layout], flags) for flags in ("", FP8))
    assert quantized.series("lm_loss") != plain.series("lm_loss")
    assert quantized.series("lm_loss") == pytest.approx(plain.series("lm_loss"), rel=0.005)


def test_layers_may_be_left_out() -> None:
    sharded = "--data-parallel-sharding-strategy optim_grads_params --num-layers 3"
    some = run_of(SHORT, sharded, NVFP4, "--first-last-layers-bf16")
    assert some.series("lm_loss") != run_of(SHORT, sharded, NVFP4).series("lm_loss")
    assert some.series("lm_loss") != run_of(SHORT, sharded).series("lm_loss")
