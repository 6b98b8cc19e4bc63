# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that build different units, start from different weights or come with different calls get a named error."""

from __future__ import annotations

import copy
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    SchedulePolicy,
    check_ranks,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.experimental.agreement import Agreement, UnitRecord, checksum_of
from megatron.core.distributed.fsdp.experimental.lockstep import _check_from_environment
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.models import build, shard_layers
from tests.unit_tests.oracle import Recipe, assert_at_rest, assert_parity, run_reference, run_sharded
from tests.unit_tests.trace import CollectiveLog, captured_stderr

# --- units ------------------------------------------------------------------------------------------------------------


def _shard_three(last: nn.Module, **options: Any) -> nn.Module:
    """Shard three units below a root; `last` and the options are the third one's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), last)
    for layer in model[:2]:
        fully_shard(layer)
    fully_shard(model[2], **options)
    return fully_shard(model)


OPTIONS: dict[str, Any] = {
    "grad_divisor": 2,
    "gradient_reduction": "sum",
    "register_hooks": False,
    "mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16),
    "schedule_policy": SchedulePolicy(forward_prefetch_units=3),
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "shape": (lambda: nn.Linear(4, 5), "parameter weight: (4, 4) torch.float32 trainable", "(5, 4)"),
    "dtype": (lambda: nn.Linear(4, 4, dtype=torch.bfloat16), "torch.float32", "(4, 4) torch.bfloat16"),
    "requires_grad": (lambda: nn.Linear(4, 4).requires_grad_(False), "trainable", "(4, 4) torch.float32 frozen"),
    "fewer": (lambda: nn.Linear(4, 4, bias=False), "parameter bias: (4,)", "nothing more"),
    "fqn": (lambda: nn.Sequential(nn.Linear(4, 4)), "parameter weight", "parameter 0.weight"),
}


def _other_option(name: str) -> None:
    with fully_shard_context(DEVICE):
        model = _shard_three(nn.Linear(4, 4), **({name: OPTIONS[name]} if dist.get_rank() == 1 else {}))
    model(torch.ones(1, 4))


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options(name: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _other_option, name):
        assert "expected the same on all ranks [0, 1], got for 2, number 3 in forward order: " in message
        assert f"{name}: " in message.partition(" on rank 0")[0]
        assert str(OPTIONS[name]) in message.partition(" on rank 0")[2]


def _other_layer(name: str) -> None:
    make = LAYERS[name][0] if dist.get_rank() == 1 else (lambda: nn.Linear(4, 4))
    with fully_shard_context(DEVICE):
        model = _shard_three(make())
    model(torch.ones(1, 4))


@pytest.mark.parametrize("name", LAYERS)
def test_other_parameters(name: str) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _other_layer, name):
        ours, _, theirs = message.partition(" on rank 0")
        assert "got for 2, number 3" in ours
        assert LAYERS[name][1] in ours and LAYERS[name][2] in theirs


def _fewer_units(num_units: int) -> None:
    model = build("mlp")
    with fully_shard_context(DEVICE):
        if dist.get_rank() != 1:
            shard_layers(model)
        else:
            for layer in model.layers[:num_units]:
                fully_shard(layer)


@pytest.mark.parametrize("num_units", [1, 2])
def test_other_numbers_of_units(num_units: int) -> None:
    for message in run_ranks_expecting(4, RuntimeError, _fewer_units, num_units):
        assert "unit: FsdpMlp on rank 0, unit: FsdpLinear on rank 1" in message


def _implicit_context() -> None:
    model = build("mlp")
    if dist.get_rank() == 1:
        fully_shard(model.layers[0])
    fully_shard(model)
    model(torch.ones(1, 7))


def test_implicit_context_asks_at_its_first_forward() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _implicit_context):
        assert "parameter layers.0.weight: (13, 7)" in message


def _collectives_of_construction() -> tuple[list[Any], list[Any]]:
    with CollectiveLog() as construction, fully_shard_context(DEVICE):
        model = shard_layers(build("mlp"))
    with CollectiveLog() as forward:
        model(torch.ones(1, 7)).sum().backward()
    assert_at_rest(model)
    return construction.entries, forward.entries


def test_one_collective_when_ranks_agree() -> None:
    for construction, forward in run_ranks(2, _collectives_of_construction):
        assert construction == [("all_reduce", "torch.int64", 6, 2)]
        assert {entry[0] for entry in forward} == {"all_gather", "reduce_scatter"}


def _two_groups() -> None:
    """Ranks 0 and 1 train one model, 2 and 3 another."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    mesh = DeviceMesh.from_group(groups[pair], DEVICE, mesh_dim_names=("dp",))
    with fully_shard_context(DEVICE):
        model = fully_shard(build(("mlp", "one_element")[pair]), mesh)
    model(torch.ones(1, model.in_features)).sum().backward()
    assert_at_rest(model)


