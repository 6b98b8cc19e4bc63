# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Norms, zero counts and clipping count each gradient element once, for every layout, with equal bits on all ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    GradientStatistics,
    MixedPrecisionPolicy,
    Placements,
    clip_grad_norm_,
    fully_shard,
    fully_shard_context,
    grad_norm,
    microbatch,
    norms,
)
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_same_on_all_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LAYOUTS: list[tuple[str, str | None, tuple[int, ...]]] = [
    *((strategy, None, (n,)) for strategy in STRATEGIES for n in (1, 3)),
    *((strategy, outer, (2, 2)) for strategy in STRATEGIES for outer in ("no_shard", "optim")),
]
ORDERS = (1.0, 2.0, 3.0, math.inf)
SINGLE = 1e-7
"""A float32 result is that close to the exact one; a replica counted twice, or an element left out, is far away."""


def _named(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _backward(model: nn.Module, reference: Any) -> None:
    """Give both models the gradients of one global batch, of which each rank of `model` has its own share."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = make_batch(reference, 2 * world_size, seed=3)
    if inputs.is_floating_point() and reference.in_features > 1:
        inputs[:, 0] = 0  # so that some gradient elements are zero
    loss_of(model, inputs[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]).backward()
    loss_of(reference, inputs, targets).backward()


def _full(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None]


def _exact(gradients: list[torch.Tensor], order: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat([gradient.double().flatten() for gradient in gradients]), order))


def _check(parameters: list[Any], reference: Any, gradients: list[torch.Tensor]) -> None:
    """Compare norms of every order with those of one process, and with whole gradients to the last bits."""
    for order in ORDERS:
        found = grad_norm(parameters, order)
        assert type(found) is torch.Tensor and found.shape == () and found.dtype is torch.float32
        assert float(found) == pytest.approx(_exact(gradients, order), rel=SINGLE)
        theirs = [p.grad for p in reference.parameters() if p.grad is not None]
        assert float(found) == pytest.approx(_exact(theirs, order), rel=1e-5)
        assert_same_on_all_ranks(found.cpu().numpy().tobytes())


def _check_statistics(parameters: list[Any], gradients: list[torch.Tensor], group: Any) -> None:
    statistics = GradientStatistics(group, torch.device(DEVICE))
    for order in ORDERS:
        assert float(statistics.norm(parameters, order)) == pytest.approx(_exact(gradients, order), rel=1e-14)
        assert_same_on_all_ranks(statistics.norm(parameters, order).cpu().numpy().tobytes())
    assert float(statistics.count_zeros(parameters)) == sum(int((gradient == 0).sum()) for gradient in gradients)
    counted = torch.tensor(sum(gradient.numel() for gradient in statistics.counted_gradients(parameters)))
    dist.all_reduce(counted, group=group)
    assert counted == sum(gradient.numel() for gradient in gradients)


def _layout(strategy: str, outer: str | None, shape: tuple[int, ...], model_name: str) -> None:
    mesh, placements = init_device_mesh(DEVICE, shape), Placements.from_strategy(strategy, outer=outer)
    model, reference = build(model_name), build(model_name)
    shard_layers(model, mesh=mesh, placements=placements)
    _backward(model, reference)
    parameters, gradients = list(model.parameters()), _full(model)
    _check(parameters, reference, gradients)
    _check_statistics(parameters, gradients, dist.group.WORLD)
    if len(shape) == 2 and outer == "no_shard":
        # Each group of the inner axis holds one replica: all elements, and copies of them elsewhere.
        _check_statistics(parameters, gradients, mesh.get_group(1))
    norm = clip_grad_norm_(parameters, 0.05)
    assert norm > 0.05
    for parameter, gradient in zip((p for p in parameters if p.grad is not None), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient * (0.05 / (norm + 1e-6)))


@pytest.mark.parametrize(("strategy", "outer", "shape"), LAYOUTS, ids=_named)
def test_pb038_replicas_count_once(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    run_ranks(math.prod(shape), _layout, strategy, outer, shape, "mlp")


@pytest.mark.parametrize("model_name", ["tied", "frozen", "one_element"])
@pytest.mark.parametrize(
    ("strategy", "outer", "shape"),
    [*((strategy, None, (3,)) for strategy in STRATEGIES), ("optim", "no_shard", (2, 2)), ("optim", "optim", (2, 2))],
    ids=_named,
)
def test_pb039_tied_frozen_and_empty_ones_count_once(
    strategy: str, outer: str | None, shape: tuple[int, ...], model_name: str
) -> None:
    run_ranks(math.prod(shape), _layout, strategy, outer, shape, model_name)


class _Mixed(nn.Module):
    """Units that lie in five ways, some of their parameters frozen, one of a single element, and one outside of all."""

    in_features = out_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.layers[1].bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.gain


def _mixed() -> None:
    torch.manual_seed(0)
    model = _Mixed()
    reference = copy.deepcopy(model)
    flat, square = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2))
    layouts = [
        (flat, Placements.from_strategy("optim_grads_params")),
        (square, Placements.from_strategy("optim_grads", outer="no_shard")),
        (flat, Placements.from_strategy("no_shard")),
        (square, Placements.from_strategy("optim_grads_params", outer="optim")),
        (square, Placements.from_strategy("optim", outer="no_shard")),
        (flat, Placements.from_strategy("optim_grads_params")),
    ]
    with fully_shard_context(DEVICE):
        for unit, (mesh, placements) in zip([*model.layers, model], layouts, strict=True):
            fully_shard(unit, mesh, placements)
    _backward(model, reference)
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.tensor([3.0, 0.0, -4.0])
    reference.plain = nn.Parameter(torch.zeros(3))
    reference.plain.grad = plain.grad.clone()
    parameters, gradients = [*model.parameters(), plain], [*_full(model), plain.grad.clone()]
    assert len(gradients) == 5 * 2 - 1 + 2
    _check(parameters, reference, gradients)
    _check_statistics(parameters, gradients, dist.group.WORLD)
    assert float(clip_grad_norm_(parameters, 0.5)) > 0.5
    assert float(grad_norm(parameters)) == pytest.approx(0.5, rel=1e-5)
    assert float(torch.linalg.vector_norm(plain.grad)) < 0.5


def test_pb038_units_on_several_meshes_in_one_model() -> None:
    run_ranks(4, _mixed)


def test_pb039_plain_and_frozen_parameters_beside_every_strategy() -> None:
    """The model of `test_pb038_units_on_several_meshes_in_one_model` has them, too; here plain ones come in between."""
    run_ranks(2, _plain_in_between)


def _plain_in_between() -> None:
    for strategy in STRATEGIES:
        model, reference = build("mlp"), build("mlp")
        shard_layers(model, placements=Placements.from_strategy(strategy))
        model.layers[1].requires_grad_(False)
        reference.layers[1].requires_grad_(False)
        _backward(model, reference)
        parameters: list[Any] = []
        for index, parameter in enumerate(model.parameters()):
            plain = nn.Parameter(torch.zeros(2))
            plain.grad = torch.tensor([float(index), 0.0])
            parameters += [parameter, plain]
            reference.register_parameter(f"plain{index}", nn.Parameter(torch.zeros(2)))
            reference.get_parameter(f"plain{index}").grad = plain.grad.clone()
        gradients = _full(model) + [p.grad for p in parameters[1::2]]
        _check(parameters, reference, gradients)
        _check_statistics(parameters, gradients, dist.group.WORLD)


def _dtypes() -> None:
    """Gradients of several dtypes add up to one norm; float64 parameters have a float64 norm."""
    model, reference = build("mlp").double(), build("mlp").double()
    shard_layers(model, mixed_precision_policy=MixedPrecisionPolicy(None))
    rank = dist.get_rank()
    inputs, targets = make_batch(reference, 4, seed=0)
    loss_of(model, inputs[2 * rank : 2 * rank + 2].double(), targets[2 * rank : 2 * rank + 2]).backward()
    norm = grad_norm(list(model.parameters()))
    assert norm.dtype is torch.float64 and float(norm) == pytest.approx(_exact(_full(model), 2.0), rel=1e-14)

    mixed = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fully_shard(mixed[0], mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16))
    fully_shard(mixed)
    mixed(torch.full((1, 6), rank + 1.0)).square().sum().backward()
    gradients = _full(mixed)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16, torch.float32}
    parameters = list(mixed.parameters())
    for order in ORDERS:
        assert float(grad_norm(parameters, order)) == pytest.approx(_exact(gradients, order), rel=SINGLE)
    _check_statistics(parameters, gradients, dist.group.WORLD)
    norm = clip_grad_norm_(parameters, 0.5)
    assert {p.grad.dtype for p in parameters} == {torch.bfloat16, torch.float32} and norm > 0.5
    assert float(grad_norm(parameters)) == pytest.approx(0.5, rel=2**-8)


def test_gradients_of_several_dtypes() -> None:
    run_ranks(2, _dtypes)


def test_large_and_small_gradients_take_different_ways() -> None:
    """Small ones are joined for the norm, large ones are not."""
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in (3, norms._SMALL_NUMEL, 7, 1, norms._SMALL_NUMEL + 1)]
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    every = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for chosen in ([0], [1], [0, 1], [0, 2], [1, 4], [0, 1, 2, 3, 4]):
        for order in ORDERS:
            found = grad_norm([parameters[index] for index in chosen], order)
            assert float(found) == pytest.approx(_exact([every[index] for index in chosen], order), rel=SINGLE)


def _nan_on_one_rank(strategy: str) -> None:
    """A maximum over ranks must not lose a nan, as backends' own maxima may."""
    model = shard_layers(build("mlp"), placements=Placements.from_strategy(strategy))
    _backward(model, build("mlp"))
    if dist.get_rank() == 1:
        model.layers[1].weight.grad.to_local().view(-1)[-1] = math.nan
    parameters = list(model.parameters())
    statistics = GradientStatistics(dist.group.WORLD, torch.device(DEVICE))
    for order in ORDERS:
        if strategy != "no_shard":
            assert math.isnan(grad_norm(parameters, order))
        # A copy that is not the first one does not count; that ranks agree on overflows is the optimizer's to see to.
        assert math.isnan(statistics.norm(parameters, order)) == (strategy != "no_shard")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_on_one_rank_is_everyones(strategy: str) -> None:
    run_ranks(2, _nan_on_one_rank, strategy)


def _no_parameters() -> None:
    statistics = GradientStatistics(dist.group.WORLD, torch.device(DEVICE))
    model = shard_layers(build("one_element"))
    mine = list(model.parameters()) if dist.get_rank() == 0 else []
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.tensor([3.0, 0.0])
    assert float(statistics.norm(mine)) == float(statistics.count_zeros(mine)) == 0
    # Rank 0 has one parameter more than the others, as the ranks of a pipeline do.
    assert float(statistics.norm([plain] if dist.get_rank() == 0 else [])) == 3
    assert float(statistics.count_zeros([plain])) == 1


def test_ranks_without_parameters_take_part() -> None:
    run_ranks(2, _no_parameters)


def _small_group() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2))
    model = shard_layers(
        build("mlp"), mesh=mesh, placements=Placements.from_strategy("optim_grads_params", outer="optim")
    )
    GradientStatistics(mesh.get_group(1), torch.device(DEVICE)).norm(list(model.parameters()))


