# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks have built the same units from the same weights; asked once, when a context is finalised.

So is whether ranks of model parallelism hold the same copies of what is not cut between them.

Ranks that differ would wait for each other, or mix up each other's weights. Calls that differ later are found in
`lockstep.py`.

[Note: one round per process group]
The round is one all-reduce of fixed size, so that it ends whatever each rank has built: the number of units, a hash of
all facts about them and a checksum of their values, each beside its negative, whose maximum is the minimum. Only where
these differ do ranks send the facts themselves, or one checksum per unit, to name the first unit that differs.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from . import collectives
from .checksum import MULTIPLIER, checksum_of
from .group_options import GroupOptions, OwnedParameter
from .unit import Unit

_MASK = (1 << 62) - 1
"""Keeps a number's negative representable."""

_num_models: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Roots that have been numbered over each process group."""


@dataclass(frozen=True)
class UnitRecord:
    """What ranks must agree on about one unit, taken while it is sharded.

    Attributes:
        facts: (what, value) pairs in a fixed order; without addresses, ids and devices, which differ anyway.
        groups: the process groups over which the unit communicates.
        checksum: int64, 0-d, on the context's device; of the values that all ranks should have started from, without
            those that parameters built on the meta device get later.
        copies: (name, checksum) of the parameters that are whole on all ranks of `copy_groups`.
        copy_groups: the process groups along the mesh axes that are not data-parallel.
    """

    facts: tuple[tuple[str, str], ...]
    groups: tuple[dist.ProcessGroup, ...]
    checksum: torch.Tensor
    copies: tuple[tuple[str, torch.Tensor], ...] = ()
    copy_groups: tuple[dist.ProcessGroup, ...] = ()


_DIRECTIONS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")

_Unit = tuple[str, list[list[str]]]
"""A unit's name and facts, as they come out of JSON."""


def record_unit(owned: Sequence[OwnedParameter], options: GroupOptions, register_hooks: bool) -> UnitRecord:
    """Describe a unit whose parameters are still full; no host synchronisation.

    Args:
        owned: the unit's parameters, in the order of their groups.
        options: what its groups share.
        register_hooks: whether it drives itself.
    """
    mesh = options.mesh
    facts = [
        ("mesh", f"{tuple(mesh.shape)} {mesh.mesh_dim_names}"),
        ("placements", repr(options.placements)),
        ("mixed_precision_policy", repr(options.mixed_precision_policy)),
        ("grad_divisor", repr(options.grad_divisor)),
        ("gradient_reduction", options.gradient_reduction),
        ("register_hooks", repr(register_hooks)),
        ("memory", type(options.allocator).__name__),
        ("separate_communicators", repr(options.separate_communicators)),
    ]
    checksum = torch.zeros((), dtype=torch.int64, device=options.device)
    copies: list[tuple[str, torch.Tensor]] = []
    for item in owned:
        kind = _kind(item.parameter.requires_grad)
        cut = options.model_cut(item.parameter, item.fqn)
        piece = "" if cut is None else f" cut {cut.dim}/{cut.stride}"
        facts.append((f"parameter {item.fqn}", f"{tuple(item.parameter.shape)} {item.parameter.dtype} {kind}{piece}"))
        if not item.parameter.is_meta:
            values = checksum_of(item.parameter).to(options.device)
            checksum = checksum * MULTIPLIER + values
            if cut is None:
                copies.append((item.fqn, values))
    groups = tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
    num_axes = len(options.placements.dp_axes)
    return UnitRecord(tuple(facts), groups[:num_axes], checksum, tuple(copies), groups[num_axes:])


def _kind(is_trainable: bool) -> str:
    return "trainable" if is_trainable else "frozen"


def check_units(units: Sequence[tuple[Unit, UnitRecord]], device: torch.device) -> None:
    """Compare the units of a context over every process group that they use; called once they have their names.

    Args:
        units: each unit and its record, in forward order.
        device: the context's device.

    Raises:
        RuntimeError: units differ; on every rank of the group, naming the first unit and what differs. Or values do
            that ranks along the axes of model parallelism share; on every rank of the mesh, naming the first parameter.

    Warns:
        UserWarning: initial values differ; on every rank of the group, naming the first unit.
    """
    groups = {group.group_name: group for _, record in units for group in record.groups}
    # By name, so that ranks of several groups come to them in one order.
    for _, group in sorted(groups.items()):
        if group.size() > 1:
            members = [(unit.name, _as_it_is_now(unit, record)) for unit, record in units if group in record.groups]
            _check_group(members, device, group)
    _check_copies(units, device)
    _number_models(units)


