# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""torch's own checkpoint functions on sharded models: what they save and load is right, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron.core.distributed.fsdp.experimental import (
    CheckpointError,
    FsdpDTensor,
    Placements,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    rows_of,
    save_checkpoint,
)
from tests.unit_tests.checkpoint.zoo import Cut, assert_same, everything, make, train
from tests.unit_tests.launch import run_ranks

FULL = StateDictOptions(full_state_dict=True)
STRATEGIES = ("no_shard", "optim", "optim_grads_params")


def _set_sharded(model: Any, optimizer: Any, source: Any, source_optimizer: Any) -> None:
    set_model_state_dict(model, get_model_state_dict(source))
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(source, source_optimizer))


def _set_full(model: Any, optimizer: Any, source: Any, source_optimizer: Any) -> None:
    set_model_state_dict(model, get_model_state_dict(source, options=FULL), options=FULL)
    saved = get_optimizer_state_dict(source, source_optimizer, options=FULL)
    set_optimizer_state_dict(model, optimizer, saved, options=FULL)


def _by_hand(model: Any, optimizer: Any, source: Any, source_optimizer: Any) -> None:
    """Full tensors, as an unsharded model and optimizer have them."""
    model.load_state_dict(get_model_state_dict(source, options=FULL))
    saved = source_optimizer.state_dict()
    for state in saved["state"].values():
        for key, value in state.items():
            state[key] = value.full_tensor() if isinstance(value, FsdpDTensor) else value
    optimizer.load_state_dict(saved)


WAYS: dict[str, Callable[..., None]] = {"sharded": _set_sharded, "full": _set_full, "by_hand": _by_hand}


def _pass_on(way: str, strategy: str) -> None:
    losses = train(*make(Cut(strategy), "adam"), range(4))
    source, source_optimizer = make(Cut(strategy), "adam")
    train(source, source_optimizer, range(2))
    expected = everything(source, source_optimizer)
    model, optimizer = make(Cut(strategy, seed=5), "adam")
    WAYS[way](model, optimizer, source, source_optimizer)
    assert_same(model, optimizer, expected, way)
    assert train(model, optimizer, range(2, 4)) == losses[2:]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_pb100_state_dicts_carry_everything(way: str, strategy: str) -> None:
    run_ranks(2, _pass_on, way, strategy)


def _broadcast() -> None:
    """torch would write the rows of its own cut: refused before any is written."""
    source, optimizer = make(Cut(), "adam")
    full = get_model_state_dict(source, options=FULL)
    model, _ = make(Cut(seed=5), "adam")
    before = everything(model, optimizer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(NotImplementedError, match=r"expected broadcast_from_rank0=False"):
        set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name])


def test_broadcasting_by_torch_is_refused() -> None:
    run_ranks(2, _broadcast)


def _wrong_values() -> None:
    model, optimizer = make(Cut(), "adam")
    values = {name: value.full_tensor() for name, value in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight"):
        model.load_state_dict({**values, "layers.0.weight": torch.zeros(3, 6)}, strict=False)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"optimizer state 'exp_avg' of .*: expected a DTensor .* or a full tensor"):
        optimizer.load_state_dict(saved)


def test_values_of_another_shape_are_refused() -> None:
    run_ranks(2, _wrong_values)


# --- cases ------------------------------------------------------------------------------------------------------------

SHAPES = {"even": [(16, 8), (16,)], "odd": [(5, 3), (7,), (3, 2, 3)]}


