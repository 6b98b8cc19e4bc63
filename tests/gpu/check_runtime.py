# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the runtime that need GPUs and NCCL.

    torchrun --nproc_per_node 2 tests/gpu/check_runtime.py

Every rank runs every check; a failed one raises. The line of each check gives what was measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from tests.unit_tests.models import MODELS, Block
from tests.unit_tests.oracle import Recipe, assert_parity, run_reference, run_sharded

SLEEP_CYCLES = 20_000_000  # about 10 ms: longer than a unit's compute, so that a missing wait shows
CHECKS: list[Callable[[], str]] = []


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS.append(function)
    return function


@check
def parity_with_one_process() -> str:
    world_size = dist.get_world_size()
    recipes = [Recipe(model=name, device="cuda") for name in MODELS]
    recipes += [Recipe(device="cuda", microbatches=3, set_to_none=flag) for flag in (True, False)]
    recipes += [Recipe(device="cuda", optimizer="sgd")]
    for recipe in recipes:
        assert_parity(run_sharded(recipe), run_reference(recipe, world_size))
    return f"{len(recipes)} recipes"


@check
def bfloat16_follows_float32() -> str:
    recipe = Recipe(model="tied", device="cuda", dtype=torch.bfloat16, steps=20, max_norm=None)
    run = run_sharded(recipe)
    reference = run_reference(Recipe(model="tied", device="cuda", steps=20, max_norm=None), dist.get_world_size())
    worst = max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True))
    assert worst < 0.05 and run.losses[-1] < run.losses[0]
    return f"largest loss difference {worst:.4f} over 20 steps"


def _train(
    *, slow: str | None = None, side_stream: bool = False, unify: bool = False, prefetch: int = 1, steps: int = 4
) -> list[torch.Tensor]:
    """Train six blocks in bf16 and return the full weights; `slow` delays one communication stream in each backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block(512) for _ in range(6)]).to("cuda", torch.bfloat16)
    policy = SchedulePolicy(forward_prefetch_units=prefetch, backward_prefetch_units=prefetch)
    with fully_shard_context("cuda", unify_communication_stream=unify) as context:
        for block in model:
            fully_shard(block, schedule_policy=policy)
        fully_shard(model, schedule_policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    streams = {"all_gather": context.allgather_stream, "reduce": context.reduce_scatter_stream}
    generator = torch.Generator(device="cuda").manual_seed(dist.get_rank())
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps):
            inputs = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, generator=generator)
            optimizer.zero_grad()
            x = inputs
            if slow is not None:
                for block in model:
                    x = _Delay.apply(x, streams[slow])
                    x = block(x)
            else:
                x = model(inputs)
            x.float().square().mean().backward()
            # Small allocations on the compute stream reuse whatever was freed there too early.
            churn = [torch.randn(1024, device="cuda") for _ in range(64)]
            del churn
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    return [parameter.full_tensor() for parameter in model.parameters()]


class _Delay(torch.autograd.Function):
    """Passes through, and lets a communication stream sleep in forward and in backward."""

    @staticmethod
    def forward(ctx, x, stream):  # type: ignore[no-untyped-def]
        ctx.stream = stream
        with stream:
            torch.cuda._sleep(SLEEP_CYCLES)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        with ctx.stream:
            torch.cuda._sleep(SLEEP_CYCLES)
        return grad, None


@check
def streams_do_not_change_a_bit() -> str:
    """PB-068, PB-069, PB-070: slow streams, one stream, a side stream and no prefetch give equal bits."""
    reference = _train()
    variants = {
        "unified stream": _train(unify=True),
        "side stream": _train(side_stream=True),
        "no prefetch": _train(prefetch=0),
        "deep prefetch": _train(prefetch=3),
        "slow all-gather": _train(slow="all_gather"),
        "slow reductions": _train(slow="reduce"),
    }
    for name, weights in variants.items():
        assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True)), name
    return ", ".join(variants)


@check
def peak_memory_follows_the_formula() -> str:
    """Two units of gathered weights, two of packed gradients and activations above the shards; no growth with depth."""
    peaks = {}
    for depth in (8, 16):
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        width = 1024
        with torch.device("cuda"):
            model = torch.nn.Sequential(*[Block(width) for _ in range(depth)]).to(torch.bfloat16)
        unit_numel = sum(parameter.numel() for parameter in model[0].parameters())
        policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
        for block in model:
            fully_shard(block, mixed_precision_policy=policy)
        fully_shard(model)
        x = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)
        model(x).float().sum().backward()
        torch.cuda.synchronize()
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).float().sum().backward()
        torch.cuda.synchronize()
        peaks[depth] = (torch.cuda.max_memory_allocated() - resident) / (2 * unit_numel)
        del model
    # Two units of weights, two of packed gradients, one of gradients not yet packed and one shard being reduced.
    assert peaks[8] <= 6.0 and peaks[16] - peaks[8] < 0.5, peaks
    return ", ".join(f"{depth} layers: {peak:.2f} units above resident" for depth, peak in peaks.items())


@check
def no_host_synchronisation_in_a_step() -> str:
    model = torch.nn.Sequential(*[Block(64) for _ in range(3)]).to("cuda")
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.randn(4, 64, device="cuda")
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return "third step ran with synchronisation made an error"


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    for function in CHECKS:
        measured = function()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok {function.__name__} on {dist.get_world_size()} GPU(s): {measured}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
