# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What is recomputed changes no bit of a run, dropout included, and lets autograd hold less.

`benchmarks/activations.py` trains as pretrain_gpt.py does and says how many bytes autograd holds at most. The shares
below are those of this model: 0.3 means that three tenths of the bytes are left.
"""

import re

import pytest

from .launch_script import Run, launch_once, launch_ranks_apart

METER = "benchmarks/activations.py"
V2 = "--use-megatron-fsdp-v2"
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 99 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-2 --eval-iters 0 --log-interval 1 --seed 7 "
    "--num-workers 0 --disable-bias-linear"
)
FULL = "--recompute-granularity full --recompute-method"
MODES = {
    "uniform": (f"{FULL} uniform", 0.2, 0.4),
    "uniform by two": (f"{FULL} uniform --recompute-num-layers 2", 0.45, 0.52),
    "block": (f"{FULL} block --recompute-num-layers 2", 0.52, 0.57),
    "attention": ("--recompute-activations", 0.57, 0.64),
    "mlp": ("--recompute-granularity selective --recompute-modules mlp", 0.74, 0.8),
    "attention and mlp": ("--recompute-activations --recompute-modules core_attn mlp", 0.35, 0.4),
    "moe": ("--recompute-activations --recompute-modules moe", 0.54, 0.64),
}
"""Flags, and the bounds of the share of the bytes that is left: close enough to tell them apart."""
EXPERTS = (
    f"{V2} --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
)
LAYOUTS = {
    "ddp": (2, ""),
    "zero1": (2, f"{V2} --data-parallel-sharding-strategy optim --fsdp-trace-pool"),
    "zero3": (2, V2),
    "bf16, joint units": (2, f"{V2} --bf16 --megatron-fsdp-min-unit-numel 30000"),
    "hsdp": (4, f"{V2} --num-distributed-optimizer-instances 2"),
    "tp2": (2, f"{V2} --tensor-model-parallel-size 2"),
    "tp2 sp": (2, f"{V2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2": (2, f"{V2} --context-parallel-size 2"),
    "pp2 chunks": (2, f"{V2} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "ep2": (2, EXPERTS),
    "further tokens": (2, f"{V2} --mtp-num-layers 1 --position-embedding-type rope"),
}
RUNS = [
    *(("zero3", mode) for mode in ("uniform", "block", "attention", "mlp", "attention and mlp")),
    ("zero1", "uniform by two"),
    ("ddp", "attention"),
    ("bf16, joint units", "uniform"),
    ("hsdp", "uniform"),
    ("tp2 sp", "uniform"),
    ("tp2 sp", "attention"),
    ("cp2", "attention"),
    ("pp2 chunks", "uniform"),
    ("ep2", "uniform"),
    ("ep2", "moe"),
    ("further tokens", "uniform"),
]


def run_of(layout: str, flags: str = "") -> Run:
    num_ranks, words = LAYOUTS[layout]
    return launch_once((*MODEL.split(), *words.split(), *flags.split()), num_ranks, METER)


def bytes_held(run: Run) -> list[int]:
    found = re.findall(r"rank (\d+): held for backward at most \(bytes\): (\d+)", run.stdout)
    return [int(number) for _, number in sorted(found)]


@pytest.mark.parametrize(("layout", "mode"), RUNS)
def test_numbers_are_the_same_and_less_is_held(layout: str, mode: str) -> None:
    flags, least, most = MODES[mode]
    expected, found = run_of(layout), run_of(layout, flags)
    names = [name for name in expected.records[0] if "loss" in name or name == "grad_norm"]
    assert len(names) >= 3
    for name in names:
        assert found.series(name) == expected.series(name), name
        assert len(found.series(name)) == 2
    before, after = bytes_held(expected), bytes_held(found)
    assert len(before) == len(after) == LAYOUTS[layout][0]
    assert all(least < now / then < most for now, then in zip(after, before, strict=True)), (before, after)


def test_ranks_of_tensor_parallelism_share_what_is_kept() -> None:
    """Each keeps half of the layers' inputs: 4 layers x 32 tokens x 2 samples x 32 numbers of 4 bytes, halved."""
    flags = MODES["uniform"][0]
    whole, cut = run_of("tp2", flags), run_of("tp2", f"{flags} --distribute-saved-activations")
    for name in ("lm_loss", "grad_norm"):
        assert cut.series(name) == whole.series(name) == run_of("tp2").series(name)
    saved = [then - now for then, now in zip(bytes_held(whole), bytes_held(cut), strict=True)]
    # At the peak one of them is whole again, to be recomputed from.
    one = 32 * 2 * 32 * 4
    assert all(one <= number <= 2 * one for number in saved), saved


def test_dropout_is_on_and_matters() -> None:
    """Without it the tests above would say nothing about random numbers; that of attention is most of what it holds."""
    assert run_of("zero3", "--hidden-dropout 0").series("lm_loss") != run_of("zero3").series("lm_loss")


def test_what_cannot_be_recomputed_is_refused_on_every_rank() -> None:
    for run in launch_ranks_apart((V2, *MODEL.split(), "--recompute-activations", "--recompute-modules", "moe"), 2):
        assert run.returncode
        assert "Recompute: expected modules of the model's layers, got moe without --num-experts" in run.stderr
