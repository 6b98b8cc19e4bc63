# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`CheckpointWriter`: DCP's file writer, with every file fsynced, checksummed and listed in a manifest.

The files are DCP's own, so that stock PyTorch reads them. It writes into a staging folder and never renames that:
committing (`folder.commit`) is the caller's. It does not plan what is written.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .data_files import planned_bytes, write_items
from .errors import CheckpointError
from .folder import FORMAT, METADATA, FileRecord, step, write_error, write_manifest
from .stream import SyncedFiles

_NAMED = 5
"""Missing items that an error names."""


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint into an empty folder, as the `storage_writer` of one `dcp.save` on all ranks.

    Checksums travel with the results that DCP gathers anyway.
    """

    def __init__(self, staging: str | os.PathLike[str], num_threads: int = 1) -> None:
        """Prepare to write into `staging`, which need not exist, up to `num_threads` files of this rank at once."""
        super().__init__(staging, sync_files=False, overwrite=False)  # `SyncedFiles` syncs.
        self._files = SyncedFiles()
        self._num_threads = num_threads
        self.fs = self._files

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this process's role from DCP.

        Raises:
            CheckpointError: DCP is to save without collectives, so that no rank could write a manifest.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not self.use_collectives:
            raise CheckpointError(
                f"{self.folder}: expected a save with collectives, got use_collectives=False. Leave it at True."
            )

    def storage_meta(self) -> StorageMeta | None:
        """Return what names this save: the format in place of the staging folder, which will be gone."""
        return StorageMeta(checkpoint_id=FORMAT, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder.

        Raises:
            CheckpointError: that is impossible, or something lies in it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = sorted(path.name for path in self.folder.iterdir())
        except OSError as error:
            raise write_error(self.folder, error) from error
        if names:
            raise CheckpointError(
                f"{self.folder}: expected an empty folder to write a checkpoint into, got {len(names)} files in it, "
                f"e.g. {names[0]}. Use a new staging path for each save."
            )
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's files.

        Raises:
            CheckpointError: all tensors together need more bytes than are free.
        """
        needed, disk = sum(planned_bytes(plan.items) for plan in plans), shutil.disk_usage(self.folder)
        if disk.total and needed > disk.free:  # Some network file systems know no sizes and say 0.
            raise CheckpointError(
                f"{self.folder}: expected {needed} bytes free for the checkpoint, got {disk.free}. Free space there, "
                "or save elsewhere."
            )
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and fsync this rank's files.

        Raises:
            CheckpointError: it cannot be written, or an item was left out.
        """
        done: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            try:
                prefix = plan.storage_data.prefix
                results = write_items(self.folder, prefix, plan.items, planner, self._files, self._num_threads)
            except Exception as error:
                # torch.save hides the first error of a stream under one of its own about positions.
                cause = self._files.error or error
                if not isinstance(cause, OSError):
                    raise
                raise write_error(self.folder, cause, planned_bytes(plan.items)) from error
            step("data_synced")
        _check_complete(self.folder, {item.index for item in plan.items}, {result.index for result in results})
        written = [_FileWritten(MetadataIndex(name), 0, None, record) for name, record in self._files.records.items()]
        done.set_result([*results, *written])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and the manifest; DCP calls it on the coordinator.

        Raises:
            CheckpointError: they cannot be written, or a planned chunk was not.
        """
        flat = [result for results_of_rank in results for result in results_of_rank]
        checksums = {result.index.fqn: result.record for result in flat if isinstance(result, _FileWritten)}
        items = [result for result in flat if not isinstance(result, _FileWritten)]
        _check_complete(self.folder, _indices(metadata), {result.index for result in items})
        try:
            super().finish(metadata, [items])
        except OSError as error:
            raise write_error(self.folder / METADATA, error) from error
        step("metadata_synced")
        write_manifest(self.folder, {**checksums, METADATA: self._files.records[METADATA]})


@dataclass(frozen=True)
class _FileWritten(WriteResult):
    """A file's checksum on its way to the coordinator; its name is the index's. It does not reach the metadata."""

    record: FileRecord


def _indices(metadata: Metadata) -> set[MetadataIndex]:
    """Return the index of every chunk and object that `metadata` promises."""
    found = set()
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found |= {MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks}
        else:
            found.add(MetadataIndex(fqn))
    return found


def _check_complete(folder: Path, planned: set[MetadataIndex], written: set[MetadataIndex]) -> None:
    missing = sorted(index.fqn for index in planned - written)
    if missing:
        raise CheckpointError(
            f"{folder}: expected all {len(planned)} planned items to be written, got {len(missing)} not written: "
            f"{', '.join(missing[:_NAMED])}{', ...' if len(missing) > _NAMED else ''}. Save again."
        )
