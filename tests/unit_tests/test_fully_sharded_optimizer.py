# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FullyShardedOptimizer`: statistics, steps and state equal those of a torch optimizer over whole tensors."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron.core import optimizer as mcore_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp.experimental import FsdpDTensor, fully_shard_optimizer
from megatron.core.optimizer import fully_sharded_optimizer as ours
from megatron.core.optimizer import fully_sharded_optimizer_config as ours_config
from megatron.core.optimizer.fully_sharded_optimizer import (
    FullyShardedOptimizer,
    count_replication,
    get_megatron_optimizer,
)
from tests.unit_tests import mcore
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import (
    Tower,
    assert_close,
    assert_equal,
    build_optimizer,
    build_tower,
    cpu_shim,
    full_gradients,
    full_state,
    full_weights,
    model_config,
    my_rank,
    optimizer_config,
    start,
    tower_batch,
    tower_loss,
    wrap,
)
from tests.unit_tests.oracle import assert_same_on_all_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 10
MICROBATCHES = 2


# --- statistics -------------------------------------------------------------------------------------------------------


def _replication(shape: tuple[int, ...], expected: dict[tuple[Any, ...], int]) -> None:
    mesh = init_device_mesh("cpu", shape)
    for placements, copies in expected.items():
        tensor = DTensor.from_local(torch.ones(2, 4), mesh, placements, run_check=False)
        assert count_replication(tensor) == copies, placements


R, S = Replicate(), Shard(0)


@pytest.mark.parametrize(
    ("world_size", "shape", "expected"),
    [
        (2, (2,), {(S,): 1, (R,): 2, (Shard(1),): 1}),
        (2, (2, 1), {(R, S): 2, (S, R): 1, (R, R): 2, (S, S): 1}),
        (2, (1, 2), {(R, S): 1, (S, R): 2, (R, R): 2, (S, Shard(1)): 1}),
        (4, (2, 2), {(R, S): 2, (S, R): 2, (R, R): 4, (S, S): 1}),
        (4, (4, 1), {(R, S): 4, (S, R): 1}),
    ],
)
def test_count_replication(world_size: int, shape: tuple[int, ...], expected: dict[tuple[Any, ...], int]) -> None:
    run_ranks(world_size, _replication, shape, expected)


def test_count_replication_wants_a_dtensor() -> None:
    with pytest.raises(TypeError, match=r"count_replication: expected a DTensor, got Tensor\. Pass a sharded"):
        count_replication(torch.ones(2))


class _OverOtherParameters(FullyShardedOptimizer):
    """Takes its statistics over any DTensors."""

    others: list[nn.Parameter]

    def get_parameters(self) -> list[nn.Parameter]:
        return self.others if hasattr(self, "others") else super().get_parameters()


def _mixed_meshes() -> None:
    """Dense gradients over 4 ranks, uneven; replicated and hybrid ones; experts of 2 kinds, each over 2 ranks."""
    start()
    generator = torch.Generator().manual_seed(11)
    chunk = wrap(build_tower())
    base = torch.optim.SGD(chunk.parameters(), lr=0.1)
    optimizer = _OverOtherParameters(base, optimizer_config(), None, None, [chunk])
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    layouts = [
        ((5, 3), flat, (S,)),
        ((1, 4), flat, (S,)),
        ((3,), flat, (R,)),
        ((7, 2), square, (R, S)),
        ((3, 2), square, (S, R)),
        ((2, 2), square, (R, R)),
        ((9,), square, (S, S)),
    ]
    full: list[torch.Tensor] = []
    optimizer.others = []

    def add(value: torch.Tensor, mesh: Any, placements: Any) -> None:
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, placements))
        parameter.grad = distribute_tensor(value, mesh, placements)
        optimizer.others.append(parameter)

    for shape, mesh, placements in layouts:
        value = torch.randn(shape, generator=generator)
        value.view(-1)[::3] = 0
        full.append(value)
        add(value, mesh, placements)
    experts = [torch.randn(5, 2, generator=generator) for _ in range(2)]
    experts[1][2] = 0
    full += experts
    add(experts[square.get_local_rank("ep")], square["edp"], (S,))
    optimizer.others.append(nn.Parameter(distribute_tensor(torch.zeros(3), flat, (S,))))  # without a gradient

    everything = torch.cat([value.flatten() for value in full]).double()
    norm = optimizer.get_grad_norm()
    assert norm.shape == () and norm.dtype is FP32
    torch.testing.assert_close(norm, everything.norm().float(), rtol=1e-7, atol=0)
    assert optimizer.count_zeros() == int((everything == 0).sum())
    assert float(optimizer.clip_grad_norm(0.5)) == float(norm)
    torch.testing.assert_close(optimizer.get_grad_norm(), torch.tensor(0.5), rtol=1e-5, atol=0)
    clipped = optimizer.others[0].grad.full_tensor()
    torch.testing.assert_close(clipped, full[0] * (0.5 / (norm + 1e-6)))


def test_statistics_over_gradients_on_several_meshes() -> None:
    run_ranks(4, _mixed_meshes)


class Gain(MegatronModule):
    """One parameter of one element: all ranks but one own nothing."""

    def __init__(self) -> None:
        super().__init__(model_config())
        self.gain = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def _owns_nothing() -> int:
    """PB-080: ranks without an element take part in norm, clipping, zero count, inf check and step."""
    start()
    with cpu_shim():
        chunk = wrap(Gain(), fsdp_unit_modules=[Gain])
        optimizer = build_optimizer(chunk, clip_grad=0.25, log_num_zeros_in_grad=True, loss_scale=4.0)
        reference = nn.Parameter(torch.full((1,), 0.7))
        adam = torch.optim.AdamW([reference], lr=0.01, weight_decay=0.1)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.arange(1.0, 5.0) + step
            (optimizer.scale_loss(chunk(inputs[my_rank() : my_rank() + 1]).sum())).backward()
            reference.grad = inputs.mean().view(1)
            norm = reference.grad.clone()
            nn.utils.clip_grad_norm_([reference], 0.25)
            adam.step()
            is_updated, found_norm, zeros = optimizer.step()
            assert is_updated and zeros == 0
            torch.testing.assert_close(found_norm, norm[0])
            assert_close(full_weights(chunk), {"gain": reference.detach()}, rtol=1e-6)
        assert_close(full_state(optimizer, chunk), {"gain": adam.state[reference]})
        empty = build_optimizer(wrap(Gain(), fsdp_unit_modules=[Gain]), clip_grad=1.0, loss_scale=4.0)
        assert empty.step() == (True, torch.tensor(0.0), 0)
        return chunk.module.gain.to_local().numel()


