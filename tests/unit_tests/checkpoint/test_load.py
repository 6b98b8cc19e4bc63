# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a load refuses, on every rank and before anything has changed, and what `strict=False` reports instead."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import CheckpointError, load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.experimental.checkpoint import checkpoint as entry_points
from tests.unit_tests.checkpoint.zoo import Cut, assert_same, build, everything, make, make_of, train
from tests.unit_tests.launch import run_ranks

CUT, OTHER = Cut(), Cut(seed=7)


class Held:
    """Everything that a load may change, as it is now."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any = None) -> None:
        self.objects = model, optimizer, scheduler
        self.values = everything(model, optimizer)
        self.num_states = len(optimizer.state)
        self.scheduler = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self.generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    def assert_untouched(self) -> None:
        model, optimizer, scheduler = self.objects
        assert_same(model, optimizer, self.values)
        assert len(optimizer.state) == self.num_states
        assert scheduler is None or scheduler.state_dict() == self.scheduler
        assert random.getstate() == self.generators[0]
        assert str(numpy.random.get_state()) == str(self.generators[1])
        assert torch.equal(torch.get_rng_state(), self.generators[2])


def refused(model: Any, optimizer: Any, path: Path, scheduler: Any = None, **options: Any) -> str:
    """Require that a load is refused with the same error on every rank, and that nothing has changed; return it."""
    held = None if optimizer is None else Held(model, optimizer, scheduler)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, optimizer, path, scheduler=scheduler, **options)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    if held is not None:
        held.assert_untouched()
    return str(caught.value)


def saved(path: Path, cut: Cut = CUT, optimizer: str = "adam", steps: int = 2, **options: Any) -> dict[str, Any]:
    """Train, save, and return what was saved."""
    model, stepper = make(cut, optimizer)
    train(model, stepper, range(steps))
    save_checkpoint(model, stepper, path, **options)
    return everything(model, stepper)


def _other_model(cut: Cut = OTHER) -> Any:
    model = build(cut)
    del model.scale
    model.row = nn.Parameter(torch.randn(1, 8))
    model.added = nn.Linear(2, 2)
    model.register_buffer("count", torch.zeros((), dtype=torch.int32))
    return model


def _differ(folder: str, steps: int) -> None:
    path = Path(folder, "c")
    saved(path)
    model, optimizer = make_of(_other_model(), OTHER, "adam")
    if steps:  # Optimizer state must survive, too.
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    error = refused(model, optimizer, path, scheduler)
    for problem in (
        "model.row: expected shape (1, 8), got (1, 7)",
        "optimizer.state.row.exp_avg: expected shape (1, 8), got (1, 7)",
        "optimizer.state.row.exp_avg_sq: expected shape (1, 8), got (1, 7)",
        "model.count: expected torch.int32, got torch.int64",
        *(f"model.added.{name}: not in the checkpoint" for name in ("weight", "bias")),
        *(f"optimizer.state.added.weight.{name}: not in" for name in ("exp_avg", "exp_avg_sq", "step")),
        "scheduler: not in the checkpoint",
        "model.scale: in the checkpoint, and not in the model",
        *(f"optimizer.state.scale.{name}: in the checkpoint" for name in ("exp_avg", "exp_avg_sq", "step")),
    ):
        assert problem in error, f"{problem} in {error}"


@pytest.mark.parametrize("steps", [0, 1])
def test_all_differences_are_in_one_error_and_nothing_has_changed(steps: int, tmp_path: Path) -> None:
    run_ranks(2, _differ, str(tmp_path), steps)


def _skip(folder: str) -> None:
    path = Path(folder, "c")
    whole = saved(path)
    model = build(OTHER)
    del model.scale
    model.added = nn.Linear(2, 2)
    model, optimizer = make_of(model, OTHER, "adam")
    before = everything(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    report = load_checkpoint(model, optimizer, path, scheduler=scheduler, strict=False)
    assert [key for key in report.missing if not key.startswith("optimizer.state.")] == [
        "model.added.bias",
        "model.added.weight",
        "scheduler",
    ]
    assert [key for key in report.missing if "step" in key] == [
        f"optimizer.state.added.{name}.step" for name in ("bias", "weight")
    ]
    assert report.unexpected == [
        "model.scale",
        *(f"optimizer.state.scale.{name}" for name in ("exp_avg", "exp_avg_sq", "step")),
    ]
    found = everything(model, optimizer)
    added = {name for name in found if name.startswith("added.")}
    assert added == {"added.bias", "added.weight"}  # Their state is as absent as it was.
    for name in found.keys() - {"settings"}:
        assert torch.equal(found[name], (before if name in added else whole)[name]), name
    assert scheduler.last_epoch == 0


def test_what_is_skipped_is_reported(tmp_path: Path) -> None:
    run_ranks(2, _skip, str(tmp_path))


# --- tied weights ---


def _ties(folder: str) -> None:
    tied, untied = Path(folder, "tied"), Path(folder, "untied")
    whole = saved(tied)
    model, optimizer = make(Cut(tied=False, seed=7), "adam")
    report = load_checkpoint(model, optimizer, tied)
    assert (report.missing, report.unexpected) == ([], [])
    found = everything(model, optimizer)
    for name in ("", ":exp_avg", ":exp_avg_sq", ":step"):
        assert torch.equal(found[f"head.weight{name}"], whole[f"embedding.weight{name}"]), name
        assert torch.equal(found[f"embedding.weight{name}"], whole[f"embedding.weight{name}"]), name
    train(model, optimizer, range(2))
    assert not torch.equal(*(everything(model, optimizer)[f"{name}.weight"] for name in ("head", "embedding")))
    save_checkpoint(model, None, untied)
    model, optimizer = make(OTHER, "adam")
    error = refused(model, optimizer, untied, strict=False)
    assert "model.head.weight and model.embedding.weight: expected equal values, since the model ties them" in error


def _tie_equal(folder: str) -> None:
    path = Path(folder, "equal")
    model = build(Cut(tied=False))
    with torch.no_grad():
        model.head.weight.copy_(model.embedding.weight)
    model, optimizer = make_of(model, Cut(tied=False), "adam")
    save_checkpoint(model, optimizer, path)
    whole = everything(model, optimizer)
    model, optimizer = make(OTHER, "adam")
    report = load_checkpoint(model, optimizer, path)
    assert (report.missing, report.unexpected) == ([], [])
    assert torch.equal(everything(model, optimizer)["embedding.weight"], whole["head.weight"])


def _tie_the_other_way(folder: str) -> None:
    """The model's first name of the tied weight is the second one in the checkpoint."""
    path = Path(folder, "order")
    whole = saved(path)
    model = build(OTHER)
    embedding = model._modules.pop("embedding")
    model.embedding = embedding  # The head comes first now.
    model, optimizer = make_of(model, OTHER, "adam")
    assert [name for name, _ in model.named_parameters()].count("head.weight") == 1
    report = load_checkpoint(model, optimizer, path)
    assert (report.missing, report.unexpected) == ([], [])
    found = everything(model, optimizer)
    for name in ("", ":exp_avg", ":exp_avg_sq", ":step"):
        assert torch.equal(found[f"head.weight{name}"], whole[f"embedding.weight{name}"])


