# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What `fully_shard` accepts, what it refuses before anything changes, and what a module is like afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron.core.distributed.fsdp.experimental import (
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.models import Mlp, TiedLm, build, loss_of, make_batch, shard_layers


def _mesh(*shape: int) -> Any:
    return init_device_mesh(DEVICE, shape or (dist.get_world_size(),))


def _shard_twice() -> None:
    fully_shard(fully_shard(nn.Linear(2, 2)))


def _tied_across_units() -> None:
    """PB-055: embedding and head share a weight but are wrapped apart."""
    model = TiedLm()
    fully_shard(model.embedding)
    fully_shard(model.head)


def _tied_across_unit_and_root() -> None:
    model = TiedLm()
    fully_shard(model.embedding)
    fully_shard(model)


def _meta() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.scale = nn.Parameter(torch.ones(2))
        model.register_buffer("table", torch.ones(2))
    fully_shard(model)


def _scalar() -> None:
    model = nn.Module()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    fully_shard(model)


def _distributed_already() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 4), _mesh(), [Shard(0)]))
    fully_shard(model)


def _narrow_main_weights() -> None:
    fully_shard(nn.Linear(2, 2), mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16))


def _taken_name() -> None:
    model = nn.Linear(2, 2)
    model.phase = "training"
    fully_shard(model)


def _private_name() -> None:
    class Taken(nn.Linear):
        def _fsdp_enter(self) -> None:
            pass

    fully_shard(Taken(2, 2))


def _gradient_before() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    fully_shard(model)


def _hook_before() -> None:
    model = nn.Linear(2, 2)
    model.bias.register_hook(lambda grad: grad)
    fully_shard(model)


def _held_reference() -> None:
    """A list that holds the original would compute with, and train, a dead copy."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))
            self.weights = [self.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weights[0]

    fully_shard(Holds())(torch.ones(1, 2))


def _plain_optimizer_built_before() -> None:
    """PB-028, without the adapter: a plain optimizer over replaced originals raises at its first step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def _unknown_axis() -> None:
    fully_shard(nn.Linear(2, 2), placements=Placements.from_strategy("optim_grads_params", dp_axes=("tp",)))