def test_pb080_ranks_that_own_nothing_take_part() -> None:
    assert sum(run_ranks(4, _owns_nothing)) == 1


# --- parity -----------------------------------------------------------------------------------------------------------


def _zero_column(module: Any, args: Any) -> Any:
    (x,) = args
    return (torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1),)


def _reference_groups(tower: Tower, decoupled: bool) -> list[dict[str, Any]]:
    """Group as Megatron-LM documents it: vectors and biases do not decay; the marked weight has a rate of its own."""
    plain = {"max_lr": 0.02, "min_lr": 0.002}
    groups = [
        {"params": [], "wd_mult": 1.0, **plain},
        {"params": [], "wd_mult": 0.0, **plain},
        {"params": [], "wd_mult": 1.0, "max_lr": 0.05, "min_lr": 0.04},
    ]
    for name, parameter in tower.named_parameters():
        is_marked = decoupled and name == "net.layers.2.weight"
        groups[2 if is_marked else int(parameter.ndim == 1)]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def _scheduler(optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.02,
        min_lr=0.002,
        lr_warmup_steps=3,
        lr_decay_steps=STEPS,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.3,
        wd_incr_steps=STEPS,
        wd_incr_style="linear",
    )


def _parity(name: str, decoupled: bool, set_to_none: bool) -> None:
    start()
    reference, tower = build_tower(), build_tower()
    for model in (reference, tower):
        model.register_forward_pre_hook(_zero_column)
    if decoupled:
        tower.net.layers[2].weight.is_embedding_or_output_parameter = True
    groups = _reference_groups(reference, decoupled)
    if name == "sgd":
        torch_optimizer: Any = torch.optim.SGD(groups, lr=0.02, momentum=0.8)
    elif name == "adamw":
        torch_optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9), eps=1e-6)
    else:
        torch_optimizer = torch.optim.Adam(groups, lr=0.02, betas=(0.8, 0.9), eps=1e-6)
    chunk = wrap(tower)
    optimizer = build_optimizer(
        chunk,
        optimizer="sgd" if name == "sgd" else "adam",
        decoupled_weight_decay=name != "adam",
        lr=0.02,
        min_lr=0.002,
        decoupled_lr=0.05 if decoupled else None,
        decoupled_min_lr=0.04 if decoupled else None,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_eps=1e-6,
        sgd_momentum=0.8,
        clip_grad=0.1,
        log_num_zeros_in_grad=True,
    )
    assert len(optimizer.param_groups) == len(groups)
    schedulers = [_scheduler(optimizer), _scheduler(torch_optimizer)]
    world = dist.get_world_size()
    for step in range(STEPS):
        torch_optimizer.zero_grad()
        optimizer.zero_grad(set_to_none)
        for index in range(MICROBATCHES):
            for rank in range(world):
                (tower_loss(reference, step, index, rank) / (world * MICROBATCHES)).backward()
            with chunk.no_sync() if index < MICROBATCHES - 1 else _Nothing():
                (tower_loss(chunk.module, step, index, my_rank()) / MICROBATCHES).backward()
        gradients = {key: p.grad for key, p in reference.named_parameters()}
        assert_close(full_gradients(chunk), gradients)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert norm > 0.1
        result = optimizer.step()
        is_updated, found_norm, zeros = result
        assert type(result) is tuple and is_updated is True
        assert found_norm.dtype is FP32 and found_norm.shape == ()
        torch.testing.assert_close(found_norm, norm, rtol=1e-6, atol=0)
        assert zeros == sum(int((g == 0).sum()) for g in gradients.values()) >= 14
        assert_close(full_gradients(chunk), {key: p.grad for key, p in reference.named_parameters()})
        torch_optimizer.step()
        for scheduler in schedulers:
            scheduler.step(1)
        assert_same_on_all_ranks([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    # Adam's update is a ratio: where gradients nearly cancel, their rounding shows at full size.
    assert_close(full_weights(chunk), {key: p.detach() for key, p in reference.named_parameters()}, rtol=1e-4)
    assert_close(
        full_state(optimizer, chunk),
        {key: torch_optimizer.state[p] for key, p in reference.named_parameters()},
        rtol=1e-4,
    )
    rates = {round(group["lr"], 6) for group in optimizer.param_groups}
    assert rates == {round(group["lr"], 6) for group in torch_optimizer.param_groups}
    assert len(rates) == 1 + decoupled
    assert {group["weight_decay"] > 0 for group in optimizer.param_groups} == {True, False}


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["one_rate", "decoupled_lr"])
def test_training_equals_torch_over_whole_tensors(name: str, decoupled: bool) -> None:
    run_ranks(2, _parity, name, decoupled, not decoupled)


def test_uneven_shards_over_three_ranks() -> None:
    run_ranks(3, _parity, "adamw", True, True)


def _step_results() -> None:
    start()
    chunk = wrap(build_tower())
    optimizer = build_optimizer(chunk, clip_grad=0.0)
    assert isinstance(optimizer, MixedPrecisionOptimizer)
    assert not optimizer.is_stub_optimizer
    assert float(optimizer.get_loss_scale()) == 1.0
    assert float(optimizer.scale_loss(torch.tensor(3.0))) == 3.0
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    assert optimizer.step() == (True, 0.0, 0)
    optimizer.reload_model_params()
    assert optimizer.state is optimizer.optimizer.state
    optimizer.restore_from_cpu()


def test_a_step_without_clipping_or_counting_returns_zeros() -> None:
    run_ranks(2, _step_results)


def _built_by_hand() -> None:
    """The constructor alone, without the factory, reduces statistics over data parallelism."""
    start()
    chunk = wrap(build_tower())
    base = torch.optim.SGD(chunk.parameters(), lr=0.1)
    optimizer = FullyShardedOptimizer(base, optimizer_config(), None, None, [chunk])
    adapted = fully_shard_optimizer(torch.optim.SGD(chunk.parameters(), lr=0.1))
    again = FullyShardedOptimizer(adapted, optimizer_config(), None, None, [chunk])
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    gradients = torch.cat([g.flatten() for g in full_gradients(chunk).values()])
    for built in (optimizer, again):
        torch.testing.assert_close(built.get_grad_norm(), gradients.double().norm().float(), rtol=1e-7, atol=0)


def test_an_optimizer_built_by_hand_has_global_norms() -> None:
    run_ranks(2, _built_by_hand)


def _zero_grad() -> None:
    start()
    chunk = wrap(build_tower())
    optimizer = build_optimizer(chunk)
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    first = full_gradients(chunk)
    before = [parameter.grad for parameter in chunk.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g for p, g in zip(chunk.parameters(), before, strict=True))
    assert not any(bool(g.any()) for g in full_gradients(chunk).values())
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    assert_equal(full_gradients(chunk), first)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in chunk.parameters())


