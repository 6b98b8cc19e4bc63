# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Orders that units do not run in as they are defined: learnt in one iteration, gathered ahead from the next one on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import Placements, fully_shard_context, fully_shard_optimizer
from megatron.core.distributed.fsdp.experimental.device import observe
from megatron.core.distributed.fsdp.experimental.indexed_order import IndexedOrder
from megatron.core.distributed.fsdp.experimental.learnt_order import LearntOrder
from tests.unit_tests.cases.compare import assert_close
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import shard_layers
from tests.unit_tests.oracle import assert_at_rest, full_gradients
from tests.unit_tests.trace import CollectiveLog, Trace

SHORT = {"all_gather": "AG", "forward": "F", "backward": "B", "free": "free"}


class _Ordered(nn.Module):
    """Calls its layers in any order, as often as it is told to; the root has a parameter of its own."""

    def __init__(self, order: Sequence[int], num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = list(order)
        self.scale = nn.Parameter(torch.ones(5))
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x * self.scale


def _words(trace: Trace) -> list[str]:
    words = []
    for _, operation, buffers in trace.events:
        if operation in SHORT and buffers and "grad" not in buffers[0]:
            number = re.match(r"layers\.(\d)\.", buffers[0])
            words.append(f"{SHORT[operation]}{'r' if number is None else number[1]}")
    trace.events.clear()
    return words


def _iterations(orders: Sequence[Sequence[int]], is_evaluated: bool = False) -> list[list[str]]:
    """Return what each of several iterations does, with an order each; or what an evaluation after the last does."""
    trace = Trace()
    found = []
    with observe(trace):
        model = _Ordered(orders[0])
        with fully_shard_context("cpu"):
            shard_layers(model)
        trace.events.clear()
        for order in orders:
            model.order = list(order)
            model(_batch()).square().sum().backward()
            found.append(_words(trace))
        if is_evaluated:
            with torch.no_grad():
                model(_batch())
            found.append(_words(trace))
    assert not trace.races
    return found


def _batch() -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


REVERSED = (
    "AGr AG3 Fr AG2 F3 free3 AG1 F2 free2 AG0 F1 free1 F0 free0 "
    "AG0 Br AG1 B0 free0 AG2 B1 free1 AG3 B2 free2 B3 free3 freer"
)
REVERSED_AT_FIRST = (
    "AGr AG0 Fr AG3 F3 free3 AG2 AG3 F2 free2 AG1 AG2 F1 free1 AG1 F0 free0 "
    "Br AG0 B0 free0 AG0 B1 free1 AG1 B2 free2 AG2 B3 free3 freer free0 free1 free2"
)


def test_reversed_layers_overlap_from_the_second_iteration() -> None:
    """At first a unit gathers what is defined next, and that waits for its turn; then always what runs next."""
    ((first, second, third, evaluation),) = run_ranks(1, _iterations, [[3, 2, 1, 0]] * 3, True)
    assert " ".join(first) == REVERSED_AT_FIRST
    assert " ".join(second) == " ".join(third) == REVERSED
    assert " ".join(evaluation) == REVERSED[: REVERSED.index(" AG0 Br")] + " freer"


@pytest.mark.parametrize(
    ("order", "schedule"),
    [
        (
            [0, 1, 0, 2],
            "AGr AG0 Fr AG1 F0 free0 AG0 F1 free1 AG2 F0 free0 F2 free2 "
            "AG2 Br AG0 B2 free2 AG1 B0 free0 AG0 B1 free1 B0 free0 freer",
        ),
        ([0, 0, 1], "AGr AG0 Fr AG1 F0 free0 AG0 F0 free0 F1 free1 AG1 Br AG0 B1 free1 B0 free0 AG0 B0 free0 freer"),
        ([0, 2, 3], "AGr AG0 Fr AG2 F0 free0 AG3 F2 free2 F3 free3 AG3 Br AG2 B3 free3 AG0 B2 free2 B0 free0 freer"),
    ],
)
def test_units_used_twice_and_left_out(order: list[int], schedule: str) -> None:
    ((_, second),) = run_ranks(1, _iterations, [order] * 2)
    assert " ".join(second) == schedule


def test_an_order_that_is_left_is_picked_up_again() -> None:
    """Layer 2 does not come: what was gathered for it is released, and what comes after it is gathered ahead again."""
    ((_, left, again),) = run_ranks(1, _iterations, [[3, 2, 1, 0], [3, 1, 0], [3, 2, 1, 0]])
    assert " ".join(left) == (
        "AGr AG3 Fr AG2 F3 free3 AG1 AG0 F1 free1 F0 free0 AG0 Br AG1 B0 free0 B1 free1 AG3 B3 free3 freer free2"
    )
    assert " ".join(again) == REVERSED


def test_unexpected_units_gather_on_demand_until_ranks_learn_anew() -> None:
    """Reversed in the first backward only: the other order is learnt in the 16th."""
    (found,) = run_ranks(1, _iterations, [[3, 2, 1, 0], *[[0, 1, 2, 3]] * 16])
    demand = (
        "AGr AG3 Fr AG0 F0 free0 AG1 F1 free1 AG2 F2 free2 F3 free3 "
        "AG0 Br AG3 B3 free3 AG2 B2 free2 AG1 B1 free1 B0 free0 freer"
    )
    assert [" ".join(words) for words in found[1:16]] == [demand] * 15
    assert " ".join(found[16]) == (
        "AGr AG0 Fr AG1 F0 free0 AG2 F1 free1 AG3 F2 free2 F3 free3 "
        "AG3 Br AG2 B3 free3 AG1 B2 free2 AG0 B1 free1 B0 free0 freer"
    )


def _second_gathers(orders: Sequence[Sequence[int]]) -> list[str]:
    """Return what the second forward gathers, where weights are gathered once a step, of layers of one size.

    So ranks may call them in different orders and still make the same calls.
    """
    trace = Trace()
    with observe(trace):
        model = _Ordered(orders[dist.get_rank()])
        with fully_shard_context("cpu"):
            shard_layers(model, placements=Placements.from_strategy("optim"))
        model(_batch()).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0)
        model.order = [3, 2, 1, 0]
        trace.events.clear()
        model(_batch())
    return [word for word in _words(trace) if word.startswith("AG")]


