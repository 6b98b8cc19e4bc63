# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FullyShardedOptimizer` over every sharding strategy: statistics, overflows, schedules, chains, precision-aware mode.

Chunks here are sharded by `Placements`, whatever the data-parallel config offers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.optimizer import fully_sharded_optimizer as ours
from megatron.core.optimizer import fully_sharded_optimizer_config as ours_config
from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer, get_megatron_optimizer
from megatron.core.optimizer.fully_sharded_optimizer_gradients import WideGradients
from tests.unit_tests.decoupled import DecoupledAdamW
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.mcore import (
    adapter,
    assert_close,
    assert_equal,
    build_optimizer,
    build_tower,
    cpu_shim,
    ddp_config,
    full_gradients,
    full_state,
    full_weights,
    my_rank,
    optimizer_config,
    start,
    tower_loss,
)
from tests.unit_tests.oracle import assert_same_on_all_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Layout = tuple[str, str | None, tuple[int, ...]]
LAYOUTS: list[Layout] = [
    ("no_shard", None, (2,)),
    ("optim", None, (2,)),
    ("optim_grads", None, (2,)),
    ("optim_grads_params", None, (2,)),
    ("optim_grads_params", "no_shard", (2, 2)),
    ("optim_grads_params", "optim", (2, 2)),
    ("optim", "no_shard", (2, 2)),
]


def _named(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _run(layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(math.prod(layout[2]), function, layout, *args)


over_layouts = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: "-".join(map(_named, layout)).replace("None-", "")
)


class Chunk(adapter.FullyShardedDataParallel):
    """A model chunk sharded by placements; each linear layer is a unit, and what is left."""

    def __init__(self, module: Any, layouts: list[Layout], policy: MixedPrecisionPolicy | None = None) -> None:
        _BaseDataParallel.__init__(self, config=module.config, module=module)
        self.ddp_config = ddp_config()
        self.device = torch.device("cpu")
        self.data_parallel_group = dist.group.WORLD
        self._pg_collection = None
        self._has_replicas, self._has_whole_gradients = True, False
        units = [*(layer for layer in module.modules() if isinstance(layer, nn.Linear)), module]
        with fully_shard_context(self.device) as context:
            for index, unit in enumerate(units):
                strategy, outer, shape = layouts[index % len(layouts)]
                mesh, placements = init_device_mesh("cpu", shape), Placements.from_strategy(strategy, outer=outer)
                fully_shard(unit, mesh, placements, policy)
        self.fsdp_context = context
        for parameter in module.parameters():
            parameter.__fsdp_param__ = True


def _chunk(layout: Layout, dtype: torch.dtype = FP32, **policy: Any) -> Chunk:
    return Chunk(build_tower(dtype), [layout], MixedPrecisionPolicy(**policy) if policy else None)


def _backward(chunk: Any, step: int, scale: Any = 1.0, microbatches: int = 1) -> None:
    for index in range(microbatches):
        with microbatch(chunk.fsdp_context, is_last=index == microbatches - 1):
            (tower_loss(chunk.module, step, index, my_rank()) * scale / microbatches).backward()


def _reference_backward(model: Any, step: int, microbatches: int = 1) -> None:
    world = dist.get_world_size()
    for index in range(microbatches):
        for rank in range(world):
            (tower_loss(model, step, index, rank) / (world * microbatches)).backward()


# --- parity -----------------------------------------------------------------------------------------------------------


def _zero_column(module: Any, args: Any) -> Any:
    (x,) = args
    return (torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1),)


def _schedule(optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.02,
        min_lr=0.002,
        lr_warmup_steps=2,
        lr_decay_steps=6,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.3,
        wd_incr_steps=6,
        wd_incr_style="linear",
    )


