# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which torch operations look at nothing but the elements that they are given: names only, no tensors.

A name that is not listed is refused for sharded parameters, so that an operation that torch adds is loud, not wrong.
"""

from __future__ import annotations

import math
from typing import Any

ELEMENTWISE = frozenset(
    (
        "abs acos add addcdiv addcmul amp_foreach_non_finite_check_and_unscale asin atan bfloat16 bitwise_and "
        "bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone constant contiguous copy cos "
        "cosh cpu cuda deepcopy detach div divide double empty_like eq erf exp expm1 fill float floor floor_divide "
        "full_like fused_adam fused_adamw ge gt half isfinite isinf isnan ldexp le lerp log log10 log1p log2 "
        "logical_and logical_not logical_or logical_xor lt maximum minimum mul multiply nan_to_num ne neg "
        "ones_like positive pow real reciprocal relu remainder requires_grad round rsqrt rsub sgn sigmoid sign sin "
        "sinh sqrt square sub subtract tan tanh to true_divide truediv trunc type type_as where zero zeros_like"
    ).split()
)
"""The result has the cut of its operands."""

_REDUCTIONS = frozenset("norm sum vector_norm".split())
_NO_TENSOR_RESULT = frozenset(
    (
        "can_cast data_ptr delete dense_dim dim dir element_size format get_device hash has_names len ndimension "
        "nelement numel promote_types reduce_ex repr result_type retain_grad set setstate size storage_offset stride "
        "str untyped_storage"
    ).split()
)
_DUNDER_WRITES = frozenset(
    "__iadd__ __iand__ __idiv__ __ifloordiv__ __imod__ __imul__ __ior__ __ipow__ __isub__ __itruediv__ __ixor__".split()
)


_CONVERSIONS = frozenset("__bool__ __complex__ __contains__ __float__ __index__ __int__ __iter__".split())
_MOVING_ATTRIBUTES = frozenset("H T mH mT imag".split())


def base_name(name: str) -> str:
    """Return the operation behind a torch function's name: ``_foreach_mul_`` and ``__rmul__`` are both ``mul``."""
    if name in _CONVERSIONS:
        return "item"
    base = name
    if base.startswith("__") and base.endswith("__"):
        base = base[2:-2]
        if base[:1] in ("i", "r") and base[1:] in ELEMENTWISE:
            base = base[1:]
    base = base.removeprefix("_foreach_").removeprefix("linalg_")
    return base.strip("_")


def writes_first_operand(name: str) -> bool:
    """Return whether a torch function of this name changes its first operand in place."""
    return (name.endswith("_") and not name.startswith("__")) or name in _DUNDER_WRITES


def is_reduction(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this is a reduction that a rank without elements can take part in: a sum or a finite norm."""
    if operation not in _REDUCTIONS:
        return False
    orders = [*args[1:2], *(kwargs.get(key) for key in ("p", "ord"))]
    return operation == "sum" or all(
        order is None or order == "fro" or (isinstance(order, (int, float)) and 0 < order < math.inf)
        for order in orders
    )


def is_attribute_of_elements(func: Any) -> bool:
    """Return whether a torch function reads an attribute that does not move elements, as ``.T`` does."""
    return getattr(func, "__name__", "") == "__get__" and attribute_name(func) not in _MOVING_ATTRIBUTES


def attribute_name(func: Any) -> str:
    """Return which attribute a torch function reads or sets; empty for other functions."""
    name: str = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def gives_no_tensor(operation: str) -> bool:
    """Return whether an operation only asks about a tensor."""
    return operation in _NO_TENSOR_RESULT or operation.startswith("is_")
