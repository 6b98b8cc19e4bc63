# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A Megatron model chunk and its optimizer as Megatron's ``fsdp_dtensor`` checkpoints name and cut them.

Keys are those that Megatron-FSDP v1 writes; reading takes them with any number of wrappers' ``module.`` before the
parameter's own name. It writes no files: experimental.checkpoint does.

[Note: gated linear units]
The first linear layer of a gated MLP holds two matrices, one below the other. Checkpoints hold them one by one, as
``..._w`` and ``..._v``, since with tensor parallelism the fused matrix would depend on the number of ranks. Both are
rows of one sharded parameter: wherever it is cut, each rank's elements of either half are a run of its own.

[Note: names of layers and experts]
A stage counts its own layers from zero, and a module the experts of its own rank; checkpoints have the numbers in the
whole model and in the layer. So a model is the same for any number of stages and of ranks that share experts. An output
layer that is a copy of another stage's embedding goes by that one's name: the stages write equal values to one place,
of which one is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.transformer.fsdp_dtensor_checkpoint import get_ep_layer_offset
from megatron.core.transformer.module import MegatronModule

from megatron.core.distributed.fsdp.experimental import CheckpointError, FsdpDTensor, MuonRule, rows_of
from megatron.core.distributed.fsdp.experimental.checkpoint import require_same_kind
from megatron.core.distributed.fsdp.mcore_fsdp_v2_shared_weights import shared_name

MODEL, STATE, SETTINGS = "model.", "optimizer.state.", "optimizer.param_to_group_meta."
SCALER = "optimizer.grad_scaler."
_WRAPPER = "module."
MODEL_WRAPPERS, OPTIMIZER_WRAPPERS = _WRAPPER, 3 * _WRAPPER
_EXTRA_STATE = "_extra_state"
_STEP = "step"
_OF_MATRICES = "is_stack"
"""A setting that matrices of Muon have, and no other parameters."""
_LAYER = re.compile(r"(?!.*mtp).*layers\.\d+")
_IN_LAYER = re.compile(r"(?P<layer>(?P<start>(?:.*?\.)?layers\.)\d+)(?=\.)")
_EXPERT = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+|(?<=mlp\.experts\.linear_fc[12]\.weight)\d+")
_OWN_SETTINGS = ("is_expert_parallel",)
"""Settings that say how a run is laid out, which another run may be otherwise."""
_GATED = re.compile(
    r"(?:.*\.)?mlp\.(?:shared_experts\.|experts\.(?:local_experts\.\d+\.)?)?linear_fc1\.(?:weight|bias)\d*"
)

StateByName = dict[str, dict[str, Any]]


def canonical_name(name: str) -> str:
    """Return a parameter's name without wrappers' prefixes."""
    while name.startswith(_WRAPPER):
        name = name[len(_WRAPPER) :]
    return name


def numbered_in_layer(name: str, config: Any) -> str:
    """Return a parameter's name with its expert counted in the layer."""
    num_experts = getattr(config, "num_moe_experts", None)
    if num_experts is None:
        return name
    first = get_ep_layer_offset(num_experts)
    return _EXPERT.sub(lambda found: str(int(found[0]) + first), name)


def model_tensors(chunk: MegatronModule) -> dict[str, torch.Tensor]:
    """Return the main weights and persistent buffers of a chunk by canonical name in the model; tied weights once.

    Args:
        chunk: wrapped by FSDP v2.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in _global_state(chunk).items():
        if name.rpartition(".")[2] == _EXTRA_STATE or not isinstance(value, torch.Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        found[name] = value
    return found


def _global_state(chunk: MegatronModule) -> dict[str, Any]:
    """Return the entries of a chunk's state dict by names that do not depend on how ranks divide the model."""
    state = chunk.module.state_dict(keep_vars=True)
    return {name: state[local] for local, name in _global_names(chunk, state).items()}


