# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`Load`: brings an open checkpoint, written by `save_checkpoint`, into a model, an optimizer and a scheduler."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..dtensor import FsdpDTensor, shard_dtensor
from .errors import CheckpointError
from .model_state import model_state
from .optimizer_state import create_state, group_settings, require_same_rules, set_settings, set_state, state_by_name
from .read import LoadReport, OpenCheckpoint

MODEL, STATE = "model.", "optimizer.state."
SETTINGS, INFO, SCHEDULER, EXTRA, RNG = "optimizer.settings", "info", "scheduler", "extra", "rng."
_FIELDS: dict[str, dict[str, type]] = {
    INFO: {"aliases": dict, "extras": dict},
    SETTINGS: {"by_name": dict, "values": dict},
    SCHEDULER: {"state": object},
    EXTRA: {"value": object},
}


def load_rng(opened: OpenCheckpoint) -> Any:
    """Return the generators' states of the rank of this number; None if it had none."""
    key = f"{RNG}{opened.ranks.index}"
    found = opened.objects([key] if key in opened.keys else [])
    with opened.ranks.together(f"load of {opened.path}"):
        return _with_fields(found, {key: {"python": tuple, "numpy": tuple, "torch": list}}).get(key)


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
        self._has_set_schedule = False
        self._created: set[str] = set()
        with self._together():
            self._state = model_state(model)
            self._named = {} if optimizer is None else self._state.named_parameters_of(optimizer)
        keys = [INFO, EXTRA]
        keys += [SETTINGS] if optimizer is not None else []
        keys += [SCHEDULER] if scheduler is not None else []
        self._wanted = [key for key in keys if key in opened.keys or key not in (INFO, EXTRA)]
        self._entries = opened.objects(key for key in self._wanted if key in opened.keys and not opened.is_tensor(key))
        with self._together():
            _with_fields(self._entries, _FIELDS)
            self._info = self._entries.get(INFO, Namespace(aliases={}, extras={}))
            self._settings = self._entries.get(SETTINGS, Namespace(by_name={}, values={}))
            # The last part of a key is the state's own name.
            states = (key.removeprefix(STATE) for key in self.opened.keys if key.startswith(STATE))
            self._names_with_state = {state.rpartition(".")[0] for state in states}
            self._saved_names = {name: self._saved_name(name) for name in self._state.tensors}

    def run(self, strict: bool) -> LoadReport:
        """Check, then read.

        Raises:
            CheckpointError: see `load_checkpoint`.
        """
        with self._restoring():
            return self._run(strict)

    def _run(self, strict: bool) -> LoadReport:
        tensors = {MODEL + name: tensor for name, tensor in self._state.tensors.items()}
        sources = {MODEL + name: MODEL + saved for name, saved in self._saved_names.items()}
        with self._together():
            states = self._optimizer_targets(sources)
            merged = self._merged()
            missing, unexpected = self._differing_extras()
        checked = {**tensors, **states, **{alias: tensors[first] for alias, first in merged.items()}}
        self.opened.ranks.require_same(
            "\n".join(f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in sorted(checked.items())),
            "keys of load_checkpoint",
        )
        report = self.opened.check(
            checked,
            sources=sources,
            strict=strict,
            others=self._left_out(),
            entries=self._wanted,
            missing=missing,
            unexpected=unexpected,
        )
        self._require_equal(merged, tensors)
        with self._together():
            self._set_settings(strict)
        self._read({**tensors, **states}, sources)
        with self._together():
            self._finish()
        report.extra = self._entries[EXTRA].value if EXTRA in self._entries else None
        return report

    def _together(self) -> AbstractContextManager[None]:
        return self.opened.ranks.together(f"load of {self.opened.path}")

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Give optimizer and scheduler back what they held, if the load fails; tensors are not kept twice."""
        optimizer, scheduler = self._optimizer, self._scheduler
        with self._together():
            state = {} if optimizer is None else dict(optimizer.state)
            settings = [] if optimizer is None else [copy.deepcopy(group_settings(g)) for g in optimizer.param_groups]
            schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        try:
            yield
        except BaseException:
            if self._has_set_schedule:
                scheduler.load_state_dict(schedule)
            if optimizer is not None:
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, kept in zip(optimizer.param_groups, settings, strict=True):
                    for key in group.keys() - kept.keys() - {"params"}:
                        del group[key]
                    group.update(kept)
            raise

    def _saved_name(self, name: str) -> str:
        """Return the name that the checkpoint has for a tensor: it may be tied there, or under another first name."""
        aliases = [alias for alias, first in self._state.aliases.items() if first == name]
        names = [name, self._info.aliases.get(name), *aliases, *map(self._info.aliases.get, aliases)]
        return next((found for found in names if found is not None and MODEL + found in self.opened.keys), name)

    def _left_out(self) -> list[str]:
        """Return the keys that the caller has chosen not to load."""
        return [
            key
            for key in self.opened.keys
            if key.startswith(RNG)
            or (self._optimizer is None and (key == SETTINGS or key.startswith(STATE)))
            or (self._scheduler is None and key == SCHEDULER)
        ]

    def _optimizer_targets(self, sources: dict[str, str]) -> dict[str, torch.Tensor]:
        """Return where the saved state goes; made on the way.

        Args:
            sources: gets the keys that the checkpoint has for them.
        """
        if self._optimizer is None or SETTINGS not in self._entries:
            return {}
        require_same_rules(self._optimizer, self._named, self._saved_settings())
        stateless = {name for name in self._named if self._was_without_state(name)}
        self._created = {name for name, parameter in self._named.items() if parameter not in self._optimizer.state}
        if len(stateless) < len(self._named):
            create_state(self._optimizer)
        self._drop_states(stateless)
        targets = {}
        for name, values in state_by_name(self._optimizer, self._named).items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    targets[f"{STATE}{name}.{key}"] = value
                    sources[f"{STATE}{name}.{key}"] = f"{STATE}{self._saved_names[name]}.{key}"
        return targets

    def _drop_states(self, names: Iterable[str]) -> None:
        for name in names:
            self._optimizer.state.pop(self._named[name], None)

    def _was_without_state(self, name: str) -> bool:
        """Whether the saved optimizer had a parameter and no state of it: it had not stepped it yet."""
        return self._saved_names[name] in self._settings.by_name and not self._is_state_saved(name)

    def _is_state_saved(self, name: str) -> bool:
        saved = self._saved_names[name]
        return saved in self._settings.values or saved in self._names_with_state

    def _merged(self) -> dict[str, str]:
        """Return keys of weights that are tied here and were saved besides the first one, and our key of that."""
        return {
            MODEL + alias: MODEL + first
            for alias, first in self._state.aliases.items()
            if MODEL + alias in self.opened.keys and alias != self._saved_names[first]
        }

    def _differing_extras(self) -> tuple[list[str], list[str]]:
        """Return the modules' extra states that only the model has, and those that no module takes."""
        missing = [MODEL + name for name in self._state.extras if name not in self._info.extras]
        return missing, [MODEL + name for name in self._info.extras if self._taker(name) is None]

    def _taker(self, extra: str) -> nn.Module | None:
        """Return the module that takes an extra state, if there is one."""
        module = dict(self._model.named_modules(remove_duplicate=False)).get(extra.rpartition(".")[0])
        takes = module is not None and type(module).set_extra_state is not nn.Module.set_extra_state
        return module if takes else None

    def _require_equal(self, merged: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Require that weights that are tied here, and were saved one by one, were equal."""
        for alias, first in merged.items():
            saved = MODEL + self._saved_names[first.removeprefix(MODEL)]
            pair = {key: _like(tensors[first]) for key in (alias, saved)}
            self.opened.read({key: tensor for key, (tensor, _) in pair.items()})
            with self._together():
                if not torch.equal(pair[alias][1], pair[saved][1]):
                    raise CheckpointError(
                        f"{alias} and {saved}: expected equal values, since the model ties them, got different ones. "
                        "Build the model without the tie."
                    )

    def _set_settings(self, strict: bool) -> None:
        """Give optimizer and scheduler all but tensors."""
        if SETTINGS in self._entries:
            set_settings(self._optimizer, self._named, self._saved_settings(), strict=strict)
        if SCHEDULER in self._entries:
            self._has_set_schedule = True
            self._scheduler.load_state_dict(self._entries[SCHEDULER].state)

    def _saved_settings(self) -> dict[str, Any]:
        """Return the settings that were saved, by our names."""
        by_name = self._settings.by_name
        return {name: by_name[saved] for name in self._named if (saved := self._saved_names[name]) in by_name}

    def _read(self, tensors: Mapping[str, torch.Tensor], sources: Mapping[str, str]) -> None:
        """Read tensors from where they were saved; one that two of ours are read from takes a second pass."""
        left = {key: tensor for key, tensor in tensors.items() if sources[key] in self.opened.keys}
        while left:
            chosen = {sources[key]: key for key in left}
            self.opened.read({source: left.pop(key) for source, key in chosen.items()})

    def _finish(self) -> None:
        """Let the optimizer hold what was read, and modules their extra states."""
        if SETTINGS in self._entries:
            self._drop_states(name for name in self._created if not self._is_state_saved(name))
            states = state_by_name(self._optimizer, self._named)
            for name, values in states.items():
                values.update(self._settings.values.get(self._saved_names[name], {}))
            set_state(self._optimizer, self._named, states)
        for name, value in self._info.extras.items():
            module = self._taker(name)
            if module is not None:
                module.set_extra_state(value)


def _with_fields(entries: dict[str, Any], fields: Mapping[str, Mapping[str, type]]) -> dict[str, Any]:
    """Return the entries, of which each has the fields that `save_checkpoint` gives it."""
    for key, entry in entries.items():
        for name, kind in fields[key].items():
            if not isinstance(entry, Namespace) or name not in entry or not isinstance(vars(entry)[name], kind):
                raise CheckpointError(
                    f"{key}: expected a namespace with {name}, a {kind.__name__}, as save_checkpoint writes it, got "
                    f"{entry!r:.80}. Load it with what wrote it."
                )
    return entries


def _like(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor cut like another one, and its local elements; a parameter is not touched."""
    if not isinstance(tensor, FsdpDTensor):
        fresh = torch.empty_like(tensor)
        return fresh, fresh
    local = torch.empty_like(tensor._local_tensor)
    return shard_dtensor(local, replace(tensor.geometry, owner=None)), local
