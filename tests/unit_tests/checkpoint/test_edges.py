# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Saves beside saves, ranks that differ, empty tensors, overlapping chunks, optimizers that divide by zero."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.distributed.fsdp.experimental import (
    CheckpointError,
    CheckpointSaver,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.experimental.checkpoint import background_writer, folder
from megatron.core.distributed.fsdp.experimental.checkpoint.locks import being_written, is_being_written
from megatron.core.distributed.fsdp.experimental.checkpoint.planner import CoveringLoadPlanner
from megatron.core.distributed.fsdp.experimental.checkpoint.staging import HostStaging
from tests.unit_tests.checkpoint.zoo import Cut, assert_same, everything, make, train
from tests.unit_tests.launch import run_ranks


def test_a_folder_is_locked_while_it_is_written(tmp_path: Path) -> None:
    staging = tmp_path / "a.incomplete-0"
    with being_written(staging):
        assert is_being_written(staging) and folder.clean_interrupted(tmp_path) == []
        with pytest.raises(CheckpointError, match="expected to write"), being_written(staging):
            raise AssertionError("the folder was made twice")
    assert not is_being_written(staging) and not is_being_written(tmp_path / "none")
    assert folder.clean_interrupted(tmp_path) == [staging]


def _beside(path: str) -> None:
    """A save in the same folder leaves one that is under way alone."""
    model, optimizer = make(Cut(), "adam")
    reached, go_on = threading.Event(), threading.Event()
    main = threading.current_thread()

    def hold(name: str) -> None:
        if name == "data_synced" and threading.current_thread() is not main:
            reached.set()
            assert go_on.wait(20)

    folder.on_step = hold
    try:
        saver = CheckpointSaver(model)
        expected = everything(model, optimizer)
        saver.save(optimizer, f"{path}/background")
        assert reached.wait(20)
        train(model, optimizer, range(1))
        save_checkpoint(model, optimizer, f"{path}/beside")
        go_on.set()
        saver.wait()
    finally:
        go_on.set()
        folder.on_step = None
    load_checkpoint(model, optimizer, f"{path}/background")
    assert_same(model, optimizer, expected)


def test_two_saves_in_one_folder(tmp_path: Path) -> None:
    run_ranks(2, _beside, str(tmp_path))


def _no_memory(path: str) -> None:
    """What one rank cannot copy to the host is an error of all, and the next save goes on."""
    model, optimizer = make(Cut(), "adam")
    saver = CheckpointSaver(model)
    stage = HostStaging.stage

    def fail(self: Any, state: Any) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("no pinned memory")
        return stage(self, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStaging, "stage", fail)
        with pytest.raises(CheckpointError, match=r"copy to the host .* rank 1: MemoryError: no pinned memory"):
            saver.save(optimizer, f"{path}/a")
    saver.poll()
    saver.save(optimizer, f"{path}/b")
    saver.wait()
    load_checkpoint(model, optimizer, f"{path}/b")


def test_one_rank_that_cannot_stage(tmp_path: Path) -> None:
    run_ranks(2, _no_memory, str(tmp_path))


def test_groups_that_are_gone_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = background_writer.BackgroundWriter()

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Could not resolve the process group")

    monkeypatch.setattr(background_writer, "write_checkpoint", fail)
    writer.write(lambda: {"w": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="Could not resolve the process group"):
        writer.wait()
    monkeypatch.setattr(writer.ranks, "group", object())
    monkeypatch.setattr(writer.ranks, "together", lambda what: nullcontext())
    writer.write(lambda: {"w": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"got destroy_process_group\(\) before\. Call wait\(\) first"):
        writer.wait()


def _buffers(path: str) -> None:
    """Buffers that differ between ranks are the first one's, all of them."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    fully_shard(model)
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank() + 5)
    save_checkpoint(model, None, path)
    load_checkpoint(model, None, path)
    assert all(bool((buffer == 5).all()) for buffer in model.buffers())


def test_buffers_are_those_of_the_first_rank(tmp_path: Path) -> None:
    run_ranks(2, _buffers, str(tmp_path / "a"))


def _empty(path: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 5)
    model.empty = nn.Parameter(torch.empty(0, 4))
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    expected = everything(model, optimizer)
    save_checkpoint(model, optimizer, path)
    report = load_checkpoint(model, optimizer, path)
    assert not report.missing and not report.unexpected
    assert_same(model, optimizer, expected)


def test_pb099_parameters_without_elements(tmp_path: Path) -> None:
    run_ranks(2, _empty, str(tmp_path / "a"))


def _divides(path: str) -> None:
    """Adam without epsilon divides zero by zero: making its state must not."""
    model, optimizer = make(Cut(), "plain_sgd")
    del optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = fully_shard_optimizer(torch.optim.Adam(parameters, eps=0.0))
    train(model, adam, range(2))
    expected = everything(model, adam)
    save_checkpoint(model, adam, path)
    other, _ = make(Cut(seed=5), "plain_sgd")
    fresh = fully_shard_optimizer(torch.optim.Adam([p for p in other.parameters() if p.requires_grad], eps=0.0))
    load_checkpoint(other, fresh, path)
    assert_same(other, fresh, expected)


def test_state_of_an_optimizer_without_epsilon(tmp_path: Path) -> None:
    run_ranks(2, _divides, str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("starts", "text"), [((0, 2), "got 8, some twice"), ((0, 5), "got 7"), ((0,), "got 4")], ids=str
)
def test_chunks_that_do_not_cover_are_refused(starts: tuple[int, ...], text: str) -> None:
    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([min(4, 8 - at)])) for at in starts]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([8]), chunks)
    target = {"w": torch.zeros(8)}
    planner = CoveringLoadPlanner(target)
    planner.set_up_planner(target, Metadata({"w": entry}), True)
    with pytest.raises(CheckpointError, match=text):
        planner.create_local_plan()


def test_what_fails_after_the_commit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.experimental.checkpoint import Ranks, write_checkpoint

    ranks, told = Ranks(torch.device("cpu")), []
    write_checkpoint({"w": torch.ones(2)}, tmp_path / "a", ranks)
    monkeypatch.setattr(folder, "_sync_folder", _FailsOn(tmp_path))
    with pytest.raises(CheckpointError, match="committed, but what comes after it failed"):
        write_checkpoint(
            {"w": torch.zeros(2)}, tmp_path / "a", ranks, overwrite=True, after_commit=lambda: told.append(1)
        )
    assert told == [1]
    assert folder.verify_files(tmp_path / "a", checksums=True) == []


class _FailsOn:
    """fsync of one folder fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, path: Path) -> None:
        if path == self._path:
            raise OSError(5, "Input/output error")