@pytest.mark.parametrize("function", [_ties, _tie_equal, _tie_the_other_way])
def test_tied_weights_load_under_any_name(function: Any, tmp_path: Path) -> None:
    run_ranks(2, function, str(tmp_path))


# --- dtypes, layouts, kinds of models ---


def _cast(folder: str) -> None:
    path = Path(folder, "c")
    whole = saved(path)
    cut = Cut(dtype=torch.bfloat16, main_dtype=torch.bfloat16, seed=7)
    model, optimizer = make(cut, "adam")
    report = load_checkpoint(model, optimizer, path)
    assert {"model.row", "optimizer.state.row.exp_avg", "model.frozen.weight"} <= set(report.cast)
    assert not any(key.endswith((".step", ".count")) for key in report.cast)
    found = everything(model, optimizer)
    for name in ("row", "row:exp_avg", "embedding.weight:exp_avg_sq", "frozen.weight"):
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], whole[name].bfloat16()), name
    assert all(torch.isfinite(torch.tensor(train(model, optimizer, range(2)))))


def test_floats_are_cast_and_reported(tmp_path: Path) -> None:
    run_ranks(2, _cast, str(tmp_path))


def _refuse_models(folder: str) -> None:
    path = Path(folder, "c")
    saved(path)
    model, optimizer = make(CUT, "adam")
    _other, others = make(OTHER, "adam")
    for call in (save_checkpoint, load_checkpoint):
        target = path if call is load_checkpoint else Path(folder, "new")
        with pytest.raises(TypeError, match="expected a model of sharded units, got none"):
            call(nn.Linear(2, 2), None, target)
        with pytest.raises(CheckpointError, match="expected an optimizer adapted with fully_shard_optimizer"):
            call(model, torch.optim.SGD(model.parameters(), lr=1), target)
        with pytest.raises(CheckpointError, match="expected parameters of the model, got row, which is another's"):
            call(model, others, target)
        with pytest.raises(CheckpointError, match=r"expected sharded parameters, got 1\.weight, which belongs to no"):
            call(nn.Sequential(model, nn.Linear(2, 2)), optimizer, target)
        model.layers[0].unshard()
        with pytest.raises(CheckpointError, match="expected a unit at rest, got gathered parameters"):
            call(model, optimizer, target)
        model.layers[0].reshard()
    assert not Path(folder, "new").exists()
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="verify: expected 'sizes' or 'checksums', got 'all'"):
        load_checkpoint(model, optimizer, path, verify="all")  # type: ignore[arg-type]
    assert "expected a checkpoint's metadata, got no such file" in refused(model, optimizer, Path(folder, "none"))
    assert_same(model, optimizer, before)
    load_checkpoint(model, optimizer, path)  # Nothing is left in the way.


