# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a ``torch_dist`` checkpoint is made of when it is made from an ``fsdp_dtensor`` one. Reads no tensors.

Optimizer state comes in megatron-core's ``fully_reshardable`` form, which its distributed optimizer loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError, OpenCheckpoint
from megatron.core.distributed.fsdp.experimental.layout import Box
from megatron.core.distributed.fsdp.mcore_fsdp_v2_checkpoint import MODEL, SETTINGS, STATE
from megatron.core.distributed.fsdp.torch_dist_checkpoint import COMMON, CONFIG, RESHARDABLE
from megatron.core.distributed.fsdp.torch_dist_groups import identity
from megatron.core.distributed.fsdp.torch_dist_names import bare, fused_norm, stacked
from megatron.inspector.streams import NewCheckpoint, NewTensor, Part

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_STEP = "step"

Sources = dict[str, list[str]]
"""Saved keys of a parameter by its name: one, or those of its halves."""


def torch_dist_from(opened: OpenCheckpoint, *, weights_only: bool) -> NewCheckpoint:
    """Return what to write.

    Args:
        opened: an ``fsdp_dtensor`` checkpoint.
        weights_only: leave out the optimizer.

    Raises:
        CheckpointError: no model, experts, or parameters of one group with different settings.
    """
    return _Conversion(opened, weights_only).make()