def test_groups_need_not_agree_with_each_other() -> None:
    run_ranks(4, _two_groups)


def _other_description() -> bool:
    """Rank 3 alone differs: ranks 0 and 1 learn of it through the others' groups, and none waits for the end."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "inner"))
    record = UnitRecord((), (mesh.get_group(0), mesh.get_group(1)), torch.zeros((), dtype=torch.int64))
    agreement = Agreement([record], torch.device(DEVICE))
    assert agreement("one")
    return agreement("another" if dist.get_rank() == 3 else "one")


def test_what_differs_in_one_group_is_known_in_the_others() -> None:
    assert run_ranks(4, _other_description) == [False] * 4


# --- values -----------------------------------------------------------------------------------------------------------


def _warnings_of(prepare: Callable[[nn.Module], None]) -> list[str]:
    model = build("mlp")
    with torch.no_grad():
        prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fully_shard_context(DEVICE):
            shard_layers(model)
    return [str(item.message) for item in caught]


def _other_seed(model: nn.Module) -> None:
    model.layers[1].load_state_dict(build("mlp", seed=dist.get_rank()).layers[1].state_dict())


def _swap(model: nn.Module) -> None:
    model.layers[1].weight.fill_(0.0)
    model.layers[1].weight[dist.get_rank(), 0] = 1.0


def _nan_on_one_rank(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        model.layers[1].bias[3] = float("nan")


def _nan(model: nn.Module) -> None:
    model.layers[1].weight.fill_(float("nan"))


def _strides(model: nn.Module) -> None:
    """The same values, elsewhere in memory."""
    weight = model.layers[1].weight
    if dist.get_rank() == 1:
        weight.data = torch.cat([torch.zeros(3), weight.t().flatten()])[3:].view(13, 11).t()


def _nothing(model: nn.Module) -> None:
    pass


@pytest.mark.parametrize("prepare", [_other_seed, _swap, _nan_on_one_rank])
def test_pb060_other_initial_values(prepare: Callable[[nn.Module], None]) -> None:
    for messages in run_ranks(4, _warnings_of, prepare):
        (message,) = messages
        assert message.startswith("initial weights of unit layers.1: expected the same values on all 4 ranks")
        assert "broadcast the parameters from rank 0 before fully_shard" in message


@pytest.mark.parametrize("prepare", [_nan, _strides, _nothing])
def test_pb060_no_warning_for_equal_values(prepare: Callable[[nn.Module], None]) -> None:
    assert run_ranks(4, _warnings_of, prepare) == [[]] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (2, 3, 5)])
def test_checksum_sees_every_element_and_its_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (100 * torch.rand(shape)).to(dtype)
    seen = {checksum_of(tensor).item()}
    for index in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[index] += 1
        seen.add(checksum_of(changed).item())
    for index in range(1, tensor.numel()):
        swapped = torch.full_like(tensor, 2)
        swapped.view(-1)[index] = 1
        seen.add(checksum_of(swapped).item())
    assert len(seen) == 1 + tensor.numel() + max(0, tensor.numel() - 1)
    assert checksum_of(torch.empty(0, 3, dtype=dtype)).item() == 0


def test_checksum_of_several_chunks() -> None:
    big = torch.zeros(3 << 20, dtype=torch.float64)
    seen = set()
    for index in (0, 1 << 20, 2 << 20, (3 << 20) - 1):
        big[index] = 1.0
        seen.add(checksum_of(big).item())
        big[index] = 0.0
    assert len(seen) == 4


# --- without the debug mode -------------------------------------------------------------------------------------------


def _backend_times_out() -> str:
    """Rank 1 does not run the unit; its process group gives up after two seconds."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, DEVICE, mesh_dim_names=("dp",))
    with fully_shard_context(DEVICE):
        model = fully_shard(build("mlp"), mesh)
    message = ""
    if dist.get_rank() == 0:
        begin = time.monotonic()
        with captured_stderr() as printed, pytest.raises(RuntimeError) as raised:
            model(torch.ones(1, 7))
        assert time.monotonic() - begin < 20
        assert "in _backend_times_out" in printed[0]
        message = str(raised.value)
        assert "gloo" in str(raised.value.__cause__)
    dist.barrier()
    return message


