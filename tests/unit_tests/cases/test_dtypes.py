# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Dtypes: what recomputation sees, several dtypes in one unit, buffers, and gradients unlike their parameters."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from tests.unit_tests.cases.compare import compare_training
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.models import shard_layers
from tests.unit_tests.trace import CollectiveLog

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def _mean_square(module: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = module(batch).float().square().mean()
    loss.backward()
    return loss


# --- PB-093 -----------------------------------------------------------------------------------------------------------


class _Casts(nn.Module):
    """Casts its input to the dtype of its weight, as a block under mixed precision does, and notes what it computes in.

    Main weights are float32: a recomputation that met them would compute in another dtype than forward did.
    """

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(6, 6), inside
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.inside else self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.linear.weight.dtype)
        out = self.linear(x)
        self.seen.append((x.dtype, out.dtype))
        return out.tanh().float()


class _Recomputes(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_Casts(where == "inside") for _ in range(3)])
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.where == "outside" else layer(x)
        return x


def _recompute_dtype(where: str, autocasts: bool) -> None:
    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16, enabled=autocasts):
            loss = module(batch).square().mean()
        loss.backward()
        return loss

    model = _Recomputes(where) if autocasts else _Recomputes(where).to(BF16)
    model = compare_training(model, shard_layers, step)
    for layer in model.layers:
        assert len(layer.seen) == 20
        assert set(layer.seen) == {(FP32, BF16) if autocasts else (BF16, BF16)}


@pytest.mark.parametrize("autocasts", [False, True], ids=["bf16_weights", "autocast"])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_pb093_recomputation_sees_the_dtypes_of_forward(where: str, autocasts: bool) -> None:
    run_ranks(2, _recompute_dtype, where, autocasts)


# --- PB-096 -----------------------------------------------------------------------------------------------------------


class _ManyDtypes(nn.Module):
    """bfloat16 weights, a float32 norm, a float64 router and an integer table, all of one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5).to(BF16)
        self.norm = nn.LayerNorm(5)
        self.router = nn.Linear(5, 6, bias=False).to(FP64)
        self.table = nn.Parameter(torch.arange(1, 7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(self.norm(self.linear(x.to(BF16)).float()).double()) * self.table


MIXED = {"linear.weight": BF16, "linear.bias": BF16, "norm.weight": FP32, "norm.bias": FP32, "router.weight": FP64}


def _many_dtypes(main_dtype: torch.dtype | None, optimizer: str) -> None:
    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mixed_precision_policy=MixedPrecisionPolicy(main_dtype))

    model = compare_training(_ManyDtypes(), shard, _mean_square, optimizer=optimizer, main_dtype=main_dtype)
    (table,) = (group for group in model.parameter_groups if not group.requires_grad)
    assert table.gradients is None
    expected = {name: main_dtype or dtype for name, dtype in MIXED.items()} | {"table": torch.int64}
    assert {name: p.dtype for name, p in model.named_parameters()} == expected
    computed = {}
    for group in model.parameter_groups:
        for name, parameter in zip(group.fqns, group.unsharded_parameters, strict=True):
            computed[name] = parameter.dtype
    assert computed == MIXED | {"table": torch.int64}
    _saves_and_loads(model, shard)


def _saves_and_loads(model: nn.Module, shard: Any) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = shard(_ManyDtypes())
    fresh.load_state_dict(torch.load(file, weights_only=False))
    for (name, found), expected in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), expected.full_tensor()), name  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("main_dtype", [None, FP64])
def test_pb096_each_dtype_of_a_unit_is_kept(main_dtype: torch.dtype | None, optimizer: str) -> None:
    run_ranks(2, _many_dtypes, main_dtype, optimizer)


def _too_narrow() -> None:
    fully_shard(_ManyDtypes())


def test_pb096_main_weights_narrower_than_a_parameter_are_refused() -> None:
    for message in run_ranks_expecting(2, ValueError, _too_narrow):
        assert "expected main_params_dtype at least as wide as torch.float64 of router.weight" in message
        assert "pass None to keep the parameters' dtype" in message


# --- PB-097 -----------------------------------------------------------------------------------------------------------


class _FixedKernel(nn.Module):
    """A convolution whose kernel is a buffer, scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.tensor([[[0.25, 0.5, 0.25]]]))
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.kernel.dtype).unsqueeze(1)
        return nn.functional.conv1d(x, self.kernel, padding=1).squeeze(1) * self.gain


