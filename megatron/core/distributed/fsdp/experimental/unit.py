# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What the schedule needs of a unit, and the static orders in which units run.

It keeps no state: orders belong to the context, names and phases to the units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import nn

from .device import Event
from .indexed_order import IndexedOrder
from .parameter_group import FsdpParameterGroup
from .policy import SchedulePolicy


class Unit(Protocol):
    """What the schedule needs of an `FsdpModule`."""

    unshard_event: Event | None
    backward_task: int

    @property
    def name(self) -> str:
        """The unit's name."""
        ...

    @property
    def parameter_groups(self) -> tuple[FsdpParameterGroup, ...]:
        """The unit's groups."""
        ...

    @property
    def num_parameter_elements(self) -> int:
        """Elements of the unit's full parameters."""
        ...

    @property
    def schedule_policy(self) -> SchedulePolicy:
        """The unit's prefetch budgets."""
        ...

    @property
    def reduces_gradients(self) -> bool:
        """Whether the next backward reduces the unit's gradients."""
        ...

    def prefetch_targets(self, direction: Literal["forward", "backward"]) -> Sequence[Unit] | None:
        """Return the units to gather ahead of this one, if the user has named them."""
        ...

    def is_resting(self) -> bool:
        """Return whether no forward or backward of the unit is under way."""
        ...

    def is_in_backward(self) -> bool:
        """Return whether a backward of the unit is under way, or has left gradients behind."""
        ...

    def _fsdp_close_backward(self) -> None:
        """Close a backward in which some parameters or inputs got no gradient."""
        ...

    def _fsdp_abandon_backward(self) -> None:
        """Drop what a backward that an exception cut short has left."""
        ...

    def _fsdp_join(self, context: Any) -> None:
        """Move to a context that is still being built."""
        ...

    def _fsdp_bind(self, name: str, root: Unit) -> None:
        """Take the name and root found when the context was finalised."""
        ...

    def _fsdp_root(self) -> Unit | None:
        """Return the outermost unit around this one."""
        ...


def order_units(registered: IndexedOrder[Unit]) -> tuple[IndexedOrder[Unit], IndexedOrder[Unit]]:
    """Name the units, tell each its root, and return the forward and the backward order.

    Forward is the order in which modules are defined, an outer unit before its inner ones; backward takes inner units
    last to first, after their outer one. Several roots run forward as they were built and backward in reverse.
    """
    forward: IndexedOrder[Unit] = IndexedOrder()
    backward: IndexedOrder[Unit] = IndexedOrder()
    roots = find_roots(registered)
    for root in roots:
        for name, module in _as_module(root).named_modules():
            if module in registered:
                unit = _as_unit(module)
                if unit in forward:
                    raise ValueError(
                        f"fully_shard_context: expected each unit inside one root, got {name or type(module).__name__} "
                        f"of {type(root).__name__} inside another root, too. Shard a module around both roots."
                    )
                unit._fsdp_bind(name or type(module).__name__, root)
                forward.append(unit)
    for root in reversed(roots):
        _append_backward(_as_module(root), registered, backward)
    return forward, backward


def find_roots(registered: IndexedOrder[Unit]) -> list[Unit]:
    """Return the units that no other unit contains, in the order in which they were built."""
    inner: set[int] = set()
    for unit in registered:
        module = _as_module(unit)
        inner.update(id(child) for child in module.modules() if child is not module)
    return [unit for unit in registered if id(unit) not in inner]


def _append_backward(module: nn.Module, registered: IndexedOrder[Unit], order: IndexedOrder[Unit]) -> None:
    if module in registered and module not in order:
        order.append(_as_unit(module))
    for child in reversed(list(module.children())):
        _append_backward(child, registered, order)


def _as_module(unit: Unit) -> nn.Module:
    assert isinstance(unit, nn.Module)
    return unit


def _as_unit(module: Any) -> Unit:
    unit: Unit = module
    return unit
