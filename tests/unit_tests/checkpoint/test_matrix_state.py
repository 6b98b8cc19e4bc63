# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of matrix optimizers: a run goes on bit by bit on another number of ranks; another rule's is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import (
    CheckpointError,
    Muon,
    Placements,
    fully_shard,
    fully_shard_muon,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.matrix_oracle import Net, build_net, loss_of_net

MICROBATCHES = 12
"""Of one step, dealt out to the ranks: a number of ranks makes no difference to what a step sees."""


def _model(strategy: str = "optim_grads_params") -> Any:
    """Return a model whose gradients are rounded so that no number of ranks makes a difference.

    Gradients are sums over 12 microbatches, each rounded to multiples of 12 * 2**-12 whatever the number of ranks, of
    which all of 1, 2, 3 and 4 are divisors; the average over ranks is then exact, too.
    """
    model: Any = build_net(MICROBATCHES)
    options = {"placements": Placements.from_strategy(strategy), "gradient_reduction": "sum"}
    for layer in (*model.layers, model.spare):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _muon(model: Any, momentum_dtype: torch.dtype = torch.float32, **settings: Any) -> Muon:
    return fully_shard_muon(
        model,
        0.01,
        rest=lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
        report=None,
        momentum_dtype=momentum_dtype,
        package_bytes=2500,
        **settings,
    )


def _steps(model: Any, optimizer: Any, steps: range) -> None:
    share = MICROBATCHES // dist.get_world_size()
    for step in steps:
        optimizer.zero_grad()
        losses = [loss_of_net(model, step, share * dist.get_rank() + index) for index in range(share)]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()


def _everything(model: Net, optimizer: Any) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    saved = optimizer.state_dict()
    for group, of_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, key in zip(group["params"], of_group["params"], strict=True):
            for state, value in saved["state"].get(key, {}).items():
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{names[id(parameter)]}.{state}"] = full
    return found


def _save(folder: str, momentum_dtype: torch.dtype) -> Any:
    """Save after three steps; return what there is then, and after four more."""
    model = _model()
    optimizer = _muon(model, momentum_dtype, weight_decay=0.3)
    _steps(model, optimizer, range(3))
    save_checkpoint(model, optimizer, Path(folder, "muon"))
    saved = {name: value.clone() for name, value in _everything(model, optimizer).items()}
    _steps(model, optimizer, range(3, 7))
    return saved, _everything(model, optimizer)


def _load(folder: str, strategy: str, expected: Any, momentum_dtype: torch.dtype) -> None:
    model = _model(strategy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    # Settings are the saved ones, whatever is given here; what is planned before is planned anew.
    optimizer = _muon(model, momentum_dtype, nesterov=False, travel_dtype=torch.bfloat16)
    report = load_checkpoint(model, optimizer, Path(folder, "muon"))
    assert not report.missing and not report.unexpected
    assert optimizer.param_groups[0]["nesterov"] and optimizer.param_groups[0]["weight_decay"] == 0.3
    _assert_same(_everything(model, optimizer), expected[0])
    _steps(model, optimizer, range(3, 7))
    _assert_same(_everything(model, optimizer), expected[1])


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    assert any(name.endswith("momentum_buffer") for name in found)
    different = [name for name, value in expected.items() if not torch.equal(found[name].cpu(), value.cpu())]
    assert not different, different
    assert all(found[name].dtype is value.dtype for name, value in expected.items())


@pytest.mark.parametrize(
    ("saving", "loading", "strategy", "momentum_dtype"),
    [
        (2, 3, "optim_grads_params", torch.float32),
        (4, 2, "optim", torch.bfloat16),
        (1, 4, "optim_grads", torch.float32),
        (3, 1, "no_shard", torch.float32),
    ],
)
def test_a_run_goes_on_with_the_same_bits_on_another_number_of_ranks(
    saving: int, loading: int, strategy: str, momentum_dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = run_ranks(saving, _save, str(tmp_path), momentum_dtype)[0]
    run_ranks(loading, _load, str(tmp_path), strategy, expected, momentum_dtype)


def _other_momenta(folder: str) -> None:
    """The dtype of momenta is the saved one, also where the optimizer was built with another one."""
    for built, saved in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        model = _model()
        optimizer = _muon(model, saved)
        _steps(model, optimizer, range(1))
        save_checkpoint(model, optimizer, Path(folder, f"to_{built}"))
        loaded = _muon(model, built)
        load_checkpoint(model, loaded, Path(folder, f"to_{built}"))
        assert loaded.param_groups[0]["momentum_dtype"] is saved
        _steps(model, loaded, range(1, 2))
        for group in loaded.matrix_groups:
            for parameter in group["params"]:
                assert parameter not in loaded.state or loaded.state[parameter]["momentum_buffer"].dtype is saved


def test_momenta_in_the_saved_dtype(tmp_path: Path) -> None:
    run_ranks(2, _other_momenta, str(tmp_path))


def _refused(folder: str, saves_muon: bool, strict: bool) -> str:
    model = _model()
    optimizers = [_muon(model), fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02))]
    saving, loading = optimizers if saves_muon else reversed(optimizers)
    _steps(model, saving, range(1))
    save_checkpoint(model, saving, Path(folder, f"{saves_muon}{strict}"))
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(model, loading, Path(folder, f"{saves_muon}{strict}"), strict=strict)
    assert not loading.state and loading.param_groups[0].get("momentum_dtype") in (None, torch.float32)
    assert all(torch.equal(parameter.full_tensor(), before[name]) for name, parameter in model.named_parameters())
    load_checkpoint(model, None, Path(folder, f"{saves_muon}{strict}"))  # as the message says
    return str(raised.value)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("saves_muon", [True, False])
def test_the_checkpoint_of_another_rule_is_refused_on_every_rank(
    saves_muon: bool, strict: bool, tmp_path: Path
) -> None:
    rules = ("an element-wise optimizer", "muon") if saves_muon else ("muon", "an element-wise optimizer")
    messages = run_ranks(2, _refused, str(tmp_path), saves_muon, strict)
    assert len(set(messages)) == 1
    assert f"expected that of {rules[0]}, got that of {rules[1]}. Go on with the optimizer, and" in messages[0]
    assert "optimizer state of " in messages[0] and "that has saved it, or load the weights alone" in messages[0]
