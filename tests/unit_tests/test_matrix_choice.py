# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which parameters go to Muon: by module, name and logical shape, alike on plain and sharded models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import fully_shard, fully_shard_muon
from megatron.core.distributed.fsdp.experimental.matrix_choice import choose_matrices, describe_choice
from tests.unit_tests.launch import run_ranks, run_ranks_expecting


class _Model(nn.Module):
    """A layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.positions = nn.EmbeddingBag(5, 6)
        self.qkv = nn.Linear(6, 9)
        self.conv = nn.Conv2d(2, 3, 2)
        self.conv1d = nn.Conv1d(2, 3, 2, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 4, 6))
        self.deep = nn.Parameter(torch.randn(2, 3, 4, 6))
        self.router = nn.Linear(6, 4, bias=False)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.tied = nn.Linear(6, 9, bias=False)
        self.tied.weight = self.qkv.weight
        self.scalar = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 11)


EXPECTED = {
    "qkv.weight": (False, (2, 1)),
    "conv.weight": (False, ()),
    "conv1d.weight": (False, ()),
    "experts": (True, ()),
}
REASONS = {
    "embedding.weight": "embedding",
    "positions.weight": "embedding",
    "qkv.bias": "1-D",
    "conv.bias": "1-D",
    "deep": "4-D, and no convolution's",
    "router.weight": "excluded by 'rout*'",
    "norm.weight": "1-D",
    "norm.bias": "1-D",
    "scalar": "0-D",
    "head.weight": "shaped like the embedding embedding, and the last one",
    "head.bias": "1-D",
}
SETTINGS: dict[str, Any] = {"exclude": ("rout*",), "parts": {"q*.weight": (2, 1)}}


def test_matrices_are_chosen_by_module_name_and_shape() -> None:
    choice = choose_matrices(_Model(), **SETTINGS)
    assert {name: (found.is_stack, found.parts) for name, found in choice.matrices.items()} == EXPECTED
    assert choice.reasons == REASONS and choice.others.keys() == REASONS.keys()
    model = _Model()
    choice = choose_matrices(model, **SETTINGS)
    assert all(dict(model.named_parameters())[name] is found.parameter for name, found in choice.matrices.items())
    assert choice.is_first_rank
    assert [(len(group["params"]), group["is_stack"], group["parts"]) for group in choice.groups()] == [
        (1, True, ()),
        (1, False, (2, 1)),
        (2, False, ()),
    ]


def test_the_first_pattern_of_parts_counts() -> None:
    choice = choose_matrices(_Model(), parts={"q*": (1, 1, 1), "qkv.*": (2, 1)})
    assert choice.matrices["qkv.weight"].parts == (1, 1, 1)


def test_the_table_has_a_line_for_each_kind() -> None:
    lines = describe_choice(choose_matrices(_Model(), **SETTINGS), "AdamW").splitlines()
    assert lines == [
        "optimizer    parameters  shape                matrices; why",
        "Muon                  1  3x4x6                stack of matrices",
        "Muon                  1  9x6                  matrix, parts of rows 2+1",
        "Muon                  1  3x2x2x2              matrix",
        "Muon                  1  3x2x2                matrix",
        "AdamW                 1  2x3x4x6              4-D, and no convolution's",
        "AdamW                 1                       0-D",
        "AdamW                 1  11x6                 embedding",
        "AdamW                 1  5x6                  embedding",
        "AdamW                 1  9                    1-D",
        "AdamW                 1  3                    1-D",
        "AdamW                 1  4x6                  excluded by 'rout*'",
        "AdamW                 2  6                    1-D",
        "AdamW                 1  11x6                 shaped like the embedding embedding, and the last one",
        "AdamW                 1  11                   1-D",
    ]


@pytest.mark.parametrize("settings", [{"exclude": ("nothing", "rout*")}, {"parts": {"nothing": (1, 1)}}])
def test_patterns_that_name_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as raised:
        choose_matrices(_Model(), **settings)
    assert str(raised.value) == (
        "patterns of matrices: expected each to name a parameter, got ['nothing'] without one. Correct or drop them; "
        "names are those of named_parameters()."
    )


def test_parts_of_what_is_no_matrix_are_refused() -> None:
    with pytest.raises(ValueError, match=r"patterns of matrices: .* got \['norm.\*'\]"):
        choose_matrices(_Model(), parts={"norm.*": (3, 3)})


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(ValueError) as raised:
        choose_matrices(nn.LayerNorm(4))
    assert str(raised.value) == (
        "matrices of LayerNorm: expected some trainable weight of two dims or more that is no embedding, got none. Use "
        "an element-wise optimizer."
    )


def _sharded() -> list[str]:
    model = _Model()
    model.scalar = nn.Parameter(torch.ones(1))  # units have no scalars
    fully_shard(model)
    choice = choose_matrices(model, **SETTINGS)
    assert {name: (found.is_stack, found.parts) for name, found in choice.matrices.items()} == EXPECTED
    assert choice.reasons == {**REASONS, "scalar": "1-D"}
    assert choice.is_first_rank == (dist.get_rank() == 0)
    tables: list[str] = []
    made: list[int] = []

    def rest(parameters: Any) -> torch.optim.Optimizer:
        made.append(len(parameters))
        return torch.optim.SGD(parameters, lr=0.5)

    optimizer = fully_shard_muon(model, 0.1, rest=rest, report=tables.append, **SETTINGS, num_ns_steps=3)
    assert made == [len(REASONS)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.1, 0.5]
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon"] * 3 + ["SGD"]
    assert all(group["num_ns_steps"] == 3 for group in optimizer.matrix_groups)
    return tables


def test_sharded_models_are_sorted_by_their_logical_shapes() -> None:
    first, second = run_ranks(2, _sharded)
    assert second == [] and len(first) == 1
    assert "SGD                   1  5x6                  embedding" in first[0].splitlines()


def _defaults() -> None:
    model = fully_shard(nn.Linear(4, 3))
    optimizer = fully_shard_muon(model, report=None)
    assert isinstance(optimizer.rest, torch.optim.AdamW)
    (rest,) = optimizer.rest.param_groups
    assert (rest["lr"], rest["weight_decay"]) == (3e-4, 0.1)
    model = fully_shard(nn.Linear(4, 3, bias=False))
    assert fully_shard_muon(model, report=None).rest is None


def test_everything_else_goes_to_adamw() -> None:
    run_ranks(2, _defaults)


def _wrong(what: str) -> None:
    model = fully_shard(nn.Linear(4, 3))
    settings: dict[str, Any] = {
        "pattern": {"exclude": ["bias", "weights"]},
        "parts": {"parts": {"weight": (2, 2)}},
        "setting": {"scale_mode": "none"},
    }
    fully_shard_muon(model, report=None, **settings[what])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pattern", "patterns of matrices: expected each to name a parameter, got ['weights'] without one."),
        ("parts", "parts of Linear#0.weight: expected numbers of rows whose sum divides its 3 rows, got (2, 2)."),
        ("setting", "muon scale_mode: expected one of ('spectral', 'shape_scaling', 'unit_rms_norm'), got 'none'."),
    ],
)
def test_wrong_settings_are_refused_on_every_rank(what: str, message: str) -> None:
    for found in run_ranks_expecting(2, ValueError, _wrong, what):
        assert found.startswith(message)


class _Square(nn.Module):
    """Positions and projections have one shape, as in GPT-2 medium; the words' table is larger."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(8, 6), nn.Embedding(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
        self.up = nn.Linear(6, 8, bias=False)
        self.head = nn.Linear(6, 8, bias=False)
        if is_tied:
            self.head.weight = self.words.weight


def test_only_the_last_weight_shaped_like_the_largest_table_is_a_head() -> None:
    assert set(choose_matrices(_Square()).matrices) == {"layers.0.weight", "layers.1.weight", "up.weight"}
    assert set(choose_matrices(_Square(is_tied=True)).matrices) == {"layers.0.weight", "layers.1.weight", "up.weight"}
    choice = choose_matrices(_Square(), include=("head.*",))
    assert set(choice.matrices) == {"layers.0.weight", "layers.1.weight", "up.weight", "head.weight"}
    with pytest.raises(ValueError, match=r"got \['tail'\] without one"):
        choose_matrices(_Square(), include=("tail",))
    with pytest.raises(ValueError, match=r"got \['words.weight'\] without one"):
        choose_matrices(_Square(), include=("words.weight",))  # an embedding stays one
