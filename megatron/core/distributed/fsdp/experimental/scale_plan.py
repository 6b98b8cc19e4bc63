# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Where the scales of quantized weights lie in their plane: integers only.

[Note: the plane of scales]
A shard of the plane holds the scales of the atoms in the same shard of the weights, so that one gather of equal shards
brings all. Where every tensor has as many scales for its elements as the others, they lie in proportion to the
elements, and those of a tensor are one run of the gathered plane. Otherwise each shard has its tensors' scales one
after another, shards are as long as the longest, and a tensor that borders have cut has a run in each of its shards.

Example: rows of 4 and of 2 elements with a scale each, (3, 4) and (2, 2) on two shards of 8 elements. The first tensor
has two rows in shard 0 and one in shard 1, which holds the second one, too::

    scales   0 1 -   2 | 0 1
    shard    [0 ..2]  [3 ...5]

The runs of the first tensor are [0, 2) and [3, 4), that of the second is [4, 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import GroupLayout, Range
from .quantization import BlockGeometry, num_scales_of


@dataclass(frozen=True)
class ScalePlan:
    """Where the scales of a group's tensors lie; counted in scales.

    Attributes:
        shard_numel: scales in a shard of the plane.
        parts: per tensor, its run in each of its shards, by shard, in order.
        ratio: elements that share a scale, where scales lie in proportion to them.
    """

    shard_numel: int
    parts: tuple[dict[int, Range], ...]
    ratio: int | None = None

    def runs(self, index: int) -> list[Range]:
        """Return where the scales of a tensor lie in the gathered plane, neighbours joined."""
        joined: list[Range] = []
        for part in self.parts[index].values():
            if joined and joined[-1].stop == part.start:
                joined[-1] = Range(joined[-1].start, part.stop)
            else:
                joined.append(part)
        return joined


def plan_scales(layout: GroupLayout, geometries: Sequence[BlockGeometry]) -> ScalePlan:
    """Return where scales lie.

    Args:
        layout: of the weights; no shard border cuts an atom.
        geometries: per tensor.
    """
    ratio = _common_ratio(layout, geometries)
    return _dense(layout, geometries) if ratio is None else _proportional(layout, geometries, ratio)


def _common_ratio(layout: GroupLayout, geometries: Sequence[BlockGeometry]) -> int | None:
    """Return how many elements share a scale, if that is one number that all offsets are multiples of."""
    ratios = {
        geometry.atom // geometry.scales_per_atom if geometry.atom % geometry.scales_per_atom == 0 else 0
        for slot, geometry in zip(layout.slots, geometries, strict=True)
        if slot.numel
    }
    if len(ratios) != 1 or 0 in ratios:
        return None
    (ratio,) = ratios
    if layout.shard_numel % ratio or any(slot.offset % ratio for slot in layout.slots):
        return None
    # Scales of a last, shorter atom must not reach beyond its elements.
    fits = all(
        geometry.num_scales <= -(-slot.numel // ratio) for slot, geometry in zip(layout.slots, geometries, strict=True)
    )
    return ratio if fits else None


def _proportional(layout: GroupLayout, geometries: Sequence[BlockGeometry], ratio: int) -> ScalePlan:
    parts: list[dict[int, Range]] = []
    for slot, geometry in zip(layout.slots, geometries, strict=True):
        first = slot.offset // ratio
        whole = Range(first, first + geometry.num_scales)
        shard_numel = layout.shard_numel // ratio
        shards = range(whole.start // shard_numel, -(-whole.stop // shard_numel))
        parts.append(
            {shard: whole.intersect(Range(shard * shard_numel, (shard + 1) * shard_numel)) for shard in shards}
        )
    return ScalePlan(layout.shard_numel // ratio, tuple(parts), ratio)


def _dense(layout: GroupLayout, geometries: Sequence[BlockGeometry]) -> ScalePlan:
    counts: list[dict[int, int]] = []
    filled = [0] * layout.num_shards
    starts: list[dict[int, int]] = []
    for index, (slot, geometry) in enumerate(zip(layout.slots, geometries, strict=True)):
        counts.append({})
        starts.append({})
        if slot.numel == 0:
            continue
        first, last = slot.offset // layout.shard_numel, (slot.range.stop - 1) // layout.shard_numel
        for shard in range(first, last + 1):
            count = num_scales_of(geometry, layout.owned(index, shard).numel)
            starts[index][shard], counts[index][shard] = filled[shard], count
            filled[shard] += count
    shard_numel = max(1, *filled)
    parts = tuple(
        {
            shard: Range(shard * shard_numel + start, shard * shard_numel + start + counts[index][shard])
            for shard, start in of.items()
        }
        for index, of in enumerate(starts)
    )
    return ScalePlan(shard_numel, parts)
