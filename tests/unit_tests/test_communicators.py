# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Gathers in process groups of their own: the same bits, the groups' settings, and what NCCL then lets run at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    check_ranks,
    collectives,
    communicators,
    fully_shard,
    fully_shard_context,
)
from megatron.core.distributed.fsdp.experimental.device import observe
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import Recipe, Run, run_sharded
from tests.unit_tests.trace import Trace, TraceStream

SEPARATE = {"separate_communicators": True}
ONE_AXIS: dict[str, Any] = {"shard": {}}
HSDP, HFSDP = (
    {"mesh": (2, 2), "shard": {"placements": Placements.from_strategy("optim_grads_params", outer=outer)}}
    for outer in ("no_shard", "optim")
)
BF16 = {"dtype": torch.bfloat16, "policy": MixedPrecisionPolicy(main_grads_dtype=torch.float32)}


class Calls:
    """A `CallCheck` that keeps (operation, what, process group) of every call in several ranks."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, dist.ProcessGroup]] = []

    def before(self, operation: str, what: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.made.append((operation.partition(" ")[0], what, group))

    def groups(self, operation: str, what: str) -> set[str]:
        """Return the names of the groups in which an operation was called of buffers with such a name."""
        return {str(group.group_name) for kind, name, group in self.made if kind == operation and what in name}


@contextmanager
def checking(check: Any) -> Iterator[Any]:
    previous = collectives.set_call_check(check)
    try:
        yield check
    finally:
        collectives.set_call_check(previous)


def _bits(run: Run) -> list[torch.Tensor]:
    gradients = [value for value in run.gradients.values() if value is not None]
    states = [value for _, state in sorted(run.state.items()) for _, value in sorted(state.items())]
    return [torch.tensor(run.losses), torch.tensor(run.norms), *gradients, *run.weights.values(), *states]


def _same_bits(options: dict[str, Any]) -> None:
    with checking(Calls()) as plain:
        expected = _bits(run_sharded(Recipe(model="tied", microbatches=2, **options)))
    with checking(Calls()) as calls:
        bits = _bits(run_sharded(Recipe(model="tied", microbatches=2, context=SEPARATE, **options)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(bits, expected, strict=True))
    reductions = calls.groups("reduce_scatter", "_grad") | calls.groups("all_reduce", "_grad")
    gathers = calls.groups("all_gather", "_weight")
    kept = plain.groups("all_gather", "_weight")
    assert reductions == plain.groups("reduce_scatter", "_grad") | plain.groups("all_reduce", "_grad")
    assert kept <= reductions and len(gathers) == len(kept) and len(gathers - kept) == 1


@pytest.mark.parametrize("options", [ONE_AXIS, {**ONE_AXIS, **BF16}], ids=["fp32", "bf16"])
def test_numbers_and_groups_on_one_axis(options: dict[str, Any]) -> None:
    run_ranks(2, _same_bits, options)


@pytest.mark.parametrize("options", [HSDP, {**HFSDP, **BF16}], ids=["hsdp", "hfsdp"])
def test_numbers_and_groups_on_two_axes(options: dict[str, Any]) -> None:
    """Over the outer axis weights are gathered once per step, in the mesh's own group."""
    run_ranks(4, _same_bits, options)


