# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`save_checkpoint` and `load_checkpoint` of a sharded model, its optimizer, scheduler, random numbers and extras.

Keys of a checkpoint:

    model.<fqn>                      tensors: main weights and buffers; a tied weight once
    optimizer.state.<fqn>.<name>     tensors: e.g. exp_avg; the step, where an optimizer keeps it by parameter
    optimizer.settings               {fqn: settings of its group}, and states that are no tensors
    info, scheduler, extra           tied names and modules' extra states; the scheduler's state; the user's values
    rng.<rank>                       states of this rank's random number generators
"""

from __future__ import annotations

import io
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from ..device import random_state, set_random_state
from .background_writer import BackgroundWriter
from .errors import CheckpointError
from .load import Load, load_rng
from .model_state import first_unit, model_state
from .optimizer_state import settings_by_name, state_by_name
from .ranks import Ranks
from .read import LoadReport, OpenCheckpoint, Verification
from .unpickle import load_torch_file
from .write import write_checkpoint


def save_checkpoint(
    model: nn.Module,
    optimizer: Any,
    path: str | Path,
    *,
    extra: Any = None,
    scheduler: Any = None,
    save_rng: bool = True,
    overwrite: bool = False,
    after_commit: Callable[[], None] | None = None,
) -> None:
    """Write a checkpoint; every rank must call it. A failed save leaves `path`, and training, as they were.

    Args:
        model: holds sharded units only, besides buffers.
        optimizer: adapted with `fully_shard_optimizer`, or None.
        path: the checkpoint's folder, which must not exist yet; on a file system that all ranks share.
        extra: plain values and tensors; the first rank's are kept.
        scheduler: an LR scheduler, or anything with ``state_dict()``.
        save_rng: keep each rank's random number generators.
        overwrite: replace a checkpoint that lies there, once the new one is on the disk.
        after_commit: called on the first rank once the checkpoint is on the disk, e.g. to name it as the latest.

    Raises:
        CheckpointError: ranks disagree, or the files cannot be written, or a value could not be read back; on every
            rank.
    """
    ranks = Ranks(first_unit(model).context.device)
    state = _collect(model, optimizer, path, ranks, extra, scheduler, save_rng)
    write_checkpoint(state, Path(path), ranks, overwrite=overwrite, after_commit=after_commit)


class CheckpointSaver:
    """Saves in the background: `save` returns when the state has been copied to the host.

    One save is under way at a time; the next one waits for it, and so does the interpreter at its exit. Every rank must
    make the saver.

    Args:
        model: as for `save_checkpoint`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._writer = BackgroundWriter()

    def save(
        self,
        optimizer: Any,
        path: str | Path,
        *,
        extra: Any = None,
        scheduler: Any = None,
        save_rng: bool = True,
        overwrite: bool = False,
        after_commit: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write a checkpoint; arguments as for `save_checkpoint`. `after_commit` is called in another thread.

        Raises:
            CheckpointError: the save before has failed, or ranks disagree; on every rank. The new one is not begun.
        """
        self._writer.write(
            lambda: _collect(self._model, optimizer, path, self._writer.ranks, extra, scheduler, save_rng),
            Path(path),
            overwrite=overwrite,
            after_commit=after_commit,
        )

    def poll(self) -> None:
        """Raise the error of a save that has failed, once; does not wait for a save. Call it at every step.

        Every rank must call it equally often between saves: while one is under way, ranks tell each other whether
        theirs has ended.

        Raises:
            CheckpointError: a save has failed; on every rank, at the same call.
        """
        self._writer.poll()

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: it has failed; on every rank.
        """
        self._writer.wait()


def load_checkpoint(
    model: nn.Module,
    optimizer: Any,
    path: str | Path,
    *,
    scheduler: Any = None,
    restore_rng: bool = True,
    sync_model_weights: bool = True,
    strict: bool = True,
    verify: Verification = "sizes",
) -> LoadReport:
    """Read a checkpoint in place, whatever world size, strategy, layout, units or dtypes it was saved with.

    Every rank must call it. Files and keys are checked before anything changes.

    Args:
        model: holds sharded units only, besides buffers.
        optimizer: adapted with `fully_shard_optimizer`, or None to leave the saved state out.
        path: the checkpoint's folder.
        scheduler: takes the saved state with ``load_state_dict``.
        restore_rng: give this rank the generators that the rank of its number had, if there was one.
        sync_model_weights: make compute weights at once, rather than when they are next gathered.
        strict: refuse missing and unexpected keys; otherwise the report tells them.
        verify: compare file sizes, or all checksums, too.

    Returns:
        The extra values, and what was not done exactly as saved.

    Raises:
        CheckpointError: the checkpoint is damaged, or one of another model; lists every difference, on every rank.
    """
    device = first_unit(model).context.device
    ranks = Ranks(device)
    given: dict[str, object] = {
        "optimizer": optimizer is not None,
        "scheduler": scheduler is not None,
        "restore_rng": restore_rng,
    }
    given |= {"sync_model_weights": sync_model_weights, "strict": strict, "verify": verify}
    lines = [str(path), *(f"{name}={value}" for name, value in given.items())]
    ranks.require_same("\n".join(lines), "arguments of load_checkpoint")
    load = Load(OpenCheckpoint(Path(path), ranks, verify), model, optimizer, scheduler)
    generators = load_rng(load.opened) if restore_rng else None
    report = load.run(strict)
    with ranks.together(f"load of {path}"):
        if generators is not None:
            _set_rng(generators, device)
    if sync_model_weights:
        _sync_model_weights(model)
    return report


def _collect(
    model: nn.Module, optimizer: Any, path: str | Path, ranks: Ranks, extra: Any, scheduler: Any, save_rng: bool
) -> dict[str, Any]:
    """Return the state dict that is written, after all ranks have agreed on its keys."""
    state: dict[str, Any] = {}
    with ranks.together(f"save of {path}"):
        found = model_state(model)
        state = {"model": found.tensors, "info": Namespace(aliases=found.aliases, extras=found.extras)}
        if optimizer is not None:
            named = found.named_parameters_of(optimizer)
            by_name = state_by_name(optimizer, named)
            tensors = {
                name: {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
                for name, values in by_name.items()
            }
            values = {
                name: {key: value for key, value in values.items() if not isinstance(value, torch.Tensor)}
                for name, values in by_name.items()
            }
            state["optimizer"] = {
                "state": {name: values for name, values in tensors.items() if values},
                "settings": Namespace(
                    by_name=settings_by_name(optimizer, named),
                    values={name: of_one for name, of_one in values.items() if of_one},
                ),
            }
        if scheduler is not None:
            state["scheduler"] = Namespace(state=scheduler.state_dict())
        if extra is not None:
            state["extra"] = Namespace(value=extra)
        if save_rng:
            state["rng"] = {str(ranks.index): _rng(first_unit(model).context.device)}
        for key, value in state.items():
            if isinstance(value, Namespace):
                _require_readable(value, key)
    ranks.require_same("\n".join([str(path), *sorted(_described(state))]), "keys of save_checkpoint")
    return state


def _described(state: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a line for each key that all ranks have."""
    lines = []
    for key, value in state.items():
        if isinstance(value, dict) and key != "rng":
            lines += _described(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            lines.append(f"{prefix}{key} {tuple(value.shape)} {value.dtype}")
        else:
            lines.append(f"{prefix}{key}")
    return lines


def _require_readable(value: Any, key: str) -> None:
    """Refuse to save what a load would refuse."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # whatever the user's own classes raise
        raise CheckpointError(
            f"{key} of save_checkpoint: expected values that can be written, got {type(error).__name__}: {error}."
        ) from error
    buffer.seek(0)
    load_torch_file(buffer, f"{key} of save_checkpoint")


def _rng(device: torch.device) -> Namespace:
    return Namespace(python=random.getstate(), numpy=numpy.random.get_state(), torch=random_state(device))


def _set_rng(saved: Any, device: torch.device) -> None:
    random.setstate(saved.python)
    numpy.random.set_state(saved.numpy)
    states = saved.torch
    if len(states) == len(random_state(device)):
        set_random_state(device, states)
    else:
        torch.set_rng_state(states[0])  # saved on another kind of device


def _sync_model_weights(model: nn.Module) -> None:
    """Make compute weights from the main weights that were read."""
    context = first_unit(model).context
    # Main weights were written on the computing stream.
    context.allgather_stream.wait_stream(context.current_stream())
    with context.allgather_stream:
        for unit in context.units():
            for group in unit.parameter_groups:
                group.sync_model_weight()
    context.current_stream().wait_stream(context.allgather_stream)
