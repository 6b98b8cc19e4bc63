# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a captured step reads of an optimizer, and what it may not do to it in Python: learning rates, settings, state.

It captures nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


def constant(value: Any) -> Hashable:
    """Return what tells one setting of an optimizer from another, where a kernel may have it as a constant.

    A tensor on a device stands for itself: a kernel reads it there. One on the host is read at the capture.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(constant, value))
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return repr(value.tolist())
    return value if isinstance(value, Hashable) else repr(value)


class OptimizerState:
    """State and settings of an optimizer, as they are now.

    Args:
        optimizer: a torch optimizer.
        device: where captured kernels find its state.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._state = optimizer.state
        self._device = device
        self._items = [(parameter, state, dict(state)) for parameter, state in self._state.items()]
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]

    def has_grown(self) -> bool:
        """Return whether there is more state now."""
        is_new = any(len(state) > len(values) for _, state, values in self._items)
        return is_new or len(self._state) > len(self._items)

    def problem(self) -> str | None:
        """Return why a replay could not do what the step since then has done, if so."""
        changed = next((name for now, then in self._pairs() for name in then if _differ(now.get(name), then[name])), "")
        places = {value.device.type for _, then in self._pairs() for value in then.values() if _is_tensor(value)}
        if not changed and places <= {self._device.type}:
            return None
        found = f"a new {changed!r}" if changed else f"state on {sorted(places)}"
        return (
            f"capture_iteration optimizer: expected a step that changes its state in place on {self._device.type}, got "
            f"{found}, which a replay could not follow. Use an optimizer that counts its steps on the device, such as "
            "torch's with capturable=True."
        )

    def restore(self) -> None:
        """Go back to what it was, as long as nothing has been written in place."""
        self._state.clear()
        for parameter, state, values in self._items:
            state.clear()
            state.update(values)
            self._state[parameter] = state
        for group, values in self._groups:
            group.clear()
            group.update(values)

    def _pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        settings = [({**now, "params": None}, {**then, "params": None}) for now, then in self._groups]
        return [*((state, values) for _, state, values in self._items), *settings]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _differ(now: Any, then: Any) -> bool:
    return now is not then and (_is_tensor(now) or _is_tensor(then) or bool(now != then))


class LearningRate:
    """A param_group's learning rate where graphs read it: 0-d float32, the type that fused kernels take."""

    def __init__(self, device: torch.device) -> None:
        self._static = torch.zeros((), dtype=torch.float32, device=device)
        self._last: float | None = None
        self._version = 0

    def follow(self, param_group: dict[str, Any]) -> None:
        """Take what a scheduler or the user has set."""
        rate = param_group["lr"]
        if isinstance(rate, torch.Tensor):
            self._static.copy_(rate)
            self._last = None
        elif rate != self._last:
            self._static.fill_(rate)
            self._last = rate

    def lend(self, param_group: dict[str, Any]) -> None:
        """Let the group's step read it."""
        param_group["lr"], self._version = self._static, self._static._version

    def take_back(self, param_group: dict[str, Any], index: int) -> None:
        """Refuse that `step_fn` has set it.

        Raises:
            RuntimeError: it has.
        """
        if param_group["lr"] is not self._static or self._static._version != self._version:
            self._last = None
            raise RuntimeError(
                f"learning rate of param_groups[{index}]: expected step_fn to leave it, got it set there, where a "
                "replay would not follow it. Step schedulers and set rates between calls."
            )
