# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers that write their weights' gradients themselves train as those that leave them to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from tests.unit_tests.launch import lasting_mesh, run_ranks
from tests.unit_tests.mcore import build_tower, start, tower_loss, wrap
from tests.unit_tests.oracle import assert_at_rest, full_gradients

WIDTH = 6


class Product(nn.Linear):
    """megatron-core's linear layer; `fuses` is its gradient_accumulation_fusion."""

    fuses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = linear_with_grad_accumulation_and_async_allreduce(
            x, self.weight, self.bias, self.fuses, False, False, tp_group=dist.group.WORLD
        )
        return out


class Twice(nn.Module):
    """One layer used twice, so that a backward writes its gradient twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Product(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.tanh(self.layer(x)))
        return out


class Shared(nn.Module):
    """A weight that autograd gives a gradient, too, as an embedding that is shared with the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Product(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(torch.arange(len(x)) % WIDTH, self.layer.weight)
        out: torch.Tensor = self.layer(x + rows)
        return out


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "once": lambda: nn.Sequential(Product(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
    "twice": Twice,
    "shared": Shared,
    "idle": lambda: nn.Sequential(Product(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
}
STRATEGIES: list[tuple[str, str | None]] = [
    ("no_shard", None),
    ("optim", None),
    ("optim_grads", None),
    ("optim_grads_params", None),
    ("optim_grads_params", "no_shard"),
]


def _model(block: str, strategy: str, outer: str | None, fuses: bool, policy: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    model: Any = nn.Sequential(*[BLOCKS[block]() for _ in range(3)]).to(dtype)
    for layer in model.modules():
        layer.fuses = fuses
    mesh = lasting_mesh((dist.get_world_size(),) if outer is None else (2, dist.get_world_size() // 2))
    with fully_shard_context():
        for unit in (*model, model):
            fully_shard(unit, mesh, Placements.from_strategy(strategy, outer=outer), policy)
    return model


def _train(model: Any, microbatches: int, syncs: bool, skips: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two steps' worth of gradients; without `syncs` the first is held back, with `skips` one misses a layer."""
    for index in range(2 * microbatches):
        torch.manual_seed(100 * index + dist.get_rank())
        model.set_requires_gradient_sync(syncs or index >= microbatches)
        x = torch.randn(5, WIDTH).to(dtype)
        with microbatch(model.context, is_last=index % microbatches == microbatches - 1):
            layers = [model[0], model[2]] if skips and index == 1 else list(model)
            out = model(x) if len(layers) == 3 else layers[1](layers[0](x))
            (out.float() - torch.linspace(-1, 2, WIDTH)).square().mean().backward()
        assert_at_rest(model)
    return full_gradients(model)


def _compare(block: str, strategy: str, outer: str | None) -> None:
    float32, bfloat16 = torch.float32, torch.bfloat16
    narrow = MixedPrecisionPolicy(float32, main_grads_dtype=float32, grad_comm_dtype=bfloat16)
    for dtype, policy in ((float32, None), (bfloat16, narrow)):
        for microbatches, syncs in ((1, True), (3, True), (3, False)):
            models = [_model(block, strategy, outer, fuses, policy, dtype) for fuses in (True, False)]
            fused, plain = (_train(model, microbatches, syncs, block == "idle", dtype) for model in models)
            limit = {"rtol": 1e-5, "atol": 1e-6} if dtype is float32 else {"rtol": 0.02, "atol": 0.004}
            assert all(float(gradient.abs().max()) > 1e-4 for gradient in plain.values())
            for name, gradient in fused.items():
                torch.testing.assert_close(gradient, plain[name], **limit, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("strategy", "outer"), STRATEGIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_pb016_fused_gradients_are_those_of_autograd(block: str, strategy: str, outer: str | None) -> None:
    run_ranks(2 if outer is None else 4, _compare, block, strategy, outer)


def _places() -> None:
    """The first writer of a backward gets its place in the packed buffer, and nothing stays behind an exception."""
    model = _model("twice", "optim_grads_params", None, True, None, torch.float32)
    group = model[0].parameter_groups[0]
    seen: list[bool] = []
    full = group.gradients.at.full
    for parameter in group.unsharded_parameters:
        ask = parameter.get_main_grad

        def watched(ask: Any = ask) -> torch.Tensor:
            place: torch.Tensor = ask()
            seen.append(place.untyped_storage().data_ptr() == full.local.untyped_storage().data_ptr())
            return place

        parameter.get_main_grad = watched
    model(torch.ones(2, WIDTH)).sum().backward()
    assert seen == [True, False]

    def fail(grad: Any) -> None:
        raise ArithmeticError("in the middle")

    x = torch.ones(2, WIDTH, requires_grad=True)
    model.zero_grad()
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    model.zero_grad()
    again = _train(model, 1, True, False, torch.float32)
    fresh = _train(
        _model("twice", "optim_grads_params", None, True, None, torch.float32), 1, True, False, torch.float32
    )
    assert all(torch.equal(gradient, fresh[name]) for name, gradient in again.items())


def test_places_are_in_the_buffer_that_is_sent() -> None:
    run_ranks(2, _places)


def _adapter() -> None:
    start()
    towers = [build_tower(), build_tower()]
    gradients = []
    for tower, fuses in zip(towers, (True, False), strict=True):
        tower.config.gradient_accumulation_fusion = fuses
        for layer in tower.modules():
            if isinstance(layer, nn.Linear):
                layer.__class__, layer.fuses = Product, fuses  # type: ignore[assignment]
        chunk = wrap(tower, fsdp_unit_modules=[Product])
        tower_loss(chunk.module, 1, 0, dist.get_rank()).backward()
        gradients.append(full_gradients(chunk))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6)
    narrow = build_tower(torch.bfloat16)
    narrow.config.gradient_accumulation_fusion = True
    with pytest.raises(ValueError, match=r"gradient_accumulation_fusion: expected gradients sent in torch.bfloat16"):
        wrap(narrow, grad_reduce_in_fp32=True)


def test_adapter_takes_models_with_fused_gradients() -> None:
    run_ranks(2, _adapter)