class _Conversion:
    def __init__(self, opened: OpenCheckpoint, weights_only: bool) -> None:
        self._opened = opened
        self._entries: Mapping[str, Any] = opened.metadata.state_dict_metadata
        tensors = sorted(key for key in opened.keys if opened.is_tensor(key) and "_extra_state" not in key)
        self._model = _join_halves((bare(key), key) for key in tensors if key.startswith(MODEL))
        if not self._model:
            raise CheckpointError(
                f"{opened.path}: expected an fsdp_dtensor checkpoint, got no keys that begin with {MODEL} in it. Name "
                "the folder of one."
            )
        experts = next((name for name in self._model if ".experts." in name), None)
        if experts is not None:
            raise CheckpointError(f"{experts}: expected a model without experts, got theirs; not converted yet.")
        self._state: dict[str, Sources] = {}
        if not weights_only:
            by_slot: dict[str, list[tuple[str, str]]] = {}
            for key in tensors:
                if key.startswith(STATE):
                    name, _, slot = bare(key.removeprefix(STATE)).rpartition(".")
                    by_slot.setdefault(slot, []).append((name, key))
            self._state = {slot: _join_halves(pairs) for slot, pairs in by_slot.items()}
        self._weights_only = weights_only
        self._layers = self._count_layers()
        self._new = NewCheckpoint()

    def make(self) -> NewCheckpoint:
        common = self._plain()
        args = common.get("args")
        dtype = next((value for flag, value in _DTYPES.items() if getattr(args, flag, False)), None)
        steps = self._state.pop(_STEP, {})
        trained = {name for sources in self._state.values() for name in sources}
        for key, names in self._stacks(self._model).items():
            is_trained = names[0] in trained
            self._add(key, names, self._model, dtype if is_trained else None)
            if is_trained:
                self._add(f"optimizer.state.param.{key}", names, self._model, None)
        for slot, sources in self._state.items():
            for key, names in self._stacks(sources).items():
                self._add(f"optimizer.state.{slot}.{key}", names, sources, None)
        self._add_extra_states(getattr(args, "transformer_impl", "local") != "local")
        content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if not self._layers:
            content["non_homogeneous_layers"] = True
        if not self._weights_only:
            content["distrib_optim_sharding_type"] = RESHARDABLE
            scaler = common.get("optimizer", {})
            if "grad_scaler" in scaler:
                # megatron-core's scaler takes its scale as a tensor.
                scaler["grad_scaler"]["scale"] = torch.tensor([scaler["grad_scaler"]["scale"]])
            groups = {"optimizer": {"param_groups": self._groups(steps)}, "param_state_sharding_type": RESHARDABLE}
            common["optimizer"] = {**groups, **scaler}
        self._new.files[COMMON] = partial(torch.save, {**common, "content_metadata": content})
        self._new.files[CONFIG] = _write_config
        return self._new

    def _count_layers(self) -> dict[str, int]:
        """Return how many layers each stack of layers has; none if they are not all alike."""
        shapes: dict[str, dict[int, tuple[int, ...]]] = {}
        for name, keys in self._model.items():
            key, index = stacked(name)
            if index is not None:
                shapes.setdefault(key, {})[index] = self._shape(keys)
        counts: dict[str, set[int]] = {}
        for key, by_index in shapes.items():
            is_alike = len(set(by_index.values())) == 1 and sorted(by_index) == list(range(len(by_index)))
            counts.setdefault(key.partition("layers.")[0], set()).add(len(by_index) if is_alike else -1)
        if any(len(found) > 1 or -1 in found for found in counts.values()):
            return {}
        return {start: found.pop() for start, found in counts.items()}

    def _stacks(self, sources: Sources) -> dict[str, list[str]]:
        """Return the names of the parameters that each new key holds, by layer."""
        found: dict[str, list[str]] = {}
        for name in sorted(sources, key=lambda name: (stacked(name)[1] or 0, name)):
            found.setdefault(self._key(name), []).append(name)
        return found

    def _key(self, name: str) -> str:
        key = fused_norm(name)
        start = name.rpartition("pre_mlp_layernorm.")[0]
        if start and f"{start}mlp.linear_fc1.weight" not in self._model:
            key = name  # only a dense layer has one that could be fused with it
        return stacked(key)[0] if self._layers else key

    def _shape(self, keys: list[str]) -> tuple[int, ...]:
        sizes = [tuple(self._entries[key].size) for key in keys]
        return sizes[0] if len(sizes) == 1 else (sum(size[0] for size in sizes), *sizes[0][1:])

    def _add(self, key: str, names: list[str], sources: Sources, dtype: torch.dtype | None) -> None:
        """Add a tensor made of the parameters of all layers, or of one."""
        shape = self._shape(sources[names[0]])
        is_stacked = bool(self._layers) and stacked(names[0])[1] is not None
        parts = []
        for layer, name in enumerate(names):
            row = 0
            for saved in sources[name]:
                size = tuple(self._entries[saved].size)
                offsets = (row, *[0] * (len(size) - 1))[: len(size)]
                box = Box((layer, *offsets), (1, *size)) if is_stacked else Box(offsets, size)
                parts.append(Part(box, saved, (0,) * len(size)))
                row += size[0] if size else 0
        saved_dtype: torch.dtype = self._entries[sources[names[0]][0]].properties.dtype
        wanted = dtype if dtype is not None and saved_dtype.is_floating_point else saved_dtype
        full = (len(names), *shape) if is_stacked else shape
        self._new.tensors[key,] = NewTensor(full, wanted, tuple(parts))

    def _add_extra_states(self, has_te_layers: bool) -> None:
        """Add the empty extra states without which megatron-core does not load."""
        for key, names in self._stacks(self._model).items():
            module, _, what = key.rpartition(".")
            if what != "weight" or not module.endswith(_LINEAR):
                continue
            modules = [module]
            if has_te_layers and module.endswith("linear_qkv"):
                modules.append(module.removesuffix("linear_qkv") + "core_attention")
            for each in modules:
                for index in range(len(names)):
                    self._new.objects[f"{each}._extra_state/shard_{index}_{len(names)}",] = [None]

    def _groups(self, steps: Sources) -> list[dict[str, Any]]:
        settings: dict[str, dict[str, Any]] = {}
        keys = [key for key in self._opened.keys if key.startswith(SETTINGS)]
        for key, value in self._opened.objects(keys).items():
            name, _, setting = bare(key.removeprefix(SETTINGS)).rpartition(".")
            settings.setdefault(name, {})[setting] = value
        groups: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
        for name, group in sorted(settings.items()):
            if name in steps:
                group[_STEP] = self._step(steps[name][0])
            first, known = groups.setdefault(identity(group), (name, group))
            if known != group:
                raise CheckpointError(
                    f"settings of the optimizer: expected the same for {first} and {name}, which megatron-core has in "
                    f"one group, got {known} and {group}. Pass --weights-only."
                )
        return [group for _, group in groups.values()]

    def _step(self, key: str) -> float:
        value = torch.empty(tuple(self._entries[key].size), dtype=self._entries[key].properties.dtype)
        self._opened.read({key: value})
        return float(value)

    def _plain(self) -> dict[str, Any]:
        """Return the entries that are neither settings nor states of random numbers, nested as they were."""
        keys = [key for key in self._opened.keys if not self._opened.is_tensor(key)]
        left_out = (SETTINGS, "rng_state", "rerun_state_machine", MODEL)
        found = self._opened.objects(key for key in sorted(keys) if not key.startswith(left_out))
        nested: dict[str, Any] = {}
        for key, value in found.items():
            *outer, last = key.split(".")
            node = nested
            for each in outer:
                node = node.setdefault(each, {})
            node[last] = value
        if self._weights_only:
            nested.pop("opt_param_scheduler", None)
            nested.pop("optimizer", None)
        return nested


def _join_halves(pairs: Iterable[tuple[str, str]]) -> Sources:
    """Return saved keys by name, with those of a gated layer's halves together."""
    found = {name: [key] for name, key in pairs}
    for name in list(found):
        fused = name.removesuffix("_w")
        if fused != name and fused.endswith((".weight", ".bias")) and f"{fused}_v" in found:
            found[fused] = [*found.pop(name), *found.pop(f"{fused}_v")]
    return found


def _write_config(path: Path) -> None:
    path.write_text(json.dumps(_BACKENDS))
