# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Parameter groups of a ``torch_dist`` checkpoint, matched to live ones by what megatron-core tells them apart by.

A checkpoint does not say which parameter was in which group, and their order is not kept. Reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError

_TELLS_APART = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
"""What megatron-core tells groups apart by, with the values of a group that does not say."""
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""How an optimizer computes, which is up to the live one."""

Identity = tuple[Any, ...]


def saved_groups(common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups in the content of a ``common.pt``, each with its step if any is saved, without parameters."""
    found: list[dict[str, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, (list, tuple)):
            for item in node:
                walk(item)
        elif isinstance(node, Mapping) and isinstance(node.get("param_groups"), list):
            state = node.get("state")
            step = state.get("common_step") if isinstance(state, Mapping) else None
            for group in node["param_groups"]:
                settings = {key: value for key, value in group.items() if key != "params"}
                if step is not None and settings.get("step") is None:
                    settings["step"] = step
                if isinstance(settings.get("step"), torch.Tensor):
                    settings["step"] = settings["step"].item()
                found.append(settings)
        elif isinstance(node, Mapping):
            for item in node.values():
                walk(item)

    walk(common.get("optimizer"))
    return found


def saved_scaler(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the loss scaler's state in the content of a ``common.pt``; of several optimizers the first's."""
    nodes = [common.get("optimizer")]
    for node in nodes:
        if isinstance(node, Mapping) and isinstance(node.get("grad_scaler"), Mapping):
            return dict(node["grad_scaler"])
        if isinstance(node, (list, tuple)):
            nodes.extend(node)
        elif isinstance(node, Mapping):
            nodes.extend(node.values())
    return {}


def identity(group: Mapping[str, Any]) -> Identity:
    """Return what tells a group apart from the others of its optimizer."""
    return tuple(group.get(key, group.get(f"pre_{key}", value)) for key, value in _TELLS_APART.items())


def match_groups(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each live group the settings that it takes from the saved one of its kind.

    Args:
        saved: from `saved_groups`, in any order.
        live: an optimizer's ``param_groups``.

    Returns:
        In the order of `live`: the saved values of all that the live group has but its parameters and how it computes,
        and ``step``, a number, if it was saved: for the group, or for each of its parameters' states.

    Raises:
        CheckpointError: groups of one side have no counterpart, or several; all of them are named.
    """
    by_kind: dict[Identity, list[Mapping[str, Any]]] = {}
    for group in saved:
        known = by_kind.setdefault(identity(group), [])
        if not any(_settings(group) == _settings(other) for other in known):
            known.append(group)
    kinds = [identity(group) for group in live]
    problems = [f"none was saved for the live one with {_text(kind)}" for kind in kinds if kind not in by_kind]
    problems += [f"no live one for the one saved with {_text(kind)}" for kind in by_kind if kind not in kinds]
    problems += [
        f"several with {_text(kind)}: saved {[_settings(group) for group in by_kind[kind]]}, live {kinds.count(kind)}"
        for kind in dict.fromkeys(kinds)
        if kind in by_kind and (len(by_kind[kind]) > 1 or kinds.count(kind) > 1)
    ]
    if problems:
        raise CheckpointError(
            f"parameter groups: expected each of {len(live)} live ones to have one saved counterpart, got "
            f"{'; '.join(problems)}. Use the optimizer settings of the run that saved it, or --no-load-optim."
        )
    return [_taken(by_kind[kind][0], group) for kind, group in zip(kinds, live, strict=True)]


def _taken(saved: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    taken = {key: value for key, value in _settings(saved).items() if key in live}
    return {**taken, "step": saved["step"]} if saved.get("step") is not None else taken


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION}


def _text(kind: Identity) -> str:
    return ", ".join(f"{key}={value}" for key, value in zip(_TELLS_APART, kind, strict=True))
