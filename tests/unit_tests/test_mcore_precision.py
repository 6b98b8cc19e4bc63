# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Low-bit weights of Megatron-Core chunks: which ones, and that layouts and strategies change none of their bits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.experimental import Fp8Recipe, Mxfp8Recipe
from megatron.core.distributed.fsdp.experimental.quantized_group import QuantizedGroup
from megatron.core.distributed.fsdp.mcore_fsdp_v2_precision import QUANTIZED_GATHERS
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.mcore import build_gpt, build_tower, cpu_shim, start, wrap

PARTS = ["megatron.core.transformer.mlp.MLP", "megatron.core.transformer.attention.SelfAttention"]
MATRICES = ("linear_proj.weight", "linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight")


def _quantized_names(chunk: Any) -> set[str]:
    """Return the names, in the chunk, of the parameters in quantized groups."""
    groups = [group for group in chunk.fsdp_context.parameter_groups() if isinstance(group, QuantizedGroup)]
    quantized = {id(parameter) for group in groups for parameter in group.sharded_parameters}
    return {name for name, parameter in chunk.module.named_parameters() if id(parameter) in quantized}


def _names_in_gpt(options: dict[str, Any], changes: dict[str, Any]) -> set[str]:
    start()
    with cpu_shim():
        return _quantized_names(wrap(build_gpt(dtype=torch.bfloat16, **changes), **options))


def _layers(*numbers: int) -> set[str]:
    return {
        f"decoder.layers.{number}.{'mlp' if 'fc' in name else 'self_attention'}.{name}"
        for number in numbers
        for name in MATRICES
    }


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        ({}, {}, set()),
        ({"megatron_fsdp_quantized_gather": "fp8"}, {}, _layers(0, 1, 2)),
        ({"megatron_fsdp_quantized_gather": "nvfp4"}, {"first_last_layers_bf16": True}, _layers(1)),
        (
            {"megatron_fsdp_quantized_gather": Mxfp8Recipe()},
            {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 2},
            _layers(0),
        ),
        (
            {"megatron_fsdp_quantized_gather": "nvfp4", "fsdp_unit_modules": PARTS},
            {"first_last_layers_bf16": True},
            _layers(1),
        ),
        ({"megatron_fsdp_quantized_gather": Fp8Recipe(keep=("*fc*", "*proj*"))}, {}, {
            name for name in _layers(0, 1, 2) if "qkv" in name
        } | {"embedding.word_embeddings.weight", "output_layer.weight"}),
    ],
    ids=["off", "all layers", "without first and last", "without the last two", "parts of layers", "own patterns"],
)  # fmt: skip
def test_matrices_of_layers_are_quantized(options: dict[str, Any], changes: dict[str, Any], expected: set[str]) -> None:
    """Embeddings, norms, biases and the output layer are not, unless a recipe's own patterns say otherwise.

    torch's own embeddings, as of positions, never are.
    """
    assert run_ranks(2, _names_in_gpt, options, {"num_layers": 3, **changes})[0] == expected


def test_routers_are_kept_and_experts_are_not() -> None:
    changes = {"num_moe_experts": 2, "add_bias_linear": False}
    names = run_ranks(1, _names_in_gpt, {"megatron_fsdp_quantized_gather": "mxfp8"}, changes)[0]
    assert any("experts" in name for name in names)
    assert not any("router" in name for name in names)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (
            {"megatron_fsdp_quantized_gather": "fp6"},
            {},
            r"megatron_fsdp_quantized_gather: expected one of \('fp8', 'mxfp8', 'nvfp4'\) or a recipe, got 'fp6'. Set",
        ),
        (
            {"megatron_fsdp_quantized_gather": "fp8", "megatron_fsdp_min_unit_numel": 10**9},
            {"first_last_layers_bf16": True, "num_layers": 3},
            "first_last_layers_bf16: expected units of layers that are quantized or of layers that are not, got both",
        ),
        (
            {"megatron_fsdp_quantized_gather": "fp8", "fsdp_unit_modules": ["torch.nn.modules.sparse.Embedding"]},
            {"first_last_layers_bf16": True, "num_layers": 3},
            "first_last_layers_bf16: expected units of layers that are quantized or of layers that are not, got both",
        ),
        (
            {"megatron_fsdp_quantized_gather": "fp8"},
            {"first_last_layers_bf16": True, "num_layers": 2},
            "megatron_fsdp_quantized_gather fp8: expected layers with matrices that are quantized, got none: all are",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    (error,) = run_ranks_expecting(1, ValueError, _names_in_gpt, options, changes)
    assert re.search(message, error)


def test_every_format_has_a_name() -> None:
    assert {recipe.name: recipe for recipe in QUANTIZED_GATHERS.values()} == QUANTIZED_GATHERS


def _tower_of_vectors() -> None:
    start()
    chunk = wrap(build_tower(torch.bfloat16), megatron_fsdp_quantized_gather="fp8")
    assert all(name.endswith("weight") for name in _quantized_names(chunk))


def test_other_modules_than_layers_are_quantized_as_units() -> None:
    run_ranks(1, _tower_of_vectors)
