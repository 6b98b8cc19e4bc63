# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a strategy costs, by formula: bytes at rest and at the peak of a step, and every collective of a step.

For equal units below a root without parameters of its own, and the default schedule: one unit gathered ahead, packed
gradients of two units at a time, weights released after forward.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp.experimental import Placements

Collective = tuple[str, str, int, int]
"""Operation, dtype, elements of the larger side, ranks: an entry of a `CollectiveLog`."""


@dataclass(frozen=True)
class Cost:
    """Costs of one strategy on a mesh.

    Attributes:
        placements: the strategy.
        shape: of the mesh.
        depth: units.
        numel: elements of one unit, a multiple of everything that it is divided by.
        compute_bytes: bytes of an element of the compute weights.
        main_bytes: bytes of an element of main weights, main gradients and what is sent of gradients.
        has_one_dtype: whether compute and main weights have one dtype.
        num_keeping: ranks that keep the weights among each other between forward and backward; None for none.
    """

    placements: Placements
    shape: tuple[int, ...]
    depth: int
    numel: int
    compute_bytes: int
    main_bytes: int
    has_one_dtype: bool
    num_keeping: int | None = None

    def _shards(self, field: str) -> int:
        at = getattr(self.placements, field)
        return math.prod(size for size, placement in zip(self.shape, at, strict=True) if isinstance(placement, Shard))

    @property
    def gathers(self) -> bool:
        """Whether forward and backward gather weights."""
        return any(isinstance(at, Shard) for at in self.placements.parameter)

    def rest(self, state_bytes: int = 0) -> float:
        """Return bytes between steps: main weights, compute weights that differ, optimizer state; no gradients."""
        is_placed_alike = self.placements.parameter == self.placements.optimizer
        shares_memory = is_placed_alike and (self.has_one_dtype or self.gathers)
        weight_bytes = 0 if shares_memory else self.compute_bytes
        per_element = weight_bytes / self._shards("parameter") + (self.main_bytes + state_bytes) / self._shards(
            "optimizer"
        )
        return self.depth * self.numel * per_element

    def peak_above_rest(self, *, counts_autograd: bool) -> float:
        """Return how many bytes a step with one microbatch needs besides those at rest.

        Args:
            counts_autograd: count gradients before they are packed, too, which autograd allocates.
        """
        weight = self.numel * self.compute_bytes if self.gathers else 0
        gradient = self.numel * self.compute_bytes if counts_autograd else 0
        packed = self.numel * self.main_bytes
        final = self.numel * self.main_bytes / self._shards("optimizer")
        kept = 0.0 if self.num_keeping is None else weight / self.num_keeping
        # In forward, when the last unit's copy is made of its gathered weights.
        peak = weight + self.depth * kept
        for unit in range(self.depth):
            # The copies of this unit and of the next one, which are both gathered, are gone.
            copies = kept * max(0, self.depth - unit - 2)
            weights = weight * (2 if unit < self.depth - 1 else 1) + copies
            in_flight = packed * (2 if unit else 1)
            before_reduction = weights + in_flight + gradient + unit * final
            after_reduction = weights + in_flight + (unit + 1) * final
            peak = max(peak, before_reduction, after_reduction)
        return peak

    def collectives(self, microbatches: int, weight_dtype: str, gradient_dtype: str) -> Counter[Collective]:
        """Return every collective of a step; the first step and later ones cost the same."""
        counts: Counter[Collective] = Counter()
        cut = [axis for axis in (1, 0) if axis < len(self.shape)]
        of = {
            name: [axis for axis in cut if isinstance(getattr(self.placements, name)[axis], Shard)]
            for name in ("parameter", "gradient", "optimizer")
        }
        refreshed = [axis for axis in of["optimizer"] if axis not in of["parameter"]]
        times = microbatches if self.num_keeping else 2 * microbatches
        self._count_gathers(counts, of["parameter"], times, self.numel, weight_dtype)
        if self.num_keeping:
            counts["all_gather", weight_dtype, self.numel, self.num_keeping] += self.depth * microbatches
        held = self.numel // self._shards("parameter")
        self._count_gathers(counts, refreshed, 1, held, weight_dtype)
        numel, times = self.numel, microbatches
        early = of["gradient"]
        for axis in early:
            counts["reduce_scatter", gradient_dtype, numel, self.shape[axis]] += self.depth * times
            numel //= self.shape[axis]
        for axis in [axis for axis in cut if axis not in early and axis in of["optimizer"]]:
            counts["reduce_scatter", gradient_dtype, numel, self.shape[axis]] += self.depth
            numel //= self.shape[axis]
        for axis in [axis for axis in cut if axis not in early and axis not in of["optimizer"]]:
            counts["all_reduce", gradient_dtype, numel, self.shape[axis]] += self.depth
        return counts

    def _count_gathers(self, counts: Counter[Collective], axes: list[int], times: int, numel: int, dtype: str) -> None:
        """Count gathers over axes, the least significant last among `axes`, of which the last result has `numel`."""
        for axis in axes:
            counts["all_gather", dtype, numel, self.shape[axis]] += self.depth * times
            numel //= self.shape[axis]
