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

from collections.abc import Iterator
from dataclasses import dataclass

from .dbuffer import DBuffer


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
    """

    full: DBuffer
    held: DBuffer
    partly: DBuffer | None
    sliced: DBuffer | None
    reduced: DBuffer
    main: DBuffer

    def __iter__(self) -> Iterator[DBuffer]:
        """Yield all of them."""
        return (buffer for buffer in vars(self).values() if buffer is not None)
