# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What an ``fsdp_dtensor`` checkpoint is made of when it is made from a ``torch_dist`` one. Reads no tensors.

Layers come out of their stacks, halves of gated layers apart, main weights from the optimizer's if it has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError, OpenCheckpoint
from megatron.core.distributed.fsdp.mcore_fsdp_v2_checkpoint import MODEL_WRAPPERS, OPTIMIZER_WRAPPERS, is_gated
from megatron.core.distributed.fsdp.torch_dist_checkpoint import (
    RESHARDABLE,
    read_common,
    require_reshardable,
    sharding_type,
)
from megatron.core.distributed.fsdp.torch_dist_groups import identity, saved_groups, saved_scaler
from megatron.core.distributed.fsdp.torch_dist_names import MASTERS, TensorKeys, separate_norm, sort_keys, unstacked
from megatron.inspector.streams import NewCheckpoint, NewTensor, Part, whole

# In common.pt, besides plain values: groups and the like, which are converted, and what is not.
_NOT_PLAIN = ("optimizer", "content_metadata", "model", "rng_state", "rerun_state_machine")
_BY_TORCH = "foreach"
"""A setting of torch's own optimizers, which count steps by parameter, not by group."""


@dataclass(frozen=True)
class Choices:
    """What a checkpoint's saved arguments may say, or leave open.

    Attributes:
        swiglu: layers are gated.
        local_layers: layers are megatron-core's own, not TransformerEngine's.
        weights_only: leave out the optimizer.
    """

    swiglu: bool | None = None
    local_layers: bool | None = None
    weights_only: bool = False

    def completed(self, args: object) -> Choices:
        """Return the choices with those of saved arguments where there are none."""
        implementation = getattr(args, "transformer_impl", None)
        local = None if implementation is None else implementation == "local"
        return replace(
            self,
            swiglu=getattr(args, "swiglu", None) if self.swiglu is None else self.swiglu,
            local_layers=local if self.local_layers is None else self.local_layers,
        )


def fsdp_dtensor_from(opened: OpenCheckpoint, given: Choices) -> NewCheckpoint:
    """Return what to write.

    Args:
        opened: a ``torch_dist`` checkpoint.
        given: choices by flags.

    Raises:
        CheckpointError: state of the optimizer in a form that cannot be converted, choices that are needed and open,
            experts, or parameters whose group cannot be told.
    """
    common = read_common(opened.path)
    if not given.weights_only:
        require_reshardable(opened.path, common)
    return _Conversion(opened, common, given.completed(common.get("args"))).make()