class _Nccl:
    """Lets each call wait for the one before it in the same process group, as NCCL does, on whatever streams they are.

    Attributes:
        waits: per call, the last one of the other kind that it waits for.
    """

    KINDS = {"all_gather": "AG", "reduce_scatter": "RS"}

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ends: dict[str, dict[str, int]] = {}
        self._calls: list[tuple[str, TraceStream, int]] = []
        self.waits: dict[str, str | None] = {}

    def before(self, operation: str, what: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        stream, kind = self._trace.current_stream(), self.KINDS.get(operation.partition(" ")[0])
        if kind is None:
            return
        for name, time in self._ends.get(group.group_name, {}).items():
            stream.clock[name] = max(stream.clock[name], time)
        number = re.match(r"layers\.(\d)\.", what)
        call = kind + ("r" if number is None else number[1])
        earlier = [name for name, on, time in self._calls if name[:2] != kind and stream.clock[on.name] >= time]
        self.waits[call] = earlier[-1] if earlier else None
        self._calls.append((call, stream, stream.clock[stream.name]))
        self._ends[group.group_name] = dict(stream.clock)


def _waits(is_separate: bool) -> dict[str, str | None]:
    trace = Trace()
    with observe(trace), checking(_Nccl(trace)) as nccl:
        model = build("mlp")
        with fully_shard_context("cpu", separate_communicators=is_separate):
            shard_layers(model)
        loss_of(model, *make_batch(model, 4, seed=dist.get_rank())).backward()
    assert not trace.races
    waits: dict[str, str | None] = nccl.waits
    return waits


def test_what_waits_for_what() -> None:
    """Of the first backward, with 1 gathered ahead while 2 computes. A reduction waits for its own unit's gather."""
    shared = {"RS2": "AG1", "AG0": "RS2", "RS1": "AG0", "RS0": "AG0", "RSr": "AG0"}
    separate = {"RS2": "AG2", "AG0": None, "RS1": "AG1", "RS0": "AG0", "RSr": "AG0"}
    assert [{key: waits[key] for key in shared} for waits in run_ranks(2, _waits, False)] == [shared] * 2
    assert [{key: waits[key] for key in separate} for waits in run_ranks(2, _waits, True)] == [separate] * 2


def _settings() -> None:
    base = dist.new_group(timeout=timedelta(seconds=77))
    mesh = DeviceMesh.from_group(base, DEVICE, mesh_dim_names=("dp",))
    with fully_shard_context(DEVICE, separate_communicators=True) as context:
        for _ in range(2):
            model = build("mlp")
            shard_layers(model, mesh=mesh)
    groups = {group.main_weight.mesh.gather_group(0) for unit in context.units() for group in unit.parameter_groups}
    assert len(groups) == 1 and base not in groups
    made = groups.pop()
    options: Any = made._get_backend(torch.device(DEVICE)).options
    assert options._timeout == timedelta(seconds=77)
    assert made.group_desc == "fsdp_all_gather" and dist.get_backend(made) == dist.get_backend(base)
    assert dist.get_process_group_ranks(made) == dist.get_process_group_ranks(base)
    assert made in context._process_groups(), "symmetric memory is registered with it, too"


def test_one_group_with_the_settings_of_the_mesh() -> None:
    run_ranks(2, _settings)


class _NcclOptions:
    """Stands for NCCL's, which a host without GPUs lacks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = "default"
        self._timeout = timedelta(seconds=1)
        self.split_from: Any = None


def test_settings_of_nccl_are_taken_over() -> None:
    options = _NcclOptions(is_high_priority_stream=True)
    options.config, options._timeout, options.split_from = "8 CTAs", timedelta(seconds=9), "another"
    new = communicators._nccl_options(options)
    assert (new.is_high_priority_stream, new.config, new._timeout) == (True, "8 CTAs", timedelta(seconds=9))
    assert new is not options and new.split_from is None


def _forward_of_one_layer_more() -> None:
    model = build("mlp")
    with fully_shard_context(DEVICE, separate_communicators=True):
        shard_layers(model)
    with check_ranks(timeout_s=60):
        model.layers[1].unshard()
        if dist.get_rank():
            model.layers[0].unshard()
        else:
            model.layers[2].unshard()


def test_debug_mode_names_calls_in_the_new_groups() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _forward_of_one_layer_more):
        assert re.search(
            r"of ranks \[0, 1\]: expected the same call on every rank, got all_gather of layers\.2\.0\.main_weight .* "
            r"on ranks \[0\]; all_gather of layers\.0\.0\.main_weight .* on ranks \[1\]",
            message,
        )


def _asked_for_on_one_rank() -> None:
    model = build("mlp")
    with fully_shard_context(DEVICE, separate_communicators=dist.get_rank() == 0):
        shard_layers(model)


def test_ranks_that_differ_are_named() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _asked_for_on_one_rank):
        assert "separate_communicators: True on rank 0, separate_communicators: False on rank 1" in message


def _with_one_stream() -> None:
    with fully_shard_context(DEVICE, separate_communicators=True, unify_communication_stream=True):
        pass


def test_one_stream_is_refused() -> None:
    for message in run_ranks_expecting(1, ValueError, _with_one_stream):
        assert message.startswith("separate_communicators: expected False with unify_communication_stream=True, got")


def _without_effect(strategy: str, trainable: bool) -> None:
    with fully_shard_context(DEVICE, separate_communicators=True):
        layer = nn.Linear(4, 4).requires_grad_(trainable)
        fully_shard(layer, placements=Placements.from_strategy(strategy))


@pytest.mark.parametrize(("strategy", "trainable"), [("optim_grads", True), ("optim_grads_params", False)])
def test_nothing_to_separate_is_refused(strategy: str, trainable: bool) -> None:
    for message in run_ranks_expecting(1, ValueError, _without_effect, strategy, trainable):
        assert "separate_communicators: expected units that shard their parameters, and some that are" in message


def _on_some_ranks() -> None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        raise NotImplementedError("not in the mesh")
    with fully_shard_context(DEVICE, separate_communicators=True):
        layer = fully_shard(nn.Linear(4, 4), DeviceMesh.from_group(pair, DEVICE))
    raise AssertionError(f"not refused: {layer}")


def test_ranks_outside_the_mesh_are_refused() -> None:
    for message in run_ranks_expecting(3, NotImplementedError, _on_some_ranks)[:2]:
        assert "process groups of a context: expected a mesh of all 3 ranks, got one of [0, 1]; the other" in message


def test_ranks_in_another_order_are_refused() -> None:
    for message in run_ranks_expecting(2, NotImplementedError, _in_another_order):
        assert "expected ranks in ascending order along each axis of the mesh, got [[1, 0]]" in message


def _in_another_order() -> None:
    mesh = DeviceMesh(DEVICE, [1, 0])
    with fully_shard_context(DEVICE, separate_communicators=True):
        layer = fully_shard(nn.Linear(4, 4), mesh)
    raise AssertionError(f"not refused: {layer}")