def test_ranks_that_have_run_differently_learn_nothing() -> None:
    assert (
        run_ranks(2, _second_gathers, [[3, 2, 1, 0], [3, 2, 0, 1]], timeout_s=60)
        == [["AGr", "AG0", "AG3", "AG2", "AG1"]] * 2
    )
    assert run_ranks(2, _second_gathers, [[3, 2, 1, 0]] * 2, timeout_s=60) == [["AGr", "AG3", "AG2", "AG1", "AG0"]] * 2


def test_ranks_that_agree_learn() -> None:
    for _, second in run_ranks(2, _iterations, [[3, 2, 1, 0]] * 2):
        assert " ".join(second) == REVERSED


def _collectives() -> list[list[tuple[str, str, int, int]]]:
    model = _Ordered([3, 2, 1, 0])
    shard_layers(model)
    found = []
    for _ in range(16):
        with CollectiveLog(comparisons=True) as log:
            model(_batch()).sum().backward()
        found.append([entry for entry in log.entries if entry[0] == "all_reduce"])
    return found


def test_ranks_compare_once_and_seldom_again() -> None:
    """Apart from the two comparisons of the units themselves in the first forward."""
    for numbers in run_ranks(2, _collectives):
        compared = [("all_reduce", "torch.int64", 4, 2)]
        assert numbers[0][-1:] == compared
        assert numbers[1:] == [[]] * 14 + [compared]


def _trained(order: list[int], num_steps: int) -> None:
    model, reference = _Ordered(order), _Ordered(order)
    shard_layers(model)
    for step in range(num_steps):
        batches = torch.randn(dist.get_world_size(), 3, 5, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(batches[dist.get_rank()]).square().mean().backward()
        assert_at_rest(model)
        reference.zero_grad()
        for batch in batches:
            (reference(batch).square().mean() / len(batches)).backward()
        gradients = full_gradients(model)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                assert_close(gradients[name], parameter.grad, f"gradient of {name} in step {step}")


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 1, 0, 2], [2, 2, 0, 2]])
def test_gradients_are_those_of_one_process(order: list[int]) -> None:
    run_ranks(2, _trained, order, 3)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("on purpose")


def _after_a_failure() -> list[str]:
    trace = Trace()
    with observe(trace):
        model = _Ordered([3, 2, 1, 0])
        with fully_shard_context("cpu"):
            shard_layers(model)
        with pytest.raises(ValueError, match="on purpose"):
            model(_Failing.apply(_batch().requires_grad_())).sum().backward()
        for _ in range(2):
            trace.events.clear()
            model(_batch()).square().sum().backward()
    return _words(trace)


def test_a_backward_that_failed_is_not_learnt() -> None:
    (words,) = run_ranks(1, _after_a_failure)
    assert " ".join(words) == REVERSED


