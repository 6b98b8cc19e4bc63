# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon under megatron-core's contract: steps in every layout, settings, which parameters are matrices, checkpoints."""

from __future__ import annotations

import math

import pytest

from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore_muon import train_beside_plain

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
GQA = "--group-query-attention --num-query-groups 2"
GATED = "--swiglu --muon-split-gate-up"
MOE = "--num-experts 4 --moe-ffn-hidden-size 12 --disable-bias-linear --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2"
LAYOUTS = [
    *[(2, f"--data-parallel-sharding-strategy {name}") for name in STRATEGIES],
    (1, f"{GQA} --muon-nesterov"),
    (3, f"{GQA} {GATED} --global-batch-size 3"),
    (2, "--untie-embeddings-and-output-weights --muon-no-split-qkv --muon-fp32-matmul-prec highest"),
    (2, f"--bf16 {GATED}"),
    (4, f"--num-distributed-optimizer-instances 2 {GQA}"),
    (4, f"--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim {GATED}"),
    (2, f"{TP2} {GQA}"),
    (2, f"{TP2} {GQA} --muon-tp-mode duplicated"),
    (4, f"{TP2} {GQA} {GATED} --sequence-parallel"),
    (4, f"{TP2} {GQA} {GATED} --sequence-parallel --muon-tp-mode duplicated"),
    (4, f"{TP2} --swiglu --muon-tp-mode duplicated"),
    (2, "--pipeline-model-parallel-size 2"),
    (4, f"--pipeline-model-parallel-size 2 {GATED} --untie-embeddings-and-output-weights"),
    (2, f"{MOE} --expert-model-parallel-size 2"),
    (4, f"{MOE} --expert-model-parallel-size 2 {GATED} --muon-router-adam"),
]


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS, ids=lambda value: str(value).replace("--", ""))
def test_steps_equal_those_of_a_plain_loop(world_size: int, flags: str) -> None:
    """Bit for bit over ten steps with other data on every rank; the loop gets the gradients that Muon gets."""
    results = run_ranks(world_size, train_beside_plain, flags)
    losses = [[result.lm_loss for result in of_rank] for of_rank in results]
    assert all(of_rank == losses[0] for of_rank in losses)
    assert all(map(math.isfinite, losses[0])) and len(set(losses[0])) == len(losses[0])
