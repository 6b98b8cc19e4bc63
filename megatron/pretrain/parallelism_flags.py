# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares the flags of the data-parallel wrappers, Megatron-FSDP v2 and megatron-core's DDP, and of process groups.

Whether they fit together is decided in ``validation.py`` and ``requirements.py``.
"""

import argparse

from megatron.pretrain.values import integer, one_of

DTYPE_NAMES = ("fp32", "bf16", "fp16", "auto")
SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OUTER_SHARDING_STRATEGIES = ("no_shard", "optim")

_count = integer(1)
_index = integer(0)


def add_parallelism(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the data-parallel wrappers and of process groups."""
    add = parser.add_argument_group("parallelism").add_argument
    add(
        "--use-megatron-fsdp-v2",
        action="store_true",
        help="shard the model with Megatron-FSDP v2; without it, megatron-core's DDP",
    )
    add(
        "--data-parallel-sharding-strategy",
        type=one_of(*SHARDING_STRATEGIES),
        default="optim_grads_params",
        help="what Megatron-FSDP v2 shards: no_shard, optim (ZeRO-1), optim_grads (ZeRO-2) or "
        "optim_grads_params (ZeRO-3)",
    )
    add(
        "--num-distributed-optimizer-instances",
        type=_count,
        default=1,
        help="Megatron-FSDP v2: groups of ranks that each shard by themselves and hold replicas of each other (HSDP)",
    )
    add(
        "--outer-dp-sharding-strategy",
        type=one_of(*OUTER_SHARDING_STRATEGIES),
        default="no_shard",
        help="what corresponding ranks of these groups shard: no_shard, or optim (HFSDP)",
    )
    add(
        "--expert-data-parallel-sharding-strategy",
        type=one_of(*SHARDING_STRATEGIES),
        help="what Megatron-FSDP v2 shards of experts that ranks share; default --data-parallel-sharding-strategy",
    )
    add(
        "--expert-outer-dp-sharding-strategy",
        type=one_of(*OUTER_SHARDING_STRATEGIES),
        help="the same across groups of ranks; default --outer-dp-sharding-strategy",
    )
    add(
        "--megatron-fsdp-main-params-dtype",
        type=one_of(*DTYPE_NAMES),
        default="fp32",
        help="master weights; auto keeps the model's",
    )
    add(
        "--megatron-fsdp-main-grads-dtype",
        type=one_of(*DTYPE_NAMES),
        default="auto",
        help="accumulated gradients; auto keeps the model's",
    )
    add(
        "--megatron-fsdp-grad-comm-dtype",
        type=one_of(*DTYPE_NAMES),
        default="auto",
        help="gradients on the wire; auto keeps the accumulated ones'",
    )
    add(
        "--megatron-fsdp-static-gradients",
        action="store_true",
        help="keep the memory of gradients between steps, so that their addresses do not change",
    )
    add(
        "--fsdp-trace-pool",
        action="store_true",
        help="plan fixed places for gathered weights and packed gradients from the first iteration",
    )
    add(
        "--create-all-gather-group",
        action="store_true",
        help="gather weights in a process group of their own, so that reductions do not wait for gathers in NCCL",
    )
    add(
        "--nccl-ub",
        action="store_true",
        help="register the pool's memory with NCCL on all ranks (CUDA, torch 2.12 or newer; not yet run on hardware)",
    )
    add(
        "--megatron-fsdp-min-unit-numel",
        type=_index,
        default=0,
        help="join neighbouring layers until they have so many parameters, to gather and reduce them together; small "
        "layers cost less host time so, and more memory at a time",
    )
    add(
        "--use-distributed-optimizer",
        action="store_true",
        help="DDP: shard the optimizer state over the data-parallel ranks",
    )
    add("--overlap-grad-reduce", action="store_true", help="DDP: reduce gradients during backward")
    add(
        "--overlap-param-gather",
        action="store_true",
        help="DDP with the distributed optimizer: gather weights during forward",
    )
    add("--ddp-bucket-size", type=_count, help="DDP: elements per gradient bucket")
    add("--ddp-average-in-collective", action="store_true", help="DDP: let the reduction average")
    add("--tensor-model-parallel-size", type=_count, default=1, help="ranks that share every layer")
    add(
        "--sequence-parallel",
        action="store_true",
        help="with tensor parallelism: share norms and dropout along the sequence, too",
    )
    add("--context-parallel-size", type=_count, default=1, help="ranks that share every sequence")
    add("--pipeline-model-parallel-size", type=_count, default=1, help="stages that hold different layers")
    add(
        "--num-layers-per-virtual-pipeline-stage",
        type=_count,
        help="with stages: layers of each of several chunks a rank, which then work in turn (interleaved schedule)",
    )
    add("--num-virtual-stages-per-pipeline-rank", type=_count, help="the same, by the number of chunks a rank")
    add(
        "--distributed-backend",
        type=one_of("nccl", "gloo"),
        help="default: nccl with CUDA, else gloo",
    )
    add(
        "--distributed-timeout-minutes",
        type=_count,
        default=10,
        help="longest wait for another rank",
    )
