# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The exact order of gathers, compute, releases and reductions, and a race for every wait that is taken away."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    Fp8Recipe,
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
    slot_plan,
    trace_pool,
)
from megatron.core.distributed.fsdp.experimental.device import observe
from megatron.core.distributed.fsdp.experimental.trace_pool import TracePool
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.models import Mlp, build, loss_of, make_batch, shard_layers
from tests.unit_tests.trace import Trace

SHORT = {
    "all_gather": "AG",
    "forward": "F",
    "backward": "B",
    "free": "free",
    "pack": "pack",
    "reduce_scatter": "RS",
}
NUM_STEPS = 3


class _Aside(Mlp):
    """Calls its first layer for nothing: backward gathers it ahead, and nobody waits for that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0](x)
        return super().forward(x).detach() + self.layers[2](self.layers[1](x.new_ones(len(x), 13)))


def _train(
    trace: Trace,
    *,
    aside: bool = False,
    dtype: torch.dtype = torch.float32,
    context: dict[str, Any] | None = None,
    mesh_shape: tuple[int, ...] | None = None,
    **shard: Any,
) -> nn.Module:
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape)
    with observe(trace):
        model = (_Aside() if aside else build("mlp")).to(dtype)
        with fully_shard_context("cpu", **(context or {})) as fsdp_context:
            shard_layers(model, mesh=mesh, **shard)
        if fsdp_context.pool is not None:
            trace.sharing = functools.partial(_sharing, fsdp_context.pool)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        inputs, targets = make_batch(model, 4, seed=0)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            # What backward has gathered for nothing is not gathered any more after the first one.
            num_microbatches = 1 if aside else 2
            for index in range(num_microbatches):
                with microbatch(fsdp_context, is_last=index == num_microbatches - 1):
                    loss_of(model, inputs.to(dtype), targets).backward()
            optimizer.step()
    if fsdp_context.pool is not None:
        assert fsdp_context.pool.is_active and fsdp_context.pool.num_fallbacks == 0
    return model


def _sharing(pool: TracePool, name: str) -> list[str]:
    """Return the buffers whose places overlap that of the named one, which has one once the pool has planned."""
    slots = pool.slots if pool.is_active else {}
    return [other for other, slot in slots.items() if name in slots and other != name and slot.overlaps(slots[name])]


def _first_step(keeps_last: bool = False, **options: Any) -> list[str]:
    """Return the first forward and backward as words like AG0 F0 free0; layers by number, r is the root.

    The root returns the last layer's output, but its backward is announced before that layer's.
    """
    trace = Trace()
    with observe(trace):
        model = build("mlp")
        with fully_shard_context("cpu"):
            shard_layers(model, **options)
        if keeps_last:
            model.layers[-1].set_reshard_after_forward(False)
        inputs, targets = make_batch(model, 4, seed=0)
        loss_of(model, inputs, targets).backward()
    words = []
    for stream, operation, buffers in trace.events:
        if operation not in SHORT or not buffers:
            continue
        number = re.match(r"layers\.(\d)\.", buffers[0])
        unit = "r" if number is None else number[1]
        kind = "grad" if operation == "free" and "full_grad" in buffers[0] else ""
        words.append(f"{SHORT[operation]}{kind}{unit}")
        expected = {"AG": "all_gather", "RS": "reduce_scatter", "F": "compute", "B": "compute", "pack": "compute"}
        if SHORT[operation] in expected:
            assert stream == expected[SHORT[operation]], (stream, operation)
    assert not trace.races
    return words


def test_prefetching_schedule() -> None:
    """While unit 0 computes, unit 1 is gathered; at most two layers are gathered at a time, besides the root."""
    (words,) = run_ranks(1, _first_step)
    assert (
        words
        == (
            "AGr AG0 Fr AG1 F0 free0 AG2 F1 free1 F2 free2 "
            "AG2 Br AG1 B2 pack2 RS2 free2 AG0 B1 pack1 RS1 free1 B0 freegrad2 pack0 RS0 free0 "
            "freegrad1 packr RSr freer freegrad0 freegradr"
        ).split()
    )


def test_schedule_without_prefetch() -> None:
    policy = SchedulePolicy(forward_prefetch_units=0, backward_prefetch_units=0, reshard_after_forward=True)
    (words,) = run_ranks(1, _first_step_with, policy)
    assert (
        words
        == (
            "AGr Fr AG0 F0 free0 AG1 F1 free1 AG2 F2 free2 freer "
            "AGr Br AG2 B2 pack2 RS2 free2 AG1 B1 pack1 RS1 free1 AG0 B0 freegrad2 pack0 RS0 free0 "
            "freegrad1 packr RSr freer freegrad0 freegradr"
        ).split()
    )


def test_last_layer_kept_for_backward() -> None:
    """It costs no gather in backward, and its memory in between, beside the root's."""
    (words,) = run_ranks(1, _first_step, True)
    assert (
        words
        == (
            "AGr AG0 Fr AG1 F0 free0 AG2 F1 free1 F2 "
            "Br AG1 B2 pack2 RS2 free2 AG0 B1 pack1 RS1 free1 B0 freegrad2 pack0 RS0 free0 "
            "freegrad1 packr RSr freer freegrad0 freegradr"
        ).split()
    )


def test_budget_in_elements() -> None:
    """104 + 154 elements of the first two layers fit into 260, those of the third do not."""
    policy = SchedulePolicy(forward_prefetch_units=9, forward_prefetch_numel=260)
    (words,) = run_ranks(1, _first_step_with, policy)
    assert words[:5] == ["AGr", "AG0", "AG1", "Fr", "AG2"]


def _first_step_with(policy: SchedulePolicy) -> list[str]:
    return _first_step(schedule_policy=policy)


RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "bf16_gradients": {
        "dtype": torch.bfloat16,
        "mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16),
    },
    "unified": {"context": {"unify_communication_stream": True}},
    "reshard": {"schedule_policy": SchedulePolicy(reshard_after_forward=True)},
    "keep": {"schedule_policy": SchedulePolicy(reshard_after_forward=False)},
    "aside": {"aside": True},
    **{
        f"{strategy}_{dtype}": {"placements": Placements.from_strategy(strategy), "dtype": getattr(torch, dtype)}
        for strategy in ("no_shard", "optim", "optim_grads")
        for dtype in ("float32", "bfloat16")
    },
    **{
        f"outer_{outer}_{shape}": {
            "placements": Placements.from_strategy("optim_grads_params", outer=outer),
            "mesh_shape": shape,
            "dtype": torch.bfloat16,
            "mixed_precision_policy": MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
        }
        for outer in ("no_shard", "optim")
        for shape in ((1, 2), (2, 1))
    },
    "deep": {"schedule_policy": SchedulePolicy(forward_prefetch_units=3, backward_prefetch_units=3)},
    **{
        f"quantized_{name}": {
            "placements": Placements.from_strategy(strategy, outer=outer),
            "mesh_shape": shape,
            "dtype": torch.bfloat16,
            "mixed_precision_policy": MixedPrecisionPolicy(**recipe),
        }
        for name, strategy, outer, shape, recipe in (
            ("nvfp4", "optim_grads_params", None, (2,), {"nvfp4": True}),
            ("rows", "optim", None, (2,), {"fp8": Fp8Recipe(scaling="row")}),
            ("tensors", "optim_grads_params", "optim", (2, 1), {"fp8": True}),
        )
    },
}


def _races(recipe: dict[str, Any], dropped_wait: str | None = None) -> tuple[list[str], list[str]]:
    trace = Trace(dropped_wait)
    _train(trace, **recipe)
    return trace.races, trace.wait_sites


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_races(recipe: str) -> None:
    for races, _ in run_ranks(2, _races, RECIPES[recipe]):
        assert races == []


def test_every_wait_is_needed() -> None:
    """Without any one of the schedule's waits the trace shows a race, so a wait can be neither lost nor superfluous."""
    ((_, sites),) = run_ranks(1, _races, RECIPES["bf16"])
    assert len(sites) == 8
    for site in sites:
        recipe = "aside" if "await_gathers" in site else "bf16"
        ((races, _),) = run_ranks(1, _races, RECIPES[recipe], site)
        assert races, f"no race without the wait at {site}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_races_in_a_pool(recipe: str) -> None:
    """Two buffers in overlapping slots are one memory."""
    for races, _ in run_ranks(2, _races, _pooled(recipe)):
        assert races == []


def _pooled(recipe: str) -> dict[str, Any]:
    return {**RECIPES[recipe], "context": {**RECIPES[recipe].get("context", {}), "trace_pool": True}}


def _races_without_home_streams() -> list[str]:
    def ignore_the_stream(num_bytes: int, key: Any) -> slot_plan.Request:
        return slot_plan.Request(num_bytes, key[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_pool, "Request", ignore_the_stream)
        races, _ = _races(_pooled("fp32"))
    return races


def test_slots_of_several_streams_would_race() -> None:
    """Were memory shared by streams, as where a plan knows of none, the trace would show it."""
    (races,) = run_ranks(1, _races_without_home_streams)
    assert any("full_grad" in race for race in races) and any("reduced" in race for race in races), races


def test_every_wait_is_needed_in_a_pool() -> None:
    """All but that of `release_gradients`: with a pool cleared gradients keep their memory."""
    ((_, sites),) = run_ranks(1, _races, _pooled("bf16"))
    assert len(sites) == 7
    for site in sites:
        recipe = "aside" if "await_gathers" in site else "bf16"
        ((races, _),) = run_ranks(1, _races, _pooled(recipe), site)
        assert races, f"no race without the wait at {site}"


class _TwoEnds(nn.Module):
    """Its second output's gradient comes after all others: the unit reduces twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x


def _twice_in_one_backward() -> list[str]:
    trace = Trace()
    with observe(trace):
        with fully_shard_context("cpu"):
            model = fully_shard(_TwoEnds())
        seed = torch.ones(1, 4, requires_grad=True)
        first, second = model(seed.sin())
        (first.sum() + second.sum()).backward()
    return trace.races


def test_no_races_when_a_unit_reduces_twice() -> None:
    assert run_ranks(1, _twice_in_one_backward) == [[]]


def _open_block_forward() -> None:
    model = build("mlp")
    with fully_shard_context("cpu"):
        shard_layers(model)
        model(torch.ones(1, 7))


def test_forward_inside_the_block_is_refused() -> None:
    for message in run_ranks_expecting(1, RuntimeError, _open_block_forward):
        assert "still open" in message


def _orders() -> tuple[list[str], list[str]]:
    model = nn.Sequential(build("mlp"), build("tied"))
    with fully_shard_context("cpu") as context:
        shard_layers(model[1])
        shard_layers(model[0])
    return [unit.name for unit in context.forward_order], [unit.name for unit in context.backward_order]


def test_orders_of_two_roots() -> None:
    """Roots run forward as they were built and backward in reverse; layers within a root likewise."""
    ((forward, backward),) = run_ranks(1, _orders)
    layers = ["layers.0", "layers.1", "layers.2"]
    assert forward == ["FsdpTiedLm", *layers, "FsdpMlp", *layers]
    assert backward == ["FsdpMlp", *layers[::-1], "FsdpTiedLm", *layers[::-1]]
