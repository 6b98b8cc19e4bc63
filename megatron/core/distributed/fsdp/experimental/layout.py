# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Where each tensor of a group lies in the flat buffer, and which elements each shard owns.

Integer arithmetic only: no mesh, no tensors, no dtype. All offsets and sizes count elements. How much is padded in
well-known models: ``python -m megatron.core.distributed.fsdp.experimental.layout --report``.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from .packing import Bounds, Plan, ShardSizes, round_up, search

ALIGNMENT_NUMEL = 8
"""Every tensor and shard starts at a multiple of this, padding permitting: 16 bytes at two bytes an element."""

MAX_ROW_PADDING = 0.01
"""Share of the tensors' elements that padding may reach before shards may cut inside rows."""


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
    """The flat buffer of one group: its tensors, in any order, cut into `num_shards` equal shards.

    Slot i describes tensor i, wherever it lies. Example: shapes (5, 3) and (4,), two shards::

        element  0 ...... 3 4 ....... 9 10 ......... 18 19
                 tensor 1 | tensor 0                  | padding
        shard    [0 ................ 9] [10 .......... 19]

    shard 0 owns tensor 1 and rows 0 and 1 of tensor 0; shard 1 owns rows 2 to 4.
    """

    slots: tuple[TensorSlot, ...]
    num_shards: int
    shard_numel: int

    @property
    def global_numel(self) -> int:
        """Size of the whole flat buffer, padding included."""
        return self.num_shards * self.shard_numel

    @cached_property
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

    def tensor_at(self, offset: int) -> int:
        """Return which tensor holds element `offset` of the buffer; the last one for padding."""
        slots = enumerate(self.slots)
        return next((i for i, slot in slots if slot.offset <= offset < slot.range.stop), len(self.slots) - 1)

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
    max_padding: float | None = None,
) -> GroupLayout:
    """Place tensors so that every shard border falls between atoms; the same arguments give the same layout.

    Args:
        shapes: shapes of the group's tensors; slot i of the layout describes shape i, wherever it lies.
        num_shards: number of equal shards to cut the buffer into.
        atoms: per tensor, the number of elements that must not be cut: 1, a row, a block of rows, the whole tensor; a
            tensor's last atom may be shorter. None means rows, given up for runs of elements, tensor by tensor, where
            `max_padding` demands it.
        alignment: every tensor and shard starts at a multiple of it; halved as often as `max_padding` demands.
        max_padding: share of the tensors' elements that padding may reach, besides the `num_shards` - 1 elements
            that no layout can promise to avoid. None means `MAX_ROW_PADDING` without atoms, and no bound with them.

    Returns:
        The layout of the smallest shard size found. Without atoms its padding is within
        max(max_padding * elements, num_shards - 1) for any shapes; a group without elements gets a shard size of 1.

    Raises:
        ValueError: no shard, no tensor, a negative size or bound, an atom below 1, or atoms that need more padding
            than allowed.
    """
    sizes = [tuple(shape) for shape in shapes]
    if num_shards < 1 or not sizes or any(size < 0 for shape in sizes for size in shape):
        raise ValueError(
            f"layout: expected at least one shard and one tensor of sizes >= 0, got {num_shards} shards "
            f"and shapes {sizes}. Check the mesh and the module's parameters."
        )
    if alignment < 1 or (max_padding is not None and not 0 <= max_padding < math.inf):
        raise ValueError(
            f"layout: expected alignment >= 1 and a finite max_padding >= 0, got {alignment} and {max_padding}. "
            "Leave them out for the defaults."
        )
    if atoms is None:
        numels = [math.prod(shape) for shape in sizes]
        rows = [max(1, math.prod(shape[1:])) for shape in sizes]
        planned = _plan_rows(
            numels, rows, num_shards, alignment, MAX_ROW_PADDING if max_padding is None else max_padding
        )
    else:
        planned = _plan_atoms(sizes, atoms, num_shards, alignment, max_padding)
    slots = tuple(TensorSlot(*item) for item in zip(sizes, planned.offsets, strict=True))
    return GroupLayout(slots, num_shards, planned.shard_numel)


