# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A run's state in Megatron's ``fsdp_dtensor`` format, and back; which keys a model has is not said here."""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.experimental.checkpoint import (
    CheckpointError,
    OpenCheckpoint,
    Ranks,
    Verification,
)

if TYPE_CHECKING:
    from megatron.pretrain.training import TrainState

VERSION = 3.0
_ARGS, _ITERATION, _SCHEDULER = "args", "iteration", "opt_param_scheduler."
_RNG = "rng_state"
_BOUNDS = ("max_lr", "min_lr")
"""Settings of a group of parameters that belong to the learning rate schedule."""


def collect(state: TrainState, iteration: int) -> dict[str, Any]:
    """Return what is written: on every rank the keys of what it holds, and its own random number generators.

    Args:
        state: The run.
        iteration: The last one that has been trained.
    """
    args = state.args
    collected: dict[str, Any] = {
        "model": {key: tensor for chunk in state.chunks for key, tensor in names.model_keys(chunk).items()},
        _ARGS: plain_arguments(args, iteration),
        "checkpoint_version": VERSION,
        _ITERATION: iteration,
        "num_floating_point_operations_so_far": 0,
    }
    if not args.no_save_optim:
        collected["optimizer"] = names.optimizer_keys(state.optimizer, state.chunks[0])
        collected[_SCHEDULER.rstrip(".")] = state.scheduler.state_dict()
    if not args.no_save_rng:
        place, copy = _own_generators()
        collected[_RNG] = {place: {copy: _rng_state()}}
    return collected


