# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Calls without positional tensors, and calls that torch.compile makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from megatron.core.distributed.fsdp.experimental import fully_shard_optimizer
from tests.unit_tests.cases.compare import assert_close, compare_training
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import Block, shard_layers
from tests.unit_tests.oracle import assert_at_rest, full_gradients

# --- PB-108 -----------------------------------------------------------------------------------------------------------


class _Inner(nn.Module):
    """Takes its tensors by keyword, in a nested dict, as integers, or makes them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = nn.Embedding(5, 6), nn.Linear(6, 6)

    def forward(
        self,
        x: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        nested: dict[str, Any] | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if nested is not None:
            x = nested["inputs"]["x"][0]
        if rows is not None:
            x = self.rows(rows)
        if x is None:
            x = torch.linspace(-1, 1, 6).view(1, 6)
        return self.linear(x if mask is None else x * mask).tanh()


class _Calls(nn.Module):
    """Three units; the first has no input that needs a gradient, the others are called in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_Inner() for _ in range(3)])
        self.how = how

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        call, first = CALLS[self.how], self.layers[0]
        if x is None:
            hidden = first()
        else:
            hidden = first(x=x, mask=None)
        return self.layers[2](x=call(self.layers[1], hidden) + hidden, mask=None)


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "keyword": lambda unit, x: unit(x=x),
    "mask": lambda unit, x: unit(x, mask=(x > 0).float()),
    "mask_none": lambda unit, x: unit(x, mask=None),
    "keyword_mask": lambda unit, x: unit(x=x, mask=x.sigmoid()),
    "no_input": lambda unit, x: unit(),
    "only_mask_none": lambda unit, x: unit(mask=None),
    "integers": lambda unit, x: unit(rows=(x.detach()[:, 0].abs() * 100).long() % 5),
    "nested": lambda unit, x: unit(nested={"inputs": {"x": [x, None]}, "flags": (1, "a")}),
    "nested_positional": lambda unit, x: unit(None, nested={"inputs": {"x": (x,)}}),
}


def _called(how: str, optimizer: str) -> None:
    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = module(x=batch).square().mean()
        loss.backward()
        return loss

    compare_training(_Calls(how), shard_layers, step, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("how", CALLS)
def test_pb108_calls_without_positional_tensors(how: str, optimizer: str) -> None:
    run_ranks(2, _called, how, optimizer)


def _root_without_inputs() -> None:
    """The root, too, makes its data itself; what differs between ranks is a weight of the loss."""

    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = (module() * batch[:1]).square().mean()
        loss.backward()
        return loss

    compare_training(_Calls("keyword"), shard_layers, step)


def test_pb108_root_called_without_arguments() -> None:
    run_ranks(2, _root_without_inputs)


def _reduces_in_time(how: str) -> None:
    """The last unit has been reduced when the gradient of the first one's output is known."""
    model: Any = shard_layers(_Calls(how))
    told: list[str] = []
    for index, layer in enumerate(model.layers):
        layer.register_post_backward_hook(lambda unit: told.append(unit.name))
        layer.register_forward_hook(
            lambda module, args, out, index=index: (
                out.register_hook(lambda grad: told.append(f"gradient {index}")) and None
            )
        )
    model(x=torch.ones(4, 6)).sum().backward()
    assert told.index("layers.2") < told.index("gradient 0"), told
    assert sorted(told) == ["gradient 0", "gradient 1", "gradient 2", "layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("how", ["keyword", "nested", "only_mask_none"])
def test_pb108_units_reduce_in_time(how: str) -> None:
    run_ranks(2, _reduces_in_time, how)


# --- PB-111 -----------------------------------------------------------------------------------------------------------


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(6), Block(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _compile(model: Any, what: str, backend: str) -> Any:
    """Return the callable to train, with the root or each child compiled."""
    if what == "root":
        return torch.compile(model, backend=backend)
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def _compiled(what: str, backend: str, order: str) -> list[int]:
    """Train five steps, compiled before or after sharding; return how many graphs there were after each of them."""
    torch._dynamo.reset()
    counters.clear()
    reference = _Blocks()
    model: Any = copy.deepcopy(reference)
    if order == "before":
        callable_ = _compile(model, what, backend)
        shard_layers(model)
    else:
        callable_ = _compile(shard_layers(model), what, backend)
    ours = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    graphs: list[int] = []
    for index in range(5):
        batches = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(index))
        ours.zero_grad()
        callable_(batches[dist.get_rank()]).square().mean().backward()
        assert_at_rest(model)
        theirs.zero_grad()
        for batch in batches:
            (reference(batch).square().mean() / len(batches)).backward()
        gradients = full_gradients(model)
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert_close(gradients[name], parameter.grad, f"gradient of {name} in step {index}")
        ours.step()
        theirs.step()
        graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    return graphs


@pytest.mark.parametrize(
    ("what", "backend", "order"),
    [
        ("children", "eager", "before"),
        ("children", "aot_eager", "after"),
        ("root", "eager", "after"),
        ("root", "aot_eager", "before"),
    ],
)
def test_pb111_compiled_modules_train_alike_without_growing_recompiles(what: str, backend: str, order: str) -> None:
    # Compilation takes seconds, and many of them on a loaded machine.
    for graphs in run_ranks(2, _compiled, what, backend, order, timeout_s=300):
        assert graphs[0] > 0
        assert graphs[1:] == [graphs[1]] * 4
