# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Failures of hybrid and replicated sharding elsewhere, and what torch's users expect of gradients that accumulate."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from megatron.core.distributed.fsdp.experimental import (
    FsdpContext,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from tests.unit_tests.cases.compare import compare_training
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.oracle import Recipe, assert_parity, full_gradients, run_reference, run_sharded
from tests.unit_tests.trace import CollectiveLog

BF16, FP32 = torch.bfloat16, torch.float32
ONE_AXIS = {name: Placements.from_strategy(name) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")}
TWO_AXES = {
    "hsdp": Placements.from_strategy("optim_grads_params", outer="no_shard"),
    "hfsdp": Placements.from_strategy("optim_grads_params", outer="optim"),
    "zero2_outer_optim": Placements.from_strategy("optim_grads", outer="optim"),
}
S, R = Shard(0), Replicate()
UNNAMED = {
    "reduced_once_though_sharded": Placements((0,), (S,), (R,), (S,)),
    "outer_axis_only": Placements((0, 1), (S, R), (S, R), (S, R)),
    "outer_weights_inner_optimizer": Placements((0, 1), (S, R), (S, R), (S, S)),
    "all_over_both": Placements((0, 1), (S, S), (S, S), (S, S)),
    "gradients_over_both": Placements((0, 1), (R, S), (S, S), (S, S)),
    "weights_over_both": Placements((0, 1), (S, S), (R, S), (S, S)),
}
EVERY = {**ONE_AXIS, **TWO_AXES, **UNNAMED}


def _mesh(placements: Placements) -> Any:
    world_size = dist.get_world_size()
    shape = (world_size,) if len(placements.dp_axes) == 1 else (2, world_size // 2)
    return init_device_mesh(DEVICE, shape)


def _world_size(placements: Placements) -> int:
    return 2 * len(placements.dp_axes)


def _tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3)])


def _shard(placements: Placements, **options: Any) -> Callable[[Any], Any]:
    def shard(model: Any) -> Any:
        mesh = _mesh(placements)
        for layer in model:
            fully_shard(layer, mesh, placements, **options)
        return fully_shard(model, mesh, placements, **options)

    return shard


def _accumulating(num_microbatches: int, says_so: bool = True) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        total = batch.new_zeros(())
        for index in range(num_microbatches):
            is_told = says_so and isinstance(module, FsdpModule)
            with microbatch(module.context, index == num_microbatches - 1) if is_told else nullcontext():
                loss = module(batch * (index + 1)).square().mean()
                loss.backward()
            total = total + loss.detach()
        return total

    return step


def _trains(name: str, num_microbatches: int, says_so: bool) -> None:
    compare_training(_tower(), _shard(EVERY[name]), _accumulating(num_microbatches, says_so), steps=4)


@pytest.mark.parametrize("says_so", [True, False], ids=["microbatch", "no_call"])
@pytest.mark.parametrize("name", ["hsdp", "hfsdp"])
def test_pb004_every_microbatch_counts_under_hybrid_sharding(name: str, says_so: bool) -> None:
    run_ranks(4, _trains, name, 3, says_so)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", UNNAMED)
def test_placements_without_a_name(name: str, num_microbatches: int) -> None:
    run_ranks(_world_size(UNNAMED[name]), _trains, name, num_microbatches, True)


def _replicas_agree(name: str) -> None:
    model = _shard(TWO_AXES[name])(_tower())
    batch = torch.full((4, 6), 1.0 + dist.get_rank())
    _accumulating(2)(model, batch)
    gradients = full_gradients(model)
    for parameter, gradient in gradients.items():
        everyone = [torch.empty_like(gradient) for _ in range(4)]
        dist.all_gather(everyone, gradient)
        assert all(torch.equal(other, gradient) for other in everyone), parameter
    reference = _tower()
    for rank in range(4):
        _accumulating(2)(reference, torch.full((4, 6), 1.0 + rank))
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, reference.get_parameter(parameter).grad / 4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TWO_AXES)
def test_pb005_partial_sums_cross_the_replicas(name: str) -> None:
    run_ranks(4, _replicas_agree, name)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_pb007_outer_reduction_is_finished_at_the_step(microbatches: int, set_to_none: bool) -> None:
    recipe = Recipe(optimizer="adam", steps=20, microbatches=microbatches, set_to_none=set_to_none)
    reference = run_reference(recipe, 4)
    for shape, placements in (((2, 2), TWO_AXES["hfsdp"]), ((4,), ONE_AXIS["optim_grads_params"])):
        sharded = Recipe(**{**vars(recipe), "mesh": shape, "shard": {"placements": placements}})
        for run in run_ranks(4, run_sharded, sharded):
            assert_parity(run, reference, rtol=1e-5, atol=1e-5)


