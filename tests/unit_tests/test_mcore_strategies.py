# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every sharding strategy under megatron-core's contract: its schedule, its calls, its process groups, stock DDP."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.experimental import FsdpModule, fully_shard_optimizer
from megatron.core.distributed.fsdp.experimental.waiting import WaitingGradient
from megatron.core.optimizer.fully_sharded_optimizer import get_megatron_optimizer
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.mcore import (
    Tower,
    adapter,
    assert_close,
    assert_equal,
    build_gpt,
    build_optimizer,
    build_tower,
    cpu_shim,
    ddp_config,
    full_gradients,
    full_weights,
    my_rank,
    optimizer_config,
    run_schedule,
    start,
    tower_batch,
    tower_gradients,
    tower_loss,
    wrap,
)
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks
from tests.unit_tests.trace import CollectiveLog

BF16, FP32 = torch.bfloat16, torch.float32
MICROBATCHES = 3


@dataclass(frozen=True)
class Layout:
    """A strategy, and what one unit's gradients go through in it.

    Attributes:
        strategy: of the inner axis.
        outer: of the outer axis.
        instances: ranks along the outer axis.
        early: collectives of a microbatch that others follow.
        last: those of the last microbatch.
        gathers: those that bring weights, for the first time after a step.
    """

    strategy: str
    outer: str = "no_shard"
    instances: int = 1
    early: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ("all_gather",)

    @property
    def world_size(self) -> int:
        return 2 * self.instances

    @property
    def options(self) -> dict[str, Any]:
        return {
            "data_parallel_sharding_strategy": self.strategy,
            "outer_dp_sharding_strategy": self.outer,
            "num_distributed_optimizer_instances": self.instances,
        }

    @property
    def has_whole_gradients(self) -> bool:
        return self.strategy == self.outer == "no_shard"

    def __str__(self) -> str:
        return self.strategy if self.instances == 1 else f"{self.strategy}-{self.outer}"


RS, AR = "reduce_scatter", "all_reduce"
FLAT = [
    Layout("no_shard", last=(AR,), gathers=()),
    Layout("optim", last=(RS,)),
    Layout("optim_grads", early=(RS,), last=(RS,)),
    Layout("optim_grads_params", early=(RS,), last=(RS,)),
]
HYBRID = [
    Layout("optim_grads_params", "no_shard", 2, early=(RS,), last=(RS, AR)),
    Layout("optim_grads_params", "optim", 2, early=(RS,), last=(RS, RS), gathers=("all_gather", "all_gather")),
]
OTHERS = [
    Layout("no_shard", "no_shard", 2, last=(AR, AR), gathers=()),
    Layout("no_shard", "optim", 2, last=(AR, RS)),
    Layout("optim", "optim", 2, last=(RS, RS), gathers=("all_gather", "all_gather")),
    Layout("optim_grads", "no_shard", 2, early=(RS,), last=(RS, AR)),
]
every_layout = pytest.mark.parametrize("layout", [*FLAT, *HYBRID, *OTHERS], ids=str)


# --- training under megatron-core's own schedule, beside its own DDP -------------------------------------------------

STEPS = 3
CASES = list(itertools.product((False, True), (1, MICROBATCHES)))


@dataclass
class Trained:
    """Norms before clipping by step; gradients, clipped, and weights after the last one."""

    norms: torch.Tensor
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def _train(layout: Layout | None, per_token: bool, microbatches: int) -> Trained:
    """Train a GPT with megatron-core's loop; without a layout under its own DDP."""
    model = build_gpt(calculate_per_token_loss=per_token)
    if layout is None:
        chunk: Any = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    else:
        chunk = wrap(model, **layout.options, overlap_param_gather=True, check_for_nan_in_grad=True)
    config = get_model_config(chunk)
    config.no_sync_func, config.grad_sync_func = chunk.no_sync, chunk.start_grad_sync
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(optimizer_config(optimizer="sgd", lr=0.3, clip_grad=0.5), [chunk])
    norms = []
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with CollectiveLog() as log:
            run_schedule(chunk, step, microbatches)
        if layout is not None:
            assert_at_rest(chunk.module)
            assert_same_on_all_ranks(log.entries)
        is_updated, norm, _ = optimizer.step()
        assert is_updated
        norms.append(float(norm))
    if layout is None:
        gradients = {name: p.main_grad for name, p in chunk.module.named_parameters()}
        weights = {name: p.detach() for name, p in chunk.module.named_parameters()}
    else:
        gradients, weights = full_gradients(chunk), full_weights(chunk)
    return Trained(torch.tensor(norms), gradients, weights)