REFUSED: dict[str, tuple[type[Exception], Callable[[], Any], str]] = {
    "not_a_module": (TypeError, lambda: fully_shard("model"), "expected Module or a list of them, got str"),  # type: ignore[type-var]
    "not_a_mesh": (TypeError, lambda: fully_shard(nn.Linear(2, 2), 2), "fully_shard mesh: expected DeviceMesh or None"),  # type: ignore[arg-type]
    "not_placements": (
        TypeError,
        lambda: fully_shard(nn.Linear(2, 2), placements="zero3"),  # type: ignore[arg-type]
        "fully_shard placements: expected Placements or None, got str",
    ),
    "not_a_policy": (
        TypeError,
        lambda: fully_shard(nn.Linear(2, 2), mixed_precision_policy=torch.bfloat16),  # type: ignore[arg-type]
        "fully_shard mixed_precision_policy: expected MixedPrecisionPolicy",
    ),
    "not_a_schedule": (
        TypeError,
        lambda: fully_shard(nn.Linear(2, 2), schedule_policy=1),  # type: ignore[arg-type]
        "fully_shard schedule_policy: expected SchedulePolicy",
    ),
    "divisor": (
        ValueError,
        lambda: fully_shard(nn.Linear(2, 2), grad_divisor=0),
        "grad_divisor: expected a number > 0",
    ),
    "reduction": (
        ValueError,
        lambda: fully_shard(nn.Linear(2, 2), gradient_reduction="mean"),  # type: ignore[arg-type]
        "gradient_reduction: expected 'average' or 'sum', got 'mean'",
    ),
    "one_axis_for_two": (
        ValueError,
        lambda: fully_shard(nn.Linear(2, 2), _mesh(1, 2), Placements.from_strategy("optim")),
        "expected the mesh's axes",
    ),
    "outer_for_one_axis": (
        ValueError,
        lambda: fully_shard(nn.Linear(2, 2), placements=Placements.from_strategy("optim", outer="optim")),
        "give `outer` exactly for two data-parallel axes",
    ),
    "reshard_of_replicated": (
        ValueError,
        lambda: fully_shard(
            nn.Linear(2, 2), placements=Placements.from_strategy("optim_grads"), reshard_after_forward=True
        ),
        "reshard_after_forward: expected None where parameters are replicated, got True",
    ),
    "reshard_of_replicated_to_a_number": (
        ValueError,
        lambda: fully_shard(nn.Linear(2, 2), placements=Placements.from_strategy("optim"), reshard_after_forward=2),
        "reshard_after_forward: expected None where parameters are replicated, got 2; it would have no effect",
    ),
    "reshard_to_a_number_over_two_axes": (
        NotImplementedError,
        lambda: fully_shard(nn.Linear(2, 2), _mesh(1, 2), reshard_after_forward=2),
        "reshard_after_forward: expected True, False or None where several axes shard the parameters, got 2. Shard",
    ),
    "reshard_to_no_divisor": (
        ValueError,
        lambda: fully_shard(nn.Linear(2, 2), _mesh(2), reshard_after_forward=3),
        "reshard_after_forward: expected a divisor of the 2 ranks that shard the parameters, got 3. Give",
    ),
    "unknown_axis": (ValueError, _unknown_axis, "fully_shard placements: expected the mesh's axes ('dp',)"),
    "narrow_accumulator": (
        ValueError,
        lambda: fully_shard(
            nn.Linear(2, 2),
            mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16, grad_comm_dtype=torch.float32),
        ),
        "expected grad_comm_dtype no wider than torch.bfloat16, in which gradients of weight accumulate",
    ),
    "twice": (RuntimeError, _shard_twice, "expected a module that is not sharded yet, got FsdpLinear"),
    "tied_across_units": (ValueError, _tied_across_units, "got weight, which unit Embedding#0 has sharded already"),
    "tied_across_unit_and_root": (ValueError, _tied_across_unit_and_root, "got head.weight, which unit Embedding#0"),
    "meta": (ValueError, _meta, "got ['scale', 'table'] without reset_parameters or _reset_parameters"),
    "scalar": (ValueError, _scalar, "got the scalar temperature"),
    "distributed_already": (ValueError, _distributed_already, "got the DTensor weight"),
    "narrow_main_weights": (ValueError, _narrow_main_weights, "at least as wide as torch.float32 of weight"),
    "private_name": (ValueError, _private_name, "got ['_fsdp_enter']. Rename them"),
    "gradient_before": (ValueError, _gradient_before, "expected parameters without gradients, got one on weight"),
    "hook_before": (ValueError, _hook_before, "expected parameters without hooks, got some on bias"),
    "held_reference": (RuntimeError, _held_reference, "matmul of the original weight"),
    "plain_optimizer": (
        RuntimeError,
        _plain_optimizer_built_before,
        "the one that unit Linear#0 has replaced by shards",
    ),
    "taken_name": (ValueError, _taken_name, "got ['phase']. Rename them"),
}


def _refuse(name: str) -> str:
    error, function, _ = REFUSED[name]
    with pytest.raises(error) as raised:
        function()
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_raise_on_every_rank(name: str) -> None:
    for message in run_ranks(2, _refuse, name):
        assert REFUSED[name][2] in message


def test_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="expected an initialised default process group for mesh=None"):
        fully_shard(nn.Linear(2, 2))


