# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory is refused where there is none; a double stands for what only hardware has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import (
    FsdpContext,
    collectives,
    context_memory,
    fully_shard_context,
    fully_shard_optimizer,
    symmetric_memory,
)
from megatron.core.distributed.fsdp.experimental.symmetric_memory import check_symmetric_memory
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_same_on_all_ranks


def test_the_host_has_none() -> None:
    with pytest.raises(NotImplementedError, match="use_symmetric_memory: expected a CUDA device, got cpu"):
        FsdpContext(torch.device("cpu"), use_symmetric_memory=True, trace_pool=True)


def test_an_older_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(symmetric_memory.symmetric, "is_symm_mem_tensor", raising=False)
    with pytest.raises(NotImplementedError, match=r"use_symmetric_memory: expected torch 2\.12 or newer, got"):
        check_symmetric_memory(torch.device("cuda", 0), trace_pool=True)


def test_it_is_for_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory.symmetric, "is_symm_mem_tensor", None, raising=False)
    with pytest.raises(ValueError, match="use_symmetric_memory: expected trace_pool=True, got False"):
        check_symmetric_memory(torch.device("cuda", 0), trace_pool=False)
    check_symmetric_memory(torch.device("cuda", 0), trace_pool=True)


def _registered() -> None:
    """Every arena is allocated in the pool and registered with each group of the mesh, and again after a release."""
    open_pools: list[torch.device] = []
    registered: list[tuple[str, int, list[int]]] = []
    resized: list[str] = []

    @contextmanager
    def pool(device: torch.device) -> Iterator[None]:
        open_pools.append(device)
        yield
        open_pools.pop()

    def rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        assert not open_pools and tensor.untyped_storage().nbytes() == tensor.numel()
        registered.append((str(tensor.dtype), tensor.numel(), dist.get_process_group_ranks(group)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_memory, "check_symmetric_memory", lambda device, trace_pool: None)
        patch.setattr(symmetric_memory, "symmetric_pool", pool)
        patch.setattr(collectives.symmetric, "rendezvous", rendezvous)
        original = context_memory.default_allocator.allocate

        def allocate(block: Any) -> None:
            if open_pools:
                resized.append(block.name)
            original(block)

        patch.setattr(context_memory.default_allocator, "allocate", allocate)
        model = build("mlp").bfloat16()
        with fully_shard_context(DEVICE, use_symmetric_memory=True, trace_pool=True) as context:
            shard_layers(model, mesh=lasting_mesh((2, 1)))
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, targets = make_batch(model, 4, seed=dist.get_rank())
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, inputs.bfloat16(), targets).backward()
            optimizer.step()
            if step == 2:
                context.release_memory_pool()
    pool_now: Any = context.pool
    sizes = [arena.num_bytes for arena in pool_now.plan.arenas]
    ranks = [[0, 1], [dist.get_rank()]]
    assert resized == 2 * [f"arena {index}" for index in range(len(sizes))]
    groups = [sorted(found) for found in (registered[: len(registered) // 2], registered[len(registered) // 2 :])]
    assert groups == [sorted(("torch.uint8", size, members) for size in sizes for members in ranks)] * 2
    assert_same_on_all_ranks([size for _, size, _ in registered])


def test_arenas_are_registered_with_every_group() -> None:
    run_ranks(2, _registered)
