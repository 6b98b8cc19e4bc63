# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The number formats once more, in numpy, straight from their definitions; elements and scales are those of ml_dtypes.

Nothing of the runtime is used here. A block is a 1-D array of float32; a tensor is a 2-D one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
FLOAT = np.float32
LARGEST = np.finfo(FLOAT).max


@dataclass
class Block:
    """What becomes of one block: a byte for each element, its scale's bytes, its values."""

    elements: np.ndarray
    scale: bytes
    values: np.ndarray


def _signed_zeros(block: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(block), np.copysign(FLOAT(0), block), FLOAT(0))


def _lost(block: np.ndarray, element: np.dtype, scale: bytes) -> Block:
    elements = _signed_zeros(block).astype(element).view(np.uint8)
    return Block(elements, scale, np.full(block.shape, np.nan, FLOAT))


def _rounded(scaled: np.ndarray, element: np.dtype, largest: float) -> np.ndarray:
    return np.clip(scaled, FLOAT(-largest), FLOAT(largest)).astype(element)


def fp8_block(block: np.ndarray, amax: np.floating, *, is_power: bool) -> Block:
    """Return a block whose scale follows from `amax`, its own or its tensor's."""
    if not np.isfinite(amax):
        return _lost(block, E4M3, FLOAT(np.nan).tobytes())
    factor = FLOAT(1) if amax == 0 else min(FLOAT(448) / FLOAT(amax), FLOAT(2.0**126))
    if is_power:
        # frexp: factor = m * 2**e with m in [0.5, 1).
        factor = FLOAT(max(math.ldexp(1.0, math.frexp(factor)[1] - 1), 2.0**-119))
    scale = FLOAT(1) / factor
    elements = _rounded(block * factor, E4M3, 448)
    return Block(elements.view(np.uint8), scale.tobytes(), elements.astype(FLOAT) * scale)


def mxfp8_block(block: np.ndarray, *, is_ceil: bool) -> Block:
    amax = float(np.abs(block).max())
    if not np.isfinite(amax):
        return _lost(block, E4M3, b"\xff")
    mantissa, exponent = math.frexp(amax)
    if amax == 0:
        power = -127
    elif is_ceil:
        # 448 = 0.875 * 2**9
        power = exponent - 9 + (mantissa > 0.875)
        assert amax <= 448 * 2.0**power and amax > 448 * 2.0 ** (power - 1)
    else:
        power = exponent - 1 - 8
    power = min(max(power, -127), 119)
    scale = np.array([2.0**power]).astype(E8M0)
    elements = _rounded((block.astype(np.float64) / 2.0**power).astype(FLOAT), E4M3, 448)
    return Block(elements.view(np.uint8), scale.tobytes(), elements.astype(FLOAT) * scale.astype(FLOAT))


def nvfp4_block(block: np.ndarray, amax: np.floating) -> Block:
    """Return a block of a tensor of this `amax`; its scale's bytes are without the tensor's scale."""
    largest = np.abs(block).max()
    if not (np.isfinite(amax) and np.isfinite(largest)):
        return _lost(block, E2M1, b"\x7f")
    tensor_scale = max(FLOAT(amax) / FLOAT(2688), FLOAT(2.0**-126))
    if largest == 0:
        return Block(_signed_zeros(block).astype(E2M1).view(np.uint8), b"\x00", _signed_zeros(block))
    scale = np.array([np.clip(largest / FLOAT(6) / tensor_scale, FLOAT(2.0**-9), FLOAT(448))]).astype(E4M3)
    product = scale.astype(FLOAT) * tensor_scale
    elements = _rounded(block / product, E2M1, 6)
    return Block(elements.view(np.uint8), scale.tobytes(), elements.astype(FLOAT) * product)


def runs_of_rows(matrix: np.ndarray, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield where the blocks of `length` elements of a row lie, in row-major order."""
    for row in range(matrix.shape[0]):
        for start in range(0, matrix.shape[1], length):
            yield slice(row, row + 1), slice(start, start + length)


def squares(matrix: np.ndarray, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield where the square blocks lie."""
    for row in range(0, matrix.shape[0], size):
        for start in range(0, matrix.shape[1], size):
            yield slice(row, row + size), slice(start, start + size)


def tensor_of(kind: str, matrix: np.ndarray) -> tuple[bytes, bytes, np.ndarray]:
    """Quantize a tensor, [rows, columns]; return its payload, its scales and its values.

    Args:
        kind: "tensor", "row" or "block" for FP8, "floor" or "ceil" for MXFP8, "nvfp4".
        matrix: float32.
    """
    elements = np.zeros(matrix.shape, np.uint8)
    values = np.zeros(matrix.shape, FLOAT)
    amax = np.abs(matrix).max() if matrix.size else FLOAT(0)
    if kind == "tensor":
        where = iter([(slice(None), slice(None))] if matrix.size else [])
    elif kind == "block":
        where = squares(matrix, 128)
    else:
        where = runs_of_rows(matrix, {"row": max(1, matrix.shape[1]), "nvfp4": 16}.get(kind, 32))
    scales = b""
    for rows, columns in where:
        part = matrix[rows, columns]
        if kind in ("tensor", "row", "block"):
            block = fp8_block(part, amax if kind == "tensor" else np.abs(part).max(), is_power=kind == "block")
        elif kind == "nvfp4":
            block = nvfp4_block(part, amax)
        else:
            block = mxfp8_block(part, is_ceil=kind == "ceil")
        elements[rows, columns] = block.elements
        values[rows, columns] = block.values
        scales += block.scale
    flat = elements.reshape(-1)
    if kind == "nvfp4":
        flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
        flat = flat[0::2] | flat[1::2] << 4
    return flat.tobytes(), b"" if kind == "tensor" else scales, values


def elements_of(dtype: np.dtype) -> np.ndarray:
    """Return the finite values of an element dtype, float32, smallest first, zero once."""
    codes = np.arange(256 if dtype == E4M3 else 16, dtype=np.uint8).view(dtype).astype(FLOAT)
    return np.unique(codes[np.isfinite(codes)])