def _torch_adamw(model: Any) -> torch.optim.AdamW:
    """Group as Megatron-LM documents it: vectors and biases do not decay."""
    rates = {"max_lr": 0.02, "min_lr": 0.002}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "wd_mult": 1.0, **rates},
        {"params": [p for p in model.parameters() if p.ndim == 1], "wd_mult": 0.0, **rates},
    ]
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.999), eps=1e-6)


def _trains_as_torch(layout: Layout, mixed: bool) -> None:
    start()
    reference, tower = build_tower(), build_tower()
    for model in (reference, tower):
        model.register_forward_pre_hook(_zero_column)
    chunk = Chunk(tower, [layout, ("no_shard", None, (4,)), ("optim", None, (4,))] if mixed else [layout])
    changes: dict[str, Any] = {"lr": 0.02, "min_lr": 0.002, "adam_eps": 1e-6}
    optimizer = build_optimizer(chunk, clip_grad=0.1, log_num_zeros_in_grad=True, **changes)
    theirs = _torch_adamw(reference)
    schedules = [_schedule(optimizer), _schedule(theirs)]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 4]
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad()
        _backward(chunk, step, microbatches=2)
        _reference_backward(reference, step, microbatches=2)
        gradients = {name: p.grad for name, p in reference.named_parameters()}
        assert_close(full_gradients(chunk), gradients)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        is_updated, found, zeros = optimizer.step()
        assert is_updated is True and found.dtype is FP32 and found.shape == () and norm > 0.1
        torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)
        assert_same_on_all_ranks((found.numpy().tobytes(), zeros))
        assert zeros == sum(int((g == 0).sum()) for g in gradients.values()) >= 14
        assert_close(full_gradients(chunk), {name: p.grad for name, p in reference.named_parameters()})
        theirs.step()
        for schedule in schedules:
            schedule.step(1)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([g["lr"] for g in theirs.param_groups])
    # Adam's update is a ratio: where gradients nearly cancel, their rounding shows at full size.
    assert_close(full_weights(chunk), {n: p.detach() for n, p in reference.named_parameters()}, rtol=1e-4)
    state = {name: theirs.state[p] for name, p in reference.named_parameters()}
    assert_close(full_state(optimizer, chunk), state, rtol=1e-4)


@over_layouts
def test_every_strategy_trains_as_torch_over_whole_tensors(layout: Layout) -> None:
    _run(layout, _trains_as_torch, False)


def test_units_of_several_strategies_and_meshes_in_one_optimizer() -> None:
    _run(("optim_grads_params", "no_shard", (2, 2)), _trains_as_torch, True)


# --- overflows --------------------------------------------------------------------------------------------------------


def _poison(chunk: Any, value: float) -> None:
    """Put a value into one element on the last rank: one copy of it where there are several."""
    if my_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            for name in ("net.layers.1.weight", "net.layers.0.bias", "net.scale"):
                local = chunk.module.get_parameter(name).grad.to_local()
                if local.numel():
                    local.view(-1)[-1] = value
                    return
        raise AssertionError("the last rank owns nothing")


