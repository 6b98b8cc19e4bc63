# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a timeline says of a trace whose numbers are known, of a real one, and what is drawn of it."""

from __future__ import annotations

import gzip
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

from megatron.core.distributed.fsdp.experimental import fully_shard, fully_shard_optimizer
from megatron.pretrain.profiling import ScheduleProfiler
from megatron.pretrain.timeline import (
    ALL_GATHER,
    COMPUTE,
    LANES,
    OTHER,
    REDUCE_SCATTER,
    Exposure,
    LaneTime,
    Span,
    difference,
    exposed_in,
    length,
    measure,
    read_steps,
    union,
)
from megatron.pretrain.timeline_page import draw_picture, write_page
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import Block

NUM_LAYERS = 3
Event = dict[str, Any]


def event(name: str, category: str, start_ms: float, end_ms: float, **args: object) -> Event:
    times = {"ts": 1e3 * start_ms, "dur": 1e3 * (end_ms - start_ms)}
    return {"name": name, "cat": category, "ph": "X", **times, "args": args}


def device_trace() -> list[Event]:
    """Two steps of 10 ms: of the first's communication 1 + 1.5 ms are exposed, of the second's 1 ms."""
    gather, scatter = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)"
    return [
        {"name": "process_name", "ph": "M", "args": {"name": "python"}},
        event("ncclDevKernel_AllReduce_Sum", "kernel", -2, -1),  # a barrier before the steps
        event("fsdp.step 8", "user_annotation", 10, 20),
        event("fsdp.step 7", "user_annotation", 0, 10),
        event("fsdp.step 7", "gpu_user_annotation", 0, 9),
        event("fsdp.unshard layers.0", "user_annotation", 0.1, 0.2),
        event("cudaLaunchKernelExC", "cuda_runtime", 0.15, 0.16, correlation=5),
        event(gather, "kernel", 1, 3, correlation=5),
        event("gemm", "kernel", 2, 4),
        event("gemm", "kernel", 4, 5),
        event("norm", "kernel", 4.5, 6),
        event(scatter, "kernel", 5.5, 7.5, correlation=99),  # launched by a graph: nothing says for which unit
        event("aten::mm", "cpu_op", 0, 9),  # the host's view does not count beside kernels
        event("gloo:all_gather", "user_annotation", 8, 9),
        event("fsdp.reduce layers.0", "user_annotation", 10.1, 10.2),
        event("cuLaunchKernelEx", "cuda_driver", 10.15, 10.16, correlation=6),
        event("ncclDevKernel_AllReduce_Sum_f32", "kernel", 11, 13, correlation=6),
        event("gemm", "kernel", 12, 14),
        event("ncclDevKernel_Broadcast", "kernel", 12.5, 13.5),
    ]


def test_stretches_of_time_are_added_and_taken_away() -> None:
    assert union([(0, 2), (5, 6), (1, 3)]) == [(0, 3), (5, 6)]
    assert difference([(2, 6)], [(5, 9), (0, 3)]) == [(3, 5)]
    assert difference([(0, 10)], [(2, 3), (5, 6)]) == [(0, 2), (3, 5), (6, 10)]
    assert difference([(0, 1), (2, 3)], [(0, 5)]) == []
    assert length([(0, 2), (1, 3), (7, 8)]) == 4


def test_the_difference_is_that_of_sets() -> None:
    chance = random.Random(0)
    for _ in range(200):
        ours, theirs = (
            [(start, start + chance.randint(1, 9)) for start in chance.choices(range(40), k=chance.randint(0, 6))]
            for _ in range(2)
        )
        left = {moment for start, end in difference(ours, theirs) for moment in range(start, end)}
        points = [{moment for start, end in some for moment in range(start, end)} for some in (ours, theirs)]
        assert left == points[0] - points[1]


