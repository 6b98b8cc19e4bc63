# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The Newton-Schulz iteration: approximates the orthogonal matrix next to a given one by matrix products alone.

It knows no optimizer and no rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, cycle, islice, repeat
from typing import Any

import torch

from .matrix_arithmetic import normalized

Coefficients = tuple[tuple[float, float, float], ...]

COEFFICIENTS: dict[str, Coefficients] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""Coefficients (a, b, c) of steps ``X <- a X + (b A + c A A) X`` with ``A = X X^T``, by megatron-core's names.

"simple" is that of Jordan's Muon (https://kellerjordan.github.io/posts/muon), "quintic" tuned for five steps
(https://leloykun.github.io/ponder/muon-opt-coeffs), "polar_express" from arXiv:2505.16932, divided by 1.01 to the power
of each degree. The last one is repeated where there are more steps; the others begin anew.
"""

PRECISIONS = ("medium", "high", "highest")
"""How products are computed: in bfloat16, in TF32 where the device has it, in float32."""

EPSILON = 1e-7
"""Least norm that a matrix is divided by."""


def newton_schulz(
    matrix: torch.Tensor, num_steps: int = 5, coefficients: str = "quintic", precision: str = "medium"
) -> torch.Tensor:
    """Return a matrix with about the same singular vectors and singular values near 1.

    Args:
        matrix: [rows, columns] or [count, rows, columns]; a floating-point dtype.
        num_steps: of the iteration.
        coefficients: one of `COEFFICIENTS`.
        precision: one of `PRECISIONS`.

    Returns:
        The same shape; bfloat16 with precision "medium", else float32.
    """
    if matrix.dtype is torch.float64:
        matrix = matrix.float()
    norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True, dtype=torch.float32).clamp_min(EPSILON)
    dtype = torch.bfloat16 if precision == "medium" else torch.float32
    x = normalized(matrix.contiguous(), norm, dtype)
    with _float32_products(precision):
        for a, b, c in steps(coefficients, num_steps):
            x = _step(x, a, b, c)
    return x


def steps(coefficients: str, num_steps: int) -> Iterator[tuple[float, float, float]]:
    """Yield the coefficients of each step."""
    chosen = COEFFICIENTS[coefficients]
    is_limit = coefficients == "polar_express"
    return islice(chain(chosen, repeat(chosen[-1])) if is_limit else cycle(chosen), num_steps)


def count_operations(count: int, rows: int, columns: int, num_steps: int) -> int:
    """Return the multiplications and additions of the products for a stack of matrices.

    Each step has two products of a square of the shorter side with the matrix, and one of two such squares.
    Example: one step of 2 x 3 takes 2 * (2*2*3 + 2*2*2 + 2*2*3) = 64.
    """
    short, long = min(rows, columns), max(rows, columns)
    return count * num_steps * 2 * short * short * (2 * long + short)


def _step(x: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """Return ``a X + (b A + c A A) X`` with ``A = X X^T``; for tall matrices the transposes' in the same way."""
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    is_tall = x.shape[-2] > x.shape[-1]
    gram = x.mT @ x if is_tall else x @ x.mT
    polynomial = add(gram, gram, gram, beta=b, alpha=c)
    return add(x, x, polynomial, beta=a) if is_tall else add(x, polynomial, x, beta=a)


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Let float32 products be computed in a precision of torch's; those in bfloat16 are not concerned.

    torch has two ways to say so, and refuses the older one to a program that has used the newer one.
    """
    if precision == "medium":
        yield
        return
    backends: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    try:
        before: Any = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        is_legacy = True
    except RuntimeError:
        known = [backend for backend in backends if hasattr(backend, "fp32_precision")]
        before, is_legacy = [(backend, backend.fp32_precision) for backend in known], False
        for backend in known:
            backend.fp32_precision = "ieee" if precision == "highest" else "tf32"
    try:
        yield
    finally:
        if is_legacy:
            torch.set_float32_matmul_precision(before)
        else:
            for backend, value in before:
                backend.fp32_precision = value
