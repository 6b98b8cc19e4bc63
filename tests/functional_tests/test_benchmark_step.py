# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's parts: a captured iteration, models that stand in for others, ratios, and the picture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from tests.unit_tests.graph_double import graphs_on_the_host
from tests.unit_tests.launch import run_ranks

from .launch_script import REPOSITORY

FOLDER = REPOSITORY / "examples/megatron_fsdp"


@contextmanager
def example(name: str) -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def measure(runtime: str, accumulation: int) -> tuple[float, float, int, bool]:
    """Return the first and the last loss of 6 steps, the number of times, and whether they have two parts."""
    with example("benchmark_step") as step:
        bench = step.Bench("tiny", runtime, torch.device("cpu"), tokens=8, accumulation=accumulation)
        result = bench.measure(4, 2)
        summary = step.summarize([result])
    has_parts = summary["forward_backward_host_ms"] is not None and summary["optimizer_host_ms"] is not None
    return result.first_loss, result.last_loss, len(result.times), has_parts


def measure_captured(accumulation: int) -> tuple[float, float, int, bool]:
    """Do the same in a graph, of which the host has a double."""
    with graphs_on_the_host():
        return measure("fsdp_v2_graph", accumulation)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_captured_iteration_trains_as_others(accumulation: int) -> None:
    (eager,) = run_ranks(1, measure, "fsdp_v2", accumulation)
    (captured,) = run_ranks(1, measure_captured, accumulation)
    assert eager[2:] == (2, True) and captured[2:] == (2, False)
    assert captured[:2] == eager[:2] and eager[1] < eager[0]


def test_a_pool_changes_no_number() -> None:
    assert run_ranks(2, measure, "fsdp_v2_pool", 2) == run_ranks(2, measure, "fsdp_v2", 2)


def test_the_floor_is_captured_once_and_steps_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, double in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda used: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: events.append("replay")),
        "graph": lambda graph, *, stream, capture_error_mode: nullcontext(events.append(capture_error_mode)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    optimizer = SimpleNamespace(step=lambda: events.append("step"))

    def iteration(x: torch.Tensor) -> torch.Tensor:
        events.append("iteration")
        return x + 1

    with example("benchmark_floor") as floor:
        run = floor.capture_floor(optimizer, iteration, (torch.tensor(4.0),), warmup=2)
    assert [run(torch.tensor(4.0)).item() for _ in range(4)] == 4 * [5.0]
    assert events[:4] == 2 * ["iteration", "step"]
    assert events[4:] == ["thread_local", "iteration", "replay", "step", "replay", "step"]


def compiled_trains_as_eager(runtime: str) -> list[tuple[float, float]]:
    with example("benchmark_step"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        results = [measure(name, 1)[:2] for name in (runtime, f"{runtime}_compile")]
        # Two layers share their compiled code.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return results


@pytest.mark.parametrize("runtime", ["fsdp2", "fsdp_v2"])
def test_compiled_layers_train_as_others(runtime: str) -> None:
    for eager, compiled in run_ranks(2, compiled_trains_as_eager, runtime, timeout_s=120):
        # Fused kernels round less often; bf16 losses of this size are 1/32 apart.
        assert compiled == pytest.approx(eager, abs=2 / 32) and compiled[1] < compiled[0]


class StandIn(nn.Module):
    """Takes what diffusers' transformer of QwenImage takes, and needs all of it."""

    def __init__(self, **options: int) -> None:
        super().__init__()
        self.options = options
        self.transformer_blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(options["num_layers"]))

    def forward(self, **inputs: Any) -> tuple[torch.Tensor]:
        assert inputs["return_dict"] is False
        image, text, time = (inputs[name] for name in ("hidden_states", "encoder_hidden_states", "timestep"))
        assert (image.shape, text.shape, time.shape) == ((2, 16, 64), (2, 8, 3584), (2,))
        assert inputs["img_shapes"] == [[(1, 4, 4)], [(1, 4, 4)]]
        return (image * time[:, None, None],)


def test_the_image_transformer_is_a_model_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(QwenImageTransformer2DModel=StandIn))
    with example("benchmark_models") as models:
        training = models.MODELS["dit_tiny"].build(torch.device("cpu"), None)
    inputs = training.draw(torch.Generator().manual_seed(0))
    assert {tensor.dtype for tensor in inputs} == {torch.bfloat16}
    image, _, time, target = inputs
    want = (image * time[:, None, None]).float().sub(target.float()).square().mean()
    torch.testing.assert_close(training.model(*inputs), want)
    assert len(training.layers) == training.model.transformer.options["num_layers"] == 2
    assert training.tokens == 2 * (16 + 8)


