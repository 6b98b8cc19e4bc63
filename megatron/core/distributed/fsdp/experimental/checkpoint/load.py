# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`Load`: brings an open checkpoint, written by `save_checkpoint`, into a model, an optimizer and a scheduler."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..dtensor import FsdpDTensor, shard_dtensor
from .errors import CheckpointError
from .model_state import model_state
from .optimizer_state import create_state, set_settings, set_state, state_by_name
from .read import LoadReport, OpenCheckpoint

MODEL, STATE = "model.", "optimizer.state."
SETTINGS, INFO, SCHEDULER, EXTRA, RNG = "optimizer.settings", "info", "scheduler", "extra", "rng."


def load_rng(opened: OpenCheckpoint) -> Any:
    """Return the generators' states of the rank of this number; None if it had none."""
    key = f"{RNG}{opened.ranks.index}"
    return opened.objects([key] if key in opened.keys else []).get(key)


class Load:
    """One load; `run` does it.

    Args:
        opened: what to read.
        model: takes weights and buffers.
        optimizer: takes state and settings; None leaves them out.
        scheduler: takes its state; None leaves it out.
    """

    def __init__(self, opened: OpenCheckpoint, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self.opened = opened
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        with opened.ranks.together(f"load of {opened.path}"):
            self._state = model_state(model)
            self._named = {} if optimizer is None else self._state.named_parameters_of(optimizer)
        found = opened.objects([INFO] if INFO in opened.keys else [])
        self._info = found.get(INFO, Namespace(aliases={}, extras={}))

    def run(self, strict: bool) -> LoadReport:
        """Check, then read.

        Raises:
            CheckpointError: see `load_checkpoint`.
        """
        new = [] if self._optimizer is None else [p for p in self._named.values() if p not in self._optimizer.state]
        try:
            return self._run(strict)
        except CheckpointError:
            for parameter in new:
                self._optimizer.state.pop(parameter, None)
            raise

    def _run(self, strict: bool) -> LoadReport:
        keys = self.opened.keys
        tensors = {MODEL + name: tensor for name, tensor in self._state.tensors.items()}
        untied = {
            key: MODEL + self._info.aliases[key.removeprefix(MODEL)]
            for key in tensors
            if key not in keys and key.removeprefix(MODEL) in self._info.aliases
        }
        copies = {key: tensors.pop(key) for key in untied}
        tensors |= self._optimizer_targets()
        wanted = self._wanted_entries()
        merged = {MODEL + alias: MODEL + first for alias, first in self._state.aliases.items() if MODEL + alias in keys}
        report = self.opened.check(
            tensors, strict=strict, others=[*wanted, *untied.values(), *merged, *self._left_out()], entries=wanted
        )
        entries = self.opened.objects([key for key in wanted if key in keys])
        settings = entries[SETTINGS].by_name if SETTINGS in entries else None
        self._require_equal(merged, tensors)
        self.opened.read({key: tensor for key, tensor in tensors.items() if key in keys})
        for key, source in untied.items():
            self.opened.read({source: copies[key]})
        self._finish(entries, settings)
        report.extra = entries[EXTRA].value if EXTRA in entries else None
        return report

    def _wanted_entries(self) -> list[str]:
        keys = self.opened.keys
        always = [key for key in (INFO, EXTRA) if key in keys]
        return [
            *always,
            *([SETTINGS] if self._optimizer is not None else []),
            *([SCHEDULER] if self._scheduler is not None else []),
        ]

    def _left_out(self) -> list[str]:
        """Return the keys that the caller has chosen not to load."""
        return [
            key
            for key in self.opened.keys
            if key.startswith(RNG)
            or (self._optimizer is None and (key == SETTINGS or key.startswith(STATE)))
            or (self._scheduler is None and key == SCHEDULER)
        ]

    def _optimizer_targets(self) -> dict[str, torch.Tensor]:
        """Return where the saved state goes; made on the way if the checkpoint has any."""
        if self._optimizer is None or not any(key.startswith(STATE) for key in self.opened.keys):
            return {}
        create_state(self._optimizer)
        return {
            f"{STATE}{name}.{key}": value
            for name, values in state_by_name(self._optimizer, self._named).items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }

    def _require_equal(self, merged: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Require that weights that are tied here, and were saved one by one, were equal."""
        for alias, first in merged.items():
            ours: Any = tensors[first]
            pair = {key: _like(ours) for key in (alias, first)}
            self.opened.read({key: tensor for key, (tensor, _) in pair.items()})
            with self.opened.ranks.together(f"load of {self.opened.path}"):
                if not torch.equal(pair[alias][1], pair[first][1]):
                    raise CheckpointError(
                        f"{alias} and {first}: expected equal values, since the model ties them, got different ones. "
                        "Build the model without the tie."
                    )

    def _finish(self, entries: Mapping[str, Any], settings: Any) -> None:
        if self._optimizer is not None and settings is not None:
            with self.opened.ranks.together(f"load of {self.opened.path}"):
                set_settings(self._optimizer, self._named, settings)
            if not any(key.startswith(STATE) for key in self.opened.keys):
                self._optimizer.state.clear()
            set_state(self._optimizer, self._named, state_by_name(self._optimizer, self._named))
        if SCHEDULER in entries:
            self._scheduler.load_state_dict(entries[SCHEDULER].state)
        modules = dict(self._model.named_modules())
        for name, value in self._info.extras.items():
            modules[name.rpartition(".")[0]].set_extra_state(value)


def _like(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor cut like another one, and its local elements; a parameter is not touched."""
    if not isinstance(tensor, FsdpDTensor):
        fresh = torch.empty_like(tensor)
        return fresh, fresh
    local = torch.empty_like(tensor._local_tensor)
    return shard_dtensor(local, replace(tensor.geometry, owner=None)), local
