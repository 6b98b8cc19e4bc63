# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Draws steps of a timeline on one page, as a picture and as a page for a browser that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from megatron.pretrain.timeline import (
    ALL_GATHER,
    COMPUTE,
    LANES,
    OTHER,
    REDUCE_SCATTER,
    Interval,
    Span,
    Step,
    exposed_in,
    intervals_of,
    measure,
)

EXPOSED = "exposed"
_COLORS = {
    ALL_GATHER: "#4c78a8",
    COMPUTE: "#9d9d9d",
    REDUCE_SCATTER: "#f58518",
    OTHER: "#b279a2",
    EXPOSED: "#d62728",
}
_STYLE = """
body { font: 14px sans-serif; margin: 1.5em; }
.step { display: flex; margin-bottom: 1em; }
.names { flex: 0 0 11em; }
.names div { height: 26px; line-height: 26px; }
.time { flex: 1; overflow-x: auto; }
svg { display: block; height: calc(26px * var(--lanes)); width: calc(100% * var(--zoom, 1)); background: #f6f6f6; }
"""


def draw_picture(steps: Sequence[Step], path: Path, title: str) -> None:
    """Draw the steps below each other.

    Args:
        steps: From ``read_steps``.
        path: .png, .pdf or .svg to write; missing folders are made.
        title: Above the first one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _rows(steps)
    figure = Figure(figsize=(14, 0.8 + 0.35 * (len(rows) + 2) * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n{measure(steps)}", fontsize=9)
    panels = figure.subplots(len(steps), 1, squeeze=False, sharex=True)
    for (axes,), step in zip(panels, steps, strict=True):
        for place, row in enumerate(rows):
            bars = [((start - step.start) / 1e3, (end - start) / 1e3) for start, end in intervals_of(_spans(step, row))]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=_COLORS[row])
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_ylabel(f"step {step.name}", fontsize=8)
        axes.grid(axis="x", alpha=0.3)
    panels[-1][0].set_xlabel("ms after the beginning of the step", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def write_page(steps: Sequence[Step], path: Path, title: str) -> None:
    """Write an HTML page on which a bar says what it is, and time can be stretched.

    Args:
        steps: From ``read_steps``.
        path: .html to write; missing folders are made.
        title: Of the page.
    """
    rows = _rows(steps)
    slowest = max(step.end - step.start for step in steps)
    names = "".join(f"<div>{escape(row)}</div>" for row in rows)
    body = "".join(
        f"<h3>step {escape(step.name)}, {(step.end - step.start) / 1e3:.2f} ms</h3>"
        f'<div class="step"><div class="names">{names}</div><div class="time">{_svg(step, rows, slowest)}</div></div>'
        for step in steps
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<!DOCTYPE html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>:root {{ --lanes: {len(rows)} }} {_STYLE}</style></head><body>"
        f"<h2>{escape(title)}</h2><p>{escape(str(measure(steps)))}</p>"
        '<p><label>stretch <input type=range min=1 max=50 value=1 oninput="document.documentElement.style'
        ".setProperty('--zoom', this.value)\"></label></p>"
        f"{body}</body></html>\n"
    )


def _rows(steps: Sequence[Step]) -> list[str]:
    """Return the lanes to draw: those with something in them, compute, and what is exposed."""
    return [*(lane for lane in LANES if lane == COMPUTE or any(step.lanes[lane] for step in steps)), EXPOSED]


def _spans(step: Step, row: str) -> list[Span]:
    return [Span(*interval, EXPOSED) for interval in exposed_in(step)] if row == EXPOSED else step.lanes[row]


def _svg(step: Step, rows: Sequence[str], width: float) -> str:
    """Return bars in a coordinate system of microseconds by lanes."""
    bars = []
    for place, row in enumerate(rows):
        for span in _spans(step, row):
            duration: Interval = (span.start - step.start, span.end - span.start)
            bars.append(
                f'<rect x="{duration[0]:.3f}" y="{place + 0.1:.1f}" width="{duration[1]:.3f}" height="0.8" '
                f'fill="{_COLORS[row]}"><title>{escape(span.label)}, {duration[1] / 1e3:.3f} ms at '
                f"{duration[0] / 1e3:.3f} ms</title></rect>"
            )
    return f'<svg viewBox="0 0 {width:.3f} {len(rows)}" preserveAspectRatio="none">{"".join(bars)}</svg>'
