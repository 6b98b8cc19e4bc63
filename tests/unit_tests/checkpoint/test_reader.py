# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Boxes and entries of saved checkpoints are read bit for bit; damage of any file is named with its key."""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron.core.distributed.fsdp.experimental.checkpoint import records
from megatron.core.distributed.fsdp.experimental.checkpoint.boxes import intersect, numel, overlap, slabs
from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint.reader import (
    SafeReader,
    load_entry,
    load_metadata,
    open_item,
    read_box,
    tensor_entry,
)
from megatron.core.distributed.fsdp.experimental.layout import Box
from tests.unit_tests.launch import lasting_mesh, run_ranks

from .files import save, save_chunks, tensor_metadata, write_metadata

KINDS = {
    "float32": torch.randn(5, 7),
    "bfloat16": torch.randn(3, 4, 5).bfloat16(),
    "float8": torch.randn(6).to(torch.float8_e4m3fn),
    "int64": torch.arange(10),
    "bool": torch.tensor([[True, False], [False, True]]),
    "complex64": torch.randn(3, 2, dtype=torch.complex64),
    "zero_dim": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "view": torch.arange(20.0).view(4, 5)[1:3],
    "strided": torch.randn(4, 5).t(),
    "parameter": torch.nn.Parameter(torch.randn(2, 3)),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
}


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(_raw(first), _raw(second))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_is_read_whole(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path / "c", {"w": KINDS[kind]})
    size = list(KINDS[kind].shape)
    assert _same(read_box(folder, load_metadata(folder), "w", [0] * len(size), size), KINDS[kind])
    target = {"w": torch.zeros_like(KINDS[kind].detach())}
    dcp.load(target, storage_reader=SafeReader(folder))
    assert _same(target["w"], KINDS[kind])


@pytest.mark.parametrize("block_bytes", [4, 24, 1 << 20])
def test_every_box_of_a_chunked_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
    whole = torch.randn(4, 3, 2)
    # What element-cut shards look like: rows, and a row in parts.
    boxes = [((0, 0, 0), (1, 3, 2)), ((1, 0, 0), (1, 1, 2)), ((1, 1, 0), (1, 2, 2)), ((2, 0, 0), (2, 3, 2))]
    folder = save_chunks(tmp_path / "c", "w", whole, boxes)
    metadata = load_metadata(folder)
    spans = [[(begin, size) for begin in range(n) for size in range(n - begin + 1)] for n in whole.shape]
    for picked in random.Random(0).sample(list(itertools.product(*spans)), 120):
        offsets, sizes = zip(*picked, strict=True)
        expected = whole[tuple(slice(begin, begin + size) for begin, size in picked)]
        assert _same(read_box(folder, metadata, "w", offsets, sizes), expected)


def test_reads_into_targets_of_another_dtype_or_memory_order(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    folder = save(tmp_path / "c", {"a": whole, "b": whole})
    state = {"a": torch.zeros(6, 4, dtype=torch.bfloat16), "b": torch.zeros(4, 6).t()}
    dcp.load(state, storage_reader=SafeReader(folder))
    assert _same(state["a"], whole.bfloat16()) and torch.equal(state["b"], whole)


def test_nested_entries_and_extra_folders(tmp_path: Path) -> None:
    state = {"w": torch.randn(2), "n": {"x": (1, 2), "t": torch.tensor([3])}}
    save(tmp_path / "a", state)
    save(tmp_path / "b", {"w": torch.zeros(2), "n": {"x": 0, "t": torch.tensor([0])}})
    reader = SafeReader(tmp_path / "b")
    target = {"w": torch.ones(2), "n": {"x": None, "t": torch.tensor([9])}}
    dcp.load(target, storage_reader=reader, checkpoint_id=tmp_path / "a")  # DCP resets the reader to it
    assert torch.equal(target["w"], state["w"]) and target["n"]["x"] == (1, 2)  # type: ignore[index, arg-type]
    assert SafeReader.validate_checkpoint_id(tmp_path) and not SafeReader.validate_checkpoint_id("s3://bucket")


def test_keys_that_are_asked_for_wrongly(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": torch.ones(2, 2), "x": 3})
    metadata = load_metadata(folder)
    with pytest.raises(CheckpointError, match="nothing: expected a key of the checkpoint"):
        read_box(folder, metadata, "nothing", [0], [1])
    with pytest.raises(CheckpointError, match="x: expected a tensor, got a byte entry"):
        tensor_entry(metadata, "x")
    with pytest.raises(CheckpointError, match="w: expected a byte entry, got a tensor"):
        load_entry(folder, metadata, "w")
    for offsets, sizes in [((1, 0), (2, 2)), ((0,), (1,)), ((-1, 0), (1, 1))]:
        with pytest.raises(CheckpointError, match=r"w: expected a box within \(2, 2\)"):
            read_box(folder, metadata, "w", offsets, sizes)


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        ([((0,), (3,)), ((4,), (4,))], "got 7 of 8 elements"),
        ([((0,), (5,)), ((4,), (4,))], r"got chunks that overlap at \(4,\)"),
        ([((0,), (4,)), ((3,), (4,))], r"got chunks that overlap at \(3,\)"),  # and a gap: of the same volume
    ],
)
def test_chunks_that_do_not_cover_a_box_once(
    tmp_path: Path, boxes: list[tuple[list[int], list[int]]], text: str
) -> None:
    folder = save_chunks(tmp_path / "c", "w", torch.randn(8), boxes)
    with pytest.raises(CheckpointError, match=f"w: expected saved chunks that cover .* {text}"):
        read_box(folder, load_metadata(folder), "w", [0], [8])
    assert read_box(folder, load_metadata(folder), "w", [0], [2]).shape == (2,)


