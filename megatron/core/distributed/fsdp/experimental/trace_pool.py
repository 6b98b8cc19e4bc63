# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`TracePool`: an allocator that records one iteration, then gives every buffer a place that it keeps.

It decides neither when an iteration has ended nor whether another unit should make room: context_memory.py does.

[Note: places that do not move]
While it records, every buffer takes storage of its own from the allocator below. From the iteration after that on a
buffer lies in its slot (slot_plan.py): allocating and releasing it sets and clears bits, and no allocator is called.
Its Storage is an own one over the slot's bytes, so that its uses can be counted, and keeps the arena's memory alive.

Memory may be refilled only where everybody who looks at it expects that: autograd's saved views of a weight have to see
the same weight in backward. A buffer is therefore moved only while nothing but the runtime holds views of it. Where a
slot is taken, the buffer is moved to storage of its own and back later; if it cannot move, an error names both.

[Note: streams of a pool]
The slots of an arena are used on one home stream, the one on which their buffers were allocated in the trace, so that
reuse is ordered as with torch's allocator. A buffer that comes on another stream takes storage of its own.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from .allocator import Block, StorageAllocator, num_storage_uses
from .device import Stream, current_stream, release_idle_memory
from .slot_plan import Event, Request, Slot, SlotPlan, plan_slots

GRACE_S = 0.5
"""How long views that a communication library still holds may take to go before a buffer counts as in use."""


class _Place:
    """What a pool remembers of one buffer; the buffer holds it."""

    def __init__(self, number: int, block: Block, stream: Stream, is_own_stream: bool) -> None:
        self.number = number
        self.block = weakref.ref(block)
        self.stream = stream
        self.needs_stream_check = not is_own_stream
        self.has_several_streams = False
        self.num_uses = _num_uses(block)
        self.is_alive = False
        self.slot: Slot | None = None
        self.mask = 0
        self.local: torch.Tensor | None = None
        self.is_in_slot = False

    def is_watched(self, block: Block) -> bool:
        """Return whether somebody but the runtime holds a view of the buffer's memory."""
        return _num_uses(block) > self.num_uses

    def move(self, block: Block, local: torch.Tensor) -> None:
        # Views made in inference mode could not be saved for backward later.
        with torch.inference_mode(False):
            block.move_to(local)
        self.is_in_slot = local is self.local
        self.num_uses = _num_uses(block)


def _num_uses(block: Block) -> int:
    return num_storage_uses(block.local) - block.num_plan_views


@dataclass
class _ArenaBlock:
    """The memory of one arena, as the allocator below sees it."""

    name: str
    local: torch.Tensor
    stream: Stream
    place: Any = None
    num_plan_views: int = 0

    def move_to(self, local: torch.Tensor) -> None:
        self.local = local


