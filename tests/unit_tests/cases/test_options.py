# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Options, environment variables and method signatures: each does what it says, or is refused."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as StockFsdp
from torch import nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.fsdp import mcore_fsdp_v2_adapter as adapter
from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.pretrain.launcher import find_place
from tests.unit_tests.cases.compare import compare_training
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import build_tower, my_rank, start, tower_loss, wrap
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest
from tests.unit_tests.trace import CollectiveLog

# --- PB-119 -----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "strategy": (lambda: Placements.from_strategy("zero3"), ValueError, "strategy: expected one of .*got 'zero3'"),
    "strategy_case": (lambda: Placements.from_strategy("OPTIM"), ValueError, "strategy: expected one of .*'OPTIM'"),
    "outer": (
        lambda: Placements.from_strategy("optim", outer="full"),
        ValueError,
        "outer strategy: expected one of .*got 'full'",
    ),
    "axes": (lambda: Placements.from_strategy("optim", dp_axes=("a", "b")), ValueError, "dp_axes: expected 1 axes"),
    "keyword": (lambda: fully_shard(nn.Linear(2, 2), reshard=True), TypeError, "reshard"),  # type: ignore[call-arg]
    "context_keyword": (lambda: fully_shard_context("cpu", overlap=True).__enter__(), TypeError, "overlap"),  # type: ignore[call-arg]
    "policy_keyword": (lambda: MixedPrecisionPolicy(param_dtype=torch.bfloat16), TypeError, "param_dtype"),  # type: ignore[call-arg]
    "schedule_keyword": (lambda: SchedulePolicy(prefetch=2), TypeError, "prefetch"),  # type: ignore[call-arg]
    "reduction": (
        lambda: fully_shard(nn.Linear(2, 2), gradient_reduction="mean"),  # type: ignore[arg-type]
        ValueError,
        "gradient_reduction: expected 'average' or 'sum', got 'mean'",
    ),
    "symmetric_memory": (
        lambda: fully_shard_context("cpu", use_symmetric_memory=True).__enter__(),
        NotImplementedError,
        "use_symmetric_memory: expected a CUDA device, got cpu",
    ),
    "placements": (
        lambda: fully_shard(nn.Linear(2, 2), placements=Placements.from_strategy("optim", outer="optim")),
        ValueError,
        "fully_shard placements: expected the mesh's axes",
    ),
    "config_strategy": (
        lambda: wrap(build_tower(), data_parallel_sharding_strategy="full"),
        ValueError,
        "data_parallel_sharding_strategy: expected one of",
    ),
}


def _wrong(name: str) -> None:
    make, error, message = WRONG[name]
    with pytest.raises(error, match=message), CollectiveLog() as log:
        make()
    assert not log.entries


@pytest.mark.parametrize("name", WRONG)
def test_pb119_unknown_names_and_options_are_refused(name: str) -> None:
    run_ranks(2, _wrong, name)


def _count(backwards: int = 1, **options: Any) -> Counter[tuple[str, str]]:
    """Return how many collectives of each dtype `backwards` microbatches of four units take."""
    model = shard_layers(build("mlp").bfloat16(), **options)
    inputs, targets = make_batch(model, 4, seed=my_rank())
    model.context.finalize()
    with CollectiveLog() as log:
        for index in range(backwards):
            with microbatch(model.context, is_last=index == backwards - 1):
                loss_of(model, inputs.bfloat16(), targets).backward()
    return Counter((operation, dtype.removeprefix("torch.")) for operation, dtype, _, _ in log.entries)


def _options_count() -> None:
    """Gathers: one per unit and direction, but the root keeps its weights; reductions: one per unit and backward."""
    usual = {("all_gather", "bfloat16"): 7, ("reduce_scatter", "float32"): 4}
    assert _count() == usual
    assert _count(schedule_policy=SchedulePolicy(reshard_after_forward=True)) == usual | {("all_gather", "bfloat16"): 8}
    assert _count(schedule_policy=SchedulePolicy(reshard_after_forward=False)) == usual | {
        ("all_gather", "bfloat16"): 4
    }
    none_ahead = SchedulePolicy(forward_prefetch_units=0, backward_prefetch_units=0)
    many_ahead = SchedulePolicy(forward_prefetch_units=3, backward_prefetch_units=3)
    assert _count(schedule_policy=none_ahead) == _count(schedule_policy=many_ahead) == usual
    assert _count(gradient_reduction="sum") == _count(grad_divisor=2) == usual
    narrow = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    assert _count(mixed_precision_policy=narrow) == {("all_gather", "bfloat16"): 7, ("reduce_scatter", "bfloat16"): 4}
    assert _count(backwards=3) == {key: 3 * count for key, count in usual.items()}


def test_pb119_options_change_the_collectives_that_they_name() -> None:
    run_ranks(2, _options_count)


