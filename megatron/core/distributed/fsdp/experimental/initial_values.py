# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Initial values of parameters built on the meta device: module by module, as an ordinary start computes them.

It calls the modules' own ``reset_parameters`` and keeps no state.

[Note: same values as an ordinary start]
Ordinary construction initialises inner modules before outer ones, in the order of definition, and each draws from the
random generator. Here the modules are walked in that order once the root is known, whatever order they were sharded in.
A module computes on full tensors of its own unit, which go into the shards and are freed before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .dtensor import FsdpDTensor
from .parameter_group import FsdpParameterGroup

RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""The names under which torch's modules compute their initial values."""


def reset_method(module: nn.Module) -> Callable[[], None] | None:
    """Return the method that gives a module's own parameters and buffers their initial values, if it has one."""
    for name in RESET_METHODS:
        method = getattr(module, name, None)
        if callable(method):
            found: Callable[[], None] = method
            return found
    return None


def initialize_values(root: Any, device: torch.device) -> None:
    """Compute all initial values that are missing under `root`; on every rank alike, without communication.

    Args:
        root: a unit that no other unit contains.
        device: where meta buffers go.
    """
    _visit(root, None, device, set())


def _visit(module: nn.Module, outer: _FullTensors | None, device: torch.device, seen: set[nn.Module]) -> None:
    if module in seen:
        return
    seen.add(module)
    # A unit's modules may write into each other's parameters; those of another unit are shards by then.
    scope = None if hasattr(module, "_fsdp_groups") else outer
    own = _missing(module)
    opened = None
    if own and scope is None:
        scope = opened = _FullTensors(device)
    try:
        if own:
            assert scope is not None
            scope.place(module, own)
        for child in module.children():
            _visit(child, scope, device, seen)
        if own:
            method = reset_method(module)
            assert method is not None, "fully_shard requires one"
            method()
    except BaseException:
        if opened is not None:
            opened.restore()
        raise
    if opened is not None:
        opened.distribute()


def _missing(module: nn.Module) -> dict[str, Any]:
    """Return the module's parameters whose values are missing, a tied one under every name, and its meta buffers."""
    missing: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if isinstance(parameter, FsdpDTensor) and _group_of(parameter).was_without_values(parameter.geometry.index):
            missing[name] = parameter
    missing.update({name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta})
    return missing


class _FullTensors:
    """Full tensors in place of sharded parameters, while modules compute their values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._placed: list[tuple[dict[str, Any], str, Any, bool]] = []
        self._known: set[int] = set()

    def place(self, module: nn.Module, missing: dict[str, Any]) -> None:
        """Give the module full tensors for what is missing."""
        for name, tensor in missing.items():
            if name in module._buffers:
                module._buffers[name] = torch.empty_like(tensor, device=self._device)
                continue
            group = _group_of(tensor)
            full = nn.Parameter(
                torch.empty(tensor.shape, dtype=group.full_weight.dtype, device=self._device),
                requires_grad=tensor.requires_grad,
            )
            # The other names of a tied weight draw random numbers, too, as they do before they are tied.
            is_first = group.is_without_values(tensor.geometry.index) and id(tensor) not in self._known
            self._known.add(id(tensor))
            self._placed.append((module._parameters, name, tensor, is_first))
            module._parameters[name] = full

    def distribute(self) -> None:
        """Put the values into the shards, and the sharded parameters back."""
        for parameters, name, sharded, is_first in self._placed:
            if is_first:
                _group_of(sharded).set_values(sharded.geometry.index, parameters[name])
        self.restore()

    def restore(self) -> None:
        """Put the sharded parameters back."""
        for parameters, name, sharded, _ in self._placed:
            parameters[name] = sharded
        self._placed.clear()


def _group_of(parameter: Any) -> FsdpParameterGroup:
    group: FsdpParameterGroup = parameter._fsdp_group()
    return group
