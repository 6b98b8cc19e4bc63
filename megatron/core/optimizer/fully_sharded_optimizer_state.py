# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""State of an adapted optimizer by parameter name, as checkpoints in the fsdp_dtensor format hold it.

It reads and writes no files, and knows no model: names are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
