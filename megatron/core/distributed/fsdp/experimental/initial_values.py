# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Initial values of parameters built on the meta device: module by module, as an ordinary start computes them.

It calls the modules' own ``reset_parameters`` and keeps no state.

[Note: same values as an ordinary start]
Ordinary construction initialises inner modules before outer ones, in the order of definition, and each draws from the
random generator. Here the modules are walked in that order once the root is known, whatever order they were sharded in.
A module computes on full tensors of its own and of everything inside it, which go into the shards and are freed before
the next one. Tensors start as NaN, so that what no method sets is noticed.
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
    """Return the method that gives a module's parameters and buffers their initial values, if it has one."""
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

    Raises:
        RuntimeError: tensors that no method has set; names them.
    """
    # Whoever asks first may be evaluating: buffers must not become inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        _visit(root, None, device, set())


def _visit(module: nn.Module, outer: _FullTensors | None, device: torch.device, seen: set[nn.Module]) -> None:
    if module in seen:
        return
    seen.add(module)
    method = reset_method(module)
    own = _missing(module)
    is_called = method is not None and (bool(own) or any(_missing(inner) for inner in module.modules()))
    opened = _FullTensors(device) if outer is None and is_called else None
    scope = outer or opened
    try:
        if own:
            assert scope is not None, "fully_shard requires a method"
            scope.place(module, own)
        for child in module.children():
            _visit(child, scope, device, seen)
        if is_called and method is not None:
            method()
        if opened is not None:
            opened.distribute()
    except BaseException:
        if opened is not None:
            opened.restore()
        raise


def _missing(module: nn.Module) -> dict[str, Any]:
    """Return the module's parameters whose values are missing, a tied one under every name, and its meta buffers."""
    missing: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if isinstance(parameter, FsdpDTensor) and _group_of(parameter).was_without_values(parameter.geometry.index):
            missing[name] = parameter
    missing.update({name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta})
    return missing


class _FullTensors:
    """Full tensors in place of sharded parameters and meta buffers, while modules compute their values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._placed: list[tuple[dict[str, Any], str, Any, str]] = []

    def place(self, module: nn.Module, missing: dict[str, Any]) -> None:
        """Give the module full tensors for what is missing."""
        for name, tensor in missing.items():
            is_buffer = name in module._buffers
            holder: dict[str, Any] = module._buffers if is_buffer else module._parameters
            dtype = tensor.dtype if is_buffer else _group_of(tensor).full_weight.dtype
            full = _unset(torch.empty(tensor.shape, dtype=dtype, device=self._device))
            self._placed.append((holder, name, tensor, f"{type(module).__name__}.{name}"))
            holder[name] = full if is_buffer else nn.Parameter(full, requires_grad=tensor.requires_grad)

    def distribute(self) -> None:
        """Put the values into the shards, and the sharded parameters back."""
        unset = [label for holder, name, _, label in self._placed if _is_unset(holder[name])]
        if unset:
            raise RuntimeError(
                f"initial values: expected {' or '.join(RESET_METHODS)} to set every tensor that was built on the meta "
                f"device, got {unset} unset. Set them there, or build their modules on a real device."
            )
        for holder, name, original, _ in self._placed:
            if isinstance(original, FsdpDTensor):
                group, index = _group_of(original), original.geometry.index
                # The other names of a tied weight drew random numbers, too, as they do before they are tied.
                if group.is_without_values(index):
                    group.set_values(index, holder[name])
                holder[name] = original
        self._placed.clear()

    def restore(self) -> None:
        """Put back what was there, so that a later attempt finds everything missing."""
        for holder, name, original, _ in self._placed:
            holder[name] = original
        self._placed.clear()


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    return tensor.zero_() if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_unset(tensor: torch.Tensor) -> bool:
    """Return whether elements are as `_unset` leaves them; of booleans nothing can be said."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _group_of(parameter: Any) -> FsdpParameterGroup:
    group: FsdpParameterGroup = parameter._fsdp_group()
    return group