def rows() -> list[dict[str, Any]]:
    """Numbers of two cases that are easy to divide."""

    def row(runtime: str, ms: float, host: float | None, gib: float, tokens: int | None = None) -> dict[str, Any]:
        names = {"model": "m", "runtime": runtime, "tokens_asked": tokens, "tokens": tokens or 7, "accumulation": 1}
        times = {"ms": ms, "ms_min": ms, "ms_max": ms, "host_ms": ms, "tokens_per_s_per_rank": 1.0}
        times |= {"forward_backward_host_ms": host, "optimizer_host_ms": None, "units": 4}
        memory = {"peak_allocated_bytes": gib * 2**30, "peak_reserved_bytes": 1.5 * gib * 2**30}
        return {
            **names,
            **times,
            **memory,
            "device_allocations": 3,
            "first_loss": 2.0,
            "last_loss": 1.0,
            "status": "ok",
        }

    failed = {"model": "m", "runtime": "ddp", "tokens_asked": None, "accumulation": 1}
    return [
        row("plain", 4, 2, 1),
        row("floor", 2, None, 1),
        row("fsdp2", 10, 6, 4),
        row("fsdp_v2_graph", 3, None, 5),
        row("fsdp2", 20, 6, 4, tokens=99),
        {**failed, "status": "failed", "error": "a | b"},
    ]


def test_rows_of_one_case_are_compared() -> None:
    with example("benchmark_report") as report:
        compared = report.compared(rows())
        lines = report.table(compared).splitlines()
    read = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    numbers = [dict(zip(report.HEADINGS, cells, strict=True)) for cells in read]
    assert [row["ms / floor"] for row in numbers] == ["2.00", "1.00", "5.00", "1.50", "-", "-"]
    assert [row["ms / fsdp2"] for row in numbers] == ["0.40", "0.20", "1.00", "0.30", "1.00", "-"]
    assert [row["added µs/unit"] for row in numbers] == ["-", "-", "1000", "-", "-", "-"]
    assert [row["allocated / fsdp2"] for row in numbers] == ["0.25", "0.25", "1.00", "1.25", "1.00", "-"]
    assert [row["tokens"] for row in numbers] == ["7", "7", "7", "7", "99", "-"]
    assert {row["reserved / allocated"] for row in numbers[:5]} == {"1.50"}
    assert numbers[5]["ms (min-max)"] == "failed: a \\| b"


@pytest.mark.parametrize("has_memory", [True, False])
def test_the_picture_has_a_bar_for_each_number(
    has_memory: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: figures.append(figure) or save(figure, *args)
    )
    shown = rows()
    if not has_memory:
        shown = [{**row, "peak_allocated_bytes": None} for row in shown]
    with example("benchmark_plot") as plot:
        plot.draw(shown, tmp_path / "new/plot.png", "heading")
    (figure,) = figures
    lengths = [[bar.get_width() for bar in axes.patches] for axes in figure.axes]
    assert [length for length in lengths if 10 in length or 20 in length] == [[4, 2, 10, 3, 0], [20]]
    assert [length for length in lengths if 1.5 in length] == ([[1.5, 1, 1.5, 1, 6, 4, 7.5, 5]] if has_memory else [])
    assert "a | b" in {text.get_text().strip() for text in figure.axes[0].texts}
    assert (tmp_path / "new/plot.png").read_bytes().startswith(b"\x89PNG")
