# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Elementwise comparison of two tensors, piece by piece; reads no files."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron.core.distributed.fsdp.experimental.layout import Box

# Bounds what is computed on the way: some ten numbers of 8 bytes for each element.
_BLOCK_NUMEL = 1 << 18


@dataclass(frozen=True)
class Tolerance:
    """How far elements may be apart: ``|a - b| <= atol + rtol * |b|``; with both 0, their bits have to be equal."""

    rtol: float = 0.0
    atol: float = 0.0
    equal_nan: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether nothing is tolerated."""
        return self.rtol == 0 and self.atol == 0


@dataclass
class Differences:
    """What was found so far.

    Attributes:
        num_differing: elements that differ beyond the tolerance.
        max_abs: largest ``|a - b|``, inf where one is not finite or NaN and the other not the same.
        max_rel: largest ``|a - b| / |b|``.
        first: index of the first differing element.
    """

    num_differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    first: tuple[int, ...] | None = None

    def add(self, box: Box, first: torch.Tensor, second: torch.Tensor, tolerance: Tolerance) -> None:
        """Compare one box of two tensors; boxes have to come in row-major order."""
        flat = zip(*(torch.split(tensor.reshape(-1), _BLOCK_NUMEL) for tensor in (first, second)), strict=True)
        for number, (one, other) in enumerate(flat):
            differs = self._compare(one, other, tolerance)
            if differs is None:
                continue
            self.num_differing += int(differs.sum())
            if self.first is None and bool(differs.any()):
                position = number * _BLOCK_NUMEL + int(differs.to(torch.uint8).argmax())
                self.first = _index(box, position)

    def _compare(self, one: torch.Tensor, other: torch.Tensor, tolerance: Tolerance) -> torch.Tensor | None:
        """Return which elements of a block differ, or None for none of them; keep the largest distances."""
        same_bits = one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        if same_bits and (tolerance.equal_nan or not (one.is_floating_point() or one.is_complex())):
            return None
        wide, wide_other = _wide(one), _wide(other)
        nan, nan_other = wide.isnan(), wide_other.isnan()
        if same_bits and not bool(nan.any()):
            return None
        equal = wide == wide_other
        distance = torch.where(equal, 0.0, (wide - wide_other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        if tolerance.is_exact:
            close = equal & _equal_bits(one, other)
        else:
            close = equal | (distance <= tolerance.atol + tolerance.rtol * wide_other.abs()) & wide_other.isfinite()
        if tolerance.equal_nan:
            close |= nan & nan_other
            distance[nan & nan_other] = 0.0
        size = wide_other.abs()
        relative = torch.where(distance == 0, 0.0, distance / size).nan_to_num(nan=math.inf, posinf=math.inf)
        self.max_abs = max(self.max_abs, float(distance.max()))
        self.max_rel = max(self.max_rel, float(relative.max()))
        return ~close


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | bool:
    """Tell +0 from -0 where both have one dtype: the only numbers that are equal in different bits."""
    if one.dtype != other.dtype or not one.is_floating_point():
        return True
    return torch.signbit(_wide(one)) == torch.signbit(_wide(other))


def _wide(block: torch.Tensor) -> torch.Tensor:
    return block.to(torch.complex128 if block.is_complex() else torch.float64)


def _index(box: Box, position: int) -> tuple[int, ...]:
    """Return the index in the whole tensor of an element of a box, counted in row-major order."""
    index = []
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        index.append(offset + position // math.prod(box.sizes[dim + 1 :]) % size)
    return tuple(index)
