# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""DCP planners that trust nothing: what is saved is complete, and what is loaded covers every element asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from ..layout import Box
from .boxes import numel, overlap
from .errors import CheckpointError
from .reader import chunk_box


class CompleteSavePlanner(DefaultSavePlanner):
    """Refuses a save in which no rank writes some elements of a tensor; DCP checks that of several ranks only.

    A byte entry or plain tensor that several ranks have is the first one's; DCP would take that of any, one by one.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the ranks' plans.

        Raises:
            CheckpointError: the chunks of a tensor do not add up to it.
        """
        all_plans = _of_first_rank(all_plans)
        plans, metadata = super().create_global_plan(all_plans)
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                planned, size = sum(numel(chunk_box(chunk)) for chunk in entry.chunks), math.prod(entry.size)
                if planned != size:
                    raise CheckpointError(
                        f"{key}: expected chunks that add up to all {size} elements of {tuple(entry.size)}, got "
                        f"{planned}. Save what state_dict() returns, on all ranks."
                    )
        return plans, metadata


def _of_first_rank(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans with each byte entry and plain tensor in the first that has it."""
    seen: set[str] = set()
    found = []
    for plan in plans:
        items = [item for item in plan.items if item.type == WriteItemType.SHARD or item.index.fqn not in seen]
        seen |= {item.index.fqn for item in items if item.type != WriteItemType.SHARD}
        found.append(replace(plan, items=items))
    return found


class CoveringLoadPlanner(DefaultLoadPlanner):
    """Plans reads for flat tensors, and refuses those whose saved chunks do not hold every element."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads.

        Raises:
            CheckpointError: some elements that this rank holds were not saved.
        """
        assert self.metadata is not None, "DCP gives it before it asks for a plan"
        items = []
        for key, tensor in self._tensors.items():
            entry: Any = self.metadata.state_dict_metadata[key]
            wanted = _local_chunks(tensor)
            reads = create_read_items_for_chunk_list(key, entry, wanted)
            found = sum(math.prod(item.lengths) for item in reads)
            needed = sum(math.prod(chunk.sizes) for chunk in wanted)
            if found != needed or _have_overlap(reads):
                raise CheckpointError(
                    f"{key}: expected saved chunks that hold all {needed} elements of this rank once, got {found}"
                    f"{', some twice' if found == needed else ''}. The save lost data: load an earlier checkpoint."
                )
            items += [item for item in reads if math.prod(item.lengths)]
        return LoadPlan(items)


def _have_overlap(reads: Sequence[ReadItem]) -> bool:
    """Whether two reads fill the same elements of a target."""
    by_target: dict[Any, list[Box]] = {}
    for item in reads:
        box = Box(tuple(item.dest_offsets), tuple(item.lengths))
        by_target.setdefault(item.dest_index, []).append(box)
    return any(overlap(boxes) is not None for boxes in by_target.values() if len(boxes) > 1)


def _local_chunks(tensor: Any) -> list[Any]:
    if hasattr(tensor, "__create_chunk_list__"):
        chunks: list[Any] = tensor.__create_chunk_list__()
        return chunks
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            f"tensor of shape {tuple(tensor.shape)}: expected one of a sharded model, got a {type(tensor).__name__}, "
            "whose cut torch may have lost. Pass what state_dict() returns."
        )
    return [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.size())]
