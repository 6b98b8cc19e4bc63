# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which modules and parameters belong to a unit, and which to units inside it. It changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from .group_options import OwnedParameter
from .module import FsdpModule
from .recipes import QuantizationRecipe

QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)
"""Compute dtypes of weights that may rest and travel in low bits."""


def own_modules(module: nn.Module, future: Collection[nn.Module] = ()) -> Iterator[nn.Module]:
    """Yield `module` and the modules inside it, stopping at units and at those that are going to be."""
    yield module
    for child in module.children():
        if not is_of_unit(child) and child not in future:
            yield from own_modules(child, future)


def is_of_unit(module: nn.Module) -> bool:
    """Return whether a module is a unit, or one of several that form one."""
    return isinstance(module, FsdpModule) or "_fsdp_leader" in vars(module)


def owned_parameters(module: nn.Module, future: Collection[nn.Module] = ()) -> list[OwnedParameter]:
    """Return the parameters below `module` that no inner unit owns, each once, with every place that holds it."""
    owned: dict[int, OwnedParameter] = {}
    names = {id(child): name for name, child in module.named_modules(remove_duplicate=True)}
    for owner in dict.fromkeys(own_modules(module, future)):
        prefix = names[id(owner)]
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            entry = owned.setdefault(id(parameter), OwnedParameter(fqn, parameter))
            entry.places.append((owner._parameters, name))
            entry.names.append(fqn)
            entry.is_embedding |= isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
    return list(owned.values())


def jointly_owned_parameters(modules: Sequence[nn.Module]) -> list[OwnedParameter]:
    """Return the parameters of modules that form one unit, each once, with every place that holds it."""
    owned: dict[int, OwnedParameter] = {}
    for number, module in enumerate(modules):
        for item in owned_parameters(module):
            known = owned.setdefault(id(item.parameter), item)
            if known is item:
                item.member = number
            else:
                known.places += item.places
                known.names += item.names
                known.is_embedding |= item.is_embedding
    return list(owned.values())


def group_parameters(owned: list[OwnedParameter], recipe: QuantizationRecipe | None) -> list[list[OwnedParameter]]:
    """Group by (dtype, requires_grad) and by how they are quantized, in the order in which they first occur.

    A parameter whose attribute ``fsdp_group`` is set shares a group with those of an equal value only, so that its
    place in the buffer does not depend on others.
    """
    groups: dict[tuple[object, ...], list[OwnedParameter]] = {}
    for item in owned:
        parameter = item.parameter
        key = (
            parameter.dtype,
            parameter.requires_grad,
            getattr(parameter, "fsdp_group", None),
            is_quantized(item, recipe),
            None if item.primary is None else item.primary.kind,
        )
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def is_quantized(item: OwnedParameter, recipe: QuantizationRecipe | None) -> bool:
    """Return whether a parameter is kept and gathered in low bits: a matrix that the recipe does not keep."""
    parameter = item.parameter
    return (
        recipe is not None
        and item.primary is None
        and parameter.dtype in QUANTIZABLE
        and parameter.ndim >= 2
        and not item.is_embedding
        and not any(map(recipe.keeps, item.names))
    )
