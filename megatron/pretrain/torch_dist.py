# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own ``torch_dist`` format: written by runs with its DDP, read into runs with Megatron-FSDP v2."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import dist_checkpointing
from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.experimental.checkpoint import (
    CheckpointError,
    Ranks,
    Verification,
    being_written,
    checksum_file,
    clean_interrupted,
    commit,
    staging_path,
    write_manifest,
)
from megatron.core.distributed.fsdp.torch_dist_checkpoint import TorchDistCheckpoint
from megatron.core.distributed.fsdp.torch_dist_groups import match_groups, saved_groups, saved_scaler
from megatron.core.optimizer.fully_sharded_optimizer_state import load_scaler_state
from megatron.pretrain.fsdp_dtensor import VERSION, keeping_bounds, load_schedule, plain_arguments

if TYPE_CHECKING:
    from megatron.pretrain.training import TrainState

_METADATA = {"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": "fully_reshardable"}


class TorchDistSource:
    """A checkpoint that a run goes on from; random number generators are not taken from it.

    Args:
        path: Its folder.
        ranks: All ranks, each of which makes one.
        verify: Compare sizes, or checksums too where there are some.

    Attributes:
        iteration: The last one that had been trained, or None if it does not say.
        arguments: Of the run that saved it, or None.
    """

    def __init__(self, path: Path, ranks: Ranks, verify: Verification) -> None:
        self.path = path
        self._ranks = ranks
        self._saved = TorchDistCheckpoint(path, ranks, verify)
        self.iteration: Any = self._saved.common.get("iteration")
        self.arguments: Any = self._saved.common.get("args")

    def load(self, state: TrainState, *, loads_optimizer: bool, loads_rng: bool) -> None:
        """Read into a run.

        Raises:
            CheckpointError: It is one of another model, optimizer or schedule, or its generators are asked for; on
                every rank.
        """
        common = self._saved.common
        states: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        with self._ranks.together(f"load of {self.path}"):
            if loads_rng:
                raise CheckpointError(
                    f"load of {self.path}: expected --no-load-rng, since generators of another wrapper's run mean "
                    "nothing here, got a run without it. Add the flag."
                )
            if loads_optimizer and state.args.optimizer == "muon":
                raise CheckpointError(
                    f"load of {self.path}: expected --no-load-optim with --optimizer muon, since state of "
                    "megatron-core's DDP is read for Adam alone, got a run without it. Add the flag."
                )
            if loads_optimizer:
                groups = match_groups(saved_groups(common), state.optimizer.param_groups)
                found = state.optimizer.sharded_state_dict({}, is_loading=True)["state"]
                # Where the loss scaler has skipped every update so far, moments are the zeros that have been created.
                if self._saved.has_moments or not saved_scaler(common):
                    states = {names.canonical_name(name): _moments(values) for name, values in found.items()}
        weights = {name: tensor for chunk in state.chunks for name, tensor in names.model_tensors(chunk).items()}
        others: set[str] = set()
        if state.args.pipeline_model_parallel_size > 1:
            found_by_rank = self._ranks.gather(sorted(weights), f"load of {self.path}")
            others = {name for found_names in found_by_rank for name in found_names}
        self._saved.read(weights, states, state.chunks[0].config, others)
        with self._ranks.together(f"load of {self.path}"):
            if loads_optimizer:
                with keeping_bounds(state):
                    _set_groups(state.optimizer, groups, has_steps=bool(states))
                load_scaler_state(state.optimizer.grad_scaler, saved_scaler(common))
                load_schedule(state.scheduler, dict(common.get("opt_param_scheduler") or {}), self.path)


def _moments(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "step"}


def _set_groups(optimizer: Any, groups: list[dict[str, Any]], *, has_steps: bool) -> None:
    """Give the groups their settings, and each parameter's state its step."""
    base = optimizer.optimizer
    for live, saved in zip(base.param_groups, groups, strict=True):
        step = saved.pop("step", None)
        live.update(saved)
        counts = [state for state in map(base.state.get, live["params"]) if state and "step" in state]
        if step is None:
            if counts and has_steps:
                raise CheckpointError(
                    "steps of the optimizer: expected them in the checkpoint, got moments without them. Use "
                    "--no-load-optim."
                )
            continue
        if "step" in live:
            live["step"] = step
        for state in counts:
            state["step"].fill_(step)


def write_torch_dist(
    state: TrainState, iteration: int, path: Path, ranks: Ranks, after_commit: Callable[[], None]
) -> None:
    """Write a checkpoint of a run with megatron-core's DDP; `path` appears when it is complete.

    Raises:
        CheckpointError: It cannot be written; on every rank.
    """
    what = f"save of {path}"
    staging = staging_path(path, ranks.gather(secrets.token_hex(4), what)[0])
    ranks.first(_require_psutil, what)
    ranks.first(lambda: clean_interrupted(path.parent), what)
    with ExitStack() as held:
        ranks.first(lambda: held.enter_context(being_written(staging)), what)
        sharded: dict[str, Any] = {}
        with ranks.together(what):
            parts = [chunk.sharded_state_dict(metadata=_METADATA) for chunk in state.chunks]
            model = {"model": parts[0]} if len(parts) == 1 else {f"model{i}": part for i, part in enumerate(parts)}
            sharded = {
                **model,
                "args": plain_arguments(state.args, iteration),
                "checkpoint_version": VERSION,
                "iteration": iteration,
                "num_floating_point_operations_so_far": 0,
            }
            if not state.args.no_save_optim:
                sharded["optimizer"] = state.optimizer.sharded_state_dict(model, metadata=_METADATA)
                sharded["opt_param_scheduler"] = state.scheduler.state_dict()
        with ranks.together(what):
            dist_checkpointing.save(sharded, str(staging), content_metadata=_METADATA)
        ranks.first(lambda: _commit(staging, path), what)
    ranks.first(after_commit, what)


def _require_psutil() -> None:
    if importlib.util.find_spec("psutil") is None:
        raise CheckpointError(
            "save with megatron-core's DDP: expected the package psutil, which its torch_dist writer needs, got a "
            "Python without it. Run pip install psutil."
        )


def _commit(staging: Path, path: Path) -> None:
    """Bring all files to the disk, list them in a manifest, and give the checkpoint its name."""
    records = {}
    for file in sorted(staging.iterdir()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        records[file.name] = checksum_file(file)
    write_manifest(staging, records)
    commit(staging, path)
