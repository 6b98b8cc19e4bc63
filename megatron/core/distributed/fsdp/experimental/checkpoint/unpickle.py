# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads the pickles of a checkpoint through allow-lists, so that nothing in them is executed; opens no files itself."""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import pathlib
import pickle
import pickletools
import re
import threading
import types
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from .errors import CheckpointError

_METADATA_CLASSES: tuple[type, ...] = (
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.StorageMeta,
    dcp_metadata.TensorProperties,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata._MEM_FORMAT_ENCODING,
    _StorageInfo,
)
# Values that cannot be changed, or types that the interpreter itself keeps from being changed.
_METADATA_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.layout)},
}
# Enums and settings that Megatron keeps in its saved arguments and its rerun state, by the names that pickles have.
_MEGATRON_CLASSES = (
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.ModelType",
    "signal.Signals",
)
_loading = threading.Lock()


class _PurePath:
    """Stands for the classes of pathlib, all of which become paths that cannot touch a disk."""

    __slots__ = ()

    def __call__(self, *parts: str) -> pathlib.PurePath:
        return pathlib.PurePosixPath(*parts)


class _Layout:
    """Stands for torch.serialization._get_layout: a function could be given other defaults by a pickle."""

    __slots__ = ()

    def __call__(self, name: str) -> torch.layout:
        layout = getattr(torch, name.removeprefix("torch."))
        if not isinstance(layout, torch.layout):
            raise pickle.UnpicklingError(f"layout {name!r}")
        return layout


class _EnumMember:
    """Stands for getattr, by which some versions of Python pickle the members of an enum."""

    __slots__ = ()

    def __call__(self, owner: object, name: str) -> object:
        if owner is not dcp_metadata._MEM_FORMAT_ENCODING:
            raise pickle.UnpicklingError(f"getattr of {owner!r}")
        return dcp_metadata._MEM_FORMAT_ENCODING[name]


class _Ignored:
    """Stands for plans of the save, which megatron-core leaves in its metadata and nobody reads: keeps nothing."""

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> _Ignored:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


