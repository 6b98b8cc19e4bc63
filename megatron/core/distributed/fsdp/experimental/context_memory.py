# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ContextMemory`: where the buffers of a context take their memory from, and when a trace pool plans, moves and rests.

How buffers are placed is trace_pool.py's; what is gathered when is schedule.py's.

[Note: the recorded iteration]
It begins with the context's first forward and ends when every unit that has run and can be trained has been stepped: at
the next forward all buffers move to their slots, provided that none has memory and no graph holds views of one.
Optimizers that leave out some units would never end it, so that at most MAX_RECORDED_STEPS steps are recorded.

[Note: who shares]
Weights that graphs hold views of cannot move, so that two units that lie in one place must not be in use at one time.
What is in use at one time depends on the order of backward, within one root on the model alone, but for several roots
on how their losses are joined: weights of different roots never share memory, nor do weights and gradients.

[Note: making room]
A unit whose slot is taken is not gathered ahead. When it is needed, weights that were gathered ahead, or kept for
later, and lie in its slot are released first, to be gathered again. All of that depends on the order of calls alone,
which is the same on every rank, and so are the collectives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from .allocator import StorageAllocator, default_allocator
from .device import Stream
from .parameter_group import FsdpParameterGroup
from .symmetric_memory import SymmetricAllocator, check_symmetric_memory
from .trace_pool import TracePool
from .unit import Unit

MAX_RECORDED_STEPS = 8
"""Steps after which a recorded iteration ends, whatever has not been stepped in it."""

MAX_POSTPONED = 8
"""Forwards at which buffers should move and cannot, until somebody is told."""


class Graphs(Protocol):
    """Graphs that remember where weights lie."""

    def drop(self) -> None:
        """Forget all of them."""
        ...


