# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Cases about what is sent and counted: dtypes of collectives, decoupled gradients, loss scaling, empty shards."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    grad_norm,
    microbatch,
)
from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer
from tests.unit_tests.decoupled import DecoupledAdamW
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import (
    Tower,
    assert_equal,
    build_optimizer,
    build_tower,
    cpu_shim,
    full_weights,
    model_config,
    optimizer_config,
    start,
    tower_loss,
    wrap,
)
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks
from tests.unit_tests.trace import CollectiveLog

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


# --- PB-025 -----------------------------------------------------------------------------------------------------------


def _policies(compute: torch.dtype) -> list[MixedPrecisionPolicy]:
    """Return every combination of the policy's dtypes that a compute dtype allows.

    What is sent in fp32 is not added up in bf16.
    """
    mains = (None, FP32) if compute is FP32 else (None, BF16, FP32)
    return [
        MixedPrecisionPolicy(main, grads, comm)
        for main, grads, comm in itertools.product(mains, (None, BF16, FP32), (None, BF16, FP32))
        if comm is not FP32 or (grads or main or compute) is FP32
    ]


def _dtypes_of_a_step(compute: torch.dtype) -> None:
    world_size = dist.get_world_size()
    for policy in _policies(compute):
        model = shard_layers(build("mlp").to(compute), mixed_precision_policy=policy)
        main = policy.main_params_dtype or compute
        grads = policy.main_grads_dtype or main
        comm = policy.grad_comm_dtype or grads
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        model.context.finalize()
        with CollectiveLog() as log:
            for index in range(2):
                inputs, targets = make_batch(model, 4, seed=10 * index + dist.get_rank())
                with microbatch(model.context, is_last=index == 1):
                    loss_of(model, inputs.to(compute), targets).backward()
        # Three layers are gathered for forward and for backward; the root keeps its weights.
        expected = {("all_gather", str(compute), world_size): 2 * 7, ("reduce_scatter", str(comm), world_size): 2 * 4}
        assert _count(log) == expected, policy
        with CollectiveLog() as log:
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert _count(log) == {("all_reduce", str(FP64), world_size): 1}, policy
        for what, dtype in (("grad", grads), ("data", main)):
            with CollectiveLog() as log:
                full = [getattr(parameter, what).full_tensor() for parameter in model.parameters()]
            assert _count(log) == {("all_gather", str(dtype), world_size): 7}, (what, policy)
            assert {tensor.dtype for tensor in full} == {dtype} and all(tensor.isfinite().all() for tensor in full)
        assert_same_on_all_ranks(log.entries)


def _count(log: CollectiveLog) -> dict[tuple[str, str, int], int]:
    kinds = [(operation, dtype, ranks) for operation, dtype, _, ranks in log.entries]
    return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize("compute", [BF16, FP32], ids=["bf16", "fp32"])
def test_pb025_every_combination_of_dtypes_is_what_is_sent(compute: torch.dtype) -> None:
    run_ranks(2, _dtypes_of_a_step, compute)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 5).bfloat16(), nn.Linear(5, 4)])
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[1](self.layers[0](self.norm(x).bfloat16()).float())
        return out


