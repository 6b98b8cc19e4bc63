# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Names how a flat group buffer lies on a mesh axis, and which communication a change of it means.

It does not communicate and knows no sizes: `collectives.py` does the first, `layout.py` the second.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


class Flat(Placement):
    """A mesh axis that cuts the flat buffer of a parameter group into equal runs of elements.

    The public placement of a sharded parameter is torch's ``Shard(0)``: it speaks of one logical tensor.
    ``Flat`` speaks of the buffer in which a whole group of tensors lies one after another.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flat)

    def __hash__(self) -> int:
        return hash(Flat)

    def __repr__(self) -> str:
        return "Flat()"


def flatten(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Return what public placements mean for a group's flat buffer."""
    return tuple(Flat() if isinstance(placement, Shard) else placement for placement in placements)


class Communication(Enum):
    """What has to happen on one mesh axis to turn one placement into another."""

    NONE = "none"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    SLICE = "slice"


def communication(source: Placement, target: Placement) -> Communication:
    """Return the communication that turns `source` into `target` on one mesh axis.

    Raises:
        ValueError: no communication has that meaning, e.g. making a full buffer `Partial`.
    """
    if source == target:
        return Communication.NONE
    if isinstance(source, Flat) and isinstance(target, Replicate):
        return Communication.ALL_GATHER
    if isinstance(source, Partial) and isinstance(target, Flat):
        return Communication.REDUCE_SCATTER
    if isinstance(source, Partial) and isinstance(target, Replicate):
        return Communication.ALL_REDUCE
    if isinstance(source, Replicate) and isinstance(target, Flat):
        return Communication.SLICE
    raise ValueError(
        f"placement change: expected one of Flat->Replicate, Partial->Flat, Partial->Replicate, "
        f"Replicate->Flat, got {source}->{target}. Go through one of these."
    )
