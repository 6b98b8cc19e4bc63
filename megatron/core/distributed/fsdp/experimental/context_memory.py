# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ContextMemory`: where the buffers of a context take their memory from, and when a trace pool plans, moves and rests.

How buffers are placed is trace_pool.py's; what is gathered when is schedule.py's.

[Note: the recorded iteration]
It begins with the context's first forward and ends when every unit that has run and can be trained has been stepped: at
the next forward all buffers move to their slots, provided that none has memory and no graph holds views of one.
Optimizers that leave out some units would never end it, so that at most MAX_RECORDED_STEPS steps are recorded.

[Note: making room]
A unit whose slot is taken is not gathered ahead. When it is needed, weights that were gathered ahead, or kept for
later, and lie in its slot are released first, to be gathered again. All of that depends on the order of calls alone,
which is the same on every rank, and so are the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .allocator import StorageAllocator, default_allocator
from .device import Stream
from .parameter_group import FsdpParameterGroup
from .trace_pool import TracePool
from .unit import Unit

MAX_RECORDED_STEPS = 8
"""Steps after which a recorded iteration ends, whatever has not been stepped in it."""


class ContextMemory:
    """Memory of one context; a base of `FsdpContext`.

    With `trace_pool` the first iteration is recorded. From the next one on, gathered weights and packed gradients have
    fixed addresses and no allocator is called for them. Between steps the pool keeps its memory, gradients theirs.

    Attributes:
        allocator: where what lives and dies inside a step takes its memory from.
        pool: that allocator, if it is a pool.
    """

    allocator: StorageAllocator
    pool: TracePool | None
    units: Callable[[], list[Unit]]
    reshard: Callable[[Unit], None]

    def _set_up_memory(
        self, device: torch.device, own_streams: Sequence[Stream], symmetric: bool, trace_pool: bool
    ) -> None:
        if symmetric:
            raise NotImplementedError(
                "use_symmetric_memory: expected False, got True; symmetric memory is not supported yet. Leave it out."
            )
        self.pool = TracePool(default_allocator, device, own_streams) if trace_pool else None
        self.allocator = default_allocator if self.pool is None else self.pool
        self._steps_at_start: dict[int, int] | None = None
        self._steps_seen = self._num_recorded_steps = 0

    def check_pool(self) -> None:
        """Refuse a pool without anything to do.

        Raises:
            ValueError: no unit has trainable parameters.
        """
        if self.pool is not None and not any(group.requires_grad for group in self._groups()):
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
                f"{pool.alive[:3] or 'such a graph'}. Call it after backward, and drop losses that have not run theirs."
            )
        pool.deactivate()

    def _groups(self) -> Iterable[FsdpParameterGroup]:
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
        if is_due and pool.is_quiet:
            pool.activate()

    def _record_anew(self) -> None:
        """Begin the recorded iteration again, since from now on units are gathered in another order."""
        self._steps_at_start = None

    def _has_recorded(self, pool: TracePool) -> bool:
        """Return whether the recorded iteration has ended; see [Note: the recorded iteration]."""
        steps = {id(group): group.num_steps for group in self._groups()}
        trained = [group for group in self._groups() if group.requires_grad and _has_run(group)]
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
