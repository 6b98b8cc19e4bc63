# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""State of an adapted optimizer by parameter name, as fsdp_dtensor checkpoints hold it, and that of a loss scaler.

It reads and writes no files, and knows no model: names are given.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import MegatronGradScaler

from megatron.core.distributed.fsdp.experimental import CheckpointError, FsdpDTensor
from megatron.core.distributed.fsdp.experimental.checkpoint import (
    set_settings,
    set_state,
    settings_by_name,
    state_by_name,
)


def sharded_state(optimizer: Any, named: Mapping[str, FsdpDTensor]) -> dict[str, Any]:
    """Return state and settings by parameter name, with the same keys on every rank.

    Args:
        optimizer: an adapted optimizer.
        named: its parameters by name.

    Returns:
        ``{"state": {fqn: {"exp_avg": DTensor, ...}}, "param_to_group_meta": {fqn: {"lr": ..., ...}}}``. The DTensors
        share memory with the optimizer.
    """
    return {"state": state_by_name(optimizer, named), "param_to_group_meta": settings_by_name(optimizer, named)}


def scaler_state(scaler: MegatronGradScaler | None) -> dict[str, float]:
    """Return what a loss scaler must remember, in plain numbers, equal on every rank; nothing of a constant one."""
    state = {} if scaler is None else scaler.state_dict()
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def load_scaler_state(scaler: MegatronGradScaler | None, saved: Mapping[str, Any]) -> None:
    """Give a loss scaler what `scaler_state` returned; nothing to none, and to a constant one.

    Raises:
        KeyError: some of it is missing.

    Warns:
        UserWarning: there is nothing, and the scaler would remember something.
    """
    wanted = scaler_state(scaler)
    if scaler is None or not wanted:
        return
    if not saved:
        warnings.warn(
            "FullyShardedOptimizer.load_state_dict: expected the state of a dynamic loss scaler, got none, as of a run "
            f"without one. The loss scale is {wanted['scale']:g}, from the config.",
            stacklevel=2,
        )
        return
    if missing := wanted.keys() - saved.keys():
        raise KeyError(
            f"FullyShardedOptimizer.load_state_dict: expected {sorted(wanted)} of the loss scaler, got none for "
            f"{sorted(missing)}. Load a checkpoint that is whole."
        )
    state = {key: saved[key] for key in wanted}
    state["scale"] = torch.full_like(scaler.scale, float(saved["scale"]))
    scaler.load_state_dict(state)


def load_sharded_state(optimizer: Any, named: Mapping[str, FsdpDTensor], state_dict: Mapping[str, Any]) -> None:
    """Take what `sharded_state` returned, after a checkpoint has been read into it.

    Raises:
        KeyError: parameters are missing from it, or unknown.
        ValueError: parameters of one group have different settings in it.
    """
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
    try:
        set_settings(optimizer, named, meta)
    except CheckpointError as error:
        raise ValueError(f"FullyShardedOptimizer.load_state_dict: {error}") from error
    set_state(optimizer, named, state)
