# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`WaitingGradient`: what ``.grad`` is while a parameter's gradient waits for a reduction over the ranks.

It lets whatever clears gradients see that there is one to clear, as after any backward in torch: an optimizer's or a
module's ``zero_grad`` skips parameters whose ``.grad`` is None. It has no values, and says so when asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .compiling import never_trace
from .dtensor import FsdpDTensor, shard_dtensor
from .geometry import ShardGeometry
from .operations import attribute_name, gives_no_tensor

_ALLOWED = frozenset({"requires_grad_", "detach_"})
_NO_VALUE = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


class WaitingGradient(FsdpDTensor):
    """A gradient without values: it may be cleared, and asked for its shape, dtype and device."""

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise self._refusal("to_local")

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Refuse, before any rank communicates.

        Raises:
            RuntimeError: always.
        """
        raise self._refusal("full_tensor")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: there are no values to pickle.

        Raises:
            RuntimeError: always.
        """
        raise self._refusal("pickle")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WaitingGradient({self._geometry.fqn}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Clear the gradient, answer what needs no values, and refuse the rest.

        Raises:
            RuntimeError: the operation needs values.
        """
        name = getattr(func, "__name__", str(func))
        if name in ("zero_", "_foreach_zero_"):
            tensors = args[0] if name == "_foreach_zero_" else [args[0]]
            for tensor in tensors:
                if isinstance(tensor, WaitingGradient):
                    tensor._geometry.notify_cleared()
            others = [tensor for tensor in tensors if not isinstance(tensor, WaitingGradient)]
            if others:
                torch._foreach_zero_(others)
            return args[0] if name == "zero_" else None
        asks = name == "__get__" and attribute_name(func) not in _NO_VALUE
        if asks or name in _ALLOWED or gives_no_tensor(name.strip("_")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise next(tensor for tensor in _flat(args, kwargs) if isinstance(tensor, WaitingGradient))._refusal(name)

    def _refusal(self, operation: str) -> RuntimeError:
        return RuntimeError(
            f"{operation} of the gradient of {self._geometry.fqn}: expected a gradient that has been reduced over the "
            "ranks, got one that waits for the last microbatch. Read it after the last backward, with "
            "microbatch(context, is_last=True) and set_requires_gradient_sync(True)."
        )


def waiting_gradient(like: torch.Tensor, geometry: ShardGeometry) -> WaitingGradient:
    """Return the gradient of a parameter that waits.

    Args:
        like: its dtype and device are the gradient's.
        geometry: the parameter's, whose owner is told when the gradient is cleared.
    """
    waiting: Any = shard_dtensor(torch.empty(0, dtype=like.dtype, device=like.device), geometry)
    waiting.__class__ = WaitingGradient
    result: WaitingGradient = waiting
    return result


def _flat(args: Any, kwargs: Any) -> list[Any]:
    values = [*args, *(kwargs or {}).values()]
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]


never_trace(FsdpDTensor, WaitingGradient)
