# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Nothing in a checkpoint is executed: crafted pickles in every place are refused by name; honest ones are read."""

from __future__ import annotations

import argparse
import io
import pickle
import random
import re
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint.reader import (
    SafeReader,
    load_entry,
    load_metadata,
    read_box,
)
from megatron.core.distributed.fsdp.experimental.checkpoint.unpickle import load_torch_file, unpickle_metadata

from .files import Evil, save, save_item, write_metadata


@pytest.mark.parametrize("protocol", range(6))
def test_metadata_that_would_execute_is_refused(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "witness"
    save(tmp_path / "c", {"w": torch.ones(2)})
    # Protocols below 2 name more than classes for any object.
    inside = Metadata({}, planner_data={"w": Evil(witness)}, storage_data={}) if protocol >= 2 else [Evil(witness)]
    for evil in (Evil(witness), inside):
        (tmp_path / "c/.metadata").write_bytes(pickle.dumps(evil, protocol))
        with pytest.raises(CheckpointError, match=r"c/\.metadata: expected plain data, got .* names \w+\.system"):
            load_metadata(tmp_path / "c")
        with pytest.raises(CheckpointError, match="system"):
            SafeReader(tmp_path / "c")
    assert not witness.exists()


def test_byte_entry_that_would_execute_is_refused(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    save(tmp_path / "c", {"good": 1, "args": {"bad": Evil(witness)}})
    metadata = load_metadata(tmp_path / "c")
    assert load_entry(tmp_path / "c", metadata, "good") == 1
    with pytest.raises(CheckpointError, match=r"args\.bad in .*__0_0\.distcp: .* names \w+\.system"):
        load_entry(tmp_path / "c", metadata, "args.bad")
    with pytest.raises(BaseException, match=r"args\.bad in .* names \w+\.system"):  # wrapped by DCP
        dcp.load({"args": {"bad": None}}, storage_reader=SafeReader(tmp_path / "c"))
    assert not witness.exists()


def test_tensor_file_that_would_execute_is_refused(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2]), [chunk])
    save_item(tmp_path / "c", "w", [torch.ones(2), Evil(witness)], entry)
    metadata = load_metadata(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"w at \(0,\) in .*__0_0\.distcp: .* names \w+\.system"):
        read_box(tmp_path / "c", metadata, "w", [0], [2])
    with pytest.raises(BaseException, match=r"names \w+\.system"):
        dcp.load({"w": torch.zeros(2)}, storage_reader=SafeReader(tmp_path / "c"))
    assert not witness.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_protocol_of_an_evil_archive_is_refused(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "witness"
    stream = io.BytesIO()
    torch.save({"a": Evil(witness)}, stream, pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r"key in file: .* names \w+\.system"):
        load_torch_file(stream, "key in file")
    assert not witness.exists()


def test_a_class_of_torch_that_is_not_data_is_refused() -> None:
    stream = io.BytesIO()
    torch.save(torch.nn.Linear(1, 1), stream)
    with pytest.raises(CheckpointError, match=r"names torch\.nn\.modules\.linear\.Linear"):
        load_torch_file(stream, "key in file")


def _set_on_class(cls: type, attribute: str, value: object) -> bytes:
    """Pickle by hand: BUILD with slots on a class sets the class's attribute."""
    body = pickle.dumps((None, {attribute: value}), 2)[2:-1]
    return b"\x80\x02" + f"c{cls.__module__}\n{cls.__name__}\n".encode() + body + b"b."


def test_a_pickle_cannot_change_the_classes_of_metadata() -> None:
    for attribute in ("__init__", "added"):
        with pytest.raises(CheckpointError, match="a change to Metadata"):
            unpickle_metadata(io.BytesIO(_set_on_class(Metadata, attribute, 3)), "file")
    assert not hasattr(Metadata, "added") and callable(Metadata.__init__)
    assert Metadata({}).state_dict_metadata == {}


@pytest.mark.parametrize("name", ["getattr", "_get_layout"])
def test_stand_ins_do_only_what_metadata_needs(name: str) -> None:
    class Call:
        def __reduce__(self) -> tuple[object, ...]:
            if name == "getattr":
                return getattr, (torch.Size, "__mro__")
            return torch.serialization._get_layout, ("torch.serialization",)

    with pytest.raises(CheckpointError, match="file: expected the metadata of a DCP checkpoint"):
        unpickle_metadata(io.BytesIO(pickle.dumps(Call())), "file")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_honest_metadata_is_read_the_same_as_by_pickle(tmp_path: Path, protocol: int) -> None:
    save(tmp_path / "c", {"w": torch.ones(2, 3).bfloat16(), "s": torch.tensor(1), "n": {"x": 1}})
    honest = pickle.loads((tmp_path / "c/.metadata").read_bytes())
    read = unpickle_metadata(io.BytesIO(pickle.dumps(honest, protocol)), "file")
    assert read.state_dict_metadata == honest.state_dict_metadata
    assert read.storage_data == honest.storage_data and read.planner_data == honest.planner_data
    assert read.storage_data[MetadataIndex("w", [0, 0])].length > 0
    assert read.storage_meta.checkpoint_id == PurePosixPath(tmp_path / "c")


def test_entries_that_training_saves_are_read(tmp_path: Path) -> None:
    state = {
        "args": argparse.Namespace(lr=1e-3, params_dtype=torch.bfloat16, backend=AttnBackend.auto, save=tmp_path),
        "python_rng": random.getstate(),
        "numpy_rng": np.random.get_state(),
        "scalar": np.float32(2.5),
        "ints": np.arange(4, dtype=np.uint32),
        "betas": (0.9, 0.95),
        "none": None,
        "set": frozenset([1]),
        "stream": io.BytesIO(b"extra state"),
    }
    save(tmp_path / "c", state)
    metadata = load_metadata(tmp_path / "c")
    before = torch.serialization.get_safe_globals()
    read = {key: load_entry(tmp_path / "c", metadata, key) for key in state}
    assert set(torch.serialization.get_safe_globals()) == set(before)
    args = read["args"]
    assert isinstance(args, argparse.Namespace)
    assert args.backend is AttnBackend.auto and args.params_dtype is torch.bfloat16 and str(args.save) == str(tmp_path)
    assert read["python_rng"] == state["python_rng"] and read["betas"] == (0.9, 0.95) and read["none"] is None
    assert np.array_equal(read["numpy_rng"][1], state["numpy_rng"][1])  # type: ignore[index]
    assert read["scalar"] == state["scalar"] and np.array_equal(read["ints"], state["ints"])  # type: ignore[arg-type]
    assert read["set"] == {1} and read["stream"].getvalue() == b"extra state"  # type: ignore[attr-defined]


def test_allowances_of_the_caller_stay(tmp_path: Path) -> None:
    save(tmp_path / "c", {"args": argparse.Namespace(a=1)})
    with torch.serialization.safe_globals([argparse.Namespace]):
        load_entry(tmp_path / "c", load_metadata(tmp_path / "c"), "args")
        assert argparse.Namespace in torch.serialization.get_safe_globals()


@pytest.mark.parametrize(
    "make",
    [
        lambda good: {"not": "metadata"},
        lambda good: Metadata({"w": 3}, storage_data={}),  # type: ignore[dict-item]
        lambda good: Metadata({}, storage_data=None),
        lambda good: Metadata(good.state_dict_metadata, storage_data={"w": 3}),
        lambda good: Metadata(good.state_dict_metadata, storage_data={next(iter(good.storage_data)): 3}),
    ],
)
def test_metadata_of_a_wrong_form_is_named(tmp_path: Path, make: object) -> None:
    save(tmp_path / "c", {"w": torch.ones(2)})
    assert callable(make)
    write_metadata(tmp_path / "c", make(load_metadata(tmp_path / "c")))
    with pytest.raises(CheckpointError, match=r"\.metadata: expected the metadata of a DCP checkpoint, got"):
        load_metadata(tmp_path / "c")


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "a/../../secret"])
def test_paths_outside_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    save(tmp_path / "c", {"w": torch.ones(2)})
    metadata = load_metadata(tmp_path / "c")
    next(iter(metadata.storage_data.values())).relative_path = path
    write_metadata(tmp_path / "c", metadata)
    with pytest.raises(CheckpointError, match=re.escape("a path outside the folder for w")):
        load_metadata(tmp_path / "c")


def test_plans_that_megatron_core_leaves_in_metadata_are_skipped() -> None:
    item = WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO)
    metadata = Metadata({}, storage_data={})
    metadata.all_local_plans = [SavePlan([item], planner_data=print)]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"names (builtins|__builtin__)\.print"):
        unpickle_metadata(io.BytesIO(pickle.dumps(metadata)), "file")
    metadata.all_local_plans = [SavePlan([item])]  # type: ignore[attr-defined]
    found = unpickle_metadata(io.BytesIO(pickle.dumps(metadata)), "file")
    assert not isinstance(found.all_local_plans[0], SavePlan) and not hasattr(found.all_local_plans[0], "__dict__")


def test_classes_that_stand_for_plans_cannot_be_changed() -> None:
    changes_the_class = b"\x80\x02ctorch.distributed.checkpoint.planner\nSavePlan\n}X\x01\x00\x00\x00aK\x01sb."
    with pytest.raises(CheckpointError, match="file: expected the metadata"):
        unpickle_metadata(io.BytesIO(changes_the_class), "file")
