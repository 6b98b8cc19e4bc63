# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Fixed places in memory for buffers that come and go, from a trace of when they do: integers only.

It allocates nothing and knows neither tensors nor streams.

[Note: slots]
A buffer has one slot, a run of bytes in an arena, for all times at which it is alive. Two buffers that are alive at one
time have slots that do not overlap; two with different keys have different arenas. Which buffers go below which others
is a colouring problem without a fast exact answer. A few ways are tried, and the smallest arena is kept. Units of one
size, and units of any sizes of which two are gathered at a time besides the root, take exactly what is alive at the
peak of the trace; tests/unit_tests/test_slot_plan.py has the bound for others.

Example: buffers 0, 1 and 2 of 512 bytes, of which a trace holds two at a time, as in 0+ 1+ 0- 2+ 1- 2- ("+" allocates),
lie at 0, 512 and 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT_BYTES = 512
"""Where slots start: as torch's allocator of device memory aligns what it gives."""


class Event(NamedTuple):
    """A buffer, by number, gets its memory or gives it back."""

    buffer: int
    is_allocation: bool


@dataclass(frozen=True)
class Request:
    """One buffer.

    Attributes:
        num_bytes: its size.
        key: buffers with different keys never share memory.
    """

    num_bytes: int
    key: Hashable


@dataclass(frozen=True)
class Slot:
    """Where one buffer lies.

    Attributes:
        arena: position of its arena in the plan.
        offset: first byte in the arena.
        num_bytes: its size, aligned.
    """

    arena: int
    offset: int
    num_bytes: int

    @property
    def stop(self) -> int:
        """First byte after it."""
        return self.offset + self.num_bytes

    def overlaps(self, other: Slot) -> bool:
        """Return whether two slots have a byte in common."""
        return self.arena == other.arena and self.offset < other.stop and other.offset < self.stop


@dataclass(frozen=True)
class Arena:
    """Memory that is allocated once.

    Attributes:
        key: that of its buffers.
        num_bytes: its size.
        peak_bytes: aligned bytes that were alive at one time in the trace; no plan can need less.
    """

    key: Hashable
    num_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class SlotPlan:
    """Slots by buffer number, and the arenas that they lie in, in the order in which keys first occur."""

    slots: tuple[Slot, ...]
    arenas: tuple[Arena, ...]

    def masks(self) -> list[int]:
        """Return one integer a buffer; those of two buffers have a bit in common exactly where their slots overlap.

        A bit stands for a stretch between two neighbouring borders of slots.
        """
        borders = sorted({(slot.arena, at) for slot in self.slots for at in (slot.offset, slot.stop)})
        number = {border: index for index, border in enumerate(borders)}
        return [
            (1 << number[slot.arena, slot.stop]) - (1 << number[slot.arena, slot.offset]) if slot.num_bytes else 0
            for slot in self.slots
        ]


def plan_slots(requests: Sequence[Request], events: Iterable[Event]) -> SlotPlan:
    """Plan a slot for every buffer.

    The result depends on the arguments alone, so that ranks with equal traces have equal plans.

    Args:
        requests: the buffers, by number.
        events: what happened in one iteration; a buffer that is still alive at its end lives on until there.
    """
    sizes = [-(-request.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for request in requests]
    order, together, peaks = _follow(requests, sizes, events)
    keys = list(dict.fromkeys(request.key for request in requests))
    slots: dict[int, Slot] = {}
    arenas: list[Arena] = []
    for index, key in enumerate(keys):
        members = [number for number in order if requests[number].key == key]
        offsets = _place(members, sizes, together)
        slots.update((number, Slot(index, offsets[number], sizes[number])) for number in members)
        total = max((slots[number].stop for number in members), default=0)
        arenas.append(Arena(key, total, peaks.get(key, 0)))
    return SlotPlan(tuple(slots[number] for number in range(len(requests))), tuple(arenas))


def _follow(
    requests: Sequence[Request], sizes: Sequence[int], events: Iterable[Event]
) -> tuple[list[int], list[set[int]], dict[Hashable, int]]:
    """Return buffers as they first came, which buffers of its key each was alive with, and the peak for each key."""
    order: dict[int, None] = {}
    together: list[set[int]] = [set() for _ in requests]
    alive: dict[Hashable, dict[int, None]] = {request.key: {} for request in requests}
    live_bytes: dict[Hashable, int] = dict.fromkeys(alive, 0)
    peaks = dict(live_bytes)
    for number, is_allocation in events:
        key = requests[number].key
        others = alive[key]
        if is_allocation == (number in others):
            continue
        if not is_allocation:
            del others[number]
            live_bytes[key] -= sizes[number]
            continue
        order.setdefault(number)
        together[number].update(others)
        for other in others:
            together[other].add(number)
        others[number] = None
        live_bytes[key] += sizes[number]
        peaks[key] = max(peaks[key], live_bytes[key])
    order.update(dict.fromkeys(range(len(requests))))
    return list(order), together, peaks


def _place(members: Sequence[int], sizes: Sequence[int], together: Sequence[set[int]]) -> dict[int, int]:
    """Return the offsets that need least: of an order (as they came, largest first, busiest first) or of two ends."""
    orders = (
        members,
        sorted(members, key=lambda number: -sizes[number]),
        sorted(members, key=lambda number: -sum(sizes[other] for other in together[number])),
    )
    found = [*(_first_fit(order, sizes, together) for order in orders), _two_ends(members, sizes, together)]
    return min(
        (offsets for offsets in found if offsets is not None),
        key=lambda offsets: max((offsets[number] + sizes[number] for number in members), default=0),
    )


def _two_ends(members: Sequence[int], sizes: Sequence[int], together: Sequence[set[int]]) -> dict[int, int] | None:
    """Let buffers that are alive in pairs take turns at the bottom and the top; None where more than two are.

    Those that are alive with all others, as a root's weights, come below.
    """
    offsets: dict[int, int] = {}
    base = 0
    for number in members:
        if len(together[number]) == len(members) - 1:
            offsets[number] = base
            base += sizes[number]
    others = [number for number in members if number not in offsets]
    is_top: dict[int, bool] = {}
    for first in others:
        is_top.setdefault(first, False)
        waiting = [first]
        while waiting:
            number = waiting.pop()
            for other in together[number] - offsets.keys():
                if other not in is_top:
                    is_top[other] = not is_top[number]
                    waiting.append(other)
                elif is_top[other] == is_top[number]:
                    return None
    pairs = [sizes[one] + max((sizes[other] for other in together[one] - offsets.keys()), default=0) for one in others]
    top = base + max(pairs, default=0)
    offsets.update((number, top - sizes[number] if is_top[number] else base) for number in others)
    return offsets


def _first_fit(order: Sequence[int], sizes: Sequence[int], together: Sequence[set[int]]) -> dict[int, int]:
    offsets: dict[int, int] = {}
    for number in order:
        taken = sorted((offsets[other], sizes[other]) for other in together[number] if other in offsets)
        start = 0
        for offset, size in taken:
            if offset - start >= sizes[number]:
                break
            start = max(start, offset + size)
        offsets[number] = start
    return offsets