def _refusal_changes_nothing() -> None:
    """PB-121: after a refused call the module is as it was, and a right call works."""
    model = nn.Linear(2, 2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="at least as wide"):
        fully_shard(model, mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert type(model) is nn.Linear
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    fully_shard(model)
    assert torch.equal(model.weight.full_tensor(), before["weight"])


def test_pb121_failed_wrap_leaves_the_module() -> None:
    run_ranks(2, _refusal_changes_nothing)


def _wrap_order() -> None:
    model = build("mlp")
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"expected units inside it that belong to this context|sharded already"):
        model(torch.ones(1, 7))
        fully_shard(nn.Sequential(model))
    with fully_shard_context(DEVICE):
        inner = fully_shard(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="expected units inside it that belong to this context"):
        fully_shard(nn.Sequential(inner))
    with (
        fully_shard_context(DEVICE),
        pytest.raises(RuntimeError, match="expected no open block"),
        fully_shard_context(),
    ):
        pass
    with fully_shard_context(DEVICE) as context:
        fully_shard(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="expected a context that is still open"):
        context.register_module(fully_shard(nn.Linear(2, 2)))


def test_pb121_wrap_order_mistakes() -> None:
    run_ranks(1, _wrap_order)


def _parent_before_child() -> None:
    model = build("mlp")
    fully_shard(model)
    with pytest.raises(ValueError, match=r"sharded already|DTensor"):
        fully_shard(model.layers[0])


def test_parent_before_child_is_refused() -> None:
    run_ranks(1, _parent_before_child)


def _casts_and_moves(how: str) -> None:
    model = shard_layers(build("mlp"))
    getattr(model, how)()


@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "float", "cpu"])
def test_pb121_cast_after_wrap_is_refused(how: str) -> None:
    for message in run_ranks_expecting(1, RuntimeError, _casts_and_moves, how):
        assert "cast or move of unit" in message and "before fully_shard" in message


def _assign(where: str) -> None:
    """PB-021: assign=True would leave the runtime with the old buffers."""
    model = shard_layers(build("mlp"))
    target = model.get_submodule(where) if where else model
    values = {name: p.full_tensor() for name, p in target.named_parameters()}
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="expected assign=False, got assign=True"):
        target.load_state_dict(values, assign=True)
    assert all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("where", ["", "layers.0"])
def test_pb021_assign_is_refused(where: str) -> None:
    run_ranks(2, _assign, where)


def _state_dict_round_trip() -> None:
    """PB-020: values loaded in place are what the next forward computes with."""
    source, target = shard_layers(build("mlp", seed=1).bfloat16()), shard_layers(build("mlp", seed=2).bfloat16())
    x = torch.ones(2, 7, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not torch.equal(source(x), target(x))
        target.load_state_dict(source.state_dict())
        assert torch.equal(source(x), target(x))
    wrong = {name: value for name, value in source.state_dict().items() if name != "scale"}
    with pytest.raises(RuntimeError, match="scale"):
        target.load_state_dict(wrong)


def test_pb020_load_reaches_the_next_forward() -> None:
    run_ranks(2, _state_dict_round_trip)


def _values_after_wrap(seed: int) -> dict[str, torch.Tensor]:
    model = build("convolutions", seed)
    originals = copy.deepcopy(dict(model.named_parameters()))
    shard_layers(model)
    assert isinstance(model, FsdpModule) and type(model).__name__ == "FsdpConvolutions"
    assert [name for name, _ in model.named_parameters()] == list(originals)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), originals[name]), name
    return {name: p.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_and_names_survive(world_size: int) -> None:
    run_ranks(world_size, _values_after_wrap, 3)


def _implicit_contexts() -> None:
    """FSDP2's idiom: units of one root share a context; two models do not."""
    one, two = shard_layers(build("mlp")), shard_layers(build("tied"))
    assert all(layer.context is one.context for layer in one.layers)
    assert one.context is not two.context
    assert not one.context.is_finalized
    one(torch.ones(1, 7))
    assert one.context.is_finalized and one.is_root() and not one.layers[0].is_root()
    assert one.layers[1].name == "layers.1" and one.num_parameter_elements == 7
    assert [unit.name for unit in one.context.forward_order] == ["FsdpMlp", "layers.0", "layers.1", "layers.2"]


def test_implicit_contexts() -> None:
    run_ranks(1, _implicit_contexts)


def _tied_parameters() -> None:
    """PB-056: a weight tied inside one unit stays one parameter under all its names."""
    model = shard_layers(TiedLm())
    assert model.head.weight is model.embedding.weight
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names and "head.weight" not in names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == len(names)
    seen = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(module.weight is model.embedding.weight))
    inputs, targets = make_batch(model, 4, dist.get_rank())
    loss_of(model, inputs, targets).backward()
    assert seen == [True] and model.head.weight is model.embedding.weight