def test_backend_failure_names_unit_and_operation() -> None:
    message, _ = run_ranks(2, _backend_times_out)
    assert message.startswith("all_gather of FsdpMlp.0.main_weight: expected all 2 ranks of the process group")
    assert "gloo backend" in message and "set MEGATRON_FSDP_CHECK_RANKS=1" in message


# --- the debug mode ---------------------------------------------------------------------------------------------------

SHORT_S = 2.0
LONG_S = 60.0


class _Tower(nn.Module):
    """A vision layer that some samples need."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = nn.Linear(6, 6)
        self.vision = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        hidden = self.text(x).tanh()
        if use != "skip":
            hidden = hidden + self.vision(x) * (0.0 if use == "zero" else 1.0)
        return self.head(hidden)


class _Experts(nn.Module):
    """Four experts; one without tokens is called with none, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        result = torch.zeros_like(x)
        routes = torch.arange(len(x)) % 4 if use == "all" else torch.zeros(len(x), dtype=torch.int64)
        for index, expert in enumerate(self.experts):
            (tokens,) = torch.where(routes == index)
            if len(tokens) or use != "skip":
                result = result.index_add(0, tokens, expert(x[tokens]))
        return result


def _shard(model: Any) -> Any:
    with fully_shard_context(DEVICE):
        for child in model.experts if isinstance(model, _Experts) else model.children():
            fully_shard(child)
        fully_shard(model)
    return model


def _train_against_reference(kind: type[nn.Module], uses: list[tuple[str, str]]) -> None:
    """Step i runs with uses[i][rank]; gradients and weights equal those of one process on both ranks' samples."""
    reference = kind()
    model = _shard(copy.deepcopy(reference))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    ours = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step, use in enumerate(uses):
        samples = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(step))
        theirs.zero_grad()
        ours.zero_grad()
        for rank in range(2):
            (reference(samples[rank], use[rank]).square().sum() / 2).backward()
        model(samples[dist.get_rank()], use[dist.get_rank()]).square().sum().backward()
        theirs.step()
        ours.step()
        assert_at_rest(model)
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            for value, other in ((parameter.grad, expected.grad), (parameter, expected)):
                torch.testing.assert_close(value.full_tensor(), other.detach(), msg=lambda text, n=name: f"{n}: {text}")


TOWER_USES = [("all", "zero"), ("zero", "all"), ("all", "zero"), ("zero", "zero")]


def test_pb073_conditional_unit_times_zero_equals_one_process() -> None:
    run_ranks(2, _train_against_reference, _Tower, TOWER_USES)


def test_pb074_expert_without_rows_equals_one_process() -> None:
    run_ranks(2, _train_against_reference, _Experts, [("all", "first"), ("first", "all"), ("first", "first")])


def _gradient_of_an_expert_without_rows() -> float:
    model = _shard(_Experts())
    model(torch.ones(4, 6), "first").sum().backward()
    return model.experts[3].weight.grad.full_tensor().abs().max().item()


def test_pb074_expert_without_rows_anywhere_has_zero_gradient() -> None:
    assert run_ranks(2, _gradient_of_an_expert_without_rows) == [0.0, 0.0]


@contextmanager
def _expecting_stack_and_error(messages: list[str]) -> Iterator[None]:
    """Collect the error's message, without numbers of models: workers have built others before."""
    begin = time.monotonic()
    with captured_stderr() as printed, pytest.raises(RuntimeError) as raised:
        yield
    assert time.monotonic() - begin < 30
    assert "most recent call first" in printed[0] and 'test_agreement.py", line' in printed[0]
    messages.append(re.sub(r" of model \d+", "", str(raised.value)))


def _step_of_a_new_model() -> None:
    with check_ranks(LONG_S):
        model = _shard(_Tower())
        model(torch.ones(4, 6), "all").sum().backward()
    assert_at_rest(model)


def _skip_on_rank_one(kind: type[nn.Module]) -> list[str]:
    """Rank 1 does not call a unit in a step; the process group is as good as before."""
    model = _shard(kind())
    messages: list[str] = []
    use = ("all", "skip")[dist.get_rank()]
    with _expecting_stack_and_error(messages), check_ranks(LONG_S):
        model(torch.ones(4, 6), use).sum().backward()
    _step_of_a_new_model()
    return messages


