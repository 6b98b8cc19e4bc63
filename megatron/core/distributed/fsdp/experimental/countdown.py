# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A count that reports once when it reaches zero, and can be started again."""

from __future__ import annotations


class Countdown:
    """Counts `total` events down.

    Args:
        total: events to wait for, >= 0. With 0 it never reports.
    """

    def __init__(self, total: int) -> None:
        if total < 0:
            raise ValueError(f"countdown: expected total >= 0, got {total}.")
        self.total = total
        self.remaining = total

    @property
    def has_begun(self) -> bool:
        """Whether events have been counted since the last `reset`."""
        return self.remaining < self.total

    def tick(self) -> bool:
        """Count one event; return True exactly when it is the last one expected.

        Raises:
            RuntimeError: more events than `total` since the last `reset`.
        """
        if self.remaining == 0:
            raise RuntimeError(f"countdown: expected {self.total} events, got one more. Reset it between rounds.")
        self.remaining -= 1
        return self.remaining == 0

    def reset(self) -> None:
        """Start again from `total`."""
        self.remaining = self.total
