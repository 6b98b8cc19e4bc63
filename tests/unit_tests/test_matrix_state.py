# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What matrix optimizers keep between steps, what a step takes besides, and what of it a state dict brings back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Muon,
    fully_shard,
    fully_shard_muon,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.experimental import matrix_pipeline as pipeline
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.matrix_oracle import PlainMuon, give_gradients, step_plainly, weight_of

# --- memory -----------------------------------------------------------------------------------------------------------


def _buffers(package_bytes: int, precision: str) -> dict[str, Any]:
    """Return what the buffers of a step are said to take, and what was allocated for them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(20, 30, bias=False) if i % 2 else nn.Linear(30, 20) for i in range(8)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_muon(model, 0.1, report=None, package_bytes=package_bytes, precision=precision)
    model(torch.randn(2, 30)).sum().backward()
    allocated: list[torch.Tensor] = []
    original = pipeline._Slot

    def keep(buffers: dict[str, torch.Tensor], names: dict[str, str]) -> Any:
        allocated.extend(buffers.values())
        return original(buffers, names)

    pipeline._Slot = keep  # type: ignore[misc, assignment]
    try:
        optimizer.step()
    finally:
        pipeline._Slot = original  # type: ignore[misc]
    (work,) = optimizer.works
    assert len({tensor.untyped_storage().data_ptr() for tensor in allocated if tensor.numel()}) == sum(
        tensor.numel() > 0 for tensor in allocated
    )
    # Every element of two packages is here once as it travels and once as a result, on the owner and, if it is spread,
    # on who holds it: 64 elements of alignment for each message besides.
    result_itemsize = 2 if precision == "medium" else 4
    numel, messages = package_bytes // 4, 4 * len(work.names)
    largest = max(numel, 600)
    bound = 2 * (2 * largest + 64 * messages) * (4 + result_itemsize)
    return {
        "said": work.buffer_bytes,
        "found": sum(tensor.untyped_storage().nbytes() for tensor in allocated),
        "bound": bound,
        "rounds": len(work.plan.rounds),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buffers_take_what_is_said_and_no_more_than_two_packages(world_size: int) -> None:
    for precision in ("medium", "highest"):
        few, many = (run_ranks(world_size, _buffers, size, precision) for size in (2600, 1 << 20))
        for found in (*few, *many):
            assert found["found"] == found["said"] > 0 and found["said"] <= found["bound"], found
        assert few[0]["rounds"] > 1 and many[0]["rounds"] == 1
        assert max(found["said"] for found in few) < max(found["said"] for found in many) or world_size == 3


# --- state ------------------------------------------------------------------------------------------------------------


def _stepped(model: Any, seed: int, **settings: Any) -> Any:
    optimizer = fully_shard_muon(model, 0.1, report=None, **settings)
    _backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _backward(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    dtype = next(model.parameters()).dtype
    model(torch.randn(3, 6, generator=generator).to(dtype)).float().square().sum().backward()


def _build(dtype: torch.dtype = torch.float32, main: torch.dtype | None = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).to(dtype)
    policy = MixedPrecisionPolicy(main)
    for layer in (model[0], model[2]):
        fully_shard(layer, mixed_precision_policy=policy)
    return fully_shard(model, mixed_precision_policy=policy)


def _round_trip(dtype: torch.dtype, momentum_dtype: torch.dtype) -> None:
    """A run that is loaded goes on as the one that was saved, bit by bit; also with another dtype of the momenta."""
    model = _build(dtype, None)
    optimizer = _stepped(model, 0, momentum_dtype=momentum_dtype, weight_decay=0.2)
    other = _build(dtype, None)
    loaded = _stepped(other, 5, momentum_dtype=torch.bfloat16, weight_decay=0.3, precision="highest")
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(copy.deepcopy({n: p.detach() for n, p in model.named_parameters()}))
    loaded.load_state_dict(saved)
    for ours, theirs in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine, found = optimizer.state[ours], loaded.state[theirs]
        assert mine.keys() == found.keys()
        for key, value in mine.items():
            assert torch.equal(value, found[key]) and value.dtype is found[key].dtype, (key, found[key].dtype)
    for seed in (1, 2):
        for each, stepped in ((model, optimizer), (other, loaded)):
            _backward(each, seed)
            stepped.step()
            stepped.zero_grad()
    assert all(
        torch.equal(p.full_tensor(), q.full_tensor())
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_go_on_as_they_were_saved(dtype: torch.dtype, momentum_dtype: torch.dtype) -> None:
    run_ranks(2, _round_trip, dtype, momentum_dtype)


def test_plain_state_dicts_go_on_as_they_were_saved() -> None:
    ours, theirs = weight_of(6, 4).to(torch.bfloat16).detach(), weight_of(6, 4).to(torch.bfloat16).detach()
    optimizer, loaded = Muon([ours]), Muon([theirs], momentum=0.5)
    give_gradients([ours], 0)
    optimizer.step()
    theirs.copy_(ours)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    momentum = loaded.state[theirs]["momentum_buffer"]
    assert momentum.dtype is torch.float32 and torch.equal(momentum, optimizer.state[ours]["momentum_buffer"])
    for each, stepped in ((ours, optimizer), (theirs, loaded)):
        give_gradients([each], 1)
        stepped.step()
    assert torch.equal(ours, theirs)


def test_state_of_another_rule_is_refused_by_plain_optimizers() -> None:
    weight = weight_of(6, 4)
    muon, adamw = Muon([weight]), torch.optim.AdamW([weight])
    with pytest.raises(ValueError) as raised:
        muon.load_state_dict(adamw.state_dict())
    assert str(raised.value) == (
        "optimizer state of param_groups[0]: expected that of muon, got that of an element-wise optimizer. Go on "
        "with the optimizer, and the choice of matrices, that has saved it, or load the weights alone "
        "(pretrain_gpt.py: --no-load-optim or --finetune)."
    )


def _other_rule(saves_muon: bool) -> None:
    model = _build()
    _backward(model, 0)
    muon = fully_shard_muon(model, 0.1, report=None)
    adamw = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    for optimizer in (muon, adamw):
        optimizer.step()
    saved, loading = (muon, adamw) if saves_muon else (adamw, muon)
    loading.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("saves_muon", [True, False])
def test_state_dicts_of_another_rule_are_refused(saves_muon: bool) -> None:
    rules = ("an element-wise optimizer", "muon") if saves_muon else ("muon", "an element-wise optimizer")
    for message in run_ranks_expecting(2, ValueError, _other_rule, saves_muon):
        assert message == (
            f"optimizer state of 0.weight: expected that of {rules[0]}, got that of {rules[1]}. Go on with "
            "the optimizer, and the choice of matrices, that has saved it, or load the weights alone "
            "(pretrain_gpt.py: --no-load-optim or --finetune)."
        )


def _changed_settings() -> None:
    """Settings that plans depend on may change between steps."""
    plain, ours = weight_of(8, 6), nn.Linear(6, 8, bias=False)
    ours.weight = nn.Parameter(plain.detach().clone())
    model = fully_shard(ours)
    optimizer: Any = fully_shard_optimizer(Muon(list(model.parameters()), lr=0.01))
    momenta: dict[Any, torch.Tensor] = {}
    changes: list[tuple[dict[str, Any], PlainMuon, Any]] = [
        ({}, PlainMuon(), []),
        ({"travel_dtype": torch.bfloat16}, PlainMuon(travel_dtype=torch.bfloat16), []),
        ({"travel_dtype": None, "parts": (4, 4)}, PlainMuon(), [4, 4]),
        ({"parts": (), "nesterov": False, "lr": 0.5}, PlainMuon(nesterov=False, lr=0.5), []),
    ]
    for step, (change, muon, parts) in enumerate(changes):
        optimizer.param_groups[0].update(change)
        plain.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model.weight.grad = torch.zeros_like(model.weight)
        owned = model.weight.geometry.owned
        model.weight.grad.to_local().view(-1).copy_(plain.grad.view(-1)[owned.start : owned.stop])
        optimizer.step()
        step_plainly([plain], momenta, muon, {plain: lambda full: full.split(parts)} if parts else {})  # noqa: B023
        assert torch.equal(model.weight.full_tensor(), plain), change


def test_settings_may_change_between_steps() -> None:
    run_ranks(2, _changed_settings)
