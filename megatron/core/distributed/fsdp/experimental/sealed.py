# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What cannot be done with a unit as a whole: copying, pickling, casting and moving it. It does nothing but refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SealedModule:
    """Refusals of one unit; a base class of `FsdpModule`."""

    _fsdp_name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(
            f"deepcopy of unit {self._fsdp_name}: expected a module that is not sharded, got a unit, whose copy would "
            "share no buffers and no schedule. Copy the model before fully_shard, or keep averages of its parameters: "
            "{name: parameter.detach().clone()}."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle a unit.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"pickle of unit {self._fsdp_name}: expected a module that is not sharded, got a unit. Save its "
            "state_dict(), whose tensors hold this rank's shards, on every rank."
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        raise RuntimeError(
            f"cast or move of unit {self._fsdp_name}: expected none after fully_shard, since the shards would keep "
            "their old dtype and device. Call .to(), .half(), .cuda() and the like before fully_shard."
        )