def _overflow(layout: Layout, constant: bool) -> None:
    start()
    with cpu_shim():
        chunk = _chunk(layout, FP16, main_grads_dtype=FP16)
        settings = {"loss_scale": 2.0**10} if constant else {"initial_loss_scale": 2.0**10, "loss_scale_window": 2}
        optimizer = build_optimizer(
            chunk, fp16=True, params_dtype=FP16, hysteresis=1, min_loss_scale=2.0, clip_grad=1.0, **settings
        )
        assert isinstance(optimizer.grad_scaler, ConstantGradScaler if constant else DynamicGradScaler)
        scale = 2.0**10
        for step, value in enumerate((0.0, math.inf, math.nan, 0.0, 0.0)):
            optimizer.zero_grad()
            _backward(chunk, step, optimizer.get_loss_scale())
            weights, kept = full_weights(chunk), [p.grad for p in chunk.parameters()]
            state = copy.deepcopy(full_state(optimizer, chunk))
            assert all(gradient.dtype is FP16 for gradient in kept)
            if value:
                _poison(chunk, value)
                assert optimizer.step() == (False, None, None)
                assert_equal(full_weights(chunk), weights)
                assert_equal(full_state(optimizer, chunk), state)
                scale = scale if constant else scale / 2
            else:
                is_updated, norm, _ = optimizer.step()
                assert is_updated is True and math.isfinite(norm)
                assert not all(torch.equal(new, weights[name]) for name, new in full_weights(chunk).items())
            assert all(p.grad is gradient for p, gradient in zip(chunk.parameters(), kept, strict=True))
            if step == 4 and not constant:
                scale *= 2
            assert optimizer.get_loss_scale().item() == scale
        assert_same_on_all_ranks([tensor.numpy().tobytes() for tensor in full_weights(chunk).values()])


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "dynamic"])
@over_layouts
def test_pb043_an_overflow_on_one_rank_skips_on_all(layout: Layout, constant: bool) -> None:
    _run(layout, _overflow, constant)


def _raises(layout: Layout) -> None:
    """Without a loss scale nothing is skipped; the chunk's own check raises where the bad gradient counts."""
    start()
    chunk = _chunk(layout)
    chunk.ddp_config = ddp_config(check_for_nan_in_grad=True)
    _backward(chunk, 0)
    chunk.finish_grad_sync()
    if my_rank() == 1:
        chunk.module.net.layers[1].weight.grad.to_local().view(-1)[-1] = math.nan
    chunk.finish_grad_sync()


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "no_shard" not in layout], ids=_named)
def test_pb043_a_nan_in_one_shard_raises_on_all(layout: Layout) -> None:
    for message in run_ranks_expecting(math.prod(layout[2]), RuntimeError, _raises, layout):
        assert "gradients: expected finite values" in message


# --- chains -----------------------------------------------------------------------------------------------------------


def _children(chunk: Any, *, decoupled: bool = False, **changes: Any) -> list[FullyShardedOptimizer]:
    """Return two optimizers that share the groups of one chunk: of weights, and of vectors."""
    named = dict(chunk.module.named_parameters())
    parts = [[p for p in named.values() if p.ndim > 1], [p for p in named.values() if p.ndim == 1]]
    config = optimizer_config(**changes)
    kind = DecoupledAdamW if decoupled else torch.optim.AdamW
    if decoupled:
        _make_precision_aware(config)
    scalers = [DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 1000, 1) if config.fp16 else None for _ in parts]
    return [
        FullyShardedOptimizer(
            kind([{"params": part, "max_lr": 0.02, "min_lr": 0.002}], lr=0.02), config, scaler, None, [chunk]
        )
        for part, scaler in zip(parts, scalers, strict=True)
    ]


def _chained(layout: Layout) -> None:
    start()
    with cpu_shim():
        chunk, reference = _chunk(layout), build_tower()
        children = _children(chunk, clip_grad=0.1, lr=0.02)
        chained = ChainedOptimizer(children)
        adamw = torch.optim.AdamW([{"params": list(reference.parameters()), "max_lr": 0.02, "min_lr": 0.002}], lr=0.02)
        schedules = [_schedule(chained), _schedule(adamw)]
        for step in range(4):
            chained.zero_grad(set_to_none=step % 2 == 0)
            adamw.zero_grad()
            _backward(chunk, step, microbatches=2)
            _reference_backward(reference, step, microbatches=2)
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            is_updated, found, _ = chained.step()
            assert is_updated and float(found) == pytest.approx(float(norm), rel=1e-6) and norm > 0.1
            assert_same_on_all_ranks(float(found))
            assert_close(full_gradients(chunk), {name: p.grad for name, p in reference.named_parameters()})
            adamw.step()
            for schedule in schedules:
                schedule.step(1)
        assert_close(full_weights(chunk), {n: p.detach() for n, p in reference.named_parameters()}, rtol=1e-4)
        children[0].zero_grad()
        assert {p.ndim > 1 for p in chunk.parameters() if p.grad is None} == {True}
        assert {p.ndim > 1 for p in chunk.parameters() if p.grad is not None} == {False}


