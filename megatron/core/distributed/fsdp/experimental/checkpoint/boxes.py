# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of boxes in a tensor's coordinates: intersections, overlaps, slabs; knows nothing of files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from ..layout import Box


def intersect(first: Box, second: Box) -> Box | None:
    """Return what two boxes of one tensor have in common, or None; 0-dim boxes are their one element."""
    begins = [max(pair) for pair in zip(first.offsets, second.offsets, strict=True)]
    ends = [min(pair) for pair in zip(_ends(first), _ends(second), strict=True)]
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Box(tuple(begins), sizes) if all(size > 0 for size in sizes) else None


def overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Return two of the boxes that share elements, or None; a sweep along the outermost dim."""
    active: list[Box] = []
    for box in sorted(boxes):
        if 0 in box.sizes:
            continue
        active = [other for other in active if not box.offsets or other.offsets[0] + other.sizes[0] > box.offsets[0]]
        for other in active:
            if intersect(box, other):
                return other, box
        active.append(box)
    return None


def numel(box: Box) -> int:
    """Count a box's elements."""
    return math.prod(box.sizes)


def slabs(shape: Sequence[int], max_numel: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``max_numel`` (>= 1) elements each, in row-major order of their elements.

    Example: shape (3, 4) by at most 8 gives rows [0, 2) and row 2; by at most 2, six boxes of (1, 2).
    """
    if 0 in shape:
        return
    # The outermost dim of which one index fits.
    dim = next((dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= max_numel), len(shape))
    if dim == len(shape):
        yield Box((0,) * dim, tuple(shape))
        return
    count = max(1, max_numel // math.prod(shape[dim + 1 :]))
    for outer in range(math.prod(shape[:dim])):
        offsets = [outer // math.prod(shape[i + 1 : dim]) % shape[i] for i in range(dim)]
        for begin in range(0, shape[dim], count):
            sizes = (*[1] * dim, min(count, shape[dim] - begin), *shape[dim + 1 :])
            yield Box((*offsets, begin, *[0] * (len(shape) - dim - 1)), sizes)


def _ends(box: Box) -> list[int]:
    return [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]