def test_pb073_skipped_unit_is_named() -> None:
    """Rank 1 has gathered the tower ahead, as its order says, and not released it: its backward is what differs."""
    for (message,) in run_ranks(2, _skip_on_rank_one, _Tower):
        assert "expected the same call on every rank, got " in message
        assert "all_gather of vision.0.main_weight (42 x torch.float32) on ranks [0]" in message
        assert "reduce_scatter avg of head.0.full_grad (22 x torch.float32) on ranks [1]" in message
        assert "multiply by zero" in message


def test_pb074_skipped_expert_is_named() -> None:
    for (message,) in run_ranks(2, _skip_on_rank_one, _Experts):
        assert "all_gather of experts.2.0.main_weight (42 x torch.float32) on ranks [0]" in message
        assert "on ranks [1]" in message and "pass zero rows" in message


def _absent(kind: type[nn.Module]) -> list[str]:
    """Rank 1 is busy elsewhere when rank 0 calls one unit more, and comes too late."""
    model = _shard(kind())
    extra = (model.vision if kind is _Tower else model.experts[3],) if dist.get_rank() == 0 else ()
    store, gone = dist.distributed_c10d._get_default_store(), f"gone {kind.__name__}"
    messages: list[str] = []
    with _expecting_stack_and_error(messages), check_ranks(SHORT_S), torch.no_grad():
        model(torch.ones(4, 6), "all")
        for unit in extra:
            unit(torch.ones(4, 6))
        store.wait([gone], timedelta(seconds=LONG_S))
        model(torch.ones(4, 6), "all")
    store.set(gone, "")
    _step_of_a_new_model()
    return messages


@pytest.mark.parametrize(
    ("kind", "unit", "last"),
    [(_Tower, "vision", "head"), (_Experts, "experts.3", "experts.3")],
    ids=["pb073_tower", "pb074_expert"],
)
def test_pb073_pb074_absent_rank_is_named_and_learns_of_it(kind: type[nn.Module], unit: str, last: str) -> None:
    waiting, late = run_ranks(2, _absent, kind)
    assert waiting == late
    assert waiting[0].startswith(f"all_gather of {unit}.0.main_weight (42 x torch.float32): expected ranks [0, 1]")
    assert f"within {SHORT_S:g} s, got no call from ranks [1]: rank 1 did last: all_gather of {last}." in waiting[0]


def _end_early() -> list[str]:
    """Rank 1 leaves the block when rank 0 calls another unit: nobody waits for the time-out."""
    model = _shard(_Tower())
    messages: list[str] = []
    with _expecting_stack_and_error(messages), check_ranks(LONG_S), torch.no_grad():
        model.text(torch.ones(4, 6))
        if dist.get_rank() == 0:
            model.head(torch.ones(4, 6))
    return messages


def test_pb073_end_of_the_block_is_compared() -> None:
    for (message,) in run_ranks(2, _end_early):
        assert "all_gather of head.0.main_weight (22 x torch.float32) on ranks [0]; leaving check_ranks on " in message


def _raise_on_rank_one() -> str:
    model = _shard(_Tower())
    begin = time.monotonic()
    with pytest.raises((RuntimeError, KeyError)) as raised, check_ranks(LONG_S), torch.no_grad():
        model.text(torch.ones(4, 6))
        if dist.get_rank() == 1:
            raise KeyError("rank 1 only")
        model.head(torch.ones(4, 6))
    assert time.monotonic() - begin < LONG_S / 2
    return str(raised.value)


def test_exception_on_one_rank_reaches_the_others() -> None:
    waiting, failing = run_ranks(2, _raise_on_rank_one)
    assert "leaving check_ranks with KeyError on ranks [1]" in waiting
    assert "rank 1 only" in failing


class _Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, width)

    def forward(self, x: torch.Tensor, order: str) -> Any:
        return sum(getattr(self, name)(x).square().sum() for name in order)


def _other_order(width: int) -> list[str]:
    model = _Pair(width)
    policy = SchedulePolicy(forward_prefetch_units=0, backward_prefetch_units=0)
    with fully_shard_context(DEVICE):
        for module in (model.a, model.b, model):
            fully_shard(module, schedule_policy=policy)
    messages: list[str] = []
    with _expecting_stack_and_error(messages), check_ranks(LONG_S):
        model(torch.ones(4, 6), ("ab", "ba")[dist.get_rank()]).backward()
    _step_of_a_new_model()
    return messages


