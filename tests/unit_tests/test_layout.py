# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every element has one place and one owner, no atom is cut, and padding stays within its bound."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.fsdp.experimental.layout import (
    ALIGNMENT_NUMEL,
    MAX_ROW_PADDING,
    GroupLayout,
    Range,
    boxes,
    plan_layout,
)

Shape = tuple[int, ...]


def _assert_valid(layout: GroupLayout, shapes: list[Shape]) -> None:
    """No overlap, every element owned once, and `is_row_aligned` is true."""
    assert [slot.shape for slot in layout.slots] == shapes
    cursor = 0
    for slot in sorted(layout.slots, key=lambda slot: (slot.offset, slot.numel)):
        assert slot.offset >= cursor
        cursor = slot.offset + slot.numel
    assert cursor <= layout.global_numel
    for index, slot in enumerate(layout.slots):
        owned = [layout.owned(index, shard) for shard in _shards_around(layout, index)]
        filled = [part for part in owned if part.numel]
        assert [part.start for part in filled] == [0, *(part.stop for part in filled)][: len(filled)]
        assert sum(part.numel for part in filled) == slot.numel
        assert layout.is_row_aligned(index) == all(part.start % slot.row_numel == 0 for part in filled)
    assert layout.tensor_numel + layout.padding_numel == layout.global_numel


