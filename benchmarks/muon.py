# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Times an optimizer step alone: Muon on shards, beside AdamW, FSDP2 with full gathers, and the ideal.

    torchrun --nproc_per_node 2 benchmarks/muon.py --models llama1b llama7b --output runs/muon.jsonl
    python benchmarks/muon.py --models tiny --device cpu

Models are the matrices of a decoder's layers, each layer a unit, without embeddings and without a forward: gradients
are filled once with random numbers, the same under every runtime, and stay.

muon            `fully_shard_muon`: fp32 weights, gradients and momentum, Newton-Schulz in bf16.
muon_graph      the same step as replays of one CUDA graph (`capture_iteration`); needs CUDA.
adamw           torch's fused AdamW, adapted by `fully_shard_optimizer`.
fsdp2_full      FSDP2's shards and the same Newton-Schulz; every rank gathers every matrix and computes with it.

The ideal is Newton-Schulz's operations over the ranks, at the rate of matrix products measured in the same process:
"square" those of bf16 matrices of 4096 x 4096, "own" the three products of a Newton-Schulz step in the shapes of the
model. Exposed is the step's time minus that of the same step whose exchanges do nothing, so that owners compute with
what their buffers happened to hold; other ranks' speed still counts, since all begin a step together. Times are CUDA
events around a step; printed is the slowest rank's median, and the memory of the rank with most. The span is what the
plan lets a step take at least, over the mean of the ranks' operations: see `matrix_report.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from muon_runtimes import MIB, MODELS, RUNTIMES, STEPS, TRAVEL, Contestant, Size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.distributed.fsdp.experimental import collectives
from megatron.core.distributed.fsdp.experimental.matrix_report import follow
from megatron.core.distributed.fsdp.experimental.newton_schulz import count_operations

WARMUP_OF_PRODUCTS, SAMPLES, PRODUCTS = 20, 9, 50
HEADINGS = (
    *("model", "runtime", "ms (min-max)", "host ms", "/ ideal, own", "/ ideal, square", "exposed ms", "exposed %"),
    *("imbalance", "span", "sent MB", "returned MB", "step MiB", "buffers MiB"),
)