def _trains_as_stock(layout: Layout) -> None:
    start()
    with cpu_shim():
        expected = [_train(None, *case) for case in CASES]
    start(layout.instances)
    with cpu_shim():
        for case, want in zip(CASES, expected, strict=True):
            found = _train(layout, *case)
            torch.testing.assert_close(found.norms, want.norms, rtol=1e-5, atol=0)
            assert_close(found.gradients, want.gradients, rtol=1e-4)
            assert_close(found.weights, want.weights, rtol=1e-5)
            assert bool((want.norms > 0.5).all()), "clipping takes part"


@pytest.mark.parametrize("layout", [*FLAT, *HYBRID], ids=str)
def test_gpt_under_the_schedule_trains_as_under_stock_ddp(layout: Layout) -> None:
    """Mean and per-token losses, where ranks and microbatches differ in tokens; one and several microbatches."""
    run_ranks(layout.world_size, _trains_as_stock, layout, timeout_s=300)


def _bits(trained: Trained) -> dict[str, Any]:
    return {"norms": trained.norms, "gradients": trained.gradients, "weights": trained.weights}


def _agree_bit_for_bit() -> None:
    start()
    with cpu_shim():
        for case in CASES:
            none, one, two, three = (_bits(_train(layout, *case)) for layout in FLAT)
            assert_equal(one, none)
            assert_equal(three, two)
            if case[1] == 1:
                assert_equal(two, one)
            else:
                assert_close(two, one, rtol=1e-4)


def test_strategies_that_reduce_as_often_agree_bit_for_bit() -> None:
    """Two ranks, where a sum has one order; the others add microbatches and ranks in another one."""
    run_ranks(2, _agree_bit_for_bit, timeout_s=300)


# --- the calls of megatron-core's loops -------------------------------------------------------------------------------


def _tower(layout: Layout, **options: Any) -> Any:
    start(layout.instances)
    return wrap(build_tower(), **{**layout.options, **options})


def _backward(chunk: Any, index: int, step: int = 0) -> None:
    tower_loss(chunk.module, step, index, my_rank()).backward()


def _communicates(layout: Layout) -> None:
    chunk = _tower(layout)
    units = list(chunk.fsdp_units())
    optimizer = fully_shard_optimizer(torch.optim.SGD(chunk.parameters(), lr=0.1))
    for step in range(2):
        chunk.zero_grad_buffer()
        with chunk.no_sync():
            for index in range(MICROBATCHES - 1):
                with CollectiveLog() as log:
                    _backward(chunk, index, step)
                found = Counter(operation for operation, *_ in log.entries)
                assert {name: found[name] for name in (RS, AR)} == _per_unit(layout.early, len(units))
                if index == 0 and step == 1:
                    assert found["all_gather"] >= len(layout.gathers) * len(units)
        with CollectiveLog() as log:
            _backward(chunk, MICROBATCHES - 1, step)
            chunk.finish_grad_sync()
        found = Counter(operation for operation, *_ in log.entries)
        assert {name: found[name] for name in (RS, AR)} == _per_unit(layout.last, len(units))
        assert bool(found["all_gather"]) is (layout.strategy == "optim_grads_params"), "only sharded weights are sent"
        assert {ranks for *_, ranks in log.entries} == {2}
        optimizer.step()


def _per_unit(operations: tuple[str, ...], num_units: int) -> dict[str, int]:
    return {name: operations.count(name) * num_units for name in (RS, AR)}


@every_layout
def test_microbatches_inside_no_sync_reduce_over_the_axes_that_shard_gradients(layout: Layout) -> None:
    run_ranks(layout.world_size, _communicates, layout)


def _is_final(layout: Layout) -> None:
    start(layout.instances)
    expected = tower_gradients(0, MICROBATCHES)
    for num_inside, starts in ((0, False), (2, False), (3, False), (3, True), (1, True)):
        chunk = _tower(layout)
        optimizer = fully_shard_optimizer(torch.optim.SGD(chunk.parameters(), lr=0.1))
        for index in range(MICROBATCHES):
            if index < num_inside:
                with chunk.no_sync():
                    _backward(chunk, index)
                if layout.early != layout.last:
                    assert all(isinstance(parameter.grad, WaitingGradient) for parameter in chunk.parameters())
            else:
                _backward(chunk, index)
        if num_inside == MICROBATCHES:
            with pytest.raises(RuntimeError, match=r"expected (reduced gradients|gradients of all microb)"):
                optimizer.step()
        if starts:
            chunk.start_grad_sync()
        with CollectiveLog() as log:
            chunk.finish_grad_sync()
        assert not log.entries or not starts, "nothing is left to do"
        assert_at_rest(chunk.module)
        assert_close(full_gradients(chunk), expected)
        chunk.scale_gradients(torch.tensor(0.5))
        assert_close(full_gradients(chunk), {name: gradient / 2 for name, gradient in expected.items()})
        optimizer.step()


