# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which modules of a Megatron-Core model chunk become units, and which of them share one. It shards nothing."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

_logger = logging.getLogger(__name__)


def resolve_classes(names: Sequence[type[nn.Module] | str] | None) -> tuple[type[nn.Module], ...]:
    """Return the classes whose modules become units; transformer layers if none are named.

    Raises:
        ValueError: something that is no class of modules, and names none.
    """
    if names is None:
        return (TransformerLayer,)
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


def join_units(module: nn.Module, units: Sequence[nn.Module], min_numel: int) -> list[list[nn.Module]]:
    """Return the units of a chunk, each as the list of modules that form it.

    Neighbours in a ModuleList or Sequential that have no units inside form one, until it has `min_numel` parameters.
    Example: layers of 3 parameters with min_numel 5 are joined two by two; an odd last one stays alone.

    Args:
        module: the chunk.
        units: modules that are to be gathered as a whole, in forward order.
        min_numel: parameters of a unit that takes no further neighbour; 0 leaves every module a unit of its own.
    """
    places = {
        id(child): (id(parent), position)
        for parent in module.modules()
        if isinstance(parent, (nn.ModuleList, nn.Sequential))
        for position, child in enumerate(parent)
    }
    inner = {id(unit) for unit in units}
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
