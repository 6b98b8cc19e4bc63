# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The kernels of `matrix_arithmetic.py` by Triton, which is not needed to import anything else.

Products that are added are rounded before, as torch's kernels for CUDA do here; quotients are rounded as hosts do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_NUMEL = 4096
_NUM_WARPS = 8


def normalize(matrix: torch.Tensor, norm: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write matrices divided by their norms, on the current stream.

    Args:
        matrix: [rows, columns] or [count, rows, columns], contiguous.
        norm: as many elements as matrices, float32.
        out: the same shape, any floating-point dtype; overwritten.
    """
    numel = matrix.numel()
    _normalize[(triton.cdiv(numel, _TILE_NUMEL),)](
        matrix, norm, out, numel, numel // norm.numel(), TILE_NUMEL=_TILE_NUMEL, num_warps=_NUM_WARPS
    )


def subtract(weight: torch.Tensor, update: torch.Tensor, factor: torch.Tensor, decay: torch.Tensor | None) -> None:
    """Decay a weight and subtract an update times a factor, in place, on the current stream.

    Args:
        weight: contiguous, any floating-point dtype.
        update: the same shape, any floating-point dtype.
        factor: 0-d float32.
        decay: 0-d float32, or None for no decay.
    """
    numel = weight.numel()
    _subtract[(triton.cdiv(numel, _TILE_NUMEL),)](
        weight,
        update,
        factor,
        factor if decay is None else decay,
        numel,
        HAS_DECAY=decay is not None,
        TILE_NUMEL=_TILE_NUMEL,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit
def _normalize(
    matrix: tl.tensor, norm: tl.tensor, out: tl.tensor, numel: int, matrix_numel: int, TILE_NUMEL: tl.constexpr
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * TILE_NUMEL + tl.arange(0, TILE_NUMEL)
    inside = offsets < numel
    values = tl.load(matrix + offsets, mask=inside, other=0.0).to(tl.float32)
    divisors = tl.load(norm + offsets // matrix_numel, mask=inside, other=1.0)
    tl.store(out + offsets, tl.div_rn(values, divisors).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _subtract(
    weight: tl.tensor,
    update: tl.tensor,
    factor: tl.tensor,
    decay: tl.tensor,
    numel: int,
    HAS_DECAY: tl.constexpr,
    TILE_NUMEL: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * TILE_NUMEL + tl.arange(0, TILE_NUMEL)
    inside = offsets < numel
    values = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_DECAY:
        values = values * tl.load(decay)
    values -= tl.load(update + offsets, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(weight + offsets, values.to(weight.dtype.element_ty), mask=inside)
