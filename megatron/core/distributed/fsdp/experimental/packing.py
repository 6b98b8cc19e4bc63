# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Packs tensors that may be cut at certain elements only into equal shards, the smallest that are found.

Integer arithmetic only. What a tensor's step should be, and how much padding is too much, is decided in `layout.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial


@dataclass(frozen=True)
class Bounds:
    """What the shards may be: `num_shards` of them, of one size within [low, high] that is a multiple of `alignment`.

    Every tensor starts at a multiple of `alignment`, too.
    """

    num_shards: int
    low: int
    high: int
    alignment: int


@dataclass(frozen=True)
class Plan:
    """Offsets by tensor, and the shard size that they hold for."""

    offsets: list[int]
    shard_numel: int


def search(numels: Sequence[int], steps: Sequence[int], bounds: Bounds) -> Plan | None:
    """Return the plan with the smallest shard size found, None if none was found.

    Args:
        numels: elements per tensor.
        steps: per tensor, a multiple of the alignment; borders lie at multiples of it from the tensor's start.
        bounds: of the shards.
    """
    # Large steps first, so that what comes later fills their gaps; among equal steps odd sizes last, so that the
    # others start at aligned elements even where alignment had to be given up.
    order = sorted(
        range(len(numels)), key=lambda index: (-steps[index], -math.gcd(numels[index], 8), -numels[index], index)
    )
    place = partial(_place, numels, steps, order, bounds)
    found = _bisect(ShardSizes(numels, steps, bounds.alignment), place, bounds)
    smaller = bounds if found is None else replace(bounds, high=found.shard_numel - 1)
    return _bisect(_TightSizes(numels, steps, bounds.alignment), place, smaller) or found


def _bisect(sizes: ShardSizes, place: Callable[[int], list[int] | None], bounds: Bounds) -> Plan | None:
    """Return a plan with one of `sizes`: the first within the bounds, or the smallest met by bisection."""
    found = None
    low, high = bounds.low, bounds.high
    probe = low
    while low <= high:
        size = sizes.next(probe)
        offsets = place(size) if size <= high else None
        if offsets is not None:
            found = Plan(offsets, size)
        if offsets is not None or size > high:
            high = probe - 1
        else:
            low = size + 1
        probe = (low + high) // 2
    return found


class ShardSizes:
    """The shard sizes in which every tensor may start anywhere, but for a gap of less than a step.

    That is so if the size is a multiple of the step of every tensor longer than a shard, since only those can meet two
    borders.
    """

    def __init__(self, numels: Sequence[int], steps: Sequence[int], alignment: int) -> None:
        limits = sorted(
            (self._enough_for(numel, step), step) for numel, step in zip(numels, steps, strict=True) if step > alignment
        )
        self._enough = [enough for enough, _ in limits]
        self._multiples = [alignment]
        for _, step in reversed(limits):
            self._multiples.append(math.lcm(self._multiples[-1], step))
        self._multiples.reverse()

    def _enough_for(self, numel: int, step: int) -> int:
        """Return the shard size from which on it need not be a multiple of `step`."""
        return numel

    def next(self, size: int) -> int:
        """Return the smallest such size that is not below `size`."""
        while True:
            position = bisect_right(self._enough, size)
            multiple = round_up(size, self._multiples[position])
            if position == len(self._enough) or multiple <= self._enough[position]:
                return multiple
            size = self._enough[position]


class _TightSizes(ShardSizes):
    """The shard sizes in which every tensor has some place, perhaps behind a large gap.

    A tensor longer than a shard may do with one border, with whole steps before it and up to a shard behind it.
    Example: 5 steps of 10 lie around a border of shards of 35, as 3 steps and 2, but not of shards of 25.
    """

    def _enough_for(self, numel: int, step: int) -> int:
        return numel // (2 * step) * step + min(numel % (2 * step), step)


def _place(
    numels: Sequence[int], steps: Sequence[int], order: Sequence[int], bounds: Bounds, size: int
) -> list[int] | None:
    """Return offsets by tensor, or None where the tensors do not fit into shards of `size`.

    Every tensor goes to the smallest gap that takes it, or to its first legal start behind all others.
    """
    offsets = [0] * len(numels)
    gaps: list[tuple[int, int]] = []  # (numel, start) of what lies before `end` and is free, smallest first
    end = 0
    for index in order:
        numel = numels[index]
        for position in range(bisect_left(gaps, (numel, 0)), len(gaps)):
            length, first = gaps[position]
            start = _legal_start(first, numel, steps[index], size)
            if start + numel <= first + length:
                del gaps[position]
                _add_gap(gaps, first, start)
                _add_gap(gaps, round_up(start + numel, bounds.alignment), first + length)
                break
        else:
            start = _legal_start(end, numel, steps[index], size)
            if start + numel > bounds.num_shards * size:
                return None
            _add_gap(gaps, end, start)
            end = round_up(start + numel, bounds.alignment)
        offsets[index] = start
    return offsets


def _add_gap(gaps: list[tuple[int, int]], start: int, stop: int) -> None:
    if start < stop:
        insort(gaps, (stop - start, start))


def _legal_start(cursor: int, numel: int, step: int, size: int) -> int:
    """Return the first start from `cursor` on at which all borders in the tensor are multiples of `step` from it.

    Example: 9 elements in steps of 3 and shards of 8: from 4 on, 5 is the first such start, 3 before the border.
    """
    border = (cursor // size + 1) * size
    if cursor + numel <= border:
        return cursor
    start = cursor + (border - cursor) % step
    if start + numel <= border + size or size % step == 0:
        return start
    return border + size % step


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple
