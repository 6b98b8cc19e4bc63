# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Models with experts train under FSDP v2 as under megatron-core's DDP with the same layout of ranks.

Ranks hold different samples. The tolerance is that of float32 sums in another order, as in test_parity.py.
"""

from pathlib import Path

import pytest

from .launch_script import Run, launch_forked, launch_once, launch_ranks_apart

TOLERANCE = 1e-6
NUM_ITERATIONS = 4
V2 = "--use-megatron-fsdp-v2"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--hidden-dropout 0 --attention-dropout 0 --num-experts 4 --moe-ffn-hidden-size 48 --micro-batch-size 2 "
    f"--train-iters {NUM_ITERATIONS} --lr 1e-2 --eval-iters 0 --log-interval 1 --log-num-zeros-in-grad --seed 7"
)
LOSSES = "--swiglu --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --position-embedding-type rope"
TWO = f"{LOSSES} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
HSDP = "optim_grads_params --num-distributed-optimizer-instances 2"
HFSDP = f"{HSDP} --outer-dp-sharding-strategy optim"
LAYOUTS = {
    "ep2": (2, f"{TWO} --global-batch-size 8"),
    "ep2_bias_per_token": (
        2,
        # On bytes one of 19111 gradients that are zero is so by rounding, and not in every order of sums.
        "--mock-data --vocab-size 99 "
        "--expert-model-parallel-size 2 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
        "--moe-router-bias-update-rate 0.05 --moe-router-dtype fp32 --calculate-per-token-loss --moe-router-topk 1",
    ),
    "ep2_edp2": (4, f"{TWO} --global-batch-size 16"),
    "ep1": (2, f"{LOSSES} --disable-bias-linear --moe-router-load-balancing-type global_aux_loss"),
    "tp2_etp2_ep2": (
        4,
        f"{TWO} --tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear --global-batch-size 8",
    ),
    "pp2_ep2": (
        4,
        f"{TWO} --global-batch-size 8 --pipeline-model-parallel-size 2 --num-layers 4 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "tp2_ep2": (
        2,
        f"{TWO} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
        "--disable-bias-linear",
    ),
}


def run_of(layout: str, *flags: str) -> Run:
    num_ranks, words = LAYOUTS[layout]
    return launch_once((*flags, *MODEL.split(), *words.split()), num_ranks)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        *((layout, "optim_grads_params") for layout in LAYOUTS),
        ("ep2", "optim"),
        ("ep2_edp2", HSDP),
        ("ep2_edp2", HFSDP),
        ("ep2_edp2", "optim_grads_params --expert-data-parallel-sharding-strategy optim"),
    ],
)
def test_losses_and_norms_are_those_of_ddp(layout: str, strategy: str) -> None:
    expected = run_of(layout)
    found = run_of(layout, V2, "--data-parallel-sharding-strategy", *strategy.split())
    names = {name for name in expected.records[0] if name.endswith("loss") or name in ("grad_norm", "num_zeros")}
    assert names >= {"lm_loss", "grad_norm", "num_zeros"}
    assert ("z_loss" in names) == ("z-loss" in LAYOUTS[layout][1])
    for name in names:
        assert found.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE), name
        assert len(found.series(name)) == NUM_ITERATIONS


def test_pieces_of_experts_are_cut_from_whole_ones() -> None:
    """Initial weights drawn on the host are the same however many ranks share an expert."""
    words = (V2, *MODEL.split(), "--use-cpu-initialization", "--disable-bias-linear", "--swiglu")
    words = (*words, "--moe-token-dispatcher-type", "alltoall", "--global-batch-size", "8")
    expected = launch_once((*words, "--make-vocab-size-divisible-by", "128"), 1)
    cut = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--make-vocab-size-divisible-by", "64")
    found = launch_once((*words, *cut), 2)
    for name in ("lm_loss", "grad_norm"):
        # Products are cut otherwise, too, as above.
        assert found.series(name) == pytest.approx(expected.series(name), rel=5e-6), name


@pytest.mark.parametrize("layout", ["ep2", "pp2_ep2"])
def test_an_overlapped_schedule_changes_no_digit(layout: str) -> None:
    """While one microbatch's tokens travel, another one computes; with stages, in the interleaved schedule."""
    num_ranks, words = LAYOUTS[layout]
    flags = (V2, *MODEL.split(), *words.split(), "--bf16", "--disable-bias-linear", "--eval-iters", "1")
    expected, found = (
        launch_once((*flags, *more), num_ranks) for more in ((), ("--overlap-moe-expert-parallel-comm",))
    )
    for name in ("lm_loss", "grad_norm", "num_zeros", "load_balancing_loss", "validation_loss"):
        assert found.series(name) == expected.series(name) != [], name


