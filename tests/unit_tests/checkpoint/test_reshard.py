# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of any number of ranks and strategy is loaded on any other, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import load_checkpoint, save_checkpoint
from tests.unit_tests.checkpoint.zoo import Cut, assert_same, everything, make, train
from tests.unit_tests.launch import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CUTS: dict[int, list[Cut]] = {
    n: [Cut(strategy) for strategy in STRATEGIES] + ([Cut(outer="no_shard"), Cut(outer="optim")] if n in (2, 4) else [])
    for n in (1, 2, 3, 4)
}
KINDS = ("adam", "sgd")
TRAINED, CONTINUED = range(3), range(3, 8)


def _kind(n: int, number: int) -> str:
    """Return an optimizer; every pair of world sizes and every pair of strategies meets both."""
    return KINDS[(n // 2 + number) % 2]


def _save(folder: str) -> list[list[float]]:
    """Save under each cut, and go on."""
    n, losses = dist.get_world_size(), []
    for number, cut in enumerate(CUTS[n]):
        model, optimizer = make(cut, _kind(n, number))
        train(model, optimizer, TRAINED)
        path = Path(folder, f"{n}-{number}")
        save_checkpoint(model, optimizer, path, extra={"cut": number})
        whole = everything(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(whole, f"{path}.pt")
        losses.append(train(model, optimizer, CONTINUED))
    return losses


def _load(folder: str, losses: dict[int, list[list[float]]]) -> None:
    """Load every checkpoint, one after another into the same models, under each cut with the same optimizer.

    Those are half of the cuts, for the sake of time: every pair of world sizes and every pair of strategies occurs,
    each with both optimizers.
    """
    m = dist.get_world_size()
    fresh = [
        make(replace(cut, seed=7, units=("layers", "one", "conv")[number % 3]), _kind(m, number))
        for number, cut in enumerate(CUTS[m])
    ]
    for n in CUTS:
        for saved in range(len(CUTS[n])):
            path, kind = Path(folder, f"{n}-{saved}"), _kind(n, saved)
            expected = torch.load(f"{path}.pt")
            for number, cut in enumerate(CUTS[m]):
                if _kind(m, number) != kind:
                    continue
                is_same = (n, saved) == (m, number)
                model, optimizer = make(cut, kind) if is_same else fresh[number]
                report = load_checkpoint(model, optimizer, path)
                assert (report.extra, report.missing, report.unexpected, report.cast) == ({"cut": saved}, [], [], [])
                assert_same(model, optimizer, expected, (n, saved, cut))
                if is_same:
                    assert train(model, optimizer, CONTINUED) == losses[n][saved]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("reshard"))
    return folder, {n: run_ranks(n, _save, folder) for n in CUTS}


@pytest.mark.parametrize("m", CUTS)
def test_every_checkpoint_loads_everywhere(m: int, saved: Any) -> None:
    folder, losses = saved
    by_rank = [{n: every[min(rank, n - 1)] for n, every in losses.items()} for rank in range(m)]
    run_ranks(m, _load_mine, folder, by_rank)


def _load_mine(folder: str, by_rank: list[dict[int, list[list[float]]]]) -> None:
    _load(folder, by_rank[dist.get_rank()])
