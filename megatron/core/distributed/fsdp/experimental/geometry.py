# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ShardGeometry`: which elements of one logical tensor each rank owns, and who is told of their use.

It holds no elements; it gathers those that it is given.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from . import collectives
from .layout import GroupLayout, Range, TensorSlot
from .model_cut import ModelCut
from .placement import Flat
from .shard_mesh import ShardMesh


class ParameterOwner(Protocol):
    """Who is told what happens to a sharded parameter."""

    def mark_main_weight_written(self, is_certain: bool = False) -> None:
        """The parameter is about to be written."""
        ...

    def mark_main_weight_lent(self, local: torch.Tensor) -> None:
        """The parameter may be written by this rank from now on, through `local`."""
        ...

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Parameter `index` is to be frozen or unfrozen; raises if that cannot be."""
        ...

    def ensure_values(self) -> None:
        """The parameter's values are about to be used."""
        ...

    def clear_gradient(self, index: int) -> None:
        """The gradient of parameter `index` has been set to None."""
        ...

    def waiting_gradient(self, index: int) -> torch.Tensor | None:
        """Return what stands for the gradient of parameter `index` if it waits for a reduction."""
        ...


@dataclass(frozen=True, eq=False)
class ShardGeometry:
    """Which elements of one logical tensor each rank of a mesh owns.

    Where tensor parallelism cuts the tensor, too, data parallelism cuts each rank's piece of it.

    Attributes:
        fqn: name of the tensor, for errors.
        layout: layout of the group that the tensor, or its piece, lies in.
        index: position of the tensor in that layout.
        mesh: the mesh whose axes cut the layout into its shards.
        owner: told of uses and writes; weak, so that tensors do not keep their group alive. None for a tensor that is
            no parameter and comes from none.
        model_cut: how the piece is cut from the tensor; None for a tensor that is not cut so.
    """

    fqn: str
    layout: GroupLayout
    index: int
    mesh: ShardMesh
    owner: weakref.ref[ParameterOwner] | None = None
    model_cut: ModelCut | None = None

    def __reduce__(self) -> Any:
        """Pickle without the owner: a copy is not connected to a group."""
        return ShardGeometry, (self.fqn, self.layout, self.index, self.mesh, None, self.model_cut)

    @property
    def cut(self) -> tuple[int, int, int, tuple[int, ...], ModelCut | None]:
        """What decides which elements each rank owns of a tensor of a given size."""
        layout = self.layout
        return layout.slots[self.index].offset, layout.shard_numel, layout.num_shards, self.mesh.axes, self.model_cut

    @property
    def sharding_axes(self) -> tuple[int, ...]:
        """Axes of the device mesh along which ranks hold different elements."""
        return self.mesh.axes if self.model_cut is None else (*self.mesh.axes, self.model_cut.axis)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Public placements, one per axis of the device mesh."""
        found = list(self.mesh.placements)
        if self.model_cut is not None:
            found[self.model_cut.axis] = Shard(self.model_cut.dim)
        return tuple(found)

    def notify_use(self, writes: bool) -> None:
        """Tell the owner that the tensor's values are about to be read, or written."""
        owner = None if self.owner is None else self.owner()
        if owner is not None:
            owner.ensure_values()
            if writes:
                owner.mark_main_weight_written(is_certain=True)

    def notify_lent(self, local: torch.Tensor) -> None:
        """Tell the owner that the tensor's values may be read or written from now on, through `local`."""
        owner = None if self.owner is None else self.owner()
        if owner is not None:
            owner.ensure_values()
            owner.mark_main_weight_lent(local)

    def notify_cleared(self) -> None:
        """Tell the owner that the parameter's gradient has been set to None."""
        owner = None if self.owner is None else self.owner()
        if owner is not None:
            owner.clear_gradient(self.index)

    def waiting_gradient(self) -> torch.Tensor | None:
        """Return what stands for the parameter's gradient if it waits for a reduction."""
        owner = None if self.owner is None else self.owner()
        return None if owner is None else owner.waiting_gradient(self.index)

    def notify_requires_grad(self, requires_grad: bool) -> None:
        """Tell the owner that the parameter is about to be frozen or unfrozen."""
        owner = None if self.owner is None else self.owner()
        if owner is not None:
            owner.set_requires_grad(self.index, requires_grad)

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return self.piece_shape if self.model_cut is None else torch.Size(self.model_cut.shape(self.piece_shape))

    @property
    def piece_shape(self) -> torch.Size:
        """Shape of what data parallelism cuts: the logical one but for tensor parallelism."""
        return torch.Size(self.layout.slots[self.index].shape)

    def rows(self, start: int, stop: int) -> ShardGeometry:
        """Return the geometry of rows ``[start, stop)``, as a tensor of its own within the same shards."""
        slot, cut, name = self.layout.slots[self.index], self.model_cut, f"{self.fqn}[{start}:{stop}]"
        if cut is not None:
            start, stop, cut = cut.rows(start, stop, slot.shape, self.fqn)
        part = TensorSlot((stop - start, *slot.shape[1:]), slot.offset + start * slot.row_numel)
        layout = GroupLayout((part,), self.layout.num_shards, self.layout.shard_numel)
        return ShardGeometry(name, layout, 0, self.mesh, self.owner, cut)

    @property
    def owned(self) -> Range:
        """The elements of the tensor, or of its piece, counted from its own first, that lie on this rank."""
        flat = [Flat() if axis in self.mesh.axes else Replicate() for axis in range(self.mesh.ndim)]
        return self.layout.owned(self.index, self.mesh.position(flat)[0])

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor; every rank of the mesh must call it.

        Args:
            local: this rank's elements, any shape.

        Returns:
            The logical shape, same dtype and device, without autograd history.
        """
        numels = [self.layout.owned(self.index, shard).numel for shard in range(self.layout.num_shards)]
        groups = [self.mesh.group(axis) for axis in reversed(self.mesh.axes)]
        parts = collectives.all_gather_uneven(local.detach().reshape(-1), numels, groups, what=self.fqn)
        piece = torch.cat(parts).view(self.piece_shape)
        cut = self.model_cut
        if cut is None:
            return piece
        pieces = piece.new_empty(cut.size * piece.numel())
        collectives.all_gather(pieces, piece.view(-1), self.mesh.group(cut.axis), what=self.fqn)
        return cut.join(pieces.view(cut.size, *piece.shape).unbind())

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return the elements of a full tensor that lie on this rank, 1-D."""
        piece = full if self.model_cut is None else self.model_cut.take(full)
        return piece.reshape(-1)[self.owned.start : self.owned.stop]
