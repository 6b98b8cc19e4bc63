# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Experts that are sharded by another strategy than everything else: numbers, collectives, checkpoints, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_v2_experts import is_expert
from megatron.core.distributed.fsdp.mcore_fsdp_v2_finalize import finalize_model_grads
from megatron.core.optimizer.fully_sharded_optimizer import get_megatron_optimizer
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import (
    assert_close,
    assert_equal,
    build_optimizer,
    build_tower,
    cpu_shim,
    ddp_config,
    full_weights,
    optimizer_config,
    run_schedule,
    start,
    wrap,
)
from tests.unit_tests.mcore_experts import accumulate, build_with_experts, read_chunk, save_chunk
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks
from tests.unit_tests.trace import CollectiveLog

NONE, ZERO1, ZERO2, ZERO3 = STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS = 10
MICROBATCHES = 2
EPSILON = 1e-2
"""Of Adam. Biases of keys have gradients of zero but for rounding, of which a small one makes steps of full size."""


def _kinds(dense: str, experts: str | None, instances: int = 1, **options: Any) -> dict[str, Any]:
    """Return the config's fields; "optim_grads_params+optim" names an outer strategy, too."""
    strategy, _, outer = dense.partition("+")
    of_experts, _, outer_of_experts = (experts or "").partition("+")
    return {
        "data_parallel_sharding_strategy": strategy,
        "outer_dp_sharding_strategy": outer or NONE,
        "expert_data_parallel_sharding_strategy": of_experts or None,
        "expert_outer_dp_sharding_strategy": outer_of_experts or None,
        "num_distributed_optimizer_instances": instances,
        **options,
    }


# --- training, beside megatron-core's own DDP -------------------------------------------------------------------------


