# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FsdpModule`: the mixin that `fully_shard` gives to a module, its phases and its hooks.

It owns a unit's phase and countdown. Each hook says that a point has been reached; what follows is the schedule's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from .countdown import Countdown
from .device import Event
from .parameter_group import FsdpParameterGroup
from .policy import SchedulePolicy
from .schedule import FsdpContext, Unit, is_in_backward


class UnitPhase(Enum):
    """What a unit is doing."""

    RESTING = auto()
    FORWARD = auto()
    BACKWARD = auto()


_TRANSITIONS = frozenset(
    {
        (UnitPhase.RESTING, UnitPhase.FORWARD),
        (UnitPhase.FORWARD, UnitPhase.RESTING),
        (UnitPhase.RESTING, UnitPhase.BACKWARD),
        (UnitPhase.BACKWARD, UnitPhase.RESTING),
    }
)


class FsdpModule:
    """Mixin attached in place by `fully_shard`; `_fsdp_setup` stands in for a constructor."""

    Phase = UnitPhase

    def _fsdp_setup(
        self,
        context: FsdpContext,
        parameter_groups: tuple[FsdpParameterGroup, ...],
        schedule_policy: SchedulePolicy,
        *,
        register_hooks: bool = True,
    ) -> None:
        """Make the module a unit of `context`; called once, by `fully_shard`.

        Args:
            context: the context that schedules the unit.
            parameter_groups: the unit's own parameters, at rest.
            schedule_policy: how far ahead the unit gathers.
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
        trainable = [group for group in parameter_groups if group.requires_grad]
        self._fsdp_countdown = Countdown(sum(len(g.unsharded_parameters) for g in trainable))
        if register_hooks:
            self._register_hooks()

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
    def schedule_policy(self) -> SchedulePolicy:
        """How far ahead the unit gathers."""
        return self._fsdp_policy

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
        """Return whether a backward of the unit is under way."""
        return self._fsdp_phase is UnitPhase.BACKWARD

    def _fsdp_join(self, context: FsdpContext) -> None:
        """Move to a context that is still being built; called by that context."""
        self._fsdp_context = context

    def _fsdp_bind(self, name: str, root: Unit) -> None:
        """Take the name and root found when the context was finalised; called by the context."""
        self._fsdp_name = name
        self._fsdp_root_ref = weakref.ref(root)

    def _fsdp_root(self) -> Unit | None:
        """Return the outermost unit around this one; None before finalisation."""
        return None if self._fsdp_root_ref is None else self._fsdp_root_ref()

    def _enter(self, phase: UnitPhase) -> None:
        if (self._fsdp_phase, phase) not in _TRANSITIONS:
            raise RuntimeError(
                f"phase of unit {self.name}: expected a move allowed from {self._fsdp_phase.name}, got {phase.name}. "
                "A forward or backward of this unit was entered while another was under way, or one was cut short "
                "by an exception."
            )
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
        context.unshard(self)
        if prefetch == "forward":
            context.prefetch_forward(self)
        elif prefetch == "backward":
            context.prefetch_backward(self)
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
                self._enter(UnitPhase.FORWARD)
            self.unshard()
        else:
            self._enter(UnitPhase.FORWARD)
            self.unshard(prefetch="forward")
        self._report_compute("forward")

    def post_forward(self, needs_backward: bool) -> None:
        """Return to sharded parameters after forward.

        Args:
            needs_backward: whether an output carries gradients, so that a backward of this unit may follow.
        """
        self._report_compute("forward end")
        if self._fsdp_phase is UnitPhase.BACKWARD:
            return
        self._enter(UnitPhase.RESTING)
        if is_in_backward():
            for group in self._fsdp_groups:
                group.attach_sharded()
            return
        keep = self._fsdp_policy.reshard_after_forward
        keeps = self.is_root() if keep is None else not keep
        if keeps and needs_backward:
            for group in self._fsdp_groups:
                group.attach_sharded()
        else:
            self.reshard()
        if not needs_backward and self.is_root():
            self._fsdp_context.reshard_idle_units(self)

    def pre_backward(self) -> None:
        """Make full parameters available to backward, and start gathering the next unit's."""
        context = self._fsdp_context
        context.register_post_backward_hook()
        if self._fsdp_phase is UnitPhase.BACKWARD:
            return
        self._enter(UnitPhase.BACKWARD)
        context.unshard(self)
        context.prefetch_backward(self)
        context.wait_for_unshard(self)
        self._report_compute("backward")

    def post_backward(self) -> None:
        """Free the full parameters and start reducing the gradients, once all of them have accumulated."""
        self._fsdp_context.register_post_backward_hook()
        self._fsdp_finish_backward()

    def _fsdp_finish_backward(self) -> None:
        """As `post_backward`, for a backward in which some of the parameters got no gradient."""
        self._report_compute("backward end")
        if self._fsdp_phase is not UnitPhase.RESTING:
            self._enter(UnitPhase.RESTING)
        self._fsdp_countdown.reset()
        self.reshard()
        self._fsdp_context.reduce(self)

    def _report_compute(self, operation: str) -> None:
        for group in self._fsdp_groups:
            group.report_compute(operation)

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        module = _as_module(self)
        module.register_forward_pre_hook(_pre_forward_hook, prepend=True)
        module.register_forward_hook(_post_forward_hook, always_call=True)
        self.register_post_backward_hook(_post_backward)

    def register_post_backward_hook(self, callback: Callable[[FsdpModule], None]) -> None:
        """Call `callback` when the unit's backward is complete.

        That is when all trainable parameters have accumulated their gradients; for a unit that owns none, when the
        gradients of its inputs are known.
        """
        if self._fsdp_countdown.total == 0:
            if self._fsdp_groups:
                hook = partial(_full_backward_hook, callback)
                _as_module(self).register_full_backward_hook(hook)
            return
        gradient_ready = _GradientReady(weakref.ref(self), callback)
        for group in self._fsdp_groups:
            if group.requires_grad:
                for parameter in group.unsharded_parameters:
                    parameter.register_post_accumulate_grad_hook(gradient_ready)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        raise RuntimeError(
            f"cast or move of unit {self.name}: expected none after fully_shard, since the shards would keep their old "
            "dtype and device. Call .to(), .half(), .cuda() and the like before fully_shard."
        )


