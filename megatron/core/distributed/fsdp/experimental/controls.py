# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What may be set on a unit between steps, under the names that PyTorch's FSDP2 uses, and `microbatch`.

It keeps the settings; the schedule and the unit read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn

from .compiling import compile_forward
from .policy import SchedulePolicy
from .prefetch import Direction
from .schedule import FsdpContext
from .unit import Unit

_OWN_ATTRIBUTES = frozenset({"backward_task", "unshard_event"})


class UnitControls:
    """Settings of one unit; a base class of `FsdpModule`."""

    _fsdp_context: FsdpContext
    _fsdp_groups: tuple[Any, ...]
    _fsdp_name: str
    _fsdp_followers: tuple[nn.Module, ...]
    _fsdp_policy: SchedulePolicy
    _fsdp_reduces: bool
    _fsdp_prefetch: dict[Direction, list[weakref.ref[Unit]]]

    def __setattr__(self, name: str, value: Any) -> None:
        # A module looks at every attribute for parameters and modules, which ours are not: several times a step.
        if name in _OWN_ATTRIBUTES or name.startswith("_fsdp_"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def schedule_policy(self) -> SchedulePolicy:
        """How far ahead the unit gathers, and how long it keeps what it has gathered."""
        return self._fsdp_policy

    @property
    def reduces_gradients(self) -> bool:
        """Whether the next backward reduces this unit's gradients over ranks, rather than keep its own sum of them."""
        return self._fsdp_reduces

    def prefetch_targets(self, direction: Direction) -> Sequence[Unit] | None:
        """Return the units to gather ahead of this one's compute, if the user has named them."""
        named = self._fsdp_prefetch.get(direction)
        return None if named is None else [unit for reference in named if (unit := reference()) is not None]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the next backwards reduce gradients over ranks.

        Gradients of backwards that do not are summed on each rank, full-size and in the main-gradient dtype, and go
        into the next reduction. An adapted optimizer refuses to step before that.

        Args:
            requires_gradient_sync: False to go without communication.
            recurse: whether units inside this one follow.
        """
        _check_bool("set_requires_gradient_sync", requires_gradient_sync)
        for unit in self._fsdp_units(recurse):
            unit._fsdp_reduces = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last one before the optimizer's step; as `microbatch` does."""
        _check_bool("set_is_last_backward", is_last_backward)
        self._fsdp_context.is_last_microbatch = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether weights are released between forward and backward.

        Args:
            reshard_after_forward: True to release them.
            recurse: whether units inside this one follow.

        Raises:
            ValueError: all of their weights are replicated, so that it would have no effect.
        """
        _check_bool("set_reshard_after_forward", reshard_after_forward)
        units = list(self._fsdp_units(recurse))
        groups = [group for unit in units for group in unit._fsdp_groups]
        if groups and not any(group.gathers for group in groups):
            raise ValueError(
                f"set_reshard_after_forward: expected units that shard their parameters, got {len(units)} with "
                "replicated ones; it would have no effect. Leave it out, or shard the parameters."
            )
        for unit in units:
            unit._fsdp_policy = replace(unit._fsdp_policy, reshard_after_forward=reshard_after_forward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units ahead, in this order, when this one's forward begins, in place of the policy's choice.

        Raises:
            ValueError: one of them is no unit of this context.
        """
        self._fsdp_name_prefetch("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """As `set_modules_to_forward_prefetch`, when this unit's backward begins."""
        self._fsdp_name_prefetch("backward", modules)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward of this unit and of each unit inside it, one by one; what is at their borders is not.

        Args:
            args: of `torch.compile`.
            kwargs: of `torch.compile`.

        Raises:
            NotImplementedError: the arguments ask for CUDA graphs.
        """
        for unit in self._fsdp_units(recurse=True):
            for module in (cast(nn.Module, unit), *unit._fsdp_followers):
                compile_forward(module, unit._fsdp_name, args, kwargs, replaces=unit is self)

    def _fsdp_drop_unreduced(self) -> None:
        """Forget gradients that wait for a reduction."""
        raise NotImplementedError

    def _fsdp_name_prefetch(self, direction: Direction, modules: Sequence[Any]) -> None:
        for module in modules:
            if not isinstance(module, UnitControls) or module._fsdp_context is not self._fsdp_context:
                raise ValueError(
                    f"set_modules_to_{direction}_prefetch: expected units of the same context, got "
                    f"{type(module).__name__}. Shard it in the same root or fully_shard_context()."
                )
        self._fsdp_prefetch[direction] = [weakref.ref(module) for module in modules]

    def _fsdp_units(self, recurse: bool) -> Iterator[UnitControls]:
        assert isinstance(self, nn.Module)
        if not recurse:
            yield self
            return
        for module in self.modules():
            if isinstance(module, UnitControls):
                yield module


def _check_bool(method: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{method}: expected True or False, got {value!r}.")


@contextmanager
def microbatch(context: FsdpContext, is_last: bool) -> Iterator[None]:
    """Say whether backwards inside the block end a gradient accumulation.

    Args:
        context: the context of the model that runs.
        is_last: False while further microbatches will add to the gradients. An adapted optimizer refuses to step
            on gradients that are not finished.
    """
    previous, context.is_last_microbatch = context.is_last_microbatch, is_last
    try:
        yield
    finally:
        context.is_last_microbatch = previous
