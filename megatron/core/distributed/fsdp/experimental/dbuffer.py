# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`DBuffer`: a group of logical tensors in one flat tensor that is distributed over a device mesh.

It owns storage and placements and can change a placement; it never decides when, and knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from . import collectives
from .allocator import StorageAllocator
from .device import report_access
from .layout import GroupLayout, Range
from .placement import Communication, Flat, communication


class DBuffer:
    """One flat tensor that holds this rank's part of a group of logical tensors.

    Args:
        layout: where each tensor lies, cut into as many shards as the mesh has ranks.
        mesh: the data-parallel mesh.
        placements: one per mesh axis, outer to inner: `Flat`, `Replicate` or `Partial`.
        dtype: element type of `local`.
        device: where `local` lies.
        name: says which buffer this is, in errors and to an observer.
        allocator: for a transient buffer, where its storage comes from; it starts without storage. None makes a
            resident buffer of zeros.

    Attributes:
        origin: follows the name where ranks compare what they send: which of several models the buffer belongs to.
        local: [local_numel]; elements that belong to no tensor are undefined.
        pieces: views of `local`, one per tensor. A whole tensor has its logical shape, whole rows the shape
            [rows, *shape[1:]], anything else is 1-D; which of these a tensor has is the same on every rank.
    """

    def __init__(
        self,
        layout: GroupLayout,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        dtype: torch.dtype,
        device: torch.device,
        name: str,
        allocator: StorageAllocator | None = None,
    ) -> None:
        if len(placements) != mesh.ndim or layout.num_shards != mesh.size():
            raise ValueError(
                f"buffer {name}: expected one placement for each of {mesh.ndim} mesh axes and {mesh.size()} "
                f"shards, got {tuple(placements)} and {layout.num_shards}. Plan the layout for this mesh."
            )
        self.layout = layout
        self.mesh = mesh
        self.placements = tuple(placements)
        self.dtype = dtype
        self.name = name
        self.origin = ""
        self._allocator = allocator
        shard, num_merged = _merged_shard(mesh, self.placements)
        self.local_range: Range = layout.shard_range(shard, num_merged)
        make = torch.zeros if allocator is None else torch.empty
        self.local = make(self.local_range.numel, dtype=dtype, device=device)
        self.pieces = self._make_pieces()
        if allocator is not None:
            allocator.release(self.local)

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
        assert self._allocator is not None, "a resident buffer always has its storage"
        self._allocator.allocate(self.local)
        report_access("allocate", writes=(self.name,))

    def release(self) -> None:
        """Take a transient buffer's storage back, on the current stream."""
        assert self._allocator is not None, "a resident buffer keeps its storage"
        report_access("free", writes=(self.name,))
        self._allocator.release(self.local)

    @property
    def is_allocated(self) -> bool:
        """Whether `local` may be read."""
        return self.local.numel() == 0 or self.local.untyped_storage().nbytes() > 0

    def copy_from(self, source: DBuffer) -> None:
        """Copy and cast another buffer with the same layout and local range."""
        report_access("copy", reads=(source.name,), writes=(self.name,))
        self.local.copy_(source.local)

    def redistribute(self, target: DBuffer) -> None:
        """Fill `target`, which lies differently on the mesh, from this buffer, on the current stream.

        Args:
            target: same layout, mesh and dtype, allocated. A `Partial` buffer's own contents are undefined afterwards.

        Raises:
            NotImplementedError: placements differ on more than one axis.
            ValueError: a change without a meaning, or different dtypes.
        """
        if self.dtype != target.dtype:
            raise ValueError(
                f"redistribute {self.name} to {target.name}: expected equal dtypes, got {self.dtype} and "
                f"{target.dtype}. Cast with copy_from first."
            )
        changes = [
            (axis, change)
            for axis, (old, new) in enumerate(zip(self.placements, target.placements, strict=True))
            if (change := communication(old, new)) is not Communication.NONE
        ]
        if len(changes) > 1:
            raise NotImplementedError(
                f"redistribute {self.name} to {target.name}: expected a change on one mesh axis, got "
                f"{self.placements} to {target.placements}. Go through a buffer in between."
            )
        if not changes:
            target.copy_from(self)
            return
        axis, change = changes[0]
        self._communicate(change, axis, target)

    def _communicate(self, change: Communication, axis: int, target: DBuffer) -> None:
        group = self.mesh.get_group(axis)
        if change is Communication.SLICE:
            report_access("slice", reads=(self.name,), writes=(target.name,))
            start = target.local_range.start - self.local_range.start
            target.local.copy_(self.local[start : start + target.local.numel()])
            return
        report_access(change.value, reads=(self.name,), writes=(target.name,))
        if change is Communication.ALL_GATHER:
            collectives.all_gather(target.local, self.local, group, what=self.name + self.origin)
            return
        reduction = _reduction(self.placements[axis])
        if change is Communication.REDUCE_SCATTER:
            collectives.reduce_scatter(target.local, self.local, reduction, group, what=self.name + self.origin)
        else:
            target.local.copy_(self.local)
            collectives.all_reduce(target.local, reduction, group, what=self.name + self.origin)


def _reduction(placement: Placement) -> Literal["sum", "avg"]:
    assert isinstance(placement, Partial)
    if placement.reduce_op == "sum":
        return "sum"
    if placement.reduce_op == "avg":
        return "avg"
    raise ValueError(f"gradient reduction: expected sum or avg, got {placement.reduce_op!r}.")


def _merged_shard(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, int]:
    """Return which shard this rank holds and how many of the layout's shards it is made of.

    Shards are numbered with the inner axis first, so that an inner all-gather joins neighbours at any outer placement.
    Example: a (2, 4) mesh has 8 shards. Flat on both axes: rank (o, i) holds shard 2 * i + o of 8. Flat on the inner
    axis only: shard i of 4, each made of 2.
    """
    shard, num_shards = 0, 1
    for axis in reversed(range(mesh.ndim)):
        if isinstance(placements[axis], Flat):
            shard = shard * mesh.size(axis) + mesh.get_local_rank(axis)
            num_shards *= mesh.size(axis)
    return shard, mesh.size() // num_shards
