# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`WideGradients`: copies of narrow gradients in the dtype of their main weights, for as long as a step takes.

So that unscaling and clipping do not round, or lose, what a narrow dtype cannot hold. It makes no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from megatron.core.distributed.fsdp.experimental import FsdpDTensor, shard_dtensor

_dtype_of, _grad_of = attrgetter("dtype"), attrgetter("grad")


class WideGradients:
    """Puts wide copies in the place of narrow gradients, and takes them back.

    The DTensors of the copies are made once; their elements live between `install` and `restore` only, and whoever
    reads a copy afterwards gets an AttributeError.
    """

    def __init__(self) -> None:
        self._parameters: list[Any] = []
        self._copies: list[FsdpDTensor] = []
        self._narrow: list[Any] = []

    def install(self, parameters: Sequence[Any]) -> None:
        """Let ``.grad`` of every parameter whose gradient has another dtype be a copy in the parameter's.

        Args:
            parameters: sharded parameters; those without gradient are skipped.
        """
        self.restore()
        with torch._C.DisableTorchFunctionSubclass():
            found = [grad for grad in map(_grad_of, parameters) if grad is not None]
            if len({*map(_dtype_of, found), *map(_dtype_of, parameters)}) == 1:
                return
            narrow = [p for p in parameters if p.grad is not None and p.grad.dtype is not p.dtype]
            self._narrow = [parameter.grad for parameter in narrow]
        pieces = self._make_pieces(narrow)
        if len(narrow) != len(self._parameters) or not all(map(is_, narrow, self._parameters)):
            self._copies = [shard_dtensor(piece, p.geometry) for piece, p in zip(pieces, narrow, strict=True)]
            self._parameters = narrow
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, copy, piece in zip(narrow, self._copies, pieces, strict=True):
                copy._local_tensor = piece
                parameter.grad = copy

    def _make_pieces(self, parameters: Sequence[Any]) -> list[torch.Tensor]:
        """Return the cast local gradients, which share one new tensor per dtype."""
        pieces: list[Any] = [None] * len(parameters)
        for dtype in dict.fromkeys(map(_dtype_of, parameters)):
            chosen = [index for index, parameter in enumerate(parameters) if parameter.dtype is dtype]
            sources = [self._narrow[index]._local_tensor for index in chosen]
            numel = sum(source.numel() for source in sources)
            flat = torch.empty(numel, dtype=dtype, device=sources[0].device)
            targets = torch._C._nn.unflatten_dense_tensors(flat, sources)
            torch._foreach_copy_(targets, sources)
            for index, target in zip(chosen, targets, strict=True):
                pieces[index] = target
        return pieces

    def restore(self) -> None:
        """Give every parameter its narrow gradient back, unless it has got another since; free the copies."""
        if not self._narrow:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, copy, narrow in zip(self._parameters, self._copies, self._narrow, strict=True):
                if parameter.grad is copy:
                    parameter.grad = narrow
                del copy._local_tensor
        self._narrow = []