def test_metadata_that_does_not_fit_the_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": torch.ones(2, 3)})
    metadata = tensor_metadata(folder)
    metadata.state_dict_metadata["w"].properties = TensorProperties(dtype=torch.bfloat16)  # type: ignore[union-attr]
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match=r"w at \(0, 0\): expected torch.bfloat16 of .* got torch.float32"):
        read_box(folder, load_metadata(folder), "w", [0, 0], [2, 3])
    metadata.storage_data.clear()
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match=r"w at \(0, 0\): expected to find where it is stored"):
        read_box(folder, load_metadata(folder), "w", [0, 0], [2, 3])


def test_a_stacked_layer_of_torch_dist_lacks_a_dim_of_one_in_its_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": torch.randn(2, 3)})
    metadata = tensor_metadata(folder)
    entry = metadata.state_dict_metadata["w"]
    entry.size, entry.chunks[0].offsets, entry.chunks[0].sizes = (  # type: ignore[union-attr]
        torch.Size([1, 2, 3]),
        torch.Size([0, 0, 0]),
        torch.Size([1, 2, 3]),
    )
    (info,) = metadata.storage_data.values()
    metadata.storage_data = {MetadataIndex("w", [0, 0, 0]): info}
    whole = read_box(folder, metadata, "w", [0, 0, 0], [1, 2, 3])
    assert torch.equal(whole[0], read_box(folder, load_metadata(folder), "w", [0, 0], [2, 3]))


