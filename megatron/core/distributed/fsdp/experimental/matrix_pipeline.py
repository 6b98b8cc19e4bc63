# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`MatrixPipeline`: brings matrices to their owners and results back, package by package, while owners compute.

Who owns what is matrix_plan.py's; what is computed is the worker's.

[Note: two slots]
While the owners compute with one package the next one travels, so that every kind of buffer exists twice, however many
packages there are. Shards are written straight into what is sent, or into the owner's matrix where the owner has them
itself; they arrive where the owner computes, and results are sent from where it has left them. Only the order of calls
below, and the events, keep a slot from being written while it is read. Exchanges begin when what is computed before
them has ended, which may have used the memory of the buffers just before:

    compute   prepare 0 | prepare 1 | solve 0 |           prepare 2 | solve 1 | apply 0 |           prepare 3 ...
    exchange             gather 0    gather 1   scatter 0            gather 2   scatter 1            gather 3 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from . import collectives
from .device import Event, Stream, current_stream, new_stream, report_access
from .matrix_plan import MatrixPlan, Message

_MAX_SETS = 16
"""Sets of active matrices that packages are kept for."""

_ALIGNMENT = 64
"""Every matrix and message begins at a multiple of it in its buffer: kernels may round otherwise at other addresses."""


@dataclass(frozen=True)
class Run:
    """Elements ``[start, stop)`` of this rank's piece of matrix `matrix`, counted from the matrix's first in it."""

    matrix: int
    start: int
    stop: int


class Worker(Protocol):
    """What a pipeline lets be computed."""

    def prepare(self, runs: Sequence[Run], into: Sequence[torch.Tensor]) -> None:
        """Write what owners need of this rank's runs into flat tensors, one for each."""
        ...

    def solve(self, matrix: int, pieces: torch.Tensor, result: torch.Tensor) -> None:
        """Compute with a whole matrix; `pieces` and `result` are [pieces * piece_numel], all pieces in order."""
        ...

    def apply(self, runs: Sequence[Run], results: Sequence[torch.Tensor]) -> None:
        """Take what owners have computed for this rank's runs."""
        ...


@dataclass(frozen=True)
class Participants:
    """The ranks that share the matrices of one mesh.

    Attributes:
        ranks: global rank of each participant, in the order of the plan's places.
        me: index of this rank.
        group: process group that holds them; None for one participant.
        device: where tensors lie.
    """

    ranks: tuple[int, ...]
    me: int
    group: dist.ProcessGroup | None
    device: torch.device


@dataclass(frozen=True)
class _Part:
    """A run of elements of a buffer, and the rank that it comes from or goes to."""

    offset: int
    numel: int
    peer: int = -1

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.offset : self.offset + self.numel]