def _as_ddp(num_microbatches: int) -> None:
    reference = _tower()
    model = _shard(ONE_AXIS["no_shard"])(copy.deepcopy(reference))
    ddp = DistributedDataParallel(reference)
    ours = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    theirs = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batches = torch.randn(num_microbatches, 4, 6, generator=generator)
        for index, batch in enumerate(batches):
            is_last = index == num_microbatches - 1
            with nullcontext() if is_last else ddp.no_sync():
                ddp(batch).square().mean().backward()
            with microbatch(model.context, is_last):
                model(batch).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.placements == (Replicate(),)
        full = parameter.full_tensor()
        torch.testing.assert_close(full, other.detach(), rtol=1e-6, atol=1e-7, msg=name)
        everyone = [torch.empty_like(full) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, full)
        assert all(torch.equal(item, full) for item in everyone), name


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_pb008_the_unsharded_strategy_equals_ddp(num_microbatches: int) -> None:
    run_ranks(2, _as_ddp, num_microbatches)


def _sync_patterns(name: str) -> None:
    """Whichever of three backwards reduce, and whichever of them are said to be last, the sum is the same."""
    batches = [torch.full((2, 6), 0.5 + index + dist.get_rank()) for index in range(3)]
    sums = []
    for syncs in itertools.product((True, False), repeat=2):
        for lasts in itertools.product((True, False), repeat=2):
            model = _shard(EVERY[name])(_tower())
            for batch, sync, last in zip(batches, (*syncs, True), (*lasts, True), strict=True):
                model.set_requires_gradient_sync(sync)
                with microbatch(model.context, last):
                    model(batch).square().mean().backward()
            sums.append(full_gradients(model))
    reference, world_size = _tower(), dist.get_world_size()
    for index, rank in itertools.product(range(3), range(world_size)):
        (reference(torch.full((2, 6), 0.5 + index + rank)).square().mean() / world_size).backward()
    for gradients in sums:
        for parameter, gradient in gradients.items():
            expected = reference.get_parameter(parameter).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=parameter)


@pytest.mark.parametrize("name", [*ONE_AXIS, *TWO_AXES])
def test_pb013_sync_and_last_in_every_pattern(name: str) -> None:
    run_ranks(_world_size(EVERY[name]), _sync_patterns, name)


def _steps_too_early(name: str) -> None:
    model = _shard(EVERY[name])(_tower())
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    with microbatch(model.context, is_last=False):
        model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", [*ONE_AXIS, *TWO_AXES])
def test_pb013_stepping_before_the_last_microbatch_raises(name: str) -> None:
    for text in run_ranks_expecting(_world_size(EVERY[name]), RuntimeError, _steps_too_early, name):
        assert "step: expected" in text


