# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Refuses a step of any torch optimizer while gradients of its parameters wait for a reduction.

A gradient that waits is not in ``.grad``: a step would go by without it, and without an error. It changes no optimizer
and no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .compiling import untraced
from .dtensor import FsdpDTensor
from .parameter_group import FsdpParameterGroup

_handle: RemovableHandle | None = None


def watch_steps() -> None:
    """Have the steps of all optimizers checked from now on; called whenever a unit is made."""
    global _handle
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_before_step)


def require_finished(optimizer: str, groups: Iterable[FsdpParameterGroup]) -> None:
    """Refuse to step on gradients that are not final, on every rank alike.

    Args:
        optimizer: names the optimizer in errors.
        groups: those of its parameters.

    Raises:
        RuntimeError: gradients wait for a reduction, or belong to an accumulation that has not ended.
    """
    unfinished = [group for group in groups if group.has_unreduced_gradients or group.has_unfinished_gradients]
    held = [group.name for group in unfinished if group.has_unreduced_gradients]
    if held:
        raise RuntimeError(
            f"{optimizer}.step: expected reduced gradients, got some that are held back on each rank for groups "
            f"{held[:3]}. Run the last backward with is_last=True and set_requires_gradient_sync(True)."
        )
    if unfinished:
        raise RuntimeError(
            f"{optimizer}.step: expected gradients of all microbatches, got a last backward inside "
            f"microbatch(context, is_last=False) for groups {[group.name for group in unfinished[:3]]}. Run the last "
            "one with is_last=True."
        )


@untraced
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check an optimizer that is about to step; where a closure makes its gradients, once that has run.

    Adapted optimizers ask by themselves: they know their groups.
    """
    if hasattr(optimizer, "_fsdp_step"):
        return None
    groups = _groups_behind(optimizer)
    if not groups:
        return None
    name = type(optimizer).__name__
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        require_finished(name, groups)
        return None

    def checked() -> Any:
        loss = closure()
        require_finished(name, groups)
        return loss

    return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})


def _groups_behind(optimizer: Optimizer) -> list[FsdpParameterGroup]:
    """Return the groups of the sharded parameters among an optimizer's; for most optimizers there are none."""
    references = (
        getattr(parameter, "_fsdp_group", None)
        for param_group in optimizer.param_groups
        for parameter in param_group["params"]
        if type(parameter) is FsdpDTensor
    )
    # Not keyed by the references: a dead one has no hash.
    groups = dict.fromkeys(reference() for reference in references if reference is not None)
    return [group for group in groups if group is not None]
