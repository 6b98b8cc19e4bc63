# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint into tensors, once its files and keys have been checked on all ranks.

It knows no model: which key belongs to which tensor is said by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .errors import CheckpointError
from .folder import FORMAT, read_manifest, verify_files
from .planner import CoveringLoadPlanner
from .ranks import Ranks
from .reader import SafeReader, load_entry, load_metadata

Verification = Literal["sizes", "checksums"]
_LISTED = 20
"""Keys that an error lists."""


@dataclass
class LoadReport:
    """What a load did not do exactly as saved, and what it brought besides tensors.

    Attributes:
        extra: the user's own values, as given to the save.
        missing: keys that were wanted and are not in the checkpoint; left as they were.
        unexpected: keys of the checkpoint that nobody wanted.
        cast: keys whose tensors were saved in another floating-point dtype.
    """

    extra: Any = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)


class OpenCheckpoint:
    """A checkpoint whose files have been verified and whose metadata has been read, on every rank.

    Args:
        path: its folder.
        ranks: who reads it; every rank must open it.
        verify: compare sizes only, or the checksums of all files, too.

    Raises:
        CheckpointError: it is no committed checkpoint, or damaged; on every rank.
    """

    def __init__(self, path: Path, ranks: Ranks, verify: Verification = "sizes") -> None:
        if verify not in ("sizes", "checksums"):
            raise ValueError(f"verify: expected 'sizes' or 'checksums', got {verify!r}.")
        self.path = path
        self.ranks = ranks
        ranks.first(lambda: _require_whole(path, verify == "checksums"), f"load of {path}")
        with ranks.together(f"load of {path}"):
            self.metadata: Metadata = load_metadata(path)

    @cached_property
    def keys(self) -> frozenset[str]:
        """All keys."""
        return frozenset(self.metadata.state_dict_metadata)

    def is_tensor(self, key: str) -> bool:
        """Whether there is a tensor of this key."""
        return isinstance(self.metadata.state_dict_metadata.get(key), TensorStorageMetadata)

    def objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Read byte entries, on every rank.

        Raises:
            CheckpointError: one is damaged, or holds what is not read; on every rank.
        """
        found: dict[str, Any] = {}
        with self.ranks.together(f"load of {self.path}"):
            found.update((key, load_entry(self.path, self.metadata, key)) for key in keys)
        return found

    def check(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        strict: bool,
        sources: Mapping[str, str] | None = None,
        entries: Iterable[str] = (),
        others: Iterable[str] = (),
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
    ) -> LoadReport:
        """Compare what is wanted with what is there.

        Args:
            tensors: what to read, by key; the same keys on every rank.
            strict: refuse missing and unexpected keys.
            sources: the checkpoint's own keys of tensors, where they may differ.
            entries: byte entries that are wanted, too.
            others: keys that may be there.
            missing: what else is wanted and is not there.
            unexpected: what else is there and is not wanted.

        Raises:
            CheckpointError: shapes or kinds differ, or, if strict, keys; lists all of them, on every rank.
        """
        entries = list(entries)
        saved = {key: (sources or {}).get(key, key) for key in (*tensors, *entries)}
        report = LoadReport(
            missing=sorted([*missing, *(key for key, source in saved.items() if source not in self.keys)]),
            unexpected=sorted({*unexpected, *self.keys} - set(saved.values()) - set(others)),
        )
        problems = [f"{key}: expected a byte entry, got a tensor" for key in entries if self.is_tensor(key)]
        for key, tensor in tensors.items():
            problem, is_cast = _misfit(self.metadata.state_dict_metadata.get(saved[key]), tensor)
            if problem:
                problems.append(f"{key}: {problem}")
            if is_cast:
                report.cast.append(key)
        if strict:
            problems += [f"{key}: not in the checkpoint" for key in report.missing]
            problems += [f"{key}: in the checkpoint, and not in the model or optimizer" for key in report.unexpected]
        with self.ranks.together(f"load of {self.path}"):
            if problems:
                more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
                raise CheckpointError(
                    f"load of {self.path}: expected a checkpoint of this model and optimizer, got {len(problems)} "
                    f"differences: {'; '.join(problems[:_LISTED])}{more}. Build the same model; load_checkpoint "
                    "leaves out keys that are missing or unexpected with strict=False."
                )
        return report

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read tensors in place; each rank what it holds of them. Every key must be there.

        Raises:
            CheckpointError: a file is damaged in a way that its size does not show; on every rank. Tensors that were
                read before it have changed.
        """
        with self.ranks.together(f"load of {self.path}"):
            load(
                dict(tensors),
                storage_reader=SafeReader(self.path, self.metadata),
                planner=CoveringLoadPlanner(tensors),
                no_dist=True,
            )


def _require_whole(path: Path, checksums: bool) -> None:
    metadata = load_metadata(path)
    least: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        least[info.relative_path] = max(least.get(info.relative_path, 0), info.offset + info.length)
    is_ours = getattr(metadata.storage_meta, "checkpoint_id", None) == FORMAT
    if checksums and read_manifest(path) is None:
        raise CheckpointError(
            f"load of {path}: expected a manifest, got none: its writer kept no checksums that could be compared. Load "
            "it without that."
        )
    problems = verify_files(path, checksums=checksums, least_sizes=least, needs_manifest=is_ours)
    if problems:
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise CheckpointError(
            f"load of {path}: expected a whole checkpoint, got {'; '.join(problems[:_LISTED])}{more}. Restore it, or "
            "load an earlier one."
        )


def _misfit(entry: Any, tensor: torch.Tensor) -> tuple[str, bool]:
    """Return what is wrong with a saved entry for a tensor, and whether reading it casts."""
    if entry is None:
        return "", False
    if not isinstance(entry, TensorStorageMetadata):
        return "expected a tensor, got a byte entry", False
    if entry.size != tensor.shape:
        return f"expected shape {tuple(tensor.shape)}, got {tuple(entry.size)}", False
    saved = entry.properties.dtype
    if saved == tensor.dtype:
        return "", False
    if saved.is_floating_point and tensor.dtype.is_floating_point:
        return "", True
    return f"expected {tensor.dtype}, got {saved}", False
