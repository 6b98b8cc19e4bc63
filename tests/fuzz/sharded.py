# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs a program on the ranks of the default process group, under a trace, and checks its state after every step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.experimental import (
    FsdpContext,
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.experimental.device import observe
from tests.fuzz.model import CellModule, Tape, build_roots, joint_units
from tests.fuzz.play import MAX_NORM, OPTIMIZERS, SCALE, Player, Record
from tests.fuzz.program import STRATEGIES, Program, Schedule, Step
from tests.unit_tests.launch import lasting_mesh
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks
from tests.unit_tests.trace import Trace

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "wide": MixedPrecisionPolicy(main_params_dtype=torch.float64),
    "float32": MixedPrecisionPolicy(),
    "own": MixedPrecisionPolicy(main_params_dtype=None),
    "float32_grads": MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float32),
}


class _Watch(Trace):
    """A trace that logs collectives with the buffers that they use, since those of two units may have one size."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, ...]] = []

    def access(self, operation: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        super().access(operation, reads, writes)
        if operation in _COLLECTIVES:
            self.log.append((operation, *reads, *writes))

    def collective(self, operation: str, dtype: torch.dtype, numel: int, ranks: int) -> None:
        self.log.append((operation, str(dtype), str(numel)))


_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def run_sharded(program: Program) -> Record:
    """Train on this rank's share; raise if units do not rest or ranks differ in their collectives."""
    watch = _Watch()
    with observe(watch):
        tape = Tape()
        roots = build_roots(program, tape)
        context = _shard(program, roots)
        player = Player(program, roots, tape, Record())
        trainable = [p for root in roots for p in root.parameters() if p.requires_grad]
        optimizer = fully_shard_optimizer(OPTIMIZERS[program.optimizer](trainable))
        for index, step in enumerate(program.steps):
            _run_step(player, context, optimizer, step, index)
            assert_same_on_all_ranks(watch.log)
            watch.log.clear()
        player.record.weights = {name: p.full_tensor() for name, p in named(roots).items()}
    player.record.races = watch.races
    return player.record


def named(roots: list[CellModule]) -> dict[str, Any]:
    """Return the parameters of all roots by name."""
    return {f"{index}.{name}": p for index, root in enumerate(roots) for name, p in root.named_parameters()}


def _shard(program: Program, roots: list[CellModule]) -> FsdpContext:
    mesh = None if program.is_implicit and program.num_outer is None else _mesh(program.num_outer)
    block = (
        nullcontext(None)
        if program.is_implicit
        else fully_shard_context(
            "cpu",
            unify_communication_stream=program.is_unified,
            trace_pool=program.has_pool,
            separate_communicators=program.is_separate,
        )
    )
    number = 0
    with block as context:
        for root in roots:
            for modules in joint_units(root, program.joins):
                placements = _placements(program, number)
                fully_shard(
                    modules,
                    mesh,
                    placements,
                    mixed_precision_policy=POLICIES[program.policy],
                    grad_divisor=program.divisor,
                    gradient_reduction=program.reduction,
                    schedule_policy=_schedule_policy(program.schedules[number % len(program.schedules)], placements),
                )
                number += 1
    unit: Any = roots[0]
    return context or unit.context


def _mesh(num_outer: int | None) -> DeviceMesh:
    world_size = dist.get_world_size()
    if num_outer is None:
        return lasting_mesh((world_size,), ("dp",))
    return lasting_mesh((num_outer, world_size // num_outer), ("outer", "dp"))


def _placements(program: Program, number: int) -> Placements:
    inner, outer = STRATEGIES[program.strategies[number % len(program.strategies)]]
    return Placements.from_strategy(inner, outer=None if program.num_outer is None else outer)


def _schedule_policy(schedule: Schedule, placements: Placements) -> SchedulePolicy:
    gathers = any(at.is_shard() for at in placements.parameter)
    return SchedulePolicy(
        forward_prefetch_units=schedule.forward,
        backward_prefetch_units=schedule.backward,
        forward_prefetch_numel=schedule.numel if schedule.forward else None,
        backward_prefetch_numel=schedule.numel if schedule.backward else None,
        reshard_after_forward=schedule.reshard if gathers else None,
    )


def _run_step(player: Player, context: FsdpContext, optimizer: torch.optim.Optimizer, step: Step, index: int) -> None:
    roots, record, rank = player.roots, player.record, dist.get_rank()
    if step.fault != "no":
        player.fail(step, index, rank)
    if step.evaluates != "no":
        player.evaluate(step, index, rank)
        _assert_all_at_rest(roots)
    if step.zero_grad != "keep":
        optimizer.zero_grad(set_to_none=step.zero_grad == "none")
    for number, item in enumerate(step.microbatches):
        for root in roots:
            unit: Any = root
            unit.set_requires_gradient_sync(item.syncs)
        with microbatch(context, is_last=number == len(step.microbatches) - 1):
            player.microbatch(item, index, number, rank)
    parameters = named(roots)
    if step.clips:
        trainable = optimizer.param_groups[0]["params"]
        record.norms.append(clip_grad_norm_(trainable, MAX_NORM, player.program.norm_type).item())
    _assert_all_at_rest(roots)
    record.gradients.append({n: None if p.grad is None else p.grad.full_tensor() for n, p in parameters.items()})
    if step.peeks:
        player.peek(index, rank)
    if step.steps:
        optimizer.step()
    if step.writes == "scale":
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(SCALE)
    elif step.writes == "load":
        for root in roots:
            root.load_state_dict(root.state_dict())


def _assert_all_at_rest(roots: Any) -> None:
    for root in roots:
        assert_at_rest(root)
