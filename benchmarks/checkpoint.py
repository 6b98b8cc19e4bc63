# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Times saving, loading and the stall of a background save, beside PyTorch's FSDP2 with its own DCP:

    torchrun --nproc_per_node 2 benchmarks/checkpoint.py --parameters 1e9 --folder /tmp/checkpoints

Prints a table; each figure is the median of --repeats. The model is a tower of square matrices with Adam's state, so
that a checkpoint holds 12 bytes a parameter. --tensors 2000 --parameters 2e6 shows what many small tensors cost.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as fully_shard_2

from megatron.core.distributed.fsdp.experimental import (
    CheckpointSaver,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.experimental.checkpoint import CompleteSavePlanner


def build(args: argparse.Namespace, device: torch.device) -> nn.Sequential:
    """Return the model."""
    width = max(1, round(math.sqrt(args.parameters / args.tensors)))
    with torch.device(device):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(args.tensors)])


def make_state(model: Any, optimizer: Any) -> None:
    """Let the optimizer make its state."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def median_s(function: Callable[[int], None], repeats: int, device: torch.device) -> float:
    """Return the slowest rank's median of the seconds that a call takes, without the first one."""
    seconds = []
    for index in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        function(index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(seconds[1:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def ours(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Time FSDP v2."""
    model = build(args, device)
    with fully_shard_context(device):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters()))
    make_state(model, optimizer)
    path, found = args.folder / "ours", {}
    found["save"] = median_s(lambda _: save_checkpoint(model, optimizer, path, overwrite=True), args.repeats, device)
    found["load"] = median_s(lambda _: void(load_checkpoint(model, optimizer, path)), args.repeats, device)
    saver, stalls = CheckpointSaver(model), []

    def stall(index: int) -> None:
        begin = time.perf_counter()
        saver.save(optimizer, path, overwrite=True)
        stalls.append(time.perf_counter() - begin)
        saver.wait()

    median_s(stall, args.repeats, device)
    found["stall"] = statistics.median(stalls[1:])
    planner = CompleteSavePlanner()
    state = {"model": model.state_dict()}
    begin = time.perf_counter()
    planner.set_up_planner(state, None, is_coordinator=True)
    planner.create_local_plan()
    found["plan"] = time.perf_counter() - begin
    return found


def fsdp2(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Time FSDP2 with DCP."""
    model: Any = build(args, device)
    for layer in model:
        fully_shard_2(layer)
    fully_shard_2(model)
    optimizer = torch.optim.Adam(model.parameters())
    make_state(model, optimizer)
    path = args.folder / "fsdp2"

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    found = {"save": median_s(lambda _: void(dcp.save(state(), checkpoint_id=path)), args.repeats, device)}
    found["load"] = median_s(lambda _: dcp.load(state(), checkpoint_id=path), args.repeats, device)
    group, stalls = dist.new_group(backend="gloo"), []

    def stall(index: int) -> None:
        begin = time.perf_counter()
        future: Any = dcp.async_save(state(), checkpoint_id=path, process_group=group)
        stalls.append(time.perf_counter() - begin)
        future.result()

    median_s(stall, args.repeats, device)
    return {**found, "stall": statistics.median(stalls[1:]), "plan": math.nan}


def void(value: object) -> None:
    """Drop a result."""


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e7)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint_benchmark"))
    args = parser.parse_args()
    has_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_cuda else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    size_gb = 12 * args.parameters / 1e9
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"{args.parameters:.3g} parameters in {args.tensors} tensors, {size_gb:.2f} GB, {ranks} ranks")
        print("runtime | save s | save GB/s | load s | load GB/s | stall of a background save s | local plan s")
    for name, run in (("fsdp_v2", ours), ("fsdp2", fsdp2)):
        found = run(args, device)
        if dist.get_rank() == 0:
            rates = {key: size_gb / found[key] for key in ("save", "load")}
            print(
                f"{name} | {found['save']:.3f} | {rates['save']:.2f} | {found['load']:.3f} | {rates['load']:.2f} | "
                f"{found['stall']:.3f} | {found['plan']:.3f}",
                flush=True,
            )
        dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(args.folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
