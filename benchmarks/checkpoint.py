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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Taken:
    """What a call takes, by the median without the first one.

    Attributes:
        seconds: of the slowest rank.
        host_s: seconds that all threads of all ranks compute; other programs on the host change them little.
    """

    seconds: float
    host_s: float


def time_calls(function: Callable[[int], None], repeats: int, device: torch.device) -> Taken:
    """Call a function and return what that takes."""
    seconds, host_s = [], []
    for index in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        begin, begin_of_host = time.perf_counter(), time.process_time()
        function(index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        host_s.append(time.process_time() - begin_of_host)
    slowest = torch.tensor(statistics.median(seconds[1:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    together = torch.tensor(statistics.median(host_s[1:]), device=device)
    dist.all_reduce(together)
    return Taken(float(slowest), float(together))


def ours(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Time FSDP v2."""
    model = build(args, device)
    with fully_shard_context(device):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters()))
    make_state(model, optimizer)
    path = args.folder / "ours"
    save = time_calls(lambda _: save_checkpoint(model, optimizer, path, overwrite=True), args.repeats, device)
    load = time_calls(lambda _: void(load_checkpoint(model, optimizer, path)), args.repeats, device)
    found = {"save": save.seconds, "save_host": save.host_s, "load": load.seconds}
    saver, stalls = CheckpointSaver(model), []

    def stall(index: int) -> None:
        begin = time.perf_counter()
        saver.save(optimizer, path, overwrite=True)
        stalls.append(time.perf_counter() - begin)
        saver.wait()

    time_calls(stall, args.repeats, device)
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

    save = time_calls(lambda _: void(dcp.save(state(), checkpoint_id=path)), args.repeats, device)
    load = time_calls(lambda _: dcp.load(state(), checkpoint_id=path), args.repeats, device)
    found = {"save": save.seconds, "save_host": save.host_s, "load": load.seconds}
    group, stalls = dist.new_group(backend="gloo"), []

    def stall(index: int) -> None:
        begin = time.perf_counter()
        future: Any = dcp.async_save(state(), checkpoint_id=path, process_group=group)
        stalls.append(time.perf_counter() - begin)
        future.result()

    time_calls(stall, args.repeats, device)
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
        columns = ["runtime", "save s", "save GB/s", "host s of a save", "load s", "load GB/s"]
        print(" | ".join([*columns, "stall of a background save s", "local plan s"]))
    for name, run in (("fsdp_v2", ours), ("fsdp2", fsdp2)):
        found = run(args, device)
        if dist.get_rank() == 0:
            keys = ["save", "save rate", "save_host", "load", "load rate", "stall", "plan"]
            found |= {f"{key} rate": size_gb / found[key] for key in ("save", "load")}
            print(" | ".join([name, *(f"{found[key]:.3f}" for key in keys)]), flush=True)
        dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(args.folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