class TracePool:
    """Fixed places for the buffers that live and die inside a step; see [Note: places that do not move].

    Args:
        below: where storage outside arenas comes from.
        device: where the buffers lie.
        own_streams: streams that nobody but the runtime makes current: whoever allocates on one always does.
        arena_allocator: where arenas come from; None for `below`.

    Attributes:
        plan: the slots; None while the pool records.
        is_active: whether buffers lie in their slots now.
        num_fallbacks: how often a buffer could not lie in its slot.
        num_moves: how often all buffers have got other addresses.
    """

    def __init__(
        self,
        below: StorageAllocator,
        device: torch.device,
        own_streams: Sequence[Stream],
        arena_allocator: StorageAllocator | None = None,
    ) -> None:
        self._below = below
        self._arena_allocator = below if arena_allocator is None else arena_allocator
        self._device = device
        self._own_streams = own_streams
        self._places: list[_Place] = []
        self._events: list[Event] = []
        self._arenas: list[_ArenaBlock] = []
        self._taken = 0
        self.plan: SlotPlan | None = None
        self.is_active = False
        self.num_fallbacks = self.num_moves = 0

    # --- the allocator's side -------------------------------------------------------------------------------------

    def allocate(self, block: Block) -> None:
        """Give a buffer memory of undefined contents: its slot, where it has one that is free."""
        place = block.place
        if (
            place is not None
            and place.is_in_slot
            and not self._taken & place.mask
            and not (place.needs_stream_check and self._is_elsewhere(place))
        ):
            self._taken |= place.mask
            place.is_alive = True
        else:
            self._allocate_apart(block)

    def release(self, block: Block) -> None:
        """Take a buffer's memory back."""
        place = block.place
        if place is None:
            # What a new buffer was made with; one without elements never gets a place.
            if block.local.numel():
                self._below.release(block)
        elif place.is_alive:
            place.is_alive = False
            if place.is_in_slot:
                self._taken &= ~place.mask
                return
            self._below.release(block)
            if self.plan is None:
                self._events.append(Event(place.number, False))

    def _allocate_apart(self, block: Block) -> None:
        """Give a buffer its slot after a time elsewhere, or storage of its own."""
        if block.local.numel() == 0:
            return
        place = block.place
        if place is None:
            stream = current_stream(self._device)
            place = block.place = _Place(len(self._places), block, stream, stream in self._own_streams)
            self._places.append(place)
        if place.is_alive:
            return
        if self.plan is None:
            place.has_several_streams |= self._is_elsewhere(place)
            self._events.append(Event(place.number, True))
        elif self.is_active and self._take_slot(place, block):
            return
        self._below.allocate(block)
        place.is_alive = True

    def _take_slot(self, place: _Place, block: Block) -> bool:
        """Let a buffer lie in its slot, or move it out of there; return whether it lies in its slot."""
        if place.local is None:
            why = "the recorded iteration had " + ("it on several streams" if place.has_several_streams else "none")
        elif self._taken & place.mask:
            why = f"its place was taken by {', '.join(self._holders(place))}"
        elif self._is_elsewhere(place):
            why = "it was asked for on another stream than in the recorded iteration"
        else:
            if not place.is_in_slot and not place.is_watched(block):
                place.move(block, place.local)
            if place.is_in_slot:
                self._taken |= place.mask
                place.is_alive = True
            return place.is_in_slot
        if place.is_in_slot:
            if not self._settles(place, block):
                raise RuntimeError(
                    f"trace_pool: expected units in use at one time as in the recorded iteration, got {block.name} "
                    f"whose memory a graph holds while {why}. Build this model with trace_pool=False."
                )
            place.move(block, self._make(block))
        self.note_fallback(block.name, why)
        return False

    def note_fallback(self, name: str, why: str) -> None:
        """Count a buffer that could not lie in its slot in time, and warn of the first one.

        Args:
            name: the buffer's.
            why: ends a sentence.
        """
        self.num_fallbacks += 1
        if self.num_fallbacks == 1:
            warnings.warn(
                f"trace_pool: expected buffers as in the recorded iteration, got {name}: {why}. Results are the same; "
                "such buffers take other memory, or are filled later. Not said again.",
                stacklevel=2,
            )

    def _is_elsewhere(self, place: _Place) -> bool:
        return bool(current_stream(self._device) != place.stream)

    def _holders(self, place: _Place) -> list[str]:
        return [
            block.name
            for other, block in self._live_places()
            if other is not place and other.is_alive and other.is_in_slot and other.mask & place.mask
        ]

    def _settles(self, place: _Place, block: Block) -> bool:
        """Return whether nobody else holds a view of the buffer, now or soon."""
        deadline = time.monotonic() + GRACE_S
        while place.is_watched(block):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    # --- the context's side ---------------------------------------------------------------------------------------

    def is_in_the_way(self, block: Block) -> bool:
        """Return whether a buffer that needs memory would find its slot taken."""
        place = block.place
        return place is not None and not place.is_alive and bool(self._taken & place.mask)

    def is_in_place(self, block: Block) -> bool:
        """Return whether a buffer lies in its slot, where it is in every step until all buffers move."""
        return self.is_active and block.place is not None and block.place.is_in_slot

    def overlaps(self, block: Block, other: Block) -> bool:
        """Return whether two buffers lie in overlapping slots."""
        one, two = block.place, other.place
        return one is not None and two is not None and one.is_in_slot and two.is_in_slot and bool(one.mask & two.mask)

    def forget(self) -> None:
        """Drop what has been recorded so far."""
        if self.plan is None:
            self._events.clear()

    @property
    def is_quiet(self) -> bool:
        """Whether no buffer has memory, and nobody else holds views of any; views may take a moment to go."""
        places = list(self._live_places())
        return not any(place.is_alive for place, _ in places) and all(self._settles(*each) for each in places)

    def activate(self, families: Mapping[int, int]) -> None:
        """Plan the slots, unless that was done, and move all buffers there; while the pool is quiet.

        Args:
            families: by the id of a buffer; those of different families, or of none, never share memory.
        """
        release_idle_memory(self._device)
        assert not self.is_active, "moved once"
        self.num_moves += 1
        with torch.inference_mode(False):
            if self.plan is None:
                self._make_plan(families)
            for arena in self._arenas:
                with arena.stream:
                    self._arena_allocator.allocate(arena)
            for place, block in self._live_places():
                if place.slot is not None:
                    arena = self._arenas[place.slot.arena]
                    place.local = _carve(arena.local, place.slot.offset, block.local)
                    place.move(block, place.local)
        self.is_active = True

    def deactivate(self) -> None:
        """Give the memory of all arenas back, while the pool is quiet; buffers take storage of their own from now."""
        self.is_active = False
        self.num_moves += 1
        for place, block in self._live_places():
            if place.is_in_slot:
                place.local = None
                place.move(block, self._make(block))
                self._below.release(block)
        for arena in self._arenas:
            self._arena_allocator.release(arena)
        # What one stream has had is of no use to others before that.
        release_idle_memory(self._device)

    @property
    def busy(self) -> list[str]:
        """Names of the buffers that have memory now, or of which somebody else holds views."""
        return [block.name for place, block in self._live_places() if place.is_alive or place.is_watched(block)]

    @property
    def slots(self) -> dict[str, Slot]:
        """Where each buffer lies, by name."""
        return {block.name: place.slot for place, block in self._live_places() if place.slot is not None}

    @property
    def num_bytes(self) -> int:
        """Memory that the pool holds now."""
        return sum(arena.num_bytes for arena in self.plan.arenas) if self.plan is not None and self.is_active else 0

    def _live_places(self) -> Iterator[tuple[_Place, Block]]:
        for place in self._places:
            block = place.block()
            if block is not None:
                yield place, block

    def _make_plan(self, families: Mapping[int, int]) -> None:
        """Plan slots for the buffers that the recorded iteration has used, each on one stream."""
        used = {event.buffer for event in self._events}
        chosen = [
            (place, block)
            for place, block in self._live_places()
            if place.number in used and not place.has_several_streams
        ]
        streams: list[Stream] = []
        requests = []
        for place, block in chosen:
            if place.stream not in streams:
                streams.append(place.stream)
            key = (block.local.dtype, streams.index(place.stream), families.get(id(block)))
            requests.append(Request(block.local.numel() * block.local.element_size(), key))
        numbers = {place.number: index for index, (place, _) in enumerate(chosen)}
        events = [Event(numbers[number], is_new) for number, is_new in self._events if number in numbers]
        self.plan = plan_slots(requests, events)
        self._events.clear()
        for (place, _), slot, mask in zip(chosen, self.plan.slots, self.plan.masks(), strict=True):
            place.slot, place.mask = slot, mask
        homes = {request.key: place.stream for (place, _), request in zip(chosen, requests, strict=True)}
        for index, arena in enumerate(self.plan.arenas):
            stream = homes[arena.key]
            with stream:
                memory = torch.empty(arena.num_bytes, dtype=torch.uint8, device=self._device)
                block = _ArenaBlock(f"arena {index}", memory, stream)
                self._arena_allocator.release(block)
            self._arenas.append(block)

    def _make(self, block: Block) -> torch.Tensor:
        """Return a flat tensor with storage of its own, like a buffer's."""
        with torch.inference_mode(False):
            return torch.empty_like(block.local)


def _carve(arena: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor like another one over bytes of an arena; its Storage is its own, and keeps these alive."""
    part = arena[offset : offset + like.numel() * like.element_size()]
    carved: torch.Tensor = from_dlpack(to_dlpack(part)).view(like.dtype)
    return carved
