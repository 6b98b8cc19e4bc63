# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`GroupGradients`: the gradients of one parameter group, from full ``.grad`` to reduced and accumulated shards.

It says what happens to the data. When, and on which stream, is the schedule's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .dbuffer import DBuffer
from .device import report_access
from .dtensor import shard_dtensor
from .geometry import ShardGeometry

_REFERENCES_OF_OURS = 3
"""What sys.getrefcount says of a gradient that only the group holds: its list, the loop variable, the argument."""


class GroupGradients:
    """Buffers and life of one group's gradients.

    Args:
        full: ``Partial``, communication dtype, transient.
        unreduced: ``Partial``, main-gradient dtype, transient.
        reduced: placed like `main`, communication dtype, transient.
        main: resident, main-gradient dtype.
        sharded_parameters: whose ``.grad`` is installed.
        unsharded_parameters: whose ``.grad`` autograd fills.
        grad_divisor: divides every reduced gradient.

    Attributes:
        full: [global_numel]; this rank's packed gradients while they are reduced.
        unreduced: [global_numel]; this rank's sum over backwards that were not reduced; has storage only meanwhile.
        reduced: [local_numel]; a reduction on its way to `main`, where it cannot be written there at once.
        main: [local_numel]; reduced and accumulated.
    """

    def __init__(
        self,
        full: DBuffer,
        unreduced: DBuffer,
        reduced: DBuffer,
        main: DBuffer,
        sharded_parameters: Sequence[nn.Parameter],
        unsharded_parameters: Sequence[nn.Parameter],
        grad_divisor: float,
    ) -> None:
        self.full = full
        self.unreduced = unreduced
        self.reduced = reduced
        self.main = main
        self._sharded = sharded_parameters
        self._unsharded = unsharded_parameters
        self._divisor = grad_divisor
        self._assigned: list[Any] = []
        self._is_checked = False
        self._own = [
            shard_dtensor(piece, replace(_geometry(parameter), owner=None))
            for piece, parameter in zip(main.pieces, sharded_parameters, strict=True)
        ]
        self._num_uses = _num_uses(main)

    @property
    def buffers(self) -> tuple[DBuffer, ...]:
        """All buffers."""
        return self.full, self.unreduced, self.reduced, self.main

    def rename(self, fqns: Sequence[str]) -> None:
        """Name the sharded gradients by their parameters' paths."""
        for own, fqn in zip(self._own, fqns, strict=True):
            own._geometry = replace(own._geometry, fqn=fqn)

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients of earlier backwards wait on this rank for a reduction."""
        return self.unreduced.local.untyped_storage().nbytes() > 0

    def hold(self) -> None:
        """Add the gradients of this backward to `unreduced`, on the stream that computed them."""
        is_first = not self.has_unreduced
        if is_first:
            self.unreduced.allocate()
        report_access("hold", writes=(self.unreduced.name,))
        self._take(self.unreduced.pieces, adds=not is_first)

    def pack(self) -> None:
        """Move the gradients of this backward, and those held back before, into `full`; on the computing stream.

        A parameter that got none contributes zeros.
        """
        if self.has_unreduced:
            self.hold()
        self.full.allocate()
        if self.has_unreduced:
            report_access("pack", reads=(self.unreduced.name,), writes=(self.full.name,))
            self.full.local.copy_(self.unreduced.local)
            self.unreduced.release()
        else:
            report_access("pack", writes=(self.full.name,))
            self._take(self.full.pieces, adds=False)

    def _take(self, pieces: Sequence[torch.Tensor], adds: bool) -> None:
        self._require_own_gradients()
        targets: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for parameter, piece in zip(self._unsharded, pieces, strict=True):
            if parameter.grad is not None:
                targets.append(piece)
                gradients.append(parameter.grad)
                parameter.grad = None
            elif not adds:
                piece.zero_()
        if targets:
            write: Callable[..., Any] = torch._foreach_add_ if adds else torch._foreach_copy_
            with torch.no_grad():
                write(targets, gradients)

    def _require_own_gradients(self) -> None:
        """Refuse kernels that write gradients elsewhere; asked once, at the first backward."""
        if self._is_checked:
            return
        for own, parameter in zip(self._own, self._unsharded, strict=True):
            if getattr(parameter, "grad_added_to_main_grad", False):
                raise RuntimeError(
                    f"gradient of {own.geometry.fqn}: expected it in .grad, got grad_added_to_main_grad set by a fused "
                    "kernel, whose sum would be lost. Turn gradient_accumulation_fusion off."
                )
        self._is_checked = True

    @property
    def has_strays(self) -> bool:
        """Whether full parameters have gradients."""
        return any(parameter.grad is not None for parameter in self._unsharded)

    def drop_held(self) -> None:
        """Forget gradients that wait for a reduction, as zero_grad does."""
        if self.has_unreduced:
            self.unreduced.release()

    def drop(self) -> None:
        """Forget full gradients of a backward that will not be reduced."""
        for parameter in self._unsharded:
            parameter.grad = None

    def reduce(self) -> None:
        """Reduce `full` over ranks and add it to what has accumulated since gradients were last cleared."""
        is_first = self._prepare_accumulation()
        into_main = is_first and self.main.dtype == self.full.dtype
        target = self.main if into_main else self.reduced
        if not into_main:
            target.allocate()
        self.full.redistribute(target)
        if self._divisor != 1:
            target.local.div_(self._divisor)
        if not into_main:
            report_access("accumulate", reads=(target.name,), writes=(self.main.name,))
            if is_first:
                self.main.local.copy_(target.local)
            else:
                self.main.local.add_(target.local)
            target.release()
        self._install()

    def release_full(self) -> None:
        """Free the packed gradients once they have been reduced."""
        self.full.release()
        self._assigned.clear()

    def _prepare_accumulation(self) -> bool:
        """Bring `main` in line with every parameter's ``.grad``; return whether none has a gradient yet.

        ``.grad`` is the truth, as in torch: None means that nothing has accumulated, a tensor that the user put there
        is what the next gradient is added to.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            current = [parameter.grad for parameter in self._sharded]
            if all(grad is None for grad in current):
                is_held = _num_uses(self.main) > self._num_uses
                if is_held or any(sys.getrefcount(own) > _REFERENCES_OF_OURS for own in self._own):
                    self._renew()
                return True
            # What the user has put there is read on this stream: keep it until the reduction is over.
            pairs = zip(current, self._own, strict=True)
            self._assigned = [grad for grad, own in pairs if grad is not None and grad is not own]
            for grad, own in zip(current, self._own, strict=True):
                if grad is None:
                    own._local_tensor.zero_()
                elif grad is not own:
                    if not isinstance(grad, DTensor):
                        raise ValueError(
                            f"gradient of {own.geometry.fqn}: expected a DTensor cut like its parameter, got "
                            f"{type(grad).__name__} of shape {tuple(grad.shape)}. Change gradients in place, or assign "
                            "what an operation on them returns."
                        )
                    own._local_tensor.copy_(grad._local_tensor.view_as(own._local_tensor))
        return False

    def _renew(self) -> None:
        """Leave gradients that somebody still holds as they are, and go on with new ones."""
        old = self.main
        self.main = DBuffer(
            old.layout, old.mesh, old.placements, dtype=old.dtype, device=old.local.device, name=old.name
        )
        self._own = [shard_dtensor(piece, own.geometry) for piece, own in zip(self.main.pieces, self._own, strict=True)]
        self._num_uses = _num_uses(self.main)

    def _install(self) -> None:
        """Give every trainable parameter its gradient; a frozen one keeps what it has, as in torch."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, own in zip(self._sharded, self._own, strict=True):
                if parameter.grad is not own and parameter.requires_grad:
                    parameter.grad = own


def _num_uses(buffer: DBuffer) -> int:
    """Return how many tensors share a buffer's storage: more than ours if somebody holds a detached gradient."""
    return int(torch._C._storage_Use_Count(buffer.local.untyped_storage()._cdata))


def _geometry(parameter: Any) -> ShardGeometry:
    geometry: ShardGeometry = parameter._geometry
    return geometry