@over_layouts
def test_chained_children_clip_by_their_joint_norm(layout: Layout) -> None:
    _run(layout, _chained)


def _chained_overflow(layout: Layout) -> None:
    """Each child has a scaler of its own: both must come to the same decision, whichever has the overflow."""
    start()
    with cpu_shim():
        chunk = _chunk(layout, FP16, main_grads_dtype=FP16)
        children = _children(chunk, fp16=True, params_dtype=FP16, clip_grad=1.0)
        chained = ChainedOptimizer(children)
        for step, ndim in enumerate((1, 2)):
            weights, state = full_weights(chunk), [copy.deepcopy(full_state(child, chunk)) for child in children]
            chained.zero_grad()
            _backward(chunk, 2 * step, chained.get_loss_scale())
            kept = [p.grad for p in chunk.parameters()]
            if my_rank() == dist.get_world_size() - 1:
                for parameter in chunk.parameters():
                    if parameter.ndim == ndim and parameter.grad.to_local().numel():
                        parameter.grad.to_local().view(-1)[0] = math.inf
                        break
                else:
                    raise AssertionError("the last rank owns nothing")
            assert chained.step() == (False, None, None)
            assert_equal(full_weights(chunk), weights)
            for child, before in zip(children, state, strict=True):
                assert_equal(full_state(child, chunk), before)
                assert child.grad_scaler.state_dict()["growth_tracker"] == 0
                assert child.get_loss_scale().item() == 2.0 ** (9 - step)
            chained.zero_grad(set_to_none=False)
            assert all(p.grad is gradient for p, gradient in zip(chunk.parameters(), kept, strict=True))
            assert not any(bool(gradient.any()) for gradient in full_gradients(chunk).values())
            _backward(chunk, 2 * step + 1, chained.get_loss_scale())
            assert chained.step()[0] is True
            assert not all(torch.equal(new, weights[name]) for name, new in full_weights(chunk).items())


@over_layouts
def test_pb043_an_overflow_in_one_child_skips_both(layout: Layout) -> None:
    _run(layout, _chained_overflow)


# --- precision-aware --------------------------------------------------------------------------------------------------


def _make_precision_aware(config: Any, **dtypes: torch.dtype) -> Any:
    """Set what `OptimizerConfig` itself refuses without TransformerEngine."""
    config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    config.main_grads_dtype = dtypes.get("main_grads_dtype", BF16)
    config.main_params_dtype = dtypes.get("main_params_dtype", FP32)
    return config


def _is_restored(chunk: Any) -> bool:
    return all(getattr(p, "decoupled_grad", None) is None and p.grad.dtype is BF16 for p in chunk.parameters())


