# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a load brings besides weights and optimizer state: schedules, extras, generators, modules' states."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    CheckpointError,
    Placements,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from tests.unit_tests.checkpoint.test_load import CUT, OTHER, refused, saved
from tests.unit_tests.checkpoint.zoo import Cut, Zoo, build, make, make_of, train
from tests.unit_tests.launch import lasting_mesh, run_ranks

# --- schedules, extras, generators ---


class Stubborn:
    """A scheduler that takes no state but its own."""

    def __init__(self, name: str) -> None:
        self.state = {"name": name}

    def state_dict(self) -> dict[str, str]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.state["touched"] = "yes"
        if state["name"] != self.state["name"]:
            raise ValueError(f"schedule {state['name']!r}")
        self.state = dict(state)


def _scheduler(folder: str) -> None:
    path, stubborn = Path(folder, "c"), Path(folder, "stubborn")
    model, optimizer = make(Cut(), "adam")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        schedule.step()
    save_checkpoint(model, optimizer, path, scheduler=schedule)
    rates = [group["lr"] for group in optimizer.param_groups]
    save_checkpoint(model, optimizer, stubborn, scheduler=Stubborn("a"))
    losses = [train(model, optimizer, range(3, 4)), schedule.step(), train(model, optimizer, range(4, 5))]
    model, optimizer = make(OTHER, "adam")
    other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert "Stubborn" not in refused(model, optimizer, stubborn, Stubborn("b"))
    assert "ValueError: schedule 'a'" in refused(model, optimizer, stubborn, Stubborn("b"))
    load_checkpoint(model, optimizer, path, scheduler=other)
    assert other.last_epoch == 3 and other.get_last_lr() == rates == [g["lr"] for g in optimizer.param_groups]
    assert [train(model, optimizer, range(3, 4)), other.step(), train(model, optimizer, range(4, 5))] == losses
    assert load_checkpoint(model, optimizer, path).unexpected == []  # A scheduler that is not wanted is no surprise.


def test_the_schedule_goes_on(tmp_path: Path) -> None:
    run_ranks(2, _scheduler, str(tmp_path))


class Mine:
    """A class that a reader would have to import."""


def _extras(folder: str) -> None:
    path, rank = Path(folder, "c"), dist.get_rank()
    model, optimizer = make(Cut(), "adam")
    extra = {
        "tensor": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "array": numpy.arange(3),
        "nested": [{"a": (1, None, "text", b"bytes", 2.5)}, OrderedDict(b=True), {1, 2}],
        "rank": rank,
    }
    save_checkpoint(model, optimizer, path, extra=extra)
    found = load_checkpoint(model, optimizer, path).extra
    assert found["rank"] == 0  # The first rank's are kept.
    assert found.keys() == extra.keys() and found["nested"] == extra["nested"]
    assert torch.equal(found["tensor"], extra["tensor"]) and torch.equal(found["half"], extra["half"])
    assert found["half"].dtype == torch.bfloat16 and (found["array"] == extra["array"]).all()
    for bad, text in (
        (Mine(), "Mine"),
        ({"deep": [Mine]}, "Mine"),
        (lambda: None, "expected values that can be written, got"),
    ):
        with pytest.raises(CheckpointError, match=text):
            save_checkpoint(model, optimizer, Path(folder, "bad"), extra=bad)
        with pytest.raises(CheckpointError, match="got an error on 1 of 2 ranks"):
            save_checkpoint(model, optimizer, Path(folder, "bad"), extra=bad if rank else None)
    assert [path.name for path in Path(folder).iterdir()] == ["c"]


def test_extras_come_back_and_what_would_not_is_refused_at_the_save(tmp_path: Path) -> None:
    run_ranks(2, _extras, str(tmp_path))


def _draw() -> list[Any]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _save_generators(folder: str) -> tuple[list[Any], list[Any]]:
    model, optimizer = make(Cut(), "adam")
    _seed(100 + dist.get_rank())
    save_checkpoint(model, optimizer, Path(folder, "c"))
    save_checkpoint(model, optimizer, Path(folder, "without"), save_rng=False)
    drawn = _draw()
    _seed(7)
    untouched = _draw()
    _seed(7)
    load_checkpoint(model, optimizer, Path(folder, "without"))
    load_checkpoint(model, optimizer, Path(folder, "c"), restore_rng=False)
    assert _draw() == untouched
    return drawn, untouched


def _load_generators(folder: str) -> list[Any]:
    model, optimizer = make(OTHER, "adam")
    _seed(7)
    load_checkpoint(model, optimizer, Path(folder, "c"))
    return _draw()


