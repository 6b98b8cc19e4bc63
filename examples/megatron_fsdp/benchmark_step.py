# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Measures training steps of one model under one runtime, on the ranks it is started on. Compares nothing.

`benchmark.py` starts it with torchrun for every pair and reads `result.json`, or `error.<rank>`, from --folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_models import MODELS, Inputs
from benchmark_runtimes import RUNTIMES, VARIANTS, Iteration, Setup
from torch.distributed.device_mesh import init_device_mesh

from megatron.pretrain.profiling import ScheduleProfiler
from megatron.pretrain.timeline import Exposure

SETTLED_STEPS = 3
"""Memory is counted after so many steps: by then the optimizer's state and the allocator's cache exist.

A runtime that captures its iteration does it in the next one.
"""

PROFILED_STEPS = 2


@dataclass(frozen=True)
class StepTime:
    """Where one step's time went: the whole of it, what the host needed to issue it, and its first part.

    The last is None for a captured iteration, which is issued as one.
    """

    step_s: float
    host_s: float
    forward_backward_host_s: float | None


@dataclass(frozen=True)
class Memory:
    """A GPU's memory from `SETTLED_STEPS` on: peaks, and how often torch asked the driver for more."""

    allocated_bytes: int
    reserved_bytes: int
    device_allocations: int


@dataclass(frozen=True)
class RankResult:
    """What one rank saw: the time of each measured step, the loss of the first and of the last, and its memory."""

    times: list[StepTime]
    first_loss: float
    last_loss: float
    memory: Memory | None


