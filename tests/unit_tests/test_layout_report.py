# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The report's models are those that were published, its numbers are within the bound, and docs/layout.md has them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.distributed.fsdp.experimental import layout_report
from megatron.core.distributed.fsdp.experimental.layout_report import MODELS, NUM_SHARDS, measure, render

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron.core.distributed.fsdp.experimental.layout"]

# Published number of parameters, layers, and rows of the embedding and output tables; Gemma-2 shares one table.
TOTALS = {
    "Llama-3 8B": (8_030_261_248, 32, 2 * 128_256),
    "Llama-3 70B": (70_553_706_496, 80, 2 * 128_256),
    "Llama-3 405B": (405_853_388_800, 126, 2 * 128_256),
    "Llama-2 13B": (13_015_864_320, 40, 2 * 32_000),
    "Qwen2.5 14B": (14_770_033_664, 48, 2 * 152_064),
    "Qwen3 32B": (32_762_123_264, 64, 2 * 151_936),
    "Qwen3 30B-A3B": (30_532_122_624, 48, 2 * 151_936),
    "Gemma-2 9B": (9_241_705_984, 42, 256_000),
    "Phi-3 14B": (13_960_238_080, 40, 2 * 32_064),
}


@pytest.mark.parametrize("model", TOTALS)
def test_layers_add_up_to_the_published_number_of_parameters(model: str) -> None:
    total, num_layers, num_rows = TOTALS[model]
    entry = MODELS[model]
    assert isinstance(entry, layout_report.Decoder) and entry.layers == num_layers
    layer = sum(map(math.prod, entry.shapes()))
    assert num_layers * layer + (num_rows + 1) * entry.hidden == total, "layers, tables and the final norm"


@pytest.mark.parametrize("model", MODELS)
def test_padding_is_at_most_one_percent(model: str) -> None:
    for num_shards in NUM_SHARDS:
        result = measure(model, num_shards)
        assert 0 <= result.ours <= 0.01, num_shards
        assert result.planning_s > 0 and 0 <= result.whole_rows <= 1


def test_the_other_rules() -> None:
    """Llama-2 13B in 1,024 shards: rows of 5,120 and 13,824 elements have the multiple 138,240."""
    result = measure("Llama-2 13B", 1024)
    total = 317_204_480
    assert result.row_lcm == 3 * 138_240 * 1024 / total - 1
    wider = (2 * (14_336 - 13_824) * 5120) / total
    assert result.dim_0 == pytest.approx(wider, rel=1e-9), "gate and up have 13.5 rows a shard, all others divide"


def test_whole_tensors() -> None:
    """Llama-3 8B in 8 shards: each is as large as one of the MLP's three weights."""
    assert measure("Llama-3 8B", 8).whole_tensors == (8 * 4096 * 14336 - 218_112_000) / 218_112_000


def test_rows_of_the_most_elements_are_kept() -> None:
    """Qwen3 32B in 64 shards: its largest rows, 25,600, are kept with those of 5,120; 8,192 does not go with them."""
    assert measure("Qwen3 32B", 64).whole_rows == 1 - 5120 * 8192 / 487_598_336


def test_document_has_the_report() -> None:
    text = (ROOT / "docs/layout.md").read_text()
    command = " ".join(["python", *COMMAND[1:], "--report", "--markdown", "--no-times"])
    assert render(is_markdown=True, has_times=False) in text, f"put in what {command} prints"
    assert f"`{command}`" in text


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = subprocess.run(
        [*COMMAND, "--report", "--no-times"], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "found in sys.modules" not in result.stderr and "RuntimeWarning" not in result.stderr
    assert result.stdout == render(has_times=False)
    layout_report.main(["--report", "--markdown"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[len(MODELS) + 3].endswith("| planned in ms |")
    assert len(printed) == 2 + len(MODELS) + 1 + 2 + len(MODELS) * len(NUM_SHARDS)


def test_command_line_refuses_to_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        layout_report.main([])
    assert "arguments are required: --report" in capsys.readouterr().err
