# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Low-bit weights decoded in one kernel by Triton, which is not needed to import anything else.

The bits are those of `block_views.decode_blocks`, by the same steps: see [Note: bits] and [Note: values of formats].

The kernel has no sum, so that no compiler can fuse a product into one, and divides by `tl.div_rn`, which rounds as
hosts do where `/` does not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .block_views import Grid
from .float_bits import ElementBits

_TILE_NUMEL = 4096
"""Elements of one program: 16 for each of 256 threads, so that what a thread reads and writes are whole words."""

_NUM_WARPS = 8


def dequantize(
    grid: Grid,
    payload: torch.Tensor,
    *,
    element: ElementBits,
    scales: torch.Tensor,
    scale_bits: str,
    amax: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply elements by the scales of their blocks, on the current stream.

    Args:
        grid: the blocks of the elements; of [block_rows, columns] or of sizes that are powers of two.
        payload: [bytes], uint8.
        element: what they are; two a byte if they have four bits.
        scales: [blocks * bytes of one], uint8; looked at only where `scale_bits` says so.
        scale_bits: "float32", "e8m0" or "e4m3"; "amax" for one FP8 scale that follows from amax.
        amax: 0-d float32, of the whole tensor; "e4m3" scales are relative to it.
        out: [n], bfloat16, float16 or float32; overwritten.
    """
    if out.numel() == 0:
        return
    is_whole_row = grid.block_columns >= grid.columns
    block_columns = 0 if is_whole_row else grid.block_columns
    tile_columns = min(_TILE_NUMEL, max(triton.next_power_of_2(grid.columns), block_columns, 16))
    tile_rows = min(_TILE_NUMEL // tile_columns, triton.next_power_of_2(grid.rows))
    num_tiles = triton.cdiv(grid.rows, tile_rows) * triton.cdiv(grid.columns, tile_columns)
    is_nibble = element.exponent_bits + element.mantissa_bits < 7
    # Where rows of an odd number of elements follow each other, a byte may belong to two of them.
    is_pair = is_nibble and (grid.rows == 1 or grid.columns % 2 == 0)
    _dequantize[(num_tiles,)](
        payload,
        scales.view(torch.float32) if scale_bits == "float32" else scales,
        payload if amax is None else amax,
        out,
        grid.rows,
        grid.columns,
        -(-grid.columns // 2) if is_pair else grid.columns,
        grid.num_blocks[1],
        SCALE_BITS=scale_bits,
        IS_NIBBLE=is_nibble,
        IS_PAIR=is_pair,
        BLOCK_ROWS=grid.block_rows,
        BLOCK_COLUMNS=block_columns,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        num_warps=_NUM_WARPS,
    )


@triton.jit
def e4m3_values(codes: tl.tensor) -> tl.tensor:
    """Return the values of E4M3 bytes, uint8, as `ElementBits.decode` does."""
    bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4080
    bits = bits | ((bits + 0x80) & 0x4000)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e2m1_values(codes: tl.tensor) -> tl.tensor:
    """Return the values of E2M1 elements in the high bits of bytes, uint8."""
    bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 5) & -0x7200
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _e8m0(codes: tl.tensor) -> tl.tensor:
    """Return the powers of two that bytes are, uint8, as `decode_powers` does."""
    bits = tl.maximum(codes.to(tl.int32) << 23, 0x400000)
    return tl.where(codes == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_scale(amax: tl.tensor) -> tl.tensor:
    """Return the scale of a tensor in FP8, as `Fp8Format` says."""
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = bits.to(tl.float32, bitcast=True)
    # Zeros have the factor 448 / 448.
    factor = tl.minimum(tl.div_rn(448.0, tl.where(bits == 0, 448.0, magnitude)), 8.507059173023462e37)
    return tl.where(bits >= 0x7F800000, float("nan"), tl.div_rn(1.0, factor))


@triton.jit
def nvfp4_scale(amax: tl.tensor) -> tl.tensor:
    """Return the scale of a tensor in NVFP4, as `Nvfp4Format` says; of what is not finite all blocks are NaN."""
    magnitude = (amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return tl.maximum(tl.div_rn(magnitude, 2688.0), 1.1754943508222875e-38)


@triton.jit
def _scale(bits: tl.tensor, amax: tl.tensor, SCALE_BITS: tl.constexpr) -> tl.tensor:
    """Return the scales that blocks are multiplied by; `amax` is where the tensor's lies."""
    if SCALE_BITS == "e8m0":
        return _e8m0(bits)
    elif SCALE_BITS == "e4m3":
        return e4m3_values(bits) * nvfp4_scale(tl.load(amax))
    else:
        return bits


@triton.jit
def _dequantize(
    payload: tl.tensor,
    scales: tl.tensor,
    amax: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    items_across: tl.tensor,
    blocks_across: tl.tensor,
    SCALE_BITS: tl.constexpr,
    IS_NIBBLE: tl.constexpr,
    IS_PAIR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Decode one tile of [TILE_ROWS, TILE_COLUMNS] elements, as groups of 16, of which a thread loads one scale.

    An item is a byte, of one element or of a pair; but for single elements of four bits, half a byte.
    BLOCK_COLUMNS is zero where a block is as wide as the matrix.
    """
    PER_ITEM: tl.constexpr = 2 if IS_PAIR else 1
    GROUP: tl.constexpr = 16 // PER_ITEM
    TILE_ITEMS: tl.constexpr = TILE_COLUMNS // PER_ITEM
    tile = tl.program_id(0).to(tl.int64)
    tiles_across = (items_across + TILE_ITEMS - 1) // TILE_ITEMS
    row = tile // tiles_across * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None, None]
    first_item = tile % tiles_across * TILE_ITEMS
    group = tl.arange(0, TILE_ITEMS // GROUP)[None, :, None] * GROUP
    item = tl.arange(0, GROUP)[None, None, :]
    index = row * items_across + first_item + group + item
    is_inside = (row < rows) & (first_item + group + item < items_across)
    if IS_NIBBLE and not IS_PAIR:
        codes = tl.load(payload + (index >> 1), mask=is_inside, other=0)
    else:
        codes = tl.load(payload + index, mask=is_inside, other=0)

    if SCALE_BITS == "amax":
        scale = _fp8_scale(tl.load(amax))
    else:
        block = row // BLOCK_ROWS * blocks_across
        if BLOCK_COLUMNS > 0:
            block += first_item // (BLOCK_COLUMNS // PER_ITEM) + group // (BLOCK_COLUMNS // PER_ITEM)
        has_scale = (row < rows) & (first_item + group < items_across)
        scale = _scale(tl.load(scales + block, mask=has_scale, other=0), amax, SCALE_BITS)

    if IS_PAIR:
        values = tl.join(_e2m1_values(codes << 4) * scale, _e2m1_values(codes & 0xF0) * scale)
        values = tl.reshape(values, [TILE_ROWS, TILE_COLUMNS // 16, 16])
        column = (first_item + group) * 2 + tl.arange(0, 16)[None, None, :]
        index = row * columns + column
        is_inside = (row < rows) & (column < columns)
    elif IS_NIBBLE:
        values = _e2m1_values(tl.where((index & 1) == 0, codes << 4, codes & 0xF0)) * scale
    else:
        values = e4m3_values(codes) * scale
    tl.store(out + index, values.to(out.dtype.element_ty), mask=is_inside)