def _precision_aware(layout: Layout, scaled: bool) -> None:
    """Norm, zero count, clipped gradients and weights are those of the normal mode, but for rounding."""
    start()
    with cpu_shim():
        chunks = [_chunk(layout, BF16, main_grads_dtype=BF16) for _ in range(2)]
        changes: dict[str, Any] = {"clip_grad": 0.1, "log_num_zeros_in_grad": True, "lr": 0.02}
        configs = [optimizer_config(**changes), _make_precision_aware(optimizer_config(**changes))]
        bases: list[Any] = [torch.optim.AdamW(chunks[0].parameters(), lr=0.02)]
        bases.append(DecoupledAdamW(chunks[1].parameters(), lr=0.02))
        scalers = [ConstantGradScaler(2.0**10) if scaled else None for _ in bases]
        normal, aware = (
            FullyShardedOptimizer(base, config, scaler, None, [chunk])
            for base, config, scaler, chunk in zip(bases, configs, scalers, chunks, strict=True)
        )
        for step in range(3):
            results = []
            chunks[1].load_state_dict(chunks[0].state_dict())
            for chunk, optimizer in zip(chunks, (normal, aware), strict=True):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                _backward(chunk, step, optimizer.get_loss_scale())
                if step == 1:
                    chunk.module.net.layers[1].weight.grad.to_local().zero_()
                results.append(optimizer.step())
            (updated, norm, zeros), (_, other_norm, other_zeros) = results
            assert updated and results[1][0] and norm > 0.1 and float(norm) == float(other_norm)
            assert zeros == other_zeros and (zeros >= 13 * 11) == (step == 1)
            assert bases[1].seen == {BF16} and _is_restored(chunks[1])
            clipped = torch.cat([gradient.float().flatten() for gradient in full_gradients(chunks[1]).values()])
            torch.testing.assert_close(clipped.norm().item(), 0.1, rtol=2**-7, atol=0)
            # The normal mode clips copies in float32, this one the bfloat16 gradients themselves.
            assert_close(full_weights(chunks[1]), full_weights(chunks[0]), rtol=1e-2)
        if scaled:
            aware.zero_grad()
            _backward(chunks[1], 5, aware.get_loss_scale())
            weights = full_weights(chunks[1])
            _poison(chunks[1], math.inf)
            assert aware.step() == (False, None, None) and _is_restored(chunks[1])
            assert_equal(full_weights(chunks[1]), weights)


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@over_layouts
def test_pb040_precision_aware_config_reads_the_gradients_it_steps_on(layout: Layout, scaled: bool) -> None:
    _run(layout, _precision_aware, scaled)


def _precision_aware_chain() -> None:
    """Megatron-core's own chain finds the gradients to clip in `decoupled_grad`."""
    start()
    layout: Layout = ("optim_grads_params", None, (2,))
    with cpu_shim():
        chunk = _chunk(layout, BF16, main_grads_dtype=BF16)
        chained = ChainedOptimizer(_children(chunk, decoupled=True, clip_grad=0.1))
        _backward(chunk, 0)
        gradients = torch.cat([gradient.float().flatten() for gradient in full_gradients(chunk).values()])
        is_updated, norm, _ = chained.step()
        # Without TransformerEngine, megatron-core takes norms of bfloat16 tensors in bfloat16.
        assert is_updated and float(norm) == pytest.approx(gradients.double().norm().item(), rel=2**-8) and norm > 0.1
        clipped = torch.cat([gradient.float().flatten() for gradient in full_gradients(chunk).values()])
        torch.testing.assert_close(clipped, gradients * (0.1 / float(norm)), rtol=2**-7, atol=0)
        assert _is_restored(chunk)
        chained.zero_grad()
        assert all(parameter.grad is None for parameter in chunk.parameters())


def test_pb040_a_chain_of_precision_aware_optimizers() -> None:
    run_ranks(2, _precision_aware_chain)


def _precision_aware_state() -> None:
    """Creating state for a load hands over gradients in the configured dtype, and moves nothing."""
    start()
    chunk = _chunk(("optim_grads_params", None, (2,)), BF16, main_grads_dtype=BF16)
    base = DecoupledAdamW(chunk.parameters(), lr=0.02)
    optimizer = FullyShardedOptimizer(base, _make_precision_aware(optimizer_config()), None, None, [chunk])
    before = full_weights(chunk)
    state = optimizer.sharded_state_dict(None, is_loading=True)["state"]
    assert len(state) == 7 and base.seen == {BF16}
    assert_equal(full_weights(chunk), before)
    assert all(parameter.grad is None for parameter in chunk.parameters())


def test_state_of_precision_aware_optimizers_is_created() -> None:
    run_ranks(2, _precision_aware_state)