def test_a_group_without_all_shards_is_refused() -> None:
    for message in run_ranks_expecting(4, ValueError, _small_group):
        assert "expected a process group with all ranks that shard the gradients, got one of 2 ranks" in message
        assert "Give the optimizer a larger grad_stats_parallel_group" in message


def _waiting() -> None:
    model = shard_layers(build("mlp"), placements=Placements.from_strategy("optim"))
    with microbatch(model.context, is_last=False):
        _backward(model, build("mlp"))
    statistics = GradientStatistics(dist.group.WORLD, torch.device(DEVICE))
    for ask in (grad_norm, statistics.norm, statistics.count_zeros, statistics.counted_gradients):
        with pytest.raises(RuntimeError, match=r"gradient norm of .*: expected reduced gradients.*is_last=True"):
            ask(list(model.parameters()))


def test_gradients_that_wait_are_not_overlooked() -> None:
    run_ranks(2, _waiting)


def _ranks_of_spreads() -> list[tuple[set[int], set[int]]]:
    mesh = init_device_mesh(DEVICE, (2, 2))
    return [norms._Spread(mesh, axes).ranks() for axes in ((1,), (0,), (1, 0), ())]


def test_ranks_that_shard_and_that_hold_copies() -> None:
    found = run_ranks(4, _ranks_of_spreads)
    assert found[1] == [({0, 1}, {1, 3}), ({1, 3}, {0, 1}), ({0, 1, 2, 3}, {1}), ({1}, {0, 1, 2, 3})]
    assert found[2] == [({2, 3}, {0, 2}), ({0, 2}, {2, 3}), ({0, 1, 2, 3}, {2}), ({2}, {0, 1, 2, 3})]
