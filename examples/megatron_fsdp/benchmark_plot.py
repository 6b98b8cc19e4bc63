# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Draws rows of the benchmark as bars: time of a step and peak memory, one line of panels per case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmark_report import FLOOR, GIB, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(rows: list[Row], path: Path, heading: str) -> None:
    """Draw all rows, those without numbers with the reason.

    Args:
        rows: compared.
        path: .png, .pdf or .svg to write; missing folders are made.
        heading: above the panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["tokens_asked"], row["accumulation"]), []).append(row)
    has_memory = any(row.get("peak_allocated_bytes") is not None for row in rows)
    lines = [2 + len(case) for case in cases.values()]
    figure = Figure(figsize=(12, 0.5 + 0.3 * sum(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading, fontsize=8)
    panels = figure.subplots(len(cases), 1 + has_memory, squeeze=False, height_ratios=lines)
    for (times, *memory), case in zip(panels, cases.values(), strict=True):
        _draw_times(times, case)
        for axes in memory:
            _draw_memory(axes, case)
        for axes in (times, *memory):
            axes.set_yticks(range(len(case)), [row["runtime"] for row in case], fontsize=8)
            axes.set_ylim(len(case) - 0.4, -0.6)
            axes.margins(x=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_times(axes: Axes, case: list[Row]) -> None:
    """Draw a bar for the median of each runtime, and a line at the floor."""
    first = next((row for row in case if row["status"] == "ok"), case[0])
    tokens = f", {first['tokens']} tokens" if first["status"] == "ok" else ""
    axes.set_title(f"{first['model']}{tokens}, microbatches a step: {first['accumulation']}", loc="left", fontsize=9)
    axes.set_xlabel("ms a step (median)", fontsize=8)
    for place, row in enumerate(case):
        is_measured = row["status"] == "ok"
        length = row["ms"] if is_measured else 0
        axes.barh(place, length, color="tab:green" if row["runtime"].startswith("fsdp_v2") else "tab:gray")
        label = f"{length:.1f}" if is_measured else row.get("error", row["status"])
        axes.text(length, place, f" {label[:60]}", va="center", fontsize=8)
        if is_measured and row["runtime"] == FLOOR:
            axes.axvline(length, color="tab:red", linewidth=0.8, linestyle="--")


def _draw_memory(axes: Axes, case: list[Row]) -> None:
    """Draw a bar for what each runtime allocates, and one behind it for what it takes from the driver."""
    axes.set_xlabel("peak GiB: allocated / reserved", fontsize=8)
    for place, row in enumerate(case):
        if row["status"] == "ok" and row["peak_allocated_bytes"] is not None:
            allocated, reserved = row["peak_allocated_bytes"] / GIB, row["peak_reserved_bytes"] / GIB
            axes.barh(place, reserved, color="tab:blue", alpha=0.3)
            axes.barh(place, allocated, color="tab:blue")
            axes.text(reserved, place, f" {allocated:.2f} / {reserved:.2f}", va="center", fontsize=8)
