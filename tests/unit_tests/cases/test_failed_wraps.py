# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""PB-121: a chunk or a model that is refused is left as it was, and can be wrapped once the reason is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp.experimental import FsdpModule, check_shardable
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import build_tower, my_rank, start, tower_loss, wrap


def _assert_untouched(module: nn.Module) -> None:
    assert not any(isinstance(child, FsdpModule) for child in module.modules())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def _tied_across_units() -> None:
    start()
    tower = build_tower()
    layers: Any = tower.net.layers
    layers[2] = nn.Linear(7, 13)
    layers[2].weight = layers[0].weight
    with pytest.raises(
        ValueError, match=r"got weight, which unit Linear has sharded already: a weight tied across two"
    ):
        wrap(tower)
    _assert_untouched(tower)


def _gradient_on_the_last_unit() -> None:
    start()
    tower: Any = build_tower()
    tower.net.scale.grad = torch.zeros_like(tower.net.scale)
    with pytest.raises(ValueError, match=r"expected parameters without gradients, got one on net\.scale"):
        wrap(tower)
    _assert_untouched(tower)
    tower.net.scale.grad = None
    tower_loss(wrap(tower).module, 1, 0, my_rank()).backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())


@pytest.mark.parametrize("check", [_tied_across_units, _gradient_on_the_last_unit])
def test_pb121_refused_chunk_is_left_as_it_was(check: Any) -> None:
    run_ranks(2, check)


def _checked_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_shardable([*model, model])
    model[1].weight = model[0].weight
    check_shardable([model])
    with pytest.raises(ValueError, match="a weight tied across two units"):
        check_shardable([*model, model])
    _assert_untouched(model)


def test_pb121_check_without_change() -> None:
    run_ranks(1, _checked_alone)
