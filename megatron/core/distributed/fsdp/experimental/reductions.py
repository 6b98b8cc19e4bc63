# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ReductionQueue`: how far a unit's gradients go, those on their way, and the waits that give their memory back.

It does not decide when a unit reduces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .device import Event, Stream, profile_range
from .gradients import GroupGradients
from .unit import Unit

MAX_REDUCTIONS_IN_FLIGHT = 1
"""Units whose packed gradients are kept while the next unit packs its own: two full-size buffers in all."""


class ReductionQueue:
    """Reductions of one context, oldest first."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._reductions: deque[_Reduction] = deque()

    def __len__(self) -> int:
        return len(self._reductions)

    def reduce(self, unit: Unit, compute: Stream, is_last: bool) -> None:
        """Start reducing the gradients of a unit's backward, as far as its placements say, or hold them back.

        Args:
            unit: whose backward has ended.
            compute: the stream that has computed the gradients.
            is_last: whether they are to become final, rather than go on accumulating.
        """
        groups = [group.gradients for group in unit.parameter_groups if group.requires_grad and group.gradients]
        waits = [group for group in groups if not unit.reduces_gradients or (group.waits and not is_last)]
        for gradients in waits:
            gradients.hold()
        if len(waits) < len(groups):
            moves = [group for group in groups if group not in waits]
            self._start(unit.name, moves, compute, is_last=is_last, packs=True)

    def complete(self, unit: Unit, compute: Stream) -> None:
        """Start making final what earlier backwards of a unit have left, unless it holds gradients back."""
        groups = [group.gradients for group in unit.parameter_groups if group.gradients and unit.reduces_gradients]
        for packs in (True, False):
            waiting = [group for group in groups if group.has_unreduced and group.has_held == packs]
            if waiting:
                self._start(unit.name, waiting, compute, is_last=True, packs=packs)

    def _start(
        self, name: str, groups: Sequence[GroupGradients], compute: Stream, *, is_last: bool, packs: bool
    ) -> None:
        """Pack the gradients of one unit on `compute`, unless all is reduced in part already, and reduce them."""
        while len(self._reductions) > MAX_REDUCTIONS_IN_FLIGHT or any(r.is_of(groups) for r in self._reductions):
            self._reductions.popleft().release()
        with profile_range(f"fsdp.reduce {name}"):
            try:
                for group in groups if packs else ():
                    group.pack()
                # The reduction reads what was just packed, and adds to gradients that compute may have cleared.
                self._stream.wait_event(compute.record_event())
                with self._stream:
                    for group in groups:
                        group.reduce(is_last, packs)
                    event = self._stream.record_event()
            except BaseException:
                for group in groups:
                    group.release_full()
                raise
        self._reductions.append(_Reduction(groups, compute, event))

    def finish(self, compute: Stream) -> None:
        """Let `compute` see all reduced gradients, and free the packed ones."""
        # The optimizer reads main gradients.
        compute.wait_stream(self._stream)
        while self._reductions:
            self._reductions.popleft().release(after=compute)

    def release_gradients(self, release: Callable[[], None], compute: Stream) -> None:
        """Call `release`, which frees gradients, on the stream that they were allocated on."""
        # A reduction must not write where an optimizer that was just issued still reads.
        self._stream.wait_stream(compute)
        with self._stream:
            release()


class _Reduction:
    """Packed gradients of one unit whose reduction is on its way."""

    def __init__(self, groups: Sequence[GroupGradients], stream: Stream, event: Event) -> None:
        self._groups = groups
        self._stream = stream
        self._event = event

    def is_of(self, groups: Sequence[GroupGradients]) -> bool:
        """Return whether these are gradients of the same unit."""
        return self._groups[0] is groups[0]

    def release(self, after: Stream | None = None) -> None:
        """Free the packed gradients after the reduction; `after` is a stream that has waited for it already."""
        # torch.Stream compares unequal to None as False, so None has to be asked for first.
        if after is None or self._stream != after:
            # Memory goes back to the packing stream, which must not overwrite what the reduction still reads.
            self._stream.wait_event(self._event)
        for group in self._groups:
            group.release_full()
