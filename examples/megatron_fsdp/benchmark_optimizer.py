# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Compares the host time of an optimizer step over shards with one over plain tensors, and prints a Markdown table.

    python examples/megatron_fsdp/benchmark_optimizer.py --tensors 17 200 600
    torchrun --nproc_per_node 2 examples/megatron_fsdp/benchmark_optimizer.py --device cuda

One step is: the norm of all gradients, clipping by it, AdamW. It is taken in three ways, one after another within each
round: by torch over plain tensors of the shards' sizes (`plain`), by `clip_grad_norm_` and an adapted optimizer
(`adapted`), and by megatron-core's contract (`FullyShardedOptimizer`). Tensors are small, so that the time is that of
the host. Between steps, gradients are cleared and come from a backward. The ratio is that of the medians; it is of
the processor time of this thread, which other processes on the machine do not count in, unless --clock wall. Over
several ranks the sharded ones also all-reduce the norm, which `plain` does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TENSORS_PER_UNIT = 12
"""About what a transformer layer has."""

MAX_NORM = 1.0
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.thread_time, "wall": time.perf_counter}
HEADINGS = ("tensors", "optimizer", "plain ms", "adapted ms", "adapted / plain", "FullyShardedOptimizer ms", "/ plain")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[17, 200, 600], help="default: %(default)s")
    parser.add_argument("--numel", type=int, default=64, help="elements of a tensor's shard (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default: %(default)s)")
    parser.add_argument("--optimizers", nargs="+", choices=("fused", "foreach"), default=["fused", "foreach"])
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(words)
    if min(*arguments.tensors, arguments.numel, arguments.steps, arguments.warmup) < 1:
        parser.error("--tensors, --numel, --steps, --warmup: expected numbers of at least 1.")
    return arguments


class Unit(nn.Module):
    """Some parameters, each with a gradient."""

    def __init__(self, shapes: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(numel)) for numel in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack([weight.sum() for weight in self.weights]).sum()


def build(num_tensors: int, numel: int, device: torch.device) -> nn.Sequential:
    """Return a model of `num_tensors` parameters of `numel` elements."""
    sizes = [numel] * num_tensors
    units = [Unit(sizes[start : start + TENSORS_PER_UNIT]) for start in range(0, num_tensors, TENSORS_PER_UNIT)]
    return nn.Sequential(*units).to(device)


def adamw(parameters: Any, kind: str) -> torch.optim.AdamW:
    """Return the optimizer that is compared, in torch's fused or foreach form."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=kind == "fused", foreach=kind == "foreach")


@dataclass(frozen=True)
class Contestant:
    """A model, and a way to step it."""

    model: Any
    step: Callable[[], object]
    clear: Callable[[], object]

    def measure(self, clock: Callable[[], float], device: torch.device) -> float:
        """Return the seconds of one step; a backward makes gradients before, and they are cleared after it."""
        self.model(torch.ones((), device=device)).backward()
        synchronize(device)
        start = clock()
        self.step()
        elapsed = clock() - start
        synchronize(device)
        self.clear()
        return elapsed


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def plain(num_tensors: int, numel: int, kind: str, device: torch.device) -> Contestant:
    """Step plain tensors of the shards' sizes."""
    model = build(num_tensors, numel, device)
    parameters = list(model.parameters())
    optimizer = adamw(parameters, kind)

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()

    return Contestant(model, step, optimizer.zero_grad)


def adapted(num_tensors: int, numel: int, kind: str, device: torch.device) -> Contestant:
    """Step the shards of a sharded model with an adapted optimizer."""
    from megatron.core.distributed.fsdp.experimental import clip_grad_norm_, fully_shard, fully_shard_optimizer

    model = build(num_tensors, numel * dist.get_world_size(), device)
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    parameters = list(model.parameters())
    optimizer = fully_shard_optimizer(adamw(parameters, kind))

    def step() -> None:
        clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()

    return Contestant(model, step, optimizer.zero_grad)


def fully_sharded(num_tensors: int, numel: int, kind: str, device: torch.device) -> Contestant:
    """Step the shards of a Megatron-Core chunk under megatron-core's contract."""
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp import mcore_fsdp_v2_adapter as adapter
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, gradient_accumulation_fusion=False)
    module: Any = MegatronModule(config)
    module.net = build(num_tensors, numel * dist.get_world_size(), device)
    module.forward = module.net.forward
    ddp_config = adapter.DistributedDataParallelConfig(
        use_megatron_fsdp_v2=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    chunk = adapter.FullyShardedDataParallel(config, ddp_config, module, fsdp_unit_modules=[Unit])
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=MAX_NORM)
    optimizer = FullyShardedOptimizer(adamw(chunk.parameters(), kind), settings, None, None, [chunk])
    return Contestant(chunk, optimizer.step, optimizer.zero_grad)


def compare(num_tensors: int, kind: str, arguments: argparse.Namespace) -> list[float]:
    """Return the median seconds of a step of every contestant, which take turns."""
    device = torch.device(arguments.device)
    contestants = [make(num_tensors, arguments.numel, kind, device) for make in (plain, adapted, fully_sharded)]
    times: list[list[float]] = [[] for _ in contestants]
    for index in range(arguments.warmup + arguments.steps):
        for contestant, seconds in zip(contestants, times, strict=True):
            elapsed = contestant.measure(CLOCKS[arguments.clock], device)
            if index >= arguments.warmup:
                seconds.append(elapsed)
    return [statistics.median(seconds) for seconds in times]


def start_process_group(device: str) -> None:
    """Join the ranks that torchrun has started, or be the only one."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print on rank 0."""
    arguments = parse(words)
    warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex are not installed.*")
    torch.set_num_threads(1)
    start_process_group(arguments.device)
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"torch {torch.__version__}, {arguments.device}, {dist.get_world_size()} ranks, {arguments.clock} time\n")
        print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|")
    for num_tensors in arguments.tensors:
        for kind in arguments.optimizers:
            base, *others = compare(num_tensors, kind, arguments)
            cells = [f"{base * 1e3:.3f}"]
            for other in others:
                cells += [f"{other * 1e3:.3f}", f"{other / base:.2f}"]
            if is_first:
                print("| " + " | ".join([str(num_tensors), kind, *cells]) + " |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
