# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon on plain parameters, against a loop over matrices and against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp.experimental import Muon
from tests.unit_tests.matrix_oracle import PlainMuon, Split, give_gradients, step_plainly, weight_of


def test_plain_parameters_are_stepped_without_any_sharding() -> None:
    ours, theirs = (
        [weight_of(6, 4), weight_of(4, 9), weight_of(5, 2, 3), nn.Parameter(torch.ones(3))] for _ in range(2)
    )
    optimizer = Muon(ours[:3], lr=0.01, rest=torch.optim.AdamW(ours[3:], lr=0.02))
    plain = torch.optim.AdamW(theirs[3:], lr=0.02)
    momenta: dict[Any, torch.Tensor] = {}
    split: dict[Any, Split] = {theirs[2]: lambda kernel: [kernel.flatten(1)]}
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        step_plainly(theirs[:3], momenta, PlainMuon(), split)
        plain.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, ours, theirs))
    for ours_one, theirs_one in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(optimizer.state[ours_one]["momentum_buffer"], momenta[theirs_one])
    (work,) = optimizer.works
    assert work.plan.travelling_numel == 0 and work.names == [f"parameter {index}" for index in range(3)]


def test_gradients_may_lie_in_any_order() -> None:
    ours, theirs = weight_of(6, 4), weight_of(6, 4)
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).T
    ours.grad, theirs.grad = gradient, gradient.contiguous()
    for weight in (ours, theirs):
        Muon([weight]).step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_rates_may_be_tensors(lr: Any) -> None:
    ours, theirs = weight_of(6, 4), weight_of(6, 4)
    optimizer, momenta = Muon([ours], lr=lr), {}
    for step in range(3):
        give_gradients([ours], step)
        give_gradients([theirs], step)
        optimizer.step()
        step_plainly([theirs], momenta, PlainMuon(), {})
    assert torch.equal(ours, theirs)


def test_rates_follow_a_scheduler_in_both_optimizers() -> None:
    weight, bias = weight_of(6, 4), nn.Parameter(torch.ones(3))
    optimizer = Muon([weight], lr=1.0, rest=torch.optim.SGD([bias], lr=0.5))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [weight.detach().clone(), bias.detach().clone()]
    give_gradients([weight, bias], 0)
    optimizer.step()
    scheduler.step()
    assert torch.equal(weight, before[0]) and torch.equal(bias, before[1])
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]


# torch's Muon divides by the norm in bfloat16, ours in float32: steps start from numbers that differ by one in 2**8,
# and each rounds to as much. 1% of what ten updates move was found; momenta are the same operations.
@pytest.mark.parametrize(
    ("adjust", "scale_mode", "extra"), [("original", "shape_scaling", 1.0), ("match_rms_adamw", "spectral", 0.2)]
)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_agrees_with_torchs(adjust: str, scale_mode: str, extra: float, nesterov: bool, shape: tuple[int, int]) -> None:
    ours, theirs = weight_of(*shape), weight_of(*shape)
    settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    optimizer = Muon(
        [ours], coefficients="simple", scale_mode=scale_mode, extra_scale_factor=extra, precision="medium", **settings
    )
    plain = torch.optim.Muon([theirs], adjust_lr_fn=adjust, **settings)
    before = ours.detach().clone()
    for step in range(10):
        give_gradients([ours], step)
        give_gradients([theirs], step)
        optimizer.step()
        plain.step()
    moved = (theirs - before).abs().max().item()
    assert moved > 0.01
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * moved)
    assert torch.equal(optimizer.state[ours]["momentum_buffer"], plain.state[theirs]["momentum_buffer"])
