# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device start with the values of an ordinary start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import fully_shard, fully_shard_context
from tests.unit_tests.launch import DEVICE, run_ranks
from tests.unit_tests.models import Block
from tests.unit_tests.oracle import assert_at_rest, compare_gradients


class _Model(nn.Module):
    """Root-owned modules before, between and after the layers; a tied head; buffers; a module that resets others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Block(6), nn.Sequential(Block(6), nn.BatchNorm1d(6)), Block(6)])
        self.attention = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(self.head(self.attention(x, x, x)[0]))


def _build_on_meta() -> Any:
    with torch.device("meta"):
        return _Model()


def _shard(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _assert_same_values(model: nn.Module, reference: nn.Module) -> None:
    for name, parameter in reference.named_parameters():
        found: Any = model.get_parameter(name)
        assert torch.equal(found.full_tensor(), parameter), name
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def _in_a_context(model: Any) -> None:
    with fully_shard_context(DEVICE):
        _shard(model)


def _by_forward(model: Any) -> None:
    _shard(model)(torch.ones(2, 6)).sum().backward()


def _by_reading(model: Any) -> None:
    _shard(model)
    assert model.layers[0].norm.weight.full_tensor().equal(torch.ones(6))


def _by_arithmetic(model: Any) -> None:
    _shard(model)
    copies = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert all(copy.full_tensor().equal(model.get_parameter(name).full_tensor()) for name, copy in copies.items())


STARTS: dict[str, Callable[[Any], None]] = {
    "context": _in_a_context,
    "forward": _by_forward,
    "reading": _by_reading,
    "arithmetic": _by_arithmetic,
}


def _same_start(name: str) -> None:
    torch.manual_seed(5)
    reference = _Model()
    expected = torch.rand(())
    model = _build_on_meta()
    torch.manual_seed(5)
    STARTS[name](model)
    assert torch.equal(torch.rand(()), expected)
    if name == "forward":
        reference(torch.ones(2, 6))
    _assert_same_values(model, reference)
    assert_at_rest(model)


@pytest.mark.parametrize("name", STARTS)
def test_pb058_meta_start_has_the_values_of_an_ordinary_one(name: str) -> None:
    run_ranks(2, _same_start, name)


def _trains() -> None:
    torch.manual_seed(5)
    reference = _Model()
    model = _build_on_meta()
    torch.manual_seed(5)
    with fully_shard_context(DEVICE):
        _shard(model)
    compare_gradients(model, reference, lambda module, batch: module(batch).square().sum().backward())


def test_pb058_meta_start_trains() -> None:
    run_ranks(3, _trains)


def _loaded_before_the_first_forward() -> None:
    torch.manual_seed(5)
    saved = {name: tensor.clone() for name, tensor in _shard(_Model()).state_dict().items()}
    model = _shard(_build_on_meta())
    model.load_state_dict(saved)
    model(torch.ones(2, 6))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), saved[name].full_tensor()), name


def test_pb058_loaded_values_are_not_initialised_again() -> None:
    run_ranks(2, _loaded_before_the_first_forward)


def _peak() -> tuple[int, int]:
    """Bytes of full tensors that exist at once while 8 units of one size get their values."""
    live: list[int] = []
    width = 16

    class Counted(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            held = [p for layer in layers for p in layer.parameters(recurse=False) if type(p) is nn.Parameter]
            live.append(sum(p.numel() for p in held))

    layers: list[nn.Module] = []
    with torch.device("meta"):
        layers += [Counted(width, width, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers)
    live.clear()
    for layer in model:
        fully_shard(layer)
    assert not live
    fully_shard(model)
    model(torch.ones(1, width))
    assert len(live) == 8
    return max(live), width * width


def test_pb118_one_module_at_a_time_is_full_size() -> None:
    for peak, unit in run_ranks(2, _peak):
        assert peak == unit


def _failing_reset() -> None:
    class Fails(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise ArithmeticError("no value")

    with torch.device("meta"):
        model = Fails(3, 3)
    fully_shard(model)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="no value"):
            model(torch.ones(1, 3))
    assert dist.get_world_size() == 2
    assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def test_a_failing_reset_leaves_sharded_parameters() -> None:
    run_ranks(2, _failing_reset)
