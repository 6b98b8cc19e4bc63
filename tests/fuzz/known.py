# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The one list of what the runtime is known not to do, so that it does not drown what is not known yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.fuzz.program import Cell, Leaf, Program, cells_and_leaves


@dataclass(frozen=True)
class Known:
    """A known failure.

    Attributes:
        description: what happens.
        avoid: returns a program without it.
    """

    description: str
    avoid: Callable[[Program], Program]


def _map_parts(program: Program, change: Callable[[Leaf | Cell], Leaf | Cell]) -> Program:
    roots = [_map(root, change) for root in program.roots]
    return replace(program, roots=tuple(root for root in roots if isinstance(root, Cell)))


def _map(part: Leaf | Cell, change: Callable[[Leaf | Cell], Leaf | Cell]) -> Leaf | Cell:
    """Return the part with `change` made to it and everything inside it, inner ones first."""
    if isinstance(part, Cell):
        part = replace(part, parts=tuple(_map(inner, change) for inner in part.parts))
    return change(part)


def _without_scalars(program: Program) -> Program:
    def change(part: Leaf | Cell) -> Leaf | Cell:
        return replace(part, kind="one_element") if isinstance(part, Leaf) and part.kind == "scalar" else part

    return _map_parts(program, change)


def _no_rank_skips_in_recomputed_parts(program: Program) -> Program:
    def change(part: Leaf | Cell) -> Leaf | Cell:
        inside = [inner for inner in cells_and_leaves(part) if isinstance(inner, Cell)]
        if isinstance(part, Cell) and any(call.skip == "odd_rank" for cell in inside for call in cell.calls):
            return replace(part, calls=tuple(replace(call, recompute="no") for call in part.calls))
        return part

    return _map_parts(program, change)


KNOWN: dict[str, Known] = {
    "scalar": Known("fully_shard refuses 0-d parameters", _without_scalars),
    "rank_skip_recomputed": Known(
        "what a rank leaves out of a checkpointed part decides when torch recomputes it, and so when units gather",
        _no_rank_skips_in_recomputed_parts,
    ),
}
