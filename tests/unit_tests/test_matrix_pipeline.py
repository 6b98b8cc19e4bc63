# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""How packages of matrices follow each other: no races, each wait is needed, and the next one travels meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import check_ranks, collectives, fully_shard, fully_shard_muon
from megatron.core.distributed.fsdp.experimental.communicators import Communicators
from megatron.core.distributed.fsdp.experimental.device import observe
from megatron.core.distributed.fsdp.experimental.matrix_pipeline import MatrixPipeline, Participants, Run
from megatron.core.distributed.fsdp.experimental.matrix_plan import Matrix, Place, plan_matrices
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.matrix_oracle import build_net, loss_of_net
from tests.unit_tests.trace import CollectiveLog, Trace, captured_stderr

SHORT = {
    "prepare": "prepare",
    "gather_matrices": "gather",
    "solve": "solve",
    "scatter_results": "scatter",
    "apply": "apply",
}

# --- order and races --------------------------------------------------------------------------------------------------


def _traced(dropped_wait: str | None = None, num_steps: int = 2) -> Trace:
    trace = Trace(dropped_wait)
    with observe(trace):
        model: Any = build_net(dist.get_world_size())
        for layer in (*model.layers, model.spare):
            fully_shard(layer)
        fully_shard(model)
        optimizer = fully_shard_muon(model, 0.01, report=None, package_bytes=1)
        for step in range(num_steps):
            optimizer.zero_grad()
            loss_of_net(model, step, dist.get_rank()).backward()
            optimizer.step()
        assert len(optimizer.works[0].plan.rounds) > 4
    return trace


