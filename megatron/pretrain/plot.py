# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Draws the loss curve of a run into a picture; it knows nothing of other runs."""

from pathlib import Path

from megatron.pretrain.log import History


def draw_loss_curve(history: History, path: str, title: str) -> None:
    """Draw training and validation loss over the iterations.

    Args:
        history: What the log collected.
        path: .png, .pdf or .svg to write; missing folders are made.
        title: Above the curve.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*history.train, strict=True), label="training", linewidth=0.8)
    if history.valid:
        axes.plot(*zip(*history.valid, strict=True), "o-", label="validation", markersize=4)
    axes.set(xlabel="iteration", ylabel="lm loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