def _as_module(unit: object) -> nn.Module:
    assert isinstance(unit, nn.Module)
    return unit


def _post_backward(unit: FsdpModule) -> None:
    unit.post_backward()


def _pre_forward_hook(module: Any, args: Any) -> None:
    module.pre_forward()


def _post_forward_hook(module: Any, args: Any, output: Any) -> None:
    needs_backward = False
    if torch.is_grad_enabled():
        hook = _PreBackward(weakref.ref(module))
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                needs_backward = True
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    module.post_forward(needs_backward)


def _full_backward_hook(callback: Callable[[FsdpModule], None], module: Any, grad_input: Any, grad_output: Any) -> None:
    # Without an input that needs gradients torch calls this at the start of the module's backward, not at its end.
    if any(isinstance(grad, torch.Tensor) for grad in grad_input):
        callback(module)


class _PreBackward:
    """Gradient hook of an output: the unit's backward begins."""

    def __init__(self, unit: weakref.ref[FsdpModule]) -> None:
        self._unit = unit

    def __call__(self, grad: torch.Tensor) -> None:
        unit = self._unit()
        if unit is not None:
            unit.pre_backward()


class _GradientReady:
    """Post-accumulate hook shared by a unit's trainable parameters."""

    def __init__(self, unit: weakref.ref[FsdpModule], callback: Callable[[FsdpModule], None]) -> None:
        self._unit = unit
        self._callback = callback

    def __call__(self, parameter: torch.Tensor) -> None:
        unit = self._unit()
        if unit is not None and unit._fsdp_countdown.tick():
            self._callback(unit)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name))
