# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`LentTensors`: local tensors that one rank, perhaps alone, has given away, and whether they have been written.

It watches; what a write means is the parameter group's business.
"""

from __future__ import annotations

import torch


class LentTensors:
    """Views of one flat tensor that somebody may write through, and how many writes torch had counted before."""

    def __init__(self) -> None:
        self._lent: dict[int, tuple[torch.Tensor, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._lent)

    def lend(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Watch `local` if it shares the memory of `whole`."""
        if local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            self._lent.setdefault(id(local), (local, _version(local)))

    @property
    def is_written(self) -> bool:
        """Whether torch has counted a write through one of them; it counts none by ``.data``, collectives or numpy."""
        return bool(self._lent) and any(_version(local) != version for local, version in self._lent.values())

    def clear(self) -> None:
        """Watch them no longer."""
        self._lent.clear()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
