# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-FSDP v1 and ours: each reads what the other has written, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.experimental import FsdpDTensor
from megatron.core.distributed.fsdp.experimental.checkpoint import OpenCheckpoint, Ranks, write_checkpoint
from tests.unit_tests import megatron_fsdp_v1 as v1
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import build_optimizer, cpu_shim, gpt_losses, start, tokens, wrap

SWIGLU: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "ffn_hidden_size": 45,
    "tied": True,
}
MODELS: dict[str, dict[str, Any]] = {"gelu": {}, "swiglu": SWIGLU}
HALF = "model.module.decoder.layers.0.mlp.linear_fc1.weight_w"
SETTINGS = "optimizer.param_to_group_meta."


@dataclass(frozen=True)
class Written:
    """A checkpoint on the disk, and what its writer held, by the checkpoint's keys."""

    folder: str
    held: dict[str, Any]


def _v1_writes(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    start()
    with cpu_shim(), v1.v1_on_cpu():
        return v1.local(v1.save(*v1.build(trains=True, **changes), folder))


def _v1_reads(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    start()
    with cpu_shim(), v1.v1_on_cpu():
        chunk, optimizer = v1.build(trains=False, **changes)
        v1.load(chunk, optimizer, folder)
        return v1.contents(chunk, optimizer)


def _assembled(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whole tensors and other values by key; each element of a tensor is in a rank's box."""
    found: dict[str, Any] = {}
    for key, value in by_rank[0].items():
        if isinstance(value, v1.Box):
            found[key] = torch.full(value.shape, torch.nan, dtype=value.values.dtype)
            for box in (held[key] for held in by_rank):
                places = zip(box.offsets, box.values.shape, strict=True)
                found[key][tuple(slice(start, start + size) for start, size in places)] = box.values
            assert not found[key].isnan().any()
        else:
            found[key] = value
    return found


def _ours(trains: bool, changes: dict[str, Any]) -> tuple[Any, Any]:
    chunk = wrap(v1.build_model(**changes))
    optimizer = build_optimizer(chunk)
    if trains:
        text, labels, _ = tokens(1, 0, dist.get_rank())
        gpt_losses(chunk, text, labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.zero_()
    return chunk, optimizer


def _state(chunk: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": names.model_keys(chunk), "optimizer": names.optimizer_keys(optimizer, chunk)}


def _whole(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return whole tensors and other values of a nested state dict by key."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= _whole(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value.full_tensor() if isinstance(value, FsdpDTensor) else value
    return found


def _ours_writes(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    start()
    with cpu_shim():
        state = _state(*_ours(True, changes))
        write_checkpoint(state, Path(folder), Ranks(torch.device("cpu")))
        return _whole(state)


def _ours_reads(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    start()
    with cpu_shim():
        chunk, optimizer = _ours(False, changes)
        opened = OpenCheckpoint(Path(folder), Ranks(torch.device("cpu")))
        tensors = {**names.find_model(chunk, opened.keys), **names.find_optimizer(optimizer, chunk, opened.keys)}
        settings = names.settings_keys(opened.keys)
        opened.check(tensors, strict=True, others=settings)
        opened.read(tensors)
        names.load_settings(optimizer, chunk, opened.objects(settings))
        return _whole(_state(chunk, optimizer))


@pytest.fixture(scope="module", params=MODELS)
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def theirs(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = str(tmp_path_factory.mktemp("theirs"))
    return Written(folder, _assembled(run_ranks(2, _v1_writes, folder, changes)))


@pytest.fixture(scope="module")
def ours(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = str(tmp_path_factory.mktemp("ours") / "saved")
    return Written(folder, run_ranks(2, _ours_writes, folder, changes)[0])


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def _entries(folder: str) -> dict[str, Any]:
    """Return dtype and shape of every tensor of a checkpoint, and None for other entries, by key."""
    entries: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: (e.properties.dtype, e.size) if hasattr(e, "properties") else None for key, e in entries.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ours_reads_a_checkpoint_of_v1(ranks: int, theirs: Written, changes: dict[str, Any]) -> None:
    for found in run_ranks(ranks, _ours_reads, theirs.folder, changes):
        _assert_same(found, theirs.held)


def test_v1_reads_a_checkpoint_of_ours(ours: Written, changes: dict[str, Any]) -> None:
    _assert_same(_assembled(run_ranks(2, _v1_reads, ours.folder, changes)), ours.held)


def test_both_write_the_same_keys_dtypes_and_shapes(theirs: Written, ours: Written, changes: dict[str, Any]) -> None:
    assert _entries(ours.folder) == _entries(theirs.folder)
    assert (HALF in theirs.held) == bool(changes)
    moments = [value for key, value in theirs.held.items() if key.endswith(".exp_avg")]
    assert moments and all(value.any() for value in moments)


@pytest.mark.parametrize("changes", ["swiglu"], indirect=True)
def test_v1_cuts_a_half_of_a_gated_layer(theirs: Written) -> None:
    entry: Any = dcp.FileSystemReader(theirs.folder).read_metadata().state_dict_metadata[HALF]
    assert sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks) == [
        ((0, 0), (15, 12)),
        ((15, 0), (30, 12)),
    ]


@pytest.mark.parametrize("changes", ["swiglu"], indirect=True)
def test_ours_reads_steps_that_were_counted_by_group(theirs: Written, changes: dict[str, Any], tmp_path: Path) -> None:
    """As TransformerEngine's FusedAdam counts them, which v1 uses on GPUs."""
    run_ranks(1, _count_by_group, theirs.folder, str(tmp_path))
    for found in run_ranks(2, _ours_reads, str(tmp_path), changes):
        _assert_same(found, theirs.held)


def _count_by_group(folder: str, copied: str) -> None:
    """Copy a checkpoint; steps are settings in the copy."""
    opened = OpenCheckpoint(Path(folder), Ranks(torch.device("cpu")))
    tensors = {
        key: torch.empty(entry[1], dtype=entry[0])
        for key, entry in _entries(folder).items()
        if entry is not None and not key.endswith(".step")
    }
    opened.read(tensors)
    settings = opened.objects(names.settings_keys(opened.keys))
    steps = {f"{key.removesuffix('.lr')}.step": 1 for key in settings if key.endswith(".lr")}
    dcp.save({**tensors, **settings, **steps}, checkpoint_id=copied)


def test_ours_reads_a_checkpoint_of_v1_without_a_16_bit_wrapper(tmp_path: Path) -> None:
    """v1 names optimizer states by one wrapper less then."""
    changes = {"narrow": False}
    theirs = _assembled(run_ranks(2, _v1_writes, str(tmp_path), changes))
    assert "optimizer.state.module.module.output_layer.weight.exp_avg" in theirs
    start = ("optimizer.state.", SETTINGS)
    expected = {
        f"{key[:i]}module.{key[i:]}" if (i := _end(key, start)) else key: value for key, value in theirs.items()
    }
    for found in run_ranks(2, _ours_reads, str(tmp_path), changes):
        _assert_same(found, expected)


def _end(key: str, prefixes: tuple[str, ...]) -> int:
    return max(len(prefix) if key.startswith(prefix) else 0 for prefix in prefixes)
