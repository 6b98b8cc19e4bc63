# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Saves and loads what a run holds, in Megatron's ``fsdp_dtensor`` format; which keys a model has is not said here."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron.core import tensor_parallel
from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.experimental.checkpoint import (
    BackgroundWriter,
    CheckpointError,
    OpenCheckpoint,
    Ranks,
    committed_iterations,
    iteration_folder,
    keep_last,
    read_latest,
    write_checkpoint,
    write_latest,
)
from megatron.pretrain.log import TrainingLog

if TYPE_CHECKING:
    from megatron.pretrain.training import TrainState

VERSION = 3.0
_ARGS, _ITERATION, _SCHEDULER = "args", "iteration", "opt_param_scheduler."
_RNG = "rng_state.(0, 0)."
_BOUNDS = ("max_lr", "min_lr")
"""Settings of a group of parameters that belong to the learning rate schedule."""


class Checkpoints:
    """The checkpoints of one run; every rank makes one, and calls its methods together with the others.

    Args:
        args: Validated arguments.
        log: Where it reports.
    """

    def __init__(self, args: argparse.Namespace, log: TrainingLog) -> None:
        self._args = args
        self._log = log
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._ranks = Ranks(device)
        self._writer = BackgroundWriter() if args.save and args.async_save else None
        self._opened: OpenCheckpoint | None = None
        self._saved_iteration: int | None = None

    # --- loading ------------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Find and check the checkpoint of --load.

        Returns:
            The last iteration that has been trained; 0 for a start.

        Raises:
            CheckpointError: It is damaged, or one of a run that this one cannot go on with.
        """
        args = self._args
        path = self._find()
        if path is None:
            return 0
        self._opened = OpenCheckpoint(path, self._ranks, "checksums" if args.verify_checksums else "sizes")
        if args.finetune:
            return 0
        entries = self._opened.objects(key for key in (_ITERATION, _ARGS) if key in self._opened.keys)
        with self._ranks.together(f"load of {path}"):
            iteration = entries.get(_ITERATION)
            if not isinstance(iteration, int):
                raise CheckpointError(
                    f"load of {path}: expected the iteration that it was saved at, got {iteration!r}. Use --finetune "
                    "to take the weights only."
                )
            saved_batch = getattr(entries.get(_ARGS), "global_batch_size", args.global_batch_size)
            if saved_batch != args.global_batch_size:
                raise CheckpointError(
                    f"load of {path}: expected --global-batch-size {saved_batch}, with which it was trained, got "
                    f"{args.global_batch_size}; samples would be skipped or seen twice. Use that size, or --finetune."
                )
            if iteration > args.train_iters:
                raise CheckpointError(
                    f"load of {path}: expected an iteration up to --train-iters {args.train_iters}, got {iteration}. "
                    "Raise it, or use --finetune."
                )
        return iteration

    def _find(self) -> Path | None:
        """Return the checkpoint's folder; None without --load, or where there is none and that is allowed."""
        args = self._args
        if not args.load:
            return None
        folder = Path(args.load)
        with self._ranks.together(f"load of {folder}"):
            if (folder / ".metadata").is_file():
                path: Path | None = folder
            else:
                iteration = args.ckpt_step if args.ckpt_step is not None else read_latest(folder)
                path = None if iteration is None else iteration_folder(folder, iteration)
            if path is None and args.exit_on_missing_checkpoint:
                raise CheckpointError(
                    f"load of {folder}: expected a checkpoint, got none. Correct --load, or drop "
                    "--exit-on-missing-checkpoint to start anew."
                )
            if path is not None and not path.is_dir():
                there = ", ".join(map(str, committed_iterations(folder))) or "none"
                raise CheckpointError(
                    f"load of {folder}: expected {path.name} there, got no such folder. It has checkpoints of "
                    f"iterations: {there}. Name one of them with --ckpt-step."
                )
        self._ranks.require_same(str(path), "checkpoint that --load names")
        if path is None:
            self._log.print(f"WARNING: no checkpoint in {folder}: starting from random weights")
        return path

    def load(self, state: TrainState) -> None:
        """Read the open checkpoint into a run.

        Raises:
            CheckpointError: It is one of another model, optimizer or schedule; nothing has changed then.
        """
        if self._opened is None:
            return
        args, opened = self._args, self._opened
        loads_optimizer = not (args.no_load_optim or args.finetune)
        loads_rng = not (args.no_load_rng or args.finetune)
        others = {key for key in opened.keys if not opened.is_tensor(key) or names.is_extra_state(key)}
        others |= {key for key in opened.keys if key.startswith(_RNG.partition(".")[0])}
        with self._ranks.together(f"load of {opened.path}"):
            tensors = names.find_model(state.model, opened.keys)
            if loads_optimizer:
                tensors |= names.find_optimizer(state.optimizer, state.model, opened.keys)
            else:
                others |= {key for key in opened.keys if key.startswith(names.STATE)}
        opened.check(tensors, strict=True, others=others)
        settings = opened.objects(names.settings_keys(opened.keys) if loads_optimizer else ())
        schedule = opened.objects(_begin_with(opened.keys, _SCHEDULER) if loads_optimizer else ())
        opened.read(tensors)
        with self._ranks.together(f"load of {opened.path}"):
            if loads_optimizer:
                bounds = [
                    {key: group[key] for key in _BOUNDS if key in group} for group in state.optimizer.param_groups
                ]
                names.load_settings(state.optimizer, state.model, settings)
                if args.override_opt_param_scheduler:
                    # megatron-core's scheduler would take those that the groups had when they were saved.
                    for group, bound in zip(state.optimizer.param_groups, bounds, strict=True):
                        group.update(bound)
                self._load_schedule(state, {key.removeprefix(_SCHEDULER): value for key, value in schedule.items()})
        if loads_rng:
            self._load_rng()
        self._log.print(f" successfully loaded checkpoint from {opened.path} at iteration {state.first_iteration - 1}")

    def _load_schedule(self, state: TrainState, saved: dict[str, Any]) -> None:
        assert self._opened is not None
        if not saved:
            raise CheckpointError(
                f"load of {self._opened.path}: expected the learning rate schedule, got none. Use --no-load-optim."
            )
        try:
            state.scheduler.load_state_dict(saved)
        except AssertionError as error:
            raise CheckpointError(
                f"load of {self._opened.path}: {error}. Give the flags of the run that saved it, "
                "--override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler."
            ) from error

    def _load_rng(self) -> None:
        """Give this rank the generators of the rank of its number, or those of the first one."""
        opened = self._opened
        assert opened is not None
        mine = _begin_with(opened.keys, f"{_RNG}{self._ranks.index}.") or _begin_with(opened.keys, f"{_RNG}0.")
        if not mine:
            raise CheckpointError(
                f"load of {opened.path}: expected states of random number generators, got none. Use --no-load-rng."
            )
        tensors = {key: torch.empty(_size(opened, key), dtype=torch.uint8) for key in mine if opened.is_tensor(key)}
        opened.read(tensors)
        found = {**tensors, **opened.objects(key for key in mine if not opened.is_tensor(key))}
        found = {key.removeprefix(_RNG).partition(".")[2]: value for key, value in found.items()}
        random.setstate(_tupled(found["random_rng_state"]))
        np.random.set_state(found["np_rng_state"])
        torch.set_rng_state(found["torch_rng_state"])
        if torch.cuda.is_available() and "cuda_rng_state" in found:
            torch.cuda.set_rng_state(found["cuda_rng_state"])
        tracker = "rng_tracker_states."
        states = {key.removeprefix(tracker): value for key, value in found.items() if key.startswith(tracker)}
        if states:
            tensor_parallel.get_cuda_rng_tracker().set_states(states)

    # --- saving -------------------------------------------------------------------------------------------------------

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint is to be written after an iteration."""
        args = self._args
        is_end = iteration == args.train_iters
        return bool(args.save) and (is_end or (args.save_interval is not None and iteration % args.save_interval == 0))

    def save(self, state: TrainState, iteration: int) -> None:
        """Write a checkpoint, or begin to, with --async-save; do nothing without --save.

        Raises:
            CheckpointError: It cannot be written; the checkpoints before it are whole.
        """
        args = self._args
        if not args.save or iteration == self._saved_iteration:
            return
        folder = Path(args.save)
        path = iteration_folder(folder, iteration)

        def after_commit() -> None:
            write_latest(folder, iteration)
            if args.keep_last is not None:
                keep_last(folder, args.keep_last)

        self._log.print(f"saving checkpoint at iteration {iteration:7d} to {folder} in {_format(args)} format")
        if not args.use_megatron_fsdp_v2:
            from megatron.pretrain.torch_dist import write_torch_dist

            write_torch_dist(state, iteration, path, self._ranks, after_commit)
        elif self._writer is not None:
            self._writer.write(lambda: self._collect(state, iteration), path, overwrite=True, after_commit=after_commit)
        else:
            collected = self._collect(state, iteration)
            write_checkpoint(collected, path, self._ranks, overwrite=True, after_commit=after_commit)
        self._saved_iteration = iteration
        done = "" if self._writer is None else " (being written)"
        self._log.print(f"  successfully saved checkpoint from iteration {iteration:7d} to {folder}{done}")

    def poll(self) -> None:
        """Raise the error of a background save that has failed.

        Raises:
            CheckpointError: One has.
        """
        if self._writer is not None:
            self._writer.poll()

    def finish(self) -> None:
        """Wait for a save that is under way.

        Raises:
            CheckpointError: It has failed.
        """
        if self._writer is not None:
            self._writer.wait()

    def _collect(self, state: TrainState, iteration: int) -> dict[str, Any]:
        args = self._args
        collected: dict[str, Any] = {
            "model": names.model_keys(state.model),
            _ARGS: plain_arguments(args, iteration),
            "checkpoint_version": VERSION,
            _ITERATION: iteration,
            "num_floating_point_operations_so_far": 0,
        }
        if not args.no_save_optim:
            collected["optimizer"] = names.optimizer_keys(state.optimizer, state.model)
            collected[_SCHEDULER.rstrip(".")] = state.scheduler.state_dict()
        if not args.no_save_rng:
            collected["rng_state"] = {"(0, 0)": {str(self._ranks.index): _rng_state()}}
        return collected


def plain_arguments(args: argparse.Namespace, iteration: int) -> argparse.Namespace:
    """Return the arguments as values that any reader takes, with Megatron's count of samples."""
    plain = {
        name: value if isinstance(value, (bool, int, float, str, list, type(None))) else str(value)
        for name, value in vars(args).items()
    }
    return argparse.Namespace(**plain, consumed_train_samples=iteration * args.global_batch_size)


def _format(args: argparse.Namespace) -> str:
    return "fsdp_dtensor" if args.use_megatron_fsdp_v2 else "torch_dist"


def _rng_state() -> dict[str, Any]:
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    return {**state, "cuda_rng_state": torch.cuda.get_rng_state()}


def _begin_with(keys: Iterable[str], prefix: str) -> list[str]:
    return [key for key in keys if key.startswith(prefix)]


def _size(opened: OpenCheckpoint, key: str) -> torch.Size:
    entry: Any = opened.metadata.state_dict_metadata[key]
    return torch.Size(entry.size)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, (tuple, list)) else value
