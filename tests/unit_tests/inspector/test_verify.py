# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt verify`` finds damage of every file, and saves that lost data, with and without a manifest."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from megatron.core.distributed.fsdp.experimental.checkpoint.folder import FileRecord, write_manifest
from megatron.inspector.command import main
from megatron.inspector.verify import find_problems
from tests.unit_tests.checkpoint.files import Evil, save, save_chunks, tensor_metadata, write_metadata


def _save(folder: Path, *, manifest: bool) -> Path:
    save(folder, {"w": torch.randn(40, 3), "b": torch.ones(2), "x": {"y": (1, "text")}})
    if manifest:
        _write_manifest(folder)
    return folder


def _write_manifest(folder: Path) -> None:
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    records = {name: FileRecord(len(data), f"{zlib.crc32(data):08x}") for name, data in contents.items()}
    write_manifest(folder, records)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: bool) -> None:
    folder = _save(tmp_path / "c", manifest=manifest)
    assert main(["verify", str(folder)]) == 0 and main(["verify", str(folder), "--no-checksums"]) == 0
    assert capsys.readouterr().out == f"{folder}: whole, by sizes and contents\n{folder}: whole, by sizes\n"


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("damage", ["removed", "truncated", "zeroed", "empty"])
def test_damage_of_every_file_is_named(tmp_path: Path, manifest: bool, damage: str) -> None:
    whole = _save(tmp_path / "c", manifest=manifest)
    for file in sorted(whole.iterdir()):
        if file.name == "manifest.json" and damage == "removed":
            continue  # then it is a checkpoint by another writer, and whole
        content = file.read_bytes()
        file.unlink()
        if damage != "removed":
            file.write_bytes({"truncated": content[:-20], "zeroed": bytes(len(content)), "empty": b""}[damage])
        for checksums in (True, False):
            problems = find_problems(whole, checksums=checksums)
            assert problems and all(str(file) in problem for problem in problems), (file.name, problems)
        assert main(["verify", str(whole)]) == 1
        file.write_bytes(content)
    assert find_problems(whole, checksums=True) == []


def test_every_flipped_byte_is_found_with_a_manifest(tmp_path: Path) -> None:
    folder = _save(tmp_path / "c", manifest=True)
    for file in sorted(folder.iterdir()):
        content = bytearray(file.read_bytes())
        # Prime steps; each run of the loop reads the whole checkpoint.
        for position in range(0, len(content), 97 if file.suffix else 41):
            content[position] ^= 16
            file.write_bytes(content)
            problems = find_problems(folder, checksums=True)
            # A name in the manifest may become another name: then that is a file that is not there.
            assert problems and (file.name == "manifest.json" or str(file) in "\n".join(problems)), (file, position)
            content[position] ^= 16
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("key", "value"), [("b", torch.ones(2).numpy().tobytes()), ("x.y", b"text")], ids=["tensor", "byte entry"]
)
def test_a_flipped_byte_of_a_value_is_found_without_a_manifest(tmp_path: Path, key: str, value: bytes) -> None:
    folder = _save(tmp_path / "c", manifest=False)
    infos = {index.fqn: info for index, info in tensor_metadata(folder).storage_data.items()}
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(value, infos[key].offset)] ^= 1
    file.write_bytes(content)
    record = "data.pkl" if key == "x.y" else "data/0"
    problems = find_problems(folder, checksums=True)
    assert f"expected the checksum in its archive, got another for archive/{record}" in problems[0]
    assert all(problem.startswith(key) and str(file) in problem for problem in problems)
    if key == "b":
        assert find_problems(folder, checksums=False) == []  # bytes were not asked for


def test_stray_files_are_named(tmp_path: Path) -> None:
    for manifest in (True, False):
        folder = _save(tmp_path / str(manifest), manifest=manifest)
        (folder / "__1_0.distcp").write_bytes(b"of an older save")
        (problem,) = find_problems(folder, checksums=True)
        assert str(folder / "__1_0.distcp") in problem and "this one besides" in problem


@pytest.mark.parametrize(
    ("boxes", "texts"),
    [
        ([((0,), (3,)), ((4,), (4,))], ["w: expected chunks of 8 elements together, got 7"]),
        ([((0,), (4,)), ((3,), (4,))], ["w: expected chunks that do not overlap, got those at (0,) and (3,)"]),
        ([((0,), (0,)), ((0,), (8,))], []),
    ],
)
def test_gaps_and_overlaps_are_named(
    tmp_path: Path, boxes: list[tuple[list[int], list[int]]], texts: list[str]
) -> None:
    folder = save_chunks(tmp_path / "c", "w", torch.randn(8), boxes)
    assert find_problems(folder, checksums=True) == texts


def test_what_a_save_lost_or_mixed_up_is_named(tmp_path: Path) -> None:
    folder = _save(tmp_path / "c", manifest=False)
    metadata = tensor_metadata(folder)
    lost = next(index for index in metadata.storage_data if index.fqn == "w")
    del metadata.storage_data[lost]
    metadata.state_dict_metadata["b"].properties = TensorProperties(dtype=torch.float16)  # type: ignore[union-attr]
    write_metadata(folder, metadata)
    problems = find_problems(folder, checksums=False)
    assert any(problem.startswith("w at (0, 0): expected to find where it is stored") for problem in problems)
    assert any(problem.startswith("b at (0,): expected torch.float16 of (2,)") for problem in problems)
    assert len(problems) == 2


def test_refused_entries_are_named_and_not_executed(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"x": {"y": Evil(tmp_path / "witness")}})
    (problem,) = find_problems(folder, checksums=True)
    assert problem.startswith("x.y in ") and "system" in problem and not (tmp_path / "witness").exists()


def test_no_folder_is_an_error_rather_than_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "expected the folder of a checkpoint" in capsys.readouterr().err
