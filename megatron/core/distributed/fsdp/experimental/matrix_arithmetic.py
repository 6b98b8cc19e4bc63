# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Element-wise parts of a matrix rule's step that are bound by memory: in one pass by Triton, or in plain torch.

Both have the same bits on one device. Triton is used on CUDA where it is installed, and imported nowhere else.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MatrixKernels:
    """What can be done in one kernel; see `triton_matrix.py`.

    Attributes:
        normalize: divide and round.
        subtract: decay, multiply and subtract.
    """

    normalize: Callable[..., None]
    subtract: Callable[..., None]


def kernels_for(tensor: torch.Tensor) -> MatrixKernels | None:
    """Return the kernels that can work on a tensor; None where plain torch has to."""
    return _kernels() if tensor.is_cuda else None


@functools.cache
def _kernels() -> MatrixKernels | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from .triton_matrix import normalize, subtract

    return MatrixKernels(normalize, subtract)


def normalized(matrix: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return matrices divided by their norms, in float32, rounded once.

    Args:
        matrix: [rows, columns] or [count, rows, columns], contiguous.
        norm: [1, 1] or [count, 1, 1], float32.
        dtype: of the result.
    """
    result = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    kernels = kernels_for(matrix)
    if kernels is None:
        return torch.div(matrix, norm, out=result)
    kernels.normalize(matrix, norm, out=result)
    return result


def subtract_updates(
    weights: Sequence[torch.Tensor],
    updates: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    decay: torch.Tensor | None,
) -> None:
    """Multiply weights by what decay leaves of them and subtract updates times their factors; computed in float32.

    Args:
        weights: contiguous, changed in place.
        updates: of the same shapes, any floating-point dtype.
        factors: 0-d float32, one for each.
        decay: 0-d float32; None for no decay.
    """
    kernels = kernels_for(weights[0])
    if kernels is not None:
        for weight, update, factor in zip(weights, updates, factors, strict=True):
            kernels.subtract(weight, update, factor, decay)
        return
    wide = [weight if weight.dtype is torch.float32 else weight.float() for weight in weights]
    if decay is not None:
        torch._foreach_mul_(wide, decay)
    for target, update, factor, weight in zip(wide, updates, factors, weights, strict=True):
        target.addcmul_(update.float(), factor, value=-1)
        if target is not weight:
            weight.copy_(target)
