# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FsdpModule`: the mixin that `fully_shard` gives to a module: its phases, and the points of its forward and backward.

Each point says that it has been reached; what follows is the schedule's. What calls them is hooks.py's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from .backward_task import current_backward, is_in_backward
from .boundary import ForwardCall
from .controls import UnitControls
from .countdown import Countdown
from .device import Event
from .parameter_group import FsdpParameterGroup
from .phase import UnitPhase, check_move
from .policy import SchedulePolicy
from .schedule import FsdpContext
from .sealed import SealedModule
from .unit import Unit


class FsdpModule(UnitControls, SealedModule):
    """Mixin attached in place by `fully_shard`; `_fsdp_setup` stands in for a constructor."""

    Phase = UnitPhase

    def _fsdp_setup(
        self,
        context: FsdpContext,
        parameter_groups: tuple[FsdpParameterGroup, ...],
        schedule_policy: SchedulePolicy,
        inner_modules: Sequence[nn.Module],
        *,
        followers: Sequence[nn.Module] = (),
        register_hooks: bool = True,
    ) -> None:
        """Make the module a unit of `context`; called once, by `fully_shard`.

        Args:
            context: the context that schedules the unit.
            parameter_groups: the unit's own parameters, at rest.
            schedule_policy: how far ahead the unit gathers.
            inner_modules: the modules inside that the unit owns, without itself.
            followers: the modules besides itself that it was made of ([Note: several modules, one unit] in joint.py).
            register_hooks: False lets an external scheduler call pre_forward, post_forward, pre_backward and
                post_backward itself.
        """
        self._fsdp_context = context
        self._fsdp_groups = parameter_groups
        self._fsdp_policy = schedule_policy
        self._fsdp_name: str = type(self).__name__
        self._fsdp_root_ref: weakref.ref[Unit] | None = None
        self._fsdp_phase = UnitPhase.RESTING
        self.unshard_event: Event | None = None
        self.backward_task = -1
        self._fsdp_reduces = True
        self._fsdp_prefetch = {}
        self._fsdp_inner_modules, self._fsdp_followers = tuple(inner_modules), tuple(followers)
        self._fsdp_open_joints: dict[int, weakref.ref[FsdpModule]] = {}
        self._fsdp_keepers: tuple[nn.Module, ...] = ()
        self._fsdp_watched: set[nn.Module] = set()
        self._fsdp_forward_methods: set[str] = set()
        self._fsdp_is_in_method = self._fsdp_has_run = False
        self._fsdp_parent_ref: weakref.ref[FsdpModule] | None = None
        self._fsdp_has_told = False
        self._fsdp_open_call: ForwardCall | None = None
        self._fsdp_active_calls: list[ForwardCall] = []
        self._fsdp_callbacks: list[Callable[[FsdpModule], None]] = []
        self._fsdp_counts: list[Any] = []
        self._fsdp_countdown = Countdown(0 if register_hooks else sum(sum(g.trainable) for g in parameter_groups))
        for group in parameter_groups:
            group.on_requires_grad = weakref.WeakMethod(self._fsdp_before_freezing)
            group.context = weakref.ref(context)
        if register_hooks:
            self.register_post_backward_hook(_post_backward)
        else:
            self._fsdp_count_gradients()

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def context(self) -> FsdpContext:
        """The context that schedules this unit."""
        return self._fsdp_context

    @property
    def phase(self) -> UnitPhase:
        """What the unit is doing."""
        return self._fsdp_phase

    @property
    def name(self) -> str:
        """Dotted name within the root; the class name for the root itself and before finalisation."""
        return self._fsdp_name

    @property
    def parameter_groups(self) -> tuple[FsdpParameterGroup, ...]:
        """Groups of the parameters that this unit, and no unit inside it, owns."""
        return self._fsdp_groups

    @property
    def num_parameter_elements(self) -> int:
        """Elements of the unit's full parameters."""
        return sum(group.numel for group in self._fsdp_groups)

    def is_root(self) -> bool:
        """Return whether no other unit of the context contains this one."""
        return self._fsdp_root() is self

    def is_resting(self) -> bool:
        """Return whether no forward or backward of the unit is under way."""
        return self._fsdp_phase is UnitPhase.RESTING

    def is_in_backward(self) -> bool:
        """Return whether a backward of the unit is under way, or has left gradients behind."""
        return self._fsdp_phase is UnitPhase.BACKWARD or self._fsdp_countdown.has_begun

    def _fsdp_version(self) -> tuple[int, int]:
        """Return what changes when weights are written, and when parameters are frozen or unfrozen."""
        groups = self._fsdp_groups
        return sum(group.num_steps for group in groups), sum(group.num_freezes for group in groups)

    def _fsdp_join(self, context: FsdpContext) -> None:
        """Move to a context that is still being built; called by that context."""
        self._fsdp_context = context
        for group in self._fsdp_groups:
            group.context = weakref.ref(context)

    def _fsdp_bind(self, name: str, root: Unit) -> None:
        """Take the name and root found when the context was finalised; called by the context."""
        self._fsdp_name = name
        self._fsdp_root_ref = weakref.ref(root)
        prefixes = ["" if root is self else name]
        if self._fsdp_followers:
            paths = {id(module): path for path, module in _as_module(root).named_modules()}
            prefixes += [paths.get(id(follower), "") for follower in self._fsdp_followers]
            if root is self or "" in prefixes:
                raise ValueError(
                    f"fully_shard of {len(prefixes)} modules from {name} on: expected a unit around all of them, got "
                    "none, so that their parameters have no common names. Shard the model around them, too."
                )
        for group in self._fsdp_groups:
            group.rename(name, prefixes)
        for module in _as_module(self).modules():
            if isinstance(module, FsdpModule) and module is not self:
                # Outer units are named before inner ones, so that the innermost parent is the last to write.
                module._fsdp_parent_ref = weakref.ref(self)

    def _fsdp_root(self) -> Unit | None:
        """Return the outermost unit around this one; None before finalisation."""
        return None if self._fsdp_root_ref is None else self._fsdp_root_ref()

    def _fsdp_parent(self) -> FsdpModule | None:
        """Return the innermost unit around this one."""
        return None if self._fsdp_parent_ref is None else self._fsdp_parent_ref()

    def _fsdp_enter(self, phase: UnitPhase) -> None:
        check_move(self.name, self._fsdp_phase, phase)
        if phase is UnitPhase.FORWARD:
            self._fsdp_context.enter_forward()
        elif self._fsdp_phase is UnitPhase.FORWARD:
            self._fsdp_context.exit_forward()
        self._fsdp_phase = phase

    # --- verbs ----------------------------------------------------------------------------------------------------

    def unshard(self, prefetch: Literal["none", "forward", "backward"] = "none") -> None:
        """Gather the unit's parameters now and let the current stream and the module use them.

        Args:
            prefetch: whether to start gathering the units that come next in that direction, too.

        A scheduler that calls this without `pre_forward` first lets the all-gather stream wait for the stream on
        which weights were last written: ``context.allgather_stream.wait_stream(context.current_stream())``.
        """
        context = self._fsdp_context
        context.ensure_finalized()
        context.unshard(self)
        if prefetch in ("forward", "backward"):
            context.prefetch(self, prefetch)
        elif prefetch != "none":
            raise ValueError(f"unshard prefetch: expected 'none', 'forward' or 'backward', got {prefetch!r}.")
        context.wait_for_unshard(self)
        for group in self._fsdp_groups:
            group.attach_unsharded()

    def reshard(self) -> None:
        """Return to sharded parameters and free the gathered ones."""
        for group in self._fsdp_groups:
            group.attach_sharded()
        self._fsdp_context.reshard(self)

    # --- points of a step -----------------------------------------------------------------------------------------

    def pre_forward(self) -> None:
        """Make full parameters available to forward, and start gathering the next unit's."""
        context = self._fsdp_context
        context.ensure_finalized()
        if is_in_backward():
            if self._fsdp_phase is not UnitPhase.BACKWARD:
                self._fsdp_enter(UnitPhase.FORWARD)
            self.unshard()
        else:
            if self.is_root() and self._fsdp_phase is UnitPhase.FORWARD:
                context.abandon_forward(self)
            if any(group.has_strays for group in self._fsdp_groups):
                context.refuse_strays()
            self._fsdp_enter(UnitPhase.FORWARD)
            self.unshard(prefetch="forward")
        self._fsdp_report("forward")

    def post_forward(self, needs_backward: bool) -> None:
        """Return to sharded parameters after forward.

        Args:
            needs_backward: whether an output carries gradients, so that a backward of this unit may follow.
        """
        self._fsdp_report("forward end")
        if self._fsdp_phase is UnitPhase.BACKWARD:
            return
        self._fsdp_enter(UnitPhase.RESTING)
        keep = self._fsdp_policy.reshard_after_forward
        keeps = is_in_backward() or (self.is_root() if keep is None else not keep)
        for group in self._fsdp_groups:
            group.attach_sharded()
        if not (keeps and needs_backward):
            self._fsdp_context.reshard(self, keeps_copy=needs_backward and type(keep) is int)
        if not needs_backward and self._fsdp_context.num_units_in_forward == 0:
            self._fsdp_context.reshard_idle_units(self._fsdp_root())

    def pre_backward(self) -> None:
        """Make full parameters available to backward, and start gathering the next unit's."""
        self._fsdp_context.register_post_backward_hook()
        if self._fsdp_phase is UnitPhase.BACKWARD:
            return
        self._fsdp_enter(UnitPhase.BACKWARD)
        self.backward_task = current_backward()
        # Modules hold the full parameters in backward, too, for whatever is recomputed inside the unit.
        self.unshard(prefetch="backward")
        self._fsdp_report("backward")

    def post_backward(self) -> None:
        """Reduce the gradients and return to sharded parameters; called when the unit's backward is complete."""
        self._fsdp_report("backward end")
        self._fsdp_context.reduce(self)
        self._fsdp_rest()

    def register_post_backward_hook(self, callback: Callable[[FsdpModule], None]) -> None:
        """Call `callback` when the unit's backward is complete.

        That is when the gradients of its inputs are known and the units inside it are done ([Note: when a unit's
        backward ends] in boundary.py); for a unit without inputs that need a gradient, at the end of the whole
        backward. With register_hooks=False, when all its trainable parameters have their gradients, or at the end.
        """
        self._fsdp_callbacks.append(callback)

    def _fsdp_begin_backward(self, call: ForwardCall) -> None:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"backward of unit {self.name}: expected create_graph=False, got a backward that is recorded for a "
                "second one. Gradients of gradients are not supported through sharded units; compute such terms in an "
                "unsharded module."
            )
        if call.closed_in == current_backward():
            return  # A view's base tells once more, after the view itself.
        if call not in self._fsdp_active_calls:
            steps, freezes = self._fsdp_version()
            if call.version[0] != steps:
                raise RuntimeError(
                    f"backward of unit {self.name}: expected the weights of its forward, got weights that an optimizer "
                    "has stepped, or somebody has written, since. Run backward before that, or forward again after it."
                )
            if call.version[1] != freezes:
                raise RuntimeError(
                    f"backward of unit {self.name}: expected the parameters that were trainable in its forward, got "
                    "some that were frozen or unfrozen since. Do that before forward, or after backward."
                )
            call.arm()
            self._fsdp_active_calls.append(call)
        self.pre_backward()

    def _fsdp_inputs_done(self) -> None:
        self._fsdp_close_if_complete()

    def _fsdp_close_if_complete(self) -> None:
        """Close the unit's backward if all of it has run; see [Note: when a unit's backward ends] in boundary.py."""
        calls = self._fsdp_active_calls
        if self._fsdp_phase is UnitPhase.BACKWARD and calls and all(call.is_complete for call in calls):
            self._fsdp_run_callbacks()

    def _fsdp_count_gradients(self) -> None:
        """Have a unit that is driven from outside notice when all its gradients are there."""
        gradient_ready = _GradientReady(weakref.ref(self))
        for group in self._fsdp_groups:
            for parameter in group.unsharded_parameters:
                if parameter.requires_grad:
                    hooked: Any = parameter
                    self._fsdp_counts.append(hooked.register_post_accumulate_grad_hook(gradient_ready))

    def leave_to_scheduler(self) -> None:
        """Leave it to a scheduler to say when a backward is complete, which it runs in parts; for register_hooks=False.

        It then calls `unshard`, `reshard` and the context's `reduce` and `finish_gradients`, and no point of a step.
        """
        while self._fsdp_counts:
            self._fsdp_counts.pop().remove()

    def _fsdp_gradient_done(self) -> None:
        self._fsdp_context.register_post_backward_hook()
        if self._fsdp_phase is not UnitPhase.BACKWARD:
            self.backward_task = current_backward()
        if self._fsdp_countdown.tick():
            self._fsdp_countdown.reset()
            if self._fsdp_phase is UnitPhase.BACKWARD:
                self._fsdp_run_callbacks()

    def _fsdp_run_callbacks(self) -> None:
        if self._fsdp_has_told:
            return
        self._fsdp_has_told = True
        for callback in self._fsdp_callbacks:
            callback(self)

    def _fsdp_close_backward(self) -> None:
        """Close a backward in which some parameters or inputs got no gradient; called by the context at its end."""
        self._fsdp_run_callbacks()
        if self.is_in_backward():
            self.post_backward()

    def _fsdp_abandon_backward(self) -> None:
        """Drop what a backward that an exception cut short has left; called by the context."""
        for group in self._fsdp_groups:
            if group.gradients is not None:
                group.gradients.drop()
        self._fsdp_rest()

    def _fsdp_before_freezing(self) -> None:
        if self._fsdp_phase is not UnitPhase.RESTING or self._fsdp_countdown.total:
            raise RuntimeError(
                f"requires_grad in unit {self.name}: expected a change while the unit is at rest and has hooks, got "
                "one during its forward or backward, or with register_hooks=False. Freeze and unfreeze between steps."
            )

    def _fsdp_rest(self) -> None:
        self._fsdp_has_told = False
        self._fsdp_countdown.reset()
        for call in self._fsdp_active_calls:
            call.is_closed, call.closed_in = True, self.backward_task
        self._fsdp_active_calls.clear()
        if self._fsdp_phase is not UnitPhase.RESTING:
            self._fsdp_enter(UnitPhase.RESTING)
        self.reshard()
        parent = self._fsdp_parent()
        if parent is not None:
            parent._fsdp_close_if_complete()

    def _fsdp_report(self, operation: str) -> None:
        for group in self._fsdp_groups:
            group.report_compute(operation)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, and those of units inside that wait for a reduction."""
        for unit in self._fsdp_units(recurse=True):
            unit._fsdp_drop_unreduced()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def _fsdp_drop_unreduced(self) -> None:
        for group in self._fsdp_groups:
            group.drop_unreduced_gradients()


def _as_module(unit: object) -> nn.Module:
    assert isinstance(unit, nn.Module)
    return unit


def _post_backward(unit: FsdpModule) -> None:
    unit.post_backward()


class _GradientReady:
    """Post-accumulate hook shared by the trainable parameters of a unit that is driven from outside."""

    def __init__(self, unit: weakref.ref[FsdpModule]) -> None:
        self._unit = unit

    def __call__(self, parameter: torch.Tensor) -> None:
        unit = self._unit()
        if unit is not None:
            unit._fsdp_gradient_done()