@pytest.mark.parametrize("damage", ["removed", "truncated", "zeroed", "empty"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damage_of_every_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    folder = save(tmp_path / "c", {"w": torch.randn(40, 3), "x": {"y": 3}})
    file = folder / name
    content = file.read_bytes()
    file.unlink()
    if damage != "removed":
        file.write_bytes({"truncated": content[:-100], "zeroed": bytes(len(content)), "empty": b""}[damage])

    def read() -> None:
        metadata = load_metadata(folder)
        problems = []
        for action in (
            lambda: read_box(folder, metadata, "w", [0, 0], [40, 3]),
            lambda: load_entry(folder, metadata, "x.y"),
        ):
            try:
                action()
            except CheckpointError as error:
                problems.append(str(error))
        # The last 100 bytes are those of the tensor, which DCP writes after byte entries.
        assert len(problems) == (1 if damage == "truncated" else 2)
        raise CheckpointError(problems[0])

    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        read()
    if name != ".metadata":
        assert str(caught.value).startswith("w at (0, 0)")


def test_checksums_of_the_archive_find_a_flipped_byte_of_any_record(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": torch.randn(40, 3)})
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    index = MetadataIndex("w", [0, 0])
    metadata = load_metadata(folder)
    with open_item(folder, metadata, index) as item:
        begin = item.describe().begin
        assert list(item.damaged_records()) == []
    content[begin + 5] ^= 1
    file.write_bytes(content)
    with open_item(folder, metadata, index) as item:
        assert list(item.damaged_records()) == ["archive/data/0"]


def test_archives_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "c", {"w": torch.arange(3), "x": (1,)})
    finally:
        torch.serialization.set_crc32_options(True)
    metadata = load_metadata(folder)
    assert read_box(folder, metadata, "w", [1], [2]).tolist() == [1, 2] and load_entry(folder, metadata, "x") == (1,)
    with open_item(folder, metadata, MetadataIndex("w", [0])) as item:
        assert item.describe().begin > 0 and list(item.damaged_records()) == []


def test_boxes_by_the_numbers_of_their_examples() -> None:
    assert [box.sizes for box in slabs((3, 4), 8)] == [(2, 4), (1, 4)]
    assert [box.sizes for box in slabs((3, 4), 2)] == [(1, 2)] * 6
    assert list(slabs((), 1)) == [Box((), ())] and list(slabs((0, 3), 5)) == []
    assert intersect(Box((), ()), Box((), ())) == Box((), ()) and intersect(Box((0,), (2,)), Box((2,), (2,))) is None
    assert overlap([Box((), ()), Box((), ())]) is not None and overlap([Box((0,), (2,)), Box((1,), (0,))]) is None


def test_slabs_and_overlaps_of_random_tensors() -> None:
    draw = random.Random(0)
    for _ in range(200):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(0, 4))]
        limit = draw.randint(1, 30)
        found = list(slabs(shape, limit))
        counted = torch.zeros(shape)
        for box in found:
            assert numel(box) <= limit
            counted[tuple(slice(first, first + size) for first, size in zip(*box, strict=True))] += 1
        assert bool((counted == 1).all()) and overlap(found) is None
        if shape:
            assert overlap([*found, draw.choice(found)]) is not None


def test_random_damage_is_always_our_error(tmp_path: Path) -> None:
    state = {"w": torch.randn(6, 3), "t": torch.randn(3, 4).t(), "x": {"y": argparse.Namespace(a=1)}}
    folder = save(tmp_path / "c", state)
    draw = random.Random(0)
    outcomes = []
    for _ in range(300):
        file = folder / draw.choice([".metadata", "__0_0.distcp"])
        content = file.read_bytes()
        at = draw.randrange(len(content))
        middle = [bytes([content[at] ^ 1 << draw.randrange(8)]), b"", draw.randbytes(5)][draw.randrange(3)]
        end = len(content) if draw.random() < 0.1 else at + 1
        file.write_bytes(content[:at] + middle + content[end:])
        try:
            metadata = load_metadata(folder)
            for key, entry in metadata.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    read_box(folder, metadata, key, [0] * len(entry.size), entry.size)
                else:
                    load_entry(folder, metadata, key)
            outcomes.append("not seen: in a value, or in what nobody reads")
        except CheckpointError:
            outcomes.append("seen")
        file.write_bytes(content)
    assert outcomes.count("seen") > 150


def _load_on_two_ranks(folder: Path) -> list[torch.Tensor]:
    mesh = lasting_mesh((2,))
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        target = {"w": distribute_tensor(torch.zeros(5, 4), mesh, [placement])}
        dcp.load(target, storage_reader=SafeReader(folder))
        found.append(target["w"].full_tensor())
    return found


def test_ranks_read_their_parts(tmp_path: Path) -> None:
    whole = torch.randn(5, 4)
    save_chunks(tmp_path / "c", "w", whole, [((0, 0), (1, 4)), ((1, 0), (1, 3)), ((1, 3), (1, 1)), ((2, 0), (3, 4))])
    for found in run_ranks(2, _load_on_two_ranks, tmp_path / "c"):
        assert all(torch.equal(tensor, whole) for tensor in found)


def _load_damaged(folder: Path) -> str:
    target = {"w": distribute_tensor(torch.zeros(5, 4), lasting_mesh((2,)), [Shard(0)])}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=SafeReader(folder))
    return str(caught.value)


def test_damage_that_one_rank_meets_is_named_on_all(tmp_path: Path) -> None:
    save_chunks(tmp_path / "c", "w", torch.randn(5, 4), [((0, 0), (3, 4)), ((3, 0), (2, 4))])
    file = tmp_path / "c/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-30])
    for message in run_ranks(2, _load_damaged, tmp_path / "c"):
        assert "w at (3, 0) in " in message and "the file is truncated" in message
