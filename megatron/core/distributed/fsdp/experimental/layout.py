# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Where each tensor of a group lies in the flat buffer, and which elements each shard owns.

Integer arithmetic only: no mesh, no tensors, no dtype. All offsets and sizes count elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT_NUMEL = 8
"""Every tensor and every shard starts at a multiple of this: 16 bytes at two bytes an element."""

MAX_ROW_PADDING = 0.01
"""Share of the tensors' elements that row alignment may add before shards may cut inside rows."""


@dataclass(frozen=True)
class Range:
    """The half-open run of elements ``[start, stop)``."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements in the run."""
        return self.stop - self.start

    def intersect(self, other: Range) -> Range:
        """Return the common run; an empty run at the nearest border where there is none."""
        start = min(max(self.start, other.start), self.stop)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Range:
        """Return the run moved by `by` elements."""
        return Range(self.start + by, self.stop + by)


@dataclass(frozen=True)
class TensorSlot:
    """One logical tensor: its shape and the offset of its first element in the flat buffer."""

    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Number of elements of one row, i.e. of one index of dim 0 (1 for scalars and vectors)."""
        return max(1, math.prod(self.shape[1:]))

    @property
    def range(self) -> Range:
        """The run that the tensor fills in the flat buffer."""
        return Range(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class GroupLayout:
    """The flat buffer of one group: tensors in order, cut into `num_shards` equal shards.

    Example: shapes (5, 3) and (4,), two shards, alignment 4::

        element  0 ............ 14 15 16 .. 19 20 ...... 23
                 tensor 0 (15)      .  tensor 1 .  padding
        shard    [0 ....... 11] [12 ................... 23]

    shard 0 owns elements [0, 12) of tensor 0 (rows 0 to 3); shard 1 its last row and all of tensor 1.
    """

    slots: tuple[TensorSlot, ...]
    num_shards: int
    shard_numel: int

    @property
    def global_numel(self) -> int:
        """Size of the whole flat buffer, padding included."""
        return self.num_shards * self.shard_numel

    @property
    def tensor_numel(self) -> int:
        """Elements that belong to tensors."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no tensor; what they hold is undefined."""
        return self.global_numel - self.tensor_numel

    def shard_range(self, shard: int, num_merged: int = 1) -> Range:
        """Return the run of the buffer that `shard` covers, where `num_merged` shards make one."""
        numel = self.shard_numel * num_merged
        return Range(shard * numel, (shard + 1) * numel)

    def owned(self, index: int, shard: int) -> Range:
        """Return the elements of tensor `index`, counted from its own first, that `shard` owns."""
        slot = self.slots[index]
        return slot.range.intersect(self.shard_range(shard)).shift(-slot.offset)

    @cached_property
    def _row_aligned(self) -> tuple[bool, ...]:
        aligned = []
        for slot in self.slots:
            first = slot.offset // self.shard_numel + 1
            last = max(slot.offset, slot.offset + slot.numel - 1) // self.shard_numel
            cuts = (shard * self.shard_numel - slot.offset for shard in range(first, last + 1))
            aligned.append(all(cut % slot.row_numel == 0 for cut in cuts))
        return tuple(aligned)

    def is_row_aligned(self, index: int) -> bool:
        """Return whether every shard owns whole rows of tensor `index`.

        The answer is the same on every rank, so that local shards have the same number of dims everywhere.
        """
        return self._row_aligned[index]


def plan_layout(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    atoms: Sequence[int] | None = None,
    alignment: int = ALIGNMENT_NUMEL,
) -> GroupLayout:
    """Place tensors one after another so that every shard border falls between atoms.

    Args:
        shapes: shapes of the group's tensors, in buffer order.
        num_shards: number of equal shards to cut the buffer into.
        atoms: per tensor, the number of elements that must not be cut (a row, a block of rows, the whole
            tensor). None means rows, given up for runs of elements where they would pad the buffer by more
            than `MAX_ROW_PADDING`.
        alignment: every tensor and shard starts at a multiple of it.

    Returns:
        The layout with the smallest shard size found.

    Raises:
        ValueError: no shard, no tensor, a negative size or an atom that does not divide its tensor.
    """
    sizes = [tuple(shape) for shape in shapes]
    if num_shards < 1 or not sizes or any(size < 0 for shape in sizes for size in shape):
        raise ValueError(
            f"layout: expected at least one shard and one tensor of sizes >= 0, got {num_shards} shards "
            f"and shapes {sizes}. Check the mesh and the module's parameters."
        )
    numels = [math.prod(shape) for shape in sizes]
    rows = [max(1, math.prod(shape[1:])) for shape in sizes]
    for numel, atom in zip(numels, atoms or rows, strict=True):
        if atom < 1 or numel % atom:
            raise ValueError(
                f"layout atoms: expected divisors of the tensors' sizes {numels}, got {atoms}. "
                "Use a row, a whole number of rows that divides the tensor, or the whole tensor."
            )
    limit = math.inf if atoms is not None else sum(numels) * (1 + MAX_ROW_PADDING)
    planned = _smallest_shard(numels, atoms or rows, num_shards, alignment, limit)
    if planned is None:
        planned = _smallest_shard(numels, [1] * len(numels), num_shards, alignment, math.inf)
        assert planned is not None, "runs of elements can be cut anywhere"
    offsets, shard_numel = planned
    slots = tuple(TensorSlot(*item) for item in zip(sizes, offsets, strict=True))
    return GroupLayout(slots, num_shards, shard_numel)


def _smallest_shard(
    numels: Sequence[int], atoms: Sequence[int], num_shards: int, alignment: int, limit: float
) -> tuple[list[int], int] | None:
    """Return offsets and shard size, or None where the buffer would exceed `limit` elements.

    The search jumps: a shard size that cuts an atom grows to the next multiple of that atom, one that is too
    small grows by what was missing, so that a handful of placements are tried rather than every size.
    """
    steps = [math.lcm(atom, alignment) for atom in atoms]
    shard_numel = max(alignment, _round_up(-(-sum(numels) // num_shards), alignment))
    while shard_numel * num_shards <= max(limit, alignment * num_shards):
        offsets: list[int] = []
        cursor = 0
        for numel, step in zip(numels, steps, strict=True):
            cursor = _round_up(cursor, alignment)
            border = (cursor // shard_numel + 1) * shard_numel
            if cursor + numel > border:
                cursor += (border - cursor) % step
                if cursor + numel > border + shard_numel and shard_numel % step:
                    shard_numel = _round_up(shard_numel + 1, step)
                    break
            offsets.append(cursor)
            cursor += numel
        else:
            missing = cursor - shard_numel * num_shards
            if missing <= 0:
                return offsets, shard_numel
            shard_numel = _round_up(shard_numel + -(-missing // num_shards), alignment)
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
