# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Layers that predict further tokens train under FSDP v2 as under megatron-core's DDP with the same layout of ranks.

They use the model's embedding and output layer once more each. Ranks hold different samples. The tolerance is that of
float32 sums in another order, as in test_parity.py.
"""

from pathlib import Path

import pytest

from .launch_script import Run, launch_forked, launch_once

TOLERANCE = 1e-6
NUM_ITERATIONS = 4
V2 = "--use-megatron-fsdp-v2"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 99 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --position-embedding-type rope --mtp-num-layers 2 "
    f"--micro-batch-size 2 --global-batch-size 8 --train-iters {NUM_ITERATIONS} --lr 1e-2 --eval-iters 0 "
    "--log-interval 1 --log-num-zeros-in-grad --seed 7 --num-workers 0"
)
LOSSES = ("lm_loss", "mtp_1_loss", "mtp_2_loss")
NAMES = (*LOSSES, "grad_norm", "num_zeros")
LAYOUTS = {
    "tied": "",
    "untied, per token": "--untie-embeddings-and-output-weights --calculate-per-token-loss",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp2": "--context-parallel-size 2",
    "ep2": (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--moe-aux-loss-coeff 0.01 --mtp-loss-scaling-factor 0.5"
    ),
}


def run_of(layout: str, *flags: str) -> Run:
    return launch_once((*flags, *MODEL.split(), *LAYOUTS[layout].split()), 2)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("tied", "optim"),
        ("tied", "optim_grads"),
        *((layout, "optim_grads_params") for layout in LAYOUTS),
    ],
)
def test_losses_and_norms_are_those_of_ddp(layout: str, strategy: str) -> None:
    expected, found = run_of(layout), run_of(layout, V2, "--data-parallel-sharding-strategy", strategy)
    for name in NAMES:
        assert found.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE), name
        assert len(found.series(name)) == NUM_ITERATIONS


def test_further_tokens_are_learnt_and_logged() -> None:
    """In the log line as in Megatron-LM's, after the loss of the model."""
    run = run_of("tied", V2, "--data-parallel-sharding-strategy", "optim_grads_params")
    last = run.records[-1]
    lm, first, second = (last[name] for name in LOSSES)
    assert f"| lm loss: {lm:.6E} | mtp_1 loss: {first:.6E} | mtp_2 loss: {second:.6E} | loss scale" in run.stdout
    assert all(run.series(name)[-1] < run.series(name)[0] - 0.1 for name in LOSSES)
    # Their weight changes what is learnt.
    other = launch_once((V2, *MODEL.split(), "--mtp-loss-scaling-factor", "0"), 2)
    assert other.series("mtp_2_loss")[0] == run.series("mtp_2_loss")[0]
    assert other.series("mtp_2_loss")[-1] > run.series("mtp_2_loss")[-1]


@pytest.mark.parametrize("saves", ["v2", "ddp"])
def test_a_run_goes_on_from_a_checkpoint(saves: str, tmp_path: Path) -> None:
    """Two iterations, and two more in another layout or wrapper, have the losses of four without a break."""
    words = (*MODEL.replace("dropout 0.1", "dropout 0").split(), *LAYOUTS["untied, per token"].split())
    before = words if saves == "ddp" else (V2, *words)
    saved = launch_forked((*before, "--save", str(tmp_path), "--exit-interval", "2"), 2)
    assert saved.returncode == 0, saved.stderr[-3000:]
    whole = launch_once(before, 2)
    resumed = launch_forked((V2, *words, "--load", str(tmp_path), "--no-load-rng"), 1 if saves == "v2" else 2)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    for name in NAMES:
        assert resumed.series(name) == pytest.approx(whole.series(name)[2:], rel=TOLERANCE), name