def test_kernels_of_a_known_trace() -> None:
    first, second = read_steps(device_trace())
    assert (first.name, first.start, first.end, second.name) == ("7", 0, 1e4, "8")
    assert first.lanes[ALL_GATHER] == [Span(1e3, 3e3, "layers.0: ncclDevKernel_AllGather_RING_LL(x)")]
    assert first.lanes[REDUCE_SCATTER] == [Span(5.5e3, 7.5e3, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)")]
    assert first.lanes[COMPUTE] == [Span(2e3, 6e3, COMPUTE)] and first.lanes[OTHER] == []
    # The all-reduce of a unit's gradients, as replicas have it.
    assert second.lanes[REDUCE_SCATTER] == [Span(1.1e4, 1.3e4, "layers.0: ncclDevKernel_AllReduce_Sum_f32")]
    assert second.lanes[OTHER] == [Span(1.25e4, 1.35e4, "ncclDevKernel_Broadcast")]
    assert exposed_in(first) == [(1e3, 2e3), (6e3, 7.5e3)] and exposed_in(second) == [(1.1e4, 1.2e4)]


def test_exposed_communication_of_a_known_trace() -> None:
    exposure = measure(read_steps(device_trace()))
    lanes = {ALL_GATHER: LaneTime(1, 0.5), REDUCE_SCATTER: LaneTime(2, 1.25), OTHER: LaneTime(0.5, 0)}
    assert exposure == Exposure(2, 10, LaneTime(3.25, 1.75), lanes)
    assert exposure.share == 0.175
    assert str(exposure) == (
        "exposed communication: 1.75 ms a step, 17.5% of 10.00 ms (all-gather 0.50 of 1.00, reduce-scatter 1.25 of "
        "2.00, other communication 0.00 of 0.50; mean of 2 steps)"
    )


def test_a_span_is_cut_at_the_border_of_a_step() -> None:
    events = [event("fsdp.step 1", "user_annotation", 0, 2), event("gemm", "kernel", -1, 1), event("a", "kernel", 1, 3)]
    (step,) = read_steps(events)
    assert step.lanes[COMPUTE] == [Span(0, 2e3, COMPUTE)]
    assert str(measure([step])) == "no communication in 1 steps of 2.00 ms"


def test_calls_of_fsdp2_on_the_host() -> None:
    events = [
        event("fsdp.step 1", "user_annotation", 0, 9),
        event("FSDP::all_gather", "user_annotation", 0, 2),
        event("gloo:all_gather", "user_annotation", 1, 2),
        event("FSDP::all_gather_copy_out (layers.1)", "user_annotation", 2, 4),
        event("aten::mm", "cpu_op", 3, 5),
        event("FSDP::post_backward_reduce (layers.1)", "user_annotation", 4, 7),
        event("gloo:all_reduce", "user_annotation", 4.5, 7),  # gloo reduces and scatters in this way
        event("gloo:all_reduce", "user_annotation", 8, 9),
    ]
    (step,) = read_steps(events)
    assert [span.label for span in step.lanes[ALL_GATHER]] == ["root: gloo:all_gather"]
    assert [span.label for span in step.lanes[REDUCE_SCATTER]] == ["layers.1: gloo:all_reduce"]
    assert [span.label for span in step.lanes[OTHER]] == ["gloo:all_reduce"]
    assert exposed_in(step) == [(1e3, 2e3), (5e3, 7e3), (8e3, 9e3)]


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^Timeline: expected ranges called fsdp\.step and a number, got none for the"
    ):
        read_steps([event("gemm", "kernel", 0, 1)])


