# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon on sharded parameters against a loop over whole matrices in one process: the same bits after ten steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import (
    STRATEGIES,
    MixedPrecisionPolicy,
    Placements,
    check_ranks,
    fully_shard,
    fully_shard_muon,
    microbatch,
)
from tests.unit_tests.launch import lasting_mesh, run_ranks
from tests.unit_tests.matrix_oracle import PlainMuon, build_net, loss_of_net, step_plainly

NUM_STEPS = 10
SMALL_PACKAGES = 2500
"""Bytes: the matrices of `Net` travel in several packages."""


def _rest(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003, weight_decay=0.1)


def _reference(world_size: int, muon: PlainMuon, dtype: torch.dtype = torch.float32, microbatches: int = 1) -> Any:
    """Return the weights and momenta of training on the samples of all ranks."""
    model = build_net(world_size, dtype)
    named = dict(model.named_parameters())
    rest = _rest([p for p in named.values() if p.ndim == 1])
    momenta: dict[Any, torch.Tensor] = {}
    flattened = {layer.kernel.weight: lambda kernel: [kernel.flatten(1)] for layer in model.layers}
    for step in range(NUM_STEPS):
        model.zero_grad()
        for rank in range(world_size):
            for index in range(microbatches):
                loss_of_net(model, step, rank, index).backward()
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad.div_(world_size)
        step_plainly([p for p in named.values() if p.ndim > 1], momenta, muon, flattened)
        rest.step()
    return _collected({name: p.detach() for name, p in named.items()}, {n: momenta.get(p) for n, p in named.items()})


def _collected(weights: dict[str, torch.Tensor], momenta: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"{name}.momentum": value for name, value in momenta.items() if value is not None}
    return weights | found