@dataclass
class _Round:
    """What this rank does with the n-th packages: parts of the four buffers of a slot.

    Attributes:
        prepared: runs whose elements owners need from this rank, each with where to write them: in what is sent, or
            in the owner's own matrix.
        sends: of what is sent.
        receives: of the matrices.
        solves: matrices that this rank owns, each with its place.
        returns: of the results.
        arrivals: of the updates.
        applied: this rank's runs, each with where its result is: among updates, or among this rank's own results.
        numels: of what is sent, of matrices (and their results), of updates.
    """

    prepared: list[tuple[Run, str, _Part]] = field(default_factory=list)
    sends: list[_Part] = field(default_factory=list)
    receives: list[_Part] = field(default_factory=list)
    solves: list[tuple[int, _Part]] = field(default_factory=list)
    returns: list[_Part] = field(default_factory=list)
    arrivals: list[_Part] = field(default_factory=list)
    applied: list[tuple[Run, str, _Part]] = field(default_factory=list)
    numels: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("sent", "matrix", "update"), 0))

    def place(self, kind: str, numel: int) -> int:
        """Reserve elements in a buffer and return the offset of the first."""
        offset = self.numels[kind]
        self.numels[kind] = offset + -(-numel // _ALIGNMENT) * _ALIGNMENT
        return offset


@dataclass
class _Slot:
    """Buffers of one package, and what later work waits for.

    Attributes:
        buffers: by kind: "sent" and "matrix" in the dtype in which elements travel, "result" and "update" in that of
            the results.
        names: the same for observers.
        gathered: matrices are whole.
        scattered: updates have arrived.
    """

    buffers: dict[str, torch.Tensor]
    names: dict[str, str]
    gathered: Event | None = None
    scattered: Event | None = None


class MatrixPipeline:
    """Runs a `Worker` over the matrices of a plan.

    Args:
        plan: owners and packages.
        participants: the ranks that share it.
        travel_dtype: dtype in which elements go to owners.
        result_dtype: dtype in which results come back.
        what: names the matrices in errors and for observers.
    """

    def __init__(
        self,
        plan: MatrixPlan,
        participants: Participants,
        travel_dtype: torch.dtype,
        result_dtype: torch.dtype,
        what: str,
    ) -> None:
        self.plan = plan
        self._participants = participants
        self._dtypes = {"sent": travel_dtype, "matrix": travel_dtype, "result": result_dtype, "update": result_dtype}
        self._what = what
        self._stream = new_stream(participants.device, "matrices")
        self._rounds: dict[frozenset[int] | None, list[_Round]] = {}

    def buffer_bytes(self, active: frozenset[int] | None = None) -> int:
        """Return what the buffers of a run take: two of each kind, as large as the largest package needs.

        Args:
            active: as for `run`.
        """
        rounds = self._rounds_of(active)
        return sum(
            self._numel_of(kind, rounds) * dtype.itemsize * min(2, len(rounds)) for kind, dtype in self._dtypes.items()
        )

    def run(self, worker: Worker, active: frozenset[int] | None = None) -> None:
        """Prepare, solve and apply every matrix; every participant must call it with the same `active`.

        Called on the compute stream, which has waited for everything when this returns.

        Args:
            worker: computes.
            active: the matrices to compute with; None for all.
        """
        rounds = self._rounds_of(active)
        slots = [self._new_slot(index, rounds) for index in range(min(2, len(rounds)))]
        for number in range(min(1, len(rounds))):
            self._gather(rounds[number], slots[number], worker)
        for number, current in enumerate(rounds):
            if number + 1 < len(rounds):
                self._gather(rounds[number + 1], slots[(number + 1) % 2], worker)
            self._solve(current, slots[number % 2], worker)
            if number:
                self._apply(rounds[number - 1], slots[(number - 1) % 2], worker)
        if rounds:
            self._apply(rounds[-1], slots[(len(rounds) - 1) % 2], worker)

    def _new_slot(self, index: int, rounds: Sequence[_Round]) -> _Slot:
        device = self._participants.device
        return _Slot(
            {k: torch.empty(self._numel_of(k, rounds), dtype=t, device=device) for k, t in self._dtypes.items()},
            {kind: f"{self._what}.{kind}{index}" for kind in self._dtypes},
        )

    @staticmethod
    def _numel_of(kind: str, rounds: Sequence[_Round]) -> int:
        return max((current.numels["matrix" if kind == "result" else kind] for current in rounds), default=0)

    def _gather(self, current: _Round, slot: _Slot, worker: Worker) -> None:
        names = slot.names
        report_access("prepare", writes=(names["sent"], names["matrix"]))
        worker.prepare(
            [run for run, _, _ in current.prepared],
            [part.of(slot.buffers[kind]) for _, kind, part in current.prepared],
        )
        with self._after_compute():
            report_access("gather_matrices", reads=(names["sent"],), writes=(names["matrix"],))
            self._exchange(current.sends, slot.buffers["sent"], current.receives, slot.buffers["matrix"])
            slot.gathered = self._stream.record_event()

    def _solve(self, current: _Round, slot: _Slot, worker: Worker) -> None:
        names = slot.names
        current_stream(self._participants.device).wait_event(slot.gathered)
        report_access("solve", reads=(names["matrix"],), writes=(names["result"],))
        for matrix, part in current.solves:
            worker.solve(matrix, part.of(slot.buffers["matrix"]), part.of(slot.buffers["result"]))
        with self._after_compute():
            report_access("scatter_results", reads=(names["result"],), writes=(names["update"],))
            self._exchange(current.returns, slot.buffers["result"], current.arrivals, slot.buffers["update"])
            slot.scattered = self._stream.record_event()

    def _apply(self, current: _Round, slot: _Slot, worker: Worker) -> None:
        current_stream(self._participants.device).wait_event(slot.scattered)
        report_access("apply", reads=(slot.names["update"], slot.names["result"]))
        worker.apply(
            [run for run, _, _ in current.applied],
            [part.of(slot.buffers[kind]) for _, kind, part in current.applied],
        )

    def _after_compute(self) -> Stream:
        """Return the stream of exchanges, which waits for the compute issued so far."""
        self._stream.wait_stream(current_stream(self._participants.device))
        return self._stream

    def _exchange(
        self, sends: Sequence[_Part], source: torch.Tensor, receives: Sequence[_Part], target: torch.Tensor
    ) -> None:
        group = self._participants.group
        if group is not None:
            collectives.exchange(
                [(part.of(source), part.peer) for part in sends],
                [(part.of(target), part.peer) for part in receives],
                group,
                what=self._what,
            )

    def _rounds_of(self, active: frozenset[int] | None) -> list[_Round]:
        if active not in self._rounds:
            if len(self._rounds) >= _MAX_SETS:
                self._rounds.clear()
            chosen = [[m for m in package if active is None or m in active] for package in self.plan.rounds]
            self._rounds[active] = [self._plan_round(package) for package in chosen if package]
        return self._rounds[active]

    def _plan_round(self, package: Sequence[int]) -> _Round:
        found, plan, me = _Round(), self.plan, self._participants.me
        for matrix in package:
            whole = -1
            if plan.owners[matrix] == me:
                numel = plan.matrices[matrix].piece_numel * plan.num_pieces
                whole = found.place("matrix", numel)
                found.solves.append((matrix, _Part(whole, numel)))
            for message in plan.gathers(matrix):
                self._plan_gather(found, message, whole)
            for message in plan.scatters(matrix):
                self._plan_scatter(found, message, whole)
        return found

    def _plan_gather(self, found: _Round, message: Message, whole: int) -> None:
        me, numel = self._participants.me, message.stop - message.start
        run = Run(message.matrix, message.start, message.stop)
        inside = whole + message.piece * self.plan.matrices[message.matrix].piece_numel + message.start
        if message.owner == message.holder == me:
            found.prepared.append((run, "matrix", _Part(inside, numel)))
        elif message.holder == me:
            part = _Part(found.place("sent", numel), numel, self._participants.ranks[message.owner])
            found.prepared.append((run, "sent", part))
            found.sends.append(part)
        elif message.owner == me:
            found.receives.append(_Part(inside, numel, self._participants.ranks[message.holder]))

    def _plan_scatter(self, found: _Round, message: Message, whole: int) -> None:
        me, numel = self._participants.me, message.stop - message.start
        run = Run(message.matrix, message.start, message.stop)
        inside = whole + message.piece * self.plan.matrices[message.matrix].piece_numel + message.start
        if message.owner == message.holder == me:
            found.applied.append((run, "result", _Part(inside, numel)))
        elif message.holder == me:
            part = _Part(found.place("update", numel), numel, self._participants.ranks[message.owner])
            found.applied.append((run, "update", part))
            found.arrivals.append(part)
        elif message.owner == me:
            found.returns.append(_Part(inside, numel, self._participants.ranks[message.holder]))
