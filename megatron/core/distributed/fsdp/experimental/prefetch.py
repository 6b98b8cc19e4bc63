# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which of the units that come next a unit gathers ahead: the budgets of `SchedulePolicy`, or what the user has named.

Which units come next is learnt_order.py's, on which stream and when they are gathered schedule.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from .backward_task import is_in_backward
from .unit import Unit


def units_ahead(unit: Unit, direction: Literal["forward", "backward"], successors: Iterable[Unit]) -> Iterator[Unit]:
    """Yield the units to gather while `unit` computes, nearest first.

    Args:
        unit: whose forward or backward begins.
        direction: which of them.
        successors: what comes after it.
    """
    named = unit.prefetch_targets(direction)
    if named is not None:
        yield from (target for target in named if target.parameter_groups)
        return
    policy = unit.schedule_policy
    max_units, max_numel = policy.forward_prefetch_units, policy.forward_prefetch_numel
    if direction == "backward":
        max_units, max_numel = policy.backward_prefetch_units, policy.backward_prefetch_numel
    if max_units == 0:
        return
    num_units = numel = 0
    # Roots are evaluated in any order, and no backward would free what was gathered for one that does not follow.
    is_evaluation = not torch.is_grad_enabled() and not is_in_backward()
    for successor in successors:
        if not successor.parameter_groups:
            continue
        if is_evaluation and successor._fsdp_root() is not unit._fsdp_root():
            return
        num_units += 1
        numel += successor.num_parameter_elements
        if num_units > max_units or (max_numel is not None and numel > max_numel):
            return
        yield successor