@every_layout
def test_finish_grad_sync_makes_gradients_final_wherever_no_sync_was(layout: Layout) -> None:
    run_ranks(layout.world_size, _is_final, layout)


def _waiting_gradients_are_scaled_and_cleared(layout: Layout) -> None:
    chunk = _tower(layout)
    with chunk.no_sync():
        _backward(chunk, 0)
    chunk.scale_gradients(0.5)
    _backward(chunk, 1)
    chunk.finish_grad_sync()
    first, second = (build_tower() for _ in range(2))
    for rank in range(dist.get_world_size()):
        (tower_loss(first, 0, 0, rank) / dist.get_world_size()).backward()
        (tower_loss(second, 0, 1, rank) / dist.get_world_size()).backward()
    pairs = zip(first.named_parameters(), second.parameters(), strict=True)
    assert_close(full_gradients(chunk), {name: one.grad / 2 + two.grad for (name, one), two in pairs})
    with chunk.no_sync():
        _backward(chunk, 2)
    chunk.zero_grad_buffer()
    chunk.finish_grad_sync()
    assert all(parameter.grad is None for parameter in chunk.parameters())
    _backward(chunk, 0, step=1)
    chunk.finish_grad_sync()
    assert_close(full_gradients(chunk), tower_gradients(1))


@every_layout
def test_gradients_that_wait_are_scaled_and_cleared_with_the_others(layout: Layout) -> None:
    run_ranks(layout.world_size, _waiting_gradients_are_scaled_and_cleared, layout)


def _gradient_memory(chunk: Any) -> list[int]:
    """Return the address of every final gradient buffer that has memory; no other may have any."""
    groups = [group.gradients.at for unit in chunk.fsdp_units() for group in unit.parameter_groups]
    assert not any(buffer.has_storage for at in groups for buffer in at if buffer is not at.main)
    return [at.main.local.data_ptr() for at in groups if at.main.has_storage]


def _frees_memory(layout: Layout) -> None:
    for static in (False, True):
        chunk = _tower(layout, megatron_fsdp_static_gradients=static)
        with chunk.no_sync():
            _backward(chunk, 0)
        _backward(chunk, 1)
        chunk.finish_grad_sync()
        held = _gradient_memory(chunk)
        assert len(held) == len(list(chunk.fsdp_units()))
        with chunk.no_sync():
            _backward(chunk, 0)
        chunk.zero_grad_buffer()
        assert _gradient_memory(chunk) == (held if static else [])
        _backward(chunk, 0)
        chunk.finish_grad_sync()
        assert not static or _gradient_memory(chunk) == held


@every_layout
def test_zero_grad_buffer_frees_gradient_memory_unless_it_is_static(layout: Layout) -> None:
    run_ranks(layout.world_size, _frees_memory, layout)


def _forced(layout: Layout) -> None:
    chunk = _tower(layout)
    with chunk.no_sync():
        _backward(chunk, 0)
    if layout.has_whole_gradients:
        chunk.finish_grad_sync(force_all_reduce=True)
        found = {name: parameter.grad.to_local() for name, parameter in chunk.module.named_parameters()}
        expected = tower_gradients(0)
        assert_close({name: value.view_as(expected[name]) for name, value in found.items()}, expected)
    else:
        with (
            CollectiveLog() as log,
            pytest.raises(NotImplementedError, match="force_all_reduce: expected False where"),
        ):
            chunk.finish_grad_sync(force_all_reduce=True)
        assert log.entries == []


@every_layout
def test_whole_gradients_can_be_forced_where_they_are_anyway(layout: Layout) -> None:
    run_ranks(layout.world_size, _forced, layout)


def _finds_nan(layout: Layout, owner: int, name: str) -> str:
    chunk = _tower(layout, check_for_nan_in_grad=True)
    with chunk.no_sync():
        _backward(chunk, 0)
    chunk.finish_grad_sync()
    local = dict(chunk.module.named_parameters())[name].grad.to_local()
    if my_rank() == owner:
        local.view(-1)[-1] = float("nan")
    with pytest.raises(RuntimeError) as raised:
        chunk.finish_grad_sync()
    return str(raised.value)