def _shard(world_size: int, strategy: str, outer: str | None = None, policy: Any = None, dtype: Any = None) -> Any:
    mesh = lasting_mesh((world_size,) if outer is None else (2, world_size // 2))
    options = {"mesh": mesh, "placements": Placements.from_strategy(strategy, outer=outer)}
    model: Any = build_net(world_size, dtype or torch.float32)
    for layer in (*model.layers, model.spare):
        fully_shard(layer, mixed_precision_policy=policy, **options)
    return fully_shard(model, mixed_precision_policy=policy, **options)


def _settings(muon: PlainMuon) -> dict[str, Any]:
    travel = None if muon.travel_dtype is torch.float32 else muon.travel_dtype
    return {
        "momentum": muon.momentum,
        "nesterov": muon.nesterov,
        "weight_decay": muon.weight_decay,
        "decoupled_weight_decay": muon.is_decoupled,
        "momentum_dtype": muon.momentum_dtype,
        "travel_dtype": travel,
        "coefficients": muon.coefficients,
        "scale_mode": muon.scale,
        "extra_scale_factor": muon.extra_scale,
    }


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: Any) -> None:
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    different = [name for name, value in expected.items() if not torch.equal(found[name].cpu(), value.cpu())]
    assert not different, (what, different)


def _train(
    muon: PlainMuon,
    strategy: str,
    outer: str | None,
    package_bytes: int = SMALL_PACKAGES,
    microbatches: int = 1,
    policy: Any = None,
    dtype: Any = None,
) -> dict[str, torch.Tensor]:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = _shard(world_size, strategy, outer, policy, dtype)
    optimizer = fully_shard_muon(
        model, muon.lr, rest=_rest, report=None, package_bytes=package_bytes, **_settings(muon)
    )
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for index in range(microbatches):
            with microbatch(model._fsdp_context, is_last=index == microbatches - 1):
                loss_of_net(model, step, rank, index).backward()
        optimizer.step()
    _assert_travelled(optimizer, strategy, package_bytes)
    momenta = {
        name: optimizer.state_dict()["state"][index].get("momentum_buffer")
        for index, name in enumerate(_names_in_order(model, optimizer))
        if index in optimizer.state_dict()["state"]
    }
    return _collected(
        {name: p.full_tensor() for name, p in model.named_parameters()},
        {name: None if value is None else value.full_tensor() for name, value in momenta.items()},
    )


def _assert_travelled(optimizer: Any, strategy: str, package_bytes: int) -> None:
    """Without these the comparisons would show little."""
    (work,) = optimizer.works
    shards = [{shard for shard, _, _ in matrix.ranges} for matrix in work.plan.matrices]
    num_shards = 1 + max(place.shard for place in work.plan.places)
    assert num_shards > 1 or strategy == "no_shard" or dist.get_world_size() == 1
    if num_shards > 1:
        assert work.plan.travelling_numel > 0 and min(map(len, shards)) == 1
        assert max(map(len, shards)) >= min(num_shards, 3), "one matrix straddles several borders"
    if package_bytes == SMALL_PACKAGES:
        assert len(work.plan.rounds) > 1


def _names_in_order(model: Any, optimizer: Any) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _compare(expected: Any, runs: list[tuple[Any, ...]]) -> None:
    for index, run in enumerate(runs):
        _assert_equal(_train(*run), expected[index], run)


MUON, PLAIN_MOMENTUM = PlainMuon(), PlainMuon(nesterov=False)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_and_momenta_are_those_of_whole_matrices(world_size: int) -> None:
    outers = (None,) if world_size < 4 else (None, "no_shard", "optim")
    references = {muon: run_ranks(1, _reference, world_size, muon)[0] for muon in (MUON, PLAIN_MOMENTUM)}
    meshes = [(strategy, outer) for outer in outers for strategy in STRATEGIES]
    if world_size < 4:
        runs = [(muon, *mesh) for mesh in meshes for muon in references]
    else:  # in turns: what the rule is makes no difference to a mesh
        runs = [((MUON, PLAIN_MOMENTUM)[(index + index // 4) % 2], *mesh) for index, mesh in enumerate(meshes)]
    run_ranks(world_size, _compare, [references[run[0]] for run in runs], runs)


VARIANTS = {
    "l2": PlainMuon(is_decoupled=False),
    "no_decay": PlainMuon(weight_decay=0.0, momentum=0.5),
    "bf16_momentum": PlainMuon(momentum_dtype=torch.bfloat16),
    "bf16_momentum_without_nesterov": PlainMuon(momentum_dtype=torch.bfloat16, nesterov=False),
    "bf16_travel": PlainMuon(travel_dtype=torch.bfloat16),
    "bf16_travel_and_momentum": PlainMuon(travel_dtype=torch.bfloat16, momentum_dtype=torch.bfloat16),
    "scaled": PlainMuon(coefficients="simple", scale="shape_scaling", extra_scale=0.3),
}


def test_settings_mean_what_they_mean_in_one_process() -> None:
    references = [run_ranks(1, _reference, 2, muon)[0] for muon in VARIANTS.values()]
    for index, name in enumerate(VARIANTS):  # each of them makes a difference
        assert not any(torch.equal(references[index]["head"], other["head"]) for other in references[:index]), name
    runs = [(muon, STRATEGIES[1 + index % 3], None) for index, muon in enumerate(VARIANTS.values())]
    run_ranks(2, _compare, references, runs)


def test_microbatches_are_accumulated() -> None:
    expected = run_ranks(1, _reference, 2, MUON, torch.float32, 2)[0]
    runs = [(MUON, strategy, None, SMALL_PACKAGES, 2) for strategy in STRATEGIES]
    run_ranks(2, _compare, [expected] * len(runs), runs)


def test_main_weights_in_bfloat16() -> None:
    """Two ranks only: a sum of two bfloat16 numbers is the same in any order, one of more is not."""
    muons = (MUON, PlainMuon(momentum_dtype=torch.bfloat16, travel_dtype=torch.bfloat16, is_decoupled=False))
    expected = [run_ranks(1, _reference, 2, muon, torch.bfloat16)[0] for muon in muons]
    runs = [
        (m, "optim_grads_params", None, SMALL_PACKAGES, 1, MixedPrecisionPolicy(None), torch.bfloat16) for m in muons
    ]
    run_ranks(2, _compare, expected, runs)


def test_the_size_of_packages_changes_no_bit() -> None:
    expected = run_ranks(1, _reference, 3, MUON)[0]
    runs = [(MUON, "optim_grads_params", None, package_bytes) for package_bytes in (1, 1000, 1 << 30)]
    run_ranks(3, _compare, [expected] * len(runs), runs)


def _checked() -> None:
    with check_ranks(60):
        _train(MUON, "optim_grads_params", "optim")


def test_ranks_agree_on_their_exchanges() -> None:
    run_ranks(4, _checked)
