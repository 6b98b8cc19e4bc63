# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`PendingScalar`: a sum or norm over a sharded tensor that has not been summed over ranks yet.

torch's own partial DTensor answers ``item()``, ``float()`` and ``print`` with this rank's part, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PLAIN = frozenset("__get__ __hash__ dim is_floating_point numel size stride".split())


class PendingScalar(DTensor):
    """A 0-d DTensor; every use of its value sums it over ranks first, so that all ranks must make that use.

    Operations give plain tensors, and so does `full_tensor()`.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation on the value over all ranks; attributes are this tensor's own."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _PLAIN:
            args, kwargs = _valued(args), {key: _valued(value) for key, value in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        """Return a text without the value, which a single rank does not know."""
        return f"PendingScalar({self.dtype}, {self.placements}; full_tensor() on every rank gives the value)"


def pend(result: DTensor) -> PendingScalar:
    """Mark a partial result."""
    marked: Any = result
    marked.__class__ = PendingScalar
    pending: PendingScalar = marked
    return pending


def _valued(value: Any) -> Any:
    if isinstance(value, PendingScalar):
        with torch._C.DisableTorchFunctionSubclass():
            return value.full_tensor()
    if isinstance(value, (tuple, list)):
        return type(value)(_valued(item) for item in value)
    return value
