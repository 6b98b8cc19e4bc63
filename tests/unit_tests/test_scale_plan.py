# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every scale of a quantized weight has one place, in the shard that has its elements."""

from __future__ import annotations

import random

import pytest

from megatron.core.distributed.fsdp.experimental.layout import GroupLayout, Range, TensorSlot, plan_layout
from megatron.core.distributed.fsdp.experimental.quantization import BlockGeometry, num_scales_of
from megatron.core.distributed.fsdp.experimental.scale_plan import plan_scales


def _random_geometry(generator: random.Random, rows: int, columns: int) -> BlockGeometry:
    """Return the geometry of blocks of some rows and some columns."""
    height, width = generator.choice([(1, 4), (1, 32), (4, 4), (128, 128), (1, 1000)])
    across = -(-columns // width)
    if height == 1 and columns % width == 0:
        return BlockGeometry(width, 1, rows * across)
    return BlockGeometry(height * columns, across, -(-rows // height) * across)


@pytest.mark.parametrize("seed", range(4))
def test_random_plans(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(300):
        shapes = [
            (generator.randint(1, 300), generator.choice([1, 3, 32, 40, 64, 128]))
            for _ in range(generator.randint(1, 5))
        ]
        geometries = [_random_geometry(generator, *shape) for shape in shapes]
        num_shards = generator.randint(1, 9)
        layout = plan_layout(
            shapes, num_shards, atoms=[geometry.atom for geometry in geometries], alignment=generator.choice([8, 32])
        )
        plan = plan_scales(layout, geometries)
        taken: set[int] = set()
        for index, geometry in enumerate(geometries):
            count = 0
            for shard in range(num_shards):
                owned = layout.owned(index, shard)
                part = plan.parts[index].get(shard, Range(0, 0))
                assert owned.numel == 0 or owned.start % geometry.atom == 0
                assert part.numel == num_scales_of(geometry, owned.numel)
                if part.numel:
                    first = shard * plan.shard_numel
                    assert first <= part.start and part.stop <= first + plan.shard_numel
                places = set(range(part.start, part.stop))
                assert not places & taken
                taken |= places
                count += part.numel
            assert count == geometry.num_scales
            runs = plan.runs(index)
            assert [place for run in runs for place in range(run.start, run.stop)] == [
                place for _, part in sorted(plan.parts[index].items()) for place in range(part.start, part.stop)
            ]


def test_scales_in_proportion_are_one_run_of_a_tensor_that_borders_cut() -> None:
    layout = plan_layout([(10, 64), (6, 32), (33,)], 3, atoms=[32, 32, 33], alignment=32)
    plan = plan_scales(layout, [BlockGeometry(32, 1, 20), BlockGeometry(32, 1, 6), BlockGeometry(32, 1, 2)])
    assert any(len(parts) > 1 for parts in plan.parts)
    assert all(len(plan.runs(index)) == 1 for index in range(3))
    assert plan.shard_numel == layout.shard_numel // 32


def test_the_example_in_the_source() -> None:
    layout = GroupLayout((TensorSlot((3, 4), 0), TensorSlot((2, 2), 12)), num_shards=2, shard_numel=8)
    plan = plan_scales(layout, [BlockGeometry(4, 1, 3), BlockGeometry(2, 1, 2)])
    assert plan.shard_numel == 3
    assert plan.runs(0) == [Range(0, 2), Range(3, 4)]
    assert plan.runs(1) == [Range(4, 6)]
