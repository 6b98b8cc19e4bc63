# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The one list of what the runtime is known not to do, so that it does not drown what is not known yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tests.fuzz.program import Cell, Leaf, Program


@dataclass(frozen=True)
class Known:
    """A known failure.

    Attributes:
        description: what happens.
        avoid: returns a program without it.
        race: what its races look like, where programs cannot avoid it.
    """

    description: str
    avoid: Callable[[Program], Program] = lambda program: program
    race: str | None = None


def unknown_races(races: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the races that no entry of `KNOWN` explains, but for the entries named in `known`."""
    patterns = [item.race for name, item in KNOWN.items() if item.race is not None and name not in known]
    return [race for race in races if not any(re.search(pattern, race) for pattern in patterns)]


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


KNOWN: dict[str, Known] = {
    "scalar": Known("fully_shard refuses 0-d parameters", _without_scalars),
}