def _shards_around(layout: GroupLayout, index: int) -> range:
    """Return all shards, or those that hold the tensor and one more on each side where there are many."""
    if layout.num_shards <= 8:
        return range(layout.num_shards)
    run = layout.slots[index].range
    return range(
        max(0, run.start // layout.shard_numel - 1), min(layout.num_shards, run.stop // layout.shard_numel + 2)
    )


def _assert_uncut(layout: GroupLayout, atoms: list[int]) -> None:
    """Every shard border that lies in a tensor lies between its atoms."""
    for slot, atom in zip(layout.slots, atoms, strict=True):
        first = (slot.offset // layout.shard_numel + 1) * layout.shard_numel
        for border in range(first, slot.range.stop, layout.shard_numel):
            assert (border - slot.offset) % atom == 0


def _bound(total: int, num_shards: int, percent: int) -> int:
    """Return how much padding is allowed; shards are not empty even where there is nothing to hold."""
    return max(total * percent // 100, num_shards - 1) if total else num_shards


def _alignment_kept(total: int, numels: list[int], num_shards: int, percent: int) -> int:
    """Return the largest alignment that does not break the bound by itself."""
    most = total + _bound(total, num_shards, percent)
    for alignment in (8, 4, 2):
        size = most // num_shards // alignment * alignment
        starts = sum(-(-numel // alignment) * alignment for numel in numels)
        if size and starts <= size * num_shards:
            return alignment
    return 1


def _random_group(generator: random.Random) -> list[Shape]:
    """Return 1 to 21 shapes of 0 to 3 dims: tiny, odd, empty, large, or repeated."""
    shapes: list[Shape] = []
    for _ in range(generator.randint(1, 7)):
        top = generator.choice([3, 9, 70, 70, 300])
        shape = tuple(generator.randint(0 if top == 3 else 1, top) for _ in range(generator.choice([0, 1, 1, 2, 2, 3])))
        shapes += [shape] * generator.choice([1, 1, 1, 1, 3])
    return shapes


def _random_atom(generator: random.Random, shape: Shape) -> int:
    """Return one element, a row, a block of rows, the last one perhaps with fewer, or the whole tensor."""
    row = max(1, math.prod(shape[1:]))
    blocks = [row * count for count in (2, 3, 4, 8)]
    return generator.choice([1, row, *blocks, max(1, math.prod(shape))])


@pytest.mark.parametrize("seed", range(10))
def test_random_groups(seed: int) -> None:
    """1,000 groups a seed."""
    generator = random.Random(seed)
    for _ in range(1000):
        shapes = _random_group(generator)
        numels = [math.prod(shape) for shape in shapes]
        total = sum(numels)
        num_shards = generator.randint(33, 4096) if generator.random() < 0.03 else generator.randint(1, 24)
        percent = generator.choice([0, 1, 1, 1, 5, 29])
        layout = plan_layout(shapes, num_shards, max_padding=percent / 100)
        _assert_valid(layout, shapes)
        assert layout.padding_numel <= _bound(total, num_shards, percent), (shapes, num_shards, percent)
        kept = _alignment_kept(total, numels, num_shards, percent)
        assert all(at % kept == 0 for at in (layout.shard_numel, *(slot.offset for slot in layout.slots)))
        assert plan_layout(shapes, num_shards, max_padding=percent / 100) == layout

        atoms = [_random_atom(generator, shape) for shape in shapes]
        whole = plan_layout(shapes, num_shards, atoms=atoms)
        _assert_valid(whole, shapes)
        _assert_uncut(whole, atoms)
        assert all(at % ALIGNMENT_NUMEL == 0 for at in (whole.shard_numel, *(slot.offset for slot in whole.slots)))
        try:
            tight = plan_layout(shapes, num_shards, atoms=atoms, max_padding=percent / 100)
        except ValueError as error:
            assert whole.padding_numel > _bound(total, num_shards, percent)
            (cure,) = re.findall(r"or max_padding=([\d.]+)\.$", str(error))
            tight = plan_layout(shapes, num_shards, atoms=atoms, max_padding=float(cure))
        else:
            assert tight.padding_numel <= _bound(total, num_shards, percent)
        if tight != whole:
            _assert_valid(tight, shapes)
            _assert_uncut(tight, atoms)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 8]),
)
def test_bound_holds_for_any_alignment(shapes: list[list[int]], num_shards: int, alignment: int) -> None:
    layout = plan_layout(shapes, num_shards, alignment=alignment)
    _assert_valid(layout, [tuple(shape) for shape in shapes])
    assert layout.padding_numel <= _bound(layout.tensor_numel, num_shards, 1)


def test_bound_is_met_where_nothing_fits() -> None:
    """The worst case of the bound: one element more than full shards, in a group too small for 1% to count."""
    layout = plan_layout([(3, 3)], 8)
    assert (layout.shard_numel, layout.padding_numel) == (2, 7)


def test_a_group_without_elements_has_shards_of_one() -> None:
    for atoms in (None, [1, 5]):
        layout = plan_layout([(0,), (0, 5)], 3, atoms=atoms, max_padding=0)
        assert layout.shard_numel == 1 and layout.tensor_numel == 0
        assert all(layout.owned(index, shard).numel == 0 for index in range(2) for shard in range(3))


def test_docstring_example() -> None:
    layout = plan_layout([(5, 3), (4,)], 2)
    assert layout.shard_numel == 10 and [slot.offset for slot in layout.slots] == [4, 0]
    assert layout.owned(0, 0) == Range(0, 6) and layout.owned(0, 1) == Range(6, 15)
    assert layout.owned(1, 0) == Range(0, 4) and layout.owned(1, 1).numel == 0
    assert layout.is_row_aligned(0) and layout.padding_numel == 1


def test_gaps_are_filled_with_smaller_tensors() -> None:
    """The second matrix must begin at a border, 5 elements after the first ends."""
    layout = plan_layout([(4, 10), (4, 10), (5,), (5,)], 2, atoms=[10, 10, 1, 1], alignment=1)
    assert [slot.offset for slot in layout.slots] == [0, 45, 40, 85]
    assert layout.padding_numel == 0


def test_a_long_tensor_may_do_with_one_border() -> None:
    """Neither tensor's steps divide 80, the shard size, but each meets one border, between its own steps."""
    layout = plan_layout([(15, 10), (21, 7)], 4, atoms=[10, 7], alignment=1)
    assert layout.shard_numel == 80
    _assert_uncut(layout, [10, 7])
    assert layout.slots[1].range == Range(163, 310)


def test_gaps_around_a_border_are_used_to_the_last_element() -> None:
    """As above; the 13 elements before the second tensor, in which border 160 lies, take 3 + 3 + 3, 1, and 3."""
    shapes = [(15, 10), (21, 7), (3,), (3,), (3,), (3,), (10,), (1,)]
    layout = plan_layout(shapes, 4, atoms=[10, 7, 3, 3, 3, 3, 1, 1], alignment=1)
    assert layout.shard_numel == 80 and layout.padding_numel == 0
    assert [slot.offset for slot in layout.slots] == [0, 163, 150, 153, 156, 160, 310, 159]


@pytest.mark.parametrize(
    ("numels", "num_shards", "best"),
    [
        ([7, 7, 7, 7, 7], 2, 21),
        ([8, 7, 6, 5, 4], 3, 11),
        ([5, 5, 4, 3, 3], 2, 10),
        ([9, 1, 1, 1], 8, 9),
        ([6, 6], 1, 12),
    ],
)
def test_whole_tensors_are_packed(numels: list[int], num_shards: int, best: int) -> None:
    layout = plan_layout([(numel,) for numel in numels], num_shards, atoms=numels, alignment=1)
    assert layout.shard_numel == best
    _assert_uncut(layout, numels)


LLAMA_70B_LAYER = [
    *[(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)],
    *[(28672, 8192), (28672, 8192), (8192, 28672), (8192,), (8192,)],
]


@pytest.mark.parametrize(("num_shards", "runs"), [(8, []), (64, []), (1024, [6]), (4096, [0, 1, 2, 3, 4, 5, 6])])
def test_rows_are_given_up_only_as_far_as_needed(num_shards: int, runs: list[int]) -> None:
    """At 1,024 shards the window of 1% holds a multiple of 8,192, but none of 28,672; at 4,096 neither."""
    layout = plan_layout(LLAMA_70B_LAYER, num_shards)
    assert [index for index in range(9) if not layout.is_row_aligned(index)] == runs


def test_largest_rows_are_given_up_first() -> None:
    """One shard size suits all rows, as no tensor is longer than a shard; gaps before whole rows are too large."""
    shapes = [(7, 101), (7, 103), (7, 107)] * 4
    layout = plan_layout(shapes, 4, alignment=1)
    assert [shapes[index] for index in range(12) if not layout.is_row_aligned(index)] == [(7, 107)]
    roomy = plan_layout(shapes, 4, alignment=1, max_padding=0.05)
    assert all(roomy.is_row_aligned(index) for index in range(12))


def test_alignment_is_given_up_in_steps() -> None:
    """1.4 million elements in 4,096 shards: a multiple of 8 costs 1.5%, one of 4 costs 0.3%."""
    shapes = [(768, 588), (768,), (257, 768), (1000, 768), (1000,), (2304,)]
    layout = plan_layout(shapes, 4096)
    assert layout.shard_numel == 348 and layout.padding_numel < 0.0032 * layout.tensor_numel
    assert plan_layout(shapes, 4096, atoms=[1] * 6, max_padding=0.01) == layout
    assert plan_layout(shapes, 4096, atoms=[1] * 6).shard_numel == 352


def test_tensors_of_even_size_start_aligned_without_alignment() -> None:
    layout = plan_layout([(3,), (16,), (4,), (24,)], 5, alignment=1)
    assert layout.shard_numel == 10
    assert [slot.offset for slot in layout.slots] == [44, 24, 40, 0]


def test_a_thousand_tensors() -> None:
    generator = random.Random(0)
    shapes = [(generator.randint(1, 2000), generator.randint(1, 2000)) for _ in range(1000)]
    for num_shards in (8, 4096):
        layout = plan_layout(shapes, num_shards)
        _assert_valid(layout, shapes)
        assert layout.padding_numel <= MAX_ROW_PADDING * layout.tensor_numel


@pytest.mark.parametrize(
    ("shapes", "num_shards", "options", "message"),
    [
        ([(2, 2)], 0, {}, "at least one shard"),
        ([], 2, {}, "at least one shard and one tensor"),
        ([(2, -1)], 2, {}, "sizes >= 0"),
        ([(4, 3)], 2, {"alignment": 0}, "expected alignment >= 1 and a finite max_padding >= 0, got 0 and None"),
        ([(4, 3)], 2, {"max_padding": -0.1}, "got 8 and -0.1"),
        ([(4, 3)], 2, {"max_padding": math.inf}, "got 8 and inf"),
        ([(4, 3)], 2, {"max_padding": math.nan}, "got 8 and nan"),
        ([(4, 3)], 2, {"atoms": [0]}, r"layout atoms: expected one size >= 1 .* of \[12\] elements, got \[0\]"),
        ([(4, 3)], 2, {"atoms": [3, 3]}, r"expected one size >= 1 for each .* \[12\] elements, got \[3, 3\]"),
        (
            [(6, 5), (8, 100), (3,)],
            4,
            {"atoms": [5, 800, 1], "max_padding": 0.5},
            r"layout atoms: expected atoms that 4 shards hold uncut with max_padding 0.5, got a tensor of shape "
            r"\(8, 100\) in atoms of 800 elements, for which it takes 2.8416. Use smaller atoms, fewer shards, or "
            r"max_padding=2.8416.$",
        ),
    ],
)
def test_bad_arguments(shapes: list[Shape], num_shards: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_layout(shapes, num_shards, **options)


def _elements(shape: Shape, offsets: Shape, sizes: Shape) -> list[int]:
    """Return the row-major numbers of a box's elements, in order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    return [sum(map(math.prod, zip(index, strides, strict=True))) for index in itertools.product(*ranges)]


def test_boxes_hold_exactly_their_run() -> None:
    """Every run of every shape of up to 3 dims of sizes 0 to 4."""
    most = dict.fromkeys(range(4), 0)
    for num_dims in range(4):
        for shape in itertools.product(range(5), repeat=num_dims):
            for start, stop in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
                found = boxes(shape, start, stop)
                assert all(min(box.sizes, default=1) > 0 for box in found)
                elements = [element for box in found for element in _elements(shape, box.offsets, box.sizes)]
                assert elements == list(range(start, stop)), (shape, start, stop)
                most[num_dims] = max(most[num_dims], len(found))
    assert most == {0: 1, 1: 1, 2: 3, 3: 5}, "2n - 1 boxes are needed, and enough"


def test_boxes_of_random_runs() -> None:
    generator = random.Random(0)
    for _ in range(300):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(4, 6)))
        start, stop = sorted(generator.choices(range(math.prod(shape) + 1), k=2))
        found = boxes(shape, start, stop)
        assert [item for box in found for item in _elements(shape, *box)] == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1


def test_boxes_docstring_example() -> None:
    assert boxes((4, 3), 2, 11) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_boxes_outside_the_tensor(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"boxes: expected 0 <= start <= stop <= 12 for shape \(4, 3\), got \["):
        boxes((4, 3), start, stop)
