# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`LearntOrder`: which units come next, where a model does not run its units in the order in which they are defined.

It gathers nothing and says nothing about budgets; whether ranks agree is agreement.py's.

[Note: learning]
A pass is what runs between the begin and the end of one outermost forward, or of one backward. Passes that run as units
are defined need no learning. Of others the sequence of units is remembered by the unit that begins it, and the next
pass that this unit begins is expected to run alike. One that does not is picked up where a unit comes that is expected
later; a unit that is not expected gathers for itself, and nothing ahead.

[Note: ranks learn together]
Gathers ahead are collectives, so that ranks may take up an order only where all of them have seen it. They compare at
backwards whose number says so, on every rank alike, and not when one of them has reason to: the first one, and from the
16th on each whose number is a power of two. What differs is forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_

import torch

from .indexed_order import IndexedOrder
from .unit import Unit

_FIRST_REVIEW = 16
"""Comparing waits for the device, which a few steps of warm-up, and a capture that follows them, can do without."""


class LearntOrder:
    """What follows each unit in forward and in backward.

    Args:
        forward: units as they are defined.
        backward: the reverse of that.
        agrees: asks all ranks whether a description is the same on all of them; they call it together.
        is_capturing: whether the step is being captured in a graph, where nobody can be asked. Ranks may capture
            at different steps, so that such backwards do not count.

    Attributes:
        num_changes: how often what is expected has changed.
    """

    def __init__(
        self,
        forward: IndexedOrder[Unit],
        backward: IndexedOrder[Unit],
        agrees: Callable[[str], bool],
        is_capturing: Callable[[], bool],
    ) -> None:
        self._forward = _Direction(forward)
        self._backward = _Direction(backward)
        self._agrees = agrees
        self._is_capturing = is_capturing
        self._num_backwards = self.num_changes = 0
        self._is_in_backward = False
        # Two units can only follow each other.
        self._has_choice = len(forward) > 2
        self._records = self._has_choice

    def after_forward(self, unit: Unit, depth: int) -> Iterator[Unit]:
        """Return what comes after `unit`, whose forward begins.

        Args:
            unit: the unit.
            depth: units in forward now, with this one; 0 for a gather that belongs to no forward.
        """
        if depth == 0:
            return self._forward.order.successors(unit)
        if depth == 1:
            self._forward.begin(unit, self._records and torch.is_grad_enabled())
        return self._forward.after(unit)

    def after_backward(self, unit: Unit) -> Iterator[Unit]:
        """Return what comes after `unit`, whose backward begins."""
        if not self._is_in_backward:
            self._is_in_backward = True
            self._backward.begin(unit, self._records)
        return self._backward.after(unit)

    def drop_backward(self) -> None:
        """Note that a backward has failed."""
        self._is_in_backward = False

    def end_backward(self) -> bool:
        """Note that an outermost backward has ended; at some of them ranks compare what they have recorded.

        Returns:
            Whether units are expected in another order from now on.
        """
        self._is_in_backward = False
        if not self._has_choice or self._is_capturing():
            return False
        self._num_backwards += 1
        has_changed = self._records and self._review()
        self.num_changes += has_changed
        number = self._num_backwards + 1
        self._records = number >= _FIRST_REVIEW and number & (number - 1) == 0
        return has_changed

    def _review(self) -> bool:
        directions = (self._forward, self._backward)
        before = [direction.describe() for direction in directions]
        for direction in directions:
            direction.take_up()
        if not self._agrees("; ".join(direction.describe() for direction in directions)):
            for direction in directions:
                direction.forget()
        return before != [direction.describe() for direction in directions]


class _Direction:
    """Passes in one direction."""

    def __init__(self, order: IndexedOrder[Unit]) -> None:
        self.order = order
        self._learnt: dict[int, _Pass] = {}
        self._recorded: dict[int, list[weakref.ref[Unit]]] = {}
        self._replay: _Pass | None = None
        self._record: list[weakref.ref[Unit]] | None = None

    def begin(self, unit: Unit, records: bool) -> None:
        """Expect the pass that `unit` has begun before; record this one if asked to."""
        self._replay = self._learnt.get(id(unit)) if self._learnt else None
        if self._replay is not None:
            self._replay.position = 0
        self._record = None
        if records:
            self._record = self._recorded[id(unit)] = []

    def after(self, unit: Unit) -> Iterator[Unit]:
        """Return what comes after `unit` in the pass that runs."""
        if self._record is not None:
            self._record.append(weakref.ref(unit))
        return self.order.successors(unit) if self._replay is None else self._replay.after(unit)

    def take_up(self) -> None:
        """Learn the passes that have been recorded; of those that ran as defined there is nothing to learn."""
        for key, references in self._recorded.items():
            units = [unit for reference in references if (unit := reference()) is not None]
            self._learnt.pop(key, None)
            if len(units) == len(references) and not self._is_as_defined(units):
                self._learnt[key] = _Pass(references)
        self._recorded.clear()
        self._record = None

    def forget(self) -> None:
        """Go back to the order in which units are defined."""
        self._learnt.clear()

    def describe(self) -> str:
        """Return what has been learnt, by the units' places in the order: the same text on ranks that agree."""
        places = {id(unit): place for place, unit in enumerate(self.order)}
        return repr(sorted([places.get(id(unit)) for unit in known.units()] for known in self._learnt.values()))

    def _is_as_defined(self, units: Sequence[Unit]) -> bool:
        defined = [units[0], *self.order.successors(units[0])]
        rest = defined[len(units) :]
        is_all = not rest or rest[0]._fsdp_root() is not units[-1]._fsdp_root()
        return is_all and len(units) <= len(defined) and all(map(is_, units, defined))


class _Pass:
    """A pass that has been learnt, and how far the one that runs has come in it."""

    def __init__(self, references: Sequence[weakref.ref[Unit]]) -> None:
        self._references = references
        self.position = 0

    def units(self) -> Iterator[Unit]:
        """Yield the units that live, in order."""
        yield from self._from(0)

    def after(self, unit: Unit) -> Iterator[Unit]:
        """Return what is expected after `unit`; nothing if `unit` is not expected any more."""
        for position in range(self.position, len(self._references)):
            if self._references[position]() is unit:
                self.position = position + 1
                return (other for other in self._from(position + 1) if other is not unit)
        return iter(())

    def _from(self, position: int) -> Iterator[Unit]:
        for reference in self._references[position:]:
            unit = reference()
            if unit is not None:
                yield unit
