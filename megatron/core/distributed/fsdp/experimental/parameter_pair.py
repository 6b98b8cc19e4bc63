# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The two parameters that stand for one original: what a module holds at rest, and what it holds while it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .dtensor import FsdpDTensor, shard_dtensor
from .geometry import ShardGeometry

_RUNTIME_ATTRIBUTES = frozenset({"main_grad", "_fsdp_group", "_fsdp_unit"})


def make_pair(
    original: nn.Parameter, local: torch.Tensor, full: torch.Tensor, geometry: ShardGeometry
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return (sharded, unsharded) parameters with the original's requires_grad and the attributes that users set.

    Args:
        original: what they replace.
        local: this rank's main weights; [rows, *shape[1:]] or 1-D.
        full: the full weights, logical shape; need not have storage now. Or the unsharded parameter itself.
        geometry: which elements each rank owns; its owner is the group.
    """
    sharded: Any = nn.Parameter(_plain_dtensor(local, geometry), requires_grad=original.requires_grad)
    sharded.__class__ = FsdpDTensor
    sharded._geometry = geometry
    sharded._fsdp_group = geometry.owner
    # `.data` gives the view its own version counter, so that refilling the buffer between forward and backward is not
    # taken for an in-place change of a saved weight.
    is_made = isinstance(full, nn.Parameter)
    unsharded: Any = full if is_made else nn.Parameter(full.data, requires_grad=original.requires_grad)
    unsharded._fsdp_is_gathered = True
    for attribute, value in vars(original).items():
        if attribute not in _RUNTIME_ATTRIBUTES:
            setattr(sharded, attribute, value)
            setattr(unsharded, attribute, value)
    if original.is_floating_point():
        sharded.grad_dtype = None
    return sharded, unsharded


def foreign_parameter(held: Any, fqn: str, unit: str) -> RuntimeError:
    """Return what to raise where a module holds neither of the pair."""
    return RuntimeError(
        f"parameter {fqn} of unit {unit}: expected the one that fully_shard put there, got {type(held).__name__}. "
        "Write new values with copy_; tie or replace parameters before fully_shard."
    )


def frozen_when_sharded(fqn: str, unit: str, expected: torch.dtype | None, dtype: torch.dtype) -> RuntimeError:
    """Return what to raise where a parameter is to be trained that has main weights of the compute dtype."""
    return RuntimeError(
        f"requires_grad of {fqn} in unit {unit}: expected a parameter with main weights in {expected}, got one that "
        f"was frozen when it was sharded and has {dtype}. Shard it trainable and freeze it afterwards."
    )


def frozen_with_gradients(fqn: str, unit: str) -> RuntimeError:
    """Return what to raise where a parameter is frozen or unfrozen whose unit has gradients that wait."""
    return RuntimeError(
        f"requires_grad of {fqn} in unit {unit}: expected a change while no gradients are held back, got some. Run a "
        "backward with set_requires_gradient_sync(True), or zero_grad()."
    )


def frozen_while_gathered(unit: str) -> RuntimeError:
    """Return what to raise where a gathered parameter has been frozen or unfrozen."""
    return RuntimeError(
        f"requires_grad in unit {unit}: expected a change while the unit is at rest, got one of gathered parameters. "
        "Freeze and unfreeze between steps, and after reshard()."
    )


def _plain_dtensor(local: torch.Tensor, geometry: ShardGeometry) -> Any:
    """Return a plain DTensor, which `nn.Parameter` accepts; the caller gives it its class afterwards."""
    dtensor: Any = shard_dtensor(local, geometry)
    dtensor.__class__ = dtensor.__class__.__mro__[1]
    return dtensor


class NoMainGrad:
    """Stands where fused kernels expect a main gradient to add to; every use raises."""

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"main_grad of {self._fqn}: expected gradients in .grad, or where get_main_grad() says, got a kernel that "
            "adds them to a main gradient. Turn gradient_accumulation_fusion off."
        )