_STAND_INS: dict[tuple[str, str], Any] = {
    **{
        (module, name): _PurePath()
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    ("torch.serialization", "_get_layout"): _Layout(),
    ("builtins", "getattr"): _EnumMember(),
}
_PLANS = ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
_METADATA_GLOBALS = {
    **{("torch.distributed.checkpoint.planner", name): _Ignored for name in _PLANS},
    **{(cls.__module__, cls.__name__): cls for cls in _METADATA_CLASSES},
    **_METADATA_VALUES,
    **_STAND_INS,
}


class _RefusedClassError(pickle.UnpicklingError):
    """A pickle names something that is not on the allow-list."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _METADATA_GLOBALS[module, name]
        except KeyError:
            raise _RefusedClassError(f"{module}.{name}") from None


def unpickle_metadata(stream: BinaryIO, file: str) -> Any:
    """Read DCP's pickled metadata.

    Args:
        stream: positioned at the pickle.
        file: names it in errors.

    Raises:
        CheckpointError: the pickle is damaged, or names a class that metadata has no use for.
    """
    before = [dict(vars(cls)) for cls in _METADATA_CLASSES]
    try:
        value = _MetadataUnpickler(stream).load()
    except _RefusedClassError as error:
        raise CheckpointError(_refused(file, str(error))) from None
    except Exception as error:  # damaged pickles raise anything
        raise CheckpointError(
            f"{file}: expected the metadata of a DCP checkpoint, got what cannot be unpickled "
            f"({type(error).__name__}: {error}). The file is damaged: restore it, or load an earlier checkpoint."
        ) from error
    finally:
        # A pickle may set attributes of what it names, classes among them.
        changed = [_restored(cls, old) for cls, old in zip(_METADATA_CLASSES, before, strict=True)]
    if any(changed):
        raise CheckpointError(_refused(file, "a change to " + _METADATA_CLASSES[changed.index(True)].__name__))
    return value


def _restored(cls: type, before: dict[str, Any]) -> bool:
    """Undo what a pickle did to a class; return whether there was anything."""
    now = dict(vars(cls))
    added = [name for name in now if name not in before]
    replaced = [name for name, value in before.items() if now.get(name) is not value]
    for name in added:
        type.__delattr__(cls, name)
    for name in replaced:
        type.__setattr__(cls, name, before[name])
    return bool(added or replaced)


def _refused(where: str, what: str) -> str:
    return (
        f"{where}: expected plain data, got a pickle that names {what}; it was not executed. "
        "If you trust where the checkpoint comes from, save it again without that object."
    )


@functools.lru_cache(maxsize=1)
def _entry_globals() -> dict[str, Any]:
    """Return what byte entries may name besides what torch itself allows, by its name in a pickle."""
    functions = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    dtypes = [type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUMm"]
    return {
        "argparse.Namespace": argparse.Namespace,
        "types.SimpleNamespace": types.SimpleNamespace,
        "_io.BytesIO": io.BytesIO,
        "builtins.frozenset": frozenset,
        "builtins.slice": slice,
        "numpy.dtype": np.dtype,
        "numpy.ndarray": np.ndarray,
        **{f"numpy.{core}.multiarray.{name}": value for core in ("core", "_core") for name, value in functions.items()},
        **{f"numpy.dtypes.{dtype.__name__}": dtype for dtype in dtypes},
        **{f"{module}.{name}": value for (module, name), value in _STAND_INS.items() if module.startswith("pathlib")},
    }


def load_torch_file(data: BinaryIO, where: str) -> Any:
    """Read what torch.save wrote, tensors onto the CPU, with torch's own restricted unpickler and a small allow-list.

    Args:
        data: seekable, from its beginning.
        where: names the entry and its file in errors.

    Raises:
        CheckpointError: damaged, or it names a class that is not allowed.
    """
    names: set[str] = set()
    # torch keeps one allow-list for the process: add to it what this pickle needs, and leave what the caller put there.
    with _loading:
        try:
            names = _names(data)
            present = torch.serialization.get_safe_globals()
            missing: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
                (value, name) for name, value in _allowed(names).items() if value not in present
            ]
            data.seek(0)
            with torch.serialization.safe_globals(missing):
                return torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged archives and pickles raise anything
            raise CheckpointError(_reason(names, where, error)) from error


def _names(data: BinaryIO) -> set[str]:
    """Return the dotted names that the pickle of an archive by torch.save asks for."""
    with zipfile.ZipFile(data) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        record = archive.getinfo(name)
        # torch can leave checksums out, as zero, which zipfile would take for damage.
        record.CRC = record.CRC or None  # type: ignore[assignment]
        pickled = archive.read(record)
    found: set[str] = set()
    strings: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST"):
            module, _, attribute = str(argument).partition(" ")
            # Protocol 2 has the names of Python 2.
            module, attribute = NAME_MAPPING.get((module, attribute), (module, attribute))
            found.add(f"{IMPORT_MAPPING.get(module, module)}.{attribute}")
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(strings[-2:]))
        elif isinstance(argument, str):
            strings.append(argument)
    return found


def _allowed(names: Iterable[str]) -> dict[str, Any]:
    allowed = {}
    for name in names:
        if name in _MEGATRON_CLASSES:
            module, _, attribute = name.rpartition(".")
            allowed[name] = getattr(importlib.import_module(module), attribute)
        elif name in _entry_globals():
            allowed[name] = _entry_globals()[name]
    if "numpy.dtype" in allowed:  # by which numpy makes instances of its other dtype classes
        allowed.update({name: value for name, value in _entry_globals().items() if name.startswith("numpy.dtypes.")})
    return allowed


def _reason(names: set[str], where: str, error: Exception) -> str:
    known = {*_entry_globals(), *_MEGATRON_CLASSES}
    by_torch = ("torch.", "collections.", "_codecs.", "builtins.bytearray", "builtins.set", "builtins.complex")
    refused = [name for name in names if name not in known and not name.startswith(by_torch)]
    if refused and isinstance(error, pickle.UnpicklingError):
        return _refused(where, ", ".join(sorted(refused)))
    # torch says much before it comes to the point.
    lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()
    by_name = re.search(r"GLOBAL (\S+)", lines[0]) if lines else None
    if by_name:
        return _refused(where, by_name[1])
    return (
        f"{where}: expected what torch.save writes, got what cannot be read ({type(error).__name__}: "
        f"{lines[0] if lines else 'no more data'}). The file is damaged: restore it, or load an earlier checkpoint."
    )