class ContextMemory:
    """Memory of one context; a base of `FsdpContext`.

    With `trace_pool` the first iteration is recorded. From the next one on, gathered weights and packed gradients have
    fixed addresses and no allocator is called for them. Between steps the pool keeps its memory, gradients theirs. With
    `use_symmetric_memory` that memory is registered with the other ranks, so that NCCL reaches it directly.

    Attributes:
        allocator: where what lives and dies inside a step takes its memory from.
        pool: that allocator, if it is a pool.
        graphs: those of the units with ``cuda_graph=True``; None as long as there are none.
    """

    allocator: StorageAllocator
    pool: TracePool | None
    graphs: Graphs | None
    units: Callable[[], list[Unit]]
    reshard: Callable[..., None]

    def _set_up_memory(
        self, device: torch.device, own_streams: Sequence[Stream], symmetric: bool, trace_pool: bool
    ) -> None:
        self.pool = self.graphs = None
        if symmetric:
            check_symmetric_memory(device, trace_pool)
        if trace_pool:
            arenas = SymmetricAllocator(default_allocator, self._process_groups) if symmetric else None
            self.pool = TracePool(default_allocator, device, own_streams, arenas)
        self.allocator = default_allocator if self.pool is None else self.pool
        self._steps_at_start: dict[int, int] | None = None
        self._steps_seen = self._num_recorded_steps = self._num_postponed = 0

    def check_pool(self) -> None:
        """Refuse a pool without anything to do.

        Raises:
            ValueError: no unit has trainable parameters.
        """
        if self.pool is not None and not any(group.requires_grad for group in self.parameter_groups()):
            raise ValueError(
                "fully_shard_context trace_pool: expected units with trainable parameters, got none; no iteration "
                "would be recorded. Leave it out."
            )

    def release_memory_pool(self) -> None:
        """Give the pool's memory back, e.g. before an evaluation or a large optimizer step.

        The next forward that is recorded by autograd takes as much again, at other addresses perhaps, with the same
        plan; until then buffers take memory of their own. Does nothing while the first iteration is recorded.

        Raises:
            RuntimeError: there is no pool, buffers have memory, or a graph may still read weights.
        """
        pool = self.pool
        if pool is None:
            raise RuntimeError(
                "release_memory_pool: expected a context with a pool, got one without. Build it with "
                "fully_shard_context(trace_pool=True)."
            )
        if not pool.is_active:
            return
        if not pool.is_quiet:
            raise RuntimeError(
                f"release_memory_pool: expected all units at rest and no graph that needs their weights, got "
                f"{pool.busy[:3]}. Call it after backward, and drop losses that have not run theirs."
            )
        if self.graphs is not None:
            self.graphs.drop()
        pool.deactivate()

    def keeps_gradients(self, is_asked: bool) -> bool:
        """Return whether cleared gradients keep their memory, for which a unit may ask.

        Raises:
            ValueError: asked for with a pool, which keeps it in any case.
        """
        if is_asked and self.pool is not None:
            raise ValueError(
                "SchedulePolicy static_gradients: expected False with trace_pool=True, with which gradients keep their "
                "memory in any case, got True. Leave it out."
            )
        return is_asked or self.pool is not None

    def _process_groups(self) -> Iterable[dist.ProcessGroup]:
        """Return the groups that the units communicate in, in one order on every rank."""
        meshes = [group.main_weight.mesh for group in self.parameter_groups()]
        of_axes = [(mesh.group(axis), mesh.gather_group(axis)) for mesh in meshes for axis in range(mesh.ndim)]
        groups = {group.group_name: group for both in of_axes for group in both}
        return [group for _, group in sorted(groups.items())]

    def parameter_groups(self) -> Iterable[FsdpParameterGroup]:
        """Return the groups of all units, in one order on every rank."""
        return (group for unit in self.units() for group in unit.parameter_groups)

    def _begin_forward(self) -> None:
        """Follow the first unit of a forward: let the pool plan and move where it is time to."""
        pool = self.pool
        assert pool is not None, "asked by the caller"
        if pool.is_active:
            return
        if pool.plan is None:
            is_due = self._has_recorded(pool)
        else:
            is_due = torch.is_grad_enabled()
        if not is_due:
            return
        if pool.is_quiet:
            pool.activate(self._families())
            return
        self._num_postponed += 1
        if self._num_postponed == MAX_POSTPONED:
            warnings.warn(
                f"trace_pool: expected units at rest, and no graph that needs their weights, between steps, got "
                f"{pool.busy[:3]} in use at {MAX_POSTPONED} forwards; buffers take memory as without a pool until "
                "then. Call reshard(), and drop losses that have not run backward.",
                stacklevel=2,
            )

    def _families(self) -> dict[int, int]:
        """Return the number of the root by the id of gathered weights; see [Note: who shares]."""
        roots: dict[int, int] = {}
        return {
            id(group.full_weight): roots.setdefault(id(unit._fsdp_root()), len(roots))
            for unit in self.units()
            for group in unit.parameter_groups
        }

    def _record_anew(self) -> None:
        """Begin the recorded iteration again, since from now on units are gathered in another order."""
        self._steps_at_start = None

    def _has_recorded(self, pool: TracePool) -> bool:
        """Return whether the recorded iteration has ended; see [Note: the recorded iteration]."""
        steps = {id(group): group.num_steps for group in self.parameter_groups()}
        trained = [group for group in self.parameter_groups() if group.requires_grad and _has_run(group)]
        if self._steps_at_start is None or not any(_has_gradients(group) for group in trained):
            pool.forget()
            self._steps_at_start, self._steps_seen = steps, sum(steps.values())
            return False
        start = self._steps_at_start
        if sum(steps.values()) != self._steps_seen:
            self._steps_seen = sum(steps.values())
            self._num_recorded_steps += 1
        is_all = all(steps[id(group)] != start.get(id(group), -1) for group in trained)
        return is_all or self._num_recorded_steps >= MAX_RECORDED_STEPS

    def _make_room(self, unit: Unit, is_ahead: bool) -> bool:
        """Let a unit's gathered weights have their slots; see [Note: making room].

        Args:
            unit: about to be gathered.
            is_ahead: whether it is not needed yet.

        Returns:
            Whether it is to be gathered now.
        """
        pool = self.pool
        assert pool is not None, "asked by the caller"
        blocked = [group.full_weight for group in unit.parameter_groups if pool.is_in_the_way(group.full_weight)]
        if not blocked:
            return True
        pool.note_fallback(blocked[0].name, "its place was taken, and it came in another order")
        if is_ahead:
            return False
        for other in self.units():
            if other is unit or not other.is_resting() or other.unshard_event is None or _is_held(other):
                continue
            if any(pool.overlaps(mine, group.full_weight) for mine in blocked for group in other.parameter_groups):
                self.reshard(other)
        return True


def _has_run(group: FsdpParameterGroup) -> bool:
    """Return whether a group has been used in the recorded iteration."""
    return (group.gathers and group.full_weight.place is not None) or _has_gradients(group)


def _has_gradients(group: FsdpParameterGroup) -> bool:
    return group.gradients is not None and any(buffer.place is not None for buffer in group.gradients.at)


def _is_held(unit: Any) -> bool:
    """Return whether a unit's modules hold gathered parameters, as after `unshard` by hand."""
    assert isinstance(unit, nn.Module)
    return any(getattr(parameter, "_fsdp_is_gathered", False) for parameter in unit.parameters())
