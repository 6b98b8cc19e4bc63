# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""When a run saves and what it goes on from; what is in a checkpoint is known to the formats' own files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint import (
    LATEST,
    BackgroundWriter,
    CheckpointError,
    Ranks,
    Verification,
    committed_iterations,
    iteration_folder,
    keep_last,
    read_latest,
    write_checkpoint,
    write_latest,
)
from megatron.core.distributed.fsdp.torch_dist_checkpoint import is_torch_dist
from megatron.pretrain.fsdp_dtensor import FsdpDtensorSource, collect
from megatron.pretrain.log import TrainingLog
from megatron.pretrain.torch_dist import TorchDistSource, write_torch_dist

if TYPE_CHECKING:
    from megatron.pretrain.training import TrainState

_SAME = ("global_batch_size", "seq_length", "seed", "split")
"""Arguments that say which samples an iteration sees."""


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
        self._source: FsdpDtensorSource | TorchDistSource | None = None
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
        verify: Verification = "checksums" if args.verify_checksums else "sizes"
        self._source = (TorchDistSource if is_torch_dist(path) else FsdpDtensorSource)(path, self._ranks, verify)
        if args.finetune:
            return 0
        with self._ranks.together(f"load of {path}"):
            iteration = self._source.iteration
            if not isinstance(iteration, int):
                raise CheckpointError(
                    f"load of {path}: expected the iteration that it was saved at, got {iteration!r}. Use --finetune "
                    "to take the weights only."
                )
            for name in _SAME:
                saved, given = (getattr(found, name, None) for found in (self._source.arguments, args))
                if saved not in (None, given):
                    flag = f"--{name.replace('_', '-')}"
                    raise CheckpointError(
                        f"load of {path}: expected {flag} {saved}, with which it was trained, got {given}; samples "
                        "would be skipped or seen twice. Use that value, or --finetune."
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
            path: Path | None = folder
            if not (folder / ".metadata").is_file():
                iteration = args.ckpt_step if args.ckpt_step is not None else read_latest(folder)
                path = None if iteration is None else iteration_folder(folder, iteration)
            elif args.ckpt_step is not None:
                raise CheckpointError(
                    f"load of {folder}: expected the folder of a run with --ckpt-step {args.ckpt_step}, got one "
                    "checkpoint. Name the folder around it, or drop --ckpt-step."
                )
            if path is None and committed_iterations(folder):
                raise CheckpointError(
                    f"load of {folder}: expected {LATEST}, got none beside the checkpoints of iterations "
                    f"{', '.join(map(str, committed_iterations(folder)))}. Name one of them with --ckpt-step."
                )
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
            CheckpointError: It is one of another model or optimizer, and nothing has changed; or of other settings or
                another schedule, when weights have been read already. The run ends either way.
        """
        if self._source is None:
            return
        args = self._args
        self._source.load(
            state,
            loads_optimizer=not (args.no_load_optim or args.finetune),
            loads_rng=not (args.no_load_rng or args.finetune),
        )
        at = f"at iteration {state.first_iteration - 1}"
        self._log.print(f" successfully loaded checkpoint from {self._source.path} {at}")

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

        def collected() -> dict[str, Any]:
            found: dict[str, Any] = {}
            with self._ranks.together(f"save of {path}"):
                found.update(collect(state, iteration))
            return found

        if not args.use_megatron_fsdp_v2:
            write_torch_dist(state, iteration, path, self._ranks, after_commit)
        elif self._writer is not None:
            self._writer.write(collected, path, overwrite=True, after_commit=after_commit)
        else:
            write_checkpoint(collected(), path, self._ranks, overwrite=True, after_commit=after_commit)
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


def _format(args: argparse.Namespace) -> str:
    return "fsdp_dtensor" if args.use_megatron_fsdp_v2 else "torch_dist"