def _as_it_is_now(unit: Unit, record: UnitRecord) -> UnitRecord:
    """Return the record with what may have been set, and computed, since the unit was sharded."""
    checksum = record.checksum
    targets = [unit.prefetch_targets(way) for way in _DIRECTIONS]
    settings = (
        ("schedule_policy", repr(unit.schedule_policy)),
        ("requires_gradient_sync", repr(unit.reduces_gradients)),
        ("prefetch", repr([None if named is None else [item.name for item in named] for named in targets])),
    )
    kinds = {
        f"parameter {fqn}": _kind(is_trainable)
        for group in unit.parameter_groups
        for fqn, is_trainable in zip(group.fqns, group.trainable, strict=True)
    }
    facts = [
        (what, f"{value.rpartition(' ')[0]} {kinds[what]}" if what in kinds else value) for what, value in record.facts
    ]
    for group in unit.parameter_groups:
        checksum = checksum * MULTIPLIER + group.values_checksum
    return replace(record, facts=(*settings, *facts), checksum=checksum)


class Agreement:
    """Asks all ranks that share units whether they have come to the same.

    Args:
        records: of the context's units.
        device: the context's device.
    """

    def __init__(self, records: Sequence[UnitRecord], device: torch.device) -> None:
        groups = {group.group_name: group for record in records for group in record.groups if group.size() > 1}
        self._groups = [group for _, group in sorted(groups.items())]
        self._device = device

    def __call__(self, description: str) -> bool:
        """Return whether `description` is the same on all ranks; waits for the device, and every rank must call it."""
        digest = _digest(description.encode())
        is_same = True
        # Twice, so that what differs in one group is known in the others that share ranks with it.
        for group in self._groups if len(self._groups) == 1 else self._groups * 2:
            values = torch.tensor([digest, int(is_same)], device=self._device)
            # Asked in any case: others of the group wait for this rank.
            found = _compare(values, group, "the order of units that ranks have learnt")
            is_same = is_same and all(found)
        return is_same


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") & _MASK


def _number_models(units: Sequence[tuple[Unit, UnitRecord]]) -> None:
    """Let the names of what units send tell models apart whose units have the same names.

    Numbers count per process group, so that ranks with other models besides agree on them.
    """
    numbers: dict[tuple[int, str], int] = {}
    for unit, record in units:
        group = record.groups[0]
        key = (id(unit._fsdp_root()), group.group_name)
        if key not in numbers:
            numbers[key] = _num_models.get(group, 0)
            _num_models[group] = numbers[key] + 1
        for parameter_group in unit.parameter_groups:
            if numbers[key]:
                for buffer in parameter_group.buffers:
                    buffer.origin = f" of model {numbers[key]}"


def _check_group(units: Sequence[tuple[str, UnitRecord]], device: torch.device, group: dist.ProcessGroup) -> None:
    described = json.dumps([(name, record.facts) for name, record in units]).encode()
    mine = torch.tensor([len(units), _digest(described), 0], device=device)
    checksums = [record.checksum & _MASK for _, record in units]
    for checksum in checksums:
        mine[2] = (mine[2] * MULTIPLIER + checksum) & _MASK
    same_count, same_facts, same_values = _compare(mine, group, "the agreement of ranks")
    if not (same_count and same_facts):
        everything = collectives.all_gather_bytes(described, device, group, what="the units of each rank")
        raise RuntimeError(_describe_difference([json.loads(item) for item in everything], group))
    if not same_values:
        same = _compare(torch.stack(checksums), group, "the checksums of units")
        warnings.warn(
            f"initial weights of unit {units[same.index(False)][0]}: expected the same values on all "
            f"{group.size()} ranks, got different ones, of which each rank now holds its own shard. Use the same seed "
            "on every rank, or broadcast the parameters from rank 0 before fully_shard; it does not matter if a "
            "checkpoint is loaded next.",
            stacklevel=2,
        )


