# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which rank computes with which matrix, and in which packages matrices travel: integers only, no tensors, no ranks.

It knows what a matrix costs and where its elements lie, not what is computed. The same arguments give the same plan on
every rank, so that nothing is communicated for it.

[Note: owners]
A rule that looks at whole matrices needs all elements of one in one place. To bring every matrix to every rank would
waste as much arithmetic as there are ranks, so each has one owner: its elements travel there, and the results travel
back to wherever elements lie, copies included. A matrix that lies whole on a rank stays there, and one that is
spread goes to the rank with most of it, unless that rank would have more to do than `MAX_LOAD` of the mean.

[Note: packages]
Each owner deals with its matrices in packages of bounded size. The n-th packages of all owners travel together, while
those before them are computed with, and a rank waits for the others every second package. So that none waits long,
every owner does the same share of its work in each of them; and since the same weights of all layers lie on the same
ranks, it takes its kinds of matrices in turn, or a few ranks would send all of a package.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_LOAD = 1.02
"""What an owner may have to do, as a multiple of the mean, before a matrix goes to a rank with less of it, or none."""

_NUM_NEAREST = 16
_NUM_TRIES = 16
_MAX_FIRST_FITS = 4_000_000


@dataclass(frozen=True)
class Matrix:
    """What a plan knows of the matrices that stay together.

    Attributes:
        cost: of computing with them, in any unit.
        piece_numel: elements of each piece.
        ranges: (shard, start, stop) of the runs of a piece's elements that each shard holds, none of them empty.
    """

    cost: int
    piece_numel: int
    ranges: tuple[tuple[int, int, int], ...]

    def is_whole_on(self, shard: int) -> bool:
        """Return whether one shard of a piece has all of its elements."""
        return sum(stop - start for of, start, stop in self.ranges if of == shard) == self.piece_numel


@dataclass(frozen=True)
class Place:
    """What one participant holds: shard `shard` of piece `piece`; one of several copies of it.

    Attributes:
        piece: of tensor parallelism; 0 if matrices are not joined over it.
        shard: of data parallelism.
        replica: number of the copy.
    """

    piece: int
    shard: int
    replica: int


@dataclass(frozen=True)
class Message:
    """Elements ``[start, stop)`` of one piece of a matrix, on their way between its owner and one that holds them.

    Attributes:
        matrix: index of the matrix.
        piece: index of the piece.
        start: first element, counted from the first of the matrix in that piece.
        stop: one after the last.
        holder: participant that has the elements.
        owner: participant that computes with them.
    """

    matrix: int
    piece: int
    start: int
    stop: int
    holder: int
    owner: int


