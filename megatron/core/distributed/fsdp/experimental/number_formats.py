# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The number formats of low-bit weights: FP8 in three scalings, MXFP8 and NVFP4.

What is said here in plain torch is done by one kernel where there is one (`format_kernels.py`). Formats know no shards
and communicate nothing; what they must offer is said in `quantization.py`.

[Note: values of formats]
What holds for all of them:

- *Rounding* is to the nearest element, ties to even, or stochastic: to one of the two neighbours, up as often as the
  value is near it. Elements that represent a value exactly never move. Subnormal elements are used.
- *Saturation*: what is beyond the largest element becomes that element.
- *Not finite*: a NaN or an infinity makes its whole block decode to NaN, and its whole tensor where `needs_amax`: a
  weight that has overflowed must be seen. The payload is zeros there, with their signs. Which NaN is not defined.
- *Zeros* keep their sign. A block of zeros decodes to zeros.
- *Decoding* multiplies, in float32, the element by its scale, and rounds the product to the output's dtype, to nearest
  even. Finite values never decode to what is not finite, unless the output's dtype has less range than they need.
- *Scales* are computed in float32, subnormal numbers included, and each operation is rounded.

The same bits on hosts and on CUDA, for any cut into whole atoms. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .block_views import Grid, Noise, decode_blocks, encode_blocks
from .float_bits import (
    E2M1,
    E4M3,
    FLOAT32_EXPONENT,
    decode_powers,
    pack_nibbles,
    unpack_nibbles,
)
from .format_checks import check_choice, check_planes, check_rounding
from .format_kernels import Kernels, kernels_for
from .quantization import BlockGeometry, as_matrix

_FP8_SCALINGS = ("tensor", "row", "block")
_MX_ROUNDINGS = ("floor", "ceil")
_FP8_BLOCK = 128
_MX_BLOCK = 32
_NV_BLOCK = 16
_NAN_E4M3 = 0x7F


