# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Element-wise parts of matrix rules by Triton: the bits of plain torch on the same device.

FSDP_TEST_DEVICE=cuda python -m tests.gpu.checks --ranks 1 matrix_arithmetic
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from megatron.core.distributed.fsdp.experimental import matrix_arithmetic
from megatron.core.distributed.fsdp.experimental.matrix_arithmetic import normalized, subtract_updates
from tests.gpu.checks import IS_DRY, Check
from tests.unit_tests.launch import DEVICE

SHAPES = ((1, 1), (3, 5), (64, 64), (257, 1023), (4, 33, 70), (2048, 5632))
DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def _by_torch() -> Iterator[None]:
    with mock.patch.object(matrix_arithmetic, "kernels_for", lambda tensor: None):
        yield


def quotients_have_torchs_bits() -> str:
    """Matrices and stacks, of normal size, huge, tiny and with infinities, in and to both dtypes."""
    numel = 0
    for shape in SHAPES:
        for scale in (1.0, 1e30, 1e-39):
            matrix = torch.randn(shape, device=DEVICE) * scale
            norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True).clamp_min(1e-7)
            for source in DTYPES:
                for target in DTYPES:
                    ours = normalized(matrix.to(source), norm, target)
                    with _by_torch():
                        theirs = normalized(matrix.to(source), norm, target)
                    assert torch.equal(ours, theirs), f"{shape} times {scale}, {source} to {target}"
                    numel += matrix.numel()
    return f"{numel} elements equal"


def subtraction_has_torchs_bits() -> str:
    """Weights and updates of both dtypes at odd addresses, with and without decay."""
    numel = 0
    for size in (1, 7, 4096, 100_003):
        for first in (0, 1, 3):
            for weight_dtype in DTYPES:
                for update_dtype in DTYPES:
                    for decay in (None, torch.tensor(1 - 3e-4, device=DEVICE)):
                        weight = torch.randn(size + first, device=DEVICE).to(weight_dtype)
                        update = torch.randn(size + first, device=DEVICE).to(update_dtype)[first:]
                        other, factor = weight.clone(), torch.tensor(0.0123, device=DEVICE)
                        before = weight[:first].clone()
                        subtract_updates([weight[first:]], [update], [factor], decay)
                        with _by_torch():
                            subtract_updates([other[first:]], [update], [factor], decay)
                        where = f"{size} at {first}, {weight_dtype}, {update_dtype}, decay {decay is not None}"
                        assert torch.equal(weight, other), where
                        assert torch.equal(weight[:first], before), where
                        numel += size
    return f"{numel} elements equal"


def triton_is_there() -> str:
    """Where there is a GPU the comparisons above are of two ways."""
    assert IS_DRY or matrix_arithmetic.kernels_for(torch.empty(1, device=DEVICE)) is not None
    return "dry run: torch with itself" if IS_DRY else "Triton and torch"


CHECKS = [
    Check("triton_is_there", triton_is_there),
    Check("quotients_have_torchs_bits", quotients_have_torchs_bits),
    Check("subtraction_has_torchs_bits", subtraction_has_torchs_bits),
]