def test_each_rank_gets_the_generators_of_its_number(tmp_path: Path) -> None:
    (first, _), (second, fresh) = run_ranks(2, _save_generators, str(tmp_path))
    assert first != second
    assert run_ranks(2, _load_generators, str(tmp_path)) == [first, second]
    assert run_ranks(1, _load_generators, str(tmp_path)) == [first]
    assert run_ranks(3, _load_generators, str(tmp_path)) == [first, second, fresh]


# --- modules ---


class Remembering(nn.Linear):
    """Has an extra state."""

    memory: Any = None

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        if state == "bad":
            raise ValueError("bad state")
        self.memory = state


def _with_memory(memory: Any, cut: Cut = CUT) -> tuple[Any, Any]:
    model = build(cut)
    model.layers[0] = Remembering(6, 7)
    model.layers[0].memory = memory
    return make_of(model, cut, "adam")


def _module_states(folder: str) -> None:
    path, plain = Path(folder, "c"), Path(folder, "plain")
    memory = {"amax": torch.arange(3.0), "steps": 4}
    save_checkpoint(*_with_memory(memory), path)
    saved(plain)
    model, optimizer = _with_memory(None, OTHER)
    load_checkpoint(model, optimizer, path)
    assert model.layers[0].memory["steps"] == 4 and torch.equal(model.layers[0].memory["amax"], memory["amax"])
    assert "model.layers.0._extra_state: not in the checkpoint" in refused(model, optimizer, plain)
    assert load_checkpoint(model, optimizer, plain, strict=False).missing == ["model.layers.0._extra_state"]
    assert model.layers[0].memory["steps"] == 4
    model, optimizer = make(OTHER, "adam")
    error = refused(model, optimizer, path)
    assert "1 differences: model.layers.0._extra_state: in the checkpoint, and not in the model" in error
    assert load_checkpoint(model, optimizer, path, strict=False).unexpected == ["model.layers.0._extra_state"]
    with pytest.raises(CheckpointError, match="Mine"):
        save_checkpoint(*_with_memory(Mine()), Path(folder, "bad"))
    save_checkpoint(*_with_memory("bad"), Path(folder, "refusing"))
    with pytest.raises(CheckpointError, match="ValueError: bad state"):
        load_checkpoint(*_with_memory(None), Path(folder, "refusing"))


def test_modules_states_come_back(tmp_path: Path) -> None:
    run_ranks(2, _module_states, str(tmp_path))


class Recomputable(nn.Module):
    """May be built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.seen.zero_()
            self.scratch.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(torch.tanh(self.first(x))).square().sum() + self.scratch.sum()


def _meta(folder: str, keeps_rng: bool) -> None:
    path = Path(folder, f"{keeps_rng}")
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))

    def sharded(device: str) -> tuple[Any, Any]:
        torch.manual_seed(3)
        with torch.device(device):
            model: Any = Recomputable()
        placements = Placements.from_strategy("optim_grads_params")
        fully_shard(model.first, lasting_mesh((2,)), placements)
        fully_shard(model, lasting_mesh((2,)), placements)
        return model, fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    def step(model: Any, optimizer: Any) -> float:
        loss = model(inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    model, optimizer = sharded("cpu")
    step(model, optimizer)
    save_checkpoint(model, optimizer, path)
    losses = [step(model, optimizer) for _ in range(3)]
    model, optimizer = sharded("meta")
    load_checkpoint(model, optimizer, path, restore_rng=keeps_rng)
    assert not any(buffer.is_meta for buffer in model.buffers()) and model.seen == 1
    assert [step(model, optimizer) for _ in range(3)] == losses


@pytest.mark.parametrize("keeps_rng", [True, False])
def test_a_model_on_the_meta_device_is_loaded(keeps_rng: bool, tmp_path: Path) -> None:
    run_ranks(2, _meta, str(tmp_path), keeps_rng)


def _buffers(folder: str) -> None:
    path = Path(folder, "c")
    model, optimizer = make(Cut(), "adam")
    train(model, optimizer, range(3))
    model.scratch.fill_(5)
    save_checkpoint(model, optimizer, path)
    model, optimizer = make(OTHER, "adam")
    count = model.count
    load_checkpoint(model, optimizer, path)
    assert model.count is count and count == 3 and isinstance(model, Zoo)
    assert model.scratch.eq(0).all()  # It is not persistent.


def test_persistent_buffers_are_loaded_in_place(tmp_path: Path) -> None:
    run_ranks(2, _buffers, str(tmp_path))
