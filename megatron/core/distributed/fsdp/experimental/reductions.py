# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ReductionQueue`: packed gradients whose reduction is on its way, and the waits that give their memory back.

It does not decide when a unit reduces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .device import Event, Stream
from .gradients import GroupGradients

MAX_REDUCTIONS_IN_FLIGHT = 1
"""Units whose packed gradients are kept while the next unit packs its own: two full-size buffers in all."""


class ReductionQueue:
    """Reductions of one context, oldest first."""

    def __init__(self) -> None:
        self._reductions: deque[_Reduction] = deque()

    def __len__(self) -> int:
        return len(self._reductions)

    def start(self, groups: Sequence[GroupGradients], compute: Stream, stream: Stream) -> None:
        """Pack the gradients of one unit on `compute` and reduce them on `stream`."""
        while len(self._reductions) > MAX_REDUCTIONS_IN_FLIGHT or any(r.is_of(groups) for r in self._reductions):
            self._reductions.popleft().release()
        for group in groups:
            group.pack()
        # The reduction reads what was just packed, and adds to gradients that compute may have cleared.
        stream.wait_event(compute.record_event())
        try:
            with stream:
                for group in groups:
                    group.reduce()
                event = stream.record_event()
        except BaseException:
            for group in groups:
                group.release_full()
            raise
        self._reductions.append(_Reduction(groups, compute, event))

    def finish(self, compute: Stream, stream: Stream) -> None:
        """Let `compute` see all reduced gradients, and free the packed ones."""
        # The optimizer reads main gradients.
        compute.wait_stream(stream)
        while self._reductions:
            self._reductions.popleft().release(after=compute)


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
