# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FsdpContext`: when each unit gathers, releases and reduces, and on which stream.

It owns streams, orders, the microbatch flag and the reductions in flight. What happens to the data is the parameter
group's; which point of a module's life has come is the module's.

[Note: home streams]
A buffer is allocated and freed on one stream, its home: gathered weights on the all-gather stream, packed gradients on
the stream that computed them. Any other stream that uses it waits before the use, and its home waits after it. There
is no record_stream and no host synchronisation; each wait below names the hazard that it removes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

from .agreement import Agreement, UnitRecord, check_units
from .backward_task import PostBackward, at_end_of_backward, current_backward, is_in_backward
from .communicators import Communicators
from .context_memory import ContextMemory
from .device import Stream, current_stream, is_capturing, new_stream, profile_range, random_state, set_random_state
from .indexed_order import IndexedOrder
from .initial_values import initialize_values
from .learnt_order import LearntOrder
from .prefetch import Direction, units_ahead
from .quantized_group import check_recipes
from .reductions import ReductionQueue
from .secondary_shard import drop_copies, keep_copies, make_subgroups
from .unit import Unit, find_roots, order_units


class FsdpContext(ContextMemory):
    """Streams, orders and microbatch state shared by FSDP roots that are built together.

    Args:
        device: device on which the units compute.
        use_symmetric_memory: see `ContextMemory`.
        unify_communication_stream: let all-gathers and reductions share one stream, which overlaps less and holds less
            memory at a time.
        trace_pool: see `ContextMemory`.
        separate_communicators: gather weights in process groups of their own, so that NCCL does not let a reduction
            wait for a gather that was issued before it; each costs NCCL's buffers. See communicators.py. Refused with
            `unify_communication_stream`.
    """

    def __init__(
        self,
        device: torch.device,
        use_symmetric_memory: bool = False,
        unify_communication_stream: bool = False,
        trace_pool: bool = False,
        separate_communicators: bool = False,
    ) -> None:
        self.device = device
        self.communicators = Communicators(separate_communicators, unify_communication_stream)
        self.use_symmetric_memory = use_symmetric_memory
        self.unify_communication_stream = unify_communication_stream
        self.allgather_stream: Stream = new_stream(device, "all_gather")
        self.reduce_scatter_stream: Stream = (
            self.allgather_stream if unify_communication_stream else new_stream(device, "reduce_scatter")
        )
        own_streams = self.allgather_stream, self.reduce_scatter_stream
        self._set_up_memory(device, own_streams, use_symmetric_memory, trace_pool)
        self.is_last_microbatch = True
        self.num_units_in_forward = 0
        self.forward_order: IndexedOrder[Unit] = IndexedOrder()
        self.backward_order: IndexedOrder[Unit] = IndexedOrder()
        self._registered: IndexedOrder[Unit] = IndexedOrder()
        self._records: dict[int, UnitRecord] = {}
        self.is_implicit = False
        self._is_finalized = False
        self.is_initializing = self._may_lack_values = False
        self._random_state: list[torch.Tensor] = []
        self._backward_tasks: set[int] = set()
        self.reductions = ReductionQueue(self.reduce_scatter_stream)

    # --- construction ---------------------------------------------------------------------------------------------

    @property
    def is_finalized(self) -> bool:
        """Whether orders and names are fixed."""
        return self._is_finalized

    def register_module(self, module: Unit, record: UnitRecord | None = None) -> None:
        """Add a unit that is being built in this context.

        Args:
            module: the unit.
            record: what ranks must agree on about it when the context is finalised; None for nothing.

        Raises:
            RuntimeError: the context has been finalised.
        """
        if self._is_finalized:
            raise RuntimeError(
                "fully_shard: expected a context that is still open, got one whose first forward has run or whose "
                "`with` block has ended. Shard all units before the first forward, in one fully_shard_context()."
            )
        self._registered.append(module)
        self._may_lack_values = True
        if not self._random_state and any(group.lacks_values for group in module.parameter_groups):
            self._random_state = random_state(self.device)
        if record is not None:
            self._records[id(module)] = record

    def absorb(self, other: FsdpContext) -> None:
        """Take over the units of a context that has not been finalised."""
        assert not other._is_finalized
        self._random_state = self._random_state or other._random_state
        for unit in other._registered:
            self.register_module(unit, other._records.get(id(unit)))
            unit._fsdp_join(self)

    def units(self) -> list[Unit]:
        """Return all units, in the order in which they were built."""
        return list(self._registered)

    def finalize(self) -> None:
        """Fix roots, names and the static prefetch orders: see `order_units`.

        Raises:
            RuntimeError: other ranks have built other units; on every rank.
            ValueError: see `check_recipes`.
        """
        if self._is_finalized:
            return
        self.name_units()
        self.initialize_values()
        recorded = [unit for unit in self.forward_order if id(unit) in self._records]
        check_units([(unit, self._records[id(unit)]) for unit in recorded], self.device)
        check_recipes(list(self.parameter_groups()))
        self.communicators.separate_gathers(self.units())
        make_subgroups(self.units(), self.communicators)
        agreement = Agreement([self._records[id(unit)] for unit in recorded], self.device)
        capturing = partial(is_capturing, self.device)
        self.learnt_order = LearntOrder(self.forward_order, self.backward_order, agreement, capturing)
        self._records.clear()
        self._is_finalized = True

    def name_units(self) -> None:
        """Name units and parameters by their place under the roots that there are; without communication."""
        self.forward_order, self.backward_order = order_units(self._registered)

    def initialize_values(self) -> None:
        """Compute the initial values of parameters that were built on the meta device, if they are still missing."""
        if self.is_initializing or not self._may_lack_values:
            return
        self._may_lack_values = any(group.lacks_values for group in self.parameter_groups())
        if not self._may_lack_values:
            return
        self.is_initializing = True
        current = random_state(self.device)
        try:
            # Data may be seeded by rank since: draw from where the generators stood when the first unit was sharded.
            set_random_state(self.device, self._random_state)
            for root in find_roots(self._registered):
                initialize_values(root, self.device)
        finally:
            self.is_initializing = False
            if not all(torch.equal(old, new) for old, new in zip(self._random_state, current, strict=True)):
                set_random_state(self.device, current)

    def ensure_finalized(self) -> None:
        """Finalise an implicit context; raise for an explicit one whose construction has not ended.

        Raises:
            RuntimeError: a `fully_shard_context` block is still open.
        """
        if self._is_finalized:
            return
        if self.is_implicit:
            self.finalize()
        else:
            raise RuntimeError(
                "forward of a sharded module: expected the fully_shard_context() block to have ended, got one that is "
                "still open. Run the model after the block."
            )

    # --- streams --------------------------------------------------------------------------------------------------

    def current_stream(self) -> Stream:
        """Return the stream that the caller computes on."""
        return current_stream(self.device)

    def abandon_backward(self, task: int) -> None:
        """Bring units to rest whose backward an exception has cut short."""
        if task not in self._backward_tasks:
            return
        self._backward_tasks.discard(task)
        for unit in self.backward_order:
            if unit.is_in_backward() and unit.backward_task not in self._backward_tasks:
                unit._fsdp_abandon_backward()
        if not self._backward_tasks:
            self.learnt_order.drop_backward()
            self.reshard_idle_units()
        self.reductions.finish(self.current_stream())

    def abandon(self) -> None:
        """Bring all units to rest and forget what is under way, after an exception that no hook has seen."""
        self._backward_tasks.clear()
        if self._is_finalized:
            self.learnt_order.drop_backward()
        for unit in self.forward_order:
            unit._fsdp_abandon_backward()
        self.reshard_idle_units()
        self.reductions.finish(self.current_stream())

    def abandon_forward(self, root: Unit) -> None:
        """Bring units to rest whose forward was interrupted where torch runs no hooks, e.g. by a KeyboardInterrupt."""
        for unit in self.forward_order:
            if unit._fsdp_root() is root and not unit.is_resting():
                unit._fsdp_abandon_backward()

    def enter_forward(self) -> None:
        """Count a unit into forward."""
        if self.pool is not None and self.num_units_in_forward == 0 and not is_in_backward():
            self._begin_forward()
        self.num_units_in_forward += 1

    def exit_forward(self) -> None:
        """Count a unit out of forward."""
        self.num_units_in_forward -= 1

    # --- weights --------------------------------------------------------------------------------------------------

    def unshard(self, unit: Unit, is_ahead: bool = False) -> None:
        """Start gathering a unit's weights, unless they are there or on the way and still current.

        Args:
            unit: the unit.
            is_ahead: whether it is not needed yet, so that it may be left for later.
        """
        groups = unit.parameter_groups
        is_stale = is_lent = False
        for group in groups:
            is_stale = is_stale or group.is_stale or group.is_incomplete
            is_lent = is_lent or bool(group.lent)
        if unit.unshard_event is not None and not is_stale:
            return
        if self.pool is not None and not self._make_room(unit, is_ahead):
            return
        if is_stale or is_lent:
            # Compute may still be writing main weights, or reading gathered ones that are about to be refreshed.
            self.allgather_stream.wait_stream(self.current_stream())
        with profile_range(f"fsdp.unshard {unit.name}"), self.allgather_stream:
            for group in groups:
                group.unshard()
            unit.unshard_event = self.allgather_stream.record_event()

    def wait_for_unshard(self, unit: Unit) -> None:
        """Let the compute stream read a unit's gathered weights."""
        assert unit.unshard_event is not None, "unshard comes before its wait"
        # Compute must not read weights before the gather has written them.
        self.current_stream().wait_event(unit.unshard_event)

    def await_gathers(self) -> None:
        """Let compute write main weights: after all gathers that read them, those that nobody waits for included."""
        # A gather ahead for a unit that did not run may still read what the optimizer is about to write.
        self.current_stream().wait_stream(self.allgather_stream)

    def prefetch(self, unit: Unit, direction: Direction) -> None:
        """Start gathering the units that come after `unit`, within its budget."""
        if direction == "forward":
            successors = self.learnt_order.after_forward(unit, self.num_units_in_forward)
        else:
            successors = self.learnt_order.after_backward(unit)
        for successor in units_ahead(unit, successors, direction):
            self.unshard(successor, is_ahead=True)

    def reshard(self, unit: Unit, keeps_copy: bool = False) -> None:
        """Free a unit's gathered weights once the work issued so far on the compute stream has read them.

        With `keeps_copy` a few ranks keep them for backward; see secondary_shard.py.
        """
        if unit.unshard_event is None:
            return
        unit.unshard_event = None
        # Memory goes back to the all-gather stream, whose next gather must not overwrite what compute still reads.
        self.allgather_stream.wait_event(self.current_stream().record_event())
        with self.allgather_stream:
            if keeps_copy:
                keep_copies(unit)
            for group in unit.parameter_groups:
                group.release_full_weight()

    def reshard_idle_units(self, root: Unit | None = None) -> None:
        """Free weights that were gathered ahead, or kept, for units that did not run, under `root` or everywhere."""
        for unit in self.forward_order:
            if unit.is_resting() and root in (None, unit._fsdp_root()):
                self.reshard(unit)
                drop_copies(unit, self.allgather_stream)

    # --- gradients ------------------------------------------------------------------------------------------------

    def reduce(self, unit: Unit) -> None:
        """Start reducing a unit's gradients, as far as its placements and the microbatch say, or hold them back."""
        self.reductions.reduce(unit, self.current_stream(), self.is_last_microbatch)

    def finish_gradients(self) -> None:
        """Finish all gradients that wait for a reduction, and let compute see them; every rank must call it.

        Gradients that are held back without gradient sync stay so.
        """
        for unit in self.backward_order:
            self.reductions.complete(unit, self.current_stream())
        self.reductions.finish(self.current_stream())
        self._note_finality(is_last=True)

    def _note_finality(self, is_last: bool) -> None:
        for group in self.parameter_groups():
            group.has_final_gradients = is_last and not group.has_unreduced_gradients

    def release_gradients(self, release: Callable[[], None]) -> None:
        """Call `release`, which frees gradients that compute may still read."""
        self.reductions.release_gradients(release, self.current_stream())

    def register_post_backward_hook(self) -> None:
        """Have `post_backward` called when the running backward ends.

        Once per context rather than per root, so that one root's reductions overlap another root's backward. A backward
        inside a backward (reentrant checkpointing) ends on its own.
        """
        task = current_backward()
        if task not in self._backward_tasks:
            self._backward_tasks.add(task)
            at_end_of_backward(PostBackward(weakref.ref(self), task))

    def post_backward(self, task: int | None = None) -> None:
        """Close what a backward left open; at the end of the outermost one let compute see the reduced gradients.

        Args:
            task: the backward that ends; None for all.

        Raises:
            RuntimeError: a unit is not at rest afterwards.
        """
        if task is None:
            self._backward_tasks.clear()
        else:
            self._backward_tasks.discard(task)
        closing = [
            unit
            for unit in self.backward_order
            if unit.is_in_backward() and (task is None or unit.backward_task == task)
        ]
        try:
            for unit in closing:
                unit._fsdp_close_backward()
        except BaseException:
            for unit in closing:
                if unit.is_in_backward():
                    unit._fsdp_abandon_backward()
            self.learnt_order.drop_backward()
            self.reductions.finish(self.current_stream())
            raise
        if self._backward_tasks:
            return
        if self.is_last_microbatch:
            for unit in self.backward_order:
                # Left by a unit that has not run since; with every rank the same, as settings are.
                self.reductions.complete(unit, self.current_stream())
        self.reshard_idle_units()
        self.reductions.finish(self.current_stream())
        self._note_finality(is_last=self.is_last_microbatch)
        self._require_rest()
        if self.learnt_order.end_backward():
            self._record_anew()

    def _require_rest(self) -> None:
        active = [unit.name for unit in self.forward_order if unit.is_in_backward()]
        if active:
            raise RuntimeError(
                f"end of backward: expected every unit at rest, got units {active} still computing. "
                "Report this with the model's structure."
            )
        if any(group.has_strays for unit in self.forward_order for group in unit.parameter_groups):
            self.refuse_strays()

    def refuse_strays(self) -> None:
        """Drop gradients of full parameters at rest and raise, naming their units.

        Raises:
            RuntimeError: always.
        """
        found = []
        for unit in self.forward_order:
            for group in unit.parameter_groups:
                if group.gradients is not None and group.has_strays:
                    group.gradients.drop()
                    found.append(unit.name)
        raise RuntimeError(
            f"gradients of units {list(dict.fromkeys(found))}: expected them within the units' own backward, got some "
            "while weights were released, and dropped them: a tensor left a unit's forward by another way than its "
            "outputs. Return it, or keep it as an attribute of one of the unit's modules."
        )
