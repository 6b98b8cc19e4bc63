# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads torchrun's environment variables and starts the process groups.

Without torchrun the script is a single process of world size 1. A malformed variable is an error:
taking it for rank 0 would let several processes write the same files.
"""

import argparse
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Where this process stands among all processes of the run, and how many of them share its node."""

    rank: int
    world_size: int
    local_rank: int
    is_launched: bool
    local_world_size: int = 1


def find_place(environment: Mapping[str, str]) -> Place:
    """Read RANK, WORLD_SIZE and LOCAL_RANK, and LOCAL_WORLD_SIZE, which without torchrun may be missing.

    Args:
        environment: Usually ``os.environ``.

    Returns:
        Rank 0 of 1 when none of the first three is set. Without LOCAL_WORLD_SIZE all ranks count as
        ranks of one node.

    Raises:
        ValueError: One of them is missing, no integer, or out of range.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(name in environment for name in names):
        return Place(rank=0, world_size=1, local_rank=0, is_launched=False)
    values: dict[str, int] = {}
    for name in (*names, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else names:
        word = environment.get(name)
        if word is None or not word.isdecimal():
            raise ValueError(
                f"Launcher: expected an integer >= 0, got "
                f"{'nothing' if word is None else repr(word)} for the "
                f"environment variable {name}. Start with torchrun, or unset RANK, WORLD_SIZE and "
                "LOCAL_RANK."
            )
        values[name] = int(word)
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise ValueError(
            f"Launcher: expected a rank below WORLD_SIZE {values['WORLD_SIZE']}, got "
            f"{values['RANK']} for the "
            "environment variable RANK. Start with torchrun, or correct the two."
        )
    return Place(
        values["RANK"],
        values["WORLD_SIZE"],
        values["LOCAL_RANK"],
        is_launched=True,
        local_world_size=values.get("LOCAL_WORLD_SIZE", values["WORLD_SIZE"]),
    )


def start_process_groups(args: argparse.Namespace, place: Place) -> None:
    """Initialise torch.distributed and megatron-core's groups.

    Ranks that share layers are neighbours, then those that share sequences. So are those of one of several optimizer
    instances: of four ranks, 0 and 1, then 2 and 3. Pipeline stages are furthest apart: 0 and 2, 1 and 3.

    Args:
        args: Validated arguments.
        place: From ``find_place``.

    Raises:
        ValueError: NCCL on a host without CUDA, fewer devices than local ranks, or optimizer instances without the
            library that megatron-core builds their groups with.
    """
    from megatron.core import parallel_state

    has_cuda = torch.cuda.is_available()
    backend = args.distributed_backend or ("nccl" if has_cuda else "gloo")
    if backend == "nccl" and not has_cuda:
        raise ValueError(
            "Backend: expected gloo on a host without CUDA, got nccl for --distributed-backend. Drop the flag."
        )
    if args.num_distributed_optimizer_instances > 1 and importlib.util.find_spec("einops") is None:
        raise ValueError(
            "Optimizer instances: expected the package einops, with which megatron-core builds their process groups, "
            f"got a Python without it for --num-distributed-optimizer-instances "
            f"{args.num_distributed_optimizer_instances}. Run pip install einops, or drop the flag."
        )
    if has_cuda:
        if place.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"Devices: expected at most {torch.cuda.device_count()} local rank(s), one per "
                "CUDA device, got local "
                f"rank {place.local_rank} for --nproc_per_node. Start fewer ranks per node."
            )
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        backend,
        store=None if place.is_launched else dist.HashStore(),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        # Without it NCCL guesses the device from the global rank.
        device_id=torch.device("cuda", place.local_rank) if backend == "nccl" else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
    )