def _dtypes_per_unit() -> None:
    """Each unit follows its own policy, and in a unit of two compute dtypes each group its own."""
    model = _Mixed()
    fully_shard(model.layers[0], mixed_precision_policy=MixedPrecisionPolicy(FP32, None, FP32))
    fully_shard(model.layers[1], mixed_precision_policy=MixedPrecisionPolicy(FP64, None, BF16))
    fully_shard(model, mixed_precision_policy=MixedPrecisionPolicy(FP64, None, FP64)).context.finalize()
    with CollectiveLog() as log:
        model(torch.randn(2, 6, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
    sent = [(operation, dtype) for operation, dtype, _, _ in log.entries]
    reduced = [dtype for operation, dtype in sent if operation == "reduce_scatter"]
    assert reduced == [str(BF16), str(FP32), str(FP64)]  # backward order
    assert {dtype for operation, dtype in sent if operation == "all_gather"} == {str(BF16), str(FP32)}
    gradients = [model.norm.weight, model.layers[0].weight, model.layers[1].weight]
    assert [parameter.grad.dtype for parameter in gradients] == [FP64, FP32, FP64]
    both = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16())
    both[1].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    fully_shard(both, mixed_precision_policy=MixedPrecisionPolicy(None)).context.finalize()
    with CollectiveLog() as log:
        both(torch.ones(1, 3)).sum().backward()
    sent = [(operation, dtype) for operation, dtype, _, _ in log.entries]
    assert sent == [(operation, str(t)) for operation in ("all_gather", "reduce_scatter") for t in (FP32, BF16)]


def test_pb025_units_with_policies_of_their_own() -> None:
    run_ranks(2, _dtypes_per_unit)


# --- PB-040 -----------------------------------------------------------------------------------------------------------


def _precision_aware(clip: float) -> None:
    policy = MixedPrecisionPolicy(FP32, main_grads_dtype=BF16)
    models = [shard_layers(build("mlp").bfloat16(), mixed_precision_policy=policy) for _ in range(2)]
    normal = fully_shard_optimizer(torch.optim.AdamW(models[0].parameters(), lr=0.01))
    aware: Any = fully_shard_optimizer(DecoupledAdamW(models[1].parameters(), lr=0.01), precision_aware=True)
    for step in range(5):
        norms = []
        for model, optimizer in zip(models, (normal, aware), strict=True):
            optimizer.zero_grad()
            inputs, targets = make_batch(model, 4, seed=10 * step + dist.get_rank())
            loss_of(model, inputs.bfloat16(), targets).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            norms.append(clip_grad_norm_(model.parameters(), clip))
            clipped = [gradient.full_tensor() for gradient in gradients]
            optimizer.step()
            for parameter, gradient, value in zip(model.parameters(), gradients, clipped, strict=True):
                assert parameter.grad is gradient and torch.equal(gradient.full_tensor(), value)
        assert aware.seen == {BF16}
        assert torch.equal(*norms) and norms[0] > clip
        torch.testing.assert_close(grad_norm(list(models[1].parameters())).item(), clip, rtol=2**-7, atol=0)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.to_local(), other.to_local())
            for key, value in normal.state[one].items():
                assert torch.equal(value, aware.state[other][key]), key


def test_pb040_precision_aware_mode_gives_the_values_of_the_normal_one() -> None:
    run_ranks(2, _precision_aware, 0.1)


def _precision_aware_in_mcore() -> None:
    """The base optimizer of Megatron-Core's contract may be adapted before, in precision-aware mode."""
    start()
    chunks = [wrap(build_tower(BF16)) for _ in range(2)]
    bases: list[Any] = [torch.optim.AdamW(chunks[0].parameters(), lr=0.01)]
    aware = DecoupledAdamW(chunks[1].parameters(), lr=0.01)
    bases.append(fully_shard_optimizer(aware, precision_aware=True))
    config = optimizer_config(clip_grad=0.1, log_num_zeros_in_grad=True)
    optimizers = [
        FullyShardedOptimizer(base, config, None, None, [chunk]) for base, chunk in zip(bases, chunks, strict=True)
    ]
    for step in range(3):
        results = []
        for chunk, optimizer in zip(chunks, optimizers, strict=True):
            optimizer.zero_grad()
            tower_loss(chunk.module, step, 0, dist.get_rank()).backward()
            assert all(parameter.grad.dtype is BF16 for parameter in chunk.parameters())
            results.append(optimizer.step())
            assert all(parameter.grad.dtype is BF16 for parameter in chunk.parameters())
        assert results[0] == results[1] and results[0][0] is True and results[0][1] > 0.1
        assert_equal(full_weights(chunks[0]), full_weights(chunks[1]))


def test_pb040_precision_aware_base_optimizer_under_megatron_core() -> None:
    run_ranks(2, _precision_aware_in_mcore)


# --- PB-043 -----------------------------------------------------------------------------------------------------------


def _scaled_backward(model: Any, optimizer: Any, scaler: Any, step: int) -> None:
    optimizer.zero_grad()
    inputs, targets = make_batch(model, 4, seed=10 * step + dist.get_rank())
    scaler.scale(loss_of(model, inputs, targets)).backward()


