# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads a ``torch_dist`` checkpoint by megatron-core straight into the local pieces of sharded tensors.

Every box of a rank's own elements is a box of the file's tensors: no full tensor is put together, and nothing is sent.
It does not say which live groups and schedules get the settings in `TorchDistCheckpoint.common`, and writes no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint import (
    CheckpointError,
    OpenCheckpoint,
    Piece,
    Ranks,
    Verification,
    is_whole,
    load_entry,
    load_metadata,
    load_torch_file,
    read_pieces,
)
from megatron.core.distributed.fsdp.torch_dist_names import MASTERS, Place, TensorKeys, bare, locate, sort_keys

COMMON, CONFIG = "common.pt", "metadata.json"
COMMON_KEY = "common_state/shard_0_1"
RESHARDABLE = "fully_reshardable"
_LISTED = 100
"""Problems that an error lists."""


def is_torch_dist(path: Path) -> bool:
    """Return whether a folder is a ``torch_dist`` checkpoint, as megatron-core's ``metadata.json`` says."""
    try:
        config = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("sharded_backend") == "torch_dist"


def read_common(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds besides tensors, of which nothing is executed.

    It is in ``common.pt``, or from megatron-core 0.19 on an object among the tensors.

    Raises:
        CheckpointError: there is none, it is damaged, or it names a class that plain content has no use for.
    """
    file = path / COMMON
    try:
        with file.open("rb") as stream:
            common = load_torch_file(stream, str(file))
    except OSError as error:
        metadata = None if file.exists() else load_metadata(path)
        if metadata is None or COMMON_KEY not in metadata.state_dict_metadata:
            raise CheckpointError(
                f"{file}: expected a readable file, got {error.strerror or error}. Restore it, or load an earlier "
                "checkpoint."
            ) from error
        common = load_entry(path, metadata, COMMON_KEY)
        # One object for each shard, of which there is one.
        common = common[0] if isinstance(common, list) and common else common
    if not isinstance(common, dict):
        raise CheckpointError(f"{file}: expected a dict, got a {type(common).__name__}. Restore the file.")
    return common


def sharding_type(common: Mapping[str, Any]) -> str | None:
    """Return the form of the distributed optimizer's state; None for a plain optimizer's, or if it is not said."""
    content, optimizer = common.get("content_metadata"), common.get("optimizer")
    found = content.get("distrib_optim_sharding_type") if isinstance(content, Mapping) else None
    if found is None and isinstance(optimizer, Mapping):
        found = optimizer.get("param_state_sharding_type")
    return None if found is None else str(found)


def require_reshardable(path: Path, common: Mapping[str, Any]) -> None:
    """Check that the optimizer's state is kept by parameter.

    Raises:
        CheckpointError: it is not.
    """
    kind = sharding_type(common)
    if kind not in (None, RESHARDABLE):
        raise CheckpointError(
            f"{path}: expected optimizer state by parameter, got that of the distributed optimizer in form {kind}, "
            "which depends on how the run that saved it laid out its buffers. Load the weights only "
            "(--no-load-optim), or save again with --dist-ckpt-optim-fully-reshardable."
        )


@dataclass
class Report:
    """Where weights came from.

    Attributes:
        from_masters: names of those read from the optimizer's main weights.
        from_model: names of those read from the model, in its dtype.
        cast: keys whose tensors were saved in another floating-point dtype than the target's.
        unread: the optimizer's keys that were left.
    """

    from_masters: list[str] = field(default_factory=list)
    from_model: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


_Target = tuple[torch.Tensor, list[Piece]]


class TorchDistCheckpoint:
    """An open ``torch_dist`` checkpoint, on every rank.

    Args:
        path: its folder.
        ranks: who reads it; every rank must open it.
        verify: as for `OpenCheckpoint`; megatron-core keeps no checksums.

    Attributes:
        common: see `read_common`: arguments, iteration, parameter groups, scheduler.

    Raises:
        CheckpointError: it is no committed checkpoint of this format, or damaged; on every rank.
    """

    def __init__(self, path: Path, ranks: Ranks, verify: Verification = "sizes") -> None:
        self._opened = OpenCheckpoint(path, ranks, verify)
        self.path = path
        self.common: dict[str, Any] = {}
        with ranks.together(self._what):
            if not is_torch_dist(path):
                raise CheckpointError(
                    f"{path}: expected {CONFIG} with sharded_backend torch_dist, got none. Restore it, or load a "
                    "checkpoint in its own format."
                )
            self.common = read_common(path)
            self._keys = sort_keys(key for key in self._opened.keys if self._opened.is_tensor(key))

    @property
    def _what(self) -> str:
        return f"load of {self.path}"

    @property
    def has_moments(self) -> bool:
        """Whether it holds optimizer state besides main weights, which there is none of before the first update."""
        return any(keys for slot, keys in self._keys.state.items() if slot not in MASTERS)

    def read(
        self,
        weights: Mapping[str, torch.Tensor],
        states: Mapping[str, Mapping[str, torch.Tensor]],
        config: Any,
        elsewhere: Iterable[str] = (),
    ) -> Report:
        """Read weights, and optimizer state if any is asked for, in place; every rank must call it.

        Main weights are read from the optimizer's if the checkpoint has them whole, and from the model's otherwise.

        Args:
            weights: by the model's own parameter names, gated layers not split; `FsdpDTensor`, or plain for buffers.
            states: ``{name: {"exp_avg": FsdpDTensor, ...}}``; empty for the weights only.
            config: the model's TransformerConfig: how many layers and experts there are.
            elsewhere: names of weights that other pipeline stages read, which are not unexpected here.

        Raises:
            CheckpointError: tensors are missing, unexpected, of another shape or kind, or not whole: all of them are
                listed, and nothing has changed. Or a file is damaged in a way that its size does not show. On every
                rank.
        """
        targets: list[_Target] = []
        report = Report()
        with self._opened.ranks.together(self._what):
            plan = _Plan(self._opened, self._keys, self.common, config)
            plan.leave(elsewhere)
            targets = plan.make(weights, states, report)
        read_pieces(self._opened, targets)
        return report


class _Plan:
    """Finds places for all targets, and everything that is wrong with them."""

    def __init__(self, opened: OpenCheckpoint, keys: TensorKeys, common: Mapping[str, Any], config: Any) -> None:
        self._opened = opened
        self._entries: Mapping[str, Any] = opened.metadata.state_dict_metadata
        self._keys = keys
        self._common = common
        self._config = config
        self._problems: list[str] = []
        self._used: set[str] = set()
        self._is_whole = cache(partial(is_whole, opened))  # stacked keys are asked for once for each layer

    def leave(self, names: Iterable[str]) -> None:
        """Let others read these weights and their state."""
        for keys in (self._keys.model, *self._keys.state.values()):
            self._used |= {keys[place.key] for name in names for place in locate(name, keys)}

    def make(
        self,
        weights: Mapping[str, torch.Tensor],
        states: Mapping[str, Mapping[str, torch.Tensor]],
        report: Report,
    ) -> list[_Target]:
        """Return what to read; raises one error for all problems."""
        if states:
            require_reshardable(self._opened.path, self._common)
        targets = [self._weight(name, tensor, report) for name, tensor in weights.items()]
        for name, slots in states.items():
            for slot, tensor in slots.items():
                targets.append(self._find(name, tensor, self._keys.state.get(slot, {}), f"optimizer.state.{slot}."))
        self._check_rest(bool(states), report)
        if self._problems:
            count, shown = len(self._problems), "; ".join(self._problems[:_LISTED])
            more = f" and {count - _LISTED} more" if count > _LISTED else ""
            raise CheckpointError(
                f"load of {self._opened.path}: expected a torch_dist checkpoint of this model and optimizer, got "
                f"{count} problems: {shown}{more}. Build the model that was saved, or use --no-load-optim if only the "
                "optimizer differs."
            )
        cast = [piece.key for tensor, pieces in targets for piece in pieces if self._dtype(piece.key) != tensor.dtype]
        report.cast = list(dict.fromkeys(cast))
        return targets

    def _weight(self, name: str, tensor: torch.Tensor, report: Report) -> _Target:
        masters = MASTERS if sharding_type(self._common) in (None, RESHARDABLE) else ()
        for slot in masters:
            keys = self._keys.state.get(slot, {})
            places = locate(name, keys)
            if places and not self._misfits(name, tensor, places, keys):
                report.from_masters.append(name)
                self._used |= {self._keys.model[at.key] for at in locate(name, self._keys.model)}
                return self._find(name, tensor, keys, f"optimizer.state.{slot}.")
        report.from_model.append(name)
        return self._find(name, tensor, self._keys.model, "")

    def _find(self, name: str, tensor: torch.Tensor, keys: Mapping[str, str], prefix: str) -> _Target:
        """Return where a target lies; note what is wrong with that."""
        places = locate(name, keys)
        if not places:
            self._problems.append(f"{prefix}{bare(name)}: not in the checkpoint")
        self._used |= {keys[place.key] for place in places}
        self._problems += self._misfits(name, tensor, places, keys)
        return tensor, [_piece(place, keys, tuple(tensor.shape)) for place in places]

    def _misfits(self, name: str, tensor: torch.Tensor, places: Sequence[Place], keys: Mapping[str, str]) -> list[str]:
        """Return what is wrong with the places of a target."""
        problems = []
        for place in places:
            key, dtype = keys[place.key], self._dtype(keys[place.key])
            counts = [getattr(self._config, each.counts, None) for each in place.leading]
            size = tuple(self._entries[key].size)
            expected = (*counts, *_piece(place, keys, tuple(tensor.shape)).sizes(tensor.shape))
            if size != expected:
                problems.append(f"{key}: expected shape {expected}, got {size}{_hint(name, size, expected)}")
            elif dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
                problems.append(f"{key}: expected {tensor.dtype}, got {dtype}")
            elif not self._is_whole(key):
                problems.append(f"{key}: expected saved chunks that hold every element once, got others")
        return problems

    def _check_rest(self, reads_states: bool, report: Report) -> None:
        problems = dict.fromkeys(self._problems)  # stacked layers have theirs once for each layer
        unread = [key for key in self._keys.model.values() if key not in self._used]
        for slot, keys in self._keys.state.items():
            left = [key for key in keys.values() if key not in self._used]
            if reads_states and slot not in MASTERS:
                unread += left
            else:
                report.unread += left
        (unread if reads_states else report.unread).extend(self._keys.others)
        problems.update(dict.fromkeys(f"{key}: in the checkpoint, and not in the model or optimizer" for key in unread))
        self._problems = list(problems)

    def _dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._entries[key].properties.dtype
        return dtype


def _piece(place: Place, keys: Mapping[str, str], shape: tuple[int, ...]) -> Piece:
    """Return a place of a target of `shape` as what can be read, under the checkpoint's own key."""
    rows = None
    if place.half is not None:
        half = shape[0] // 2 if shape else 0
        rows = range(place.half * half, (place.half + 1) * half)
    return Piece(keys[place.key], tuple(each.index for each in place.leading), rows)


def _hint(name: str, found: tuple[int, ...], expected: tuple[Any, ...]) -> str:
    is_vocabulary = "word_embeddings." in name or "output_layer." in name
    if is_vocabulary and len(found) == len(expected) and found[1:] == expected[1:]:
        return " (the vocabulary is padded otherwise: set --make-vocab-size-divisible-by as it was)"
    return ""
