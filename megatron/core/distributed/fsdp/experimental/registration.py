# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What is added to a unit's modules after it was sharded: refused at once, since nothing would gather or reduce it.

It uses torch's hooks on the registration of parameters and modules, which cost nothing while a model runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .compiling import untraced
from .dtensor import FsdpDTensor
from .module import FsdpModule

_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FsdpModule]] = weakref.WeakKeyDictionary()


def watch(modules: Iterable[nn.Module], unit: FsdpModule) -> None:
    """Refuse further parameters in these modules, which belong to `unit`."""
    _install()
    for module in modules:
        _owners[module] = weakref.ref(unit)


def unit_of(module: nn.Module) -> FsdpModule | None:
    """Return the unit that a module belongs to."""
    reference = _owners.get(module)
    return None if reference is None else reference()


def _install() -> None:
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_module_parameter_registration_hook(_on_parameter)
        register_module_module_registration_hook(_on_module)


_is_installed = False


@untraced
def _on_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    reference = _owners.get(module)
    unit = None if reference is None else reference()
    if unit is not None and parameter is not None and not unit.context.is_initializing:
        raise _refusal(unit, module, name)


@untraced
def _on_module(module: nn.Module, name: str, added: Any) -> None:
    reference = _owners.get(module)
    unit = None if reference is None else reference()
    if reference is None or unit is None or added is None:
        return
    for inner, parameter in added.named_parameters():
        if not isinstance(parameter, FsdpDTensor):
            raise _refusal(unit, module, f"{name}.{inner}")
    for inner_module in added.modules():
        _owners.setdefault(inner_module, reference)


def _refusal(unit: Any, module: nn.Module, name: str) -> RuntimeError:
    path = next((path for path, owned in unit.named_modules() if owned is module), "")
    name = f"{path}.{name}" if path else name
    return RuntimeError(
        f"parameters of unit {unit.name}: expected those that it was sharded with, got {name}, whose gradients would "
        "stay on this rank. Add and replace parameters before fully_shard, and write new values with copy_."
    )
