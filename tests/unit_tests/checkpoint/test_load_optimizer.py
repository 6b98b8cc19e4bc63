# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a load does to optimizers: state, and settings by name, of any rule, grouping and number of steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.experimental import (
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from tests.unit_tests.checkpoint.test_load import OTHER, refused, saved
from tests.unit_tests.checkpoint.zoo import OPTIMIZERS, Cut, assert_same, build, everything, make, make_of, train
from tests.unit_tests.launch import run_ranks


def _unstepped(folder: str) -> None:
    path = Path(folder, "c")
    whole = saved(path, steps=0)
    for steps in (0, 2):
        model, optimizer = make(OTHER, "adam")
        train(model, optimizer, range(steps))
        load_checkpoint(model, optimizer, path)
        assert_same(model, optimizer, whole)
        assert not optimizer.state
    first, its_optimizer = make(Cut(), "adam")
    assert train(model, optimizer, range(2)) == train(first, its_optimizer, range(2))


def test_an_optimizer_that_had_no_state_has_none(tmp_path: Path) -> None:
    run_ranks(2, _unstepped, str(tmp_path))


def _partly_stepped(folder: str) -> None:
    """One parameter of the optimizer has never had a gradient."""
    path = Path(folder, "c")
    model, optimizer = make(Cut(), "adam")
    train(model, optimizer, range(1))
    del optimizer.state[model.row]
    save_checkpoint(model, optimizer, path)
    whole = everything(model, optimizer)
    model, optimizer = make(OTHER, "adam")
    train(model, optimizer, range(2))
    load_checkpoint(model, optimizer, path)
    assert_same(model, optimizer, whole)


def test_a_parameter_that_had_no_state_has_none(tmp_path: Path) -> None:
    run_ranks(2, _partly_stepped, str(tmp_path))


def _without_optimizer(folder: str) -> None:
    both, weights = Path(folder, "both"), Path(folder, "weights")
    whole = saved(both)
    model, optimizer = make(OTHER, "adam")
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    report = load_checkpoint(model, None, both)
    assert (report.missing, report.unexpected) == ([], [])
    mixed = {name: (before if ":" in name or name == "settings" else whole)[name] for name in before}
    assert_same(model, optimizer, mixed)
    save_checkpoint(model, None, weights)
    assert "1 differences: optimizer.settings: not in the checkpoint" in refused(model, optimizer, weights)
    assert load_checkpoint(model, optimizer, weights, strict=False).missing == ["optimizer.settings"]
    assert_same(model, optimizer, mixed)


def test_weights_load_without_an_optimizer(tmp_path: Path) -> None:
    run_ranks(2, _without_optimizer, str(tmp_path))


def _other_frozen_set(folder: str, kind: str) -> None:
    path = Path(folder, kind)
    saved(path, optimizer=kind)
    more = build(OTHER)
    more.frozen.requires_grad_(True)
    model, optimizer = make_of(more, OTHER, kind)
    error = refused(model, optimizer, path)
    if kind == "plain_sgd":
        assert "settings of frozen.weight: expected them in the checkpoint, got none" in error
    else:
        assert "optimizer.state.frozen.weight." in error and ": not in the checkpoint" in error
    fewer = build(OTHER)
    fewer.row.requires_grad_(False)
    model, optimizer = make_of(fewer, OTHER, kind)
    if kind == "plain_sgd":  # Nothing is lost.
        load_checkpoint(model, optimizer, path)
        return
    assert "optimizer.state.row." in (error := refused(model, optimizer, path)) and ": in the checkpoint" in error
    assert all("row" in key for key in load_checkpoint(model, optimizer, path, strict=False).unexpected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_frozen_set_is_seen(kind: str, tmp_path: Path) -> None:
    run_ranks(2, _other_frozen_set, str(tmp_path), kind)


def _regroup(folder: str) -> None:
    """The saved optimizer has two groups, for matrices with lr 0.02 and for others."""
    path = Path(folder, "c")
    whole = saved(path)
    model, _ = make(OTHER, "adam")
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in trainable if (p.ndim > 1) == flag] for flag in (True, False))
    groups = [{"params": part} for part in (others, matrices[2:], matrices[:2])]
    optimizer: Any = fully_shard_optimizer(torch.optim.Adam(groups, lr=0.5, weight_decay=0.3))
    load_checkpoint(model, optimizer, path)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.01, 0.1),
        (0.02, 0.1),
        (0.02, 0.1),
    ]
    found = everything(model, optimizer)
    assert all(torch.equal(found[name], whole[name]) for name in found.keys() - {"settings"})
    losses = train(model, optimizer, range(2, 4))
    assert losses == train(*_resumed(path), range(2, 4))

    model, _ = make(OTHER, "adam")
    one_group: Any = fully_shard_optimizer(
        torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.5, weight_decay=0.3)
    )
    error = refused(model, one_group, path)
    assert "expected equal ones for all of its parameters, got {'lr': 0.0" in error
    assert re.search(r"\} for \S+ and \{.*\} for \S+\. Group the parameters as in the checkpoint\.", error), error
    refused(model, one_group, path, strict=False)


def _resumed(path: Path) -> tuple[Any, Any]:
    model, optimizer = make(OTHER, "adam")
    load_checkpoint(model, optimizer, path)
    return model, optimizer


def test_settings_go_by_name_through_other_groups(tmp_path: Path) -> None:
    run_ranks(2, _regroup, str(tmp_path))


class Counting(torch.optim.SGD):
    """Keeps a count that is no tensor, and uses it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                    parameter.data.add_(state["sum"] / state["count"], alpha=-group["lr"])


RULES: dict[str, Any] = {
    **OPTIMIZERS,
    "adamw_amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True, weight_decay=0.5),
    "foreach": lambda groups: torch.optim.Adam(groups, foreach=True),
    "tensor_lr": lambda groups: torch.optim.Adam([{**g, "lr": torch.tensor(0.01)} for g in groups]),
    "dampened": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr_decay=0.1, initial_accumulator_value=0.5),
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "counting": lambda groups: Counting(groups, lr=0.01),
}


def _continue(folder: str, rule: str) -> None:
    path = Path(folder, rule)
    patch = pytest.MonkeyPatch()
    patch.setitem(OPTIMIZERS, rule, RULES[rule])
    with patch.context():
        model, optimizer = make(Cut(), rule)
        train(model, optimizer, range(2))
        save_checkpoint(model, optimizer, path)
        losses, whole = train(model, optimizer, range(2, 5)), everything(model, optimizer)
        model, optimizer = make(OTHER, rule)
        load_checkpoint(model, optimizer, path)
        assert train(model, optimizer, range(2, 5)) == losses
        assert_same(model, optimizer, whole, rule)
        values = [state.get("count") for state in optimizer.state.values()]
        assert set(values) <= {5, None}
    patch.undo()


@pytest.mark.parametrize("rule", RULES)
def test_a_run_that_loads_and_goes_on_is_the_uninterrupted_one(rule: str, tmp_path: Path) -> None:
    run_ranks(2, _continue, str(tmp_path), rule)


def _create_state(folder: str) -> None:
    """Hooks of steps must not take the making of state for a step."""
    path = Path(folder, "c")
    saved(path)
    model, optimizer = make(OTHER, "adam")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    load_checkpoint(model, optimizer, path)
    assert calls == []
    train(model, optimizer, range(1))
    assert calls == ["before", "after"]


def test_the_making_of_state_is_no_step(tmp_path: Path) -> None:
    run_ranks(2, _create_state, str(tmp_path))
