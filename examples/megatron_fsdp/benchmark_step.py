# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Measures training steps of one model under one runtime, on the ranks it is started on. Compares nothing.

`benchmark.py` starts it with torchrun for every pair and reads `result.json`, or `error.<rank>`, from --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_runtimes import RUNTIMES, STRATEGIES, Setup
from decoder import SHAPES, Decoder, Shape
from torch.distributed.device_mesh import init_device_mesh

SETTLED_STEPS = 3
"""Memory is counted after so many steps: by then the optimizer's state and the allocator's cache exist."""

PROFILED_STEPS = 2


@dataclass(frozen=True)
class StepTime:
    """Where one step's time went: the whole of it, and what the host needed to issue its two parts."""

    step_s: float
    forward_backward_host_s: float
    optimizer_host_s: float

    @property
    def host_s(self) -> float:
        return self.forward_backward_host_s + self.optimizer_host_s


@dataclass(frozen=True)
class Memory:
    """A GPU's memory from `SETTLED_STEPS` on: peaks, and how often torch asked the driver for more."""

    allocated_bytes: int
    reserved_bytes: int
    device_allocations: int


@dataclass(frozen=True)
class RankResult:
    """What one rank saw: the time of each measured step, the loss of every step, and its memory."""

    times: list[StepTime]
    losses: list[float]
    memory: Memory | None


class Bench:
    """One model under one runtime on this rank."""

    def __init__(self, model_name: str, runtime: str, device: torch.device) -> None:
        self.shape: Shape = SHAPES[model_name]
        self.device = device
        torch.manual_seed(0)
        with device:
            model = Decoder(self.shape)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.setup: Setup = {**RUNTIMES, **STRATEGIES}[runtime](model, mesh)
        generator = torch.Generator(device=device).manual_seed(100 + dist.get_rank())
        size = (self.shape.batch, self.shape.sequence + 1)
        self.text = torch.randint(0, self.shape.vocab, size, device=device, generator=generator)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self) -> tuple[StepTime, float]:
        """Run one step that all ranks begin together; return its time and its loss."""
        model, optimizer = self.setup.model, self.setup.optimizer
        self.synchronize()
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        with self.setup.forward_context():
            loss = model(self.text[:, :-1], self.text[:, 1:])
        loss.backward()
        backward_issued = time.perf_counter()
        if optimizer is None:
            model.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
        issued = time.perf_counter()
        self.synchronize()
        end = time.perf_counter()
        return StepTime(end - start, backward_issued - start, issued - backward_issued), loss.item()

    def measure(self, warmup: int, steps: int) -> RankResult:
        """Run `warmup` steps, then `steps` that are timed."""
        has_gpu = self.device.type == "cuda"
        times, losses = [], []
        allocations_before = 0
        for index in range(warmup + steps):
            if has_gpu and index == SETTLED_STEPS:
                torch.cuda.reset_peak_memory_stats()
                allocations_before = torch.cuda.memory_stats()["num_device_alloc"]
            elapsed, loss = self.step()
            losses.append(loss)
            if index >= warmup:
                times.append(elapsed)
        memory = None
        if has_gpu:
            allocations = torch.cuda.memory_stats()["num_device_alloc"] - allocations_before
            memory = Memory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), allocations)
        return RankResult(times, losses, memory)

    def profile(self, path: Path) -> None:
        """Write a chrome trace of a few more steps of rank 0."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        is_writer = dist.get_rank() == 0
        profiler = torch.profiler.profile(activities=activities) if is_writer else None
        if profiler is not None:
            profiler.start()
        for _ in range(PROFILED_STEPS):
            self.step()
        if profiler is not None:
            profiler.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))


def summarize(ranks: list[RankResult]) -> dict[str, Any]:
    """Return medians over steps; a step takes as long as its slowest rank, memory is the largest of any rank."""

    def per_step_ms(read: Callable[[StepTime], float]) -> list[float]:
        return [1e3 * max(read(rank.times[i]) for rank in ranks) for i in range(len(ranks[0].times))]

    step_ms = per_step_ms(lambda elapsed: elapsed.step_s)
    memories = [asdict(rank.memory) for rank in ranks if rank.memory is not None]
    memory = {name: max(values[name] for values in memories) for name in memories[0]} if memories else {}
    return {
        "ms": statistics.median(step_ms),
        "ms_min": min(step_ms),
        "ms_max": max(step_ms),
        "host_ms": statistics.median(per_step_ms(lambda elapsed: elapsed.host_s)),
        "forward_backward_host_ms": statistics.median(per_step_ms(lambda elapsed: elapsed.forward_backward_host_s)),
        "optimizer_host_ms": statistics.median(per_step_ms(lambda elapsed: elapsed.optimizer_host_s)),
        "peak_allocated_bytes": memory.get("allocated_bytes"),
        "peak_reserved_bytes": memory.get("reserved_bytes"),
        "device_allocations": memory.get("device_allocations"),
        "first_loss": statistics.fmean(rank.losses[0] for rank in ranks),
        "last_loss": statistics.fmean(rank.losses[-1] for rank in ranks),
    }


def describe_machine(device: torch.device) -> str:
    """Return the number and kind of devices, and the versions that run on them."""
    world_size = dist.get_world_size()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device.type != "cuda":
        return f"{world_size} CPU ranks, {versions}"
    nccl = ".".join(str(number) for number in torch.cuda.nccl.version())
    return f"{world_size} x {torch.cuda.get_device_name(device)}, {versions}, NCCL {nccl}"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure on every rank and return the result of all of them."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    bench = Bench(arguments.model, arguments.runtime, device)
    mine = bench.measure(arguments.warmup, arguments.steps)
    if arguments.profile is not None:
        bench.profile(arguments.profile / f"{arguments.model}-{arguments.runtime}.json.gz")
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    summary = summarize(ranks)
    tokens = bench.shape.batch * bench.shape.sequence
    return {
        "parameters": bench.num_parameters,
        "units": bench.shape.layers + 1,
        "machine": describe_machine(device),
        **summary,
        "tokens_per_s_per_rank": 1e3 * tokens / summary["ms"],
    }


def main() -> None:
    """Read the command line, measure, and leave the result or the error in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--runtime", choices=[*RUNTIMES, *STRATEGIES], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--profile", type=Path)
    arguments = parser.parse_args()
    try:
        result = run(arguments)
    except Exception as error:
        headline = f"{type(error).__name__}: {error}".splitlines()[0]
        (arguments.folder / f"error.{os.environ['RANK']}").write_text(headline)
        raise
    if dist.get_rank() == 0:
        (arguments.folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
