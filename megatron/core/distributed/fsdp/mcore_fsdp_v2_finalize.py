# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What is left to do with gradients once all microbatches have run, for chunks that are wrapped by FSDP v2.

Contributions of model parallelism are added here, on this rank's elements and in place: equal tensors on different
ranks are cut alike, so that elements of one place lie at one place. Data parallelism is the wrapper's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import (
    _update_router_expert_bias,
    reset_model_temporary_tensors,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads as finalize_stock_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_v2_adapter import is_fully_sharded
from megatron.core.distributed.fsdp.mcore_fsdp_v2_mesh import find_group
from megatron.core.distributed.fsdp.mcore_fsdp_v2_shared_weights import GROUPS, stage_group


def finalize_model_grads(
    model: list[nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Make all gradients of a step final; megatron-core's function of this name for chunks of FSDP v2.

    Set it as ``config.finalize_model_grads_func``; every rank calls it. Chunks with another wrapper go to
    megatron-core's own.

    Args:
        model: this rank's chunks.
        num_tokens: 0-d or 1-element tensor, known to the last pipeline stage: gradients are divided by its sum over
            data parallelism.
        pg_collection: process groups; None means megatron-core's global ones.
        force_all_reduce: see `FullyShardedDataParallel.finish_grad_sync`.
    """
    if not any(is_fully_sharded(chunk) for chunk in model):
        finalize_stock_model_grads(model, num_tokens, pg_collection, force_all_reduce)  # type: ignore[arg-type]
        return
    config: Any = get_model_config(model[0])
    chunks: list[Any] = list(model)
    for chunk in chunks:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    _add_over_tensor_parallelism(chunks, find_group(pg_collection, "tp"))
    _add_over_stages(chunks, pg_collection)
    if getattr(config, "moe_router_enable_expert_bias", False):
        _move_expert_biases(chunks, config, pg_collection)
    reset_model_temporary_tensors(config, chunks)
    if num_tokens is not None:
        _divide_by_tokens(chunks, num_tokens, pg_collection)


def _move_expert_biases(chunks: list[Any], config: Any, pg_collection: ProcessGroupCollection | None) -> None:
    """Move the biases by which routers spread tokens; megatron-core's function, which 0.19 gives the group."""
    asks = "tp_dp_cp_group" in inspect.signature(_update_router_expert_bias).parameters
    groups = {"tp_dp_cp_group": getattr(pg_collection, "tp_dp_cp", None)} if asks else {}
    _update_router_expert_bias(chunks, config, **groups)


def _add_over_tensor_parallelism(chunks: Sequence[Any], group: Any) -> None:
    """Add up gradients of whole tensors of which each rank has seen a part of the sequence or of the heads."""
    if group is None or group.size() == 1:
        return
    summed: list[torch.Tensor] = []
    averaged: list[torch.Tensor] = []
    for chunk in chunks:
        for parameter, averages in chunk.seen_in_parts:
            # A parameter that this step has not used has none.
            if (gradient := parameter.grad) is not None:
                (averaged if averages else summed).append(gradient.to_local())
    _reduce(summed, group)
    _reduce(averaged, group)
    for gradient in averaged:
        gradient.div_(group.size())


def _add_over_stages(chunks: Sequence[Any], pg_collection: ProcessGroupCollection | None) -> None:
    """Add up gradients of weights that several stages hold ([Note: one place on all stages])."""
    for name in GROUPS:
        weights = [weight for chunk in chunks for weight in chunk.shared_weights.get(name, ())]
        _reduce(
            [weight.grad.to_local() for weight in weights if weight.grad is not None], stage_group(pg_collection, name)
        )


@torch.no_grad()
def _reduce(gradients: Sequence[torch.Tensor], group: Any) -> None:
    """Add up over a group, in place and in one call for each dtype."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient.view(-1) for gradient in gradients if gradient.dtype is dtype]
        joined = torch.cat(alike)
        if joined.numel():
            dist.all_reduce(joined, group=group)
        torch._foreach_copy_(alike, list(joined.split([gradient.numel() for gradient in alike])))


def _divide_by_tokens(
    chunks: Sequence[Any], num_tokens: torch.Tensor, pg_collection: ProcessGroupCollection | None
) -> None:
    pipeline = getattr(pg_collection, "pp", None)
    if pipeline is None:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        dist.broadcast(num_tokens, src=dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
    dist.all_reduce(num_tokens, group=find_group(pg_collection, "dp_cp"))
    for chunk in chunks:
        # A batch without a token in the loss has gradients of zero: they stay so.
        chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))
