# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Collectives on flat tensors: the only file that communicates.

Every call is synchronous with respect to the current stream: on an accelerator it returns once the work is enqueued,
on the host once it is done. Buffers, placements and schedules are other files' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from .device import report_collective

Reduction = Literal["sum", "avg", "max", "min"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather equal shards in rank order.

    Args:
        output: [ranks * n], overwritten.
        input: [n], same dtype.
        group: the ranks that take part.
    """
    report_collective("all_gather", output.dtype, output.numel(), group.size())
    if group.size() == 1:
        output.copy_(input)
        return
    _all_gather(output, input, group=group)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup) -> None:
    """Reduce over ranks and keep this rank's shard.

    Args:
        output: [n], overwritten.
        input: [ranks * n], same dtype; its contents are undefined afterwards.
        reduction: "sum" or "avg".
        group: the ranks that take part.
    """
    report_collective("reduce_scatter", input.dtype, input.numel(), group.size())
    if group.size() == 1:
        output.copy_(input)
        return
    operation = _prescale(input, reduction, group)
    _reduce_scatter(output, input, op=operation, group=group)


def all_reduce(tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup) -> None:
    """Reduce `tensor` over ranks in place."""
    report_collective("all_reduce", tensor.dtype, tensor.numel(), group.size())
    if group.size() == 1:
        return
    dist.all_reduce(tensor, op=_prescale(tensor, reduction, group), group=group)


def all_gather_uneven(local: torch.Tensor, numels: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gather 1-D tensors whose sizes differ between ranks but are known to all.

    Args:
        local: [numels[rank]].
        numels: size of every rank's tensor, in rank order, the same on all ranks.
        group: the ranks that take part.

    Returns:
        Every rank's tensor, in rank order.
    """
    width = max(numels)
    if width == 0:
        return [local.new_empty(0) for _ in numels]
    padded = local.new_zeros(width)
    padded[: local.numel()].copy_(local)
    gathered = local.new_empty(width * len(numels))
    all_gather(gathered, padded, group)
    rows = gathered.view(len(numels), width)
    return [rows[rank, :numel] for rank, numel in enumerate(numels)]


def _prescale(input: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup) -> dist.ReduceOp.RedOpType:
    """Return the backend's operation, dividing `input` first where the backend has no average of its own.

    Dividing before the sum cannot overflow where the average does not. Backends other than NCCL are not trusted with
    AVG: gloo returned the sum for it, without an error (pytorch/pytorch#162338).
    """
    if reduction == "avg" and dist.get_backend(group) != "nccl":
        input.div_(group.size())
        return _OPERATIONS["sum"]
    return _OPERATIONS[reduction]
