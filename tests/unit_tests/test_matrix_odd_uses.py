# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What users do with matrix optimizers between steps: settings, groups, copies, precisions, torch's state dicts."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.core.distributed.fsdp.experimental import Muon, fully_shard, fully_shard_muon
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.matrix_oracle import give_gradients, weight_of


class FusedAdam(torch.optim.AdamW):
    """Stands for TransformerEngine's, whose lists of tensors may not end with one without elements."""


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers"


def _weights(num: int, layers: int, rest: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_muon(model, 0.01, rest=rest, report=None)
    for step in range(num):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 16, generator=generator)).square().sum().backward()
        optimizer.step()
    return [parameter.full_tensor() for parameter in model.parameters()]


def _fused_rest(layers: int) -> None:
    plain = _weights(3, layers, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    fused = _weights(3, layers, lambda parameters: FusedAdam(parameters, lr=0.01))
    assert all(map(torch.equal, plain, fused))


@pytest.mark.parametrize("world_size", [2, 3])
def test_matrices_keep_their_order_beside_a_fused_optimizer(world_size: int) -> None:
    """Which shards are empty differs between ranks: sorted by it, ranks would send each other other matrices."""
    for layers in (2, 5):
        run_ranks(world_size, _fused_rest, layers)


def _bad_setting(name: str, value: Any) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 5))
    optimizer = fully_shard_muon(model, 0.01, report=None)
    model(torch.randn(3, 6)).sum().backward()
    before = [parameter.full_tensor() for parameter in model.parameters()]
    optimizer.param_groups[0][name] = value
    try:
        optimizer.step()
    finally:
        assert all(map(torch.equal, before, [p.full_tensor() for p in model.parameters()])) and not optimizer.state


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("coefficients", "typo", "muon coefficients: expected one of"),
        ("scale_mode", "typo", "muon scale_mode: expected one of"),
        ("num_ns_steps", 0, "muon num_ns_steps: expected an int from 1 to 99, got 0"),
        ("momentum", 1.5, "muon momentum: expected in [0, 1), got 1.5"),
        ("momentum_dtype", torch.float16, "muon momentum_dtype: expected float32 or bfloat16"),
        ("lr", torch.tensor([0.1]), "muon lr: expected a number >= 0 or a 0-d tensor"),
        ("lr", -1.0, "muon lr: expected a number >= 0 or a 0-d tensor, got -1.0"),
    ],
)
def test_settings_are_checked_at_each_step_on_every_rank_before_anything_moves(
    name: str, value: Any, message: str
) -> None:
    for text in run_ranks_expecting(2, ValueError, _bad_setting, name, value):
        assert message in text


def test_settings_that_are_missing_or_have_no_meaning_are_not_loaded() -> None:
    weight = weight_of(4, 6)
    optimizer, saved = Muon([weight]), Muon([weight]).state_dict()
    for name, value in (("num_ns_steps", 0), ("momentum", 7.0)):
        bad = copy.deepcopy(saved)
        bad["param_groups"][0][name] = value
        with pytest.raises(ValueError, match=f"muon {name}: expected"):
            optimizer.load_state_dict(bad)
    del saved["param_groups"][0]["coefficients"]
    with pytest.raises(ValueError, match=r"muon settings: expected all of .*, got none for \['coefficients'\]"):
        optimizer.load_state_dict(saved)


def test_how_parameters_hold_matrices_is_not_loaded() -> None:
    optimizer = Muon([{"params": [weight_of(12, 4)], "parts": (6, 6)}])
    optimizer.load_state_dict(Muon([weight_of(12, 4)], momentum=0.5).state_dict())
    assert optimizer.param_groups[0]["parts"] == (6, 6) and optimizer.param_groups[0]["momentum"] == 0.5


def test_a_replaced_group_counts() -> None:
    weight = weight_of(4, 6)
    optimizer = Muon([weight], lr=0.1)
    give_gradients([weight], 0)
    optimizer.step()
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.0}
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, before)