def _global_names(chunk: MegatronModule, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the canonical name in the whole model of each entry of a chunk's state dict."""
    numbers = {
        canonical_name(name): module.layer_number - 1
        for name, module in chunk.module.named_modules()
        if _LAYER.fullmatch(name) and isinstance(getattr(module, "layer_number", None), int)
    }
    found = {}
    for local, value in state.items():
        name = canonical_name(local)
        match = _IN_LAYER.match(name)
        if match and match["layer"] in numbers:
            name = f"{match['start']}{numbers[match['layer']]}{name[match.end() :]}"
        found[local] = shared_name(numbered_in_layer(name, chunk.config), value)
    return found


def split_gated(named: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return tensors by name with those of gated linear units as two; others as they are."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, FsdpDTensor) and is_gated(name, config):
            half = value.shape[0] // 2
            found[f"{name}_w"], found[f"{name}_v"] = rows_of(value, 0, half), rows_of(value, half, 2 * half)
        else:
            found[name] = value
    return found


def split_gated_states(states: Mapping[str, Mapping[str, Any]], config: Any) -> StateByName:
    """Return optimizer states by name with those of gated linear units as two; a step that both share is in both."""
    found: StateByName = {}
    for name, values in states.items():
        for key, value in values.items():
            parts = split_gated({name: value}, config)
            if is_gated(name, config) and not isinstance(value, FsdpDTensor):
                parts = {f"{name}_w": value, f"{name}_v": value}
            for part, tensor in parts.items():
                found.setdefault(part, {})[key] = tensor
    return found


def is_gated(name: str, config: Any) -> bool:
    """Return whether a parameter holds the two matrices of a gated layer, if a config says that there are such."""
    return bool(getattr(config, "gated_linear_unit", False) and _GATED.fullmatch(name))


def model_keys(chunk: MegatronModule) -> dict[str, torch.Tensor]:
    """Return a chunk's tensors by the keys that a checkpoint has for them, without ``model.``."""
    tensors = split_gated(model_tensors(chunk), chunk.config)
    return {MODEL_WRAPPERS + name: tensor for name, tensor in tensors.items()}


def optimizer_keys(optimizer: Any, chunk: MegatronModule) -> dict[str, Any]:
    """Return state and settings of a FullyShardedOptimizer by a checkpoint's keys, without ``optimizer.``."""
    return optimizer_entries(optimizer.sharded_state_dict({}), chunk.config)


def optimizer_entries(found: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return what `FullyShardedOptimizer.sharded_state_dict` has returned by a checkpoint's keys.

    The counts of a dynamic loss scaler are among it. Tensors share memory with it, and the settings of a parameter are
    the same dictionary.
    """
    states = {canonical_name(name): values for name, values in found["state"].items()}
    tensors = {
        name: {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        for name, values in split_gated_states(states, config).items()
    }
    scaler = found.get("grad_scaler")
    return {
        "state": {OPTIMIZER_WRAPPERS + name: values for name, values in tensors.items() if values},
        "param_to_group_meta": {
            OPTIMIZER_WRAPPERS + canonical_name(name): settings
            for name, settings in found["param_to_group_meta"].items()
        },
        **({"grad_scaler": scaler} if scaler else {}),
    }


def join_gated(state_dict: Mapping[str, Any], chunk: MegatronModule) -> dict[str, Any]:
    """Return a state dict for the chunk's module: halves of gated linear units have been copied into the whole.

    Args:
        state_dict: of the module, or as `model_keys` names it.
        chunk: wrapped by FSDP v2.
    """
    state = chunk.module.state_dict(keep_vars=True)
    names = _global_names(chunk, state)
    whole = {names[local]: tensor for local, tensor in state.items()}
    halves = split_gated(whole, chunk.config)
    found: dict[str, Any] = {}
    given: dict[str, dict[str, Any]] = {}
    for name, value in state_dict.items():
        short = canonical_name(name) if name.startswith(_WRAPPER) else names.get(name, name)
        if short in whole or short not in halves:
            found[short] = value
        else:
            given.setdefault(short[: -len("_w")], {})[short] = value
    for name, values in given.items():
        if len(values) == 2:  # one alone stays away, and the whole is missing
            with torch.no_grad():
                for half, value in values.items():
                    halves[half].copy_(value)
            found[name] = whole[name].detach()
        else:
            found.update(values)
    # A tied weight comes under one name.
    for name, tensor in whole.items():
        first = next((other for other in found if other in whole and whole[other] is tensor), None)
        if name not in found and first is not None:
            found[name] = found[first]
    local_names = {name: local for local, name in names.items()}
    return {local_names.get(name, name): value for name, value in found.items()}


def find_model(chunk: MegatronModule, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return what to read into a chunk, by the checkpoint's own keys; what it lacks, by ours."""
    there = _by_canonical_name(keys, MODEL)
    tensors = split_gated(model_tensors(chunk), chunk.config)
    return {there.get(name, MODEL + MODEL_WRAPPERS + name): tensor for name, tensor in tensors.items()}


def find_optimizer(optimizer: Any, chunk: MegatronModule, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return what to read into an optimizer's state, which is created, by the checkpoint's own keys.

    Step counts that the checkpoint holds as settings are none of it: `load_settings` takes those.

    Raises:
        CheckpointError: it is the state of another kind of optimizer.
    """
    keys = list(keys)
    there, settings = _by_canonical_name(keys, STATE), _by_canonical_name(keys, SETTINGS)
    counts = {place for place in settings if place.endswith(f".{_STEP}")} - there.keys()
    if settings:
        known = {place.rpartition(".")[0] for place in settings}
        for name, mine in optimizer.sharded_state_dict({})["param_to_group_meta"].items():
            place = canonical_name(name)
            was_matrix = f"{place}.{_OF_MATRICES}" in settings
            if place in known:
                saved = {_OF_MATRICES: True, "algorithm": MuonRule.name} if was_matrix else {}
                require_same_kind(place, mine, saved)
    found = {}
    ours = optimizer.sharded_state_dict({}, is_loading=True)["state"]
    states = split_gated_states({canonical_name(name): values for name, values in ours.items()}, chunk.config)
    for name, values in states.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and f"{_fused(name)}.{key}" not in counts:
                place = f"{name}.{key}"
                found[there.get(place, STATE + OPTIMIZER_WRAPPERS + place)] = value
    return found


def _fused(name: str) -> str:
    """Return the name of the parameter that a half of a gated linear unit belongs to; any other's own."""
    return name[: -len("_w")] if name.endswith(("_w", "_v")) and _GATED.fullmatch(name[: -len("_w")]) else name


def settings_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys of parameters' settings, and of a loss scaler's state."""
    return [key for key in keys if key.startswith((SETTINGS, SCALER))]


def load_settings(optimizer: Any, chunk: MegatronModule, entries: Mapping[str, Any]) -> None:
    """Give an optimizer's groups the settings that a checkpoint holds by parameter, and state its place.

    Args:
        optimizer: a FullyShardedOptimizer whose state has been read.
        chunk: its chunk.
        entries: the checkpoint's entries of `settings_keys`.

    Raises:
        CheckpointError: a parameter has none, or those of one group differ.
    """
    saved: StateByName = {}
    scaler: dict[str, Any] = {}
    for key, value in entries.items():
        if key.startswith(SCALER):
            scaler[key.removeprefix(SCALER)] = value
            continue
        name, _, setting = canonical_name(key.removeprefix(SETTINGS)).rpartition(".")
        saved.setdefault(name, {})[setting] = value
    state = optimizer.sharded_state_dict({})
    names = {name: canonical_name(name) for name in state["param_to_group_meta"]}
    missing = sorted(short for short in names.values() if short not in saved)
    if missing:
        raise CheckpointError(
            f"settings of the optimizer: expected them for every parameter, got none for {missing[:5]}. Load a "
            "checkpoint of the same model, or use --no-load-optim."
        )
    meta = {name: saved[short] for name, short in names.items()}
    for name in meta:
        for setting in _OWN_SETTINGS:
            if setting in meta[name]:
                meta[name][setting] = state["param_to_group_meta"][name][setting]
    for name, values in state["state"].items():
        # TransformerEngine's optimizers count steps by group, torch's by parameter.
        if _STEP in values and _STEP in meta[name]:
            values[_STEP].fill_(meta[name].pop(_STEP))
    try:
        optimizer.load_state_dict({"state": state["state"], "param_to_group_meta": meta, "grad_scaler": scaler})
    except (KeyError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def is_extra_state(key: str) -> bool:
    """Return whether a key is a module's extra state, which other writers may leave in a checkpoint."""
    return key.startswith(MODEL) and _EXTRA_STATE in key


def _by_canonical_name(keys: Iterable[str], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in keys:
        if key.startswith(prefix):
            name = canonical_name(key.removeprefix(prefix).removeprefix("model."))
            if name in found:
                raise CheckpointError(
                    f"keys of the checkpoint: expected one for each tensor, got {found[name]} and {key}. Remove one."
                )
            found[name] = key
    return found
