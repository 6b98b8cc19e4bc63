# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The Newton-Schulz iteration against a singular value decomposition, and what its products cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed.fsdp.experimental import newton_schulz as module
from megatron.core.distributed.fsdp.experimental.newton_schulz import (
    COEFFICIENTS,
    PRECISIONS,
    count_operations,
    newton_schulz,
    steps,
)

SHAPES = ((5, 5), (3, 20), (20, 3), (1, 7), (7, 1), (1, 1), (33, 64))


def _matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _nearest(matrix: torch.Tensor) -> torch.Tensor:
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left @ right


@pytest.mark.parametrize("shape", SHAPES)
def test_many_steps_find_the_nearest_orthogonal_matrix(shape: tuple[int, int]) -> None:
    matrix = _matrix(*shape)
    found = newton_schulz(matrix, 20, "polar_express", "highest")
    assert found.dtype is torch.float32 and found.shape == matrix.shape
    # The last step's polynomial has its fixed point at 1 in exact arithmetic; float32 has 24 bits and the smallest
    # singular value is 1/200 of the largest, which multiplies its rounding by as much.
    torch.testing.assert_close(found.double(), _nearest(matrix), rtol=0, atol=2e-5)
    values = torch.linalg.svdvals(found.double())
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=2e-6)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_five_steps_bring_singular_values_near_one(coefficients: str, precision: str) -> None:
    matrix = _matrix(24, 60)
    found = newton_schulz(matrix, 5, coefficients, precision)
    assert found.dtype is (torch.bfloat16 if precision == "medium" else torch.float32)
    values = torch.linalg.svdvals(found.double())
    # "simple" ends between 0.68 and 1.13 by its author's choice; the others come closer. bfloat16 adds a percent.
    assert values.min() > 0.65 and values.max() < 1.22, values
    # The singular vectors stay: the found matrix, turned back by the nearest one, is symmetric. bfloat16 has 8 bits.
    turned = found.double() @ _nearest(matrix).mT
    torch.testing.assert_close(turned, turned.mT, rtol=0, atol=0.03 if precision == "medium" else 1e-5)


def test_the_iteration_is_the_written_polynomial() -> None:
    matrix = _matrix(4, 6)
    x = matrix.double() / matrix.double().norm()
    for a, b, c in steps("quintic", 7):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    # float32 against float64 over seven steps that multiply small values by 4 each.
    torch.testing.assert_close(newton_schulz(matrix, 7, "quintic", "highest").double(), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tall_matrix_is_a_wide_one_turned(precision: str) -> None:
    # Kernels for turned operands may add up in another order: last bits of float32, or of bfloat16's 8.
    atol = 0.02 if precision == "medium" else 1e-5
    for shape in ((30, 8), (3, 30, 8)):
        matrix = _matrix(*shape)
        found = newton_schulz(matrix, precision=precision)
        turned = newton_schulz(matrix.mT.contiguous(), precision=precision).mT
        torch.testing.assert_close(found, turned, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (9, 9)])
def test_a_stack_is_its_matrices_one_by_one(shape: tuple[int, int]) -> None:
    stack = _matrix(4, *shape) * torch.tensor([1.0, 1e3, 1e-3, 7.0]).view(4, 1, 1)
    found = newton_schulz(stack, precision="highest")
    single = torch.stack([newton_schulz(matrix, precision="highest") for matrix in stack])
    # Kernels of batches may add up in another order than those of single matrices: some last bits of float32.
    torch.testing.assert_close(found, single, rtol=0, atol=1e-5)
    halves = torch.cat([newton_schulz(part, precision="highest") for part in stack.split(2)])
    torch.testing.assert_close(found, halves, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 4, 6)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_zeros_stay_zero(shape: tuple[int, ...], precision: str) -> None:
    assert torch.equal(newton_schulz(torch.zeros(shape), precision=precision).float(), torch.zeros(shape))


def test_zeros_in_a_stack_leave_the_others_alone() -> None:
    stack = _matrix(3, 4, 6)
    stack[1] = 0
    found = newton_schulz(stack)
    assert not found[1].any() and torch.isfinite(found).all() and bool(found[0].any()) and bool(found[2].any())


@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e15])
def test_the_scale_of_a_matrix_makes_no_difference(factor: float) -> None:
    matrix = _matrix(4, 6)
    # One rounding by the factor and one by the norm, before steps that multiply the error by up to 4 each.
    torch.testing.assert_close(
        newton_schulz(matrix * factor, precision="highest"),
        newton_schulz(matrix, precision="highest"),
        rtol=0,
        atol=1e-4,
    )


def test_the_input_is_left_alone_whatever_its_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        matrix = _matrix(4, 6).to(dtype)
        before = matrix.clone()
        assert newton_schulz(matrix, precision="highest").dtype is torch.float32
        newton_schulz(matrix)
        assert torch.equal(matrix, before)


def test_coefficients_begin_anew_or_repeat_the_last() -> None:
    quintic, limit, simple = (COEFFICIENTS[name] for name in ("quintic", "polar_express", "simple"))
    assert list(steps("quintic", 12)) == [*quintic, *quintic, *quintic[:2]]
    assert list(steps("polar_express", 11)) == [*limit, *[limit[-1]] * 3]
    assert list(steps("simple", 3)) == list(simple) * 3
    assert list(steps("quintic", 2)) == list(quintic[:2])


def test_the_last_step_of_polar_express_has_its_fixed_point_at_one() -> None:
    a, b, c = COEFFICIENTS["polar_express"][-1]
    assert a + b + c == 1


def test_operations_of_the_worked_example() -> None:
    assert count_operations(1, 2, 3, 1) == 64


@given(st.integers(1, 4), st.integers(1, 50), st.integers(1, 50), st.integers(1, 9))  # type: ignore[misc]
def test_operations_are_those_of_the_three_products(count: int, rows: int, columns: int, num_steps: int) -> None:
    short, long = sorted((rows, columns))
    products = [(short, long, short), (short, short, short), (short, short, long)]
    one = sum(2 * a * b * c for a, b, c in products)
    assert count_operations(count, rows, columns, num_steps) == count * num_steps * one
    assert count_operations(count, columns, rows, num_steps) == count * num_steps * one


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_precision_of_float32_products_is_restored(
    before: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def failing(x: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        raise KeyError("a step")

    original = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        newton_schulz(_matrix(3, 4), precision=precision)
        assert torch.get_float32_matmul_precision() == before
        monkeypatch.setattr(module, "_step", failing)
        with pytest.raises(KeyError, match="a step"):
            newton_schulz(_matrix(3, 4), precision=precision)
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(original)
    # Products in bfloat16 leave it alone.
    assert seen == [before if precision == "medium" else precision]