class _Group(nn.Module):
    """One unit with the given parameters."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self) -> torch.Tensor:
        return sum((weight**3).sum() * (1 + index) for index, weight in enumerate(self.weights))


def _group(shapes: list[tuple[int, ...]]) -> tuple[Any, Any]:
    model: Any = fully_shard(_Group(shapes), placements=Placements.from_strategy("optim_grads_params"))
    return model, fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))


def _step(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_with_dcp(folder: str, shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    model, optimizer = _group(shapes)
    _step(model, optimizer, 3)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return _whole(model, optimizer)


def _whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}:{key}"] = parameter.geometry.gather(optimizer.state[parameter][key])
    return found


def _load_with_dcp(folder: str, shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    model, optimizer = _group(shapes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state: Any = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return _whole(model, optimizer)


@pytest.mark.parametrize("name", SHAPES)
def test_pb044_plain_dcp_saves_and_loads_uneven_shards(name: str, tmp_path: Path) -> None:
    expected = run_ranks(2, _save_with_dcp, str(tmp_path), SHAPES[name])[0]
    for ranks in (1, 2, 3, 4):
        for found in run_ranks(ranks, _load_with_dcp, str(tmp_path), SHAPES[name]):
            assert all(torch.equal(found[key], value) for key, value in expected.items())
    whole: dict[str, Any] = {"model": {key: torch.zeros_like(v) for key, v in expected.items() if ":" not in key}}
    dcp.load(whole, checkpoint_id=tmp_path)
    assert all(torch.equal(value, expected[key]) for key, value in whole["model"].items())


PADDED = [(5, 3), (1,), (11,), (3, 7), (2, 2, 5), (13, 1), (101,)]


def _save_ours(folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = _group(PADDED)
    _step(model, optimizer, 3)
    save_checkpoint(model, optimizer, folder)
    return _whole(model, optimizer)


def _load_ours(folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = _group(PADDED)
    load_checkpoint(model, optimizer, folder)
    return _whole(model, optimizer)


def test_pb045_padding_shifts_no_moments(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    expected = run_ranks(4, _save_ours, folder)[0]
    for ranks in (2, 3):
        found = run_ranks(ranks, _load_ours, folder)[0]
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def _halves(model: Any) -> dict[str, FsdpDTensor]:
    fused = model.weights[0]
    half = fused.shape[0] // 2
    return {"w": rows_of(fused, 0, half), "v": rows_of(fused, half, 2 * half)}


def _fused(folder: str, rows: int) -> None:
    """A fused weight saved as two tensors, loaded into fused and unfused models; a missing half raises."""
    shapes: list[tuple[int, ...]] = [(2 * rows, 3), (4,)]
    model, _ = _group(shapes)
    expected = model.weights[0].full_tensor()
    parts = _halves(model)
    assert torch.equal(torch.cat([parts["w"].full_tensor(), parts["v"].full_tensor()]), expected)
    dcp.save(parts, checkpoint_id=folder)
    with torch.no_grad():
        model.weights[0].zero_()
    dcp.load(_halves(model), checkpoint_id=folder)
    assert torch.equal(model.weights[0].full_tensor(), expected)
    unfused, _ = _group([(rows, 3), (rows, 3)])
    dcp.load(dict(zip(("w", "v"), unfused.state_dict().values(), strict=True)), checkpoint_id=folder)
    assert torch.equal(torch.cat([weight.full_tensor() for weight in unfused.weights]), expected)
    with pytest.raises(dcp.api.CheckpointException, match="other"):
        dcp.load({**_halves(model), "other": rows_of(model.weights[0], 0, rows)}, checkpoint_id=folder)


@pytest.mark.parametrize("rows", [1, 5, 7])
def test_pb053_halves_of_fused_tensors_wherever_they_are_cut(rows: int, tmp_path: Path) -> None:
    run_ranks(3, _fused, str(tmp_path), rows)


def _without_shards(folder: str) -> int:
    """The last ranks own nothing; some parameters are frozen."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(3)])
    model[1].requires_grad_(False)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1))
    for number in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = everything(model, optimizer)
        save_checkpoint(model, optimizer, f"{folder}/{number}")
        load_checkpoint(model, optimizer, f"{folder}/{number}")
        assert_same(model, optimizer, before)
    return sum(parameter.to_local().numel() for parameter in model.parameters())


def test_pb078_ranks_without_shards_save_the_same_keys(tmp_path: Path) -> None:
    assert 0 in run_ranks(4, _without_shards, str(tmp_path))


def _tied(folder: str, saves_tied: bool, loads_tied: bool) -> None:
    model, optimizer = make(Cut(tied=saves_tied), "adam")
    if not saves_tied:
        model.load_state_dict({"head.weight": model.embedding.weight.full_tensor()}, strict=False)
    save_checkpoint(model, None, f"{folder}/saved")
    expected = model.embedding.weight.full_tensor()
    fresh, _ = make(Cut(tied=loads_tied, seed=5), "adam")
    load_checkpoint(fresh, None, f"{folder}/saved")
    for weight in (fresh.embedding.weight, fresh.head.weight):
        assert torch.equal(weight.full_tensor(), expected)
    if not saves_tied and loads_tied:
        train(model, optimizer, range(1))
        save_checkpoint(model, None, f"{folder}/other")
        with pytest.raises(CheckpointError, match=r"head\.weight.* expected equal values, since the model ties them"):
            load_checkpoint(fresh, None, f"{folder}/other")


@pytest.mark.parametrize("saves_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loads_tied", [True, False], ids=["into_tied", "into_untied"])
def test_pb107_both_names_of_a_tied_weight_load(saves_tied: bool, loads_tied: bool, tmp_path: Path) -> None:
    run_ranks(2, _tied, str(tmp_path), saves_tied, loads_tied)