@dataclass(frozen=True)
class MatrixPlan:
    """Owners and packages.

    Attributes:
        matrices: as given.
        places: what each participant holds.
        owners: participant of each matrix.
        rounds: indices of the matrices in the n-th packages of all owners.
    """

    matrices: tuple[Matrix, ...]
    places: tuple[Place, ...]
    owners: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]

    @cached_property
    def num_pieces(self) -> int:
        """Pieces that make a matrix."""
        return 1 + max(place.piece for place in self.places)

    @property
    def loads(self) -> list[int]:
        """Cost of the matrices of each participant."""
        return _loads(self.owners, [matrix.cost for matrix in self.matrices], len(self.places))

    @property
    def imbalance(self) -> float:
        """The largest load as a multiple of the mean; 1 if there is nothing to do."""
        loads = self.loads
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    @property
    def travelling_numel(self) -> int:
        """Elements that a step sends to owners; as many, and those of further copies, are sent back."""
        return sum(
            message.stop - message.start
            for index in range(len(self.matrices))
            for message in self.gathers(index)
            if message.holder != message.owner
        )

    @cached_property
    def _holders(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for participant, place in enumerate(self.places):
            found.setdefault((place.piece, place.shard), []).append(participant)
        return found

    def gathers(self, index: int) -> Iterator[Message]:
        """Yield what makes matrix `index` whole on its owner, from the copies that are nearest to it."""
        owner = self.owners[index]
        for piece in range(self.num_pieces):
            for shard, start, stop in self.matrices[index].ranges:
                holders = self._holders[piece, shard]
                near = (p for p in holders if self.places[p].replica == self.places[owner].replica)
                yield Message(index, piece, start, stop, owner if owner in holders else next(near), owner)

    def scatters(self, index: int) -> Iterator[Message]:
        """Yield where elements of matrix `index` lie, copies included: where a result has to go."""
        for piece in range(self.num_pieces):
            for shard, start, stop in self.matrices[index].ranges:
                for holder in self._holders[piece, shard]:
                    yield Message(index, piece, start, stop, holder, self.owners[index])


def plan_matrices(matrices: Sequence[Matrix], places: Sequence[Place], package_numel: int) -> MatrixPlan:
    """Choose owners and packages.

    Args:
        matrices: in one order on every rank.
        places: what each participant holds; every shard of every piece is somewhere.
        package_numel: elements that an owner has in one package at most, or as many as the largest matrix has.

    Returns:
        A plan whose imbalance is at most `MAX_LOAD` where packing finds such owners; else the least one found.
    """
    owners = _choose_owners(matrices, places)
    num_pieces = 1 + max((place.piece for place in places), default=0)
    numels = [matrix.piece_numel * num_pieces for matrix in matrices]
    # Buffers hold the largest matrix in any case.
    limit = max(package_numel, max(numels, default=0))
    orders = [order for order in _orders(matrices, owners, len(places)) if order]
    num_rounds = max((_num_packages([numels[index] for index in order], limit) for order in orders), default=0)
    rounds: dict[int, list[int]] = {}
    for order in orders:
        load = sum(matrices[index].cost for index in order)
        done = number = held = 0
        for index in order:
            # Where the middle of its work lies if the owner does as much in each package.
            due = num_rounds * (2 * done + matrices[index].cost) // max(1, 2 * load)
            if due > number:
                number, held = due, 0
            if held and held + numels[index] > limit:
                number, held = number + 1, 0
            rounds.setdefault(number, []).append(index)
            held += numels[index]
            done += matrices[index].cost
    packages = tuple(tuple(sorted(rounds[number])) for number in sorted(rounds))
    return MatrixPlan(tuple(matrices), tuple(places), tuple(owners), packages)


def _orders(matrices: Sequence[Matrix], owners: Sequence[int], num: int) -> list[list[int]]:
    """Return the matrices of each owner, those of each kind spread evenly among the others.

    Example: two of one kind and four of another lie at 1/4, 3/4 and 1/8, 3/8, 5/8, 7/8 of the way.
    """
    kinds: list[dict[Any, list[int]]] = [{} for _ in range(num)]
    for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        kinds[owner].setdefault((-matrix.cost, matrix.ranges), []).append(index)
    found = []
    for mine in kinds:
        placed = [
            ((2 * number + 1) / (2 * len(mine[kind])), rank, index)
            for rank, kind in enumerate(sorted(mine))
            for number, index in enumerate(mine[kind])
        ]
        found.append([index for _, _, index in sorted(placed)])
    return found


def _num_packages(numels: Sequence[int], limit: int) -> int:
    """Return how many packages hold what comes in this order."""
    number, held = 1, 0
    for numel in numels:
        if held and held + numel > limit:
            number, held = number + 1, 0
        held += numel
    return number


def _choose_owners(matrices: Sequence[Matrix], places: Sequence[Place]) -> list[int]:
    """Return an owner of each matrix: near ones if that keeps within `MAX_LOAD`, else as even as found."""
    costs = [matrix.cost for matrix in matrices]
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    limit = max(math.floor(MAX_LOAD * sum(costs) / len(places)), max(costs, default=0))
    holders_of = _Holders(places)
    near = [holders_of.nearest(matrix) for matrix in matrices]
    found = _near_owners(order, costs, near, len(places), limit)
    if found is not None:
        return found
    even = _least_loaded(order, costs, len(places))
    highest = max(_loads(even, costs, len(places)))
    for number in range(_NUM_TRIES):
        trial = limit + (highest - limit) * number // _NUM_TRIES
        found = _near_owners(order, costs, near, len(places), trial)
        if found is None and len(costs) * len(places) <= _MAX_FIRST_FITS:
            found = _first_fit(order, costs, len(places), trial)
        if found is not None:
            return found
    return even


class _Holders:
    """Finds the participants that hold most of a matrix, each set of ranges once."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._of_shard: dict[int, list[int]] = {}
        for participant, place in enumerate(places):
            self._of_shard.setdefault(place.shard, []).append(participant)
        self._known: dict[tuple[tuple[int, int, int], ...], list[tuple[int, int]]] = {}

    def nearest(self, matrix: Matrix) -> list[tuple[int, int]]:
        """Return up to `_NUM_NEAREST` pairs (negative number of elements, participant), those with most first."""
        if matrix.ranges not in self._known:
            numels: dict[int, int] = {}
            for shard, start, stop in matrix.ranges:
                numels[shard] = numels.get(shard, 0) + stop - start
            shards = sorted(numels, key=lambda shard: (-numels[shard], shard))[:_NUM_NEAREST]
            pairs = [(-numels[shard], participant) for shard in shards for participant in self._of_shard[shard]]
            self._known[matrix.ranges] = pairs[:_NUM_NEAREST]
        return self._known[matrix.ranges]


def _near_owners(
    order: Sequence[int], costs: Sequence[int], near: Sequence[Sequence[tuple[int, int]]], num: int, limit: int
) -> list[int] | None:
    """Give each matrix to who has most of it and room for it, else to who has least to do; None if that has no room."""
    loads, owners = [0] * num, [0] * len(costs)
    idle = [(0, participant) for participant in range(num)]
    for index in order:
        fitting = [(held, loads[p], p) for held, p in near[index] if loads[p] + costs[index] <= limit]
        if fitting:
            owner = min(fitting)[2]
        else:
            while idle[0][0] != loads[idle[0][1]]:
                heapq.heapreplace(idle, (loads[idle[0][1]], idle[0][1]))
            owner = idle[0][1]
            if loads[owner] + costs[index] > limit:
                return None
        loads[owner] += costs[index]
        owners[index] = owner
    return owners


def _first_fit(order: Sequence[int], costs: Sequence[int], num: int, limit: int) -> list[int] | None:
    """Fill participants one after another, as MULTIFIT does (Coffman, Garey and Johnson, 1978)."""
    loads, owners = [0] * num, [0] * len(costs)
    for index in order:
        owner = next((p for p in range(num) if loads[p] + costs[index] <= limit), None)
        if owner is None:
            return None
        loads[owner] += costs[index]
        owners[index] = owner
    return owners


def _least_loaded(order: Sequence[int], costs: Sequence[int], num: int) -> list[int]:
    owners = [0] * len(costs)
    idle = [(0, participant) for participant in range(num)]
    for index in order:
        load, owner = idle[0]
        owners[index] = owner
        heapq.heapreplace(idle, (load + costs[index], owner))
    return owners


def _loads(owners: Sequence[int], costs: Sequence[int], num: int) -> list[int]:
    loads = [0] * num
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += cost
    return loads
