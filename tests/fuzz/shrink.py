# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Makes a failing program smaller while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tests.fuzz.program import Cell, Program, is_valid
from tests.fuzz.search import Failure, run_program


def shrink(failure: Failure, *, bug: str | None = None, max_tries: int = 200) -> Failure:
    """Return the smallest failure found; greedy, so that it is small but need not be the smallest there is.

    Args:
        failure: what to shrink.
        bug: as it was planted when the program failed.
        max_tries: programs to run at most.
    """
    tries = 0
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(failure.program):
            if tries >= max_tries:
                return failure
            if not is_valid(candidate):
                continue
            tries += 1
            text = run_program(candidate, bug=bug)
            if text is not None and Failure(candidate, text).kind == failure.kind:
                failure, progress = Failure(candidate, text), True
                break
    return failure


def _smaller(value: Any) -> Iterator[Any]:
    """Yield values that are simpler in one place: an element less, a field at its default, a cell's part in its place.

    Large changes come first. A program keeps its seed.
    """
    if isinstance(value, tuple):
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
        for index, item in enumerate(value):
            for simpler in _smaller(item):
                yield (*value[:index], simpler, *value[index + 1 :])
    elif is_dataclass(value):
        default = type(value)()
        names = [field.name for field in fields(value) if field.name != "seed"]
        for name in names:
            if isinstance(value, Program) and name == "roots":
                continue
            if getattr(value, name) != getattr(default, name):
                yield replace(value, **{name: getattr(default, name)})
        for name in names:
            for simpler in _smaller(getattr(value, name)):
                yield replace(value, **{name: simpler})
        if isinstance(value, Cell):
            for part in value.parts:
                if isinstance(part, Cell):
                    yield replace(part, is_unit=value.is_unit)