# --- measuring --------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return a step's milliseconds, and those of the host until it has issued all of it."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        elapsed = 1e3 * (time.perf_counter() - start)
        return elapsed, elapsed
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    start = time.perf_counter()
    step()
    host = 1e3 * (time.perf_counter() - start)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def times(step: Callable[[], object], arguments: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return median, minimum and maximum of a step on the slowest rank, and the median of the host's time."""
    seen = []
    for index in range(arguments.warmup + arguments.steps):
        dist.barrier()
        found = timed(step, device)
        if index >= arguments.warmup:
            seen.append(found)
    steps, hosts = zip(*seen, strict=True)
    values = (statistics.median(steps), min(steps), max(steps), statistics.median(hosts))
    return dict(zip(("ms", "ms_min", "ms_max", "host_ms"), largest(values, device), strict=True))


def rate(products: Callable[[], object], operations: int, device: torch.device) -> float:
    """Return operations a second of some matrix products: the median of samples of many."""
    number, warmup, samples = (PRODUCTS, WARMUP_OF_PRODUCTS, SAMPLES) if device.type == "cuda" else (1, 1, 3)

    def many() -> None:
        for _ in range(number):
            products()

    for _ in range(warmup):
        products()
    return operations * number / (1e-3 * statistics.median(timed(many, device)[0] for _ in range(samples)))


def rates(size: Size, device: torch.device) -> dict[str, float]:
    """Return the rates by which the ideal is computed, those of the slowest rank."""
    width = 4096 if device.type == "cuda" else 64
    square = torch.randn(width, width, device=device).div_(width**0.5).bfloat16()
    found = {"square": rate(lambda: square @ square, 2 * width**3, device)}
    seconds = 0.0
    for shape in size.matrices().values():
        x = torch.randn(shape, device=device)
        x = (x / x.norm()).bfloat16()
        is_tall = shape[0] > shape[1]

        def one_step(x: torch.Tensor = x, is_tall: bool = is_tall) -> torch.Tensor:
            gram = x.mT @ x if is_tall else x @ x.mT
            polynomial = torch.addmm(gram, gram, gram)
            return torch.addmm(x, x, polynomial) if is_tall else torch.addmm(x, polynomial, x)

        operations = count_operations(1, *shape, 1)
        seconds += STEPS * operations / rate(one_step, operations, device)
    found["own"] = size.operations() / size.layers / seconds
    return {key: -value for key, value in zip(found, largest([-v for v in found.values()], device), strict=True)}


def planned(contestant: Contestant) -> dict[str, float]:
    """Return what the plans of a step say."""
    works, (group, *_) = contestant.optimizer.works, contestant.optimizer.matrix_groups
    rule = contestant.optimizer.rule
    sent = returned = 0
    for work in works:
        for index in range(len(work.plan.matrices)):
            sent += sum(m.stop - m.start for m in work.plan.gathers(index) if m.holder != m.owner)
            returned += sum(m.stop - m.start for m in work.plan.scatters(index) if m.holder != m.owner)
    return {
        "imbalance": max(work.plan.imbalance for work in works),
        "span": max(follow(work.plan).span for work in works),
        "sent_bytes": sent * rule.travel_dtype(group).itemsize,
        "returned_bytes": returned * rule.result_dtype(group).itemsize,
        "rounds": sum(len(work.plan.rounds) for work in works),
    }


def step_bytes(contestant: Contestant, device: torch.device) -> dict[str, float]:
    """Return the peak of a step above rest, and what the buffers of matrices are of it."""
    buffers = max((work.buffer_bytes for work in contestant.optimizer.works), default=0) if contestant.optimizer else 0
    peak = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        contestant.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    found = largest([peak, buffers], device)
    return {"peak_bytes": found[0], "buffer_bytes": found[1]} if device.type == "cuda" else {"buffer_bytes": found[1]}


def measure(name: str, size: Size, mesh: DeviceMesh, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of one runtime."""
    device = torch.device(mesh.device_type)
    contestant = RUNTIMES[name](size, mesh, arguments)
    row: dict[str, Any] = times(contestant.step, arguments, device)
    row["weights_norm"] = norm_of(contestant.model)
    if name != "muon_graph":  # a graph has memory of its own
        row |= step_bytes(contestant, device)
    if contestant.optimizer is not None:
        row |= planned(contestant)
    if name == "muon" and mesh.size() > 1:
        with patch.object(collectives, "exchange", lambda *given, **named: None):
            alone = times(contestant.step, arguments, device)
        row["exposed_ms"] = row["ms"] - alone["ms"]
    contestant.release()
    return row


def norm_of(model: nn.Module) -> float:
    """Return the norm of all weights, by which runtimes can be compared."""
    total = torch.stack([p.to_local().detach().double().square().sum() for p in model.parameters()]).sum()
    dist.all_reduce(total)
    return total.sqrt().item()


# --- reporting --------------------------------------------------------------------------------------------------------


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table; a dash is what a runtime or machine does not have."""

    def number(key: str, digits: int, unit: float = 1) -> str:
        return f"{row[key] / unit:.{digits}f}" if key in row else "-"

    return [
        *(row["model"], row["runtime"], f"{row['ms']:.2f} ({row['ms_min']:.2f}-{row['ms_max']:.2f})"),
        *(number("host_ms", 2), number("ratio_own", 3), number("ratio_square", 3), number("exposed_ms", 2)),
        *(number("exposed_share", 1, 0.01), number("imbalance", 3), number("span", 3)),
        number("sent_bytes", 1, 1e6),
        *(number("returned_bytes", 1, 1e6), number("peak_bytes", 0, MIB), number("buffer_bytes", 0, MIB)),
    ]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama1b"], help="default: %(default)s")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=[*RUNTIMES], help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's own)")
    parser.add_argument("--travel-dtype", choices=TRAVEL, default="fp32", help="default: %(default)s")
    parser.add_argument("--package-mib", type=int, default=256, help="bound on a package (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before them (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="append each row to this file, a line of JSON each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(words)
    counts = (arguments.steps, arguments.warmup, arguments.package_mib, arguments.layers)
    if min(count for count in counts if count is not None) < 1:
        parser.error("--steps, --warmup, --package-mib, --layers: expected numbers of at least 1.")
    return arguments


def start_process_group(device: str) -> None:
    """Join the ranks that torchrun has started, or be the only one."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if device == "cuda" else "gloo"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)  # type: ignore[arg-type]


def run(arguments: argparse.Namespace) -> None:
    """Measure every runtime of every model, and print a line for each on rank 0."""
    mesh = init_device_mesh(arguments.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    device = torch.device(mesh.device_type)
    is_first = dist.get_rank() == 0
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if is_first:
        print(f"torch {torch.__version__}, {name}, {mesh.size()} rank(s), travel in {arguments.travel_dtype}")
        print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|", flush=True)
    for model in arguments.models:
        own = MODELS[model]
        size = replace(own, layers=arguments.layers or own.layers)
        speeds = rates(size, device)
        for runtime in arguments.runtimes:
            if runtime == "muon_graph" and device.type != "cuda":
                continue
            row = {"model": model, "layers": size.layers, "runtime": runtime, "ranks": mesh.size(), "device": name}
            row |= {"travel_dtype": arguments.travel_dtype, "operations": size.operations()}
            row |= measure(runtime, size, mesh, arguments)
            for key, speed in speeds.items():
                row[f"{key}_tflops"] = speed / 1e12
                if runtime != "adamw":
                    row[f"ratio_{key}"] = row["ms"] / (1e3 * size.operations() / mesh.size() / speed)
            if "exposed_ms" in row:
                row["exposed_share"] = row["exposed_ms"] / row["ms"]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if is_first:
                print("| " + " | ".join(cells(row)) + " |", flush=True)
                if arguments.output:
                    arguments.output.parent.mkdir(parents=True, exist_ok=True)
                    with arguments.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        if is_first:
            rate_text = ", ".join(f"{key} {speed / 1e12:.1f}" for key, speed in speeds.items())
            print(f"\n{model}, {size.layers} layers: {size.operations():.3e} operations; Tflop/s: {rate_text}\n")


def main(words: Sequence[str] | None = None) -> None:
    """Measure."""
    arguments = parse(words)
    torch.set_num_threads(1)
    start_process_group(arguments.device)
    run(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
