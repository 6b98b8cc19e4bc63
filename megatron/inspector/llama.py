# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Llama in terms of megatron-core's GPT: which rows of which tensor are which weight. Reads no weights.

Known are GPT models with RMSNorm, SwiGLU and RoPE, by the layers of megatron-core or of TransformerEngine, with their
layers apart or stacked (``torch_dist``). Whatever else a checkpoint has is an error, never left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.layout import Box
from megatron.inspector.opened import Checkpoint

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
_HALVES = {"_w": ("gate",), "_v": ("up",), "": ("gate", "up")}
# What saved arguments have to say, where they say anything, for the model to be a Llama.
_REQUIRED: dict[str, tuple[object, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "use_rope_scaling": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "qk_layernorm": (False,),
    "apply_layernorm_1p": (False,),
    "num_experts": (None, 0),
    "multi_latent_attention": (False,),
}


@dataclass(frozen=True)
class Piece:
    """A box of a saved tensor, and the shape in which it is a part of a weight."""

    key: str
    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelArguments:
    """What the shapes of the weights do not tell. Names are those of Megatron's arguments."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    rotary_base: float
    norm_epsilon: float
    max_position_embeddings: int
    vocab_size: int | None = None

    @classmethod
    def flags(cls) -> list[tuple[str, Callable[[str], object]]]:
        """Return the name of each, and what reads its text."""
        floats = {"rotary_base", "norm_epsilon"}
        return [(field.name, float if field.name in floats else int) for field in fields(cls)]


def model_arguments(checkpoint: Checkpoint, given: Mapping[str, object]) -> ModelArguments:
    """Take the arguments from flags, and otherwise from those saved in the checkpoint.

    Raises:
        CheckpointError: some are nowhere, or the saved ones are of a model that is no Llama.
    """
    saved: dict[str, Any] = {}
    if "args" in checkpoint.entries:
        saved = dict(vars(checkpoint.entry("args")))
    wrong = [
        f"{name}={saved[name]!r}" for name, allowed in _REQUIRED.items() if saved.get(name, allowed[0]) not in allowed
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder}: --format hf: expected a model with SwiGLU, RMSNorm and RoPE, "
            f"got {', '.join(wrong)}. Export it with --format safetensors."
        )
    if saved.get("group_query_attention") is False:
        saved["num_query_groups"] = saved.get("num_attention_heads")
    saved.pop("vocab_size", None)  # a tokenizer's, or the padded one: the weights have the padded one, flags the other
    values = {**{name: saved[name] for name, _ in ModelArguments.flags() if saved.get(name) is not None}, **given}
    missing = [name for name, _ in ModelArguments.flags() if name not in values and name != "vocab_size"]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise CheckpointError(
            f"{checkpoint.folder}: expected the model's arguments in the checkpoint, got none of {', '.join(missing)}. "
            f"Give {flags}."
        )
    return ModelArguments(**values)


def llama_pieces(
    shapes: Mapping[str, tuple[int, ...]], keys: Mapping[str, str], arguments: ModelArguments
) -> dict[str, list[Piece]]:
    """Say of which boxes each weight of a Llama consists.

    Args:
        shapes: of the model's tensors, by their names without prefixes.
        keys: their keys in the checkpoint.
        arguments: the model's.

    Raises:
        CheckpointError: tensors that a Llama does not have or that do not fit, or that it lacks; all are named.
    """
    found: dict[str, list[Piece]] = {}
    unknown = []
    for name, shape in sorted(shapes.items(), key=lambda item: _natural(item[0])):
        weights = list(_weights(name, keys[name], shape, arguments))
        if not weights:
            unknown.append(f"{name} {shape}")
        for weight, pieces in weights:
            found[weight] = pieces
    if unknown:
        raise CheckpointError(
            f"--format hf: expected tensors of a GPT with SwiGLU, RMSNorm and RoPE, got {', '.join(unknown)}. "
            "Check the model's arguments, or export with --format safetensors."
        )
    lacking = sorted(_expected(found) - set(found), key=_natural)
    if lacking:
        raise CheckpointError(f"--format hf: expected all weights of a Llama, got none for {', '.join(lacking)}.")
    return found


def llama_config(shapes: Mapping[str, tuple[int, ...]], arguments: ModelArguments) -> dict[str, object]:
    """Return ``config.json`` but for the dtype."""
    vocabulary, hidden = shapes["embedding.word_embeddings.weight"]
    layers = [match for match in map(_LAYER.fullmatch, shapes) if match]
    stacked = [shapes[match[0]][0] for match in layers if match[1] is None]
    num_layers = stacked[0] if stacked else 1 + max(int(match[1]) for match in layers)
    (intermediate,) = {shape[-1] for name, shape in shapes.items() if name.endswith("mlp.linear_fc2.weight")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": arguments.vocab_size or vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": arguments.num_attention_heads,
        "num_key_value_heads": arguments.num_query_groups,
        "head_dim": arguments.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": arguments.max_position_embeddings,
        "rms_norm_eps": arguments.norm_epsilon,
        "rope_theta": arguments.rotary_base,
        "attention_bias": any(name.endswith("linear_qkv.bias") for name in shapes),
        "mlp_bias": any(name.endswith("linear_fc2.bias") for name in shapes),
        "tie_word_embeddings": "output_layer.weight" not in shapes,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _weights(
    name: str, key: str, shape: tuple[int, ...], arguments: ModelArguments
) -> Iterator[tuple[str, list[Piece]]]:
    """Yield the weights that a tensor holds; none where it is not known or its shape does not fit."""
    if name in _OUTER:
        rows = shape[0] if name.startswith("decoder") else min(shape[0], arguments.vocab_size or shape[0])
        yield _OUTER[name], [_rows(key, shape, None, 0, rows)]
        return
    match = _LAYER.fullmatch(name)
    if match is None:
        return
    stacked = match[1] is None
    for layer in range(shape[0]) if stacked else [int(match[1])]:
        outer = layer if stacked else None
        for weight, runs in _in_layer(match[2], shape[1:] if stacked else shape, arguments):
            yield f"model.layers.{layer}.{weight}", [_rows(key, shape, outer, *run) for run in runs]


def _in_layer(
    name: str, shape: tuple[int, ...], arguments: ModelArguments
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield the weights that a layer's tensor holds, each with its runs of rows: first row, number of rows."""
    if name in _IN_LAYER:
        yield _IN_LAYER[name], [(0, shape[0])]
        return
    projection = re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", name)
    if projection:
        yield from _query_key_value(projection[1], shape[0], arguments)
        return
    projection = re.fullmatch(r"mlp\.linear_fc1\.(weight|bias)(_w|_v|)", name)
    if projection:
        halves = _HALVES[projection[2]]
        rows = shape[0] // len(halves)
        for index, half in enumerate(halves):
            yield f"mlp.{half}_proj.{projection[1]}", [(index * rows, rows)]


def _query_key_value(kind: str, rows: int, arguments: ModelArguments) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Take apart ``linear_qkv``, whose rows are per group: its query heads, its key head, its value head.

    Example: 4 heads in 2 groups of head size 3 have 24 rows; queries are rows [0, 6) and [12, 18), keys [6, 9) and
    [18, 21), values [9, 12) and [21, 24).
    """
    groups, head = arguments.num_query_groups, arguments.kv_channels
    per_group = arguments.num_attention_heads // groups
    group_rows = (per_group + 2) * head
    if rows != groups * group_rows or arguments.num_attention_heads % groups:
        return
    for name, first, count in (("q", 0, per_group), ("k", per_group, 1), ("v", per_group + 1, 1)):
        runs = [(group * group_rows + first * head, count * head) for group in range(groups)]
        yield f"self_attn.{name}_proj.{kind}", runs


def _rows(key: str, shape: tuple[int, ...], outer: int | None, first: int, count: int) -> Piece:
    """Return rows of a tensor, or of one index of its outermost dim."""
    inner = shape if outer is None else shape[1:]
    wanted = (count, *inner[1:])
    offsets = (first, *[0] * (len(inner) - 1))
    if outer is None:
        return Piece(key, Box(offsets, wanted), wanted)
    return Piece(key, Box((outer, *offsets), (1, *wanted)), wanted)


def _expected(found: Mapping[str, object]) -> set[str]:
    """Return the weights that a Llama has as many layers as were found has; with biases, where any layer has them."""
    numbers = [int(match[1]) for match in (re.match(r"model\.layers\.(\d+)\.", name) for name in found) if match]
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    inner = [f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm", *attention, *mlp)]
    for group in (attention, mlp):
        if any(name.endswith(tuple(f".{part}.bias" for part in group)) for name in found):
            inner += [f"{part}.bias" for part in group]
    expected = {f"model.layers.{layer}.{name}" for layer in range(max(numbers, default=0) + 1) for name in inner}
    return expected | {"model.embed_tokens.weight", "model.norm.weight"}


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort numbers in names by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
