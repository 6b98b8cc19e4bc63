# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""megatron-core's schedule plans, which run one microbatch's layers in parts while another's backward runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from megatron.core.distributed.fsdp.mcore_fsdp_v2_finalize import finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_v2_overlap import refuse_shared_modules
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import (
    SAMPLES,
    SEQUENCE,
    Tower,
    build_gpt,
    build_tower,
    cpu_shim,
    full_gradients,
    my_rank,
    start,
    tokens,
    wrap,
)

WITH_EXPERTS: dict[str, Any] = {
    "num_layers": 3,  # so that one layer is in forward and in backward at a time
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "expert_model_parallel_size": 2,
    "bf16": True,
}


def _sum(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    total = (losses.float() * mask).sum()
    return total, mask.sum().to(torch.int), {"loss": total.detach()}


def _forward_step(data: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> Any:
    text, labels, mask = next(data)
    positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(text, positions, None, labels=labels), partial(_sum, mask)


def _step(
    chunk: Any, step: int, microbatches: int, num_given: int | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Run one step with megatron-core's schedule; return its losses and gradients."""
    chunk.zero_grad_buffer()
    chunk.config.no_sync_func = chunk.no_sync
    losses = forward_backward_no_pipelining(
        forward_step_func=_forward_step,
        data_iterator=(
            tokens(step, index, my_rank()) for index in range(microbatches if num_given is None else num_given)
        ),
        model=[chunk],
        num_microbatches=microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=SAMPLES,
        forward_only=False,
    )
    finalize_model_grads([chunk])
    return [loss["loss"] for loss in losses], full_gradients(chunk)


def _assert_rest(chunk: Any) -> None:
    """Every unit is sharded, and none keeps weights that it would have to gather."""
    for unit in chunk.fsdp_units():
        assert unit.is_resting() and unit.unshard_event is None, unit.name
        for group in unit.parameter_groups:
            assert not group.has_unreduced_gradients, unit.name
            assert not group.gathers or not group.full_weight.has_storage, unit.name


def _equals_plain(strategy: str, microbatches: int) -> None:
    start(expert_parallel_size=2)
    with cpu_shim():
        plain, planned = (
            wrap(
                build_gpt(dtype=torch.bfloat16, overlap_moe_expert_parallel_comm=overlaps, **WITH_EXPERTS),
                data_parallel_sharding_strategy=strategy,
            )
            for overlaps in (False, True)
        )
        for step in range(2):
            expected, found = (_step(chunk, step, microbatches) for chunk in (plain, planned))
            assert torch.equal(torch.stack(expected[0]), torch.stack(found[0]))
            assert expected[1].keys() == found[1].keys()
            differ = [name for name, gradient in expected[1].items() if not torch.equal(gradient, found[1][name])]
            assert not differ, differ
            assert all(bool(gradient.any()) for gradient in found[1].values())
            _assert_rest(planned)
        with torch.no_grad():
            text, labels, _ = tokens(9, 0, my_rank())
            positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
            assert torch.equal(*(chunk(text, positions, None, labels=labels) for chunk in (plain, planned)))
        _assert_rest(planned)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_plans_have_the_bits_of_whole_layers(strategy: str) -> None:
    run_ranks(2, _equals_plain, strategy, 3)


def test_a_plan_of_a_single_microbatch() -> None:
    run_ranks(2, _equals_plain, "optim_grads_params", 1)


def _refusals() -> None:
    start()
    for options, message in (
        (
            {"megatron_fsdp_trace_pool": True},
            "trace_pool: expected it off .* got True. Drop --fsdp-trace-pool, or --ov",
        ),
        ({"megatron_fsdp_min_unit_numel": 9}, "min_unit_numel: expected it off .* got 9. Drop --megatron-fsdp-min-u"),
    ):
        tower = build_tower()
        tower.config.overlap_moe_expert_parallel_comm = True
        with pytest.raises(NotImplementedError, match=message):
            wrap(tower, **options)
    tower = build_tower()
    tower.config.overlap_moe_expert_parallel_comm, tower.config.mtp_num_layers = True, 1
    with pytest.raises(
        NotImplementedError, match=r"mtp_num_layers: expected it off .* got 1. Leave --mtp-num-layers o"
    ):
        wrap(tower)
    tower = build_tower()
    tower.config.overlap_moe_expert_parallel_comm = True
    tower.config.sequence_parallel, tower.config.hidden_dropout = True, 0.5
    with pytest.raises(
        NotImplementedError, match=r"hidden_dropout and attention_dropout: expected 0 .* got 0.5; plans"
    ):
        wrap(tower)
    tower = build_tower()
    tower.config.overlap_moe_expert_parallel_comm = True
    with mock.patch.object(Tower, "build_schedule_plan", None, create=True):
        chunk = wrap(tower)
    inputs = torch.ones(2, tower.in_features)
    with pytest.raises(
        RuntimeError, match=r"forward of unit \w+.*: expected the nodes of a schedule plan, or torch.no_"
    ):
        chunk(inputs)
    with torch.no_grad():
        assert chunk(inputs).shape == (2, tower.out_features)
    _assert_rest(chunk)


def _raises(*unused: Any) -> Any:
    raise ArithmeticError("on purpose")


def _raise_in_backward(module: Any, args: Any, output: Any) -> None:
    output[0].register_hook(_raises)


def _after_exceptions() -> None:
    start(expert_parallel_size=2)
    with cpu_shim():
        plain, planned = (
            wrap(build_gpt(dtype=torch.bfloat16, overlap_moe_expert_parallel_comm=overlaps, **WITH_EXPERTS))
            for overlaps in (False, True)
        )
        layer: Any = planned.module.decoder.layers[1]
        # Between plans, in a node's forward, and in a node's backward, on all ranks alike.
        with pytest.raises(StopIteration):
            _step(planned, 0, 2, num_given=1)
        routed, layer.mlp.route = layer.mlp.route, _raises
        with pytest.raises(ArithmeticError):
            _step(planned, 0, 2)
        layer.mlp.route = routed
        handle = layer.mlp.router.register_forward_hook(_raise_in_backward)
        with pytest.raises(ArithmeticError):
            _step(planned, 0, 2)
        handle.remove()
        for chunk in (plain, planned):
            with torch.no_grad():
                for parameter in chunk.module.parameters():
                    parameter.mul_(1.25)
        expected, found = (_step(chunk, 0, 3)[1] for chunk in (plain, planned))
        differ = [name for name, gradient in expected.items() if not torch.equal(gradient, found[name])]
        assert not differ, differ
        _assert_rest(planned)


def test_steps_after_an_exception_begin_anew() -> None:
    run_ranks(2, _after_exceptions)


def _is_freed() -> None:
    start()
    with mock.patch.object(Tower, "build_schedule_plan", None, create=True):
        tower = build_tower()
        tower.config.overlap_moe_expert_parallel_comm = True
        chunk = wrap(tower)
    gone = weakref.ref(tower)
    gc.collect()
    gc.disable()
    try:
        del chunk, tower
        assert gone() is None
    finally:
        gc.enable()


def test_a_driven_model_is_freed_at_once() -> None:
    run_ranks(1, _is_freed)


def test_modules_that_layers_share_are_refused() -> None:
    refuse_shared_modules([])
    with pytest.raises(NotImplementedError, match=r"expected units without common modules, got \['LayerNorm'\] in sev"):
        refuse_shared_modules([torch.nn.LayerNorm(2)])


def test_what_does_not_go_with_plans_is_refused() -> None:
    run_ranks(1, _refusals)
