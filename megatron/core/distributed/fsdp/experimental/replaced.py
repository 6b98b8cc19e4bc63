# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ReplacedParameter`: what becomes of an original once its unit has taken its values.

Whoever still holds the original (a list, an optimizer, a tied module) would compute with, or train, a dead copy. Its
memory is given back, and every use names the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class ReplacedParameter(nn.Parameter):
    """An original whose values live in a unit's shards; every use of it raises. Made by `retire`."""

    _fsdp_unit: str
    _fsdp_fqn: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse any operation, naming the unit that holds the values now."""
        operands = [*args, *(kwargs or {}).values()]
        flat = [item for value in operands for item in (value if isinstance(value, (list, tuple)) else [value])]
        replaced = next(item for item in flat if isinstance(item, ReplacedParameter))
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} of the original {replaced._fsdp_fqn}: expected a use of the module's "
            f"current parameter, got the one that unit {replaced._fsdp_unit} has replaced by shards. Reach it as an "
            "attribute of its module, and build optimizers after fully_shard."
        )


def retire(parameter: nn.Parameter, fqn: str, unit: str) -> None:
    """Free an original parameter and let every further use of it raise.

    Args:
        parameter: the original, whose values have been distributed.
        fqn: its name in the unit.
        unit: the unit's label.
    """
    retired: Any = parameter
    retired.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    retired._fsdp_fqn = fqn
    retired._fsdp_unit = unit
    if type(parameter) is nn.Parameter:
        retired.__class__ = ReplacedParameter
