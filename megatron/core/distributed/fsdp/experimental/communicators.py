# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Process groups that a context makes beside those of its meshes, over the same ranks or runs of them.

It makes groups and hands them out; it sends nothing but what establishes them.

[Note: one communicator, one order]
NCCL runs the operations of one communicator in the order in which they were issued, whatever their streams: the
reduction of one unit waits until the gather ahead of the next one is over. Gathers with groups of their own do not hold
up reductions. Axes over which weights are gathered once per step, when nothing is being reduced, keep their groups.

[Note: who makes a group]
Names of process groups are counted, so that every rank makes every group, its own or not, in one order: that of the
mesh, once ranks have agreed on their units. The groups end with torch.distributed's, as those of a mesh do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import collectives
from .parameter_group import FsdpParameterGroup
from .placement import Flat
from .unit import Unit


class Communicators:
    """The process groups that one context has made, each once per set of ranks.

    Args:
        is_separate: whether weights are gathered in groups in which nothing is reduced.
        has_one_stream: whether gathers and reductions are in one order in any case.

    Attributes:
        is_separate: as given.

    Raises:
        ValueError: both.
    """

    def __init__(self, is_separate: bool, has_one_stream: bool) -> None:
        if is_separate and has_one_stream:
            raise ValueError(
                "separate_communicators: expected False with unify_communication_stream=True, got True; one stream "
                "keeps one order in any case. Leave out one of them."
            )
        self.is_separate = is_separate
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def along(self, mesh: DeviceMesh, axis: int, num_ranks: int) -> dist.ProcessGroup:
        """Return this rank's group among runs of neighbours along an axis; every rank of the program must call it.

        Example: four ranks on one axis in runs of two are the groups [0, 1] and [2, 3].

        Args:
            mesh: holds every rank of the program.
            axis: of the mesh.
            num_ranks: of one run; divides the axis.

        Raises:
            NotImplementedError: ranks outside the mesh, or in another order than that of their numbers.
        """
        rows = mesh.mesh.movedim(axis, -1).reshape(-1, num_ranks).tolist()
        key = tuple(map(tuple, rows))
        if key not in self._groups:
            _check_ranks(rows)
            self._groups[key] = _make_group(rows, mesh.get_group(axis), torch.device(mesh.device_type))
        return self._groups[key]

    def over(self, ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        """Return a group of ranks that no single axis of a mesh holds; these ranks must call it, and no others need to.

        Args:
            ranks: global ranks, this one among them.
            like: a group with the backend to use.
            device: where this rank's tensors lie.
        """
        key = (tuple(sorted(ranks)),)
        if key not in self._groups:
            group = dist.group.WORLD
            assert group is not None
            # A group that others need not make cannot be split off communicators that were made eagerly: those of
            # all ranks exist then.
            if len(ranks) < dist.get_world_size() and group.bound_device_id is None:
                options: Any = like._get_backend(device).options
                group = dist.new_group(
                    sorted(ranks),
                    timeout=options._timeout,
                    backend=dist.get_backend(like),
                    use_local_synchronization=True,
                    group_desc="fsdp_exchange",
                )
            if group.bound_device_id is None:
                # A batch in which some ranks take no part may not be the first thing that a group does.
                collectives.all_reduce(torch.zeros(1, device=device), "sum", group, what="first use of a process group")
            self._groups[key] = group
        return self._groups[key]

    def separate_gathers(self, units: Iterable[Unit]) -> None:
        """Let the weights of units be gathered in groups in which nothing is reduced, if that was asked for.

        Args:
            units: of one context, the same on every rank, which must call it.

        Raises:
            ValueError: no unit gathers weights while gradients are reduced.
            NotImplementedError: see `along`.
        """
        if not self.is_separate:
            return
        groups = [group for unit in units for group in unit.parameter_groups]
        gathering = [group for group in groups if gather_axes(group)]
        if not gathering or not any(group.requires_grad for group in groups):
            raise ValueError(
                "fully_shard_context separate_communicators: expected units that shard their parameters, and some that "
                "are trained, got none; no gather would run beside a reduction. Leave it out."
            )
        for group in gathering:
            mesh = group.main_weight.mesh
            for axis in gather_axes(group):
                num_ranks = mesh.device_mesh.size(axis)
                if num_ranks > 1:
                    mesh.gather_groups[axis] = self.along(mesh.device_mesh, axis, num_ranks)


def gather_axes(group: FsdpParameterGroup) -> list[int]:
    """Return the axes over which a group's weights are gathered before each use."""
    return [axis for axis, at in enumerate(group.model_weight.placements) if isinstance(at, Flat)]


def _check_ranks(rows: Sequence[Sequence[int]]) -> None:
    ranks = sorted(rank for row in rows for rank in row)
    if ranks != list(range(dist.get_world_size())):
        raise NotImplementedError(
            f"process groups of a context: expected a mesh of all {dist.get_world_size()} ranks, got one of {ranks}; "
            "the other ranks would have to make these groups, too. Shard over all ranks, or leave out "
            "separate_communicators and a number for reshard_after_forward."
        )
    if any(list(row) != sorted(row) for row in rows):
        raise NotImplementedError(
            f"process groups of a context: expected ranks in ascending order along each axis of the mesh, got {rows}. "
            "Build the mesh in the order of ranks."
        )


def _make_group(rows: Sequence[list[int]], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Make one group per row, with the backend and the settings of another group; return this rank's."""
    options: Any = like._get_backend(device).options
    settings = _nccl_options(options) if hasattr(options, "config") else None
    made: list[dist.ProcessGroup] = []
    for row in rows:
        group = dist.new_group(
            row,
            timeout=options._timeout,
            backend=dist.get_backend(like),
            pg_options=settings,
            group_desc="fsdp_all_gather",
        )
        if dist.get_rank() in row:
            made.append(group)
    assert len(made) == 1, "rows are disjoint and hold every rank"
    return made[0]


def _nccl_options(options: Any) -> Any:
    """Return new options with a group's priority and NCCL settings; torch fills in the rest."""
    new = type(options)(is_high_priority_stream=options.is_high_priority_stream)
    new.config = options.config
    new._timeout = options._timeout
    return new
