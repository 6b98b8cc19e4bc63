# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Where megatron-core's ``torch_dist`` checkpoints keep a parameter: key, place within it, halves. Reads no files.

[Note: names of torch_dist]
A parameter's name differs from its key in up to five ways, each an offset and none a copy:

    layers        layers.3.mlp.linear_fc2.weight -> layers.mlp.linear_fc2.weight at (3, ...), by default
    experts       mlp.experts.linear_fc1.weight5 -> mlp.experts.experts.linear_fc1.weight at (5, ...) or (layer, 5, ...)
    layer norms   input_layernorm.weight <-> self_attention.linear_qkv.layer_norm_weight, which TransformerEngine fuses
    further       mtp.layers.0.mtp_model_layer. of megatron-core 0.19 -> mtp.layers.0.transformer_layer., as 0.16 has it
    gated halves  mlp.linear_fc1.weight: its upper and lower half of rows under ..._w and ..._v, by some options
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError

MASTERS = ("param", "fp32_param")
"""Slots of the optimizer's state that hold main weights."""

_WRAPPERS = re.compile(r"(?:(?:model|module)\.)+")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_LAYER = re.compile(r"(?P<start>(?:.*?\.)?layers\.)(?P<index>\d+)\.(?P<rest>.+)")
_LOCAL_EXPERT = re.compile(r"(?P<start>.*mlp\.experts\.)local_experts\.(?P<index>\d+)\.(?P<rest>.+)")
_GROUPED_EXPERT = re.compile(r"(?P<start>.*mlp\.experts\.)(?P<rest>linear_fc[12]\.(?:weight|bias))(?P<index>\d+)")
_LAYER_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


@dataclass(frozen=True)
class Leading:
    """One dim that a key has before the parameter's own.

    Attributes:
        index: the parameter's.
        counts: the field of a model's config that says how many there are.
    """

    index: int
    counts: str


@dataclass(frozen=True)
class Place:
    """Where a parameter lies, or half of its rows.

    Attributes:
        key: without prefixes of wrappers or the optimizer.
        leading: dims before the parameter's own.
        half: 0 or 1 for the upper or lower half of its rows; None for all of it.
    """

    key: str
    leading: tuple[Leading, ...] = ()
    half: int | None = None


@dataclass
class TensorKeys:
    """The keys of a checkpoint's tensors, by what they hold and by the parameter's key without prefixes.

    Attributes:
        model: of the model.
        state: of the optimizer, by slot, such as exp_avg.
        others: of the optimizer, in a form that is not by parameter.
    """

    model: dict[str, str] = field(default_factory=dict)
    state: dict[str, dict[str, str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def sort_keys(keys: Iterable[str]) -> TensorKeys:
    """Sort the keys of tensors.

    Raises:
        CheckpointError: two differ in the prefixes of wrappers only.
    """
    found = TensorKeys()
    for key in keys:
        state = _STATE.fullmatch(key)
        if state is None and _OPTIMIZER.match(key):
            found.others.append(key)
            continue
        slot, name = (found.state.setdefault(state[1], {}), state[2]) if state else (found.model, key)
        name = bare(name)
        if name in slot:
            raise CheckpointError(
                f"keys of the checkpoint: expected one for each tensor, got {slot[name]} and {key}. Remove one."
            )
        slot[name] = key
    return found


def bare(name: str) -> str:
    """Return a name without what wrappers put before it."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name


def locate(name: str, keys: Collection[str]) -> list[Place]:
    """Return where a parameter lies: one place, or one for each half; none if it is not there.

    Args:
        name: as in ``named_parameters()``, with or without what wrappers put before it.
        keys: those that a checkpoint has, without prefixes.
    """
    for place in _candidates(bare(name)):
        if place.key in keys:
            return [place]
        halves = [Place(f"{place.key}_{suffix}", place.leading, half) for half, suffix in enumerate("wv")]
        if all(half.key in keys for half in halves):
            return halves
    return []


def unstacked(key: str, sizes: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """Return the names of the layers' parameters that a key holds, each with its index; the key itself if not stacked.

    Example: ``decoder.layers.mlp.linear_fc2.weight`` of (2, 8, 4) gives ``decoder.layers.0.mlp…`` at 0 and
    ``decoder.layers.1.mlp…`` at 1.
    """
    start, layers, rest = key.rpartition("layers.") if "layers." in key else (key, "", "")
    if not layers or re.match(r"\d+\.", rest):
        return [(key, None)]
    return [(f"{start}{layers}{index}.{rest}", index) for index in range(sizes[0])]


def stacked(name: str) -> tuple[str, int | None]:
    """Return the key that holds a layer's parameter together with other layers', and its index there."""
    match = _LAYER.fullmatch(name)
    return (match["start"] + match["rest"], int(match["index"])) if match else (name, None)


def fused_norm(name: str) -> str:
    """Return the name that TransformerEngine has for a layer norm's parameter; other names as they are."""
    return _replaced(name, 0, 1) or name


def separate_norm(name: str) -> str:
    """Return the name that megatron-core's own layers have for a fused layer norm's parameter; others as they are."""
    return _replaced(name, 1, 0) or name


def _replaced(name: str, old: int, new: int) -> str | None:
    for pair in _LAYER_NORMS:
        start, found, end = name.rpartition(pair[old])
        if found and end in ("weight", "bias") and (not start or start.endswith(".")):
            return start + pair[new] + end
    return None


def _candidates(name: str) -> Iterator[Place]:
    own = dict.fromkeys((name, name.replace(".mtp_model_layer.", ".transformer_layer.")))
    spellings = dict.fromkeys(spell(each) for each in own for spell in (str, fused_norm, separate_norm))
    for spelling in spellings:
        places = [Place(spelling)]
        expert = _LOCAL_EXPERT.fullmatch(spelling) or _GROUPED_EXPERT.fullmatch(spelling)
        if expert:
            index = Leading(int(expert["index"]), "num_moe_experts")
            places.append(Place(f"{expert['start']}experts.{expert['rest']}", (index,)))
        for place in places:
            yield place
            match = _LAYER.fullmatch(place.key)
            if match:
                counts = "mtp_num_layers" if place.key.startswith("mtp.") else "num_layers"
                index = Leading(int(match["index"]), counts)
                yield Place(match["start"] + match["rest"], (index, *place.leading))
