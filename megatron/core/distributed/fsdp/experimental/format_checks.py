# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What number formats refuse: choices that they do not know, and planes that do not belong together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .quantization import WeightFormat, num_scales_of

ROUNDINGS = ("nearest", "stochastic")


def check_choice(what: str, value: object, known: Sequence[str]) -> None:
    """Raise ValueError unless the value is one of those known."""
    if value not in known:
        raise ValueError(f"{what}: expected one of {', '.join(known)}, got {value!r}. Choose one of them.")


def check_rounding(rounding: str, seed: int) -> None:
    """Raise ValueError unless elements can be rounded so."""
    check_choice("rounding", rounding, ROUNDINGS)
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"rounding seed: expected an integer in [0, 2**64), got {seed}. Reduce it modulo 2**64.")


def check_planes(
    number_format: WeightFormat,
    values: torch.Tensor,
    shape: Sequence[int],
    payload: torch.Tensor,
    scales: torch.Tensor,
    amax: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return amax where the format needs it; raise ValueError where planes do not belong to these values."""
    numel = values.numel()
    num_scales = num_scales_of(number_format.geometry(shape), numel)
    expected = -(-numel // number_format.elements_per_byte), num_scales * number_format.scale_bytes
    if (payload.numel(), scales.numel()) != expected:
        raise ValueError(
            f"{number_format.name} planes: expected {expected[0]} bytes of payload and {expected[1]} of scales for "
            f"{numel} elements of shape {tuple(shape)}, got {payload.numel()} and {scales.numel()}. "
            "Pass the planes of the same whole atoms."
        )
    if number_format.needs_amax != (amax is not None):
        wanted, got = ("an", "none") if number_format.needs_amax else ("no", "one")
        raise ValueError(f"{number_format.name} amax: expected {wanted} amax, got {got}. Do as `needs_amax` says.")
    return amax