class _WithBuffers(nn.Module):
    """The norm comes first, so that its statistics depend on nothing but the batches of its rank."""

    def __init__(self, buffer_dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.BatchNorm1d(6).to(buffer_dtype), nn.Linear(6, 6).to(BF16), _FixedKernel()])
        self.layers[2].to(BF16)
        self.layers[2].kernel = self.layers[2].kernel.to(buffer_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x.to(self.layers[0].running_mean.dtype))
        return self.layers[2](self.layers[1](x.to(BF16)).tanh())


def _buffers(buffer_dtype: torch.dtype) -> None:
    model = compare_training(_WithBuffers(buffer_dtype), shard_layers, _mean_square)
    norm = nn.BatchNorm1d(6).to(buffer_dtype)
    for index in range(10):
        batches = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(index))
        norm(batches[dist.get_rank()].to(buffer_dtype))
    for name, buffer in norm.named_buffers():
        assert torch.equal(model.layers[0].get_buffer(name), buffer), name
    assert model.layers[0].running_var.dtype is buffer_dtype
    assert model.layers[2].kernel.dtype is buffer_dtype
    plain = _WithBuffers(buffer_dtype).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(model.get_parameter(name).full_tensor())
        for name, buffer in plain.named_buffers():
            buffer.copy_(model.get_buffer(name))
        x = torch.full((2, 6), 1.0 + dist.get_rank())
        assert torch.equal(model.eval()(x), plain(x))


@pytest.mark.parametrize("buffer_dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_pb097_buffers_keep_their_dtype_and_their_ranks_values(buffer_dtype: torch.dtype) -> None:
    run_ranks(2, _buffers, buffer_dtype)


def _policy_per_unit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).to(BF16)
    fully_shard(model[0], mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=BF16))
    fully_shard(model[1], mixed_precision_policy=MixedPrecisionPolicy(None))
    fully_shard(model)
    with CollectiveLog() as log:
        model(torch.ones(4, 6, dtype=BF16)).sum().backward()
    reduced = [entry[1] for entry in log.entries if entry[0] == "reduce_scatter"]
    assert sorted(reduced) == sorted(["torch.float32", "torch.bfloat16", "torch.bfloat16"])
    assert [model[index].weight.dtype for index in range(3)] == [FP32, BF16, FP32]
    assert [model[index].weight.grad.dtype for index in range(3)] == [FP32, BF16, FP32]
    assert {buffer.dtype for buffer in model.buffers()} == {BF16, torch.int64}


def test_pb097_each_unit_has_its_own_policy() -> None:
    run_ranks(2, _policy_per_unit)


# --- PB-103 -----------------------------------------------------------------------------------------------------------

COMBINATIONS = [
    *itertools.product((FP16, BF16, FP32), (None, FP32), (None, BF16, FP32)),
    (FP32, FP64, None),
    (FP32, FP64, FP32),
]
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),  # the default eps is zero in float16
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def _all_gradient_dtypes(rule: str) -> None:
    cls, options = RULES[rule]
    for compute, main, grads in COMBINATIONS:
        torch.manual_seed(0)
        model = nn.Linear(6, 5).to(compute)
        main_dtype = main or compute
        plain = copy.deepcopy(model).to(main_dtype)
        fully_shard(model, mixed_precision_policy=MixedPrecisionPolicy(main, main_grads_dtype=grads))
        optimizer = fully_shard_optimizer(cls(model.parameters(), **options))
        reference = cls(plain.parameters(), **options)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 6, generator=generator).to(compute)).float().square().mean().backward()
            before = [(p.grad, p.grad.full_tensor().clone()) for p in model.parameters()]
            for parameter, (gradient, full) in zip(plain.parameters(), before, strict=True):
                assert gradient.dtype is (grads or main_dtype)
                parameter.grad = full.to(main_dtype)
            optimizer.step()
            reference.step()
            for ours, theirs, (gradient, full) in zip(model.parameters(), plain.parameters(), before, strict=True):
                what = f"{compute} {main} {grads}"
                assert ours.grad is gradient and torch.equal(gradient.full_tensor(), full), what
                assert ours.dtype is main_dtype and torch.equal(ours.full_tensor(), theirs), what
            optimizer.zero_grad()


@pytest.mark.parametrize("rule", RULES)
def test_pb103_every_combination_of_dtypes(rule: str) -> None:
    run_ranks(2, _all_gradient_dtypes, rule)