def _order() -> tuple[list[str], list[str]]:
    trace = _traced(num_steps=1)
    found = [(stream, operation, names) for stream, operation, names in trace.events if operation in SHORT]
    counts: dict[str, int] = {}
    words = []
    for stream, operation, _ in found:
        number = counts[operation] = counts.get(operation, -1) + 1
        assert (stream == "matrices") == (operation in ("gather_matrices", "scatter_results"))
        words.append(f"{SHORT[operation]} {number}")
    slots = {
        word.split()[1]: names[0][-1]
        for word, (_, operation, names) in zip(words, found, strict=True)
        if operation == "solve"
    }
    return words, [slots[number] for number in sorted(slots, key=int)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_package_travels_before_one_is_computed_with(world_size: int) -> None:
    for words, slots in run_ranks(world_size, _order):
        num_rounds = len(slots)
        expected = ["prepare 0", "gather 0"]
        for number in range(num_rounds):
            if number + 1 < num_rounds:
                expected += [f"prepare {number + 1}", f"gather {number + 1}"]
            expected += [f"solve {number}", f"scatter {number}"]
            expected += [f"apply {number - 1}"] if number else []
        assert words == [*expected, f"apply {num_rounds - 1}"]
        assert slots == [str(number % 2) for number in range(num_rounds)]


def _races(dropped_wait: str | None) -> tuple[list[str], list[str]]:
    trace = _traced(dropped_wait)
    return trace.races, [site for site in trace.wait_sites if "MatrixPipeline" in site]


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_two_uses_of_a_buffer_are_unordered(world_size: int) -> None:
    for races, sites in run_ranks(world_size, _races, None):
        assert not races
        assert {site.partition(":")[0] for site in sites} == {
            "MatrixPipeline._after_compute",
            "MatrixPipeline._solve",
            "MatrixPipeline._apply",
        }


def test_every_wait_is_needed() -> None:
    (_, sites), *_ = run_ranks(1, _races, None)
    assert len(sites) == 3
    for site in sites:
        (races, _), *_ = run_ranks(1, _races, site)
        assert races and all("matrices of " in race for race in races), site


# --- a worker of the test's own ---------------------------------------------------------------------------------------


class _Doubling:
    """Matrices of two pieces hold their index and element; results are twice that."""

    def __init__(self, pieces: int, dtype: torch.dtype) -> None:
        self.pieces, self.dtype = pieces, dtype
        self.solved: list[int] = []
        self.applied: dict[int, list[tuple[Run, torch.Tensor]]] = {}
        self.piece = 0

    def _elements(self, run: Run, piece: int) -> torch.Tensor:
        return 1000.0 * run.matrix + 100 * piece + torch.arange(run.start, run.stop)

    def prepare(self, runs: Sequence[Run], into: Sequence[torch.Tensor]) -> None:
        for run, tensor in zip(runs, into, strict=True):
            assert tensor.dtype is self.dtype and tensor.is_contiguous()
            tensor.copy_(self._elements(run, self.piece))

    def solve(self, matrix: int, pieces: torch.Tensor, result: torch.Tensor) -> None:
        numel = pieces.numel() // self.pieces
        expected = torch.cat([self._elements(Run(matrix, 0, numel), piece) for piece in range(self.pieces)])
        assert torch.equal(pieces, expected.to(self.dtype)), matrix
        assert pieces.data_ptr() % 64 == 0 and result.data_ptr() % 64 == 0
        self.solved.append(matrix)
        result.copy_(2 * pieces)

    def apply(self, runs: Sequence[Run], results: Sequence[torch.Tensor]) -> None:
        for run, result in zip(runs, results, strict=True):
            self.applied.setdefault(run.matrix, []).append((run, result.clone()))


MATRICES = [
    Matrix(30, 30, ((0, 0, 30),)),
    Matrix(50, 50, ((0, 0, 7), (1, 7, 50))),
    Matrix(20, 20, ((1, 0, 20),)),
    Matrix(70, 70, ((0, 0, 40), (1, 40, 70))),
    Matrix(5, 5, ((1, 0, 5),)),
]


def _pipeline(places: list[Place], package_numel: int) -> tuple[MatrixPipeline, _Doubling]:
    rank = dist.get_rank()
    group = dist.group.WORLD if len(places) > 1 else None
    plan = plan_matrices(MATRICES, places, package_numel)
    participants = Participants(tuple(range(len(places))), rank, group, torch.device(DEVICE))
    worker = _Doubling(plan.num_pieces, torch.float32)
    worker.piece = places[rank].piece
    return MatrixPipeline(plan, participants, torch.float32, torch.bfloat16, "test"), worker


def _moved(places: list[Place], package_numel: int, active: frozenset[int] | None) -> None:
    pipeline, worker = _pipeline(places, package_numel)
    mine, rank = places[dist.get_rank()], dist.get_rank()
    pipeline.run(worker, active)
    chosen = range(len(MATRICES)) if active is None else sorted(active)
    assert sorted(worker.solved) == [index for index in chosen if pipeline.plan.owners[index] == rank]
    held = {index: [r[1:] for r in MATRICES[index].ranges if r[0] == mine.shard] for index in chosen}
    assert worker.applied.keys() == {index for index, ranges in held.items() if ranges}
    for index, applied in worker.applied.items():
        assert [(run.start, run.stop) for run, _ in applied] == held[index]
        for run, result in applied:
            expected = 2 * worker._elements(run, mine.piece)
            assert result.dtype is torch.bfloat16 and torch.equal(result, expected.bfloat16())


PLACES = {
    "one": [Place(0, 0, 0)],
    "shards": [Place(0, 0, 0), Place(0, 1, 0)],
    "copies": [Place(0, 0, 0), Place(0, 1, 0), Place(0, 0, 1), Place(0, 1, 1)],
    "pieces": [Place(0, 0, 0), Place(1, 0, 0), Place(0, 1, 0), Place(1, 1, 0)],
}


@pytest.mark.parametrize("where", ["shards", "copies", "pieces"])
def test_elements_go_to_owners_and_back(where: str) -> None:
    places = PLACES[where]
    for package_numel in (1, 100, 1000):
        for active in (None, frozenset({1, 2, 3}), frozenset({4}), frozenset()):
            run_ranks(len(places), _moved, places, package_numel, active)


def _logged() -> tuple[list[Any], list[Any]]:
    pipeline, worker = _pipeline(PLACES["copies"], 1000)
    with CollectiveLog() as log:
        pipeline.run(worker)
    sent = sum(
        message.stop - message.start
        for index in range(len(MATRICES))
        for message in (*pipeline.plan.gathers(index), *pipeline.plan.scatters(index))
        if message.holder != message.owner
    )
    return log.entries, [sent]


def test_what_is_sent_is_what_is_planned() -> None:
    found = run_ranks(4, _logged)
    exchanged = [entry for entries, _ in found for entry in entries]
    assert {entry[0] for entry in exchanged} == {"exchange"}
    assert sum(entry[2] for entry in exchanged) == found[0][1][0] > 0


# --- exchanges --------------------------------------------------------------------------------------------------------


def _exchange() -> None:
    """Rank r sends r + 1 tensors to the next one; rank 2 sends nothing, and with an empty batch nobody waits."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    collectives.exchange([], [], group, what="nothing")
    sends, receives = [], []
    if rank < 2:
        sends = [(torch.full((3 + index,), 10.0 * rank + index), rank + 1) for index in range(rank + 1)]
    if rank > 0:
        receives = [(torch.zeros(3 + index), rank - 1) for index in range(rank)]
    with check_ranks(60):
        collectives.exchange(sends, receives, group, what="a chain")
    for index, (tensor, source) in enumerate(receives):
        assert torch.equal(tensor, torch.full((3 + index,), 10.0 * source + index))


def test_tensors_arrive_in_the_order_in_which_they_are_sent() -> None:
    run_ranks(3, _exchange)


def _times_out() -> str:
    """Rank 1 does not send; the process group gives up after two seconds."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    message = ""
    if dist.get_rank() == 0:
        with captured_stderr() as printed, pytest.raises(RuntimeError) as raised:
            collectives.exchange([], [(torch.zeros(3), 1)], group, what="matrices of w")
        assert "in _times_out" in printed[0]
        message = str(raised.value)
    dist.barrier()
    return message


def test_a_failed_exchange_names_what_travels() -> None:
    message = run_ranks(2, _times_out)[0]
    assert message.startswith("exchange of matrices of w: expected all 2 ranks of the process group to take part, got")


def _elsewhere() -> None:
    group = dist.group.WORLD
    assert group is not None
    with check_ranks(60):
        if dist.get_rank() == 0:
            collectives.exchange([], [], group, what="matrices of w")
        else:
            collectives.all_reduce(torch.zeros(1), "sum", group, what="a norm")


def test_ranks_that_come_with_something_else_are_told() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _elsewhere):
        assert "exchange of matrices of w" in message and "all_reduce sum of a norm" in message


def _over() -> None:
    communicators, device = Communicators(False, False), torch.device(DEVICE)
    world = dist.group.WORLD
    assert world is not None
    assert communicators.over([3, 2, 1, 0], world, device) is world
    if dist.get_rank() == 3:  # it has no part in the group, and need not come
        return
    group = communicators.over([2, 0, 1], world, device)
    assert communicators.over([0, 1, 2], world, device) is group
    assert dist.get_process_group_ranks(group) == [0, 1, 2] and dist.get_backend(group) == dist.get_backend(world)
    found = torch.zeros(2)
    rank = dist.get_rank()
    sends = [(torch.full((2,), 1.0 + rank), (rank + 1) % 3)]
    collectives.exchange(sends, [(found, (rank + 2) % 3)], group, what="a ring")
    assert found.tolist() == [1.0 + (rank + 2) % 3] * 2


def test_a_group_of_some_ranks_is_made_by_these_alone() -> None:
    run_ranks(4, _over)
