# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The number formats of TransformerEngine's weights that differ from ours: what is scaled by what, and how it is cut.

They know no classes of TransformerEngine, and nothing of planes' padding.

[Note: TransformerEngine's bytes]
For weights of finite numbers the bytes are those that TransformerEngine's own kernels write, with two exceptions whose
values differ by less than the format can hold: factors stay below 2**126, where TransformerEngine's go up to the
largest float32; and a block of NVFP4 whose scale is zero has zeros. What is not finite is NaN here ([Note: values of
formats] in number_formats.py), where TransformerEngine saturates an infinity: a weight that has overflowed must be
seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .block_views import Grid, decode_blocks, encode_blocks
from .float_bits import E2M1, E4M3, FLOAT32_EXPONENT, pack_nibbles, unpack_nibbles
from .number_formats import Mxfp8Format
from .quantization import BlockGeometry, as_matrix

_MX_BLOCK = 32
_NV_TILE = 16
_NAN_E4M3 = 0x7F
_LARGEST_FACTOR = 2.0**126


@dataclass(frozen=True)
class GivenFp8Format:
    """FP8, E4M3, of a whole tensor, by a factor from elsewhere: what is passed as ``amax`` is that factor."""

    name = "FP8 (E4M3) by a given factor"
    elements_per_byte = 1
    scale_bytes = 0
    alignment = 16
    needs_amax = True

    def geometry(self, shape: Sequence[int]) -> BlockGeometry:
        """Return that an atom is an element."""
        return BlockGeometry(1, 0, 0)

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
        """Quantize a run of elements; see `WeightFormat.quantize`."""
        assert amax is not None, "the factor"
        grid = Grid(1, values.numel(), 1, max(1, values.numel()))
        factors = amax.view(1, 1)
        encode_blocks(grid, values, scale=torch.mul, factors=factors, element=E4M3, codes=payload, source=None)

    def dequantize(
        self,
        payload: torch.Tensor,
        scales: torch.Tensor,
        shape: Sequence[int],
        out: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Make the values of a run of elements; see `WeightFormat.dequantize`."""
        assert amax is not None, "the factor"
        grid = Grid(1, out.numel(), 1, max(1, out.numel()))
        decode_blocks(grid, payload, element=E4M3, plane=amax.reciprocal().view(1, 1), out=out)


def factors_of(amaxes: torch.Tensor) -> torch.Tensor:
    """Return by what tensors with these largest magnitudes are multiplied, [tensors], float32; 0 for what is lost.

    448 / amax, and 1 for zeros.
    """
    # Not a division by a Python number, which multiplies by the reciprocal on CUDA.
    largest = torch.full((), E4M3.largest, dtype=torch.float32, device=amaxes.device)
    factors = largest.div(amaxes).clamp_(max=_LARGEST_FACTOR).masked_fill_(amaxes == 0, 1.0)
    return factors.masked_fill_(~torch.isfinite(amaxes), 0.0)


def inverses_of(factors: torch.Tensor, amaxes: torch.Tensor) -> torch.Tensor:
    """Return what elements are multiplied by, [tensors], float32; NaN for tensors with something that is not finite."""
    return factors.reciprocal().masked_fill_(~torch.isfinite(amaxes), math.nan)


@dataclass(frozen=True)
class Mxfp8RowsFormat(Mxfp8Format):
    """MXFP8 in blocks of 32 elements of a row, of which 32 rows stay together: as many as a block by columns has."""

    scale_rounding: str = "ceil"

    name = "MXFP8 (E4M3) by rows"

    def geometry(self, shape: Sequence[int]) -> BlockGeometry:
        """Return that an atom is 32 rows; both sizes are multiples of 32."""
        rows, columns = as_matrix(shape)
        return BlockGeometry(_MX_BLOCK * columns, columns, rows * columns // _MX_BLOCK)


@dataclass(frozen=True)
class Mxfp8ColumnsFormat(Mxfp8RowsFormat):
    """MXFP8 in blocks of 32 elements of a column; payload and scales in row-major order, not transposed."""

    name = "MXFP8 (E4M3) by columns"

    def _grid(self, shape: Sequence[int], numel: int) -> Grid:
        columns = as_matrix(shape)[1]
        return Grid(numel // max(1, columns), columns, _MX_BLOCK, 1)


@dataclass(frozen=True)
class TiledNvfp4Format:
    """NVFP4 in tiles of 16 x 16 elements that share a scale, so that the transpose has the same elements.

    The tensor's factor is g = 2688 / amax, 1 for zeros. A tile's scale is the largest magnitude in it, times g / 6,
    rounded to E4M3 and saturated. Elements are round(value * (g / scale)).
    """

    name = "NVFP4 in tiles"
    elements_per_byte = 2
    scale_bytes = 1
    alignment = 2 * _NV_TILE
    needs_amax = True

    def geometry(self, shape: Sequence[int]) -> BlockGeometry:
        """Return that an atom is 16 rows; both sizes are multiples of 16."""
        rows, columns = as_matrix(shape)
        per_atom = columns // _NV_TILE
        return BlockGeometry(_NV_TILE * columns, per_atom, rows // _NV_TILE * per_atom)

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
        """Quantize a run of whole atoms; see `WeightFormat.quantize`."""
        assert amax is not None, "the format is scaled as a whole, too"
        grid = _tiles(shape, values.numel())
        bits = grid.amax_bits(values)
        factor = _tensor_factor(amax)
        plane = scales.view(grid.num_blocks)
        E4M3.encode(bits.view(torch.float32) * (factor * (1.0 / E2M1.largest)), plane)
        decoded = E4M3.decode(plane)
        factors = (factor / decoded).masked_fill_(decoded == 0, 0.0)
        is_lost = (bits >= FLOAT32_EXPONENT) | ~torch.isfinite(amax)
        plane.masked_fill_(is_lost, _NAN_E4M3)
        codes = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
        factors = factors.masked_fill_(is_lost, 0.0)
        encode_blocks(grid, values, scale=torch.mul, factors=factors, element=E2M1, codes=codes, source=None)
        pack_nibbles(codes, payload)

    def dequantize(
        self,
        payload: torch.Tensor,
        scales: torch.Tensor,
        shape: Sequence[int],
        out: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Make the values of a run of whole atoms; see `WeightFormat.dequantize`."""
        assert amax is not None, "the format is scaled as a whole, too"
        grid = _tiles(shape, out.numel())
        plane = E4M3.decode(scales.view(grid.num_blocks)) * _tensor_factor(amax).reciprocal()
        decode_blocks(grid, unpack_nibbles(payload), element=E2M1, plane=plane, out=out)


def _tiles(shape: Sequence[int], numel: int) -> Grid:
    columns = as_matrix(shape)[1]
    return Grid(numel // max(1, columns), columns, _NV_TILE, _NV_TILE)


def _tensor_factor(amax: torch.Tensor) -> torch.Tensor:
    largest = torch.full((), E2M1.largest * E4M3.largest, dtype=torch.float32, device=amax.device)
    factor = largest.div(amax).clamp_(max=_LARGEST_FACTOR)
    return factor.masked_fill_(amax == 0, 1.0).masked_fill_(~torch.isfinite(amax), 0.0)
