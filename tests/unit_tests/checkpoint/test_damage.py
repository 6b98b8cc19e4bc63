# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every file of a checkpoint is damaged in turn: a load names it, on both ranks, and runs nothing that was planted."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron.core.distributed.fsdp.experimental import CheckpointError, load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.experimental.checkpoint import folder as folders
from megatron.core.distributed.fsdp.experimental.checkpoint.manifest import checksum_file
from tests.unit_tests.checkpoint.files import Evil
from tests.unit_tests.checkpoint.test_load import CUT, OTHER, refused
from tests.unit_tests.checkpoint.zoo import assert_same, everything, make, train
from tests.unit_tests.launch import run_ranks

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json")
ENTRIES = ("extra", "info", "optimizer.settings", "scheduler", "rng.1")
SECONDS = 10
FLIPS = 24


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "sizes"),
    "halved": (lambda path: os.truncate(path, path.stat().st_size // 2), "sizes"),
    "emptied": (lambda path: os.truncate(path, 0), "sizes"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"0"), "sizes"),
    "removed": (Path.unlink, "sizes"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "sizes"),
    "zeroed": (_zero, "checksums"),
    "flipped": (_flip, "checksums"),
    "first byte": (lambda path: _flip(path, 0), "checksums"),
}


def _alone(function: Callable[[], object]) -> None:
    """Let the first rank do something to files."""
    dist.barrier()
    if dist.get_rank() == 0:
        function()
    dist.barrier()


def _whole(folder: str) -> Path:
    """Save a checkpoint that is copied to be damaged."""
    path = Path(folder, "whole")
    model, optimizer = make(CUT, "adam")
    train(model, optimizer, range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_checkpoint(model, optimizer, path, extra={"a": 1}, scheduler=scheduler)
    assert sorted(os.listdir(path)) == sorted(FILES)
    return path


def _damage(folder: str, name: str) -> None:
    whole, bad = _whole(folder), Path(folder, "bad")
    model, optimizer = make(OTHER, "adam")
    train(model, optimizer, range(1))
    for kind, (damage, verify) in DAMAGES.items():
        _alone(lambda: shutil.copytree(whole, bad))
        _alone(lambda damage=damage: damage(bad / name))  # type: ignore[misc]
        begin = time.monotonic()
        error = refused(model, optimizer, bad, verify=verify)
        assert str(bad / name) in error, f"{name} {kind}: {error}"
        assert time.monotonic() - begin < SECONDS
        _alone(lambda: shutil.rmtree(bad))
    load_checkpoint(model, optimizer, whole, verify="checksums")


@pytest.mark.parametrize("name", FILES)
def test_every_damage_of_a_file_is_found_before_anything_changes(name: str, tmp_path: Path) -> None:
    run_ranks(2, _damage, str(tmp_path), name, timeout_s=60)


def _add_strays(folder: str) -> None:
    path = _whole(folder)
    model, optimizer = make(OTHER, "adam")
    for name in ("__2_0.distcp", "__0_1.distcp", "notes.txt"):
        _alone(lambda name=name: (path / name).write_bytes(b"stray"))  # type: ignore[misc]
        error = refused(model, optimizer, path)
        assert f"{path / name}: expected only the files of manifest.json, got this one besides" in error
        _alone((path / name).unlink)
    load_checkpoint(model, optimizer, path)


def test_a_stray_file_is_found(tmp_path: Path) -> None:
    run_ranks(2, _add_strays, str(tmp_path))


def _flip_everywhere(folder: str, name: str) -> None:
    """Without checksums a flip may go unseen, but never ends in another error or on one rank."""
    whole, bad = _whole(folder), Path(folder, "bad")
    model, optimizer = make(OTHER, "adam")
    num_errors = 0
    for number in range(FLIPS):
        _alone(lambda: shutil.copytree(whole, bad))
        _alone(lambda number=number: _flip(bad / name, (number + 0.3) / FLIPS))  # type: ignore[misc]
        try:
            load_checkpoint(model, optimizer, bad)
        except CheckpointError:
            num_errors += 1
        counts: list[Any] = [None, None]
        dist.all_gather_object(counts, num_errors)
        assert counts[0] == counts[1]
        _alone(lambda: shutil.rmtree(bad))
    expected = load_checkpoint(model, optimizer, whole)
    assert expected.extra == {"a": 1}
    assert_same(model, optimizer, everything(model, optimizer))


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_byte_ends_in_another_error(name: str, tmp_path: Path) -> None:
    run_ranks(2, _flip_everywhere, str(tmp_path), name, timeout_s=60)


# --- what was planted ---


def _write_manifest(path: Path) -> None:
    """Make the checkpoint look whole: whoever plants something can do that, too."""
    names = [name for name in FILES if name != "manifest.json"]
    folders.write_manifest(path, {name: checksum_file(path / name) for name in names})


def _plant(path: Path, key: str, value: object) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    file = path / "__0_0.distcp"
    begin = file.stat().st_size
    file.write_bytes(file.read_bytes() + stream.getvalue())
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file.name, begin, len(stream.getvalue()))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    _write_manifest(path)


def _load_planted(folder: str) -> None:
    whole, bad, witness = _whole(folder), Path(folder, "bad"), Path(folder, "witness")
    model, optimizer = make(OTHER, "adam")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for key in ENTRIES:
        for value in (Evil(witness), Namespace(by_name=Evil(witness)), 3, Namespace(by_name=1), None):
            _alone(lambda: shutil.copytree(whole, bad))
            _alone(lambda key=key, value=value: _plant(bad, key, value))  # type: ignore[misc]
            error = refused(model, optimizer, bad, scheduler, verify="checksums")
            assert key in error and not witness.exists()
            if isinstance(value, Evil):
                assert "posix.system" in error
            _alone(lambda: shutil.rmtree(bad))
    _alone(lambda: shutil.copytree(whole, bad))
    _alone(lambda: (bad / ".metadata").write_bytes(pickle.dumps(Evil(witness))))
    _alone(lambda: _write_manifest(bad))
    error = refused(model, optimizer, bad)
    assert str(bad / ".metadata") in error and "posix.system" in error and not witness.exists()


def test_nothing_planted_is_run(tmp_path: Path) -> None:
    run_ranks(2, _load_planted, str(tmp_path))
