# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`MatrixWork`: one step of a `MatrixRule` over the matrices of one mesh and dtype: shards in, shards out.

It connects local shards with the runs of a `MatrixPipeline`. It keeps no optimizer state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .dtensor import FsdpDTensor
from .matrix_arithmetic import subtract_updates
from .matrix_blocks import JoinedPieces, MatrixBlock
from .matrix_pipeline import MatrixPipeline, Participants, Run
from .matrix_plan import Matrix, MatrixPlan, Place, plan_matrices
from .matrix_rule import MatrixRule
from .shard_mesh import ShardMesh


@dataclass(frozen=True, eq=False)
class Entry:
    """One parameter of a matrix optimizer.

    Attributes:
        name: for errors.
        local: what this rank steps: its shard, or the parameter itself.
        group: its param_group.
        sharded: the sharded parameter; None for a plain one.
        joined: how pieces of tensor parallelism make the matrices.
        blocks: of the parameter, or of its piece.
    """

    name: str
    local: torch.Tensor
    group: dict[str, Any]
    sharded: Any
    joined: JoinedPieces
    blocks: tuple[MatrixBlock, ...]

    @property
    def first_element(self) -> int:
        """The first element of the piece that this rank holds."""
        return 0 if self.sharded is None else self.sharded.geometry.owned.start

    def ranges(self, block: MatrixBlock) -> tuple[tuple[int, int, int], ...]:
        """Return (shard, start, stop) of the elements of a block that each shard holds."""
        if self.sharded is None:
            return ((0, 0, block.numel),)
        geometry = self.sharded.geometry
        layout = geometry.layout
        found = []
        # Shards before the block's first element, and behind its last, have none.
        offset = layout.slots[geometry.index].offset + block.start
        first, last = offset // layout.shard_numel, (offset + block.numel - 1) // layout.shard_numel
        for shard in range(first, last + 1):
            owned = layout.owned(geometry.index, shard)
            start, stop = block.owned(owned.start, owned.stop)
            if stop > start:
                found.append((shard, start, stop))
        return tuple(found)