def _check_copies(units: Sequence[tuple[Unit, UnitRecord]], device: torch.device) -> None:
    """Compare what ranks of model parallelism hold copies of, which would drift apart; nothing without such ranks.

    Other than ranks of data parallelism, which each keep a shard, every one of them would train its own copy.
    """
    groups = {group.group_name: group for _, record in units for group in record.copy_groups}
    data_groups = Agreement([record for _, record in units], device)
    for _, group in sorted(groups.items()):
        if group.size() == 1:
            continue
        copies = [
            (unit.name, fqn, checksum & _MASK)
            for unit, record in units
            if group in record.copy_groups
            for fqn, checksum in record.copies
        ]
        mine = torch.tensor([_digest(json.dumps([names[:2] for names in copies]).encode()), 0], device=device)
        for _, _, checksum in copies:
            mine[1] = (mine[1] * MULTIPLIER + checksum) & _MASK
        is_same = all(_compare(mine, group, "weights that ranks hold copies of"))
        if data_groups(f"copies are the same: {is_same}") and is_same:
            continue
        described = json.dumps([(unit, fqn, int(checksum)) for unit, fqn, checksum in copies]).encode()
        gathered = collectives.all_gather_bytes(described, device, group, what="weights that ranks hold copies of")
        raise RuntimeError(_describe_copies([json.loads(item) for item in gathered], group))


def _describe_copies(ranks: Sequence[list[list[Any]]], group: dist.ProcessGroup) -> str:
    """Name the first copy in which a rank differs from the group's first rank."""
    names = dist.get_process_group_ranks(group)
    found = [(_first_difference(ranks[0], copies), index) for index, copies in enumerate(ranks) if copies != ranks[0]]
    where = "got different ones on other ranks, which name them"
    if found:
        position, other = min(found)
        unit, fqn, _ = next(copies[position] for copies in (ranks[0], ranks[other]) if position < len(copies))
        where = f"got different ones on ranks {names[0]} and {names[other]} for {fqn} of unit {unit}"
    return (
        f"initial weights that ranks {names} of model parallelism hold copies of: expected the same values, {where}. "
        "Draw them from a generator that these ranks have in common, or broadcast them from one before fully_shard."
    )


def _compare(values: torch.Tensor, group: dist.ProcessGroup, what: str) -> list[bool]:
    """Return for each of `values`, between 0 and 2**62, whether it is the same on all ranks."""
    extremes = torch.stack([values, -values])
    collectives.all_reduce(extremes, "max", group, what=what)
    highest, negative_lowest = extremes.tolist()
    return [high == -low for high, low in zip(highest, negative_lowest, strict=True)]


def _describe_difference(ranks: Sequence[list[_Unit]], group: dist.ProcessGroup) -> str:
    """Name the first unit in which a rank differs from the group's first rank, and what differs.

    Args:
        ranks: every rank's units.
        group: the ranks.
    """
    names = dist.get_process_group_ranks(group)
    differing = [index for index, units in enumerate(ranks) if units != ranks[0]]
    position, other = min((_first_difference(ranks[0], ranks[index]), index) for index in differing)
    ours, theirs = _facts_at(ranks[0], position), _facts_at(ranks[other], position)
    fact = _first_difference(ours, theirs)
    name = (ours if position < len(ranks[0]) else theirs)[0][1]
    return (
        f"units of ranks: expected the same on all ranks {names}, got for {name}, number {position} in forward order: "
        f"{_fact_at(ours, fact)} on rank {names[0]}, {_fact_at(theirs, fact)} on rank {names[other]}. Build the same "
        "model and call fully_shard with the same options in the same order on every rank."
    )


def _first_difference(first: Sequence[Any], second: Sequence[Any]) -> int:
    return next(index for index, (a, b) in enumerate(zip_longest(first, second)) if a != b)


def _facts_at(units: list[_Unit], position: int) -> list[list[str]]:
    if position >= len(units):
        return [["unit", f"none, {len(units)} in all"]]
    name, facts = units[position]
    return [["unit", name], *facts]


def _fact_at(facts: list[list[str]], index: int) -> str:
    return "{}: {}".format(*facts[index]) if index < len(facts) else "nothing more"
