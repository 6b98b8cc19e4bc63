# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs one pretraining from the command line to the last line of its log.

Everything that a user can get wrong on the command line is checked before the first collective, on
every rank alike.
"""

import argparse
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.pretrain.arguments import parse_arguments
from megatron.pretrain.launcher import Place, find_place, start_process_groups
from megatron.pretrain.muon_flags import MUON_FLAGS
from megatron.pretrain.outputs import check_outputs
from megatron.pretrain.recompute_flags import check_layers_for_recompute
from megatron.pretrain.requirements import CHECKPOINT_FLAGS, DDP_FLAGS, FSDP_V2_FLAGS, OUTPUT_FLAGS
from megatron.pretrain.validation import validate

if TYPE_CHECKING:
    from megatron.pretrain.profiling import ScheduleProfiler
    from megatron.pretrain.training import TrainState


@dataclass(frozen=True)
class Command:
    """A command line that makes sense, and where in the run this process stands."""

    words: tuple[str, ...]
    args: argparse.Namespace
    place: Place


def read_command(argv: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Read and check the command line; quick, because megatron-core is not imported yet.

    Args:
        argv: The words after the script's name.
        environment: Usually ``os.environ``.
    """
    place = find_place(environment)
    args = parse_arguments(argv)
    validate(args, place.world_size)
    check_outputs(args)
    return Command(tuple(argv), args, place)


def ignore_expected_warnings() -> None:
    """Silence megatron-core's warnings about libraries that this script does without."""
    for message in ("Transformer Engine and Apex are not", "Apex is not", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message)


def pretrain(command: Command) -> None:
    """Train a GPT as the flags say; called on every rank."""
    from megatron.pretrain import data, model, training
    from megatron.pretrain.checkpointing import Checkpoints
    from megatron.pretrain.log import TrainingLog

    args, place = command.args, command.place
    args.transformer_impl = "transformer_engine" if model.uses_transformer_engine(args) else "local"
    check_layers_for_recompute(args)
    data.check_data(args)
    start_process_groups(args, place)
    data.prepare_corpus(args, place)
    log = TrainingLog(args, is_writer=place.rank == place.world_size - 1)
    checkpoints = Checkpoints(args, log)
    iteration = checkpoints.open()
    state = training.build_train_state(args, data.build_iterators(args, iteration), log, iteration)
    checkpoints.load(state)
    with _open_profiler(args, place) as profiler:
        is_done = training.train(state, checkpoints, profiler)
    if args.profile_schedule and place.rank == 0:
        print(profiler.report(), flush=True)
    checkpoints.finish()
    if is_done:
        _report_end(state, command)
    log.close()
    if state.graph is not None:
        state.graph.release()
    stop_process_groups()


def _open_profiler(args: argparse.Namespace, place: Place) -> "ScheduleProfiler":
    """Return what records the steps that --profile-schedule asks for, on rank 0."""
    from megatron.pretrain.profiling import ScheduleProfiler

    return ScheduleProfiler(
        Path(args.profile_schedule or ""),
        "schedule",
        skip=args.profile_step_start,
        num_steps=args.profile_step_end - args.profile_step_start,
        is_writer=bool(args.profile_schedule) and place.rank == 0,
    )


def _report_end(state: "TrainState", command: Command) -> None:
    """Evaluate on the validation and the test set, draw the plot and say what may come next."""
    from megatron.pretrain import plot, training

    args, place, log = command.args, command.place, state.log
    end = f"iteration {args.train_iters}"
    training.report_evaluation(state, args.train_iters, state.data.valid, f"{end} on validation set")
    training.report_evaluation(state, args.train_iters, state.data.test, f"{end} on test set", is_test=True)
    if args.plot and log.is_writer:
        wrapper = "Megatron-FSDP v2" if args.use_megatron_fsdp_v2 else "megatron-core DDP"
        plot.draw_loss_curve(log.history, args.plot, f"{wrapper}, {place.world_size} rank(s)")
        log.print(f"Loss curve: {args.plot}")
    other = "megatron-core's DDP" if args.use_megatron_fsdp_v2 else "Megatron-FSDP v2"
    log.print(f"Next, the same with {other}: {suggest_next(command)}")


def stop_process_groups() -> None:
    """Leave the process groups; called on every rank at the end."""
    import torch.distributed as dist

    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def suggest_next(command: Command) -> str:
    """Return the command that trains the same model with the other data-parallel wrapper.

    It names no output, so that following it overwrites nothing. On several nodes it is the command of one of them.
    """
    is_v2 = command.args.use_megatron_fsdp_v2
    others = FSDP_V2_FLAGS if is_v2 else DDP_FLAGS
    if command.args.optimizer == "muon":  # DDP trains with Adam then.
        others = (*others, "--optimizer", *MUON_FLAGS)
    words = _without(command.words, (*OUTPUT_FLAGS, *CHECKPOINT_FLAGS, *others))
    if not is_v2:
        words.insert(0, "--use-megatron-fsdp-v2")
    launcher = ["python"]
    if command.place.is_launched:
        launcher = ["torchrun", "--nproc_per_node", str(command.place.local_world_size)]
    return shlex.join([*launcher, "pretrain_gpt.py", *words])


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Drop the flags and their values."""
    kept: list[str] = []
    is_dropping = False
    for word in words:
        if word.startswith("--"):
            is_dropping = word.split("=", 1)[0] in flags
        if not is_dropping:
            kept.append(word)
    return kept
