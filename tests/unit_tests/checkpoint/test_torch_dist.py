# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by megatron-core's DDP and distributed optimizer go on under FSDP v2, bit for bit, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint.ranks import Ranks
from megatron.core.distributed.fsdp.torch_dist_checkpoint import TorchDistCheckpoint, is_torch_dist
from megatron.core.distributed.fsdp.torch_dist_groups import match_groups, saved_groups
from megatron.core.distributed.fsdp.torch_dist_names import locate, sort_keys
from tests.unit_tests import mcore
from tests.unit_tests.checkpoint.files import save
from tests.unit_tests.checkpoint.megatron_files import SLOTS, STEP, Source, Truth, make_source
from tests.unit_tests.launch import run_ranks

SOURCES = {
    "ddp1": Source(tied=True),
    "ddp2_swiglu": Source(ranks=2, swiglu=True),
    "distributed1_halves": Source(distributed=True, swiglu=True, content=(("singleton_local_shards", True),)),
    "distributed2": Source(ranks=2, distributed=True, tied=True),
    "fp32": Source(dtype=torch.float32, swiglu=True),
}
STRATEGIES = ("optim_grads_params", "optim")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Truth]]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: (folder / name, make_source(folder / name, source)) for name, source in SOURCES.items()}


def _live(source: Source, strategy: str) -> tuple[Any, Any]:
    """Return a wrapped model with other weights than any checkpoint's, and its optimizer."""
    model = source.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-7.0)
    chunk = mcore.wrap(model, data_parallel_sharding_strategy=strategy)
    return chunk, mcore.build_optimizer(chunk, **source.optimizer_options())


def _targets(chunk: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    weights = dict(chunk.module.named_parameters())
    state = optimizer.sharded_state_dict({}, is_loading=True)["state"]
    states = {name.removeprefix("module."): {slot: values[slot] for slot in SLOTS} for name, values in state.items()}
    return weights, states


def _load(path: str, source: Source, strategy: str) -> tuple[Any, ...]:
    mcore.start()
    with mcore.cpu_shim():
        chunk, optimizer = _live(source, strategy)
        weights, states = _targets(chunk, optimizer)
        mcore.run_schedule(chunk, 0, 1, forward_only=True)  # gathers weights that the load must make stale
        checkpoint = TorchDistCheckpoint(Path(path), Ranks(torch.device("cpu")))
        report = checkpoint.read(weights, states, chunk.config)
        groups = match_groups(saved_groups(checkpoint.common), optimizer.param_groups)
        found: Truth = {"weight": mcore.full_weights(chunk), **{slot: {} for slot in SLOTS}}
        for name, values in mcore.full_state(optimizer, chunk).items():
            for slot in SLOTS:
                found[slot][name] = values[slot]
        plain = source.model()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(found["weight"][name])
        text, labels, _ = mcore.tokens(0, 0, 0)
        with torch.no_grad():
            losses = [mcore.gpt_losses(model, text, labels) for model in (chunk, plain)]
        return found, report, groups, torch.equal(*losses)


CASES = [
    ("ddp1", 1, 0),
    ("ddp1", 3, 0),
    ("ddp2_swiglu", 2, 0),
    ("ddp2_swiglu", 3, 1),
    ("distributed1_halves", 3, 0),
    ("distributed1_halves", 2, 1),
    ("distributed2", 1, 1),
    ("distributed2", 2, 0),
    ("fp32", 2, 0),
]


@pytest.mark.parametrize(("name", "ranks", "strategy"), CASES)
def test_loads_bit_for_bit(sources: dict[str, tuple[Path, Truth]], name: str, ranks: int, strategy: int) -> None:
    path, truth = sources[name]
    source = SOURCES[name]
    assert is_torch_dist(path)
    for found, report, groups, has_equal_losses in run_ranks(ranks, _load, str(path), source, STRATEGIES[strategy]):
        for slot, values in found.items():
            assert values.keys() == truth[slot].keys()
            for parameter, value in values.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, truth[slot][parameter]), f"{slot} of {parameter}"
        assert has_equal_losses, "compute weights are those that were loaded"
        assert report.cast == []
        has_masters = source.is_mixed or source.distributed
        assert len(report.from_masters if has_masters else report.from_model) == len(found["weight"])
        assert [group["step"] for group in groups] == [STEP, STEP]
        assert sorted(group["wd_mult"] for group in groups) == [0.0, 1.0]
