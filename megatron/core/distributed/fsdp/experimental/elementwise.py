# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ElementwiseOnly`: while it is active, an operation on tensors that looks beyond single elements raises.

An optimizer of unknown making steps local shards under it: what it computes is then what it computes on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .operations import ELEMENTWISE, attribute_name, base_name, gives_no_tensor, is_attribute_of_elements


class ElementwiseOnly(TorchFunctionMode):
    """Raises on every operation that is not element-wise.

    Args:
        optimizer: names the optimizer in errors.
        shapes: logical and local shape of shards, by id; what asks a shard for its size raises, too.
    """

    def __init__(self, optimizer: str, shapes: dict[int, tuple[torch.Size, torch.Size]]) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._shapes = shapes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let the operation run if it treats every element by itself."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        operation = base_name(name)
        is_plain = operation in ELEMENTWISE or gives_no_tensor(operation) or is_attribute_of_elements(func)
        if not is_plain and any(tensor.ndim for tensor in _tensors((args, tuple(kwargs.values())))):
            raise RuntimeError(
                f"{self._optimizer}.step: expected element-wise operations, since it steps local shards, got "
                f"{operation}, which needs whole tensors. Use an element-wise optimizer, or leave its parameters "
                "unsharded."
            )
        self._check_size(attribute_name(func) if name == "__get__" else operation, args)
        return func(*args, **kwargs)

    def _check_size(self, question: str, args: tuple[Any, ...]) -> None:
        logical, local = self._shapes.get(id(args[0]), (None, None)) if args else (None, None)
        if logical is None or local is None or logical == local or question not in _SIZES:
            return
        if question in _NUM_DIMS and len(logical) == len(local):
            return
        raise RuntimeError(
            f"{self._optimizer}.step: expected a rule that does not depend on a parameter's size, got a look at "
            f"{question} of a shard, {tuple(local)} of {tuple(logical)}. Sort parameters into param_groups by size "
            "before."
        )


_NUM_DIMS = frozenset({"dim", "ndim", "ndimension"})
_SIZES = _NUM_DIMS | {"len", "nelement", "numel", "shape", "size", "stride"}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