def _torch_scaler(adapts: bool) -> None:
    """An overflow in one shard skips the step and halves the scale on every rank; scaling by itself changes no bit."""
    model, unscaled = shard_layers(build("mlp")), shard_layers(build("mlp"))
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, unscaled))
    if adapts:
        optimizer, other = fully_shard_optimizer(optimizer), fully_shard_optimizer(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    off = torch.amp.GradScaler("cpu", enabled=False)
    scale = 2.0**10
    for step in range(6):
        _scaled_backward(model, optimizer, scaler, step)
        overflows = step in (1, 4)
        if overflows and dist.get_rank() == 1:
            model.layers[0].weight.grad.to_local().view(-1)[-1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            scale /= 2
        else:
            _scaled_backward(unscaled, other, off, step)
            other.step()
        if step == 3:
            scale *= 2
        assert scaler.get_scale() == scale
        for one, two in zip(model.parameters(), unscaled.parameters(), strict=True):
            assert torch.equal(one.to_local(), two.to_local())
            assert float(optimizer.state[one]["step"]) == float(other.state[two]["step"])


@pytest.mark.parametrize("adapts", [True, False], ids=["adapted", "plain"])
def test_pb043_torchs_grad_scaler_skips_on_every_rank(adapts: bool) -> None:
    run_ranks(2, _torch_scaler, adapts)


# --- PB-080 -----------------------------------------------------------------------------------------------------------


def _one_element() -> None:
    """Norm, non-finite check, clipping and step with all ranks but one empty: the same calls and results everywhere."""
    model = shard_layers(build("one_element"))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    rank = dist.get_rank()
    with CollectiveLog() as log:
        model(torch.full((2, 1), rank + 1.0)).sum().backward()  # the mean over 4 ranks is 5
        assert clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True).item() == pytest.approx(5.0)
        assert grad_norm(list(model.parameters()), math.inf).item() == pytest.approx(0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True).item() == 0.0
        optimizer.step()
        assert model.gain.full_tensor().item() == pytest.approx(0.7 - 0.1 - 0.01 * 0.1 * 0.7)
        model(torch.full((2, 1), math.inf if rank == 3 else 1.0)).sum().backward()
        with pytest.raises(RuntimeError, match="expected a finite gradient norm, got inf"):
            clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
    assert_at_rest(model)
    assert_same_on_all_ranks(log.entries)


def test_pb080_one_element_on_four_ranks() -> None:
    run_ranks(4, _one_element)


class _Gain(Tower):
    """One parameter of one element, under Megatron-Core's contract."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.config = model_config()
        self.gain = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def _statistics_of_one_element() -> None:
    start()
    with cpu_shim():
        chunk = wrap(_Gain(), fsdp_unit_modules=[_Gain], check_for_nan_in_grad=True)
        optimizer = build_optimizer(chunk, clip_grad=1.0, log_num_zeros_in_grad=True)
        chunk(torch.zeros(1)).sum().backward()
        chunk.finish_grad_sync()
        assert optimizer.count_zeros() == 1.0
        assert optimizer.step() == (True, torch.tensor(0.0), 1.0)
        optimizer.zero_grad()
        assert optimizer.count_zeros() == 0.0
        chunk(torch.full((1,), math.nan if dist.get_rank() == 2 else 1.0)).sum().backward()
        with pytest.raises(RuntimeError, match=r"gradients: expected finite values, got nan or inf on this rank in"):
            chunk.finish_grad_sync()


def test_pb080_zero_count_and_finite_check_of_one_element() -> None:
    run_ranks(4, _statistics_of_one_element)


def _all_frozen(model_name: str) -> None:
    """Nothing is trained: gradients still flow through, and every call of a training loop is a no-op everywhere."""
    model, plain = build(model_name).requires_grad_(False), build(model_name).requires_grad_(False)
    shard_layers(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    before = [parameter.full_tensor() for parameter in model.parameters()]
    with CollectiveLog() as log:
        for step in range(2):
            inputs, targets = make_batch(model, 4, seed=10 * step + dist.get_rank())
            theirs = inputs.clone().requires_grad_()
            loss_of(model, inputs.requires_grad_(), targets).backward()
            loss_of(plain, theirs, targets).backward()
            assert torch.equal(inputs.grad, theirs.grad) and inputs.grad.any()
            assert_at_rest(model)
            assert clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True).item() == 0.0
            optimizer.step()
            optimizer.zero_grad()
    assert {operation for operation, *_ in log.entries} == {"all_gather", "all_reduce"}
    assert_same_on_all_ranks(log.entries)
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("model_name", ["mlp", "one_element"])
def test_pb080_all_frozen(model_name: str) -> None:
    run_ranks(4, _all_frozen, model_name)


def _all_frozen_in_mcore() -> None:
    start()
    chunk = wrap(build_tower().requires_grad_(False), check_for_nan_in_grad=True)
    inputs = torch.full((2, Tower.in_features), dist.get_rank() + 1.0).requires_grad_()
    chunk(inputs).sum().backward()
    chunk.finish_grad_sync()
    assert inputs.grad is not None and inputs.grad.any()


def test_pb080_all_frozen_under_megatron_core() -> None:
    run_ranks(4, _all_frozen_in_mcore)