def _precision_aware_refusals() -> None:
    start()
    layout: Layout = ("optim_grads_params", None, (1,))
    chunk = _chunk(layout, BF16, main_grads_dtype=BF16)

    def build(base: Any, **dtypes: torch.dtype) -> FullyShardedOptimizer:
        config = _make_precision_aware(optimizer_config(), **dtypes)
        return FullyShardedOptimizer(base, config, None, None, [chunk])

    match = r"use_precision_aware_optimizer: expected a base optimizer with use_decoupled_grad=True, got AdamW, which"
    with pytest.raises(ValueError, match=match):
        build(torch.optim.AdamW(chunk.parameters()))
    adapted = fully_shard_optimizer(torch.optim.AdamW(chunk.parameters()))
    with pytest.raises(ValueError, match=r"got FsdpAdamW, which reads \.grad"):
        build(adapted)
    with pytest.raises(ValueError, match="expected True for an optimizer with use_decoupled_grad=True, got False"):
        FullyShardedOptimizer(DecoupledAdamW(chunk.parameters()), optimizer_config(), None, None, [chunk])
    with pytest.raises(ValueError, match=r"main_params_dtype: expected the dtype .*, got torch\.bfloat16 for weights"):
        build(DecoupledAdamW(chunk.parameters()), main_params_dtype=BF16)
    optimizer = build(DecoupledAdamW(chunk.parameters()), main_grads_dtype=FP32)
    _backward(chunk, 0)
    with pytest.raises(ValueError, match=r"main_grads_dtype: .* got torch\.float32 for gradients in .*bfloat16"):
        optimizer.step()
    config = _make_precision_aware(optimizer_config())
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8, config.fp8_recipe = False, "mxfp8"
    with pytest.raises(NotImplementedError, match="fp8_recipe: expected None or 'delayed' with use_precision_aware"):
        FullyShardedOptimizer(DecoupledAdamW(chunk.parameters()), config, None, None, [chunk])
    for name, kind in (("adam", "AdamW"), ("sgd", "SGD")):
        match = rf"use_precision_aware_optimizer: expected an Adam with use_decoupled_grad, got {kind}\. Install Trans"
        with pytest.raises(ValueError, match=match):
            get_megatron_optimizer(_make_precision_aware(optimizer_config(optimizer=name)), [chunk])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours_config.mcore_optimizer, "Adam", DecoupledAdamW)
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            config = _make_precision_aware(optimizer_config())
            setattr(config, name, FP16)
            flag = f"--{name.replace('_', '-')}"
            match = rf"{name}: expected torch.float32 or torch.bfloat16 .*, got torch.float16, .* Set {flag} to one of"
            with pytest.raises(NotImplementedError, match=match):
                get_megatron_optimizer(config, [chunk])


def test_precision_aware_refusals() -> None:
    run_ranks(1, _precision_aware_refusals)


def _precision_aware_factory() -> None:
    """The factory builds the fused Adam that reads decoupled gradients, without main weights of its own."""
    start()
    chunk = _chunk(("optim_grads_params", None, (1,)), BF16, main_grads_dtype=BF16)
    config = _make_precision_aware(optimizer_config(adam_eps=1e-6))
    config.exp_avg_dtype = BF16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours_config.mcore_optimizer, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(ours_config.mcore_optimizer, "Adam", DecoupledAdamW)
        optimizer = get_megatron_optimizer(config, [chunk])
    base: Any = optimizer.optimizer
    assert isinstance(base, DecoupledAdamW) and base.use_decoupled_grad is True
    assert base.settings == {"master_weights": False, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": FP32}
    _backward(chunk, 0)
    assert optimizer.step()[0] and base.seen == {BF16}


def test_the_factory_builds_precision_aware_optimizers() -> None:
    run_ranks(1, _precision_aware_factory)


# --- groups and copies ------------------------------------------------------------------------------------------------


def _stats_groups() -> None:
    """One optimizer instance's group where it holds all ranks of the chunk, else all ranks; a given one is taken."""
    start()
    layout: Layout = ("optim_grads_params", "optim", (2, 2))
    chunk = _chunk(layout)
    mesh = chunk.module.net.layers[0].weight.device_mesh
    intra = ours.parallel_state.get_intra_distributed_optimizer_instance_group()
    assert chunk.model_group is intra
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.parallel_state, "get_intra_distributed_optimizer_instance_group", lambda: mesh.get_group(1))
        assert dist.get_process_group_ranks(chunk.model_group) == list(range(4))
        optimizer = get_megatron_optimizer(optimizer_config(), [chunk])
    _backward(chunk, 0)
    gradients = torch.cat([gradient.flatten() for gradient in full_gradients(chunk).values()]).double()
    assert float(optimizer.get_grad_norm()) == pytest.approx(gradients.norm().item(), rel=1e-7)
    optimizer.grad_stats_parallel_group = mesh.get_group(1)
    with pytest.raises(ValueError, match="Give the optimizer a larger grad_stats_parallel_group"):
        optimizer.get_grad_norm()
    part = optimizer._filter_grads_for_norm([], None)
    assert part == []


