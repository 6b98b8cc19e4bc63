# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A rank's items in several files, written at once: whole, balanced, not copied, and with the errors of all threads."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError, data_files, folder, write
from megatron.core.distributed.fsdp.experimental.checkpoint.stream import FileStream
from megatron.core.distributed.fsdp.experimental.checkpoint.threads import in_threads
from megatron.core.distributed.fsdp.experimental.checkpoint.writer import CheckpointWriter
from tests.unit_tests.checkpoint.files import fill_disk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _item(name: str, num_bytes: int | None) -> WriteItem:
    index = MetadataIndex(name)
    if num_bytes is None:
        return WriteItem(index, WriteItemType.BYTE_IO)
    size = torch.Size([num_bytes])
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), size), TensorProperties(dtype=torch.uint8), size)
    return WriteItem(index, WriteItemType.TENSOR, tensor_data=data)


def _names(parts: list[list[WriteItem]]) -> list[list[str]]:
    return [[item.index.fqn for item in part] for part in parts]


def _state(value: float) -> dict[str, Any]:
    base = torch.arange(1000.0) * value
    state: dict[str, Any] = {f"t{index}": base[index : 100 + 7 * index] for index in range(9)}
    state["column"] = base.view(10, 100)[:, 3]
    return {**state, "object": {"value": value}, "empty": torch.empty(0, 2), "scalar": base[5]}


def _save(path: Path, state: dict[str, Any], num_threads: int) -> None:
    staging = folder.staging_path(path, "0a")
    dcp.save(state, storage_writer=CheckpointWriter(staging, num_threads), no_dist=True)
    folder.commit(staging, path)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "LEAST_FILE_BYTES", 1)


def test_files_hold_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "LEAST_FILE_BYTES", 10)
    items = [_item("a", 3), _item("object", None), _item("b", 9), _item("c", 5), _item("d", 4), _item("e", 2)]
    assert _names(data_files.split(items, 1)) == [["object", "a", "b", "c", "d", "e"]]
    # 9 | 5; then 4 to the second, 3 to one of two at 9, and 2 to the other: 12 and 11 bytes.
    first, second = _names(data_files.split(items, 8))
    assert {*first, *second} == {"a", "object", "b", "c", "d", "e"} and first[0] == "object"
    assert (first, second) == (["object", "a", "b"], ["c", "d", "e"])
    assert _names(data_files.split(items[:2], 8)) == [["object", "a"]]
    assert _names(data_files.split(items[1:2], 8)) == [["object"]]


@pytest.mark.usefixtures("small_files")
def test_stock_dcp_reads_several_files(tmp_path: Path) -> None:
    _save(tmp_path / "c", _state(2.0), 3)
    files = {"__0_0.distcp", "__0_1.distcp", "__0_2.distcp", ".metadata"}
    assert (folder.read_manifest(tmp_path / "c") or {}).keys() == files
    assert folder.verify_files(tmp_path / "c", checksums=True, needs_manifest=True) == []
    target = _state(-1.0)
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    expected = _state(2.0)
    assert target["object"] == expected.pop("object")
    assert all(torch.equal(target[name], tensor) for name, tensor in expected.items())


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("suffix", ["__0_0.distcp", "__0_2.distcp"])
def test_an_error_of_one_thread_fails_the_save(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, suffix)
    with pytest.raises(CheckpointException) as raised:
        _save(tmp_path / "c", _state(1.0), 3)
    error = raised.value.failures[0][0]
    assert isinstance(error, CheckpointError) and "got No space left on device" in str(error)
    assert not (tmp_path / "c").exists()


@pytest.mark.usefixtures("small_files")
def test_other_threads_stop_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, failed, save = [], threading.Event(), FileStream.save

    def fail_in_one(self: FileStream, tensor: torch.Tensor) -> None:
        saved.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
            failed.set()
            raise OSError(5, "Input/output error")
        assert failed.wait(10)
        time.sleep(0.05)
        save(self, tensor)

    monkeypatch.setattr(FileStream, "save", fail_in_one)
    with pytest.raises(CheckpointException, match="got Input/output error with"):
        _save(tmp_path / "c", _state(1.0), 2)
    assert len(saved) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_part_of_a_storage_is_saved_without_a_copy(dtype: torch.dtype) -> None:
    base = torch.arange(24).to(dtype)
    for part in (base[5:17], base.view(4, 6)[1:3], base[3], base):
        alone = data_files._alone(part)
        assert alone.data_ptr() == part.data_ptr() and alone.untyped_storage().size() == part.nbytes
        assert alone.dtype == dtype and alone.shape == part.shape
        assert torch.equal(alone.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8))


def test_what_lies_in_pieces_is_copied() -> None:
    base = torch.arange(24.0).view(4, 6)
    for part in (base[:, 1:3], base[:, :1], torch.complex(base, base)[1:].conj(), base[:0]):
        alone = data_files._alone(part)
        assert torch.equal(alone, part) and alone.untyped_storage().size() == part.nbytes


def test_memory_for_copies_is_used_again() -> None:
    memory = data_files._HostMemory(48)
    first = memory.copy(torch.arange(12.0).view(3, 4).t())
    assert torch.equal(first, torch.arange(12.0).view(3, 4).t()) and first.is_contiguous()
    second = memory.copy(torch.ones(3, dtype=torch.int64))
    assert second.data_ptr() == first.data_ptr() and second.eq(1).all()


@pytest.mark.parametrize(("cores", "expected"), [(32, [4, 4, 4]), (6, [3, 3, 4]), (2, [1, 1, 2]), (None, [1, 1, 1])])
def test_ranks_of_a_host_share_its_cores(
    cores: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert [write.num_threads(["a", "a", "b"], index) for index in range(3)] == expected


# --- threads ---


def test_results_come_in_order() -> None:
    barrier = threading.Barrier(3)

    def call(index: int) -> tuple[int, threading.Thread]:
        barrier.wait(10)  # all of them at once
        time.sleep(0.01 * (3 - index))
        return index, threading.current_thread()

    results = in_threads([partial(call, index) for index in range(3)])
    assert [index for index, _ in results] == [0, 1, 2] and results[0][1] is threading.main_thread()
    assert len({thread for _, thread in results}) == 3
    assert in_threads([]) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_error_is_raised_when_all_have_ended(failing: int) -> None:
    ended = []

    def call(index: int) -> None:
        time.sleep(0.0 if index == failing else 0.05)
        ended.append(index)
        raise OSError(f"of {index}")

    with pytest.raises(OSError, match=f"^of {failing}$"):
        in_threads([partial(call, index) for index in range(2)])
    assert sorted(ended) == [0, 1]
