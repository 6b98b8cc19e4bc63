# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""State and settings of an adapted optimizer by parameter name, and their way back; no files.

[Note: settings by name]
How an optimizer groups its parameters may differ between a save and a load, so settings are matched by the parameters'
names, never by position: a group takes the settings that all of its parameters had.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..dtensor import FsdpDTensor, shard_dtensor
from ..matrix_rule import require_same_rule
from .errors import CheckpointError


def state_by_name(optimizer: Any, named: Mapping[str, FsdpDTensor]) -> dict[str, dict[str, Any]]:
    """Return ``{fqn: {"exp_avg": DTensor, ...}}`` of the parameters that have state; shares memory with the optimizer.

    Args:
        optimizer: an adapted optimizer.
        named: its parameters by name.
    """
    return {
        name: {key: _as_dtensor(value, parameter) for key, value in optimizer.state[parameter].items()}
        for name, parameter in named.items()
        if parameter in optimizer.state
    }


def set_state(optimizer: Any, named: Mapping[str, FsdpDTensor], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Give an adapted optimizer the state that `state_by_name` returned."""
    for name, values in state.items():
        optimizer.state[named[name]] = {
            key: value.to_local() if isinstance(value, DTensor) else value for key, value in values.items()
        }


def settings_by_name(optimizer: Any, named: Mapping[str, FsdpDTensor]) -> dict[str, dict[str, Any]]:
    """Return ``{fqn: {"lr": ..., ...}}``: the settings of each parameter's group."""
    names = {id(parameter): name for name, parameter in named.items()}
    return {
        names[id(parameter)]: group_settings(group) for group in optimizer.param_groups for parameter in group["params"]
    }


def set_settings(
    optimizer: Any, named: Mapping[str, FsdpDTensor], saved: Mapping[str, Mapping[str, Any]], *, strict: bool = True
) -> None:
    """Give each group the settings that its parameters had, but for those that are the run's own.

    Args:
        optimizer: an adapted optimizer.
        named: its parameters by name.
        saved: what `settings_by_name` returned.
        strict: refuse parameters without saved settings; otherwise they take those of the others in their group.

    Raises:
        CheckpointError: another optimizer's, or parameters of one group had different ones, or one had none; nothing
            is changed then.
    """
    require_same_rules(optimizer, named, saved)
    names = {id(parameter): name for name, parameter in named.items()}
    found = []
    for group in optimizer.param_groups:
        of_group = [names[id(parameter)] for parameter in group["params"]]
        found.append(_common_settings({name: saved.get(name) for name in of_group if strict or name in saved}))
    for group, settings in zip(optimizer.param_groups, found, strict=True):
        group.update(copy.deepcopy(dict(settings)))


def require_same_rules(
    optimizer: Any, named: Mapping[str, FsdpDTensor], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse state that another optimizer has made.

    Args:
        optimizer: an adapted optimizer.
        named: its parameters by name.
        saved: what `settings_by_name` returned; parameters without settings are left out.

    Raises:
        CheckpointError: one of the two is a matrix optimizer, such as Muon, and the other is not.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    for group in optimizer.param_groups:
        for name in (names[id(parameter)] for parameter in group["params"]):
            try:
                require_same_rule(name, group, saved.get(name, group))
            except ValueError as error:
                raise CheckpointError(str(error)) from error


_OWN = frozenset({"capturable", "differentiable", "foreach", "fused"}) | frozenset(
    {"algorithm", "is_stack", "joins_pieces", "momentum_dtype", "parts", "travel_dtype"}
)
"""How a step is computed on the device of a run, and how its parameters hold matrices: settings of the run that loads,
not of the one that has saved."""


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of a param_group but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


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
    saved = [group_settings(group) for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in every]
    try:
        for parameter in every:
            parameter.grad = None
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype)
        for group in optimizer.param_groups:
            # Zero gradients move nothing by themselves, unless they are divided by a moment of zero. The rate stays:
            # some rules start their state from it.
            group.update(weight_decay=0.0, **({"eps": 1.0} if group.get("eps") == 0 else {}))
        # Neither step hooks nor schedulers' counters are told: they may keep averages or counts of steps.
        step = type(optimizer).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
    finally:
        for group, settings in zip(optimizer.param_groups, saved, strict=True):
            _restore_settings(group, settings)
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient
    for parameter in new:
        state = optimizer.state[parameter]
        if "step" in state:
            state["step"] = _zero_like(state["step"])


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


def _common_settings(by_name: Mapping[str, Mapping[str, Any] | None]) -> Mapping[str, Any]:
    """Return the settings that all parameters of one group share; none for a group without parameters."""
    first: tuple[str, Mapping[str, Any]] | None = None
    for name, found in by_name.items():
        if found is None:
            raise CheckpointError(
                f"settings of {name}: expected them in the checkpoint, got none. Load a checkpoint of the same model."
            )
        settings = {key: value for key, value in found.items() if key not in _OWN}
        if first is None:
            first = name, settings
        elif not _are_equal(settings, first[1]):
            raise CheckpointError(
                f"settings of a parameter group: expected equal ones for all of its parameters, got {settings} for "
                f"{name} and {first[1]} for {first[0]}. Group the parameters as in the checkpoint."
            )
    return {} if first is None else first[1]


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, Sequence):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


def _as_dtensor(value: Any, parameter: FsdpDTensor) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == parameter._local_tensor.shape and value.ndim:
        return shard_dtensor(value, parameter.geometry)
    return value