def record(folder: str, num_steps: int) -> tuple[list[str], Exposure | None]:
    """Train `num_steps` steps, of which those after the second are to be recorded, up to the fourth."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*[Block(16) for _ in range(NUM_LAYERS)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    is_writer = dist.get_rank() == 0
    with ScheduleProfiler(Path(folder), "cpu", skip=2, num_steps=2, is_writer=is_writer) as profiler:
        for _ in range(num_steps):
            with profiler.step():
                model(torch.randn(4, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    for step in profiler.steps:
        assert len(step.lanes[ALL_GATHER]) == 2 * NUM_LAYERS and len(step.lanes[REDUCE_SCATTER]) == NUM_LAYERS
        units = [{span.label.split(":")[0] for span in step.lanes[lane]} for lane in (ALL_GATHER, REDUCE_SCATTER)]
        assert units == 2 * [{"0", "1", "2"}]
        assert step.lanes[COMPUTE] and not step.lanes[OTHER]
    return [step.name for step in profiler.steps], profiler.exposure


def test_a_recorded_run_end_to_end() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (names, exposure), (other_names, other_exposure) = run_ranks(2, record, folder, 6)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert names == ["3", "4"] and (other_names, other_exposure) == ([], None)
    assert set(files) == {"cpu.json.gz", "cpu.png", "cpu.html"}
    assert files["cpu.png"].startswith(b"\x89PNG")
    assert measure(read_steps(json.loads(gzip.decompress(files["cpu.json.gz"]))["traceEvents"])) == exposure
    assert 0 < exposure.communication.exposed_ms <= exposure.communication.busy_ms < exposure.step_ms
    assert str(exposure) in files["cpu.html"].decode()


@pytest.mark.parametrize(("num_steps", "recorded"), [(1, []), (2, []), (3, ["3"])])
def test_a_run_that_ends_early_leaves_what_it_has_come_to(num_steps: int, recorded: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (names, exposure), _ = run_ranks(2, record, folder, num_steps)
        assert len(list(Path(folder).iterdir())) == (3 if recorded else 0)
    assert names == recorded and (exposure is not None) == bool(recorded)


def test_what_is_reported(tmp_path: Path) -> None:
    with ScheduleProfiler(tmp_path, "a", skip=1, num_steps=1, is_writer=True) as profiler, profiler.step():
        pass
    assert profiler.report() == "Schedule: nothing was recorded, the run ended after 1 step(s)"
    with ScheduleProfiler(tmp_path, "a", skip=1, num_steps=1, is_writer=True) as profiler:
        for _ in range(3):
            with profiler.step():
                torch.ones(3).sum()
    schedule, timeline = profiler.report().splitlines()
    assert schedule.startswith("Schedule: no communication in 1 steps of ")
    assert timeline == f"Timeline: {tmp_path}/a.html"


def test_the_picture_has_a_bar_for_each_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure) or save(figure, path))
    draw_picture(read_steps(device_trace()), tmp_path / "new/a.png", "title")
    assert (tmp_path / "new/a.png").read_bytes().startswith(b"\x89PNG")
    first, second = figures[0].axes
    assert [label.get_text() for label in first.get_yticklabels()] == [*LANES, "exposed"]

    def bars(axes: Any) -> list[list[tuple[float, float]]]:
        boxes = [[path.get_extents() for path in row.get_paths()] for row in axes.collections]
        return [[(round(box.x0, 6), round(box.x1, 6)) for box in row] for row in boxes]

    assert bars(first) == [[(1, 3)], [(2, 6)], [(5.5, 7.5)], [], [(1, 2), (6, 7.5)]]
    assert bars(second) == [[], [(2, 4)], [(1, 3)], [(2.5, 3.5)], [(1, 2)]]


def test_the_page_stands_alone_and_says_what_each_bar_is(tmp_path: Path) -> None:
    write_page(read_steps(device_trace()), tmp_path / "new/a.html", "a <title>")
    text = (tmp_path / "new/a.html").read_text()
    assert "a &lt;title&gt;" in text and "exposed communication: 1.75 ms a step" in text
    assert not re.findall(r"https?:|src=|href=", text)
    assert '<rect x="1000.000" y="0.1" width="2000.000"' in text
    assert "<title>layers.0: ncclDevKernel_AllGather_RING_LL(x), 2.000 ms at 1.000 ms</title>" in text
    assert text.count("<rect") == 5 + 4
