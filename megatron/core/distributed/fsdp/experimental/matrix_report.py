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
        least: what no plan can be better than: the largest matrix alone is one rank's.
        travelling: share of the matrices' elements that go to another rank, and come back.
        num_rounds: packages of the rank that has most of them.
        buffer_bytes: what the buffers of a step take on the rank that needs most, matrices in float32, results in
            bfloat16; sizes are not rounded up.
        planning_s: what the layout and the plan took, in seconds.
    """

    num_matrices: int
    imbalance: float
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
    travelling, buffer_bytes = _flow(plan)
    return Balance(
        num_matrices=len(costs),
        imbalance=plan.imbalance,
        least=max(1.0, max(costs) * num_shards / sum(costs)),
        travelling=travelling / sum(matrix.piece_numel for matrix in plan.matrices),
        num_rounds=len(plan.rounds),
        buffer_bytes=buffer_bytes,
        planning_s=planning_s,
    )


def _flow(plan: MatrixPlan) -> tuple[int, int]:
    """Return the elements that travel to owners, and the bytes of the two slots of the rank that needs most."""
    travelling, num_ranks = 0, len(plan.places)
    most_sent, most_owned = [0] * num_ranks, [0] * num_ranks
    for package in plan.rounds:
        sent, owned = [0] * num_ranks, [0] * num_ranks
        for index in package:
            owned[plan.owners[index]] += plan.matrices[index].piece_numel
            for message in plan.gathers(index):
                if message.holder != message.owner:
                    sent[message.holder] += message.stop - message.start
        travelling += sum(sent)
        most_sent = list(map(max, most_sent, sent))
        most_owned = list(map(max, most_owned, owned))
    # What a rank has sent comes back to it, and an owner has as many results as elements.
    most = max(map(sum, zip(most_sent, most_owned, strict=True)))
    return travelling, most * (_TRAVEL_BYTES + _RESULT_BYTES) * min(2, len(plan.rounds))


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
    heads = ["max / mean", "least possible", "travels %", "packages", "buffers MiB", "planned in ms"]
    lines = [["model", "layers", "matrices", "shards", *heads]]
    for name in models:
        for num_shards in shards:
            found = measure(name, num_shards)
            numbers = [f"{found.imbalance:.3f}", f"{found.least:.3f}", f"{100 * found.travelling:.1f}"]
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