@every_layout
def test_nan_on_one_rank_raises_on_all(layout: Layout) -> None:
    name = "net.layers.0.weight"
    messages = run_ranks(layout.world_size, _finds_nan, layout, 0, name)
    for rank, message in enumerate(messages):
        where = "no parameter" if rank else rf"['{name}']"
        assert f"gradients: expected finite values, got nan or inf on this rank in {where} (other ranks" in message


def _statistics(layout: Layout) -> None:
    """PB-038: neither replicas nor the shards of other instances are counted wrongly."""
    chunk = _tower(layout)
    optimizer = build_optimizer(chunk, clip_grad=0.01, log_num_zeros_in_grad=True)
    # A rectified layer and inputs of which some are zero give gradients with zeros.
    inputs, targets = tower_batch(0, 0, my_rank())
    inputs[:, 0] = 0
    (chunk(inputs) - targets).square().sum().backward()
    chunk.finish_grad_sync()
    whole = torch.cat([gradient.flatten() for gradient in full_gradients(chunk).values()])
    _, norm, num_zeros = optimizer.step()
    torch.testing.assert_close(norm, whole.double().norm().float(), rtol=1e-6, atol=0)
    assert num_zeros == int((whole == 0).sum()) > 0
    clipped = torch.cat([gradient.flatten() for gradient in full_gradients(chunk).values()])
    torch.testing.assert_close(clipped, whole * (0.01 / norm), rtol=1e-4, atol=1e-9)


@every_layout
def test_pb038_norm_and_zeros_are_those_of_the_whole_gradient(layout: Layout) -> None:
    run_ranks(layout.world_size, _statistics, layout)


# --- dtypes -----------------------------------------------------------------------------------------------------------

DTYPES: list[tuple[dict[str, Any], tuple[torch.dtype, torch.dtype, torch.dtype]]] = [
    # options; then dtype of main weights, of `.grad`, of reductions; weights are sent in bfloat16
    ({}, (FP32, BF16, BF16)),
    ({"grad_reduce_in_fp32": True}, (FP32, FP32, FP32)),
    ({"grad_reduce_in_fp32": True, "megatron_fsdp_grad_comm_dtype": BF16}, (FP32, FP32, BF16)),
    ({"megatron_fsdp_main_grads_dtype": FP32}, (FP32, FP32, FP32)),
    ({"megatron_fsdp_main_params_dtype": None}, (BF16, BF16, BF16)),
]


def _dtypes(layout: Layout) -> None:
    start(layout.instances)
    for options, (main, grad, comm) in DTYPES:
        chunk = wrap(build_tower(BF16), **{**layout.options, **options})
        with CollectiveLog() as log:
            with chunk.no_sync():
                _backward(chunk, 0)
                _backward(chunk, 1)
            _backward(chunk, 2)
            chunk.finish_grad_sync()
        reduced = {dtype for operation, dtype, *_ in log.entries if operation in (RS, AR)}
        sent = {dtype for operation, dtype, *_ in log.entries if operation not in (RS, AR)}
        assert reduced == {str(comm)}, options
        assert sent <= {str(BF16)}, options
        assert all(parameter.dtype is main for parameter in chunk.parameters()), options
        assert all(parameter.grad.dtype is grad for parameter in chunk.parameters()), options


@every_layout
def test_gradients_accumulate_and_travel_in_the_configured_dtypes(layout: Layout) -> None:
    run_ranks(layout.world_size, _dtypes, layout)


def _accumulates_wide(layout: Layout) -> None:
    """PB-023: many small contributions that bfloat16 would lose beside the first."""
    start(layout.instances)
    tower = build_tower(BF16)
    chunk = wrap(tower, **layout.options, grad_reduce_in_fp32=True)
    inputs = torch.ones(1, Tower.in_features, dtype=BF16)
    for index in range(17):
        last = index == 16
        scale = 256.0 if index == 0 else 1.0
        with chunk.no_sync():
            (chunk(inputs)[0, 0].float() * scale).backward()
        if last:
            chunk.finish_grad_sync()
    bias = full_gradients(chunk)["net.layers.2.bias"]
    assert float(bias[0]) == 256 + 16


@every_layout
def test_pb023_microbatches_accumulate_in_float32(layout: Layout) -> None:
    run_ranks(layout.world_size, _accumulates_wide, layout)


