# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The seam of low-bit weights: what a format says of its blocks and planes, and what it can do with them.

It knows no parameter groups and communicates nothing; the formats themselves are in `number_formats.py`.

[Note: planes]
A quantized weight is two planes of bytes: the *payload*, its elements in row-major order, and the *scales*, one for
each block in row-major order of the blocks. A weight of any shape is seen as a matrix: [dim 0, everything else], a
vector as one row. Blocks are cut from the first row and column on, so that the last ones may be smaller; nothing is
padded.

Some formats also scale a whole tensor. That scale follows from the tensor's *amax*, the largest magnitude of all its
elements, which ranks that own shards of it must agree on before they quantize; it is not part of the planes.

Example: (3, 40) in MXFP8, whose blocks are 32 elements of a row: 120 bytes of payload and 3 x 2 scales. Its *atom*, the
run of elements that no shard border may cut, is a row: 40 elements with 2 scales. Of (3, 64) it is one block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class BlockGeometry:
    """How the blocks of one tensor lie in its elements.

    Attributes:
        atom: elements in row-major order that stay together; a tensor's last atom may be shorter.
        scales_per_atom: scales that belong to one atom; a shorter one has as many.
        num_scales: of the whole tensor.
    """

    atom: int
    scales_per_atom: int
    num_scales: int


class WeightFormat(Protocol):
    """A number format of weights; the same bits on every device, for every cut into whole atoms.

    Attributes:
        name: for messages.
        elements_per_byte: of payload; 1 or 2. With 2 the earlier element has the lower four bits.
        scale_bytes: of one scale in the plane; 0 where blocks have no scales.
        alignment: tensors and shards must begin at multiples of as many elements.
        needs_amax: whether tensors are scaled as a whole, so that `quantize` and `dequantize` need their amax.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def elements_per_byte(self) -> int: ...  # noqa: D102

    @property
    def scale_bytes(self) -> int: ...  # noqa: D102

    @property
    def alignment(self) -> int: ...  # noqa: D102

    @property
    def needs_amax(self) -> bool: ...  # noqa: D102

    def geometry(self, shape: Sequence[int]) -> BlockGeometry:
        """Return how the blocks of a tensor of this shape lie."""
        ...

    def quantize(
        self,
        values: torch.Tensor,
        shape: Sequence[int],
        payload: torch.Tensor,
        scales: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        start: int = 0,
    ) -> None:
        """Quantize a run of whole atoms of one tensor; nothing waits for the device.

        Args:
            values: [n], float32 or a narrower floating-point dtype, contiguous; n may be 0.
            shape: of the whole tensor.
            payload: [ceil(n / elements_per_byte)], uint8, contiguous; overwritten.
            scales: [scales of these atoms * scale_bytes], uint8, contiguous; overwritten.
            amax: 0-d float32, of the whole tensor; None unless `needs_amax`.
            start: which of the tensor's elements `values` begins with.
        """
        ...

    def dequantize(
        self,
        payload: torch.Tensor,
        scales: torch.Tensor,
        shape: Sequence[int],
        out: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Make the values of a run of whole atoms of one tensor; nothing waits for the device.

        Args:
            payload: as for `quantize`.
            scales: likewise.
            shape: of the whole tensor.
            out: [n], bfloat16, float16 or float32, contiguous; overwritten.
            amax: as for `quantize`.
        """
        ...


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns that a tensor is seen as: a vector is one row."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def num_scales_of(geometry: BlockGeometry, numel: int) -> int:
    """Return the scales that `numel` elements from the beginning of an atom have."""
    return -(-numel // geometry.atom) * geometry.scales_per_atom
