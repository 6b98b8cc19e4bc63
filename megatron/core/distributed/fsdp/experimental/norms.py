# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients over all ranks, and clipping by them: each gradient by its own DTensor layout.

It neither makes gradients nor steps anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import collectives


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm over all parameters and ranks is at most `max_norm`.

    Every rank must call it with the same parameters. There is no host synchronisation unless `error_if_nonfinite`.

    Args:
        parameters: sharded parameters, or plain ones that are equal on every rank; those without gradient are skipped.
        max_norm: upper bound, > 0.
        norm_type: order of the norm, > 0; may be inf.
        error_if_nonfinite: raise rather than scale by a norm that is nan or inf.

    Returns:
        The norm before clipping: a 0-d tensor, the same on every rank; float32, or float64 if a parameter is.

    Raises:
        ValueError: a bound or order out of range.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: expected max_norm > 0 and norm_type > 0, got {max_norm} and {norm_type}.")
    items = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    total = grad_norm(items, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite gradient norm, got {float(total)}. Lower the learning rate or the "
            "loss scale, or pass error_if_nonfinite=False to go on."
        )
    clip_grads_with_norm_(items, max_norm, total)
    return total


def clip_grads_with_norm_(parameters: Iterable[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
    """Scale gradients by max_norm / total_norm if that is below one; no communication, no host synchronisation.

    Args:
        parameters: sharded or plain parameters; those without gradient are skipped.
        max_norm: upper bound of the norm.
        total_norm: the norm as it is, 0-d, the same on every rank.
    """
    scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        gradients = [_local_gradient(item.grad) for item in parameters if item.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            torch._foreach_mul_([g for g in gradients if g.dtype is dtype], scale)


def grad_norm(parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients over all ranks, 0-d, as `clip_grad_norm_` does; every rank must call it.

    Shards are reduced over the mesh axes that shard them and over no other, so that replicas count once. Every mesh
    among the parameters is reduced over, whether this rank has gradients there or not. Sums are kept in float64, so
    that the norm, and with it clipping, does not depend on how many ranks share the gradients.
    """
    _require_reduced(parameters)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        buckets: dict[Any, tuple[list[dist.ProcessGroup], list[torch.Tensor]]] = {}
        for parameter in parameters:
            key, groups = _reduction_groups(parameter)
            gradients = buckets.setdefault(key, (groups, []))[1]
            if parameter.grad is not None:
                gradients.append(_local_gradient(parameter.grad))
        device = _local_gradient(parameters[0]).device if parameters else torch.device("cpu")
        is_wide = any(parameter.dtype is torch.float64 for parameter in parameters)
        total = torch.zeros((), dtype=torch.float64, device=device)
        is_max = math.isinf(norm_type)
        for groups, gradients in buckets.values():
            part = _power_sum(gradients, norm_type, like=total)
            for group in groups:
                collectives.all_reduce(part, "max" if is_max else "sum", group, what="the gradient norm")
            total = torch.maximum(total, part) if is_max else total + part
        norm = total if is_max else total.pow(1.0 / norm_type)
        return norm if is_wide else norm.float()


def _require_reduced(parameters: Sequence[torch.Tensor]) -> None:
    """Refuse gradients of which a part waits on each rank; alike on all ranks, without communication."""
    for parameter in parameters:
        reference = getattr(parameter, "_fsdp_group", None)
        group = None if reference is None else reference()
        if group is not None and group.has_unreduced_gradients:
            raise RuntimeError(
                f"gradient norm of {group.name}: expected reduced gradients, got some that are held back on each rank. "
                "Run the last backward with set_requires_gradient_sync(True)."
            )


def _reduction_groups(parameter: torch.Tensor) -> tuple[Any, list[dist.ProcessGroup]]:
    if not isinstance(parameter, DTensor):
        return None, []
    mesh = parameter.device_mesh
    axes = tuple(axis for axis, at in enumerate(parameter.placements) if at.is_shard())
    return (mesh, axes), [mesh.get_group(axis) for axis in axes]


def _local_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _power_sum(gradients: Sequence[torch.Tensor], norm_type: float, *, like: torch.Tensor) -> torch.Tensor:
    """Return the sum over elements of |g|**norm_type, or their largest |g| for inf, in float64."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros_like(like)
    norms = torch.stack(torch._foreach_norm(filled, norm_type, dtype=like.dtype))
    if math.isinf(norm_type):
        return norms.max()
    return norms.pow(norm_type).sum()