def _own_generators() -> tuple[str, str]:
    """Return the keys of this rank's generators: stage and part of each layer, then which data-parallel copy."""
    stage, part = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return f"({stage}, {part})", str(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def plain_arguments(args: argparse.Namespace, iteration: int) -> argparse.Namespace:
    """Return the arguments as values that any reader takes, with Megatron's count of samples."""
    plain = {
        name: value
        for name, value in vars(args).items()
        if isinstance(value, (bool, int, float, str, list, type(None)))
    }
    return argparse.Namespace(**plain, consumed_train_samples=iteration * args.global_batch_size)


class FsdpDtensorSource:
    """A checkpoint that a run goes on from.

    Args:
        path: Its folder.
        ranks: All ranks, each of which makes one.
        verify: Compare sizes, or checksums too.

    Attributes:
        iteration: The last one that had been trained, or None if it does not say.
        arguments: Of the run that saved it, or None.
    """

    def __init__(self, path: Path, ranks: Ranks, verify: Verification) -> None:
        self.path = path
        self._ranks = ranks
        self._opened = OpenCheckpoint(path, ranks, verify)
        found = self._opened.objects(key for key in (_ITERATION, _ARGS) if key in self._opened.keys)
        self.iteration: Any = found.get(_ITERATION)
        self.arguments: Any = found.get(_ARGS)

    def load(self, state: TrainState, *, loads_optimizer: bool, loads_rng: bool) -> None:
        """Read into a run.

        Raises:
            CheckpointError: It is one of another model, optimizer or schedule; on every rank.
        """
        opened = self._opened
        others = {key for key in opened.keys if not opened.is_tensor(key) or names.is_extra_state(key)}
        others |= set(_begin_with(opened.keys, _RNG))
        tensors: dict[str, torch.Tensor] = {}
        with self._ranks.together(f"load of {self.path}"):
            for chunk in state.chunks:
                tensors |= names.find_model(chunk, opened.keys)
            if loads_optimizer:
                tensors |= names.find_optimizer(state.optimizer, state.chunks[0], opened.keys)
            else:
                others |= set(_begin_with(opened.keys, names.STATE))
        others |= self._asked_elsewhere(tensors)
        opened.check(tensors, strict=True, others=others)
        settings = opened.objects(names.settings_keys(opened.keys) if loads_optimizer else ())
        schedule = opened.objects(_begin_with(opened.keys, _SCHEDULER) if loads_optimizer else ())
        opened.read(tensors)
        with self._ranks.together(f"load of {self.path}"):
            if loads_optimizer:
                with keeping_bounds(state):
                    names.load_settings(state.optimizer, state.chunks[0], settings)
                saved = {key.removeprefix(_SCHEDULER): value for key, value in schedule.items()}
                load_schedule(state.scheduler, saved, self.path)
        if loads_rng:
            self._load_rng()

    def _asked_elsewhere(self, tensors: Iterable[str]) -> set[str]:
        """Return the keys that some rank reads, since ranks of model parallelism hold different ones."""
        mine = sorted(tensors)
        digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
        what = f"keys that ranks read of {self.path}"
        if len(set(self._ranks.gather(digest, what))) == 1:
            return set()
        return {key for keys in self._ranks.gather(mine, what) for key in keys}

    def _load_rng(self) -> None:
        """Give this rank its generators, or those of the first copy of its part of the model.

        A part that nobody had then keeps the generators that it has been seeded with.
        """
        opened = self._opened
        place, copy = _own_generators()
        start = f"{_RNG}.{place}."
        mine = _begin_with(opened.keys, f"{start}{copy}.") or _begin_with(opened.keys, f"{start}0.")
        tensors = {key: torch.empty(_size(opened, key), dtype=torch.uint8) for key in mine if opened.is_tensor(key)}
        opened.read(tensors)
        found = {**tensors, **opened.objects(key for key in mine if not opened.is_tensor(key))}
        found = {key.removeprefix(start).partition(".")[2]: value for key, value in found.items()}
        with self._ranks.together(f"load of {self.path}"):
            if not _begin_with(opened.keys, f"{_RNG}."):
                raise CheckpointError(
                    f"load of {self.path}: expected states of random number generators, got none. Use --no-load-rng."
                )
            if mine:
                _set_rng_state(found)


@contextmanager
def keeping_bounds(state: TrainState) -> Iterator[None]:
    """Keep the rates that the flags say, if they are to override the checkpoint's.

    megatron-core's scheduler takes those that the groups of parameters had when they were saved.
    """
    groups = state.optimizer.param_groups
    bounds = [{key: group[key] for key in _BOUNDS if key in group} for group in groups]
    yield
    if state.args.override_opt_param_scheduler:
        for group, bound in zip(groups, bounds, strict=True):
            group.update(bound)


def load_schedule(scheduler: Any, saved: dict[str, Any], path: Path) -> None:
    """Give the learning rate schedule what a checkpoint holds of it.

    Raises:
        CheckpointError: There is nothing, or it is another schedule than that of the flags.
    """
    if not saved:
        raise CheckpointError(f"load of {path}: expected the learning rate schedule, got none. Use --no-load-optim.")
    try:
        scheduler.load_state_dict(saved)
    except AssertionError as error:
        raise CheckpointError(
            f"load of {path}: {error}. Give the flags of the run that saved it, --override-opt_param-scheduler or "
            "--use-checkpoint-opt_param-scheduler."
        ) from error


def _rng_state() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": {name: _state_of(value) for name, value in _tracked().items()},
    }


def _set_rng_state(found: dict[str, Any]) -> None:
    random.setstate(_tupled(found["random_rng_state"]))
    np.random.set_state(found["np_rng_state"])
    torch.set_rng_state(found["torch_rng_state"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda_rng_state"])
    tracker = "rng_tracker_states."
    states = {key.removeprefix(tracker): value for key, value in found.items() if key.startswith(tracker)}
    for name, generator in _tracked().items():
        if name in states and isinstance(generator, torch.Generator):
            # A run with --cuda-graph-impl tracks generators, which a graph knows; others track their states.
            generator.set_state(states[name])
            states[name] = generator
    if states:
        tensor_parallel.get_cuda_rng_tracker().set_states(states)


def _tracked() -> dict[str, Any]:
    """Return what megatron-core's tracker has by name: states, or generators."""
    return dict(tensor_parallel.get_cuda_rng_tracker().get_states())


def _state_of(value: Any) -> torch.Tensor:
    state: torch.Tensor = value.get_state() if isinstance(value, torch.Generator) else value
    return state


def _begin_with(keys: Iterable[str], prefix: str) -> list[str]:
    return [key for key in keys if key.startswith(prefix)]


def _size(opened: OpenCheckpoint, key: str) -> torch.Size:
    entry: Any = opened.metadata.state_dict_metadata[key]
    return torch.Size(entry.size)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, (tuple, list)) else value
