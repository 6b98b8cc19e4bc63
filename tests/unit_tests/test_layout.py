# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every element has one place and one owner, no atom is cut, and padding stays small."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.fsdp.experimental.layout import (
    ALIGNMENT_NUMEL,
    MAX_ROW_PADDING,
    GroupLayout,
    Range,
    plan_layout,
)

shapes_strategy = st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=4), min_size=1, max_size=8)


def _assert_valid(layout: GroupLayout, alignment: int) -> None:
    assert layout.shard_numel % alignment == 0
    cursor = 0
    for index, slot in enumerate(layout.slots):
        assert slot.offset % alignment == 0 and slot.offset >= cursor
        cursor = slot.offset + slot.numel
        owned = [layout.owned(index, shard) for shard in range(layout.num_shards)]
        assert sum(part.numel for part in owned) == slot.numel
        position = 0
        for part in (part for part in owned if part.numel):
            assert part.start == position
            position = part.stop
            if layout.is_row_aligned(index):
                assert part.start % slot.row_numel == part.stop % slot.row_numel == 0
    assert cursor <= layout.global_numel
    assert layout.tensor_numel + layout.padding_numel == layout.global_numel


@settings(max_examples=300, deadline=None)
@given(shapes_strategy, st.integers(1, 9), st.sampled_from([1, 2, 8]))
def test_rows_or_runs(shapes: list[list[int]], num_shards: int, alignment: int) -> None:
    layout = plan_layout(shapes, num_shards, alignment=alignment)
    _assert_valid(layout, alignment)
    exact = sum(-(-math.prod(shape) // alignment) * alignment for shape in shapes)
    runs = max(alignment, -(-exact // num_shards // alignment) * alignment + alignment) * num_shards
    assert layout.global_numel <= max(runs, layout.tensor_numel * (1 + MAX_ROW_PADDING))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 12)), min_size=1, max_size=6), st.integers(1, 9))
def test_given_atoms_are_never_cut(tensors: list[tuple[int, int]], num_shards: int) -> None:
    """Atoms that the caller names (blocks, whole tensors) hold at any cost in padding."""
    layout = plan_layout([[rows, atom] for rows, atom in tensors], num_shards, atoms=[atom for _, atom in tensors])
    _assert_valid(layout, ALIGNMENT_NUMEL)
    for index, (_, atom) in enumerate(tensors):
        for shard in range(num_shards):
            part = layout.owned(index, shard)
            assert not part.numel or (part.start % atom == 0 and part.stop % atom == 0)


def test_docstring_example() -> None:
    layout = plan_layout([(5, 3), (4,)], 2, alignment=4)
    assert layout.shard_numel == 12 and [slot.offset for slot in layout.slots] == [0, 16]
    assert layout.owned(0, 0) == Range(0, 12) and layout.owned(0, 1) == Range(12, 15)
    assert layout.owned(1, 0).numel == 0 and layout.owned(1, 1) == Range(0, 4)
    assert layout.is_row_aligned(0) and layout.padding_numel == 5


def _transformer_layer(hidden: int, ffn: int, heads: int, groups: int) -> list[tuple[int, ...]]:
    qkv = hidden + 2 * groups * (hidden // heads)
    return [(hidden,), (qkv, hidden), (hidden, hidden), (hidden,), (2 * ffn, hidden), (hidden, ffn)]


LAYERS = {
    "qwen3_32b": _transformer_layer(5120, 25600, 64, 8),
    "llama2_13b": _transformer_layer(5120, 13824, 40, 40),
    "llama3_70b": _transformer_layer(8192, 28672, 64, 8),
    "experts_128": [(1536, 2048), (2048, 768)] * 128,
    "vit_small": [(384,), (384,), (1152, 384), (1152,), (384, 384), (384,), (1536, 384), (1536,), (384, 1536), (384,)],
}


@pytest.mark.parametrize("name", LAYERS)
def test_padding_of_real_layers(name: str) -> None:
    """Row alignment alone wastes 29-34% of such layers at 1,024 shards; runs of elements are used where it would."""
    for num_shards in (8, 64, 1024, 4096):
        layout = plan_layout(LAYERS[name], num_shards)
        limit = 0.01 if layout.tensor_numel / num_shards >= 800 else 0.05
        assert layout.padding_numel <= limit * layout.tensor_numel, num_shards


def test_rows_are_kept_where_they_are_cheap() -> None:
    layout = plan_layout(LAYERS["llama3_70b"], 8)
    assert all(layout.is_row_aligned(index) for index in range(len(layout.slots)))


@pytest.mark.parametrize(
    ("shapes", "num_shards", "atoms", "message"),
    [
        ([(2, 2)], 0, None, "at least one shard"),
        ([], 2, None, "at least one shard and one tensor"),
        ([(2, -1)], 2, None, "sizes >= 0"),
        ([(4, 3)], 2, [5], "layout atoms: expected divisors"),
        ([(4, 3)], 2, [0], "layout atoms: expected divisors"),
    ],
)
def test_bad_arguments(shapes: list[tuple[int, ...]], num_shards: int, atoms: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_layout(shapes, num_shards, atoms=atoms)
