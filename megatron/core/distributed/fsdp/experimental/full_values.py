# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Full values on their way into sharded parameters and states: each rank keeps the elements that it owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .dtensor import FsdpDTensor, shard_dtensor


def cut_like(value: Any, parameter: FsdpDTensor) -> Any:
    """Return a full value as a parameter is cut; anything that has a cut of ours, or another shape, as it is.

    Args:
        value: a full tensor, the same on every rank, or a DTensor that torch has cut by its own rule: then every rank
            must call this, which gathers it.
        parameter: the parameter that it is for, or whose state it is.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, FsdpDTensor) or value.shape != parameter.shape:
        return value
    full = value.full_tensor() if isinstance(value, DTensor) else value
    geometry = parameter.geometry
    local = geometry.take(full.detach()).to(parameter.device)
    return shard_dtensor(local.view(parameter._local_tensor.shape), replace(geometry, owner=None))


def cut_values(state_dict: Any, prefix: str, parameters: Mapping[str, Any]) -> None:
    """Cut the full values of a state dict that are for these sharded parameters, in place.

    Args:
        state_dict: what `load_state_dict` is about to read.
        prefix: where the parameters' names begin in it.
        parameters: of one module, by name.
    """
    for name, parameter in parameters.items():
        key = prefix + name
        if isinstance(parameter, FsdpDTensor) and key in state_dict:
            state_dict[key] = cut_like(state_dict[key], parameter)
