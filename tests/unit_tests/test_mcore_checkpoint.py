# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Chunks and their optimizers under the names and cuts of Megatron's fsdp_dtensor checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.transformer.module import Float16Module

from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.experimental import CheckpointError, FsdpDTensor
from megatron.core.distributed.fsdp.experimental.checkpoint import OpenCheckpoint, Ranks, write_checkpoint
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import build_gpt, build_optimizer, cpu_shim, gpt_losses, start, tokens, wrap

SWIGLU: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "ffn_hidden_size": 10,
}


def _chunk(trains: bool, *, narrow: bool = False, **changes: Any) -> tuple[Any, Any]:
    dtype = torch.bfloat16 if narrow else torch.float32
    model: Any = build_gpt(dtype=dtype, **changes)
    if narrow:
        model.config.bf16 = True
        model = Float16Module(model.config, model)
    chunk = wrap(model)
    optimizer = build_optimizer(chunk)
    if trains:
        text, labels, _ = tokens(0, 0, dist.get_rank())
        gpt_losses(chunk, text, labels).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.zero_()
    return chunk, optimizer


def _whole(chunk: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor() for name, parameter in chunk.named_parameters()}


def _model_alone(folder: str, narrow: bool, tied: bool) -> list[str]:
    """What Megatron's loop does: save the state dict with DCP, load into another one in place, hand that back."""
    start()
    with cpu_shim():
        chunk, _ = _chunk(True, narrow=narrow, tied=tied, **SWIGLU)
        expected = _whole(chunk)
        dcp.save({"model": chunk.state_dict_for_save_checkpoint()}, checkpoint_id=folder)
        fresh, _ = _chunk(False, narrow=narrow, tied=tied, **SWIGLU)
        state = fresh.state_dict_for_save_checkpoint()
        dcp.load({"model": state}, checkpoint_id=folder)
        fresh.load_state_dict(state)
        assert all(torch.equal(value, expected[name]) for name, value in _whole(fresh).items())
        other, _ = _chunk(False, narrow=narrow, tied=tied, **SWIGLU)
        other.load_state_dict(chunk.state_dict_for_save_checkpoint())
        assert all(torch.equal(value, expected[name]) for name, value in _whole(other).items())
        half = chunk.state_dict_for_save_checkpoint()
        del half["module.decoder.layers.0.mlp.linear_fc1.weight_v"]
        with pytest.raises(RuntimeError, match=r"Missing key.*decoder\.layers\.0\.mlp\.linear_fc1\.weight"):
            other.load_state_dict(half)
        return sorted(state)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
def test_megatrons_loop_saves_and_loads_a_chunk(narrow: bool, tied: bool, tmp_path: Path) -> None:
    keys = run_ranks(2, _model_alone, str(tmp_path), narrow, tied)[0]
    assert all(key.startswith("module.") and not key.startswith("module.module.") for key in keys)
    assert "module.decoder.layers.0.mlp.linear_fc1.weight_w" in keys
    assert "module.decoder.layers.0.mlp.linear_fc1.weight" not in keys
    assert ("module.output_layer.weight" in keys) != tied


def _both(chunk: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": names.model_keys(chunk), "optimizer": names.optimizer_keys(optimizer, chunk)}


def _renamed(state: dict[str, Any], model: str, states: str) -> dict[str, Any]:
    """As other wrappers would name it."""
    optimizer = {
        kind: {states + names.canonical_name(name): value for name, value in values.items()}
        for kind, values in state["optimizer"].items()
    }
    return {
        "model": {model + names.canonical_name(name): value for name, value in state["model"].items()},
        "optimizer": optimizer,
    }


def _moments(chunk: Any, optimizer: Any) -> dict[str, Any]:
    found = optimizer.sharded_state_dict({})
    whole = {
        (name, key): value.full_tensor() if isinstance(value, FsdpDTensor) else value.clone()
        for name, values in found["state"].items()
        for key, value in values.items()
    }
    return {**whole, "settings": found["param_to_group_meta"]}


def _prefixes(folder: str, model: str, states: str) -> None:
    start()
    with cpu_shim():
        chunk, optimizer = _chunk(True, **SWIGLU)
        ranks = Ranks(torch.device("cpu"))
        write_checkpoint(_renamed(_both(chunk, optimizer), model, states), Path(folder, "saved"), ranks)
        fresh, other = _chunk(False, **SWIGLU)
        opened = OpenCheckpoint(Path(folder, "saved"), ranks)
        tensors = {**names.find_model(fresh, opened.keys), **names.find_optimizer(other, fresh, opened.keys)}
        settings = names.settings_keys(opened.keys)
        opened.check(tensors, strict=True, others=settings)
        opened.read(tensors)
        names.load_settings(other, fresh, opened.objects(settings))
        expected = _whole(chunk)
        assert all(torch.equal(value, expected[name]) for name, value in _whole(fresh).items())
        ours, theirs = _moments(fresh, other), _moments(chunk, optimizer)
        assert ours.pop("settings") == theirs.pop("settings") and ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
        with pytest.raises(CheckpointError, match="expected them for every parameter, got none for"):
            names.load_settings(other, fresh, {})


@pytest.mark.parametrize(
    ("model", "states"),
    [("module.", "module.module.module."), ("", ""), ("module.module.", "module."), ("model.", "module.module.")],
)
def test_any_wrappers_prefixes_are_read(model: str, states: str, tmp_path: Path) -> None:
    run_ranks(2, _prefixes, str(tmp_path), model, states)


def test_two_keys_for_one_tensor_are_refused() -> None:
    keys = ["model.module.decoder.weight", "model.decoder.weight"]
    with pytest.raises(CheckpointError, match="expected one for each tensor"):
        names._by_canonical_name(keys, names.MODEL)


@pytest.mark.parametrize(
    ("name", "is_gated"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", True),
        ("decoder.layers.0.mlp.linear_fc1.bias", True),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", True),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight12", True),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", True),
        ("decoder.layers.0.mlp.linear_fc2.weight", False),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", False),
        ("decoder.layers.0.self_attention.linear_qkv.weight", False),
    ],
)
def test_which_weights_are_gated(name: str, is_gated: bool) -> None:
    class Config:
        gated_linear_unit = True

    assert names.is_gated(name, Config()) is is_gated
    assert not names.is_gated(name, object())