class Bench:
    """One model under one runtime on this rank."""

    def __init__(
        self, model_name: str, runtime: str, device: torch.device, *, tokens: int | None, accumulation: int
    ) -> None:
        self.device = device
        self.accumulation = accumulation
        torch.manual_seed(0)
        training = MODELS[model_name].build(device, tokens)
        # Some runtimes make their fp32 weights from bf16 ones; all shall begin with the same.
        training.model.bfloat16().float()
        self.tokens = training.tokens
        self.num_units = len(training.layers) + 1
        self.num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.setup: Setup = {**RUNTIMES, **VARIANTS}[runtime](training, mesh)
        self.is_captured = self.setup.capture is not None
        generator = torch.Generator(device=device).manual_seed(100 + dist.get_rank())
        self.inputs: Inputs = sum((training.draw(generator) for _ in range(accumulation)), ())
        self.run: Iteration = self.iteration
        if self.setup.capture is not None:
            self.run = self.setup.capture(self.iteration, self.inputs, warmup=SETTLED_STEPS)
        self.losses: list[torch.Tensor] = []
        self.backward_issued_s = 0.0
        self.allocations_before = 0

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def count_allocations(self) -> int:
        """Return how often torch has asked the driver for memory."""
        return int(torch.cuda.memory_stats()["num_device_alloc"]) if self.device.type == "cuda" else 0

    def iteration(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Take the inputs of all microbatches, run one step as a training loop does, and return its loss."""
        if len(self.losses) == SETTLED_STEPS and self.device.type == "cuda":
            # Here, because the allocator sees a graph's memory only while it is being captured.
            torch.cuda.reset_peak_memory_stats()
            self.allocations_before = self.count_allocations()
        setup, count = self.setup, self.accumulation
        size = len(inputs) // count
        losses = []
        for index in range(count):
            with setup.microbatch(index == count - 1) if count > 1 else nullcontext():
                with setup.forward_context():
                    loss = setup.model(*inputs[index * size : (index + 1) * size])
                    loss = loss / count if count > 1 else loss
                loss.backward()
            losses.append(loss.detach())
        self.backward_issued_s = time.perf_counter()
        if setup.optimizer is None:
            setup.model.zero_grad(set_to_none=True)
        else:
            setup.optimizer.step()
            setup.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum() if count > 1 else losses[0]

    def step(self, recorded: Callable[[], AbstractContextManager[object]] = nullcontext) -> StepTime:
        """Run one step that all ranks begin together."""
        self.synchronize()
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        with recorded():
            loss = self.run(*self.inputs)
        issued = time.perf_counter()
        self.synchronize()
        end = time.perf_counter()
        self.losses.append(loss)
        if self.is_captured and len(self.losses) == SETTLED_STEPS + 1:
            self.allocations_before = self.count_allocations()  # the graph has its memory now
        return StepTime(end - start, issued - start, None if self.is_captured else self.backward_issued_s - start)

    def measure(self, warmup: int, steps: int) -> RankResult:
        """Run `warmup` steps, then `steps` that are timed."""
        times = [self.step() for _ in range(warmup + steps)][warmup:]
        memory = None
        if self.device.type == "cuda":
            allocations = self.count_allocations() - self.allocations_before
            memory = Memory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), allocations)
        first, last = self.losses[0].item(), self.losses[-1].item()
        return RankResult(times, first, last, memory)

    def profile(self, folder: Path, name: str) -> Exposure | None:
        """Write trace and timeline of a few more steps of rank 0, and return what that one has seen."""
        is_writer = dist.get_rank() == 0
        profiler = ScheduleProfiler(folder, name, skip=1, num_steps=PROFILED_STEPS, is_writer=is_writer)
        for _ in range(1 + PROFILED_STEPS):
            self.step(profiler.step)
        return profiler.exposure


def summarize(ranks: list[RankResult]) -> dict[str, Any]:
    """Return medians over steps; a step takes as long as its slowest rank, memory is the largest of any rank."""

    def per_step_ms(read: Callable[[StepTime], float]) -> list[float]:
        return [1e3 * max(read(rank.times[i]) for rank in ranks) for i in range(len(ranks[0].times))]

    def median_ms(read: Callable[[StepTime], float]) -> float:
        return statistics.median(per_step_ms(read))

    step_ms = per_step_ms(lambda elapsed: elapsed.step_s)
    is_captured = ranks[0].times[0].forward_backward_host_s is None
    forward_backward_ms = None if is_captured else median_ms(lambda elapsed: elapsed.forward_backward_host_s or 0.0)
    optimizer_ms = None if is_captured else median_ms(lambda e: e.host_s - (e.forward_backward_host_s or 0.0))
    memories = [asdict(rank.memory) for rank in ranks if rank.memory is not None]
    memory = {name: max(values[name] for values in memories) for name in memories[0]} if memories else {}
    return {
        "ms": statistics.median(step_ms),
        "ms_min": min(step_ms),
        "ms_max": max(step_ms),
        "host_ms": median_ms(lambda elapsed: elapsed.host_s),
        "forward_backward_host_ms": forward_backward_ms,
        "optimizer_host_ms": optimizer_ms,
        "peak_allocated_bytes": memory.get("allocated_bytes"),
        "peak_reserved_bytes": memory.get("reserved_bytes"),
        "device_allocations": memory.get("device_allocations"),
        "first_loss": statistics.fmean(rank.first_loss for rank in ranks),
        "last_loss": statistics.fmean(rank.last_loss for rank in ranks),
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
    bench = Bench(
        arguments.model, arguments.runtime, device, tokens=arguments.tokens, accumulation=arguments.accumulation
    )
    mine = bench.measure(arguments.warmup, arguments.steps)
    exposure = None if arguments.profile is None else bench.profile(arguments.profile, arguments.name)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    summary = summarize(ranks)
    described = {"parameters": bench.num_parameters, "units": bench.num_units, "tokens": bench.tokens}
    num_tokens = bench.tokens * bench.accumulation
    # A graph that holds communication has to go before the process group does.
    del bench
    gc.collect()
    return {
        **described,
        "machine": describe_machine(device),
        **summary,
        **({} if exposure is None else {"schedule": {**asdict(exposure), "description": str(exposure)}}),
        "tokens_per_s_per_rank": 1e3 * num_tokens / summary["ms"],
    }


def main() -> None:
    """Read the command line, measure, and leave the result or the error in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--runtime", choices=[*RUNTIMES, *VARIANTS], required=True)
    parser.add_argument("--name", required=True, help="of the files in --profile")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--accumulation", type=int, required=True)
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
