# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A recipe without a meaning is refused when it is made; the others name a format and the parameters that it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp.experimental import Fp8Recipe, MixedPrecisionPolicy, Mxfp8Recipe, Nvfp4Recipe
from megatron.core.distributed.fsdp.experimental.number_formats import Fp8Format, Mxfp8Format, Nvfp4Format
from megatron.core.distributed.fsdp.experimental.ownership import group_parameters, is_quantized, owned_parameters


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            Fp8Recipe,
            {"scaling": "column"},
            r"Fp8Recipe.scaling: expected one of \('tensor', 'row', 'block'\), got 'col",
        ),
        (Fp8Recipe, {"rounding": "up"}, r"Fp8Recipe.rounding: expected one of \('nearest', 'stochastic'\), got 'up'."),
        (
            Mxfp8Recipe,
            {"scale_rounding": "up"},
            r"Mxfp8Recipe.scale_rounding: expected one of \('floor', 'ceil'\), got",
        ),
        (
            Nvfp4Recipe,
            {"seed": 1},
            "Nvfp4Recipe.seed: expected 0 with rounding='nearest', got 1; it would have no effect",
        ),
        (Nvfp4Recipe, {"seed": True, "rounding": "stochastic"}, "Nvfp4Recipe.seed: expected an int, got True."),
        (Nvfp4Recipe, {"seed": -1, "rounding": "stochastic"}, r"expected an int in \[0, 2\*\*64\), got -1."),
        (Mxfp8Recipe, {"keep": "*norm*"}, r"Mxfp8Recipe.keep: expected a tuple of shell patterns, got '\*norm\*'."),
        (Mxfp8Recipe, {"keep": (1,)}, r"Mxfp8Recipe.keep: expected a tuple of shell patterns, got \(1,\)."),
        (
            MixedPrecisionPolicy,
            {"fp8": "tensor"},
            "MixedPrecisionPolicy.fp8: expected a Fp8Recipe, True or None, got 't",
        ),
        (MixedPrecisionPolicy, {"nvfp4": Fp8Recipe()}, "MixedPrecisionPolicy.nvfp4: expected a Nvfp4Recipe, True or"),
        (
            MixedPrecisionPolicy,
            {"main_grads_dtype": torch.float8_e4m3fn},
            "expected a dtype of 16 bits or more, got torch",
        ),
        (
            MixedPrecisionPolicy,
            {"fp8": True, "mxfp8": True},
            r"expected one of fp8, mxfp8 and nvfp4, got \['fp8', 'mxfp8'\]. A unit's weights travel in one format",
        ),
    ],
)
def test_what_means_nothing_is_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_a_policy_names_one_format() -> None:
    assert MixedPrecisionPolicy().recipe is None and MixedPrecisionPolicy(fp8=False).recipe is None
    assert MixedPrecisionPolicy(fp8=True).recipe == Fp8Recipe()
    recipe = Mxfp8Recipe(scale_rounding="ceil", rounding="stochastic", seed=5)
    assert MixedPrecisionPolicy(mxfp8=recipe).recipe is recipe
    assert recipe.format == Mxfp8Format(scale_rounding="ceil", rounding="stochastic", seed=5)
    assert Fp8Recipe(scaling="row").format == Fp8Format(scaling="row")
    assert Nvfp4Recipe().format == Nvfp4Format()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.bags = nn.EmbeddingBag(8, 4)
        self.word_embeddings = nn.Linear(4, 8, bias=False)
        self.final_norm = nn.Linear(4, 4, bias=False)
        self.router = nn.Linear(4, 4, bias=False)
        self.lm_head = nn.Linear(4, 8)
        self.mlp = nn.Linear(4, 8)
        self.conv = nn.Conv1d(2, 2, 3)
        self.table = nn.Parameter(torch.ones(4, 4, dtype=torch.int64), requires_grad=False)


def _chosen(recipe: Any) -> set[str]:
    return {item.fqn for item in owned_parameters(Parts()) if is_quantized(item, recipe)}


def test_matrices_that_no_pattern_names_are_quantized() -> None:
    assert _chosen(Nvfp4Recipe()) == {"mlp.weight", "conv.weight"}
    assert _chosen(None) == set()
    everything = {f"{name}.weight" for name in ("word_embeddings", "final_norm", "router", "lm_head", "mlp", "conv")}
    assert _chosen(Nvfp4Recipe(keep=())) == everything
    assert _chosen(Nvfp4Recipe(keep=("mlp.*",))) == everything - {"mlp.weight"}


def test_quantized_parameters_form_groups_of_their_own() -> None:
    groups = group_parameters(owned_parameters(Parts()), Nvfp4Recipe())
    assert ["mlp.weight", "conv.weight"] in [[item.fqn for item in group] for group in groups]
    assert len(groups) == len(group_parameters(owned_parameters(Parts()), None)) + 1


def test_a_tied_embedding_is_kept_whichever_of_its_modules_comes_first() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 8, bias=False), "tokens": nn.Embedding(8, 4)})
    model["head"].weight = model["tokens"].weight
    (item,) = owned_parameters(model)
    assert item.fqn == "head.weight" and not is_quantized(item, Nvfp4Recipe())