# --- process groups ---------------------------------------------------------------------------------------------------


def _wrap_with(groups: Any, **options: Any) -> Any:
    tower = build_tower()
    try:
        return adapter.FullyShardedDataParallel(
            tower.config, ddp_config(**options), tower, fsdp_unit_modules=[nn.Linear], pg_collection=groups
        )
    except ValueError:
        assert not any(isinstance(module, FsdpModule) for module in tower.modules())
        raise


def _new_group(*all_ranks: list[int]) -> Any:
    """Return this rank's group of several; every rank must call it."""
    groups = [dist.new_group(ranks) for ranks in all_ranks]
    return next(group for ranks, group in zip(all_ranks, groups, strict=True) if my_rank() in ranks)


def _groups_are_used() -> None:
    expected = tower_gradients(0)
    for outer in ("no_shard", "optim"):
        start(2)
        ours = ProcessGroupCollection.use_mpu_process_groups()
        for groups in (None, ours):
            chunk = _wrap_with(groups, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy=outer)
            assert dist.get_process_group_ranks(chunk.data_parallel_group) == [0, 1, 2, 3]
            # A parameter's own device_mesh may be an equal one of an earlier model: torch keeps one of them.
            mesh = next(chunk.fsdp_units()).parameter_groups[0]._mesh.device_mesh
            assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
            used = [mesh.get_group(axis).group_name for axis in (0, 1)]
            assert used == [ours.inter_dist_opt.group_name, ours.intra_dp_cp.group_name]
            _backward(chunk, 0)
            assert_close(full_gradients(chunk), expected)
        start()
        groups = ProcessGroupCollection(
            dp_cp=dist.group.WORLD,
            intra_dp_cp=_new_group([0, 1], [2, 3]),
            inter_dist_opt=_new_group([0, 2], [1, 3]),
        )
        chunk = _wrap_with(groups, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy=outer)
        _backward(chunk, 0)
        assert_close(full_gradients(chunk), expected)


def test_the_two_axes_are_megatron_cores_instances() -> None:
    run_ranks(4, _groups_are_used)


def _one_axis_over_all_instances() -> None:
    """A chunk with one instance shards over all ranks, whatever else the process groups know; statistics, too."""
    start(2)
    chunk = _wrap_with(None)
    optimizer = build_optimizer(chunk)
    _backward(chunk, 0)
    assert_close(full_gradients(chunk), tower_gradients(0))
    whole = torch.cat([gradient.flatten() for gradient in full_gradients(chunk).values()])
    torch.testing.assert_close(optimizer.get_grad_norm(), whole.double().norm().float(), rtol=1e-6, atol=0)


def test_one_instance_is_all_ranks() -> None:
    run_ranks(4, _one_axis_over_all_instances)


def _wrong_instances(instances: int, initialised: int) -> None:
    start(initialised)
    _wrap_with(None, num_distributed_optimizer_instances=instances)


@pytest.mark.parametrize(
    ("instances", "initialised", "error"),
    [
        (3, 1, "expected a divisor of the data-parallel size 4, got 3. Change --num-distributed-optimizer-instances"),
        (8, 1, "expected a divisor of the data-parallel size 4, got 8. Change --num-distributed-optimizer-instances"),
        (2, 1, "got None and [0, 1, 2, 3]. Call initialize_model_parallel(num_distributed_optimizer_instances=2)"),
        (4, 2, "num_distributed_optimizer_instances=4: expected process groups inter_dist_opt and intra_dp_cp of"),
    ],
)
def test_instances_that_do_not_fit_are_refused_on_every_rank(instances: int, initialised: int, error: str) -> None:
    for message in run_ranks_expecting(4, ValueError, _wrong_instances, instances, initialised):
        assert error in message


def _wrong_groups() -> None:
    start()
    groups = ProcessGroupCollection(
        dp_cp=dist.group.WORLD, intra_dp_cp=_new_group([0, 2], [1, 3]), inter_dist_opt=_new_group([0, 1], [2, 3])
    )
    _wrap_with(groups, num_distributed_optimizer_instances=2)


def test_groups_of_other_ranks_are_refused_by_name() -> None:
    messages = run_ranks_expecting(4, ValueError, _wrong_groups)
    assert "inter_dist_opt and intra_dp_cp of ranks [0, 2] and [0, 1], got [0, 1] and [0, 2]." in messages[0]
    assert "inter_dist_opt and intra_dp_cp of ranks [1, 3] and [2, 3], got [2, 3] and [1, 3]." in messages[3]
