# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""State of an adapted optimizer by parameter name, as checkpoints in the fsdp_dtensor format hold it.

It reads and writes no files, and knows no model: names are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.experimental import FsdpDTensor, shard_dtensor


def sharded_state(optimizer: Any, named: Mapping[str, FsdpDTensor]) -> dict[str, Any]:
    """Return state and settings by parameter name, with the same keys on every rank.

    Args:
        optimizer: an adapted optimizer.
        named: its parameters by name.

    Returns:
        ``{"state": {fqn: {"exp_avg": DTensor, ...}}, "param_to_group_meta": {fqn: {"lr": ..., ...}}}``. The DTensors
        share memory with the optimizer.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    state, meta = {}, {}
    for group in optimizer.param_groups:
        settings = _settings(group)
        for parameter in group["params"]:
            name = names[id(parameter)]
            meta[name] = dict(settings)
            if parameter in optimizer.state:
                state[name] = {key: _as_dtensor(value, parameter) for key, value in optimizer.state[parameter].items()}
    return {"state": state, "param_to_group_meta": meta}


def load_sharded_state(optimizer: Any, named: Mapping[str, FsdpDTensor], state_dict: Mapping[str, Any]) -> None:
    """Take what `sharded_state` returned, after a checkpoint has been read into it.

    Raises:
        KeyError: parameters are missing from it, or unknown.
        ValueError: parameters of one group have different settings in it.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    state, meta = state_dict["state"], state_dict["param_to_group_meta"]
    with_state = {name for name, parameter in named.items() if parameter in optimizer.state}
    for what, missing in (("settings", named.keys() - meta.keys()), ("state", with_state - state.keys())):
        if missing:
            raise KeyError(
                f"FullyShardedOptimizer.load_state_dict: expected {what} of every parameter, got none for "
                f"{sorted(missing)[:5]}. Load a checkpoint of the same model."
            )
    if unknown := (meta.keys() | state.keys()) - named.keys():
        raise KeyError(
            f"FullyShardedOptimizer.load_state_dict: expected this optimizer's parameters only, got "
            f"{sorted(unknown)[:5]}. Load a checkpoint of the same model."
        )
    settings = [
        _common_settings({names[id(parameter)]: meta[names[id(parameter)]] for parameter in group["params"]})
        for group in optimizer.param_groups
    ]
    for group, loaded in zip(optimizer.param_groups, settings, strict=True):
        group.update(loaded)
    for name, values in state.items():
        optimizer.state[named[name]] = {
            key: value.to_local() if isinstance(value, DTensor) else value for key, value in values.items()
        }


@torch.no_grad()
def create_state(optimizer: Any, gradient_dtype: torch.dtype | None = None) -> None:
    """Make an adapted optimizer create its state, without moving a weight or a step count.

    Args:
        optimizer: steps once with zero gradients where state is missing, and without the others.
        gradient_dtype: dtype of these gradients; None means that of each parameter.
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    new = [parameter for parameter in every if parameter not in optimizer.state]
    if not new:
        return
    saved = [_settings(group) for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in every]
    for parameter in every:
        parameter.grad = None
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype)
    for group in optimizer.param_groups:
        # Zero gradients move nothing by themselves. The rate stays: some rules start their state from it.
        group.update(weight_decay=0.0)
    optimizer.step()
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        _restore_settings(group, settings)
    for parameter, gradient in zip(every, gradients, strict=True):
        parameter.grad = gradient
    for parameter in new:
        state = optimizer.state[parameter]
        if "step" in state:
            state["step"] = _zero_like(state["step"])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _restore_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Give a group its settings back; a step count that a first step has added to it stays, as zero."""
    for key in group.keys() - settings.keys() - {"params"}:
        if key == "step":
            group[key] = _zero_like(group[key])
        else:
            del group[key]
    group.update(settings)


def _zero_like(step: Any) -> Any:
    return torch.zeros_like(step) if torch.is_tensor(step) else 0


def _common_settings(by_name: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that all parameters of one group share."""
    (first, settings), *others = by_name.items()
    for name, other in others:
        if other.keys() != settings.keys() or any(bool(other[key] != value) for key, value in settings.items()):
            raise ValueError(
                f"FullyShardedOptimizer.load_state_dict: expected equal settings within a parameter group, got {other} "
                f"for {name} and {settings} for {first}. Group the parameters as in the checkpoint."
            )
    return settings


def _as_dtensor(value: Any, parameter: FsdpDTensor) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == parameter.to_local().shape and value.ndim:
        return shard_dtensor(value, parameter.geometry)
    return value
