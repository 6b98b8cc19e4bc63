# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`GroupGradients`: the gradients of one parameter group, from full ``.grad`` to reduced and accumulated shards.

It says what happens to the data. When, and on which stream, is the schedule's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .allocator import num_storage_uses
from .dbuffer import DBuffer
from .device import report_access
from .dtensor import shard_dtensor
from .fused_gradients import FusedGradients
from .geometry import ShardGeometry
from .gradient_buffers import GradientBuffers
from .waiting import waiting_gradient


def _most_references(gradients: list[Any]) -> int:
    return max(map(sys.getrefcount, gradients))


_REFERENCES_OF_OURS = _most_references([object()])
"""What Python counts for a gradient that only the group's list holds; interpreters differ in what a call adds."""


class GroupGradients:
    """Buffers and life of one group's gradients; see [Note: levels of a gradient] in gradient_buffers.py.

    Args:
        at: the buffers.
        sharded_parameters: whose ``.grad`` is installed.
        unsharded_parameters: whose ``.grad`` autograd fills.
        grad_divisor: divides every reduced gradient.
        keeps_memory: keep the storage of `main` when gradients are cleared, for addresses that do not change.

    Attributes:
        at: as given.
        waits: see `GradientBuffers`.
        num_starts: how often gradients have been written where there were none.
    """

    def __init__(
        self,
        at: GradientBuffers,
        sharded_parameters: Sequence[nn.Parameter],
        unsharded_parameters: Sequence[nn.Parameter],
        grad_divisor: float,
        keeps_memory: bool,
    ) -> None:
        self.at = at
        self.waits = at.waits
        self._sharded = sharded_parameters
        self._unsharded = unsharded_parameters
        self._divisor = grad_divisor
        self._keeps_memory = keeps_memory
        self._assigned: list[Any] = []
        self._fused = FusedGradients(at.full, unsharded_parameters)
        self._is_checked = False
        self.num_starts = 0
        self._cleared: set[int] = set()
        self._own = [
            shard_dtensor(piece, replace(_geometry(parameter), owner=None))
            for piece, parameter in zip(at.main.pieces, sharded_parameters, strict=True)
        ]
        self._num_uses = num_storage_uses(at.main.local)

    def rename(self, fqns: Sequence[str]) -> None:
        """Name the sharded gradients by their parameters' paths."""
        for own, fqn in zip(self._own, fqns, strict=True):
            own._geometry = replace(own._geometry, fqn=fqn)

    @property
    def has_held(self) -> bool:
        """Whether this rank's own sum of earlier backwards waits for a reduction."""
        return self.at.held.has_storage

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients of earlier backwards wait for a reduction, over all axes or some."""
        return self.has_held or self.has_partly

    @property
    def has_partly(self) -> bool:
        """Whether sums that are reduced over some axes wait for a reduction over the others."""
        return self.at.partly is not None and self.at.partly.has_storage

    def hold(self) -> None:
        """Add the gradients of this backward to `held`, on the stream that computed them."""
        held = self.at.held
        is_first = not self.has_held
        if is_first:
            held.allocate()
        report_access("hold", writes=(held.name,))
        with _undone(held, is_first):
            self._take(held.pieces, adds=not is_first)
        self._fused.close()

    def pack(self) -> None:
        """Move the gradients of this backward, and those held back before, into `full`; on the computing stream.

        A parameter that got none contributes zeros.
        """
        full, held = self.at.full, self.at.held
        if self.has_held:
            self.hold()
        if not self._fused.is_packing:
            full.allocate()
        self._fused.is_packing = False
        if self.has_held:
            report_access("pack", reads=(held.name,), writes=(full.name,))
            full.local.copy_(held.local)
            held.release()
        else:
            report_access("pack", writes=(full.name,))
            self._take(full.pieces, adds=False)

    def _take(self, pieces: Sequence[torch.Tensor], adds: bool) -> None:
        self._require_own_gradients()
        self._cleared.clear()
        targets: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        fused = self._fused.take()
        for index, (parameter, piece) in enumerate(zip(self._unsharded, pieces, strict=True)):
            if index in fused:
                _sum_fused(fused[index], parameter, piece, adds)
            elif parameter.grad is not None:
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
        """Refuse sparse gradients, and kernels that write them elsewhere; asked once, at the first backward."""
        if self._is_checked:
            return
        for own, parameter in zip(self._own, self._unsharded, strict=True):
            if getattr(parameter, "grad_added_to_main_grad", False):
                raise RuntimeError(
                    f"gradient of {own.geometry.fqn}: expected it in .grad, or where get_main_grad() says, got "
                    "grad_added_to_main_grad set by a fused kernel, whose sum would be lost. Turn "
                    "gradient_accumulation_fusion off."
                )
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"gradient of {own.geometry.fqn}: expected a dense one, got {parameter.grad.layout}. Build its "
                    "module without sparse=True."
                )
        self._is_checked = True

    @property
    def has_strays(self) -> bool:
        """Whether full parameters have gradients."""
        return self._fused.has_places or any(parameter.grad is not None for parameter in self._unsharded)

    def drop_held(self) -> None:
        """Forget this rank's own sum, on the stream that computes."""
        if self.has_held:
            self.at.held.release()

    def release_partly(self) -> None:
        """Forget what is reduced in part, on the stream that reduces."""
        assert self.at.partly is not None, "asked for only where it has storage"
        self.at.partly.release()

    def _waits(self, index: int) -> bool:
        """Whether a gradient of parameter `index` waits for a reduction, and has not been cleared since."""
        return self.has_unreduced and index not in self._cleared and self._sharded[index].requires_grad

    def waiting(self, index: int) -> torch.Tensor | None:
        """Return what stands for the gradient of parameter `index` if it waits for a reduction."""
        is_waiting = self._waits(index)
        return waiting_gradient(self.at.main.local, _geometry(self._sharded[index])) if is_waiting else None

    def drop_unreduced_of(self, index: int) -> bool:
        """Forget what waits for a reduction of parameter `index`; return whether it was the last one that did."""
        if not self.has_unreduced:
            return False
        self._cleared.add(index)
        for buffer in (self.at.held, self.at.partly):
            if buffer is not None and buffer.has_storage:
                report_access("clear", writes=(buffer.name,))
                buffer.pieces[index].zero_()
        return not any(map(self._waits, range(len(self._sharded))))

    @property
    def is_cleared(self) -> bool:
        """Whether no parameter has a gradient; asks the last one first, which loops clear last."""
        with torch._C.DisableTorchFunctionSubclass():
            return all(parameter.grad is None for parameter in reversed(self._sharded))

    @property
    def holds_memory(self) -> bool:
        """Whether clearing the gradients would give memory back."""
        return self.at.main.has_storage and not self._keeps_memory

    def release_main(self) -> None:
        """Free cleared gradients, on the stream that reduces; leave them to whoever still holds some."""
        if self._is_held_by_user():
            self._renew()
        else:
            self.at.main.release()

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients, those that wait for a reduction included, by a number or a 0-d tensor."""
        for buffer in (self.at.main, self.at.held, self.at.partly):
            if buffer is not None and buffer.has_storage:
                report_access("scale", writes=(buffer.name,))
                buffer.local.mul_(factor)

    def drop(self) -> None:
        """Forget full gradients of a backward that will not be reduced."""
        for parameter in self._unsharded:
            parameter.grad = None
        self._fused.close()

    def reduce(self, is_last: bool, from_full: bool) -> None:
        """Bring gradients one level on, or to the last one; on the stream that reduces.

        Args:
            is_last: whether they are to become final.
            from_full: whether `full` has been packed; otherwise only what is reduced in part goes on.
        """
        source = self.at.full if from_full else None
        partly = self.at.partly
        if partly is None:
            assert source is not None
            self._finalize(source)
            return
        if source is not None and (partly.has_storage or not is_last):
            self._add_to_partly(source, partly)
            source = None
        if not is_last:
            return
        if source is None and partly.dtype == self.at.full.dtype:
            self._finalize(partly)
            partly.release()
        elif source is None:
            sliced = self._sliced()
            sliced.allocate()
            sliced.copy_from(partly)
            partly.release()
            self._finalize(sliced)
            sliced.release()
        else:
            self._finalize(source)

    def _add_to_partly(self, full: DBuffer, partly: DBuffer) -> None:
        is_first = not partly.has_storage
        if is_first:
            partly.allocate()
        with _undone(partly, is_first):
            if is_first and partly.dtype == full.dtype:
                full.redistribute(partly)
                return
            sliced = self._sliced()
            sliced.allocate()
            full.redistribute(sliced)
            _accumulate(sliced, partly, is_first)
            sliced.release()

    def _sliced(self) -> DBuffer:
        assert self.at.sliced is not None, "it comes with `partly`"
        return self.at.sliced

    def _finalize(self, source: DBuffer) -> None:
        """Reduce what is still ``Partial`` and add it to what has accumulated since gradients were last cleared."""
        is_first = self._prepare_accumulation()
        main, target = self.at.main, self.at.reduced
        into_main = is_first and main.dtype == source.dtype
        if into_main:
            target = main
        else:
            target.allocate()
        source.redistribute(target)
        if self._divisor != 1:
            target.local.div_(self._divisor)
        if not into_main:
            _accumulate(target, main, is_first)
            target.release()
        self._install()

    def release_full(self) -> None:
        """Free the packed gradients once they have been reduced."""
        if self.at.full.has_storage:
            self.at.full.release()
        self._assigned.clear()

    def _prepare_accumulation(self) -> bool:
        """Bring `main` in line with every parameter's ``.grad``; return whether none has a gradient yet.

        ``.grad`` is the truth, as in torch: None means that nothing has accumulated, a tensor that the user put there
        is what the next gradient is added to.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            current = [parameter.grad for parameter in self._sharded]
            is_first = all(grad is None for grad in current)
            if is_first and self._is_held_by_user():
                self._renew()
            if not self.at.main.has_storage:
                self.at.main.allocate()
            if is_first:
                self.num_starts += 1
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

    def _is_held_by_user(self) -> bool:
        is_used = num_storage_uses(self.at.main.local) > self._num_uses
        return is_used or _most_references(self._own) > _REFERENCES_OF_OURS

    def _renew(self) -> None:
        """Leave gradients that somebody still holds as they are, and go on with new ones."""
        main = self.at.main = self.at.main.like()
        self._own = [shard_dtensor(piece, own.geometry) for piece, own in zip(main.pieces, self._own, strict=True)]
        self._num_uses = num_storage_uses(main.local)

    def _install(self) -> None:
        """Give every trainable parameter its gradient; a frozen one keeps what it has, as in torch."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, own in zip(self._sharded, self._own, strict=True):
                if parameter.grad is not own and parameter.requires_grad:
                    parameter.grad = own


@torch.no_grad()
def _sum_fused(written: list[torch.Tensor], parameter: nn.Parameter, piece: torch.Tensor, adds: bool) -> None:
    """Sum up in `piece` what kernels have written of one gradient, perhaps there already, and what autograd has."""
    found = [each for each in written if each is not piece]
    adds = adds or len(found) < len(written)
    if parameter.grad is not None:
        found.append(parameter.grad)
        parameter.grad = None
    for each in found:
        if adds:
            piece.add_(each)
        else:
            piece.copy_(each)
        adds = True


@contextmanager
def _undone(buffer: DBuffer, is_first: bool) -> Iterator[None]:
    """Take the storage of a buffer back that an exception has left without contents."""
    try:
        yield
    except BaseException:
        if is_first:
            buffer.release()
        raise


def _accumulate(source: DBuffer, target: DBuffer, is_first: bool) -> None:
    report_access("accumulate", reads=(source.name,), writes=(target.name,))
    if is_first:
        target.local.copy_(source.local)
    else:
        target.local.add_(source.local)


def _geometry(parameter: Any) -> ShardGeometry:
    geometry: ShardGeometry = parameter._geometry
    return geometry