@pytest.mark.parametrize("width", [6, 3])
def test_pb075_order_of_calls(width: int) -> None:
    """Gathers of equal size would mix up weights silently, others would hang or crash."""
    for (message,) in run_ranks(2, _other_order, width):
        assert "all_gather of a.0.main_weight (42 x torch.float32) on ranks [0]" in message
        assert f"all_gather of b.0.main_weight ({42 if width == 6 else 22} x torch.float32) on ranks [1]" in message


def _other_model_first(in_one_context: bool) -> str:
    """Two models whose units have the same names and shapes, called in another order."""
    models = [nn.Linear(6, 6), nn.Linear(6, 6)]
    torch.manual_seed(0)
    if in_one_context:
        with fully_shard_context(DEVICE):
            for model in models:
                fully_shard(model)
    for model in models:
        if not in_one_context:
            fully_shard(model)
        with torch.no_grad():
            model(torch.ones(1, 6))
    with pytest.raises(RuntimeError) as raised, check_ranks(LONG_S):
        models[dist.get_rank()](torch.ones(1, 6))
    return str(raised.value)


@pytest.mark.parametrize("in_one_context", [True, False])
def test_pb075_models_of_equal_names(in_one_context: bool) -> None:
    for message in run_ranks(2, _other_model_first, in_one_context):
        found = re.findall(r"FsdpLinear\.0\.main_weight( of model \d+)? \(42", message)
        assert len(found) == len(set(found)) == 2


def _checked_training() -> tuple[Any, int]:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    with check_ranks(LONG_S):
        run = run_sharded(Recipe(steps=3))
    dist.barrier()
    return run, store.num_keys() - before


def test_training_under_the_check_is_the_same_and_leaves_no_keys() -> None:
    reference = run_reference(Recipe(steps=3), 2)
    for run, num_keys in run_ranks(2, _checked_training):
        assert_parity(run, reference)
        assert num_keys <= 2 + 2  # what each rank did last, and keys of barriers


PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from megatron.core.distributed.fsdp.experimental import SchedulePolicy, fully_shard, fully_shard_context

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
with fully_shard_context("cpu"):
    for layer in model:
        fully_shard(layer, schedule_policy=SchedulePolicy(forward_prefetch_units=0))
model[0](torch.ones(1, 4))
if rank == int(sys.argv[3]):
    time.sleep(1)  # the other rank is there first
    sys.exit(0)
model[1](torch.ones(1, 4))
"""


def _run_program(ending_rank: int) -> list[tuple[str, int]]:
    """Run PROGRAM on two ranks of their own, of which one ends early; returns what they printed and exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MEGATRON_FSDP_CHECK_RANKS": "1", "MEGATRON_FSDP_TIMEOUT_S": "60"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), str(ending_rank)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(printed, process.wait()) for process in ranks for printed in [process.communicate(timeout=100)[1]]]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("ending_rank", [0, 1])
def test_pb073_environment_and_end_of_the_program(ending_rank: int) -> None:
    """Rank 0 holds the store: when it ends first, the other learns of its end or of the store's."""
    results = _run_program(ending_rank)
    printed, code = results[1 - ending_rank]
    assert code == 1
    assert "RuntimeError" in printed and "all_gather of FsdpLinear.0.main_weight of model 1 (" in printed
    assert f"the end of the program on ranks [{ending_rank}]" in printed or "no answer from the store" in printed
    printed, code = results[ending_rank]
    assert code == 0
    assert f"the end of the program on ranks [{ending_rank}]" in printed


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MEGATRON_FSDP_CHECK_RANKS": "yes"}, "MEGATRON_FSDP_CHECK_RANKS: expected 0 or 1, got 'yes'."),
        (
            {"MEGATRON_FSDP_CHECK_RANKS": "1", "MEGATRON_FSDP_TIMEOUT_S": "soon"},
            "MEGATRON_FSDP_TIMEOUT_S: expected a number of seconds > 0, got 'soon'.",
        ),
    ],
)
def test_environment_is_checked(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as raised:
        _check_from_environment()
    assert str(raised.value) == message


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_timeout_is_checked(timeout_s: float) -> None:
    with (
        pytest.raises(ValueError, match="check_ranks timeout_s: expected a number of seconds > 0"),
        check_ranks(timeout_s),
    ):
        pass