def _train(options: dict[str, Any] | None, steps: int = STEPS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return norms before clipping, [steps], and last weights; without options under megatron-core's DDP."""
    start((options or {}).get("num_distributed_optimizer_instances", 1), expert_parallel_size=2)
    model = build_with_experts(2)
    if options is None:
        chunk: Any = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    else:
        chunk = wrap(model, **options)
    config: Any = get_model_config(chunk)
    config.no_sync_func, config.grad_sync_func = chunk.no_sync, chunk.start_grad_sync
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(optimizer_config(clip_grad=0.5, adam_eps=EPSILON), [chunk])
    norms = []
    for step in range(steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run_schedule(chunk, step, MICROBATCHES)
        if options is not None:
            assert_at_rest(chunk.module)
        is_updated, norm, _ = optimizer.step()
        assert is_updated
        norms.append(float(norm))
    if options is None:
        return torch.tensor(norms), {name: p.detach() for name, p in chunk.module.named_parameters()}
    return torch.tensor(norms), full_weights(chunk)


def _train_as_stock(kinds: list[tuple[str, str, int]]) -> None:
    with cpu_shim():
        want_norms, want = _train(None)
        assert bool((want_norms > 0.5).all()), "clipping takes part"
        for case in kinds:
            norms, weights = _train(_kinds(*case))
            torch.testing.assert_close(norms, want_norms, rtol=1e-6, atol=0)
            assert_close(weights, want, rtol=1e-6)


def test_dense_weights_and_experts_of_two_strategies_train_as_under_stock_ddp() -> None:
    """Ten steps of Adam on 4 ranks, of which two at a time share the experts, clipped by a norm over both kinds."""
    flat = [(ZERO3, ZERO1, 1), (ZERO1, ZERO3, 1), (NONE, ZERO2, 1)]
    run_ranks(4, _train_as_stock, [*flat, (f"{ZERO3}+{NONE}", f"{ZERO1}+optim", 2)])


def _other_settings() -> None:
    with cpu_shim():
        expected = _train(_kinds(ZERO3, ZERO1), steps=3)
        for options in (
            {"megatron_fsdp_reshard_after_forward": True, "megatron_fsdp_static_gradients": True},
            {"megatron_fsdp_reshard_after_forward": False, "megatron_fsdp_trace_pool": True},
        ):
            norms, weights = _train(_kinds(ZERO3, ZERO1, **options), steps=3)
            assert_equal({"norms": norms, **weights}, {"norms": expected[0], **expected[1]})


def test_settings_of_the_schedule_change_no_bit() -> None:
    """Some of them mean something to dense weights only, which are released where experts stay."""
    run_ranks(4, _other_settings)


# --- what is sent -----------------------------------------------------------------------------------------------------

WEIGHT_BYTES, GRADIENT_BYTES = 2, 4
ITEM_BYTES = {"torch.bfloat16": WEIGHT_BYTES, "torch.float32": GRADIENT_BYTES}


def _expected_bytes(strategy: str, units: list[tuple[int, bool]]) -> Counter[str]:
    """Return bytes by operation in a step, of units given by elements and whether they are the root.

    Example: ZeRO-3 gathers a layer before forward and backward of each microbatch, ZeRO-1 once after the step.
    """
    found: Counter[str] = Counter()
    for numel, is_root in units:
        if strategy == ZERO3:
            found["all_gather"] += MICROBATCHES * (1 if is_root else 2) * numel * WEIGHT_BYTES
        elif strategy != NONE:
            found["all_gather"] += numel * WEIGHT_BYTES
        if strategy == NONE:
            found["all_reduce"] += numel * GRADIENT_BYTES
        else:
            found["reduce_scatter"] += (1 if strategy == ZERO1 else MICROBATCHES) * numel * GRADIENT_BYTES
    return found


def _sends(dense: str, experts: str) -> None:
    start(expert_parallel_size=2)
    with cpu_shim():
        model = build_with_experts(2, dtype=torch.bfloat16, bf16=True)
        chunk = wrap(model, **_kinds(dense, experts, grad_reduce_in_fp32=True))
        optimizer = build_optimizer(chunk, bf16=True, params_dtype=torch.bfloat16)
        for step in range(2):
            chunk.zero_grad_buffer()
            with CollectiveLog() as log:
                accumulate(chunk, chunk, MICROBATCHES, step)
                chunk.finish_grad_sync()
            assert_at_rest(chunk.module)
            assert_same_on_all_ranks(log.entries)
            if step:  # before the first one, ranks compare models and orders
                _assert_bytes(chunk, log, dense, experts)
            optimizer.step()


def _assert_bytes(chunk: Any, log: CollectiveLog, dense: str, experts: str) -> None:
    units: dict[bool, list[tuple[int, bool]]] = {False: [], True: []}
    for unit in chunk.fsdp_units():
        of_experts = {is_expert(parameter) for parameter in unit.parameters(recurse=False)} == {True}
        of_experts = of_experts or unit in {layer.mlp.experts for layer in chunk.module.decoder.layers}
        units[of_experts] += [(group.layout.global_numel, unit is chunk.module) for group in unit.parameter_groups]
    assert len(units[True]) == 2 and len(units[False]) >= 3
    for of_experts, strategy, num_ranks in ((False, dense, 4), (True, experts, 2)):
        found: Counter[str] = Counter()
        for operation, dtype, numel, ranks in log.entries:
            if ranks == num_ranks:
                found[operation] += numel * ITEM_BYTES[dtype]
        assert found == _expected_bytes(strategy, units[of_experts]), (strategy, num_ranks)
    assert {ranks for *_, ranks in log.entries} == {2, 4}


PAIRS = [(NONE, ZERO1), (ZERO1, ZERO2), (ZERO2, ZERO3), (ZERO3, NONE), (ZERO3, ZERO1), (ZERO1, ZERO3)]


@pytest.mark.parametrize(("dense", "experts"), PAIRS)
def test_each_kind_sends_what_its_own_strategy_says(dense: str, experts: str) -> None:
    """bf16 weights and fp32 gradients, two microbatches; dense weights lie on 4 ranks, copies of experts on 2."""
    run_ranks(4, _sends, dense, experts)


def _is_placed() -> None:
    start(expert_parallel_size=2)
    with cpu_shim():
        chunk = wrap(build_with_experts(2), **_kinds(ZERO1, NONE))
    for name, parameter in chunk.module.named_parameters():
        shards = [at.is_shard() for at in parameter.placements]
        assert shards == [".experts." not in name], name
        assert parameter.device_mesh.size() == (2 if ".experts." in name else 4)
    with pytest.raises(NotImplementedError, match="force_all_reduce: expected False where the optimizer is sharded"):
        chunk.finish_grad_sync(force_all_reduce=True)
    with cpu_shim():
        chunk = wrap(build_with_experts(2), **_kinds(NONE, ZERO1))
    with pytest.raises(NotImplementedError, match="force_all_reduce: expected False where the optimizer is sharded"):
        chunk.finish_grad_sync(force_all_reduce=True)


def test_main_weights_of_each_kind_lie_where_its_strategy_says() -> None:
    run_ranks(4, _is_placed)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _moves(folder: str, ways: list[tuple[str, str | None]]) -> None:
    """Save under the first two strategies, and read under the others."""
    (dense, experts), *others = ways
    with cpu_shim():
        saved = save_chunk(folder, 2, **_kinds(dense, experts))
        assert max(float(value.abs().max()) for key, value in saved.items() if key.endswith("exp_avg_sq")) > 0
        assert any(".experts." in key for key in saved)
        for other in others:
            assert_equal(read_chunk(folder, 2, **_kinds(*other)), saved)


@pytest.mark.parametrize(
    "ways",
    [[(ZERO3, ZERO1), (ZERO1, ZERO3), (ZERO3, None)], [(ZERO1, ZERO3), (ZERO3, ZERO1)], [(ZERO3, None), (NONE, ZERO2)]],
    ids=["zero3_zero1", "zero1_zero3", "zero3"],
)
def test_a_checkpoint_moves_between_strategies_of_both_kinds_bit_for_bit(
    tmp_path: Path, ways: list[tuple[str, str | None]]
) -> None:
    run_ranks(4, _moves, str(tmp_path / "saved"), ways)


# --- what is refused --------------------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {"num_moe_experts": 4, "expert_model_parallel_size": 2}


def _refusals() -> None:
    start()
    for model, options, message in (
        (
            SHARED,
            _kinds(ZERO3, "zero1"),
            r"expert_data_parallel_sharding_strategy: expected None or one of \('no_shard', .*, got 'zero1'. Set --exp",
        ),
        (
            SHARED,
            _kinds(ZERO3, f"{ZERO1}+{ZERO2}", 2),
            r"expert_outer_dp_sharding_strategy: expected None or one of \('no_shard', 'optim'\), got 'optim_grads'",
        ),
        (
            SHARED,
            _kinds(ZERO3, ZERO3),
            "expert_data_parallel_sharding_strategy: expected another strategy than data_parallel_sharding_strategy="
            "'optim_grads_params', got the same; it would have no effect. Drop --expert-data-parallel-sharding",
        ),
        (
            SHARED,
            _kinds(f"{ZERO3}+{ZERO1}", f"{ZERO1}+{ZERO1}", 2),
            "expert_outer_dp_sharding_strategy: expected another strategy than outer_dp_sharding_strategy='optim', got",
        ),
        (
            SHARED,
            _kinds(ZERO3, f"{ZERO1}+{ZERO1}"),
            "expert_outer_dp_sharding_strategy: expected None with num_distributed_optimizer_instances=1, got 'optim'",
        ),
        (
            {},
            _kinds(ZERO3, ZERO1),
            "expert_data_parallel_sharding_strategy: expected None without expert parallelism, got 'optim' with "
            "num_moe_experts=None and expert_model_parallel_size=1; .* drop --expert-data-parallel-sharding-strategy",
        ),
        (
            {"num_moe_experts": 4},
            _kinds(ZERO3, f"+{ZERO1}", 2),
            "expert_outer_dp_sharding_strategy: expected None without expert parallelism, got 'optim' with "
            "num_moe_experts=4 and expert_model_parallel_size=1",
        ),
        (
            SHARED,
            _kinds(ZERO1, ZERO2, megatron_fsdp_reshard_after_forward=True),
            "megatron_fsdp_reshard_after_forward: expected None with data_parallel_sharding_strategy='optim', which",
        ),
        (
            SHARED,
            _kinds(ZERO1, ZERO3, megatron_fsdp_create_all_gather_group=True),
            "megatron_fsdp_create_all_gather_group: expected False with data_parallel_sharding_strategy='optim', which",
        ),
    ):
        tower = build_tower()
        vars(tower.config).update(model)
        with pytest.raises(ValueError, match=message):
            wrap(tower, config=ddp_config(**options))
    assert dist.get_world_size() == 1


def test_strategies_of_experts_without_effect_are_refused_before_ranks_communicate() -> None:
    run_ranks(1, _refusals)
