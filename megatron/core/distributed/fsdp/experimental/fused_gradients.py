# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FusedGradients`: where kernels that write weight gradients themselves put them, instead of ``.grad``.

It hands out places and remembers them; what becomes of the gradients is gradients.py's.

[Note: the main_grad contract]
With gradient_accumulation_fusion, megatron-core's and TransformerEngine's linear layers look at the weight that they
were called with. ``__fsdp_param__`` and ``overwrite_main_grad`` make them ask ``get_main_grad()`` in each backward for
[out, in] elements in the dtype that gradients are sent in, which they overwrite, and return no gradient to autograd.
The first such call of a backward gets its place in the buffer that the reduction sends, so that nothing is copied; a
weight that is used again gets memory of its own, which is added.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .dbuffer import DBuffer
from .device import report_access


class FusedGradients:
    """The places that kernels were given in the running backward, by parameter.

    Args:
        full: the packed gradients of the group; given its storage here as soon as a kernel asks.
        parameters: the group's full parameters; told where to ask.
    """

    def __init__(self, full: DBuffer, parameters: Sequence[nn.Parameter]) -> None:
        self._full = full
        self._places: dict[int, list[torch.Tensor]] = {}
        self._parameters: Sequence[Any] = parameters
        self._before: dict[int, Any] = {}
        self.is_packing = False
        for index, parameter in enumerate(parameters):
            weight: Any = parameter
            weight.__fsdp_param__ = weight.overwrite_main_grad = True
            weight.get_main_grad = _Asker(self, index)
            # Without it, kernels return no gradient; with it, one that has no meaning.
            if hasattr(weight, "grad_added_to_main_grad"):
                del weight.grad_added_to_main_grad

    def place(self, index: int) -> torch.Tensor:
        """Return where the gradient of parameter `index` is to be written, full shape; contents are undefined."""
        full, places = self._full, self._places.setdefault(index, [])
        if not places and hasattr(self._parameters[index], "main_grad"):
            self._before[index] = self._parameters[index].main_grad
        if not self.is_packing and not full.has_storage:
            full.allocate()
            self.is_packing = True
        is_free = self.is_packing and not places
        places.append(full.pieces[index] if is_free else torch.empty_like(full.pieces[index]))
        if is_free:
            report_access("fused gradient", writes=(full.name,))
        return places[-1]

    @property
    def has_places(self) -> bool:
        """Whether something was written since the last `take`."""
        return bool(self._places)

    def take(self) -> dict[int, list[torch.Tensor]]:
        """Return what was written since the last call, by parameter, and forget it."""
        taken, self._places = self._places, {}
        self._forget(taken)
        return taken

    def _forget(self, indices: Iterable[int]) -> None:
        """Take the places from parameters where kernels have left them, which would keep the memory alive."""
        for index in indices:
            if index in self._before:
                self._parameters[index].main_grad = self._before.pop(index)

    def close(self) -> None:
        """Give the packed gradients' memory back if it was taken for kernels; on the stream that computes."""
        self._forget(self._places)
        self._places = {}
        if self.is_packing:
            self.is_packing = False
            self._full.release()


class _Asker:
    """`get_main_grad` of one parameter; weak, so that parameter and group form no cycle."""

    def __init__(self, fused: FusedGradients, index: int) -> None:
        self._fused = weakref.ref(fused)
        self._index = index

    def __call__(self) -> torch.Tensor:
        fused = self._fused()
        if fused is None:
            raise RuntimeError("get_main_grad: expected a live model, got a parameter whose unit is gone.")
        return fused.place(self._index)
