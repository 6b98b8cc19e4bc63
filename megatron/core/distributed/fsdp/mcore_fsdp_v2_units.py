# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which modules of a Megatron-Core model chunk become units, and which of them share one. It shards nothing."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

_logger = logging.getLogger(__name__)

_FURTHER_LAYERS = (
    # Hybrid models alternate these with transformer layers, of which their attention, MLP and MoE layers are kinds.
    "megatron.core.ssm.mamba_layer.MambaLayer",
    # A projection and norms around a transformer layer, which is a unit inside.
    "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer",
)
"""Layers that some versions of megatron-core lack, or cannot import without further libraries."""


def default_classes() -> tuple[type[nn.Module], ...]:
    """Return megatron-core's layers, as far as this installation can import them."""
    further = [_import_class(name) for name in _FURTHER_LAYERS]
    return (TransformerLayer, *(found for found in further if found is not None))


def resolve_classes(names: Sequence[type[nn.Module] | str] | None) -> tuple[type[nn.Module], ...]:
    """Return the classes whose modules become units; megatron-core's layers if none are named.

    Raises:
        ValueError: something that is no class of modules, and names none.
    """
    if names is None:
        return default_classes()
    classes = []
    for item in names:
        found = _import_class(item) if isinstance(item, str) else item
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ValueError(
                f"FullyShardedDataParallel fsdp_unit_modules: expected module classes or their dotted names, got "
                f"{item!r}. Pass the class, or its module and name, e.g. 'torch.nn.Linear'."
            )
        classes.append(found)
    return tuple(classes)


def _import_class(dotted_name: str) -> Any:
    """Return what the name stands for, or None."""
    module_name, _, class_name = dotted_name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name, None) if module_name else None
    except ImportError:
        return None


def find_units(
    module: nn.Module, classes: tuple[type[nn.Module], ...], others: Sequence[nn.Module], *, is_default: bool
) -> list[nn.Module]:
    """Return the modules of these classes and others in forward order; a warning says where there are none by default.

    Raises:
        ValueError: none of classes that were named.
    """
    units = [child for child in module.modules() if isinstance(child, classes)]
    if classes and not units:
        names = [cls.__name__ for cls in classes]
        if not is_default:
            raise ValueError(
                f"FullyShardedDataParallel fsdp_unit_modules: expected classes that occur in the model, got {names} "
                f"for {type(module).__name__}. Name classes of its submodules, or set disable_bucketing."
            )
        _logger.warning(
            "FullyShardedDataParallel: no %s in %s, so the whole chunk is one unit, gathered at once. Pass "
            "fsdp_unit_modules to cut it.",
            names,
            type(module).__name__,
        )
    wanted = {*units, *others}
    return [child for child in module.modules() if child in wanted]


def shared_modules(module: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters that several units use, e.g. one norm of all layers; outer ones first.

    As units of their own they are gathered wherever they are called.

    Args:
        module: the chunk, which is a unit as well.
        units: the others.
    """
    heads = {module, *units}
    users: dict[nn.Module, set[nn.Module]] = {}
    for head in heads:
        for member in _own_modules(head, heads):
            users.setdefault(member, set()).add(head)
    shared = [child for child in module.modules() if len(users.get(child, ())) > 1 and list(child.parameters())]
    # What lies in a shared module belongs to it, but for what others use without the rest.
    inner = {
        child
        for outer in shared
        for child in outer.modules()
        if child is not outer and users.get(child) == users[outer]
    }
    return [child for child in shared if child not in inner]


def _own_modules(head: nn.Module, heads: set[nn.Module]) -> set[nn.Module]:
    """Return the modules in a unit that are neither units nor inside of them."""
    found: set[nn.Module] = set()
    stack = [*head.children()]
    while stack:
        child = stack.pop()
        if child not in heads and child not in found:
            found.add(child)
            stack += child.children()
    return found


def keep_gathered(options: dict[str, Any]) -> dict[str, Any]:
    """Return what `fully_shard` is told of a module that several units use: to gather it once for all of forward."""
    if not any(at.is_shard() for at in options["placements"].parameter):
        return options
    return options | {"schedule_policy": replace(options["schedule_policy"], reshard_after_forward=False)}


def join_units(
    module: nn.Module, units: Sequence[nn.Module], min_numel: int, shared: Sequence[nn.Module] = ()
) -> list[list[nn.Module]]:
    """Return the units of a chunk, each as the list of modules that form it.

    Neighbours in a ModuleList or Sequential that have no units inside form one, until it has `min_numel` parameters.
    Example: layers of 3 parameters with min_numel 5 are joined two by two; an odd last one stays alone.

    Args:
        module: the chunk.
        units: modules that are to be gathered as a whole, in forward order.
        min_numel: parameters of a unit that takes no further neighbour; 0 leaves every module a unit of its own.
        shared: further units, inside of several of these.
    """
    places = {
        id(child): (id(parent), position)
        for parent in module.modules()
        if isinstance(parent, (nn.ModuleList, nn.Sequential))
        for position, child in enumerate(parent)
    }
    inner = {id(unit) for unit in (*units, *shared)}
    joined: list[list[nn.Module]] = []
    for unit in units:
        is_plain = not any(id(child) in inner for child in unit.modules() if child is not unit)
        last = joined[-1] if joined else []
        if is_plain and last and _follows(places, last[-1], unit) and _numel(last) < min_numel:
            last.append(unit)
        else:
            joined.append([unit])
        if not is_plain:
            places.pop(id(unit), None)
    return joined


def _follows(places: dict[int, tuple[int, int]], one: nn.Module, other: nn.Module) -> bool:
    first, second = places.get(id(one)), places.get(id(other))
    return first is not None and second is not None and second == (first[0], first[1] + 1)


def _numel(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
