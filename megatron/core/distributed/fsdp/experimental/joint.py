# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Hooks of a unit that several modules form together: one gather and one reduction for all of them.

They decide where such a unit's forward begins and ends; what happens there is hooks.py's.

[Note: several modules, one unit]
The first module is the unit, and holds the groups; the others are its followers. The unit's forward begins with the
module that comes first, which is the first one as a rule, and ends with the last one. Gradients may enter at the
outputs of any of them, and so each of these begins the unit's backward. Where the last module does not come (a layer
that is skipped, an early exit), the forward ends with that of the unit around, or before the first module comes again.
Modules that come first may run without a graph while later ones record one (a reentrant checkpoint of some layers).
In a backward, modules that are recomputed come one by one and in reverse, so that each is a forward of its own there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .backward_task import is_in_backward
from .compiling import untraced
from .hooks import begin_forward, end_forward, open_call, refuse_alias
from .module import FsdpModule
from .phase import UnitPhase


def register_joint_hooks(unit: FsdpModule, followers: Sequence[nn.Module]) -> None:
    """Let the forwards of a unit's modules call its points; they run in this order as a rule."""
    members: list[Any] = [unit, *followers]
    for position, member in enumerate(members):
        hooks = _MemberHooks(weakref.ref(unit), position == 0, position == len(members) - 1)
        member.register_forward_pre_hook(hooks.begin, prepend=True, with_kwargs=True)
        member.register_forward_hook(hooks.end, always_call=True)


class _MemberHooks:
    """Forward hooks of one module; weak, so that unit and follower form no cycle."""

    def __init__(self, unit: weakref.ref[FsdpModule], is_first: bool, is_last: bool) -> None:
        self._unit = unit
        self._is_first = is_first
        self._is_last = is_last

    @untraced
    def begin(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Begin the unit's forward, unless it is under way."""
        unit: Any = self._unit()
        if unit is None:
            return None
        if self._is_first and unit.phase is UnitPhase.FORWARD and not is_in_backward():
            end_forward(unit, (), None)
        if unit.phase is UnitPhase.FORWARD:
            if unit._fsdp_open_call is None and torch.is_grad_enabled():
                # Without a call nobody would tell the unit of its backward.
                return open_call(unit, args, kwargs)
            return None
        replaced = begin_forward(unit, args, kwargs)
        outer = unit._fsdp_parent()
        if outer is not None and unit.phase is UnitPhase.FORWARD:
            outer._fsdp_open_joints[id(unit)] = weakref.ref(unit)
        return replaced

    @untraced
    def end(self, module: Any, args: Any, output: Any) -> Any:
        """End the unit's forward with its last module, or with one that has failed."""
        unit: Any = self._unit()
        if unit is None or unit.phase is UnitPhase.RESTING:
            return None
        if not (self._is_last or output is None or is_in_backward()):
            call = unit._fsdp_open_call
            if call is not None and torch.is_grad_enabled() and call.watch_outputs(output, is_final=False):
                call.has_left_outputs = True
            refuse_alias(unit, output)
            return None
        outer = unit._fsdp_parent()
        if outer is not None:
            outer._fsdp_open_joints.pop(id(unit), None)
        return end_forward(unit, args, output)