def test_gradients_are_cleared_to_none_or_zero() -> None:
    run_ranks(2, _zero_grad)


def _chained() -> None:
    """Two optimizers under megatron-core's ChainedOptimizer clip by their joint norm."""
    start()
    with cpu_shim():
        chunks = [wrap(build_tower()) for _ in range(2)]
        chained = ChainedOptimizer([build_optimizer(chunk, clip_grad=0.1) for chunk in chunks])
        references = [build_tower() for _ in range(2)]
        adam = torch.optim.AdamW([p for r in references for p in r.parameters()], lr=0.01, weight_decay=0.1)
        for step in range(3):
            chained.zero_grad()
            adam.zero_grad()
            for index, (chunk, reference) in enumerate(zip(chunks, references, strict=True)):
                tower_loss(chunk.module, step, index, my_rank()).backward()
                for rank in range(2):
                    (tower_loss(reference, step, index, rank) / 2).backward()
            norm = nn.utils.clip_grad_norm_([p for r in references for p in r.parameters()], 0.1)
            is_updated, found_norm, _ = chained.step()
            assert is_updated
            assert float(found_norm) == pytest.approx(float(norm), rel=1e-6)
            adam.step()
        for chunk, reference in zip(chunks, references, strict=True):
            assert_close(full_weights(chunk), {n: p.detach() for n, p in reference.named_parameters()}, rtol=1e-4)


def test_optimizers_can_be_chained() -> None:
    run_ranks(2, _chained)