class _Conversion:
    def __init__(self, opened: OpenCheckpoint, common: Mapping[str, Any], choices: Choices) -> None:
        self._entries: Mapping[str, Any] = opened.metadata.state_dict_metadata
        self._keys: TensorKeys = sort_keys(key for key in opened.keys if opened.is_tensor(key))
        self._common = common
        self._choices = choices
        self._new = NewCheckpoint()

    def make(self) -> NewCheckpoint:
        self._check()
        for key, saved in self._keys.model.items():
            for name, tensor in self._tensors(key, self._source_of(key, saved)):
                self._new.tensors["model", MODEL_WRAPPERS + name] = tensor
        if not self._choices.weights_only:
            self._add_optimizer()
        for name, value in self._common.items():
            if name not in _NOT_PLAIN and not (name == "opt_param_scheduler" and self._choices.weights_only):
                self._new.objects.update(_flat((name,), value))
        return self._new

    def _check(self) -> None:
        names = [name for key in self._keys.model for name, _ in unstacked(key, self._size(self._keys.model[key]))]
        experts = next((key for key in names if ".experts.experts." in key), None)
        if experts is not None:
            raise CheckpointError(
                f"{experts}: expected a model without experts, got theirs; not converted yet. Load the torch_dist "
                "checkpoint itself under Megatron-FSDP v2."
            )
        if self._choices.local_layers is None and any(separate_norm(name) != name for name in names):
            raise CheckpointError(
                "layer norms: expected saved arguments that say whose layers the model has, got none. Pass "
                "--transformer-impl local or transformer_engine."
            )
        gated = next((name for name in names if is_gated(name, SimpleNamespace(gated_linear_unit=True))), None)
        if self._choices.swiglu is None and gated is not None:
            raise CheckpointError(
                f"{gated}: expected saved arguments that say whether it is gated, got none. Pass --swiglu or "
                "--no-swiglu."
            )

    def _size(self, saved: str) -> tuple[int, ...]:
        return tuple(self._entries[saved].size)

    def _source_of(self, key: str, saved: str) -> str:
        """Return the saved key of a parameter's main weights, or of the model's."""
        if sharding_type(self._common) in (None, RESHARDABLE):
            for slot in MASTERS:
                master = self._keys.state.get(slot, {}).get(key)
                if master is not None and self._size(master) == self._size(saved):
                    return master
        return saved

    def _tensors(self, key: str, saved: str) -> Iterator[tuple[str, NewTensor]]:
        """Yield the parameters that a key holds, halves apart, by their names in the model."""
        size, dtype = self._size(saved), self._entries[saved].properties.dtype
        config = SimpleNamespace(gated_linear_unit=self._choices.swiglu)
        for name, index in unstacked(key, size):
            leading = () if index is None else (index,)
            shape = size[len(leading) :]
            if self._choices.local_layers:
                name = separate_norm(name)
            if is_gated(name, config):
                half = (shape[0] // 2, *shape[1:])
                for row, suffix in ((0, "_w"), (half[0], "_v")):
                    part = whole(saved, half, leading)
                    first = (*leading, row, *[0] * (len(shape) - 1))
                    yield name + suffix, NewTensor(half, dtype, (Part(part.box, saved, first),))
            else:
                yield name, NewTensor(shape, dtype, (whole(saved, shape, leading),))

    def _add_optimizer(self) -> None:
        for name, value in saved_scaler(self._common).items():
            number = value.item() if isinstance(value, torch.Tensor) else value
            self._new.objects["optimizer", "grad_scaler", name] = number
        groups = saved_groups(self._common)
        by_torch = any(_BY_TORCH in group for group in groups)
        ndims: dict[str, int] = {}
        for slot, keys in self._keys.state.items():
            for key, saved in keys.items():
                for name, tensor in self._tensors(key, saved):
                    ndims[name] = len(tensor.shape)
                    if slot not in MASTERS:
                        self._new.tensors["optimizer", "state", OPTIMIZER_WRAPPERS + name, slot] = tensor
        if not self._keys.state and groups:
            ndims = {name: len(tensor.shape) for key in self._keys.model for name, tensor in self._tensors(key, key)}
        for name, ndim in ndims.items():
            group = _group_of(name, ndim, groups)
            if by_torch and "step" in group:
                step = NewTensor((), torch.float32, value=torch.tensor(float(group["step"])))
                self._new.tensors["optimizer", "state", OPTIMIZER_WRAPPERS + name, "step"] = step
            fused = name[:-2] if name.endswith(("_w", "_v")) else name
            outer = ("optimizer", "param_to_group_meta", OPTIMIZER_WRAPPERS + fused)
            settings = {setting: value for setting, value in group.items() if not (by_torch and setting == "step")}
            self._new.objects.update({(*outer, setting): value for setting, value in settings.items()})


def _group_of(name: str, ndim: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the group that megatron-core puts a parameter into by its own rules.

    Raises:
        CheckpointError: there are others that could be meant.
    """
    bare_name = name[:-2] if name.endswith(("_w", "_v")) else name
    decays = ndim != 1 and not bare_name.endswith(".bias")
    is_decoupled = bare_name.endswith(("word_embeddings.weight", "output_layer.weight"))
    found = list(groups)
    if len({group.get("wd_mult", 1.0) for group in found}) > 1:
        found = [group for group in found if (group.get("wd_mult", 1.0) != 0) == decays]
    if any(group.get("is_decoupled_lr") for group in found):
        found = [group for group in found if bool(group.get("is_decoupled_lr")) == is_decoupled]
    if len({identity(group) for group in found}) != 1:
        raise CheckpointError(
            f"{name}: expected one parameter group that it can be in, got {len(found)} of {len(groups)}: a torch_dist "
            "checkpoint does not say. Load it itself under Megatron-FSDP v2, or pass --weights-only."
        )
    return found[0]


def _flat(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat((*path, str(key)), item)
    else:
        yield path, value
