# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which units are gathered while another one computes. It gathers nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from .backward_task import is_in_backward
from .unit import Unit

Direction = Literal["forward", "backward"]


def units_ahead(unit: Unit, successors: Iterable[Unit], direction: Direction) -> Sequence[Unit]:
    """Return the units to gather when `unit` begins: those that the user has named, or the next ones in the budget.

    Args:
        unit: the unit that begins.
        successors: what comes after it in `direction`, next first.
        direction: forward or backward; for the policy's budget.
    """
    named = unit.prefetch_targets(direction)
    if named is not None:
        return [successor for successor in named if successor.parameter_groups]
    policy = unit.schedule_policy
    max_units, max_numel = policy.forward_prefetch_units, policy.forward_prefetch_numel
    if direction == "backward":
        max_units, max_numel = policy.backward_prefetch_units, policy.backward_prefetch_numel
    ahead: list[Unit] = []
    if max_units == 0:
        return ahead
    numel = 0
    # Roots are evaluated in any order, and no backward would free what was gathered for one that does not follow.
    is_evaluation = not torch.is_grad_enabled() and not is_in_backward()
    for successor in successors:
        if not successor.parameter_groups:
            continue
        if is_evaluation and successor._fsdp_root() is not unit._fsdp_root():
            break
        if max_numel is not None:
            numel += successor.num_parameter_elements
            if numel > max_numel:
                break
        ahead.append(successor)
        if len(ahead) == max_units:
            break
    return ahead
