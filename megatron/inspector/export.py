# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt export``: writes a checkpoint's model as safetensors, by its own names or Hugging Face's.

What the names of Llama are is said in ``llama.py``. Optimizer state and byte entries are left out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.layout import Box
from megatron.inspector.llama import Piece, llama_config, llama_pieces, model_arguments
from megatron.inspector.names import canonical
from megatron.inspector.opened import Checkpoint
from megatron.inspector.safetensors_file import EXPORT_DTYPES, Source, plan_shards, source_bytes, write_file
from megatron.inspector.text import bytes_text, dtype_text, progress

# First words of the keys that are not the model's, where the model's have no word of their own.
_NOT_MODEL = ("optimizer", "rng_state", "rerun_state_machine", "opt_param_scheduler", "args")
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Stored:
    """A tensor to write, from boxes of a checkpoint's tensors that follow each other.

    Attributes:
        checkpoint: where the boxes are.
        parts: key and box of each.
        shape: of the whole.
        dtype: of the whole, to which the boxes are converted.
    """

    checkpoint: Checkpoint
    parts: tuple[Piece, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self) -> Iterator[torch.Tensor]:
        for part in self.parts:
            for box in self.checkpoint.slab_boxes(part.key, part.box):
                yield self.checkpoint.read(part.key, box).to(self.dtype)


def export(
    folder: Path,
    output: Path,
    *,
    layout: str,
    dtype: str | None,
    max_shard_bytes: int,
    max_memory: int,
    given: Mapping[str, object],
) -> int:
    """Write a checkpoint's model into a new folder.

    Args:
        folder: the checkpoint's.
        output: must not exist.
        layout: "safetensors" or "hf".
        dtype: one of ``EXPORT_DTYPES``, or None.
        max_shard_bytes: of one file.
        max_memory: bytes for tensors.
        given: the model's arguments that were named by flags.

    Returns:
        0.

    Raises:
        CheckpointError: no model, keys that the layout does not know, or damage; nothing is left in ``output``.
    """
    if output.exists():
        raise CheckpointError(
            f"{output}: expected a folder that does not exist yet, got one. Name another, or move it."
        )
    checkpoint = Checkpoint(folder, max_memory)
    keys = model_keys(checkpoint)
    config: dict[str, object] = {}
    if layout == "hf":
        arguments = model_arguments(checkpoint, given)
        shapes = {name: tuple(checkpoint.tensors[key].size) for name, key in keys.items()}
        parts = llama_pieces(shapes, keys, arguments)
        config = llama_config(shapes, arguments)
    elif given:
        raise CheckpointError(f"{', '.join(given)}: expected only with --format hf, got --format safetensors.")
    else:
        parts = {name: _whole(checkpoint, key) for name, key in keys.items()}
    sources = {name: _stored(checkpoint, pieces, dtype) for name, pieces in parts.items()}
    if layout == "hf":
        config["dtype"] = dtype_text(next(iter(sources.values())).dtype)
    _write_folder(output, sources, max_shard_bytes, config)
    total = sum(source_bytes(source) for source in sources.values())
    print(f"{output}: {len(sources)} tensors, {bytes_text(total)}")
    return 0


def model_keys(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the keys of the model's tensors by their names without prefixes.

    Raises:
        CheckpointError: there are none, or two have one name.
    """
    keys = [key for key in checkpoint.tensors if key.startswith("model.")]
    keys = keys or [key for key in checkpoint.tensors if key.split(".")[0].split("/")[0] not in _NOT_MODEL]
    keys = [key for key in keys if "_extra_state" not in key]
    found = {canonical(key): key for key in keys}
    if not keys or len(found) != len(keys):
        got = "keys that differ only in prefixes" if keys else "none"
        raise CheckpointError(
            f"{checkpoint.folder}: expected tensors of a model, got {got}. `mfsdp-ckpt list` shows all."
        )
    return found


def _whole(checkpoint: Checkpoint, key: str) -> list[Piece]:
    size = tuple(checkpoint.tensors[key].size)
    return [Piece(key, Box((0,) * len(size), size), size)]


def _stored(checkpoint: Checkpoint, pieces: list[Piece], dtype: str | None) -> _Stored:
    saved = checkpoint.tensors[pieces[0].key].properties.dtype
    wanted = EXPORT_DTYPES[dtype] if dtype and saved.is_floating_point else saved
    first = pieces[0].shape
    shape = (sum(piece.shape[0] for piece in pieces), *first[1:]) if first else ()
    return _Stored(checkpoint, tuple(pieces), shape, wanted)


def _write_folder(output: Path, sources: Mapping[str, Source], max_shard_bytes: int, config: dict[str, object]) -> None:
    staging = output.with_name(output.name + ".incomplete")
    staging.mkdir(parents=True)
    total = sum(source_bytes(source) for source in sources.values())
    try:
        shards = plan_shards(sources, max_shard_bytes)
        with progress(total, "exported") as bar:
            for shard in shards:
                for count in write_file(staging / shard.file, sources, shard.names):
                    bar.update(count)
        index = {
            "metadata": {"total_size": total, "total_parameters": sum(math.prod(s.shape) for s in sources.values())},
            "weight_map": {name: shard.file for shard in shards for name in shard.names},
        }
        (staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        if config:
            (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging)
        raise