def _frozen() -> None:
    start()
    tower = build_tower()
    tower.net.layers[1].requires_grad_(False)
    tower.net.layers[2].bias.requires_grad_(False)
    chunk = wrap(tower, check_for_nan_in_grad=True)
    optimizer = build_optimizer(chunk, clip_grad=0.1)
    before = full_weights(chunk)
    trained = {name for name, p in chunk.module.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    chunk.finish_grad_sync()
    optimizer.step()
    assert full_state(optimizer, chunk).keys() == trained
    assert {name for name, value in full_weights(chunk).items() if not torch.equal(value, before[name])} == trained
    assert optimizer.sharded_state_dict(None, is_loading=True)["state"].keys() == {f"module.{n}" for n in trained}


def test_frozen_parameters_stay_and_have_no_state() -> None:
    run_ranks(2, _frozen)


# --- dtypes and loss scaling ------------------------------------------------------------------------------------------


def _narrow_gradients(dtype: torch.dtype, main_grads: torch.dtype | None) -> None:
    """PB-103: the step computes in the dtype of the main weights, and leaves `.grad` as it was."""
    start()
    chunk = wrap(build_tower(dtype), megatron_fsdp_main_grads_dtype=main_grads)
    optimizer = build_optimizer(chunk, clip_grad=0.01, lr=0.5)
    weights = {name: nn.Parameter(value) for name, value in full_weights(chunk).items()}
    adam = torch.optim.AdamW(weights.values(), lr=0.5, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        tower_loss(chunk.module, step, 0, my_rank()).backward()
        reduced = {name: p.grad for name, p in chunk.module.named_parameters()}
        kept = full_gradients(chunk)
        assert all(gradient.dtype is BF16 for gradient in reduced.values())
        for name, weight in weights.items():
            weight.grad = kept[name].float()
        norm = nn.utils.clip_grad_norm_(weights.values(), 0.01)
        adam.step()
        is_updated, found_norm, _ = optimizer.step()
        assert is_updated
        torch.testing.assert_close(found_norm, norm, rtol=1e-6, atol=0)
        for name, parameter in chunk.module.named_parameters():
            assert parameter.grad is reduced[name]
            assert parameter.dtype is FP32
        assert_equal(full_gradients(chunk), kept)
        # Both start from the same reduced gradients: only the order of sums in the norm differs.
        assert_close(full_weights(chunk), {name: w.detach() for name, w in weights.items()}, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "main_grads"), [(BF16, None), (FP32, BF16)], ids=["bf16_model", "fp32_model"])
def test_pb103_gradients_narrower_than_main_weights(dtype: torch.dtype, main_grads: torch.dtype | None) -> None:
    run_ranks(2, _narrow_gradients, dtype, main_grads)


def _scaled_backward(chunk: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(tower_loss(chunk.module, step, 0, my_rank())).backward()


def _poison(chunk: Any, value: float) -> None:
    """Put a value into one element of rank 1's shards."""
    if my_rank() == 1:
        local = dict(chunk.module.named_parameters())["net.layers.1.weight"].grad.to_local()
        local.view(-1)[-1] = value


def _skips_everywhere(hysteresis: int) -> None:
    start()
    with cpu_shim():
        chunk = wrap(build_tower(FP16))
        optimizer = build_optimizer(
            chunk,
            fp16=True,
            params_dtype=FP16,
            initial_loss_scale=2.0**10,
            min_loss_scale=2.0**8,
            loss_scale_window=2,
            hysteresis=hysteresis,
            clip_grad=1.0,
        )
        assert isinstance(optimizer.grad_scaler, DynamicGradScaler)
        _scaled_backward(chunk, optimizer, 0)
        assert optimizer.step()[0] is True
        weights, state = full_weights(chunk), copy.deepcopy(full_state(optimizer, chunk))
        scale = 2.0**10
        for attempt in range(1, 4):
            _scaled_backward(chunk, optimizer, attempt)
            assert all(p.grad.dtype is FP16 for p in chunk.parameters())
            _poison(chunk, float("inf") if attempt % 2 else float("nan"))
            kept = [p.grad for p in chunk.parameters()]
            assert optimizer.step() == (False, None, None)
            assert all(p.grad is g for p, g in zip(chunk.parameters(), kept, strict=True))
            if attempt >= hysteresis:
                scale = max(scale / 2, 2.0**8)
            assert optimizer.get_loss_scale().item() == scale
            assert_equal(full_weights(chunk), weights)
            assert_equal(full_state(optimizer, chunk), state)
        for attempt in (4, 5):
            _scaled_backward(chunk, optimizer, attempt)
            assert optimizer.step()[0] is True
        assert optimizer.get_loss_scale().item() == 2 * scale
        assert not all(torch.equal(value, weights[name]) for name, value in full_weights(chunk).items())
        assert_same_on_all_ranks([float(optimizer.get_loss_scale()), optimizer.grad_scaler._growth_tracker])


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_pb043_inf_on_one_rank_skips_the_step_on_all(hysteresis: int) -> None:
    run_ranks(2, _skips_everywhere, hysteresis)


def _constant_scale() -> None:
    start()
    with cpu_shim():
        chunk, plain = wrap(build_tower()), wrap(build_tower())
        optimizer = build_optimizer(chunk, loss_scale=128.0, clip_grad=1.0)
        assert isinstance(optimizer.grad_scaler, ConstantGradScaler)
        unscaled = build_optimizer(plain, clip_grad=1.0)
        assert unscaled.grad_scaler is None
        for step in range(3):
            _scaled_backward(chunk, optimizer, step)
            _scaled_backward(plain, unscaled, step)
            # A power of two scales without rounding.
            assert [float(a) for a in optimizer.step()] == [float(a) for a in unscaled.step()]
            assert_equal(full_weights(chunk), full_weights(plain))
        _scaled_backward(chunk, optimizer, 3)
        _poison(chunk, float("-inf"))
        assert optimizer.step() == (False, None, None)
        assert_equal(full_weights(chunk), full_weights(plain))
        assert optimizer.get_loss_scale().item() == 128.0
        fp16 = build_optimizer(wrap(build_tower(FP16)), fp16=True, loss_scale=8.0)
        assert isinstance(fp16.grad_scaler, ConstantGradScaler)


def test_constant_loss_scale_changes_no_bit() -> None:
    run_ranks(2, _constant_scale)


def _unscales_in_main_dtype() -> None:
    """A gradient of 2**-24 * 3 exists in float16 only while it is scaled."""
    start()
    with cpu_shim():
        chunk = wrap(build_tower(FP16))
        optimizer = build_optimizer(
            chunk, optimizer="sgd", sgd_momentum=0.0, lr=1.0, weight_decay=0.0, fp16=True, loss_scale=2.0**14
        )
        _scaled_backward(chunk, optimizer, 0)
        for parameter in chunk.parameters():
            parameter.grad.to_local().fill_(3 * 2.0**-12)
        before = full_weights(chunk)
        optimizer.step()
        assert_equal(full_weights(chunk), {name: value - 3 * 2.0**-26 for name, value in before.items()})
        assert torch.finfo(FP16).smallest_normal / 256 > 3 * 2.0**-26


def test_fp16_gradients_are_unscaled_in_the_dtype_of_main_weights() -> None:
    run_ranks(2, _unscales_in_main_dtype)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _trained(steps: int, name: str = "adam", **changes: Any) -> tuple[Any, Any]:
    chunk = wrap(build_tower())
    optimizer = build_optimizer(chunk, optimizer=name, **changes)
    _continue(chunk, optimizer, 0, steps)
    return chunk, optimizer


def _continue(chunk: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        tower_loss(chunk.module, step, 0, my_rank()).backward()
        optimizer.step()


def _copy_into(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Write tensors in place and replace other values, as a distributed checkpoint's load does."""
    assert target.keys() == source.keys()
    for key, value in source.items():
        if isinstance(value, dict):
            _copy_into(target[key], value)
        elif isinstance(value, DTensor):
            assert target[key].placements == value.placements
            target[key].to_local().copy_(value.to_local())
        elif isinstance(value, torch.Tensor):
            target[key].copy_(value)
        else:
            target[key] = value


def _state_dict_contents() -> None:
    start()
    chunk, optimizer = _trained(2)
    state_dict = optimizer.sharded_state_dict(None)
    names = {f"module.{name}" for name, _ in chunk.module.named_parameters()}
    assert state_dict.keys() == {"state", "param_to_group_meta"}
    assert state_dict["state"].keys() == state_dict["param_to_group_meta"].keys() == names
    shapes = {f"module.{name}": p.shape for name, p in build_tower().named_parameters()}
    empty = 0
    for name, state in state_dict["state"].items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["step"].item() == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[key], DTensor)
            assert state[key].shape == shapes[name]
            empty += state[key].to_local().numel() == 0
    assert_same_on_all_ranks(
        [[(name, list(state)) for name, state in state_dict["state"].items()], state_dict["param_to_group_meta"]]
    )
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, empty)
    assert sum(counts) > 0  # some rank owns nothing of some parameter, and has its key nevertheless
    meta = state_dict["param_to_group_meta"]
    assert meta["module.net.layers.0.weight"]["wd_mult"] == 1.0
    assert meta["module.net.layers.0.bias"]["wd_mult"] == 0.0
    assert all("params" not in settings for settings in meta.values())
    fresh = build_optimizer(wrap(build_tower())).sharded_state_dict(None)
    assert fresh["state"] == {} and fresh["param_to_group_meta"].keys() == names
    state_dict["state"]["module.net.scale"]["exp_avg"].to_local().fill_(5.0)
    assert bool((full_state(optimizer, chunk)["net.scale"]["exp_avg"] == 5).all())


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_state_dict_has_the_same_keys_on_every_rank(world_size: int) -> None:
    run_ranks(world_size, _state_dict_contents)


def _gpt_names() -> None:
    start()
    with cpu_shim():
        chunk = wrap(mcore.build_gpt())
        names = build_optimizer(chunk).sharded_state_dict(None, is_loading=True)["state"].keys()
        assert names == {f"module.{name}" for name, _ in chunk.module.named_parameters()}
        assert "module.decoder.layers.1.mlp.linear_fc1.weight" in names


def test_state_is_named_as_megatron_core_names_it() -> None:
    run_ranks(1, _gpt_names)


def _resume(name: str) -> None:
    start()
    straight, whole = _trained(6, name)
    chunk, optimizer = _trained(3, name)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    weights = {key: value.clone() for key, value in chunk.state_dict().items()}
    saved = copy.deepcopy(optimizer.sharded_state_dict(None))
    _continue(chunk, optimizer, 3, 6)
    assert not torch.equal(full_weights(chunk)["net.scale"], full_weights(straight)["net.scale"])

    resumed = wrap(build_tower())
    other = build_optimizer(resumed, optimizer=name)
    target = other.sharded_state_dict(None, is_loading=True)
    assert_same_on_all_ranks([(key, list(value)) for key, value in target["state"].items()])
    _copy_into(target, saved)
    other.load_state_dict(target)
    resumed.load_state_dict(weights)
    assert [group["lr"] for group in other.param_groups] == [0.02, 0.02]
    _continue(resumed, other, 3, 6)
    assert_equal(full_weights(resumed), full_weights(chunk))
    assert_equal(full_state(other, resumed), full_state(optimizer, chunk))

    target = other.sharded_state_dict(None, is_loading=True)  # into an optimizer that has stepped since
    _copy_into(target, saved)
    for settings in target["param_to_group_meta"].values():
        settings["lr"] = 0.01
    other.load_state_dict(target)
    resumed.load_state_dict(weights)
    _continue(resumed, other, 3, 6)
    assert_equal(full_weights(resumed), full_weights(straight))
    assert_equal(full_state(other, resumed), full_state(whole, straight))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_resumed_run_repeats_every_bit(name: str) -> None:
    run_ranks(2, _resume, name)


class StepPerGroupAdam(torch.optim.Adam):
    """Counts steps per group, as the fused optimizers of TransformerEngine and Apex do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(parameter.grad, 1 - 0.9)
                state["exp_avg_sq"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
                first, second = 1 - 0.9 ** group["step"], 1 - 0.99 ** group["step"]
                update = (state["exp_avg"] / first) / ((state["exp_avg_sq"] / second).sqrt() + 1e-8)
                parameter.add_(update, alpha=-group["lr"])


BASES: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "per_group": lambda p: StepPerGroupAdam(p, lr=0.01, weight_decay=0.1),
}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _creation_is_inert(name: str) -> None:
    start()
    chunks = [wrap(build_tower()) for _ in range(2)]
    optimizers = [
        FullyShardedOptimizer(BASES[name](list(chunk.parameters())), optimizer_config(), None, None, [chunk])
        for chunk in chunks
    ]
    created = optimizers[0]
    before = full_weights(chunks[0])
    tower_loss(chunks[0].module, 9, 0, my_rank()).backward()
    gradients = [p.grad for p in chunks[0].parameters()]
    kept = full_gradients(chunks[0])
    settings = [(dict(group), group["lr"]) for group in created.param_groups]
    first = created.sharded_state_dict(None, is_loading=True)
    assert len(first["state"]) == 7
    assert_equal(full_weights(chunks[0]), before)
    assert_equal(full_gradients(chunks[0]), kept)
    assert all(p.grad is g for p, g in zip(chunks[0].parameters(), gradients, strict=True))
    for group, (old, rate) in zip(created.param_groups, settings, strict=True):
        assert group["lr"] is rate
        added = {key: value for key, value in group.items() if key not in old}
        assert added == ({"step": 0} if name == "per_group" else {})
    for state in created.state.values():
        for key, value in state.items():
            if key != "step_size":
                assert not bool(torch.as_tensor(value).any()), key
    again = created.sharded_state_dict(None, is_loading=True)
    for parameter, state in first["state"].items():
        for key, value in state.items():
            assert _local(again["state"][parameter][key]).data_ptr() == _local(value).data_ptr()
    for chunk, optimizer in zip(chunks, optimizers, strict=True):
        _continue(chunk, optimizer, 0, 3)
    assert_equal(full_weights(chunks[0]), full_weights(chunks[1]))
    assert not torch.equal(full_weights(chunks[0])["net.scale"], before["net.scale"])


@pytest.mark.parametrize("name", BASES)
def test_pb022_creating_state_for_a_load_moves_nothing(name: str) -> None:
    run_ranks(2, _creation_is_inert, name)


class Halves(MegatronModule):
    """Of two layers, forward uses as many as it is told."""

    def __init__(self) -> None:
        super().__init__(model_config())
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3)
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.both else self.first(x)


def _creation_of_part() -> None:
    """A parameter that has had no gradient yet gets its state without another step of the rest."""
    start()
    torch.manual_seed(3)
    chunk = wrap(Halves(), fsdp_unit_modules=[nn.Linear])
    optimizer = build_optimizer(chunk)
    for step in range(2):
        optimizer.zero_grad()
        chunk(tower_batch(step, 0, my_rank())[0]).square().mean().backward()
        optimizer.step()
    assert full_state(optimizer, chunk).keys() == {"first.weight", "first.bias"}
    before, weights = copy.deepcopy(full_state(optimizer, chunk)), full_weights(chunk)
    optimizer.sharded_state_dict(None, is_loading=True)
    after = full_state(optimizer, chunk)
    assert_equal(full_weights(chunk), weights)
    assert_equal({name: after[name] for name in before}, before)
    assert after["second.weight"]["step"].item() == 0
    assert not bool(after["second.weight"]["exp_avg"].any())


def test_state_that_exists_is_left_alone_when_the_rest_is_created() -> None:
    run_ranks(2, _creation_of_part)


def _group_settings() -> None:
    """PB-031: settings follow parameters, however the groups are ordered, and never half of a group."""
    start()

    def build(order: list[int]) -> FullyShardedOptimizer:
        chunk = wrap(build_tower())
        kinds: list[dict[str, Any]] = [
            {"params": [layer.weight], "lr": 0.1 * (i + 1), "weight_decay": 0.01 * i, "max_lr": float(i)}
            for i, layer in enumerate(chunk.module.net.layers)
        ]
        base = torch.optim.AdamW([kinds[i] for i in order])
        return FullyShardedOptimizer(base, optimizer_config(), None, None, [chunk])

    def by_name(optimizer: FullyShardedOptimizer) -> Any:
        return optimizer.sharded_state_dict(None)["param_to_group_meta"]

    saved = build([0, 1, 2]).sharded_state_dict(None)
    saved["param_to_group_meta"]["module.net.layers.1.weight"]["weight_decay"] = 0.7
    shuffled = build([2, 0, 1])
    shuffled.load_state_dict(saved)
    assert by_name(shuffled) == saved["param_to_group_meta"]
    assert [group["max_lr"] for group in shuffled.param_groups] == [2.0, 0.0, 1.0]
    assert [group["weight_decay"] for group in shuffled.param_groups] == [0.02, 0.0, 0.7]

    chunk = wrap(build_tower())
    together = FullyShardedOptimizer(
        torch.optim.AdamW([layer.weight for layer in chunk.module.net.layers]), optimizer_config(), None, None, [chunk]
    )
    before = by_name(together)
    with pytest.raises(ValueError, match=r"settings of a parameter group: expected equal ones .*layers\.1\.weight"):
        together.load_state_dict(saved)
    assert by_name(together) == before


def test_pb031_group_settings_are_restored_by_name_or_refused() -> None:
    run_ranks(1, _group_settings)


def _load_refusals() -> None:
    start()
    _, optimizer = _trained(1)
    before = copy.deepcopy(optimizer.sharded_state_dict(None))
    for part, what in (("param_to_group_meta", "settings"), ("state", "state")):
        broken = copy.deepcopy(before)
        del broken[part]["module.net.scale"]
        with pytest.raises(KeyError, match=rf"expected {what} of every parameter, got none for .*net\.scale"):
            optimizer.load_state_dict(broken)
        broken = copy.deepcopy(before)
        broken[part]["module.net.other"] = broken[part]["module.net.scale"]
        with pytest.raises(KeyError, match=r"expected this optimizer's parameters only, got .*net\.other"):
            optimizer.load_state_dict(broken)
    with pytest.raises(NotImplementedError, match=r"state_dict: expected sharded_state_dict\(\), got a call"):
        optimizer.state_dict()
    with pytest.raises(NotImplementedError, match="offload_to_cpu: expected shards that stay on their device"):
        optimizer.offload_to_cpu()


def test_incomplete_state_and_plain_state_dicts_are_refused() -> None:
    run_ranks(2, _load_refusals)


def _scaler_state(optimizer_name: str) -> None:
    """A run whose updates have all been skipped, and one that goes on from it, come to the same bits and scales."""
    start()
    settings: dict[str, Any] = {
        "fp16": True,
        "params_dtype": FP16,
        "optimizer": optimizer_name,
        "loss_scale_window": 2,
        "hysteresis": 2,
    }
    with cpu_shim():
        chunks = [wrap(build_tower(FP16)) for _ in range(2)]
        first = build_optimizer(chunks[0], initial_loss_scale=2.0**10, **settings)
        for step, value in enumerate((float("inf"), float("nan"))):
            _scaled_backward(chunks[0], first, step)
            _poison(chunks[0], value)
            assert first.step() == (False, None, None)
        saved = first.sharded_state_dict(None)
        assert saved["grad_scaler"] == {"scale": 2.0**9, "growth_tracker": 0, "hysteresis_tracker": 0}
        assert_same_on_all_ranks(saved["grad_scaler"])
        assert len(saved["state"]) == 7
        assert not any(bool(m.any()) for state in full_state(first, chunks[0]).values() for m in state.values())
        second = build_optimizer(chunks[1], initial_loss_scale=2.0**4, **settings)
        wanted = second.sharded_state_dict(None, is_loading=True)
        assert wanted["state"].keys() == saved["state"].keys()
        second.load_state_dict({**wanted, "grad_scaler": saved["grad_scaler"]})
        for step in range(2, 6):
            for chunk, optimizer in zip(chunks, (first, second), strict=True):
                _scaled_backward(chunk, optimizer, step)
                if step == 3:
                    _poison(chunk, float("inf"))
                assert optimizer.step()[0] is (step != 3)
            assert first.grad_scaler.state_dict() == second.grad_scaler.state_dict()
            assert_equal(full_weights(chunks[0]), full_weights(chunks[1]))
        assert first.get_loss_scale().item() == 2.0**9  # halved by the third overflow, doubled by two steps

        plain = {key: value for key, value in saved.items() if key != "grad_scaler"}
        with pytest.warns(UserWarning, match=r"expected the state of a dynamic loss scaler, got none, .* scale is 512"):
            first.load_state_dict(plain)
        with pytest.raises(KeyError, match=r"of the loss scaler, got none for \['growth_tracker', 'hysteresis_tracker"):
            first.load_state_dict({**plain, "grad_scaler": {"scale": 8.0}})
        assert first.get_loss_scale().item() == 2.0**9
        constant = build_optimizer(wrap(build_tower(FP16)), loss_scale=4.0, **settings)
        constant.load_state_dict({**constant.sharded_state_dict(None, is_loading=True), "grad_scaler": {"scale": 8.0}})
        assert "grad_scaler" not in constant.sharded_state_dict(None)
        assert constant.get_loss_scale().item() == 4.0


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_loss_scaler_goes_on_where_it_was(name: str) -> None:
    run_ranks(2, _scaler_state, name)


# --- factory and refusals ---------------------------------------------------------------------------------------------


def _delegates() -> None:
    start()
    with cpu_shim():
        tower = build_tower()
        ddp = DistributedDataParallel(tower.config, DistributedDataParallelConfig(), tower)
        stock = get_megatron_optimizer(optimizer_config(), [ddp])
        assert [type(optimizer) for optimizer in stock.chained_optimizers] == [FP32Optimizer]
        sharded = wrap(build_tower())
        for chunks in ([sharded, ddp], [ddp, sharded]):
            with pytest.raises(ValueError, match=r"expected all or none wrapped by Megatron-FSDP v2, got \["):
                get_megatron_optimizer(optimizer_config(), chunks)
        with pytest.raises(ValueError, match=r"chunks wrapped by Megatron-FSDP v2, got \['DistributedDataParallel'\]"):
            FullyShardedOptimizer(torch.optim.SGD(ddp.parameters()), optimizer_config(), None, None, [ddp])


def test_other_chunks_are_megatron_cores_business() -> None:
    run_ranks(1, _delegates)


def test_the_factory_hands_every_argument_on(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = mcore_optimizer.get_megatron_optimizer
    assert inspect.signature(get_megatron_optimizer).parameters.keys() == inspect.signature(theirs).parameters.keys()
    for name, parameter in inspect.signature(theirs).parameters.items():
        assert inspect.signature(get_megatron_optimizer).parameters[name].default == parameter.default
    seen: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> str:
        bound = inspect.signature(theirs).bind(*args, **kwargs)
        seen.append(dict(bound.arguments))
        return "theirs"

    monkeypatch.setattr(ours.mcore_optimizer, "get_megatron_optimizer", record)
    config, model = optimizer_config(), [nn.Linear(1, 1)]
    given = {
        "config_overrides": {"a": 1},
        "use_gloo_process_groups": False,
        "pg_collection": "groups",
        "dump_param_to_param_group_map": "path",
    }
    assert get_megatron_optimizer(config, model, **given) == "theirs"  # type: ignore[arg-type,comparison-overlap]
    assert seen == [{"config": config, "model_chunks": model, **given}]


def _process_groups() -> None:
    start()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    tower = build_tower()
    chunk = mcore.adapter.FullyShardedDataParallel(
        tower.config, mcore.ddp_config(), tower, fsdp_unit_modules=[nn.Linear], pg_collection=groups
    )
    optimizer = get_megatron_optimizer(optimizer_config(), [chunk], pg_collection=groups)
    assert optimizer.get_grad_stats_parallel_group() is groups.intra_dist_opt
    assert optimizer.tp_group is groups.tp
    assert dist.get_process_group_ranks(optimizer.get_grad_stats_parallel_group()) == [0, 1]
    overrides: dict[Any, Any] = {}
    [group] = get_megatron_optimizer(optimizer_config(), [chunk], overrides, pg_collection=groups).param_groups
    assert len(group["params"]) == 7 and group["wd_mult"] == 1.0
    with pytest.raises(NotImplementedError, match=r"dump_param_to_param_group_map: expected None .*, got 'map'"):
        get_megatron_optimizer(optimizer_config(), [chunk], dump_param_to_param_group_map="map")


def test_groups_and_overrides_are_used() -> None:
    run_ranks(2, _process_groups)


def _overrides() -> None:
    """Rates and decays by name, by attribute and by predicate, under megatron-core's schedule, as torch's groups."""
    start()
    reference, tower = build_tower(), build_tower()
    tower.net.layers[1].weight.is_marked = True
    shape = tower.net.layers[0].bias.shape
    chunk = wrap(tower)
    config = optimizer_config(lr=0.02, min_lr=0.002, adam_eps=1e-6)
    named = {"max_lr": 0.05, "min_lr": 0.04}
    marked = {"wd_mult": 0.5, "start_wd": 0.2, "end_wd": 0.4}
    overrides: dict[Any, Any] = {
        **mcore_optimizer.get_standard_config_overrides(config),
        ParamKey(name="*layers.2.weight"): named,
        ParamKey(attr="is_marked"): marked,
        ParamKey(predicate=ParamPredicate("one", lambda parameter: parameter.shape == shape)): {"max_lr": 0.01},
    }
    optimizer: Any = get_megatron_optimizer(config, [chunk], config_overrides=overrides)
    plain = {"max_lr": 0.02, "min_lr": 0.002}
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in reference.named_parameters():
        wanted = {**plain, "wd_mult": float(parameter.ndim > 1 and not name.endswith("bias"))}
        wanted |= named if name == "net.layers.2.weight" else {}
        wanted |= marked if name == "net.layers.1.weight" else {}
        wanted |= {"max_lr": 0.01} if parameter.shape == shape else {}
        groups[name] = {"params": [parameter], **wanted}
        meta = optimizer.sharded_state_dict(None)["param_to_group_meta"][f"module.{name}"]
        assert {key: meta.get(key) for key in wanted} == wanted, name
    assert len({tuple(sorted(str(v) for k, v in g.items() if k != "params")) for g in groups.values()}) == len(
        optimizer.param_groups
    )
    assert {group["max_lr"] for group in optimizer.param_groups} == {0.05, 0.02, 0.01}
    theirs = torch.optim.AdamW(groups.values(), lr=0.02, betas=(0.9, 0.999), eps=1e-6)
    schedulers = [_scheduler(optimizer), _scheduler(theirs)]
    for step in range(4):
        optimizer.zero_grad()
        theirs.zero_grad()
        tower_loss(chunk.module, step, 0, my_rank()).backward()
        for rank in range(dist.get_world_size()):
            (tower_loss(reference, step, 0, rank) / dist.get_world_size()).backward()
        optimizer.step()
        theirs.step()
        for scheduler in schedulers:
            scheduler.step(1)
    # As in _parity: Adam's update is a ratio.
    assert_close(full_weights(chunk), {key: p.detach() for key, p in reference.named_parameters()}, rtol=1e-4)
    with pytest.raises(ValueError, match="Field optimizer should not be over"):
        get_megatron_optimizer(config, [chunk], config_overrides={ParamKey(name="*"): {"optimizer": "sgd"}})


def test_overrides_reach_the_groups_of_the_base_optimizer() -> None:
    run_ranks(2, _overrides)


def test_the_base_optimizer_is_the_one_megatron_core_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}]

    def build(device: str, **changes: Any) -> Any:
        return ours_config.base_optimizer(optimizer_config(**changes), groups, torch.device(device))

    assert type(build("cpu")) is torch.optim.AdamW
    assert type(build("cpu", decoupled_weight_decay=False)) is torch.optim.Adam
    assert type(build("cpu", optimizer="sgd")) is torch.optim.SGD
    assert build("cpu").defaults["fused"] is None
    assert build("cuda").defaults["fused"] is True
    assert build("cuda", optimizer="sgd").defaults["fused"] is True
    monkeypatch.setattr(ours_config.mcore_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(ours_config.mcore_optimizer, "Adam", lambda params, **settings: settings)
    monkeypatch.setattr(ours_config.mcore_optimizer, "SGD", lambda params, **settings: settings)
    fused = build("cuda", adam_beta1=0.8, adam_beta2=0.7, adam_eps=0.1, decoupled_weight_decay=False)
    assert fused == {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.7), "eps": 0.1, "adam_w_mode": False}
    assert build("cuda", optimizer="sgd", sgd_momentum=0.3) == {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.3}


REFUSED = (
    "optimizer_cpu_offload",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "optimizer_cuda_graph",
    "use_layer_wise_distributed_optimizer",
)


def _refusals() -> None:
    start()
    chunk = wrap(build_tower())
    for name in REFUSED:
        config = optimizer_config()
        setattr(config, name, True)
        match = rf"OptimizerConfig\.{name}: expected False, got True.*Drop --{name.replace('_', '-')}\."
        with pytest.raises(NotImplementedError, match=match):
            get_megatron_optimizer(config, [chunk])
        with pytest.raises(NotImplementedError, match=match):
            FullyShardedOptimizer(torch.optim.SGD(chunk.parameters()), config, None, None, [chunk])
    config = optimizer_config(overlap_param_gather_with_optimizer_step=True)
    match = r"overlap_param_gather_with_optimizer_step: expected False .* no gather for it to start: .* Drop --ov"
    with pytest.raises(NotImplementedError, match=match):
        get_megatron_optimizer(config, [chunk])
    config = optimizer_config()
    config.grad_norm_skip_threshold = 3.0
    with pytest.raises(NotImplementedError, match=r"grad_norm_skip_threshold: expected inf, got 3\.0"):
        get_megatron_optimizer(config, [chunk])
    for name in ("adaptive_muon", "lion", "soap"):
        match = (
            rf"OptimizerConfig\.optimizer: expected one of 'adam', 'sgd' and 'muon' .*, got '{name}'; others, such as"
        )
        with pytest.raises(NotImplementedError, match=match):
            get_megatron_optimizer(optimizer_config(optimizer=name), [chunk])
    with pytest.raises(NotImplementedError, match=r"got 'dist_muon'\. Use 'muon', which shards what it keeps"):
        get_megatron_optimizer(optimizer_config(optimizer="dist_muon"), [chunk])

    def build(parameters: Any, chunks: Any = (chunk,), **changes: Any) -> FullyShardedOptimizer:
        base = torch.optim.SGD(parameters, lr=0.1)
        return FullyShardedOptimizer(base, optimizer_config(**changes), None, None, list(chunks))

    with pytest.raises(ValueError, match="grad_scaler: expected one with fp16, got None"):
        build(chunk.parameters(), fp16=True)
    with pytest.raises(ValueError, match=r"model_chunks: expected chunks wrapped by Megatron-FSDP v2, got \[\]"):
        build(chunk.parameters(), [])
    with pytest.raises(ValueError, match="which belongs to no unit"):
        build([*chunk.parameters(), nn.Parameter(torch.ones(2))])
    tower = build_tower()
    originals = list(tower.parameters())
    other = wrap(tower)
    with pytest.raises((ValueError, RuntimeError), match=r"[Bb]uild (the optimizer|optimizers) after fully_shard"):
        build(originals, [other])
    with pytest.raises(ValueError, match=r"expected parameters of model_chunks, got \['.*'\] of another model"):
        build(other.parameters(), [chunk])
    frozen = build_tower().requires_grad_(False)
    with pytest.raises(ValueError, match="model_chunks: expected trainable parameters, got none"):
        get_megatron_optimizer(optimizer_config(), [wrap(frozen)])


def test_refusals() -> None:
    run_ranks(1, _refusals)


def _two_chunks() -> None:
    """One optimizer over two chunks: a joint norm, and state of both."""
    start()
    chunks = [wrap(build_tower()), wrap(Gain(), fsdp_unit_modules=[Gain])]
    optimizer = get_megatron_optimizer(optimizer_config(clip_grad=0.1), chunks)
    tower_loss(chunks[0].module, 0, 0, my_rank()).backward()
    chunks[1](torch.tensor([1.0 + my_rank()])).sum().backward()
    gradients = [*full_gradients(chunks[0]).values(), *full_gradients(chunks[1]).values()]
    norm = torch.cat([g.flatten() for g in gradients]).double().norm().float()
    assert all(isinstance(p, FsdpDTensor) for p in optimizer.get_parameters())
    torch.testing.assert_close(optimizer.step()[1], norm, rtol=1e-6, atol=0)
    assert len(optimizer.sharded_state_dict(None)["state"]) == 8


def test_one_optimizer_over_two_chunks() -> None:
    run_ranks(2, _two_chunks)
