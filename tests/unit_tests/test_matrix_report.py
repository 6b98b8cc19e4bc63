# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Planned work is even up to 64 shards, the report says what plans say, and docs/muon.md has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.distributed.fsdp.experimental import matrix_report
from megatron.core.distributed.fsdp.experimental.layout import plan_layout
from megatron.core.distributed.fsdp.experimental.layout_report import MODELS
from megatron.core.distributed.fsdp.experimental.matrix_pipeline import MatrixPipeline, Participants
from megatron.core.distributed.fsdp.experimental.matrix_plan import Matrix, MatrixPlan, Place, plan_matrices
from megatron.core.distributed.fsdp.experimental.matrix_report import NUM_SHARDS, REPORTED, measure, render
from megatron.core.distributed.fsdp.experimental.newton_schulz import count_operations

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron.core.distributed.fsdp.experimental.matrix_report"]

MAX_IMBALANCE = 1.1
MAX_PLANNING_S = 10
"""Of a start of training; the largest has 18,672 matrices and takes about half a second on a quiet core."""


@pytest.mark.parametrize("model", REPORTED)
def test_work_is_even(model: str) -> None:
    for num_shards in NUM_SHARDS:
        found = measure(model, num_shards)
        assert found.span >= found.imbalance - 1e-12 >= found.least - 2e-12, num_shards
        assert 0 < found.travelling < 1 and found.planning_s < MAX_PLANNING_S
        if num_shards <= 64:
            assert found.imbalance <= MAX_IMBALANCE, num_shards
            # Each layer of DeepSeek-V3 has one matrix with most of the work, and ranks wait for its owners.
            assert found.span <= (1.6 if "DeepSeek" in model else 1.11), num_shards


def test_models_with_layers_are_reported() -> None:
    assert {*MODELS} - {*REPORTED} == {"GPT-2 XL embeddings", "ViT-B/14 without its layers"}


def test_worked_example() -> None:
    """Llama-3 8B has 32 times q, k, v, o and three of 14336 x 4096, of which one is 1/121.1 of all operations."""
    found = measure("Llama-3 8B", 256)
    assert found.num_matrices == 32 * 7
    square, narrow, wide = 4096 * 3 * 4096**2, 1024**2 * (2 * 4096 + 1024), 4096**2 * (2 * 14336 + 4096)
    layer = 2 * square + 2 * narrow + 3 * wide
    assert found.least == 256 * wide / (32 * layer) == found.imbalance
    assert measure("Llama-3 8B", 8).least == 1


def test_buffers_are_those_of_pipelines() -> None:
    """The largest of all ranks; there every matrix and message begins at a multiple of 64 elements."""
    model, num_shards = "Llama-3 8B", 8
    layout = plan_layout(MODELS[model].shapes(), num_shards)
    matrices = []
    for index, slot in enumerate(layout.slots):
        if len(slot.shape) == 2:
            owned = ((shard, layout.owned(index, shard)) for shard in range(num_shards))
            ranges = tuple((shard, part.start, part.stop) for shard, part in owned if part.numel)
            matrices.append(Matrix(count_operations(1, *slot.shape, 5), slot.numel, ranges))
    plan = plan_matrices(matrices * 32, [Place(0, shard, 0) for shard in range(num_shards)], 1 << 26)
    participants = [Participants(tuple(range(num_shards)), me, None, torch.device("cpu")) for me in range(num_shards)]
    found = [MatrixPipeline(plan, of, torch.float32, torch.bfloat16, "").buffer_bytes() for of in participants]
    assert measure(model, num_shards).buffer_bytes == pytest.approx(max(found), rel=1e-4)
    assert measure(model, num_shards).travelling * sum(m.piece_numel for m in plan.matrices) == plan.travelling_numel


def test_span() -> None:
    """Equal loads, of which one rank has the large matrix first, the other last."""
    # Whole on either rank but for one element, so that both take part in every package.
    ranges = (((0, 0, 3), (1, 3, 4)), ((0, 0, 1), (1, 1, 4)))
    kinds = [(0, 3), (1, 1), (0, 1), (1, 1), (0, 1), (1, 3)]
    matrices = tuple(Matrix(cost, 4, ranges[owner]) for owner, cost in kinds)
    owners, rounds = tuple(owner for owner, _ in kinds), ((0, 1), (2, 3), (4, 5))
    plan = MatrixPlan(matrices, (Place(0, 0, 0), Place(0, 1, 0)), owners, rounds)
    course = matrix_report.follow(plan)
    assert course.span == 6 / 5 and plan.imbalance == 1
    assert course.travelling_numel == 6 == plan.travelling_numel
    assert course.buffer_bytes == 2 * (4 + 2) * (4 + 1), "two slots; a matrix of four, and one element of the other's"


def test_document_has_the_report() -> None:
    text = (ROOT / "docs/muon.md").read_text()
    command = " ".join(["python", *COMMAND[1:], "--markdown", "--no-times"])
    assert render(is_markdown=True, has_times=False) in text, f"put in what {command} prints"
    assert f"`{command}`" in text


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--models", "Llama-3 8B", "GPT-3 175B", "--shards", "8", "64", "--no-times"]
    result = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "RuntimeWarning" not in result.stderr
    assert result.stdout == render(["Llama-3 8B", "GPT-3 175B"], [8, 64], has_times=False)
    matrix_report.main(["--models", "Llama-3 8B", "--shards", "8", "--markdown"])
    head, rule, line = capsys.readouterr().out.splitlines()
    assert head.endswith("| planned in ms |") and rule.startswith("| --- | ---: |")
    assert line.startswith("| Llama-3 8B | 32 | 224 | 8 | 1.0")


def test_numbers_of_shards_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        matrix_report.main(["--shards", "8", "0"])
    assert "--shards: expected numbers of at least 1, got 0." in capsys.readouterr().err
