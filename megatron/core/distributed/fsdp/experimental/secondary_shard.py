# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Groups of units with a number for reshard_after_forward: a few neighbouring ranks keep the weights until backward.

It says what is kept and what is gathered from it. When weights are released and gathered is the schedule's.

[Note: the copy]
After forward the full buffer is cut into as many equal runs as there are ranks in a subgroup, and each rank keeps one.
Example: of 4 ranks that shard, in subgroups of 2, ranks 0 and 2 keep the first half and ranks 1 and 3 the second. The
first gather in the backward that follows joins the runs within the subgroup, and frees them.

A copy holds the weights of one forward, for its backward. It is dropped, and weights are gathered from all ranks, where
main weights have been written since, and outside of backward: a forward may follow writes that only the main weights
show. All of that depends on the order of calls alone, which is the same on every rank. Whatever copies are left when
the outermost backward ends, or an evaluation, are dropped, too. A copy is used on the all-gather stream only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.tensor.placement_types import Placement

from . import collectives
from .backward_task import is_in_backward
from .communicators import Communicators, gather_axes
from .dbuffer import DBuffer
from .device import Stream, report_access
from .group_options import GroupOptions, OwnedParameter
from .parameter_group import FsdpParameterGroup
from .placement import Flat
from .shard_mesh import ShardMesh
from .unit import Unit


class SecondarilyShardedGroup(FsdpParameterGroup):
    """A parameter group of which subgroups of ranks keep a copy between forward and backward; see [Note: the copy].

    Args:
        parameters: as for `FsdpParameterGroup`.
        options: likewise.
        unit: likewise.
        index: likewise.
        num_ranks: of a subgroup; a divisor of the ranks along the one axis over which weights are gathered, neither 1
            nor all of them.

    Attributes:
        kept_weight: [global_numel / num_ranks], compute dtype; this rank's run of `full_weight`, or without storage.
    """

    def __init__(
        self, parameters: Sequence[OwnedParameter], options: GroupOptions, unit: str, index: int, *, num_ranks: int
    ) -> None:
        self._kept: tuple[DBuffer, ...] = ()
        self._is_current = False
        super().__init__(parameters, options, unit, index)
        (self._axis,), self._num_ranks = gather_axes(self), num_ranks
        self._subgroup: dist.ProcessGroup | None = None
        self.kept_weight = DBuffer(
            replace(self.layout, num_shards=num_ranks, shard_numel=self.layout.global_numel // num_ranks),
            _Runs(self._mesh.device_mesh.get_local_rank(self._axis) % num_ranks, num_ranks),
            (Flat(),),
            dtype=self.full_weight.dtype,
            device=options.device,
            name=f"{self.name}.kept_weight",
            allocator=options.allocator_of("kept_weight"),
            is_transient=True,
        )
        self._kept = (self.kept_weight,)

    @property
    def buffers(self) -> tuple[DBuffer, ...]:
        """All buffers of weights and gradients, each once."""
        return (*super().buffers, *self._kept)

    def make_subgroup(self, communicators: Communicators) -> None:
        """Take the process group of this rank's subgroup; every rank of the program must call it."""
        self._subgroup = communicators.along(self._mesh.device_mesh, self._axis, self._num_ranks)

    def keep(self) -> None:
        """Copy this rank's run of the gathered weights."""
        self._is_current = True
        kept, run = self.kept_weight, self.kept_weight.local_range
        if not kept.has_storage:
            kept.allocate()
        report_access("keep", reads=(self.full_weight.name,), writes=(kept.name,))
        kept.local.copy_(self.full_weight.local[run.start : run.stop])

    def sync_model_weight(self) -> None:
        """Make the compute weights from main weights that have been written, after which no copy is current."""
        self._is_current = self._is_current and not self.is_stale
        super().sync_model_weight()

    def unshard(self) -> None:
        """Gather the compute weights into `full_weight`, in backward from the copy if there is one that is current."""
        kept, full = self.kept_weight, self.full_weight
        if not kept.has_storage:
            super().unshard()
        elif self.is_stale or not self._is_current or not is_in_backward():
            kept.release()
            super().unshard()
        else:
            assert self._subgroup is not None, "made before the first forward"
            if not full.has_storage:
                full.allocate()
            report_access("all_gather", reads=(kept.name,), writes=(full.name,))
            collectives.all_gather(full.local, kept.local, self._subgroup, what=kept.name + kept.origin)
            kept.release()


class _Runs(ShardMesh):
    """The ranks of a subgroup as one axis.

    Args:
        rank: this rank's number in its subgroup.
        num_ranks: of the subgroup.
    """

    ndim = 1
    num_shards = 0

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.axes = (0,)
        self.num_shards, self._rank = num_ranks, rank

    def position(self, placements: Sequence[Placement]) -> tuple[int, int]:
        """Return (shard, num_merged) of this rank's run; see `ShardMesh`."""
        return self._rank, 1


def make_subgroups(units: Iterable[Unit], communicators: Communicators) -> None:
    """Make the process groups in which units gather what has been kept; every rank of the program must call it.

    Raises:
        NotImplementedError: see `Communicators.along`.
    """
    for unit in units:
        for group in _groups(unit):
            group.make_subgroup(communicators)


def keep_copies(unit: Unit) -> None:
    """Keep this rank's part of a unit's gathered weights for backward; on the all-gather stream."""
    for group in _groups(unit):
        group.keep()


def drop_copies(unit: Unit, stream: Stream) -> None:
    """Free what has been kept of a unit, on the all-gather stream."""
    for group in _groups(unit):
        if group.kept_weight.has_storage:
            with stream:
                group.kept_weight.release()


def _groups(unit: Unit) -> Iterator[SecondarilyShardedGroup]:
    return (group for group in unit.parameter_groups if isinstance(group, SecondarilyShardedGroup))