def test_pb056_tied_weight_is_one_parameter() -> None:
    run_ranks(2, _tied_parameters)


def _parameter_attributes() -> None:
    model = nn.Linear(4, 4)
    model.weight.tensor_model_parallel = False
    model.weight.partition_dim = 0
    fully_shard(model)
    assert model.weight.partition_dim == 0 and model.weight.tensor_model_parallel is False
    model.unshard()
    assert type(model.weight) is nn.Parameter and model.weight.partition_dim == 0
    model.reshard()


def test_attributes_survive_on_both_kinds_of_parameter() -> None:
    run_ranks(2, _parameter_attributes)


def _groups() -> list[tuple[torch.dtype, bool, list[str]]]:
    """PB-096, PB-098: one group per dtype and requires_grad; frozen ones have no gradient buffers."""
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(3, 2))
    model.narrow = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.index = nn.Parameter(torch.arange(5), requires_grad=False)
    model.wide_too = nn.Parameter(torch.ones(1))
    fully_shard(model)
    for group in model.parameter_groups:
        assert (group.gradients is None) == (not group.requires_grad)
    assert torch.equal(model.index.full_tensor(), torch.arange(5))
    return [(g.full_weight.dtype, g.requires_grad, g.fqns) for g in model.parameter_groups]


def test_groups_by_dtype_and_requires_grad() -> None:
    for groups in run_ranks(2, _groups):
        assert groups == [
            (torch.float32, True, ["wide", "wide_too"]),
            (torch.bfloat16, True, ["narrow"]),
            (torch.float32, False, ["frozen"]),
            (torch.int64, False, ["index"]),
        ]


def _gradient_scale(reduction: str, divisor: float) -> list[float]:
    model = nn.Linear(2, 1, bias=False)
    fully_shard(model, gradient_reduction=reduction, grad_divisor=divisor)  # type: ignore[arg-type]
    for _ in range(2):
        model(torch.full((1, 2), float(dist.get_rank() + 1))).sum().backward()
    return model.weight.grad.full_tensor().flatten().tolist()


@pytest.mark.parametrize(
    ("reduction", "divisor", "expected"),
    [("average", 1, 2 * 1.5), ("sum", 1, 2 * 3.0), ("average", 2, 1.5), ("sum", 4, 1.5)],
)
def test_averages_sums_and_divisor_apply_once_per_contribution(reduction: str, divisor: float, expected: float) -> None:
    """Rank r contributes r + 1 in each of two backwards."""
    assert run_ranks(2, _gradient_scale, reduction, divisor) == [[expected] * 2] * 2


def _buffers_move() -> None:
    model = nn.BatchNorm1d(3)
    fully_shard(model)
    assert model.running_mean.device.type == DEVICE and type(model.running_mean) is torch.Tensor
    model(torch.randn(4, 3)).sum().backward()


def test_buffers_stay_whole() -> None:
    run_ranks(2, _buffers_move)


def _mlp_without_names() -> float:
    """Plain PyTorch, no context, no policies: the idiom of FSDP2."""
    torch.manual_seed(0)
    model = Mlp()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    inputs, targets = make_batch(model, 64, seed=dist.get_rank())
    first = None
    for _ in range(100):
        loss = loss_of(model, inputs, targets)
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert first is not None
    return loss.item() / first


def test_plain_pytorch_model_learns() -> None:
    assert max(run_ranks(2, _mlp_without_names)) < 0.8
