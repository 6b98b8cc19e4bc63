# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a sharded model by canonical name: parameters, each once however often it is tied, and buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..dtensor import FsdpDTensor
from ..module import FsdpModule
from .errors import CheckpointError

_EXTRA_STATE = "_extra_state"


@dataclass
class ModelState:
    """What a checkpoint holds of a model.

    Attributes:
        tensors: sharded parameters and persistent buffers, by the first name that each has.
        aliases: further names of tied tensors, and the first one.
        extras: what modules return from ``get_extra_state``.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def named_parameters_of(self, optimizer: Any) -> dict[str, FsdpDTensor]:
        """Return an adapted optimizer's parameters by name.

        Raises:
            TypeError: the optimizer is not adapted.
            CheckpointError: it has parameters that are not the model's.
        """
        if not hasattr(optimizer, "_fsdp_step"):
            raise TypeError(
                f"checkpoint of {type(optimizer).__name__}: expected an optimizer adapted with fully_shard_optimizer, "
                "got another one. Adapt it before it is saved or loaded."
            )
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        named: dict[str, FsdpDTensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CheckpointError(
                        f"checkpoint of {type(optimizer).__name__}: expected parameters of the model, got "
                        f"{parameter.geometry.fqn}, which is another's. Save each model with its own optimizer."
                    )
                named[names[id(parameter)]] = parameter
        return named


def model_state(model: nn.Module) -> ModelState:
    """Return what a checkpoint holds of a sharded model; its tensors are the model's own.

    Raises:
        RuntimeError: the model's weights are gathered now.
        TypeError: some parameters are not sharded.
    """
    state, first_names = ModelState(), dict[int, str]()
    for name, value in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == _EXTRA_STATE:
            if value is not None:
                state.extras[name] = value
            continue
        if isinstance(value, nn.Parameter) and not isinstance(value, FsdpDTensor):
            raise TypeError(
                f"checkpoint of {type(model).__name__}: expected sharded parameters, got {name}, which belongs to no "
                "unit. Call fully_shard on the model, too."
            )
        first = first_names.setdefault(id(value), name)
        if first == name:
            state.tensors[name] = value
        else:
            state.aliases[name] = first
    return state


def first_unit(model: nn.Module) -> FsdpModule:
    """Return the outermost unit of a model.

    Raises:
        TypeError: there is none.
    """
    for module in model.modules():
        if isinstance(module, FsdpModule):
            return module
    raise TypeError(
        f"checkpoint of {type(model).__name__}: expected a model of sharded units, got none. Call fully_shard first."
    )
