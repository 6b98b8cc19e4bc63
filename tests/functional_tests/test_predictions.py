# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Layers that predict further tokens train under FSDP v2 as under megatron-core's DDP with the same layout of ranks.

They use the model's embedding and output layer once more each. Ranks hold different samples. The tolerance is that of
float32 sums in another order, as in test_parity.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from .launch_script import Run, launch_forked, launch_once
from .tensors import load_tensors

TOLERANCE = 1e-6
NUM_ITERATIONS = 4
V2 = "--use-megatron-fsdp-v2"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --position-embedding-type rope --mtp-num-layers 2 "
    f"--micro-batch-size 2 --global-batch-size 8 --train-iters {NUM_ITERATIONS} --lr 1e-2 --eval-iters 0 "
    "--log-interval 1 --log-num-zeros-in-grad --seed 7 --num-workers 0"
)
STAGES = "--pipeline-model-parallel-size 2"
CHUNKS = f"{STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
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
    "stages": STAGES,
    "stages with chunks": f"{CHUNKS} --calculate-per-token-loss",
    "stages with chunks, untied": f"{CHUNKS} --untie-embeddings-and-output-weights",
}


def near(name: str, values: list[float]) -> Any:
    """Return what equals values up to the order of sums, by which an element in thousands may cancel to zero or not."""
    return pytest.approx(values, rel=TOLERANCE, abs=2 if name == "num_zeros" else None)


def run_of(layout: str, *flags: str) -> Run:
    return launch_once((*flags, *MODEL.split(), *LAYOUTS[layout].split()), 2)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("tied", "optim"),
        ("tied", "optim_grads"),
        ("stages", "optim"),
        *((layout, "optim_grads_params") for layout in LAYOUTS),
    ],
)
def test_losses_and_norms_are_those_of_ddp(layout: str, strategy: str) -> None:
    expected, found = run_of(layout), run_of(layout, V2, "--data-parallel-sharding-strategy", strategy)
    for name in NAMES:
        assert found.series(name) == near(name, expected.series(name)), name
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
        assert resumed.series(name) == near(name, whole.series(name)[2:]), name


def _without_dropout(*flags: str) -> tuple[str, ...]:
    return (*MODEL.replace("dropout 0.1", "dropout 0").split(), "--num-layers", "4", *flags)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run of one rank, and its checkpoint of the second iteration."""
    folder = tmp_path_factory.mktemp("one")
    return launch_once((V2, *_without_dropout(), "--save", str(folder), "--save-interval", "2"), 1), folder


@pytest.mark.parametrize("layout", [STAGES, CHUNKS])
def test_a_run_of_one_rank_goes_on_in_stages(one_rank: tuple[Run, Path], layout: str) -> None:
    """Embedding and layers lie on the last stage then, where the embedding is a copy of the first one's."""
    whole, folder = one_rank
    flags = (*_without_dropout(*layout.split()), "--load", str(folder), "--ckpt-step", "2", "--no-load-rng")
    found = launch_once((V2, *flags), 2)
    for name in NAMES:
        assert found.series(name) == near(name, whole.series(name)[2:]), name


def test_weights_and_moments_move_to_stages_and_back_bit_for_bit(one_rank: tuple[Run, Path], tmp_path: Path) -> None:
    source, at = one_rank[1], "iter_0000002"
    expected = load_tensors(source / at)
    assert any("mtp.layers.1." in key and key.endswith("exp_avg_sq") for key in expected)
    for num_ranks, layout in ((2, CHUNKS), (1, "")):
        target = tmp_path / str(num_ranks)
        words = (*_without_dropout(*layout.split()), "--load", str(source), "--ckpt-step", "2", "--save", str(target))
        run = launch_forked((V2, *words), num_ranks, script="tests/functional_tests/load_and_save.py")
        assert run.returncode == 0, run.stderr[-4000:]
        found = load_tensors(target / at)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), layout
        source = target


def test_stages_of_ddp_are_read_by_stages_and_by_one_rank(tmp_path: Path) -> None:
    flags = _without_dropout(*STAGES.split())
    ddp = launch_once((*flags, "--save", str(tmp_path), "--save-interval", "2"), 2)
    load = ("--load", str(tmp_path), "--ckpt-step", "2", "--no-load-rng")
    for num_ranks, words in ((2, flags), (1, _without_dropout())):
        found = launch_once((V2, *words, *load), num_ranks)
        for name in NAMES:
            assert found.series(name) == near(name, ddp.series(name)[2:]), name
