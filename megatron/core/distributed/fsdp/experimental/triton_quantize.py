# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Weights encoded in low-bit formats in one kernel by Triton, which is not needed to import anything else.

The bits are those of plain torch, by the same steps: see [Note: bits] and [Note: values of formats]. Where a sum
follows a product, the product is exact, so that it does not matter whether a compiler fuses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .block_views import Grid, Noise
from .float_bits import ElementBits, pack_nibbles
from .triton_dequantize import e4m3_values, nvfp4_scale

_TILE_NUMEL = 4096
_NUM_WARPS = 8
_LARGEST_GROUP = 128


def amax_bits(grid: Grid, values: torch.Tensor) -> torch.Tensor:
    """Return what `Grid.amax_bits` does, for blocks of [1, columns] or of sizes that are powers of two."""
    largest = torch.zeros(grid.num_blocks, dtype=torch.int32, device=values.device)
    if values.numel() == 0:
        return largest
    tiles = _tiles(grid)
    _amax_bits[(tiles.number,)](
        values,
        largest,
        grid.rows,
        grid.columns,
        grid.num_blocks[1],
        BLOCK_ROWS=grid.block_rows,
        BLOCK_COLUMNS=tiles.block_columns,
        TILE_ROWS=tiles.rows,
        TILE_COLUMNS=tiles.columns,
        GROUP=tiles.group,
        num_warps=_NUM_WARPS,
    )
    return largest