def _plan_rows(numels: list[int], rows: list[int], num_shards: int, alignment: int, max_padding: float) -> Plan:
    """Return a plan within the bound that cuts inside rows of few tensors.

    There always is one: at alignment 1 runs of elements lie one after another without gaps, in shards of
    ceil(elements / num_shards), which is at most `num_shards` - 1 elements of padding.
    """
    total = sum(numels)
    low = _smallest_size(total, num_shards)
    high = max(low, (total + _share_of(total, max_padding)) // num_shards)
    bounds = Bounds(num_shards, low, high, alignment)
    while True:
        steps = _compatible_steps(numels, rows, bounds)
        plan = search(numels, steps, bounds)
        if plan is not None:
            return plan
        runs = search(numels, [bounds.alignment] * len(numels), bounds)
        if runs is not None:
            return _give_up_rows(numels, steps, bounds, runs)
        assert bounds.alignment > 1, "runs of elements without alignment fit into the smallest shards"
        bounds = replace(bounds, alignment=bounds.alignment // 2)


def _compatible_steps(numels: list[int], rows: list[int], bounds: Bounds) -> list[int]:
    """Return rows for those tensors that one shard size within the bounds suits together, runs for the others.

    Tensors longer than a shard make its size a multiple of their rows. Row sizes are tried by the number of
    elements that have them, largest first.
    """
    covered: dict[int, int] = {}
    for numel, row in zip(numels, rows, strict=True):
        covered[row] = covered.get(row, 0) + numel
    aligned = [math.lcm(row, bounds.alignment) for row in rows]
    if ShardSizes(numels, aligned, bounds.alignment).next(bounds.low) <= bounds.high:
        return aligned
    steps = [bounds.alignment] * len(numels)
    for chosen in sorted(covered, key=lambda row: (-covered[row], row)):
        step = math.lcm(chosen, bounds.alignment)
        trial = [step if row == chosen else old for row, old in zip(rows, steps, strict=True)]
        if ShardSizes(numels, trial, bounds.alignment).next(bounds.low) <= bounds.high:
            steps = trial
    return steps


def _give_up_rows(numels: list[int], steps: list[int], bounds: Bounds, runs: Plan) -> Plan:
    """Return a plan that cuts inside rows of as few tensors as found, those with the largest rows first.

    Args:
        numels: elements per tensor.
        steps: what `_compatible_steps` gave, where the gaps before whole rows add up to too much padding.
        bounds: of the shards.
        runs: the plan that cuts inside rows of every tensor.
    """
    order = sorted(
        (index for index, step in enumerate(steps) if step > bounds.alignment),
        key=lambda index: (-steps[index], -numels[index], index),
    )
    few, many, best = 1, len(order), runs
    while few < many:
        middle = (few + many) // 2
        trial = list(steps)
        for index in order[:middle]:
            trial[index] = bounds.alignment
        plan = search(numels, trial, bounds)
        if plan is None:
            few = middle + 1
        else:
            many, best = middle, plan
    return best


def _plan_atoms(
    sizes: list[tuple[int, ...]], atoms: Sequence[int], num_shards: int, alignment: int, max_padding: float | None
) -> Plan:
    """Return a plan that cuts no atom, or raise ValueError where it needs more padding than allowed."""
    numels = [math.prod(shape) for shape in sizes]
    if len(atoms) != len(numels) or any(atom < 1 for atom in atoms):
        raise ValueError(
            f"layout atoms: expected one size >= 1 for each of the tensors of {numels} elements, got {list(atoms)}. "
            "Use a row, some rows, or the whole tensor."
        )
    total = sum(numels)
    low = _smallest_size(total, num_shards)
    allowed = None if max_padding is None else max(_share_of(total, max_padding), low * num_shards - total)
    needed = []
    while True:
        high = max(alignment, sum(round_up(numel, alignment) for numel in numels))
        steps = [math.lcm(atom, alignment) for atom in atoms]
        plan = search(numels, steps, Bounds(num_shards, low, high, alignment))
        assert plan is not None, "all tensors fit into the first shard"
        needed.append(plan.shard_numel * num_shards - total)
        if allowed is None or needed[-1] <= allowed:
            return plan
        if alignment == 1:
            break
        alignment //= 2
    worst = max(range(len(atoms)), key=lambda index: (atoms[index], numels[index]))
    share = math.ceil(min(needed) / total * 10_000) / 10_000
    raise ValueError(
        f"layout atoms: expected atoms that {num_shards} shards hold uncut with max_padding {max_padding}, got "
        f"a tensor of shape {sizes[worst]} in atoms of {atoms[worst]} elements, for which it takes {share}. "
        f"Use smaller atoms, fewer shards, or max_padding={share}."
    )


def _smallest_size(total: int, num_shards: int) -> int:
    """Return the smallest shard size that holds all elements; no shard is empty, so that no collective is."""
    return max(1, -(-total // num_shards))


def _share_of(total: int, share: float) -> int:
    """Return a share, taken to six decimals, of a number of elements, rounded down; the same on every rank."""
    return math.floor(total * Fraction(share).limit_denominator(1_000_000))


class Box(NamedTuple):
    """A hyper-rectangle of a tensor: per dim, its first index and its number of indices."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Describe the run of elements ``[start, stop)`` of a row-major tensor as boxes.

    Example: elements [2, 11) of shape (4, 3) are the end of row 0, rows 1 and 2, and the beginning of row 3:
    ``[((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]``.

    Args:
        shape: the tensor's shape, n dims.
        start: first element.
        stop: one after the last element.

    Returns:
        Disjoint boxes that hold exactly these elements, in their order: none for an empty run, else at most 2n - 1,
        or one for n = 0.

    Raises:
        ValueError: the run does not lie within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"boxes: expected 0 <= start <= stop <= {math.prod(shape)} for shape {tuple(shape)}, got [{start}, "
            f"{stop}). Count elements from the tensor's own first."
        )
    if not shape:
        return [Box((), ())] * (stop - start)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = []
    while start < stop:
        # The outermost dim of which whole indices begin here; the last dim always has some.
        dim = next(dim for dim, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        offsets = [start // stride % size for stride, size in zip(strides, shape, strict=True)]
        count = min((stop - start) // strides[dim], shape[dim] - offsets[dim])
        found.append(Box(tuple(offsets), (*[1] * dim, count, *shape[dim + 1 :])))
        start += count * strides[dim]
    return found


if __name__ == "__main__":
    from .layout_report import main

    main()
elif sys.argv[:1] == ["-m"]:
    # While ``python -m`` looks for the module that it will run, ``sys.argv[0]`` is "-m" and packages are imported, ours
    # with this module in it. Should it be the one, runpy warns that it will be executed twice; that is harmless, since
    # the second copy only calls the report, which uses the first.
    warnings.filterwarnings("ignore", f"'{re.escape(__name__)}' found in sys.modules", RuntimeWarning)