def test_other_models_and_optimizers_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _refuse_models, str(tmp_path))


# --- ranks that disagree ---


def _disagree(folder: str) -> None:
    rank = dist.get_rank()
    path = Path(folder, "c")
    saved(path)
    saved(Path(folder, "d"))
    model, optimizer = make(OTHER, "adam")
    error = refused(model, optimizer, path.with_name("cd"[rank]))
    assert "arguments of load_checkpoint: expected the same on all 2 ranks" in error and "/d'" in error
    assert "'strict=True' and 'strict=False' on ranks 0 and 1" in refused(model, optimizer, path, strict=rank == 0)
    error = _error(lambda: load_checkpoint(model, optimizer if rank else None, path))
    assert "'optimizer=False' and 'optimizer=True' on ranks 0 and 1" in error
    wrong, its_optimizer = make_of(_other_model(), OTHER, "adam")
    error = _error(lambda: load_checkpoint(*((wrong, its_optimizer) if rank else (model, optimizer)), path))
    assert "keys of load_checkpoint: expected the same on all 2 ranks" in error

    new = Path(folder, "new")
    error = _error(lambda: save_checkpoint(model, optimizer, new.with_name(f"new{rank}")))
    assert "keys of save_checkpoint: expected the same on all 2 ranks" in error
    error = _error(lambda: save_checkpoint(model, optimizer if rank else None, new))
    assert "keys of save_checkpoint: expected the same on all 2 ranks" in error
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(entry_points, "settings_by_name", lambda *_: 1 / 0)
        error = _error(lambda: save_checkpoint(model, optimizer, new))
    assert "got an error on 1 of 2 ranks. rank 1: ZeroDivisionError: division by zero" in error
    assert sorted(os.listdir(folder)) == ["c", "d"]
    save_checkpoint(model, optimizer, new)
    load_checkpoint(model, optimizer, new)


def _error(function: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function()
    return str(caught.value)


def test_ranks_that_disagree_get_one_error_and_go_on(tmp_path: Path) -> None:
    run_ranks(2, _disagree, str(tmp_path), timeout_s=30)


# --- names that are taken ---


def _overwrite(folder: str) -> None:
    path = Path(folder, "c")
    first = saved(path, extra="first")
    model, optimizer = make(OTHER, "adam")
    assert "expected no checkpoint there yet, got one" in _error(lambda: save_checkpoint(model, optimizer, path))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr("megatron.core.distributed.fsdp.experimental.checkpoint.write.publish", lambda *_: 1 / 0)
        error = _error(lambda: save_checkpoint(model, optimizer, path, overwrite=True))
        assert "ZeroDivisionError" in error
    dist.barrier()
    assert os.listdir(folder) == ["c"]
    loaded, loads = make(CUT, "adam")
    assert load_checkpoint(loaded, loads, path).extra == "first"
    assert_same(loaded, loads, first)
    save_checkpoint(model, optimizer, path, overwrite=True)
    assert load_checkpoint(loaded, loads, path).extra is None
    assert_same(loaded, loads, everything(model, optimizer))
    dist.barrier()
    assert os.listdir(folder) == ["c"]


def test_a_failed_save_keeps_the_checkpoint_that_it_would_replace(tmp_path: Path) -> None:
    run_ranks(2, _overwrite, str(tmp_path))


# --- the next forward ---


def _forward(folder: str, number: int, strategy: str, dtype: torch.dtype, sync: bool) -> None:
    path = Path(folder, f"c{number}")
    cut = Cut(strategy, dtype=dtype)
    model, optimizer = make(cut, "adam")
    train(model, optimizer, range(2))
    save_checkpoint(model, optimizer, path)
    losses = train(model, optimizer, range(2, 4))
    model, optimizer = make(Cut(strategy, dtype=dtype, seed=7), "adam")
    train(model, optimizer, range(1))  # Compute weights exist, and are others.
    load_checkpoint(model, optimizer, path, sync_model_weights=sync)
    assert train(model, optimizer, range(2, 4)) == losses


@pytest.mark.parametrize("sync", [True, False])
def test_the_next_forward_computes_with_what_was_loaded(sync: bool, tmp_path: Path) -> None:
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    for number, strategy in enumerate(strategies):
        for half, dtype in enumerate((torch.float32, torch.bfloat16)):
            run_ranks(2, _forward, str(tmp_path), 2 * number + half, strategy, dtype, sync)
