# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Memory at rest and at the peak of a step is what a formula says, for every strategy and whatever the depth.

With a trace pool torch's allocator is not asked for more, and keeps little that nobody uses.

The formula is that of `tests/unit_tests/accounting.py`, for bf16 compute, fp32 main weights and gradients and Adam; a
step adds activations: what a forward of the same model keeps, measured without sharding.

The allocator rounds each tensor up and the layout pads: rest may be off by REST_TOLERANCE, peak - rest by
PEAK_TOLERANCE. cuBLAS takes its workspaces from the same allocator, so that bytes are counted from after a first use.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from tests.gpu.checks import IS_DRY, Check
from tests.unit_tests.accounting import Cost
from tests.unit_tests.launch import DEVICE
from tests.unit_tests.models import Block

WIDTH = 8 if IS_DRY else 2048
NUM_ROWS = 16
REST_TOLERANCE = 0.02
PEAK_TOLERANCE = 0.05
MIB = 2**20

ADAM_BYTES = 8
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def _allocated() -> int:
    """Return the bytes of live tensors on this GPU; the host has no such count."""
    if IS_DRY:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _peak() -> int:
    return 0 if IS_DRY else torch.cuda.max_memory_allocated()


def _model(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(WIDTH) for _ in range(depth)]).to(DEVICE, torch.bfloat16)


def _step(model: Any, batch: torch.Tensor) -> None:
    model(batch).float().square().mean().backward()


def _activation_bytes(depth: int, batch: torch.Tensor) -> int:
    """Return what autograd keeps of an unsharded forward."""
    model = _model(depth)
    before = _allocated()
    loss = model(batch).float().square().mean()
    kept = _allocated() - before
    loss.backward()
    return kept


def follows_the_formula(depth: int, strategy: str, outer: str | None, num_outer: int) -> str:
    """Rest, peak, and nothing left when the model is gone."""
    world_size = dist.get_world_size()
    shape = (world_size,) if outer is None else (num_outer, world_size // num_outer)
    placements = Placements.from_strategy(strategy, outer=outer)
    batch = torch.randn(NUM_ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    _step(_model(1), batch)
    gc.collect()
    activations = _activation_bytes(depth, batch)
    gc.collect()
    before = _allocated()
    model = _model(depth)
    numel = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh(DEVICE, shape)
    for block in model:
        fully_shard(block, mesh, placements)
    fully_shard(model, mesh, placements)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    for _ in range(2):
        _step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    rest = _allocated() - before
    if not IS_DRY:
        torch.cuda.reset_peak_memory_stats()
    _step(model, batch)
    above_rest = _peak() - before - rest
    del model, block, optimizer
    gc.collect()
    left = _allocated() - before
    cost = Cost(placements, shape, depth, numel // depth, compute_bytes=2, main_bytes=4, has_one_dtype=False)
    expected_rest = cost.rest(ADAM_BYTES)
    expected_above = cost.peak_above_rest(counts_autograd=True) + activations
    if IS_DRY:
        return f"formula only: {expected_rest:.0f} bytes at rest and {expected_above:.0f} above"
    measured = (
        f"rest {rest / MIB:.1f} MiB, formula {expected_rest / MIB:.1f}; peak {above_rest / MIB:.1f} MiB above, formula "
        f"{expected_above / MIB:.1f} (activations {activations / MIB:.1f}); left after deletion {left / MIB:.2f}"
    )
    assert abs(rest / expected_rest - 1) < REST_TOLERANCE, measured
    assert abs(above_rest / expected_above - 1) < PEAK_TOLERANCE, measured
    assert left < MIB, measured
    return measured


MAX_RESERVED = {"optim_grads_params": 1.06}
"""Memory taken from the driver over memory in use; in other strategies what autograd allocates leaves larger gaps."""
NUM_WARM_UP_STEPS = 3


def pool_leaves_the_allocator_alone(depth: int, strategy: str) -> str:
    """With a trace pool, after three steps: no call to the driver for memory, and almost none that lies idle."""
    gc.collect()
    if not IS_DRY:
        torch.cuda.empty_cache()  # what other checks have left
    batch = torch.randn(NUM_ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    model = _model(depth)
    placements = Placements.from_strategy(strategy)
    with fully_shard_context(DEVICE, trace_pool=True) as context:
        for block in model:
            fully_shard(block, placements=placements)
        fully_shard(model, placements=placements)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    pool: Any = context.pool
    seen: list[tuple[int, dict[str, Any]]] = []
    for step in range(2 * NUM_WARM_UP_STEPS):
        if step == NUM_WARM_UP_STEPS and not IS_DRY:
            torch.cuda.reset_peak_memory_stats()
        _step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((_num_device_allocations(), pool.slots))
    assert pool.is_active and pool.num_fallbacks == 0, pool.num_fallbacks
    assert all(slots == seen[-1][1] for _, slots in seen[1:])
    held = f"{pool.num_bytes} bytes in {len(pool.plan.arenas)} arenas"
    if IS_DRY:
        return f"bookkeeping only: {held}"
    calls = seen[-1][0] - seen[NUM_WARM_UP_STEPS - 1][0]
    ratio = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()
    measured = f"{held}; {calls} calls of cudaMalloc after step {NUM_WARM_UP_STEPS}, reserved / allocated {ratio:.3f}"
    assert calls == 0 and ratio <= MAX_RESERVED.get(strategy, 2.0), measured
    return measured


def _num_device_allocations() -> int:
    """Return how often torch's allocator has asked the driver for memory."""
    return 0 if IS_DRY else int(torch.cuda.memory_stats()["num_device_alloc"])


_CASES: list[tuple[int, str, str | None, int]] = [
    (16, "optim_grads_params", None, 1),
    *((8, strategy, None, 1) for strategy in STRATEGIES),
    *((8, "optim_grads_params", outer, num_outer) for outer in ("no_shard", "optim") for num_outer in (1, 2)),
]
CHECKS = [
    Check(
        f"memory_of_{case[0]}_layers_{case[1]}" + (f"_outer_{case[2]}_{case[3]}" if case[2] else ""),
        follows_the_formula,
        case,
        min_ranks=case[3],
    )
    for case in _CASES
]
CHECKS += [
    Check(f"pool_of_16_layers_{strategy}", pool_leaves_the_allocator_alone, (16, strategy)) for strategy in STRATEGIES
]