def _in_a_pool(order: list[int]) -> tuple[list[str], int]:
    """Return the last iteration and the pool's bytes."""
    trace = Trace()
    with observe(trace):
        model = _Ordered(order)
        with fully_shard_context("cpu", trace_pool=True) as context:
            shard_layers(model)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            trace.events.clear()
            model(_batch()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert context.pool is not None and context.pool.num_fallbacks == 0
    return _words(trace), context.pool.num_bytes


def test_a_pool_records_the_order_that_was_learnt() -> None:
    """The gathers of the first iteration would have it hold all four layers at once."""
    defined = run_ranks(2, _in_a_pool, [0, 1, 2, 3])
    for (words, num_bytes), (_, expected) in zip(run_ranks(2, _in_a_pool, [3, 2, 1, 0]), defined, strict=True):
        assert " ".join(words) == REVERSED
        assert num_bytes == expected > 0


class _Named:
    """A unit as far as orders look at it."""

    def __init__(self, root: Any = None) -> None:
        self.root = self if root is None else root

    def _fsdp_root(self) -> Any:
        return self.root


def _order(num_units: int, agrees: Any, captures: list[bool]) -> tuple[list[Any], LearntOrder]:
    root = _Named()
    units: list[Any] = [root, *(_Named(root) for _ in range(num_units - 1))]
    forward: IndexedOrder[Any] = IndexedOrder()
    backward: IndexedOrder[Any] = IndexedOrder()
    for unit, other in zip(units, [root, *units[:0:-1]], strict=True):
        forward.append(unit)
        backward.append(other)
    return units, LearntOrder(forward, backward, agrees, lambda: bool(captures) and captures.pop(0))


def test_nobody_is_asked_in_a_capture_or_where_there_is_no_choice() -> None:
    told: list[str] = []
    units, order = _order(3, lambda text: told.append(text) is None, [True])
    for number in range(17):
        for index in (0, 2, 1):
            order.after_backward(units[index])
        for index in (0, 2, 1):
            order.after_forward(units[index], 1 if index == 0 else 2)
        has_changed = order.end_backward()
        # The first is captured, perhaps on this rank only, and does not count: the next one is the first, for all.
        assert has_changed == (number == 1)
        assert len(told) == (0 if number == 0 else 1 if number < 16 else 2)
    assert told == ["[[0, 2, 1]]; []"] * 2
    two, order = _order(2, lambda text: told.append(text) is None, [])
    order.after_backward(two[0])
    assert not order.end_backward()
    assert len(told) == 2


def test_what_ranks_do_not_agree_on_is_forgotten() -> None:
    answers = [True, False]
    units, order = _order(3, lambda text: answers.pop(0), [])
    for number in range(16):
        for index in (0, 2, 1):
            order.after_forward(units[index], 1 if index == 0 else 2)
        for index in (0, 1, 2):
            order.after_backward(units[index])
        assert order.end_backward() == (number in (0, 15))
        expected = [1, 2] if number == 15 else [2, 1]
        assert list(order.after_forward(units[0], 1)) == [units[index] for index in expected]


def test_passes_of_two_roots_are_learnt_apart() -> None:
    first, second = _Named(), _Named()
    units: list[Any] = [first, _Named(first), _Named(first), second, _Named(second), _Named(second)]
    forward: IndexedOrder[Any] = IndexedOrder()
    backward: IndexedOrder[Any] = IndexedOrder()
    for index in range(6):
        forward.append(units[index])
        backward.append(units[(3, 5, 4, 0, 2, 1)[index]])
    told: list[str] = []
    order = LearntOrder(forward, backward, lambda text: told.append(text) is None, lambda: False)
    for index in (0, 2, 1):
        order.after_forward(units[index], 1 if index == 0 else 2)
    for index in (3, 4, 5):
        order.after_forward(units[index], 1 if index == 3 else 2)
    for index in (3, 5, 4, 0, 1, 2):
        order.after_backward(units[index])
    order.end_backward()
    # The second root's forward and the first five units of backward ran as they are defined, but not the whole of it.
    assert told == ["[[0, 2, 1]]; [[0, 1, 2, 3, 5, 4]]"]
    assert list(order.after_forward(units[0], 1)) == [units[2], units[1]]
    assert list(order.after_forward(units[3], 1)) == [units[4], units[5]]
    assert list(order.after_backward(units[3])) == [units[index] for index in (5, 4, 0, 1, 2)]
    # A gather that belongs to no forward follows the definition.
    assert list(order.after_forward(units[1], 0)) == units[2:]