def test_biases_of_experts_stay_their_own_under_tensor_parallelism() -> None:
    """megatron-core marks them as shared by ranks that hold different experts, so that its DDP is no reference here.

    Initial weights of a layer are drawn whole on every rank, and so are the same under both layouts.
    """
    words = (V2, *MODEL.split(), "--expert-model-parallel-size", "2", "--use-cpu-initialization")
    words = (*words, "--moe-token-dispatcher-type", "alltoall", "--global-batch-size", "8", "--clip-grad", "0.5")
    cut = ("--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1", "--sequence-parallel")
    expected = launch_once((*words, "--make-vocab-size-divisible-by", "128"), 2)
    found = launch_once((*words, *cut, "--make-vocab-size-divisible-by", "64"), 2)
    for name in ("lm_loss", "grad_norm"):
        # Products are cut otherwise, too: 1.1e-6 in the fourth iteration.
        assert found.series(name) == pytest.approx(expected.series(name), rel=5e-6), name


def test_experts_drawn_on_the_host_are_the_same_however_ranks_share_them() -> None:
    """With one generator for all ranks, each would draw the same few experts as the others."""
    words = (V2, *MODEL.split(), *LOSSES.split(), "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall")
    words = (*words, "--use-cpu-initialization", "--global-batch-size", "8")
    expected = launch_once(words, 2)
    found = launch_once((*words, "--expert-model-parallel-size", "2"), 2)
    for name in ("lm_loss", "grad_norm", "load_balancing_loss"):
        assert found.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE), name


def test_losses_of_routers_are_in_the_log_line() -> None:
    run = run_of("ep2", V2, "--data-parallel-sharding-strategy", "optim_grads_params")
    for name in ("load_balancing_loss", "z_loss"):
        assert f"| {name}: {run.series(name)[-1]:.6E} |" in run.stdout
        assert run.series(name)[-1] > 0


@pytest.mark.parametrize("saves", ["v2_without_expert_parallelism", "ddp"])
def test_a_run_goes_on_from_one_of_another_layout_or_wrapper(saves: str, tmp_path: Path) -> None:
    """Two iterations, and two more of ranks that share the experts, have the losses of four without a break."""
    words = (*MODEL.split(), *LOSSES.split(), "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall")
    shares = ("--expert-model-parallel-size", "2")
    before = (*words, *shares) if saves == "ddp" else (V2, *words)
    saved = launch_forked((*before, "--save", str(tmp_path), "--exit-interval", "2"), 2)
    assert saved.returncode == 0, saved.stderr[-3000:]
    whole = launch_once(before, 2)
    resumed = launch_forked((V2, *words, *shares, "--load", str(tmp_path), "--no-load-rng"), 2)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    for name in ("lm_loss", "grad_norm", "load_balancing_loss"):
        assert resumed.series(name) == pytest.approx(whole.series(name)[2:], rel=TOLERANCE), name


def test_ranks_that_cannot_share_the_experts_are_told_so_before_they_meet() -> None:
    flags = (V2, *MODEL.split(), "--num-experts", "3", "--expert-model-parallel-size", "2")
    for run in launch_ranks_apart(flags, 2):
        assert run.returncode
        assert "Experts: expected a divisor of --num-experts 3, got 2 for --expert-model-parallel-size" in run.stderr
