# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a unit can be doing, and which moves from one to another make sense."""

from __future__ import annotations

from enum import Enum, auto


class UnitPhase(Enum):
    """What a unit is doing."""

    RESTING = auto()
    FORWARD = auto()
    BACKWARD = auto()


def check_move(unit: str, old: UnitPhase, new: UnitPhase) -> None:
    """Raise unless a unit may go from `old` to `new`: from rest to forward or backward, and back to rest.

    Raises:
        RuntimeError: it may not; names the unit.
    """
    # By identity: a table of pairs would hash enums in every step.
    if (old is UnitPhase.RESTING) == (new is UnitPhase.RESTING):
        raise RuntimeError(
            f"phase of unit {unit}: expected a move allowed from {old.name}, got {new.name}. A forward or backward of "
            "this unit was entered while another was under way, or one was cut short by an exception."
        )
