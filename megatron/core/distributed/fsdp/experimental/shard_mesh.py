# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ShardMesh`: a device mesh, and which of its axes cut a flat buffer into shards, in which order.

It counts and names process groups; it neither communicates nor knows what is in a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .placement import Flat


class ShardMesh:
    """A device mesh and the axes of it that cut.

    Shards are numbered with the first of `axes` as the most significant digit, so that buffers that are cut by fewer
    axes hold runs of neighbouring shards. Example: a (2, 4) mesh with axes (1, 0) has 8 shards; rank (o, i) holds shard
    2 * i + o. Cut by axis 1 only, it holds both shards of i.

    Args:
        mesh: data-parallel axes, then perhaps one of tensor parallelism, of which buffers know nothing.
        axes: axes that cut any buffer, most significant first; None means every axis, the innermost first.
        ndim: data-parallel axes; None means all.

    Attributes:
        device_mesh: `mesh`.
        axes: as given, or what None means.
        ndim: as given, or what None means.
        gather_groups: process groups in which weights are gathered, by axis, where these are not the mesh's.
    """

    def __init__(self, mesh: DeviceMesh, axes: Iterable[int] | None = None, ndim: int | None = None) -> None:
        self.device_mesh = mesh
        self.ndim = mesh.ndim if ndim is None else ndim
        self.axes = tuple(reversed(range(self.ndim))) if axes is None else tuple(axes)
        self._groups: dict[int, dist.ProcessGroup] = {}
        self.gather_groups: dict[int, dist.ProcessGroup] = {}

    def __reduce__(self) -> Any:
        """Pickle without process groups."""
        return ShardMesh, (self.device_mesh, self.axes, self.ndim)

    @property
    def num_shards(self) -> int:
        """Shards of a buffer that every axis of `axes` cuts."""
        return math.prod(self.device_mesh.size(axis) for axis in self.axes)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Public placements, one per axis of the device mesh, of a tensor that every axis of `axes` cuts."""
        return tuple(Shard(0) if axis in self.axes else Replicate() for axis in range(self.device_mesh.ndim))

    def group(self, axis: int) -> dist.ProcessGroup:
        """Return the process group of this rank along an axis."""
        if axis not in self._groups:
            self._groups[axis] = self.device_mesh.get_group(axis)
        return self._groups[axis]

    def gather_group(self, axis: int) -> dist.ProcessGroup:
        """Return the process group of this rank along an axis, for weights that are gathered."""
        return self.gather_groups.get(axis) or self.group(axis)

    def position(self, placements: Sequence[Placement]) -> tuple[int, int]:
        """Return (shard, num_merged): this rank holds shard `shard` where `num_merged` of the shards make one.

        Args:
            placements: one per mesh axis; those that are `Flat` cut.

        Raises:
            ValueError: an axis cuts, and a more significant one does not, so that what a rank holds is no run.
        """
        shard, num_shards, is_open = 0, 1, False
        for axis in self.axes:
            if isinstance(placements[axis], Flat):
                shard = shard * self.device_mesh.size(axis) + self.device_mesh.get_local_rank(axis)
                num_shards *= self.device_mesh.size(axis)
            if is_open and isinstance(placements[axis], Flat):
                raise ValueError(
                    f"placements: expected the axes that cut to be the first of {self.axes}, got {tuple(placements)}. "
                    "Cut inner axes first."
                )
            is_open = is_open or not isinstance(placements[axis], Flat)
        return shard, self.num_shards // num_shards