class MatrixWork:
    """A step of a rule over matrices that share a mesh and the dtypes in which they travel.

    Args:
        entries: the parameters, in one order on every rank.
        rule: what is computed.
        places: what each participant holds.
        participants: the ranks.
        package_bytes: bound on an owner's part of one package.

    Attributes:
        plan: owners and packages.
        names: of the parameter of each matrix of the plan.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        rule: MatrixRule,
        places: Sequence[Place],
        participants: Participants,
        package_bytes: int,
    ) -> None:
        self._entries, self._rule = entries, rule
        self._blocks = [(entry, block) for entry in entries for block in entry.blocks]
        self._entry_numbers = [number for number, entry in enumerate(entries) for _ in entry.blocks]
        self._first_matrix = list(itertools.accumulate((len(entry.blocks) for entry in entries), initial=0))
        first = entries[0]
        self._travel_dtype = rule.travel_dtype(first.group)
        matrices = [Matrix(self._cost(entry, block), block.numel, entry.ranges(block)) for entry, block in self._blocks]
        self.plan: MatrixPlan = plan_matrices(matrices, places, max(1, package_bytes // self._travel_dtype.itemsize))
        self.names = [entry.name for entry, _ in self._blocks]
        what = f"matrices of {first.name} and {len(self._blocks) - 1} more"
        self._pipeline = MatrixPipeline(
            self.plan, participants, self._travel_dtype, rule.result_dtype(first.group), what
        )
        self._states: list[dict[str, torch.Tensor]] = []
        self._gradients: dict[int, torch.Tensor] = {}

    @property
    def buffer_bytes(self) -> int:
        """What the buffers of a step over all matrices take on this rank."""
        return self._pipeline.buffer_bytes()

    def _cost(self, entry: Entry, block: MatrixBlock) -> int:
        return sum(
            self._rule.cost(count, rows, columns, entry.group) for count, rows, columns in block.matrices(entry.joined)
        )

    def run(self, state: Any) -> None:
        """Step every parameter with a gradient.

        Args:
            state: of the optimizer, by local parameter.
        """
        active = [index for index, entry in enumerate(self._entries) if entry.local.grad is not None]
        if not active:
            return
        try:
            self._run(active, state)
        finally:
            self._states, self._gradients = [], {}

    def _run(self, active: Sequence[int], state: Any) -> None:
        self._states = [self._state_of(entry, state) for entry in self._entries]
        self._gradients = {index: self._gradient_of(self._entries[index]) for index in active}
        for group, indices in self._by_group(active):
            gradients = [self._gradients[index] for index in indices]
            self._rule.accumulate(gradients, [self._states[index] for index in indices], group)
        chosen = None
        if len(active) < len(self._entries):
            matrices = ((self._first_matrix[index], self._first_matrix[index + 1]) for index in active)
            chosen = frozenset(itertools.chain.from_iterable(range(*ends) for ends in matrices))
        self._pipeline.run(self, chosen)

    def _state_of(self, entry: Entry, state: Any) -> dict[str, torch.Tensor]:
        if entry.local.grad is None:
            return {}
        found: dict[str, torch.Tensor] = state[entry.local]
        if not found:
            found.update(self._rule.new_state(entry.local, entry.group))
        self._rule.match_state(found, entry.group)
        return found

    def _gradient_of(self, entry: Entry) -> torch.Tensor:
        """Return the gradient in float32, with what L2 regularisation adds to it."""
        gradient = entry.local.grad
        assert gradient is not None, "only parameters with gradients are stepped"
        wide = (gradient if gradient.dtype is torch.float32 else gradient.float()).contiguous()
        decay = entry.group["weight_decay"]
        return (
            torch.add(wide, entry.local, alpha=decay) if decay and not entry.group["decoupled_weight_decay"] else wide
        )

    def _by_group(self, indices: Iterable[int]) -> Iterable[tuple[dict[str, Any], list[int]]]:
        """Sort entries by param_group."""
        found: dict[int, tuple[dict[str, Any], list[int]]] = {}
        for index in indices:
            group = self._entries[index].group
            found.setdefault(id(group), (group, []))[1].append(index)
        return found.values()

    # --- what the pipeline calls ----------------------------------------------------------------------------------

    def prepare(self, runs: Sequence[Run], into: Sequence[torch.Tensor]) -> None:
        """See `Worker`."""
        for group, numbers in self._runs_by_group(runs):
            gradients, states = [], []
            for number in numbers:
                entry = self._entry_numbers[runs[number].matrix]
                gradients.append(self._slice(self._gradients[entry], runs[number]))
                states.append({key: self._slice(v, runs[number]) for key, v in self._states[entry].items()})
            self._rule.prepare(gradients, states, group, [into[number] for number in numbers])

    def solve(self, matrix: int, pieces: torch.Tensor, result: torch.Tensor) -> None:
        """See `Worker`."""
        entry, block = self._blocks[matrix]
        sources, targets = block.views(pieces, entry.joined), block.views(result, entry.joined)
        for (count, *shape), source, target in zip(block.matrices(entry.joined), sources, targets, strict=True):
            whole = source.reshape((count, *shape) if count > 1 else shape)
            target.copy_(self._rule.solve(whole, entry.group).reshape(target.shape))

    def apply(self, runs: Sequence[Run], results: Sequence[torch.Tensor]) -> None:
        """See `Worker`."""
        for group, numbers in self._runs_by_group(runs):
            weights, updates, scales = [], [], []
            for number in numbers:
                run = runs[number]
                weight = self._slice(self._entries[self._entry_numbers[run.matrix]].local, run)
                for start, stop, scale in self._scaled(run):
                    weights.append(weight[start - run.start : stop - run.start])
                    updates.append(results[number][start - run.start : stop - run.start])
                    scales.append(scale)
            _subtract(weights, updates, scales, group)

    def _scaled(self, run: Run) -> Iterable[tuple[int, int, float]]:
        """Yield the parts of a run that belong to one matrix each, and the scale of its update."""
        entry, block = self._blocks[run.matrix]
        shapes = block.matrices(entry.joined)
        scales = [self._rule.scale(rows, columns, entry.group) for _, rows, columns in shapes]
        if len(set(scales)) == 1:
            yield run.start, run.stop, scales[0]
            return
        period = sum(block.parts) * block.columns
        ends = list(itertools.accumulate(part * block.columns for part in block.parts))
        start = run.start
        while start < run.stop:
            part = next(index for index, end in enumerate(ends) if start % period < end)
            stop = min(run.stop, start - start % period + ends[part])
            yield start, stop, scales[part]
            start = stop

    def _runs_by_group(self, runs: Sequence[Run]) -> Iterable[tuple[dict[str, Any], list[int]]]:
        found: dict[int, tuple[dict[str, Any], list[int]]] = {}
        for number, run in enumerate(runs):
            group = self._blocks[run.matrix][0].group
            found.setdefault(id(group), (group, []))[1].append(number)
        return found.values()

    def _slice(self, local: Any, run: Run) -> torch.Tensor:
        """Return the elements of a run within a local tensor, flat."""
        entry, block = self._blocks[run.matrix]
        first = block.start + run.start - entry.first_element
        flat: torch.Tensor = local.view(-1)[first : first + run.stop - run.start]
        return flat


def _subtract(
    weights: list[torch.Tensor], updates: list[torch.Tensor], scales: list[float], group: Mapping[str, Any]
) -> None:
    """Decay weights and subtract updates, each times its scale and the learning rate.

    Factors are float32 numbers on the device, whether the rate is a number or, under a CUDA graph, lies there itself.
    """
    rate, device = group["lr"], weights[0].device
    if not isinstance(rate, torch.Tensor) or rate.device != device:
        rate = torch.full((), float(rate), dtype=torch.float32, device=device)
    decay = None
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        decay = 1 - rate * group["weight_decay"]
    factors = {scale: rate * scale for scale in set(scales)}
    subtract_updates(weights, updates, [factors[scale] for scale in scales], decay)


def make_works(entries: Iterable[Entry], rule: MatrixRule, package_bytes: int) -> list[MatrixWork]:
    """Return the works of a step, in one order on every rank: one for each mesh and dtypes."""
    by_mesh: dict[Any, list[Entry]] = {}
    for entry in entries:
        mesh = None if entry.sharded is None else entry.sharded.geometry.mesh
        where: Any = entry.local.device
        if mesh is not None:  # units may have meshes of their own with the same ranks, as without an argument
            where = (where, str(mesh.device_mesh.mesh.tolist()), mesh.axes, mesh.ndim)
        travel = rule.travel_dtype(entry.group)
        key = (where, entry.joined.size > 1, travel, rule.result_dtype(entry.group))
        by_mesh.setdefault(key, []).append(entry)
    works = []
    for members in by_mesh.values():
        places, participants = _participants(members[0])
        works.append(MatrixWork(members, rule, places, participants, package_bytes))
    return works


def _participants(entry: Entry) -> tuple[list[Place], Participants]:
    """Return who shares an entry's matrices, and what each of them holds."""
    device = entry.local.device
    if entry.sharded is None:
        return [Place(0, 0, 0)], Participants((0,), 0, None, device)
    sharded: FsdpDTensor = entry.sharded
    mesh: ShardMesh = sharded.geometry.mesh
    grid = mesh.device_mesh.mesh
    model_axes = range(mesh.ndim, grid.ndim)
    if entry.joined.size == 1:
        for axis in model_axes:
            grid = grid.narrow(axis, mesh.device_mesh.get_local_rank(axis), 1)
    ranks, places = [], []
    for place in itertools.product(*map(range, grid.shape)):
        ranks.append(int(grid[place]))
        shard = replica = piece = 0
        for axis in mesh.axes:
            shard = shard * grid.shape[axis] + place[axis]
        for axis in range(mesh.ndim):
            if axis not in mesh.axes:
                replica = replica * grid.shape[axis] + place[axis]
        for axis in model_axes:
            piece = piece * grid.shape[axis] + place[axis]
        places.append(Place(piece, shard, replica))
    me = ranks.index(mesh.device_mesh.get_rank())
    wide = [axis for axis in range(grid.ndim) if grid.shape[axis] > 1]
    group = None
    if len(wide) == 1:
        group = mesh.group(wide[0])
    elif wide:
        context: Any = sharded._fsdp_group().context()  # type: ignore[attr-defined]
        group = context.communicators.over(ranks, mesh.group(wide[0]), device)
    return places, Participants(tuple(ranks), me, group, device)
