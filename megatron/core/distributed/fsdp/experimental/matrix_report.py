# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""How evenly Newton-Schulz's work falls on ranks in well-known models, and how much travels; no part of training.

``python -m megatron.core.distributed.fsdp.experimental.matrix_report`` prints it; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from .layout import plan_layout
from .layout_report import MODELS, aligned, markdown
from .matrix_optimizer import PACKAGE_BYTES
from .matrix_plan import Matrix, MatrixPlan, Place, plan_matrices
from .newton_schulz import count_operations

NUM_SHARDS = (8, 16, 32, 64, 128, 256)
REPORTED = tuple(name for name, entry in MODELS.items() if entry.layers > 1)
"""The models that have layers, all of them alike."""

_NUM_STEPS = 5
_TRAVEL_BYTES, _RESULT_BYTES = 4, 2


@dataclass(frozen=True)
class Balance:
    """How the matrices of a model's layers are shared by as many ranks as there are shards.

    Attributes:
        num_matrices: of all layers.
        imbalance: the largest load as a multiple of the mean.
        span: what a step takes as a multiple of the mean load if nothing but Newton-Schulz takes time: a rank begins a
            package when those it exchanges with have finished the one before the last.
        least: what no plan can be better than: the largest matrix alone is one rank's.
        travelling: share of the matrices' elements that go to another rank, and come back.
        num_rounds: packages of the rank that has most of them.
        buffer_bytes: what the buffers of a step take on the rank that needs most, matrices in float32, results in
            bfloat16; sizes are not rounded up.
        planning_s: what the layout and the plan took, in seconds.
    """

    num_matrices: int
    imbalance: float
    span: float
    least: float
    travelling: float
    num_rounds: int
    buffer_bytes: int
    planning_s: float


@cache
def measure(model: str, num_shards: int) -> Balance:
    """Plan the matrices of one model, each layer a unit that is cut into `num_shards`."""
    shapes = MODELS[model].shapes()
    start = time.perf_counter()
    layout = plan_layout(shapes, num_shards)
    layer = []
    for index, shape in enumerate(shapes):
        if len(shape) == 2:
            owned = ((shard, layout.owned(index, shard)) for shard in range(num_shards))
            ranges = tuple((shard, part.start, part.stop) for shard, part in owned if part.numel)
            layer.append(Matrix(count_operations(1, *shape, _NUM_STEPS), math.prod(shape), ranges))
    places = [Place(piece=0, shard=shard, replica=0) for shard in range(num_shards)]
    plan = plan_matrices(layer * MODELS[model].layers, places, PACKAGE_BYTES // _TRAVEL_BYTES)
    planning_s = time.perf_counter() - start
    costs = [matrix.cost for matrix in plan.matrices]
    course = follow(plan)
    return Balance(
        num_matrices=len(costs),
        imbalance=plan.imbalance,
        span=course.span,
        least=max(1.0, max(costs) * num_shards / sum(costs)),
        travelling=course.travelling_numel / sum(matrix.piece_numel for matrix in plan.matrices),
        num_rounds=len(plan.rounds),
        buffer_bytes=course.buffer_bytes,
        planning_s=planning_s,
    )


@dataclass(frozen=True)
class Course:
    """How a step of a plan goes.

    Attributes:
        travelling_numel: elements that go to owners.
        buffer_bytes: see `Balance`.
        span: see `Balance`.
    """

    travelling_numel: int
    buffer_bytes: int
    span: float


def follow(plan: MatrixPlan) -> Course:
    """Run a step in which nothing takes time but Newton-Schulz.

    Example of the span: two ranks have costs 3, 1, 1 and 1, 1, 3 in three packages that both exchange. They finish the
    first ones at 3 and 1, the second at 4 and 2; the third needs the first ones of both, and is done at 5 and 6. The
    mean is 5, the span 6 / 5, although loads are equal.
    """
    travelling, num_ranks = 0, len(plan.places)
    most_sent, most_owned = [0] * num_ranks, [0] * num_ranks
    before, done = [0] * num_ranks, [0] * num_ranks
    for package in plan.rounds:
        sent, owned, costs = [0] * num_ranks, [0] * num_ranks, [0] * num_ranks
        peers: list[set[int]] = [{rank} for rank in range(num_ranks)]
        for index in package:
            owner = plan.owners[index]
            owned[owner] += plan.matrices[index].piece_numel
            costs[owner] += plan.matrices[index].cost
            for message in plan.gathers(index):
                if message.holder != owner:
                    sent[message.holder] += message.stop - message.start
                    peers[owner].add(message.holder)
                    peers[message.holder].add(owner)
        travelling += sum(sent)
        most_sent = list(map(max, most_sent, sent))
        most_owned = list(map(max, most_owned, owned))
        starts = [max(done[rank], *(before[peer] for peer in peers[rank])) for rank in range(num_ranks)]
        before, done = done, [start + cost for start, cost in zip(starts, costs, strict=True)]
    # What a rank has sent comes back to it, and an owner has as many results as elements.
    most = max(map(sum, zip(most_sent, most_owned, strict=True)))
    return Course(
        travelling_numel=travelling,
        buffer_bytes=most * (_TRAVEL_BYTES + _RESULT_BYTES) * min(2, len(plan.rounds)),
        span=max(done) * num_ranks / sum(matrix.cost for matrix in plan.matrices),
    )


def render(
    models: Sequence[str] = REPORTED,
    shards: Sequence[int] = NUM_SHARDS,
    *,
    is_markdown: bool = False,
    has_times: bool = True,
) -> str:
    """Return the report: one line per model and number of shards.

    Args:
        models: keys of `MODELS`.
        shards: numbers of shards.
        is_markdown: a table in Markdown rather than aligned with spaces.
        has_times: with a column of planning times, which differ from run to run.
    """
    heads = ["max / mean", "span / mean", "least possible", "travels %", "packages", "buffers MiB", "planned in ms"]
    lines = [["model", "layers", "matrices", "shards", *heads]]
    for name in models:
        for num_shards in shards:
            found = measure(name, num_shards)
            numbers = [
                f"{found.imbalance:.3f}",
                f"{found.span:.3f}",
                f"{found.least:.3f}",
                f"{100 * found.travelling:.1f}",
            ]
            counts = [str(MODELS[name].layers), str(found.num_matrices), str(num_shards)]
            numbers += [str(found.num_rounds), f"{found.buffer_bytes / 2**20:.0f}", f"{1000 * found.planning_s:.0f}"]
            lines.append([name, *counts, *numbers])
    if not has_times:
        lines = [line[:-1] for line in lines]
    return f"{(markdown if is_markdown else aligned)(lines, 1)}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron.core.distributed.fsdp.experimental.matrix_report",
        description="Balance of Newton-Schulz over ranks in well-known models, planned without any of them.",
    )
    parser.add_argument("--models", nargs="+", choices=REPORTED, default=REPORTED, metavar="MODEL", help="which")
    parser.add_argument("--shards", type=int, nargs="+", default=NUM_SHARDS, help="numbers of shards")
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    parser.add_argument("--no-times", action="store_true", help="without planning times, which vary")
    options = parser.parse_args(arguments)
    if min(options.shards) < 1:
        parser.error(f"--shards: expected numbers of at least 1, got {min(options.shards)}.")
    print(render(options.models, options.shards, is_markdown=options.markdown, has_times=not options.no_times), end="")


if __name__ == "__main__":
    main()