def test_groups_of_statistics() -> None:
    run_ranks(4, _stats_groups)


def _filtered() -> None:
    """megatron-core 0.19 asks for the gradients of some parameters; together they are those of all."""
    start()
    chunk = _chunk(("no_shard", None, (2,)))
    optimizer = build_optimizer(chunk)
    _backward(chunk, 0)
    parameters = optimizer.get_parameters()
    weights = optimizer._filter_grads_for_norm(parameters, param_filter=lambda p: p.ndim > 1)
    vectors = optimizer._filter_grads_for_norm(parameters, param_filter=lambda p: p.ndim == 1)
    every = optimizer.get_main_grads_for_grad_norm()
    assert {id(t) for t in (*weights, *vectors)} == {id(t) for t in every}
    assert len(every) == (7 if my_rank() == 0 else 0)


def test_gradients_for_a_norm_can_be_filtered() -> None:
    run_ranks(2, _filtered)


def _copies() -> None:
    """Wide copies are made anew for each step, in DTensors that are made once, and cannot be read after it."""
    start()
    chunk = _chunk(("optim_grads_params", None, (2,)), BF16, main_grads_dtype=BF16)
    parameters = list(chunk.parameters())
    wide = WideGradients()
    seen = []
    for step in range(2):
        for parameter in parameters:
            parameter.grad = None
        _backward(chunk, step)
        narrow = [parameter.grad for parameter in parameters]
        wide.install(parameters)
        copies = [parameter.grad for parameter in parameters]
        for parameter, gradient, copied in zip(parameters, narrow, copies, strict=True):
            assert copied.dtype is FP32 and copied.shape == gradient.shape == parameter.shape
            assert torch.equal(copied.full_tensor(), gradient.full_tensor().float())
        parameters[0].grad = None
        wide.restore()
        assert parameters[0].grad is None
        assert all(p.grad is gradient for p, gradient in zip(parameters[1:], narrow[1:], strict=True))
        with pytest.raises(AttributeError, match="_local_tensor"):
            copies[1].to_local()
        seen.append(copies)
    assert all(one is other for one, other in zip(*seen, strict=True))
    wide.restore()
    parameters[0].grad = torch.zeros_like(parameters[0], dtype=BF16)
    wide.install(parameters[:1])
    assert parameters[0].grad.dtype is FP32 and parameters[1].grad.dtype is BF16
    wide.restore()
    same = _chunk(("optim_grads_params", None, (2,)))
    _backward(same, 0)
    kept = [parameter.grad for parameter in same.parameters()]
    wide.install(list(same.parameters()))
    assert all(p.grad is gradient for p, gradient in zip(same.parameters(), kept, strict=True))


def test_wide_copies_live_for_one_step() -> None:
    run_ranks(2, _copies)
