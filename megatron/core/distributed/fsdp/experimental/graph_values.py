# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of a forward as a graph sees them: tensors, and constants around them. It captures nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

_TENSORS = (torch.Tensor, nn.Parameter)
_CONSTANTS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format}
)


class UnknownValueError(TypeError):
    """A value in which a graph could not find tensors; its text is the value's type."""


def flatten(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Append the tensors in nested tuples, lists and dicts to `tensors`; return all else, and what they look like.

    Raises:
        UnknownValueError: there is something else than these, numbers, strings and the like.
    """
    kind = type(value)
    if kind in _TENSORS:
        tensors.append(value)
        # Kernels are chosen by all of these.
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if kind in _CONSTANTS or isinstance(value, Enum):
        return kind, value
    if kind in (tuple, list):
        return kind, tuple([flatten(item, tensors) for item in value])
    if kind is dict:
        return kind, tuple(value), tuple([flatten(item, tensors) for item in value.values()])
    raise UnknownValueError(kind.__name__)


def rebuild(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return `value` in new containers, and with `tensors` in place of its own, in the order of `flatten`."""
    kind = type(value)
    if kind in _TENSORS:
        return next(tensors)
    if kind in (tuple, list):
        return kind([rebuild(item, tensors) for item in value])
    if kind is dict:
        return {key: rebuild(item, tensors) for key, item in value.items()}
    return value


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose Storage is its own, so that uses of it can be told from the others'.

    It has no history, and keeps the memory alive.
    """
    with torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
        own = from_dlpack(to_dlpack(whole)).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