def _prefetch_order() -> None:
    """How far ahead a unit gathers is seen in what has been issued when its forward runs."""
    for units in (0, 1, 2):
        model: Any = shard_layers(build("mlp"), schedule_policy=SchedulePolicy(forward_prefetch_units=units))
        gathered: list[int] = []
        model.layers[0].register_forward_hook(
            lambda module, args, out, model=model, gathered=gathered: gathered.append(
                sum(layer.unshard_event is not None for layer in model.layers[1:])
            )
        )
        model(torch.ones(1, 7))
        assert gathered == [units]


def test_pb119_prefetch_budget_is_what_is_gathered_ahead() -> None:
    run_ranks(2, _prefetch_order)


# --- PB-122 -----------------------------------------------------------------------------------------------------------


@contextmanager
def _rank_variable(value: str | None) -> Iterator[None]:
    before = os.environ.pop("RANK", None)
    if value is not None:
        os.environ["RANK"] = value
    try:
        yield
    finally:
        os.environ.pop("RANK", None)
        if before is not None:
            os.environ["RANK"] = before


def _group_rank_wins(value: str | None) -> None:
    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = module(batch).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(0)
    with _rank_variable(value):
        model = compare_training(nn.Linear(6, 5, bias=False), fully_shard, step, steps=2)
        rows = model.weight.to_local()
        assert rows.numel() < 30 and torch.equal(rows.flatten(), _mine(model.weight.full_tensor(), rows.numel()))


def _mine(full: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the first or the last elements, by the rank in the group."""
    return full.flatten()[:numel] if dist.get_rank() == 0 else full.flatten()[-numel:]


@pytest.mark.parametrize("value", ["abc", "0", "7", None])
def test_pb122_rank_of_the_group_wins(value: str | None) -> None:
    run_ranks(2, _group_rank_wins, value)


@pytest.mark.parametrize(("value", "got"), [("abc", "'abc'"), (None, "nothing"), ("-1", "'-1'")])
def test_pb122_bad_rank_variable_is_an_error(value: str | None, got: str) -> None:
    environment = {"RANK": value, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(ValueError, match=f"expected an integer >= 0, got {got} for the environment variable RANK"):
        find_place({name: word for name, word in environment.items() if word is not None})


def test_pb122_without_a_group_there_is_no_rank() -> None:
    assert not dist.is_initialized()
    for value in ("abc", None):
        with _rank_variable(value), pytest.raises(RuntimeError, match="expected an initialised default process group"):
            fully_shard(nn.Linear(2, 2))


# --- PB-123 -----------------------------------------------------------------------------------------------------------


def _methods(*classes: type) -> dict[str, list[Callable[..., Any]]]:
    """Return the public methods that the classes define themselves, by name."""
    found: dict[str, list[Callable[..., Any]]] = {}
    for cls in classes:
        for name, value in vars(cls).items():
            if inspect.isfunction(value) and not name.startswith("_") and name != "forward":
                found.setdefault(name, []).append(value)
    return found


def _keywords(method: Callable[..., Any]) -> dict[str, Any]:
    """Return every keyword of a method that has a default, and its default."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return {p.name: p.default for p in parameters if p.default is not p.empty}


DDP_METHODS = _methods(_BaseDataParallel, DistributedDataParallel, StockFsdp)
OURS = {*_methods(adapter.FullyShardedDataParallel), *_methods(_BaseDataParallel)}


def test_pb123_methods_of_the_base_classes_keep_their_keywords() -> None:
    assert {"no_sync", "start_grad_sync", "finish_grad_sync", "zero_grad_buffer", "load_state_dict"} <= OURS
    for name in sorted(OURS & DDP_METHODS.keys()):
        taken = inspect.signature(getattr(adapter.FullyShardedDataParallel, name)).parameters
        for theirs in DDP_METHODS[name]:
            for keyword, default in _keywords(theirs).items():
                assert keyword in taken and taken[keyword].default == default, f"{name}({keyword})"


def _all_keywords(names: list[str]) -> list[str]:
    """Call methods with every keyword of every base class; return which were refused, by name."""
    start()
    chunk = wrap(build_tower())
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    required = {
        "scale_gradients": {"scaling_factor": 0.5},
        "load_state_dict": {"state_dict": chunk.module.state_dict()},
    }
    refused = []
    for name in names:
        for theirs in DDP_METHODS[name]:
            try:
                getattr(chunk, name)(**required.get(name, {}), **_keywords(theirs))
            except NotImplementedError as refusal:
                assert str(refusal).startswith(f"{name}: expected"), refusal
                refused.append(name)
    tower_loss(chunk.module, 1, 0, my_rank()).backward()
    assert_at_rest(chunk.module)
    return sorted(set(refused))


def test_pb123_every_method_takes_all_keywords() -> None:
    for refused in run_ranks(2, _all_keywords, sorted(OURS & DDP_METHODS.keys())):
        assert refused == ["broadcast_params", "offload_grad_buffers", "restore_grad_buffers"]
