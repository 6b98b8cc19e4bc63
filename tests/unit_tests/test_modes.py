# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation beside training, without gradients and in inference mode, and autocast around it all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import SchedulePolicy, fully_shard
from tests.unit_tests.cases.compare import compare_training
from tests.unit_tests.launch import DEVICE, run_ranks
from tests.unit_tests.models import Block
from tests.unit_tests.oracle import assert_at_rest


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *[Block(6) for _ in range(3)], nn.BatchNorm1d(6))


def _shard(policy: SchedulePolicy | None) -> Callable[[Any], None]:
    def shard(model: Any) -> None:
        for layer in model:
            fully_shard(layer, schedule_policy=policy)
        fully_shard(model, schedule_policy=policy)

    return shard


MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
POLICIES = {"default": None, "keep": SchedulePolicy(reshard_after_forward=False)}


def _evaluation(mode: str, policy: str) -> None:
    """Before the first step, between forward and backward, and after a step; it leaves nothing gathered behind."""

    def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        def evaluate() -> None:
            model.eval()
            with MODES[mode]():
                assert not model(batch).requires_grad
            model.train()

        evaluate()
        loss: torch.Tensor = model(batch).square().mean()
        evaluate()
        loss.backward()
        evaluate()
        return loss

    compare_training(_model(), _shard(POLICIES[policy]), step)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_anywhere(mode: str, policy: str) -> None:
    run_ranks(2, _evaluation, mode, policy)


def _autocast(around: str) -> None:
    """Autocast around forward, or around forward and backward, gives what it gives in one process."""
    reference = _model()
    model = _model()
    _shard(None)(model)
    batches = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(0))

    def run(module: Any, batch: torch.Tensor, share: int) -> None:
        context = torch.autocast(DEVICE, torch.bfloat16)
        with context:
            loss = module(batch).square().sum() / share
            if around == "both":
                loss.backward()
        if around == "forward":
            loss.backward()

    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        for batch in batches:
            run(reference, batch, len(batches))
        run(model, batches[dist.get_rank()], 1)
        assert_at_rest(model)
        for name, parameter in reference.named_parameters():
            found: Any = model.get_parameter(name)
            # Gradients are rounded to bfloat16 on every rank before they are averaged.
            torch.testing.assert_close(found.grad.full_tensor(), parameter.grad, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("around", ["forward", "both"])
def test_autocast(around: str) -> None:
    run_ranks(2, _autocast, around)