@dataclass(frozen=True)
class Fp8Format:
    """OCP FP8, E4M3: largest element 448, smallest 2**-9; float32 scales.

    The factor of a block is 448 / amax, and at most 2**126; 1 for zeros. Elements are round(value * factor), and the
    scale in the plane is 1 / factor, of which 448 times is finite, the largest amax included.

    - "tensor": one block; no plane of scales, since the scale follows from amax.
    - "row": a block is a row.
    - "block": blocks are 128 x 128, and factors rounded down to powers of two within [2**-119, 2**126], so that scaling
      is exact; above 1.75 * 2**127 values saturate.

    Attributes:
        scaling: "tensor", "row" or "block".
        rounding: "nearest" or "stochastic".
        seed: of stochastic rounding, in [0, 2**64).
    """

    scaling: str
    rounding: str = "nearest"
    seed: int = 0

    elements_per_byte = 1
    alignment = 16

    def __post_init__(self) -> None:
        check_choice("FP8 scaling", self.scaling, _FP8_SCALINGS)
        check_rounding(self.rounding, self.seed)

    @property
    def name(self) -> str:
        """For messages."""
        return f"FP8 (E4M3) by {self.scaling}"

    @property
    def scale_bytes(self) -> int:
        """Four for float32; none for tensors."""
        return 0 if self.needs_amax else 4

    @property
    def needs_amax(self) -> bool:
        """Whether the tensor is one block."""
        return self.scaling == "tensor"

    def geometry(self, shape: Sequence[int]) -> BlockGeometry:
        """Return how blocks lie: an atom is an element, a row, or up to 128 rows; of a single row, 128 elements."""
        rows, columns = as_matrix(shape)
        if self.scaling == "tensor":
            return BlockGeometry(1, 0, 0)
        if self.scaling == "row":
            return BlockGeometry(max(1, columns), 1, rows if columns else 0)
        if rows == 1:
            return _geometry_of_runs(shape, _FP8_BLOCK)
        per_atom = -(-columns // _FP8_BLOCK)
        atom = max(1, min(rows, _FP8_BLOCK) * columns)
        return BlockGeometry(atom, per_atom, -(-rows // _FP8_BLOCK) * per_atom)

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
        check_planes(self, values, shape, payload, scales, amax)
        grid = self._grid(shape, values.numel())
        kernels, source = kernels_for(values), _noise_of(self, start)
        if amax is not None:
            bits = _bits_of(amax)
        else:
            bits = grid.amax_bits(values) if kernels is None else kernels.amax_bits(grid, values)
        factors, plane = self._factors(bits)
        if amax is None:
            scales.view(torch.float32).copy_(plane.view(-1))
        if kernels is not None:
            scaling = {"scale_bits": "factors", "factors": factors, "amax": None, "scales": scales}
            kernels.quantize(grid, values, element=E4M3, source=source, payload=payload, **scaling)
            return
        encode_blocks(grid, values, scale=torch.mul, factors=factors, element=E4M3, codes=payload, source=source)

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
        check_planes(self, out, shape, payload, scales, amax)
        grid = self._grid(shape, out.numel())
        kernels = kernels_for(out)
        if kernels is not None:
            kind = "float32" if amax is None else "amax"
            kernels.dequantize(grid, payload, element=E4M3, scales=scales, scale_bits=kind, amax=amax, out=out)
            return
        if amax is None:
            plane = scales.view(torch.float32).view(grid.num_blocks)
        else:
            plane = self._factors(_bits_of(amax))[1]
        decode_blocks(grid, payload, element=E4M3, plane=plane, out=out)

    def _grid(self, shape: Sequence[int], numel: int) -> Grid:
        rows, columns = as_matrix(shape)
        if self.scaling == "tensor" or (self.scaling == "block" and rows == 1):
            return Grid(1, numel, 1, max(1, numel) if self.scaling == "tensor" else _FP8_BLOCK)
        block = (1, max(1, columns)) if self.scaling == "row" else (_FP8_BLOCK, _FP8_BLOCK)
        return Grid(numel // max(1, columns), columns, *block)

    def _factors(self, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what values are multiplied by, and what elements are."""
        amax = bits.view(torch.float32)
        factors = _constant(E4M3.largest, amax).div(amax).clamp_(max=2.0**126).masked_fill_(bits == 0, 1.0)
        if self.scaling == "block":
            factors = factors.clamp_(min=2.0**-119).view(torch.int32).bitwise_and_(FLOAT32_EXPONENT).view(torch.float32)
        scales = factors.reciprocal()
        is_lost = bits >= FLOAT32_EXPONENT
        return factors.masked_fill_(is_lost, 0.0), scales.masked_fill_(is_lost, math.nan)


@dataclass(frozen=True)
class Mxfp8Format:
    """OCP Microscaling 1.0, MXFP8 with E4M3: blocks of 32 elements of a row, with a power of two each (E8M0).

    - "floor", the specification's: 2 ** (floor(log2(amax)) - 8). What is above 1.75 of amax's power saturates.
    - "ceil": the smallest power for which nothing saturates, at most 2**119, of which the largest element is finite.

    Powers begin at 2**-127, which blocks of zeros have, too. NaN is 0xFF.

    Attributes:
        scale_rounding: "floor" or "ceil".
        rounding: of elements, "nearest" or "stochastic".
        seed: of stochastic rounding, in [0, 2**64).
    """

    scale_rounding: str = "floor"
    rounding: str = "nearest"
    seed: int = 0

    name = "MXFP8 (E4M3)"
    elements_per_byte = 1
    scale_bytes = 1
    alignment = _MX_BLOCK
    needs_amax = False

    def __post_init__(self) -> None:
        check_choice("MXFP8 scale rounding", self.scale_rounding, _MX_ROUNDINGS)
        check_rounding(self.rounding, self.seed)

    def geometry(self, shape: Sequence[int]) -> BlockGeometry:
        """Return how blocks lie: an atom is a block where no row ends within one, else a row."""
        return _geometry_of_runs(shape, _MX_BLOCK)

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
        check_planes(self, values, shape, payload, scales, amax)
        grid = self._grid(shape, values.numel())
        kernels, source = self._kernels(grid, values), _noise_of(self, start)
        if kernels is not None:
            scaling = {"scale_bits": self.scale_rounding, "factors": None, "amax": None, "scales": scales}
            kernels.quantize(grid, values, element=E4M3, source=source, payload=payload, **scaling)
            return
        bits = grid.amax_bits(values)
        is_lost = bits >= FLOAT32_EXPONENT
        # The exponent's field is that of the power. A mantissa above 1.75, 448's, carries where nothing may saturate.
        carry = 0 if self.scale_rounding == "floor" else (1 << 21) - 1
        codes = ((bits + carry) >> 23).sub_(8).clamp_(0, 246)
        factors = ((254 - codes) << 23).masked_fill_(is_lost, 0).view(torch.float32)
        scales.copy_(codes.masked_fill_(is_lost, 255).view(-1))
        encode_blocks(grid, values, scale=torch.mul, factors=factors, element=E4M3, codes=payload, source=source)

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
        check_planes(self, out, shape, payload, scales, amax)
        grid = self._grid(shape, out.numel())
        kernels = self._kernels(grid, out)
        if kernels is not None:
            kernels.dequantize(grid, payload, element=E4M3, scales=scales, scale_bits="e8m0", amax=None, out=out)
            return
        plane = decode_powers(scales).view(grid.num_blocks)
        decode_blocks(grid, payload, element=E4M3, plane=plane, out=out)

    def _grid(self, shape: Sequence[int], numel: int) -> Grid:
        return _grid_of_runs(shape, numel, _MX_BLOCK)

    def _kernels(self, grid: Grid, tensor: torch.Tensor) -> Kernels | None:
        """Return the kernels for blocks of a row; they know no others."""
        return kernels_for(tensor) if grid.block_rows == 1 else None


@dataclass(frozen=True)
class Nvfp4Format:
    """NVFP4: E2M1 elements in pairs, an E4M3 scale for each 16 elements of a row, and a scale for the tensor.

    The tensor's scale is t = amax / 2688, at least 2**-126; 2688 is 6 * 448, so that the largest block has the largest
    scale. A block's scale is b = amax of the block / 6 / t, rounded to the nearest E4M3, saturated, and at least 2**-9
    if the block has something else than zeros. Elements are round(value / (b * t)), of a block of zeros zeros. NaN is
    0x7F. Decoding multiplies the element by (b * t).

    A payload of an odd number of elements ends with a zero.

    Attributes:
        rounding: of elements, "nearest" or "stochastic"; scales are always rounded to nearest.
        seed: of stochastic rounding, in [0, 2**64).
    """

    rounding: str = "nearest"
    seed: int = 0

    name = "NVFP4"
    elements_per_byte = 2
    scale_bytes = 1
    alignment = _NV_BLOCK
    needs_amax = True

    def __post_init__(self) -> None:
        check_rounding(self.rounding, self.seed)

    def geometry(self, shape: Sequence[int]) -> BlockGeometry:
        """Return how blocks lie: an atom is a block where no row ends within one, else a row.

        Rows may have an odd number of elements, and a run that begins with one of them begins a byte.
        """
        return _geometry_of_runs(shape, _NV_BLOCK)

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
        amax = check_planes(self, values, shape, payload, scales, amax)
        assert amax is not None
        grid = _grid_of_runs(shape, values.numel(), _NV_BLOCK)
        kernels, source = kernels_for(values), _noise_of(self, start)
        if kernels is not None:
            scaling = {"scale_bits": "e4m3", "factors": None, "amax": amax, "scales": scales}
            kernels.quantize(grid, values, element=E2M1, source=source, payload=payload, **scaling)
            return
        bits = grid.amax_bits(values)
        tensor_bits = _bits_of(amax)
        tensor_scale = self._tensor_scale(tensor_bits)
        wanted = bits.view(torch.float32) / _constant(E2M1.largest, tensor_scale) / tensor_scale
        plane = scales.view(grid.num_blocks)
        E4M3.encode(wanted.clamp_(min=2.0**-9).masked_fill_(bits == 0, 0.0), plane)
        is_lost = torch.maximum(bits, tensor_bits) >= FLOAT32_EXPONENT
        plane.masked_fill_(is_lost, _NAN_E4M3)
        # Zeros divided by one, and what is lost by infinity: zeros.
        divisors = (E4M3.decode(plane) * tensor_scale).masked_fill_(bits == 0, 1.0).masked_fill_(is_lost, math.inf)
        elements = payload.new_zeros(2 * payload.numel())
        codes = elements[: values.numel()]
        encode_blocks(grid, values, scale=torch.div, factors=divisors, element=E2M1, codes=codes, source=source)
        pack_nibbles(elements, payload)

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
        amax = check_planes(self, out, shape, payload, scales, amax)
        assert amax is not None
        grid = _grid_of_runs(shape, out.numel(), _NV_BLOCK)
        kernels = kernels_for(out)
        if kernels is not None:
            kernels.dequantize(grid, payload, element=E2M1, scales=scales, scale_bits="e4m3", amax=amax, out=out)
            return
        plane = E4M3.decode(scales.view(grid.num_blocks)) * self._tensor_scale(_bits_of(amax))
        decode_blocks(grid, unpack_nibbles(payload)[: out.numel()], element=E2M1, plane=plane, out=out)

    def _tensor_scale(self, bits: torch.Tensor) -> torch.Tensor:
        amax = bits.view(torch.float32)
        return amax.div(_constant(E2M1.largest * E4M3.largest, amax)).clamp_(min=2.0**-126)


_Format = Fp8Format | Mxfp8Format | Nvfp4Format


def _geometry_of_runs(shape: Sequence[int], block: int) -> BlockGeometry:
    """Return how blocks of `block` elements of a row lie; the end of a single row is the end of the tensor."""
    rows, columns = as_matrix(shape)
    per_row = -(-columns // block)
    if rows == 1 or (columns and columns % block == 0):
        return BlockGeometry(block, 1, rows * per_row)
    return BlockGeometry(max(1, columns), per_row, rows * per_row)


def _grid_of_runs(shape: Sequence[int], numel: int, block: int) -> Grid:
    """Return these blocks of a run of whole atoms: where atoms are blocks, all of it can be seen as one row."""
    rows, columns = as_matrix(shape)
    if rows == 1 or columns % block == 0:
        return Grid(1, numel, 1, block)
    return Grid(numel // columns, columns, 1, block)


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return a number on a tensor's device, which division by it takes as it is ([Note: bits])."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _bits_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's amax, int32, [1, 1]."""
    return amax.view(1, 1).view(torch.int32).bitwise_and(0x7FFFFFFF)


def _noise_of(number_format: _Format, start: int) -> Noise | None:
    return None if number_format.rounding == "nearest" else Noise(number_format.seed, start)