def quantize(
    grid: Grid,
    values: torch.Tensor,
    *,
    element: ElementBits,
    scale_bits: str,
    factors: torch.Tensor | None,
    amax: torch.Tensor | None,
    source: Noise | None,
    scales: torch.Tensor,
    payload: torch.Tensor,
) -> None:
    """Scale values by their blocks' factors and round them, on the current stream.

    Args:
        grid: the blocks; of one row where the kernel finds their scales.
        values: [n], float32 or a narrower floating-point dtype.
        element: what to round to; of four bits two a byte.
        scale_bits: "factors" if these are given, or how the kernel finds scales: "floor" or "ceil", E8M0 of MXFP8, or
            "e4m3", NVFP4's.
        factors: [blocks down, blocks across], float32, what values are multiplied by; None unless they are given.
        amax: 0-d float32, of the whole tensor; None but for "e4m3".
        source: for stochastic rounding; None for rounding to nearest.
        scales: [blocks], uint8; overwritten where the kernel finds them.
        payload: [bytes], uint8; overwritten.
    """
    if values.numel() == 0:
        return
    is_nibble = element.exponent_bits + element.mantissa_bits < 7
    # Where rows of an odd number of elements follow each other, a byte may belong to two of them.
    is_packed = is_nibble and (grid.rows == 1 or grid.columns % 2 == 0)
    codes = payload if is_packed or not is_nibble else payload.new_zeros(2 * payload.numel())
    tiles = _tiles(grid)
    seed = 0 if source is None else source.seed
    _quantize[(tiles.number,)](
        values,
        values if factors is None else factors,
        values if amax is None else amax,
        scales,
        codes,
        grid.rows,
        grid.columns,
        -(-grid.columns // 2),
        grid.num_blocks[1],
        0 if source is None else source.start,
        _as_signed(seed & 0xFFFFFFFF),
        _as_signed(seed >> 32),
        SCALE_BITS=scale_bits,
        IS_NIBBLE=is_nibble,
        IS_PACKED=is_packed,
        IS_STOCHASTIC=source is not None,
        BLOCK_ROWS=grid.block_rows,
        BLOCK_COLUMNS=tiles.block_columns,
        TILE_ROWS=tiles.rows,
        TILE_COLUMNS=tiles.columns,
        GROUP=tiles.group,
        num_warps=_NUM_WARPS,
    )
    if codes is not payload:
        pack_nibbles(codes, payload)


@dataclass(frozen=True)
class _Tiles:
    """What one program works on: [rows, columns] elements, in groups that lie in one block each.

    Attributes:
        number: of tiles.
        rows: of one tile.
        columns: of one tile, whole groups.
        group: elements of a row; a whole block where the kernel finds scales, 128 or 16 in rows of any length.
        block_columns: zero where a block is as wide as the matrix.
    """

    number: int
    rows: int
    columns: int
    group: int
    block_columns: int


def _tiles(grid: Grid) -> _Tiles:
    is_power = grid.block_columns & (grid.block_columns - 1) == 0 and 16 <= grid.block_columns <= _LARGEST_GROUP
    group = grid.block_columns if is_power else 16
    columns = min(_TILE_NUMEL, max(triton.next_power_of_2(grid.columns), group))
    rows = min(_TILE_NUMEL // columns, triton.next_power_of_2(grid.rows))
    number = int(triton.cdiv(grid.rows, rows) * triton.cdiv(grid.columns, columns))
    return _Tiles(number, rows, columns, group, grid.block_columns if is_power else 0)


def _as_signed(word: int) -> int:
    """Return a word of 32 bits as Triton takes it whatever its value: as int32."""
    return word - (1 << 32) if word >> 31 else word


@triton.jit
def _amax_bits(
    values: tl.tensor,
    largest: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    blocks_across: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Take the largest magnitudes of one tile into account, whose rows are groups within blocks."""
    tile = tl.program_id(0).to(tl.int64)
    tiles_across = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    row = tile // tiles_across * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None, None]
    first = tile % tiles_across * TILE_COLUMNS
    group = tl.arange(0, TILE_COLUMNS // GROUP)[None, :, None] * GROUP
    column = first + group + tl.arange(0, GROUP)[None, None, :]
    numbers = tl.load(values + row * columns + column, mask=(row < rows) & (column < columns), other=0.0)
    bits = tl.max(numbers.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2, keep_dims=True)
    block = row // BLOCK_ROWS * blocks_across
    if BLOCK_COLUMNS > 0:
        block += first // BLOCK_COLUMNS + group // BLOCK_COLUMNS
        tl.atomic_max(largest + block, bits, mask=(row < rows) & (first + group < columns))
    else:
        tl.atomic_max(largest + block, tl.max(bits, axis=1, keep_dims=True), mask=row < rows)


@triton.jit
def _noise(index: tl.tensor, numbers: tl.tensor, seed_low: tl.tensor, seed_high: tl.tensor) -> tl.tensor:
    """Return the words of `float_bits.noise`, uint32."""
    words = _mixed(index.to(tl.uint32) ^ seed_low)
    words = words ^ (index >> 32).to(tl.uint32) ^ numbers.to(tl.uint32, bitcast=True)
    return _mixed(words ^ seed_high)


@triton.jit
def _mixed(words: tl.tensor) -> tl.tensor:
    words = words ^ (words >> 15)
    words = words * 0x2C1B3C6D
    words = words ^ (words >> 12)
    words = words * 0x297A2D39
    return words ^ (words >> 15)


@triton.jit
def _codes(
    scaled: tl.tensor,
    noise: tl.tensor,
    IS_STOCHASTIC: tl.constexpr,
    IS_NIBBLE: tl.constexpr,
) -> tl.tensor:
    """Return the elements that scaled values are rounded to, int32, as `ElementBits.encode` does: E2M1 or E4M3."""
    MANTISSA: tl.constexpr = 1 if IS_NIBBLE else 3
    LOWEST: tl.constexpr = 127 if IS_NIBBLE else 121
    LARGEST: tl.constexpr = 6.0 if IS_NIBBLE else 448.0
    SIGN_BIT: tl.constexpr = 3 if IS_NIBBLE else 7
    bits = tl.where(scaled == scaled, scaled, 0.0).to(tl.int32, bitcast=True)
    magnitudes = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    powers = tl.maximum(magnitudes.to(tl.int32, bitcast=True) & 0x7F800000, LOWEST << 23)
    if IS_STOCHASTIC:
        inverse = ((254 << 23) - powers + (MANTISSA << 23)).to(tl.float32, bitcast=True)
        DROPPED: tl.constexpr = 23 - MANTISSA
        fractions = (noise >> (32 - DROPPED)).to(tl.float32) * (1.0 / (1 << DROPPED))
        steps = (magnitudes * inverse + fractions).to(tl.int32)
    else:
        large = powers + ((23 - MANTISSA) << 23)
        steps = (magnitudes + large.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - large
    sign = (bits >> 31) & 1
    return (steps + (powers >> (23 - MANTISSA)) - (LOWEST << MANTISSA)) | (sign << SIGN_BIT)


@triton.jit
def _mxfp8_scale(bits: tl.tensor, IS_CEIL: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return E8M0 scales, int32, and what values are multiplied by, of the bits of amax."""
    carry = (1 << 21) - 1 if IS_CEIL else 0
    is_lost = bits >= 0x7F800000
    codes = tl.minimum(tl.maximum(((bits + carry) >> 23) - 8, 0), 246)
    factors = tl.where(is_lost, 0, (254 - codes) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_lost, 255, codes), factors


@triton.jit
def _nvfp4_block_scale(bits: tl.tensor, amax: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return E4M3 scales, int32, and what values are divided by, of the bits of a block's amax."""
    tensor_scale = nvfp4_scale(amax)
    wanted = tl.div_rn(tl.div_rn(bits.to(tl.float32, bitcast=True), 6.0), tensor_scale)
    codes = _codes(tl.maximum(wanted, 0.001953125), wanted, False, False)
    is_lost = tl.maximum(bits, amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    codes = tl.where(is_lost, 0x7F, tl.where(bits == 0, 0, codes))
    divisors = tl.where(bits == 0, 1.0, e4m3_values(codes.to(tl.uint8)) * tensor_scale)
    return codes, tl.where(is_lost, float("inf"), divisors)


@triton.jit(do_not_specialize=["start", "seed_low", "seed_high"])
def _quantize(
    values: tl.tensor,
    factors: tl.tensor,
    amax: tl.tensor,
    scales: tl.tensor,
    payload: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    bytes_across: tl.tensor,
    blocks_across: tl.tensor,
    start: tl.tensor,
    seed_low: tl.tensor,
    seed_high: tl.tensor,
    SCALE_BITS: tl.constexpr,
    IS_NIBBLE: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Encode one tile of [TILE_ROWS, TILE_COLUMNS] elements, in groups that are blocks where scales are found here."""
    tile = tl.program_id(0).to(tl.int64)
    tiles_across = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    row = tile // tiles_across * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None, None]
    first = tile % tiles_across * TILE_COLUMNS
    group = tl.arange(0, TILE_COLUMNS // GROUP)[None, :, None] * GROUP
    column = first + group + tl.arange(0, GROUP)[None, None, :]
    index = row * columns + column
    is_inside = (row < rows) & (column < columns)
    numbers = tl.load(values + index, mask=is_inside, other=0.0).to(tl.float32)

    block = row // BLOCK_ROWS * blocks_across
    if BLOCK_COLUMNS > 0:
        block += first // BLOCK_COLUMNS + group // BLOCK_COLUMNS
    has_block = (row < rows) & (first + group < columns)
    if SCALE_BITS == "factors":
        scaled = numbers * tl.load(factors + block, mask=has_block, other=0.0)
    else:
        bits = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2, keep_dims=True)
        if SCALE_BITS == "e4m3":
            codes, divisors = _nvfp4_block_scale(bits, tl.load(amax))
            scaled = tl.div_rn(numbers, tl.broadcast_to(divisors, numbers.shape))
        else:
            codes, multipliers = _mxfp8_scale(bits, SCALE_BITS == "ceil")
            scaled = numbers * multipliers
        tl.store(scales + block, codes.to(tl.uint8), mask=has_block)

    noise = _noise(start + index, numbers, seed_low, seed_high) if IS_STOCHASTIC else index
    elements = _codes(scaled, noise, IS_STOCHASTIC, IS_NIBBLE).to(tl.uint8)
    if IS_PACKED:
        low, high = tl.split(tl.reshape(elements, [TILE_ROWS, TILE_COLUMNS // GROUP, GROUP // 2, 2]))
        elements = low | (high << 4)
        byte = first // 2 + group // 2 + tl.arange(0, GROUP // 2)[None, None, :]
        index = row * bytes_across + byte
        is_inside = (row < rows) & (byte < bytes_across)
    tl.store(payload + index, elements, mask=is_inside)
