# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The small values: placements, policies, orders, countdowns, host streams."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron.core.distributed.fsdp.experimental import Flat, MixedPrecisionPolicy, Placements, SchedulePolicy
from megatron.core.distributed.fsdp.experimental.countdown import Countdown
from megatron.core.distributed.fsdp.experimental.device import current_stream, new_stream, resolve_device
from megatron.core.distributed.fsdp.experimental.indexed_order import IndexedOrder
from megatron.core.distributed.fsdp.experimental.placement import Communication, communication


def test_flat_is_a_value() -> None:
    assert Flat() == Flat() and hash(Flat()) == hash(Flat()) and repr(Flat()) == "Flat()"
    assert Flat() != Shard(0) and Flat() != Replicate()


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (Flat(), Flat(), Communication.NONE),
        (Replicate(), Replicate(), Communication.NONE),
        (Flat(), Replicate(), Communication.ALL_GATHER),
        (Partial("avg"), Flat(), Communication.REDUCE_SCATTER),
        (Partial("sum"), Replicate(), Communication.ALL_REDUCE),
        (Replicate(), Flat(), Communication.SLICE),
    ],
)
def test_communication_of_a_placement_change(source: object, target: object, expected: Communication) -> None:
    assert communication(source, target) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "target"), [(Replicate(), Partial()), (Flat(), Partial()), (Shard(0), Flat())])
def test_placement_change_without_meaning(source: object, target: object) -> None:
    with pytest.raises(ValueError, match="placement change: expected one of Flat->Replicate"):
        communication(source, target)  # type: ignore[arg-type]


SHARD, FULL = Shard(0), Replicate()


@pytest.mark.parametrize(
    ("strategy", "outer", "parameter", "gradient", "optimizer"),
    [
        ("no_shard", None, (FULL,), (FULL,), (FULL,)),
        ("optim", None, (FULL,), (FULL,), (SHARD,)),
        ("optim_grads", None, (FULL,), (SHARD,), (SHARD,)),
        ("optim_grads_params", None, (SHARD,), (SHARD,), (SHARD,)),
        ("optim_grads_params", "no_shard", (FULL, SHARD), (FULL, SHARD), (FULL, SHARD)),
        ("optim_grads_params", "optim", (FULL, SHARD), (FULL, SHARD), (SHARD, SHARD)),
    ],
)
def test_strategies_are_placements(
    strategy: str, outer: str | None, parameter: object, gradient: object, optimizer: object
) -> None:
    placements = Placements.from_strategy(strategy, outer=outer)
    assert (placements.parameter, placements.gradient, placements.optimizer) == (parameter, gradient, optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "zero3"}, "strategy: expected one of"),
        ({"strategy": "optim", "outer": "optim_grads"}, "outer strategy: expected one of"),
        ({"strategy": "optim", "dp_axes": ("a", "b")}, "dp_axes: expected 1 axes"),
        ({"strategy": "optim", "outer": "optim", "dp_axes": ("a",)}, "dp_axes: expected 2 axes"),
    ],
)
def test_bad_strategies(arguments: dict[str, object], message: str) -> None:
    """PB-119: an unknown or ill-fitting name is refused, never replaced by a default."""
    with pytest.raises(ValueError, match=message):
        Placements.from_strategy(**arguments)  # type: ignore[arg-type]


def test_bad_placements() -> None:
    with pytest.raises(ValueError, match=r"Placements\.gradient: expected one Shard\(0\) or Replicate\(\)"):
        Placements(("dp",), (SHARD,), (Shard(1),), (SHARD,))
    with pytest.raises(ValueError, match=r"Placements\.optimizer"):
        Placements(("dp",), (SHARD,), (SHARD,), (SHARD, SHARD))
    with pytest.raises(ValueError, match=r"Placements.tensor_atomic: expected an axis that shards the optimizer"):
        Placements.from_strategy("no_shard", tensor_atomic=True)


@pytest.mark.parametrize("field", ["main_params_dtype", "main_grads_dtype", "grad_comm_dtype"])
@pytest.mark.parametrize("value", [torch.int32, "float32"])
def test_bad_dtypes(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"MixedPrecisionPolicy\.{field}: expected a floating-point"):
        MixedPrecisionPolicy(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward_prefetch_units": -1}, "forward_prefetch_units: expected an int >= 0"),
        ({"backward_prefetch_units": True}, "backward_prefetch_units: expected an int >= 0"),
        ({"forward_prefetch_numel": 0}, "forward_prefetch_numel: expected an int >= 1"),
        ({"backward_prefetch_units": 0, "backward_prefetch_numel": 5}, "it would have no effect"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward: expected True, False, None or an int >= 1, got 'no'"),
        ({"reshard_after_forward": 0}, "reshard_after_forward: expected True, False, None or an int >= 1, got 0"),
    ],
)
def test_bad_schedule_policies(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulePolicy(**arguments)  # type: ignore[arg-type]


class _Item:
    pass


def test_order_looks_up_successors_and_forgets_the_dead() -> None:
    order: IndexedOrder[_Item] = IndexedOrder()
    items = [_Item() for _ in range(4)]
    for item in items:
        order.append(item)
    assert list(order.successors(items[1])) == items[2:] and len(order) == 4
    del items[2], item
    assert list(order.successors(items[1])) == [items[2]] and len(order) == 3
    with pytest.raises(KeyError, match="expected an item of this order"):
        next(order.successors(_Item()))
    with pytest.raises(ValueError, match="expected each item once"):
        order.append(items[0])


def test_countdown_fires_once() -> None:
    countdown = Countdown(3)
    assert [countdown.tick() for _ in range(3)] == [False, False, True]
    with pytest.raises(RuntimeError, match="expected 3 events, got one more"):
        countdown.tick()
    countdown.reset()
    assert [countdown.tick() for _ in range(3)] == [False, False, True]
    with pytest.raises(ValueError, match="expected total >= 0"):
        Countdown(-1)


def test_host_streams_have_always_finished() -> None:
    cpu = torch.device("cpu")
    stream = new_stream(cpu, "all_gather")
    with stream as entered:
        assert entered is stream
    event = stream.record_event()
    assert event is not None and event.query()
    stream.wait_event(event)
    stream.wait_stream(current_stream(cpu))
    assert resolve_device("cpu") == cpu