CLEARS: dict[str, Callable[[Any, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer_zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module": lambda model, optimizer: model.zero_grad(),
    "module_zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by_hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
}


def _cleared_in_between(name: str, how: str) -> None:
    """What is cleared in the middle of an accumulation is gone, wherever it had got to."""
    model = _shard(EVERY[name])(_tower())
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    batch = torch.full((2, 6), 1.0 + dist.get_rank())
    for is_last in (True, False):
        with microbatch(model.context, is_last):
            model(batch).sum().backward()
    CLEARS[how](model, optimizer)
    model(batch * 2).square().sum().backward()
    found = full_gradients(model)
    model.zero_grad()
    model(batch * 2).square().sum().backward()
    for parameter, gradient in full_gradients(model).items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", CLEARS)
@pytest.mark.parametrize("name", ["no_shard", "optim", "optim_grads_params", "hsdp"])
def test_gradients_are_cleared_as_in_torch(name: str, how: str) -> None:
    run_ranks(_world_size(EVERY[name]), _cleared_in_between, name, how)


def _one_cleared_by_hand(name: str) -> None:
    """Setting one gradient to None forgets that parameter's and no other."""
    model = _shard(EVERY[name])(_tower())
    batch = torch.full((2, 6), 1.0 + dist.get_rank())
    first, second = batch, batch * 3
    with microbatch(model.context, is_last=False):
        model(first).square().sum().backward()
    model[1][0].weight.grad = None
    model(second).square().sum().backward()
    found = full_gradients(model)
    reference = _tower()
    for rank in range(dist.get_world_size()):
        reference(torch.full((2, 6), 1.0 + rank)).square().sum().backward()
    reference[1][0].weight.grad = None
    for rank in range(dist.get_world_size()):
        reference(torch.full((2, 6), 3.0 + 3 * rank)).square().sum().backward()
    for parameter, gradient in found.items():
        expected = reference.get_parameter(parameter).grad / dist.get_world_size()
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=parameter)


@pytest.mark.parametrize("name", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_one_gradient_is_cleared_by_hand(name: str) -> None:
    run_ranks(2, _one_cleared_by_hand, name)


class _Experts(nn.Module):
    """Sends every token to the expert of its parity, which lies on the rank of that parity, and back."""

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.dense, self.experts, self.group = nn.Linear(6, 6), experts, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x).tanh()
        if self.group is None:
            parts = [expert(part) for expert, part in zip(self.experts, x.chunk(2), strict=True)]
            return torch.cat(parts)
        sent = all_to_all_single(torch.empty_like(x), x.contiguous(), group=self.group)
        return all_to_all_single(torch.empty_like(x), self.experts(sent).contiguous(), group=self.group)


def _expert_gradients(strategy: str) -> None:
    """Expert 2 x expert-data 2: experts average over half of the ranks what comes from all of them."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("edp", "ep"))
    everyone = init_device_mesh(DEVICE, (4,))
    place = mesh.get_local_rank("ep")
    torch.manual_seed(0)
    reference = _Experts(nn.ModuleList([nn.Linear(6, 6) for _ in range(2)]), None)
    model = _Experts(copy.deepcopy(reference.experts[place]), mesh["ep"].get_group())
    model.dense.load_state_dict(reference.dense.state_dict())
    placements = Placements.from_strategy(strategy)
    with fully_shard_context(DEVICE) as context:
        fully_shard(model.experts, mesh["edp"], placements, grad_divisor=2)
        fully_shard(model, everyone, placements)
    batches = torch.randn(2, 4, 4, 6, generator=torch.Generator().manual_seed(1))
    for index, batch in enumerate(batches):
        with microbatch(context, is_last=index == 1):
            model(batch[dist.get_rank()]).square().mean().backward()
        for share in batch:
            (reference(share).square().mean() / 4).backward()
    for name, expected in (("weight", reference.experts[place].weight), ("bias", reference.experts[place].bias)):
        found = model.experts.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, expected.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.dense.weight.grad.full_tensor(), reference.dense.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_pb017_expert_gradients_are_divided_once_per_contribution(strategy: str) -> None:
    run_ranks(4, _expert_gradients, strategy)


def _wide_sums(name: str) -> None:
    """64 microbatches of mixed magnitude, in bf16, add up in fp32 in every mode."""
    model = _shard(EVERY[name], mixed_precision_policy=MixedPrecisionPolicy(FP32, main_grads_dtype=FP32))(
        nn.Sequential(nn.Linear(6, 6, bias=False)).to(BF16)
    )
    num, rank = 64, dist.get_rank()
    inputs = [torch.full((1, 6), 2.0 ** (index % 12 - 6) * (1 + rank)).to(BF16) for index in range(num)]
    for index, batch in enumerate(inputs):
        with microbatch(model.context, is_last=index == num - 1):
            model(batch).sum().backward()
    expected = sum(batch.float() for batch in inputs).expand(6, 6).contiguous()
    dist.all_reduce(expected)
    found = model[0].weight.grad
    assert found.dtype is FP32
    torch.testing.assert_close(found.full_tensor(), expected / dist.get_world_size(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [*ONE_AXIS, *TWO_AXES])
def test_pb023_microbatches_add_up_in_the_main_gradient_dtype(name: str) -> None:
    run_ranks(_world_size(EVERY[name]), _wide_sums, name)


def _sent_dtypes(name: str, comm: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(FP32, main_grads_dtype=FP32, grad_comm_dtype=comm)
    model = _shard(EVERY[name], mixed_precision_policy=policy)(_tower().to(BF16))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    model.context.finalize()
    with CollectiveLog() as log:
        for _ in range(2):
            _accumulating(2)(model, torch.ones(2, 6, dtype=BF16))
            optimizer.step()
            optimizer.zero_grad()
    dtypes = {(operation, dtype) for operation, dtype, _, _ in log.entries}
    gathers = {("all_gather", str(BF16))} if name != "no_shard" else set()
    reductions = {entry for entry in dtypes if entry[0] != "all_gather"}
    assert dtypes - reductions == gathers
    assert reductions and all(dtype == str(comm) for _, dtype in reductions)


@pytest.mark.parametrize("comm", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", [*ONE_AXIS, *TWO_AXES])
def test_pb025_every_axis_has_the_communication_dtype(name: str, comm: torch.dtype) -> None:
    run_ranks(_world_size(EVERY[name]), _sent_dtypes, name, comm)


def _mixed_placements() -> None:
    """Units of one model lie differently: a replicated root, ZeRO-1, ZeRO-2 and ZeRO-3 layers, one on another mesh."""
    flat, grid = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2))

    def shard(model: Any) -> Any:
        for layer, mesh, placements in zip(
            model,
            (flat, flat, grid),
            (ONE_AXIS["optim_grads_params"], ONE_AXIS["optim"], TWO_AXES["hfsdp"]),
            strict=True,
        ):
            fully_shard(layer, mesh, placements)
        model.scale = nn.Parameter(torch.ones(6))
        return fully_shard(model, flat, ONE_AXIS["no_shard"])

    reference = _tower()
    reference.scale = nn.Parameter(torch.ones(6))

    def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = module(batch).square().mean()
        loss.backward()
        return loss

    compare_training(reference, shard, step, steps=4)


def test_units_of_one_model_lie_differently() -> None:
    run_ranks(4, _mixed_placements)


def _different_starts(shape: tuple[int, ...]) -> list[str]:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 4)
    placements = ONE_AXIS["optim"] if len(shape) == 1 else TWO_AXES["hsdp"]
    with pytest.warns(UserWarning, match="initial weights of unit FsdpLinear") as record, fully_shard_context(DEVICE):
        fully_shard(model, init_device_mesh(DEVICE, shape), placements)
    return [str(item.message) for item in record]


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["4", "2x2"])
def test_pb060_replicas_that_start_differently_are_noticed(shape: tuple[int, ...]) -> None:
    assert all(run_ranks(4, _different_starts, shape))


def _fails_while_packing(name: str, is_last: bool) -> None:
    """A backward that fails before it has written a sum leaves no memory behind that would be taken for one."""
    model: Any = _shard(EVERY[name])(_tower())
    groups = [group for layer in model for group in layer.parameter_groups]
    fused: Any = groups[-1].unsharded_parameters[-1]
    for attempt in (True, False):
        fused.grad_added_to_main_grad = attempt
        with (
            microbatch(model.context, is_last),
            pytest.raises(RuntimeError, match="grad_added") if attempt else nullcontext(),
        ):
            model(torch.ones(2, 6)).sum().backward()
        if attempt:
            assert not any(buffer.has_storage for group in groups for buffer in group.gradients.at)
    model.context.finish_gradients()
    plain = _tower()
    plain(torch.ones(2, 6)).sum().backward()
    for parameter, found in zip(plain.parameters(), full_gradients(model).values(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("name", [*ONE_AXIS, "hsdp"])
def test_a_failed_packing_leaves_no_sum_behind(name: str, is_last: bool) -> None:
    run_ranks(_world_size(EVERY[name]), _fails_while_packing, name, is_last)


def _nothing_left_to_step_on(name: str) -> None:
    """An accumulation that was cleared is over: a step finds no gradient, as in torch, and changes nothing."""
    model = _shard(EVERY[name])(_tower())
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    before = [parameter.full_tensor() for parameter in model.parameters()]
    with microbatch(model.context, is_last=False):
        model(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["no_shard", "optim_grads_params", "hsdp"])
def test_a_cleared_accumulation_does_not_stop_a_step(name: str) -> None:
    run_ranks(_world_size(EVERY[name]), _nothing_left_to_step_on, name)


def _sparse_gradient() -> None:
    model = fully_shard(nn.Embedding(8, 4, sparse=True))
    model(torch.tensor([1 + dist.get_rank()])).sum().backward()


def test_sparse_gradients_are_refused_by_name() -> None:
    for text in run_ranks_expecting(2, RuntimeError, _sparse_gradient):
        assert "gradient of weight: expected a dense one, got torch.sparse_coo. Build its module without" in text


def _reshard_of_replicated_weights() -> None:
    model = _shard(ONE_AXIS["optim"])(_tower())
    model.set_reshard_after_forward(True)


def test_resharding_replicated_weights_is_refused() -> None:
    for text in run_ranks_expecting(1, ValueError, _reshard_of_replicated_weights):
        assert "set_reshard_after_forward: expected units that shard their parameters, got 4 with replicated" in text


def _plain_write() -> None:
    """Whoever writes main weights first waits, once, for gathers that may still read them."""
    model = fully_shard(nn.Linear(4, 4))
    with torch.no_grad():
        model(torch.ones(1, 4))
        with patch.object(FsdpContext, "await_gathers") as waits:
            for _ in range(2):
                model.weight.add_(1)
                model.bias.add_(1)
    assert waits.call_count == 1


def test_plain_writes_come_after_gathers() -> None:
    run_ranks(2, _plain_write)
