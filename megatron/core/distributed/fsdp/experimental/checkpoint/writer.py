# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`CheckpointWriter`: DCP's file writer, with every file fsynced, checksummed and listed in a manifest.

The files are DCP's own, so that stock PyTorch reads them. It writes into a staging folder and never renames that:
committing (`folder.commit`) is the caller's. It does not plan what is written, and splits no items.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .errors import CheckpointError
from .folder import FORMAT, METADATA, FileRecord, step, write_error, write_manifest

_NAMED = 5
"""Missing items that an error names."""


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint into an empty folder, as the `storage_writer` of one `dcp.save` on all ranks.

    One thread, since DCP loses the errors of others. Checksums travel with the results that DCP gathers anyway.
    """

    def __init__(self, staging: str | os.PathLike[str]) -> None:
        """Prepare to write into `staging`, which need not exist."""
        super().__init__(staging, thread_count=1, sync_files=False, overwrite=False)  # `_Files` syncs.
        self._files = _Files()
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
        """Name each rank's file.

        Raises:
            CheckpointError: all tensors together need more bytes than are free.
        """
        needed, disk = sum(_planned_bytes(plan.items) for plan in plans), shutil.disk_usage(self.folder)
        if disk.total and needed > disk.free:  # Some network file systems know no sizes and say 0.
            raise CheckpointError(
                f"{self.folder}: expected {needed} bytes free for the checkpoint, got {disk.free}. Free space there, "
                "or save elsewhere."
            )
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and fsync this rank's file.

        Raises:
            CheckpointError: it cannot be written, or an item was left out.
        """
        done: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            try:
                results = super().write_data(plan, planner).value()
            except Exception as error:
                # torch.save hides the first error of a stream under one of its own about positions.
                cause = self._files.error or error
                if not isinstance(cause, OSError):
                    raise
                raise write_error(self.folder, cause, _planned_bytes(plan.items)) from error
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


class _Stream(io.RawIOBase):
    """A file that is being written, its size and checksum so far, and its first error."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.size = 0
        self.checksum = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        view = memoryview(data)
        self.checksum = zlib.crc32(view, self.checksum)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        """Bring what was written to the disk and close the file, once."""
        if self._file.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


class _Files(FileSystem):
    """DCP's access to files: each is synced before it counts as written, and then has a record."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a new file for writing; after the block it is on the disk."""
        assert mode == "wb", "a writer only writes"
        stream = _Stream(Path(path))
        try:
            step("file_opened")
            yield stream
        finally:
            self.error = self.error or stream.error
            stream.close()
        self.records[Path(path).name] = FileRecord(stream.size, f"{stream.checksum:08x}")

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and its record."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


def _planned_bytes(items: Sequence[WriteItem]) -> int:
    """Return the bytes of the tensors among `items`; what objects take is not known before they are pickled."""
    tensors = [item.tensor_data for item in items if item.tensor_data is not None]
    return sum(math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize for tensor in tensors)


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
