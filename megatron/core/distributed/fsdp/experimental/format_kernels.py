# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels for number formats, where there are any: on CUDA, with Triton installed.

Elsewhere plain torch does the same; Triton is imported nowhere else.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Kernels:
    """What can be done in one kernel.

    Attributes:
        amax_bits: of `triton_quantize.py`.
        quantize: likewise.
        dequantize: of `triton_dequantize.py`.
    """

    amax_bits: Callable[..., torch.Tensor]
    quantize: Callable[..., None]
    dequantize: Callable[..., None]


def kernels_for(tensor: torch.Tensor) -> Kernels | None:
    """Return the kernels that can work on a tensor; None where plain torch has to."""
    return _kernels() if tensor.is_cuda else None


@functools.cache
def _kernels() -> Kernels | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from .triton_dequantize import dequantize
    from .triton_quantize import amax_bits, quantize

    return Kernels(amax_bits, quantize, dequantize)
