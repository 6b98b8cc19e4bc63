# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`DBuffer`: a group of logical tensors in one flat tensor that is distributed over a device mesh.

It owns storage and placements and can change a placement; it never decides when, and knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from . import collectives
from .allocator import StorageAllocator
from .device import report_access
from .layout import GroupLayout, Range
from .placement import Communication, communication
from .shard_mesh import ShardMesh


class DBuffer:
    """One flat tensor that holds this rank's part of a group of logical tensors.

    Args:
        layout: where each tensor lies, cut into the shards of `mesh`.
        mesh: the data-parallel mesh and the axes of it that cut.
        placements: one per mesh axis, outer to inner: `Flat`, `Replicate` or `Partial`.
        dtype: element type of `local`.
        device: where `local` lies.
        name: says which buffer this is, in errors and to an observer.
        allocator: where storage comes from.
        is_transient: start without storage, which `allocate` and `release` then bring and take; otherwise the buffer
            has its storage for life, and starts as zeros.

    Attributes:
        origin: follows the name where ranks compare what they send: which of several models the buffer belongs to.
        local: [local_numel]; elements that belong to no tensor are undefined.
        has_storage: whether memory is behind `local`, so that it may be read.
        followers: tensors of others, one per tensor, that are to share memory with `pieces` wherever these move; their
            ``data`` is set.
        place: what the allocator remembers of this buffer.
        pieces: views of `local`, one per tensor. A whole tensor has its logical shape, whole rows the shape
            [rows, *shape[1:]], anything else is 1-D; which of these a tensor has is the same on every rank.
    """

    def __init__(
        self,
        layout: GroupLayout,
        mesh: ShardMesh,
        placements: Sequence[Placement],
        *,
        dtype: torch.dtype,
        device: torch.device,
        name: str,
        allocator: StorageAllocator,
        is_transient: bool = False,
    ) -> None:
        if len(placements) != mesh.ndim or layout.num_shards != mesh.num_shards:
            raise ValueError(
                f"buffer {name}: expected one placement for each of {mesh.ndim} mesh axes and {mesh.num_shards} "
                f"shards, got {tuple(placements)} and {layout.num_shards}. Plan the layout for this mesh."
            )
        self.layout = layout
        self.mesh = mesh
        self.placements = tuple(placements)
        self.dtype = dtype
        self.name = name
        self.origin = ""
        self.is_transient = is_transient
        self.place: Any = None
        self.followers: Sequence[Any] = ()
        self._allocator = allocator
        self._gathers: dict[int, _Gather] = {}
        self._changes: dict[int, _Change] = {}
        self.num_plan_views = 0
        self.local_range = self._range(self.placements)
        self.local = torch.empty(self.local_range.numel, dtype=dtype, device=device)
        self.pieces = self._make_pieces()
        allocator.release(self)
        self.has_storage = not is_transient
        if not is_transient:
            allocator.allocate(self)
            self.local.zero_()

    def like(self) -> DBuffer:
        """Return a transient buffer of the same kind, with storage of its own."""
        new = DBuffer(
            self.layout,
            self.mesh,
            self.placements,
            dtype=self.dtype,
            device=self.local.device,
            name=self.name,
            allocator=self._allocator,
            is_transient=True,
        )
        new.origin = self.origin
        return new

    def distribute(self, index: int, tensor: torch.Tensor) -> None:
        """Copy this rank's part of tensor `index`, cast to this buffer's dtype.

        Args:
            index: position in the layout.
            tensor: full values, logical shape, the same on every rank; on any device.
        """
        report_access("distribute", writes=(self.name,))
        owned = self.owned(index)
        with torch.no_grad():
            self.pieces[index].view(-1).copy_(tensor.detach().reshape(-1)[owned.start : owned.stop])

    def owned(self, index: int) -> Range:
        """Return the elements of tensor `index`, counted from its own first, that `local` holds."""
        slot = self.layout.slots[index]
        return slot.range.intersect(self.local_range).shift(-slot.offset)

    def _make_pieces(self) -> tuple[torch.Tensor, ...]:
        views = []
        is_full = self.local_range.numel == self.layout.global_numel
        for index, slot in enumerate(self.layout.slots):
            owned = self.owned(index)
            start = slot.offset + owned.start - self.local_range.start if owned.numel else 0
            flat = self.local[start : start + owned.numel]
            if is_full:
                views.append(flat.view(slot.shape))
            elif self.layout.is_row_aligned(index) and slot.shape and 0 not in slot.shape[1:]:
                views.append(flat.view(owned.numel // slot.row_numel, *slot.shape[1:]))
            else:
                views.append(flat)
        return tuple(views)

    def allocate(self) -> None:
        """Give a transient buffer its storage, on the current stream; contents are undefined."""
        assert self.is_transient, "a resident buffer always has its storage"
        self._allocator.allocate(self)
        self.has_storage = True
        report_access("allocate", writes=(self.name,))

    def release(self) -> None:
        """Take a transient buffer's storage back, on the current stream."""
        assert self.is_transient, "a resident buffer keeps its storage"
        report_access("free", writes=(self.name,))
        self._allocator.release(self)
        self.has_storage = False

    def move_to(self, local: torch.Tensor) -> None:
        """Lie in another flat tensor from now on, and take `followers` along; contents are lost.

        Called by the allocator, while nothing else holds views of the old one.

        Args:
            local: as the old one: [local_numel], same dtype and device.
        """
        self.local = local
        self.pieces = self._make_pieces()
        self._gathers.clear()
        self._changes.clear()
        self.num_plan_views = 0
        if self.followers:
            for follower, piece in zip(self.followers, self.pieces, strict=True):
                follower.data = piece.data

    def copy_from(self, source: DBuffer) -> None:
        """Copy and cast another buffer with the same layout and local range."""
        report_access("copy", reads=(source.name,), writes=(self.name,))
        self.local.copy_(source.local)

    def refresh_from(self, source: DBuffer) -> None:
        """Fill this buffer with the cast values of one that is cut by the same axes or by more, on the current stream.

        Sent in this buffer's dtype, and gathered in place.
        """
        report_access("copy", reads=(source.name,), writes=(self.name,))
        self.own_part(source.placements).copy_(source.local)
        self.join(source.placements)

    def own_part(self, placements: tuple[Placement, ...]) -> torch.Tensor:
        """Return the elements that this rank has of a buffer that lies so, cut by the same axes or by more."""
        return self._gather_from(placements).own

    def join(self, placements: tuple[Placement, ...]) -> None:
        """Gather what every rank has written into its `own_part`, in place, on the current stream."""
        gather = self._gather_from(placements)
        self._gather(gather, gather.own, self.name)

    def redistribute(self, target: DBuffer) -> None:
        """Fill `target`, which lies differently on the mesh, from this buffer, on the current stream.

        Args:
            target: same layout, mesh and dtype, allocated. A `Partial` buffer's own contents are undefined afterwards.

        Raises:
            ValueError: a change without a meaning, or different dtypes.
        """
        if self.dtype != target.dtype:
            raise ValueError(
                f"redistribute {self.name} to {target.name}: expected equal dtypes, got {self.dtype} and "
                f"{target.dtype}. Cast with copy_from first."
            )
        change = self._change_to(target)
        if change.kind is Communication.ALL_GATHER:
            target._gather(target._gather_from(self.placements), self.local, self.name)
        elif change.kind is Communication.REDUCE_SCATTER:
            self._reduce(change, target)
        elif change.kind is Communication.SLICE:
            report_access("slice", reads=(self.name,), writes=(target.name,))
            target.local.copy_(self._part(target.local_range))
        else:
            target.copy_from(self)

    # Plans are made once per pair of placements: they cost the host as much as the collectives. They are found by the
    # identity of the placements, which they keep alive.

    def _change_to(self, target: DBuffer) -> _Change:
        """Return what turns this buffer into one that lies like `target`."""
        known = self._changes.get(id(target.placements))
        if known is None:
            known = self._changes[id(target.placements)] = self._plan_change(target)
            self.num_plan_views += sum(part is not None for part, _, _ in known.scatters)
        return known

    def _plan_change(self, target: DBuffer) -> _Change:
        changes: dict[int, Communication] = {
            axis: change
            for axis, (old, new) in enumerate(zip(self.placements, target.placements, strict=True))
            if (change := communication(old, new)) is not Communication.NONE
        }
        kinds = set(changes.values())
        if len(kinds) > 1 and not kinds <= _REDUCTIONS:
            raise ValueError(
                f"redistribute {self.name} to {target.name}: expected gathers, reductions or slices, got a mixture: "
                f"{self.placements} to {target.placements}. Go through a buffer in between."
            )
        order = [*self.mesh.axes, *(axis for axis in range(self.mesh.ndim) if axis not in self.mesh.axes)]
        cuts = [axis for axis in order if changes.get(axis) is Communication.REDUCE_SCATTER]
        placements, scatters = list(self.placements), []
        for axis in cuts:
            placements[axis] = target.placements[axis]
            # What a middle step leaves is written over this rank's own part of what it reads.
            part = None if axis == cuts[-1] else self._part(self._range(placements))
            scatters.append((part, _reduction(self.placements[axis]), self.mesh.group(axis)))
        sums = [
            (_reduction(self.placements[axis]), self.mesh.group(axis))
            for axis in order
            if changes.get(axis) is Communication.ALL_REDUCE
        ]
        kind = Communication.REDUCE_SCATTER if kinds & _REDUCTIONS else next(iter(kinds), Communication.NONE)
        return _Change(target.placements, kind, scatters, sums)

    def _gather_from(self, placements: tuple[Placement, ...]) -> _Gather:
        """Return how shards that lie as `placements` say become this buffer."""
        known = self._gathers.get(id(placements))
        if known is None:
            current, steps = list(placements), []
            # The least significant axis comes first: it joins neighbours.
            for axis in reversed(self.mesh.axes):
                if current[axis] != self.placements[axis]:
                    current[axis] = Replicate()
                    steps.append((self._part(self._range(current)), self.mesh.gather_group(axis)))
            known = _Gather(placements, self._part(self._range(placements)), steps)
            self._gathers[id(placements)] = known
            self.num_plan_views += 1 + len(steps)
        return known

    def _gather(self, gather: _Gather, shard: torch.Tensor, source: str) -> None:
        """Gather `shard` over the axes that do not cut this buffer, in place."""
        for joined, group in gather.steps:
            report_access("all_gather", reads=(source,), writes=(self.name,))
            collectives.all_gather(joined, shard, group, what=source + self.origin)
            shard, source = joined, self.name

    def _reduce(self, change: _Change, target: DBuffer) -> None:
        """Reduce over axes: first those that cut, the most significant one first, then those that do not."""
        data, what = self.local, self.name + self.origin
        for part, reduction, group in change.scatters:
            into, name = (target.local, target.name) if part is None else (part, self.name)
            report_access("reduce_scatter", reads=(self.name,), writes=(name,))
            collectives.reduce_scatter(into, data, reduction, group, what=what)
            data = into
        if not change.scatters:
            target.copy_from(self)
        for reduction, group in change.sums:
            report_access("all_reduce", reads=(target.name,), writes=(target.name,))
            collectives.all_reduce(target.local, reduction, group, what=what)

    def _range(self, placements: Sequence[Placement]) -> Range:
        return self.layout.shard_range(*self.mesh.position(placements))

    def _part(self, run: Range) -> torch.Tensor:
        """Return the elements of a run of the layout that lies within `local`."""
        return self.local[run.start - self.local_range.start : run.stop - self.local_range.start]


_REDUCTIONS = frozenset({Communication.REDUCE_SCATTER, Communication.ALL_REDUCE})


@dataclass(frozen=True)
class _Gather:
    """How shards become a buffer.

    Attributes:
        placements: how the shards lie.
        own: this rank's shard in the buffer.
        steps: what each gather fills, and the ranks that take part.
    """

    placements: tuple[Placement, ...]
    own: torch.Tensor
    steps: list[tuple[torch.Tensor, dist.ProcessGroup]]


@dataclass(frozen=True)
class _Change:
    """How a buffer becomes one that lies differently.

    Attributes:
        placements: how that one lies.
        kind: ``REDUCE_SCATTER`` stands for reductions of any kind.
        scatters: what each reduce-scatter fills, None for the other buffer; its operation; the ranks that take part.
        sums: operation and ranks of each all-reduce.
    """

    placements: tuple[Placement, ...]
    kind: Communication
    scatters: list[tuple[torch.Tensor | None, Literal["sum", "avg"], dist.ProcessGroup]]
    sums: list[tuple[Literal["sum", "avg"], dist.ProcessGroup]]


def _reduction(placement: Placement) -> Literal["sum", "avg"]:
    assert isinstance(placement, Partial)
    if placement.reduce_op == "sum":
        return "sum"
    if placement.reduce_op == "avg":
        return "avg"
    raise ValueError(f"gradient reduction: expected sum or avg, got {placement.reduce_op!r}.")
