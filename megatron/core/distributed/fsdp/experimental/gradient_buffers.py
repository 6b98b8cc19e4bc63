# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`GradientBuffers`: where the gradients of one parameter group lie on their way to ``.grad``.

[Note: levels of a gradient]
A contribution starts as a full ``Partial`` tensor on every rank and ends in ``.grad``, placed like the optimizer's main
weights. Placements say where it may rest on the way, until the last microbatch of a step:

    held    full, ``Partial``: this rank's own sum; without gradient sync, or where `gradient` shards no axis
    partly  reduced over the axes that `gradient` shards, ``Partial`` on the others
    main    final: what ``.grad`` is

Every contribution passes from one level to the next once, so that each level's sum is added to the next and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from .dbuffer import DBuffer
from .group_options import GroupOptions
from .placement import Flat, flatten


@dataclass
class GradientBuffers:
    """Where one group's gradients lie; all transient.

    Attributes:
        full: ``Partial``, communication dtype, [global_numel]; this rank's packed gradients while they are reduced.
        held: ``Partial``, main-gradient dtype, [global_numel].
        partly: main-gradient dtype; None where gradients are sharded like the main weights, or not at all.
        sliced: like `partly`, in the communication dtype.
        reduced: placed like `main`, communication dtype; a reduction on its way to `main`.
        main: placed like the main weights, main-gradient dtype, [local_numel].
        waits: whether gradients stay ``held`` until the last microbatch, since no axis shards them before.
    """

    full: DBuffer
    held: DBuffer
    partly: DBuffer | None
    sliced: DBuffer | None
    reduced: DBuffer
    main: DBuffer
    waits: bool

    def __iter__(self) -> Iterator[DBuffer]:
        """Yield all of them."""
        return (buffer for buffer in vars(self).values() if isinstance(buffer, DBuffer))


def make_gradient_buffers(
    options: GroupOptions, num_axes: int, main_dtype: torch.dtype, make: Callable[..., DBuffer]
) -> GradientBuffers:
    """Return what a group's placements and dtypes ask for.

    Args:
        options: the group's.
        num_axes: data-parallel axes.
        main_dtype: of main weights.
        make: makes a buffer of a kind, with placements and a dtype; transient if the fourth argument says so.
    """
    main_dtype = options.mixed_precision_policy.main_grads_dtype or main_dtype
    comm_dtype = options.mixed_precision_policy.grad_comm_dtype or main_dtype
    pending: tuple[Placement, ...] = (Partial("avg" if options.gradient_reduction == "average" else "sum"),) * num_axes
    final = flatten(options.placements.optimizer)
    resting = tuple(
        Flat() if isinstance(at, Shard) else pending[axis] for axis, at in enumerate(options.placements.gradient)
    )
    has_part = resting not in (pending, final)
    return GradientBuffers(
        full=make("full_grad", pending, comm_dtype, True),
        held=make("held_grad", pending, main_dtype, True),
        partly=make("partly_grad", resting, main_dtype, True) if has_part else None,
        sliced=make("sliced_grad", resting, comm_dtype, True) if has_part else None,
        reduced=make("reduced_grad", final, comm_dtype, True),
        main=make("main_grad", final, main_dtype, True),
        waits=resting == pending,
    )