def test_copies_and_pickles_step_as_the_original() -> None:
    weights = [weight_of(4, 6), nn.Parameter(torch.ones(3))]
    optimizer = Muon(weights[:1], lr=0.1, rest=torch.optim.AdamW(weights[1:], lr=0.1))
    give_gradients(weights, 0)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = [parameter for group in other.param_groups for parameter in group["params"]]
        assert other.rest is not optimizer.rest and other.rest.param_groups[0] is other.param_groups[1]
        ours = copy.deepcopy(weights)
        for parameter, same in zip(theirs, ours, strict=True):
            assert torch.equal(parameter, same) and parameter is not same
        give_gradients(theirs, 1)
        other.step()
        assert not any(map(torch.equal, theirs, ours))


def _names_of_dtypes() -> dict[str, Any]:
    model = fully_shard(nn.Linear(6, 5))
    optimizer = fully_shard_muon(model, 0.01, report=None, travel_dtype=torch.bfloat16)
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    assert optimizer.rest.state is optimizer.state
    optimizer.load_state_dict(optimizer.state_dict())
    group = optimizer.param_groups[0]
    assert (group["momentum_dtype"], group["travel_dtype"]) == (torch.float32, torch.bfloat16)
    found = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert all(torch.is_tensor(value) for value in found["state"]["weight"].values())
    return {key: value for key, value in found["param_groups"][0].items() if key.endswith("_dtype")}


def test_torchs_full_optimizer_state_has_names_of_dtypes() -> None:
    for found in run_ranks(2, _names_of_dtypes):
        assert found == {"momentum_dtype": "float32", "travel_dtype": "bfloat16"}


def test_other_parameters_may_be_added_to_the_rest() -> None:
    matrix, bias, late = weight_of(4, 6), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer: Any = Muon([matrix], lr=0.1, rest=torch.optim.AdamW([bias], lr=0.1))
    optimizer.add_param_group({"params": [late], "lr": 0.2, "algorithm": "AdamW"})
    assert optimizer.param_groups[-1] is optimizer.rest.param_groups[-1] and optimizer.param_groups[-1]["lr"] == 0.2
    late.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    assert late.grad is None and not torch.equal(late, torch.ones(2))
    optimizer.load_state_dict(optimizer.state_dict())


def test_hooks_of_all_optimizers_are_told_of_one_step() -> None:
    weights = [weight_of(4, 6), nn.Parameter(torch.ones(3))]
    optimizer = Muon(weights[:1], rest=torch.optim.AdamW(weights[1:]))
    give_gradients(weights, 0)
    seen: list[str] = []
    handle = register_optimizer_step_post_hook(lambda stepped, args, kwargs: seen.append(type(stepped).__name__))
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert seen == ["Muon"]


def test_float64_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"parameter 0 of param_groups\[0\]: expected float32 or narrower, got 'float64'"
    ):
        Muon([weight_of(4, 6).double().detach()])


def test_packages_are_kept_for_a_few_sets_of_gradients() -> None:
    weights = [weight_of(4, 6) for _ in range(8)]
    optimizer = Muon(weights)
    for mask in range(1, 60):
        for index, weight in enumerate(weights):
            weight.grad = torch.ones_like(weight) if mask >> index & 1 else None
        optimizer.step()
    (work,) = optimizer.works
    assert len(work._pipeline._rounds) <= 16


NEW_PRECISION = """
import torch
from megatron.core.distributed.fsdp.experimental import Muon
torch.backends.cuda.matmul.fp32_precision = "tf32"
for precision in ("medium", "high", "highest"):
    weight = torch.nn.Parameter(torch.randn(4, 6))
    weight.grad = torch.randn(4, 6)
    Muon([weight], precision=precision).step()
print(torch.backends.cuda.matmul.fp32_precision)
"""


def test_programs_that_use_torchs_newer_precisions_can_step() -> None:
    done = subprocess.run([sys.executable, "-c", NEW_PRECISION], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "tf32"
