# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Cases about gradients: groups of one rank, reuse in one forward, casts at a unit's border."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    FsdpModule,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import Block
from tests.unit_tests.oracle import OPTIMIZERS, assert_at_rest

BF16, FP32 = torch.bfloat16, torch.float32
Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def _batches(seed: int, width: int) -> torch.Tensor:
    """Return one batch for every rank, [ranks, 4, width]."""
    return torch.randn(dist.get_world_size(), 4, width, generator=torch.Generator().manual_seed(seed))


def _train_and_compare(
    model: Any,
    reference: nn.Module,
    width: int,
    *,
    loss: Use = _loss,
    microbatches: int = 1,
    steps: int = 10,
    optimizer: str = "sgd",
    set_to_none: bool = True,
) -> None:
    """Train on this rank's batches with FSDP and on all of them in one process; compare in every step."""
    ours = fully_shard_optimizer(OPTIMIZERS[optimizer](model.parameters()))
    theirs = OPTIMIZERS[optimizer](reference.parameters())
    world_size, rank = dist.get_world_size(), dist.get_rank()
    named = dict(model.named_parameters())
    for step in range(steps):
        ours.zero_grad(set_to_none)
        theirs.zero_grad(set_to_none)
        for index in range(microbatches):
            batches = _batches(100 * step + index, width)
            with microbatch(model.context, is_last=index == microbatches - 1):
                loss(model, batches[rank]).backward()
            for batch in batches:
                (loss(reference, batch) / world_size).backward()
        assert_at_rest(model)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(named[name].grad.full_tensor(), parameter.grad, rtol=1e-5, atol=1e-6)
        ours.step()
        theirs.step()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(named[name].full_tensor(), parameter.detach(), rtol=1e-5, atol=1e-6)


# --- PB-002 -----------------------------------------------------------------------------------------------------------


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def _alone(set_to_none: bool) -> None:
    model, reference = _stack(), _stack()
    fully_shard(model[0])
    fully_shard(model)
    _train_and_compare(model, reference, 6, microbatches=4, set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_pb002_world_of_one(set_to_none: bool) -> None:
    run_ranks(1, _alone, set_to_none)


def _part_alone(set_to_none: bool) -> None:
    """One unit on a mesh of this rank alone: its gradient is this rank's own sum, that of the rest a mean."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "alone"))
    model, rank = _stack(), dist.get_rank()
    references = [_stack() for _ in range(dist.get_world_size())]
    fully_shard(model[0], mesh["alone"])
    fully_shard(model[1], mesh["dp"])
    fully_shard(model, mesh["dp"])
    ours = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = [torch.optim.SGD(reference.parameters(), lr=0.1) for reference in references]
    for step in range(3):
        for optimizer in (ours, *theirs):
            optimizer.zero_grad(set_to_none)
        for index in range(4):
            batches = _batches(100 * step + index, 6)
            with microbatch(model.context, is_last=index == 3):
                _loss(model, batches[rank]).backward()
            for reference, batch in zip(references, batches, strict=True):
                _loss(reference, batch).backward()
        assert_at_rest(model)
        for name, parameter in model.named_parameters():
            twins = [reference.get_parameter(name) for reference in references]
            if not name.startswith("0."):
                mean = sum(twin.grad for twin in twins) / len(twins)
                for twin in twins:
                    twin.grad = mean.clone()
            torch.testing.assert_close(parameter.grad.full_tensor(), twins[rank].grad, rtol=1e-5, atol=1e-6)
        for optimizer in (ours, *theirs):
            optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_pb002_one_unit_on_a_mesh_of_one(set_to_none: bool) -> None:
    run_ranks(2, _part_alone, set_to_none)


# --- PB-012 -----------------------------------------------------------------------------------------------------------

WIDTH = 96


def _recomputed(reentrant: bool, use: Use) -> Use:
    return lambda m, x: checkpoint(lambda y: use(m, y), x, use_reentrant=reentrant)


def _nested(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = m(m(x))
    return out


def _summed(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = m(x) + m(0.5 * x)
    return out


USES: dict[str, Use] = {
    "nested": _nested,
    "summed": _summed,
    "nested_in_checkpoint": _recomputed(False, _nested),
    "summed_in_checkpoint": _recomputed(False, _summed),
    "nested_in_reentrant_checkpoint": _recomputed(True, _nested),
    "summed_in_reentrant_checkpoint": _recomputed(True, _summed),
    "checkpoint_after_plain_use": lambda m, x: checkpoint(m, m(x), use_reentrant=False),
    "plain_use_after_checkpoint": lambda m, x: m(checkpoint(m, x, use_reentrant=False)),
    "two_checkpoints": lambda m, x: checkpoint(m, checkpoint(m, x, use_reentrant=True), use_reentrant=True),
    "one_use_without_gradient": lambda m, x: m(x) + m(x).detach(),
}


class _Reused(nn.Module):
    """A unit with a large weight that `use` calls several times, below a root with a parameter of its own."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.unit = nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Tanh(), nn.Linear(WIDTH + 1, WIDTH))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.unit, x * self.scale)


def _reused_inside(name: str, optimizer: str) -> None:
    model, reference = _Reused(USES[name]), _Reused(USES[name])
    fully_shard(model.unit)
    fully_shard(model)
    _train_and_compare(model, reference, WIDTH, optimizer=optimizer)


@pytest.mark.parametrize("name", USES)
def test_pb012_unit_reused_in_one_forward(name: str) -> None:
    run_ranks(2, _reused_inside, name, "sgd")


@pytest.mark.parametrize("name", ["nested", "summed", "nested_in_checkpoint"])
def test_pb012_unit_reused_with_adam(name: str) -> None:
    run_ranks(2, _reused_inside, name, "adamw")


def _reused_root(name: str) -> None:
    model, reference = (_Reused(USES[name]).unit for _ in range(2))
    fully_shard(model)

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return USES[name](module, batch.requires_grad_()).square().mean()

    _train_and_compare(model, reference, WIDTH, loss=loss)


@pytest.mark.parametrize("name", USES)
def test_pb012_root_reused_in_one_loss(name: str) -> None:
    run_ranks(2, _reused_root, name)


# --- PB-016 -----------------------------------------------------------------------------------------------------------


class _FusedProduct(torch.autograd.Function):
    """A linear layer whose backward adds the weight's gradient into `main_grad` itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, makes_own: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.makes_own = weight, makes_own
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, values = ctx.saved_tensors
        weight = ctx.weight
        if ctx.makes_own and not hasattr(weight, "main_grad"):
            weight.main_grad = torch.zeros_like(values)
        weight.main_grad.add_(grad.t() @ x)
        weight.grad_added_to_main_grad = True
        return grad @ values, torch.zeros_like(values), None


class _FusedLinear(nn.Linear):
    makes_own = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _FusedProduct.apply(x, self.weight, self.makes_own)
        return out


def _fused(makes_own: bool) -> str:
    """Two microbatches; there is no full main gradient to add to, so it must say so, and not lose gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(_FusedLinear(6, 5, bias=False), nn.Linear(5, 4))
    model[0].makes_own = makes_own
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(RuntimeError) as raised:
        for index in range(2):
            with microbatch(model.context, is_last=index == 1):
                _loss(model, _batches(index, 6)[dist.get_rank()]).backward()
    return str(raised.value)


@pytest.mark.parametrize("makes_own", [False, True], ids=["reads_main_grad", "makes_main_grad"])
def test_pb016_fused_gradient_accumulation_is_refused(makes_own: bool) -> None:
    for message in run_ranks(2, _fused, makes_own):
        assert "0.weight" in message and "main_grad" in message and "expected" in message


# --- PB-034 -----------------------------------------------------------------------------------------------------------


@dataclass
class _Output:
    hidden: Any
    other: Any = None


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda t: t, lambda out: out),
    "tuple": (lambda t: (None, t), lambda out: out[1]),
    "dict": (lambda t: {"a": [t], "b": 3}, lambda out: out["a"][0]),
    "dataclass": (_Output, lambda out: out.hidden),
}


class _Casts(nn.Module):
    """Casts its output to bfloat16 in the container that it is told."""

    def __init__(self, name: str, *, casts_itself: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block(6)
        self.wrap, self.unwrap = CONTAINERS[name]
        self.casts_itself = casts_itself

    def forward(self, x: torch.Tensor) -> Any:
        out = self.block(x)
        return self.wrap(out.bfloat16() if self.casts_itself else out)


def _cast_hook(module: Any, args: Any, output: Any) -> Any:
    return module.wrap(module.unwrap(output).bfloat16())


def _output_cast(name: str, where: str) -> None:
    """Weights stay as they are: with equal weights every rank's gradients come from the very same roundings."""
    model, reference = (_Casts(name, casts_itself=where == "forward") for _ in range(2))
    if where == "hook_before":
        model.register_forward_hook(_cast_hook)
    fully_shard(model.block)
    fully_shard(model)
    if where == "hook_after":
        model.register_forward_hook(_cast_hook)
    if where != "forward":
        reference.register_forward_hook(_cast_hook)
    world_size = dist.get_world_size()
    for step in range(3):
        batches = _batches(step, 6)
        outputs = model(batches[dist.get_rank()])
        assert not batches.requires_grad and model.unwrap(outputs).dtype is BF16
        model.unwrap(outputs).float().square().mean().backward()
        assert_at_rest(model)
        for batch in batches:
            (reference.unwrap(reference(batch)).float().square().mean() / world_size).backward()
        for name, parameter in reference.named_parameters():
            assert parameter.grad.any()
            gradient = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["forward", "hook_before", "hook_after"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_pb034_output_cast_keeps_gradients(name: str, where: str) -> None:
    run_ranks(2, _output_cast, name, where)


# --- PB-035 -----------------------------------------------------------------------------------------------------------


class _Inspects(nn.Module):
    """Keeps what it was called with, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).bfloat16()
        self.seen: list[tuple[Any, Any]] = []

    def forward(self, x: Any, table: Any, mask: Any, flag: Any, *others: Any, **named: Any) -> Any:
        self.seen.append(((x, table, mask, flag, *others), named))
        return self.linear(x), x.float(), table, mask, flag


class _Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6, dtype=BF16))
        self.unit = _Inspects()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.unit(*args, **kwargs)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (tuple, list)):
        return [_kind(item) for item in value]
    if isinstance(value, dict):
        return {name: _kind(item) for name, item in value.items()}
    return type(value)


def _input_dtypes(requires_grad: bool) -> None:
    model = _Passes()
    policy = MixedPrecisionPolicy(FP32, main_grads_dtype=FP32)
    fully_shard(model.unit, mixed_precision_policy=policy)
    fully_shard(model, mixed_precision_policy=policy)
    assert isinstance(model.unit, FsdpModule)
    x = torch.full((2, 6), dist.get_rank() + 1.0, dtype=BF16)
    table = torch.linspace(0.1, 0.3, 6).requires_grad_(requires_grad)
    wide = torch.linspace(0.1, 0.3, 6, dtype=torch.float64)
    mask, flag = torch.arange(6), torch.tensor(True)
    args = (x, table, mask, flag, wide, 7, "text", None, [table, mask], {"t": (table, flag)})
    outputs = model(*args)
    assert [_kind(value) for value in model.unit.seen[-1][0]] == [_kind(value) for value in args]
    assert _kind(outputs) == [BF16, FP32, FP32, torch.int64, torch.bool]
    names = ("x", "table", "mask", "flag", "wide", "number", "text", "nothing", "list", "dict")
    outputs = model(**dict(zip(names, args, strict=True)))
    positional, named = model.unit.seen[-1]
    assert [_kind(value) for value in positional] == [BF16, FP32, torch.int64, torch.bool]
    assert _kind(named) == {name: _kind(value) for name, value in zip(names[4:], args[4:], strict=True)}
    assert torch.equal(positional[1], table) and torch.equal(named["dict"]["t"][0], table)
    assert positional[2] is mask and positional[3] is flag and named["wide"] is wide and named["text"] is args[6]
    assert _kind(outputs) == [BF16, FP32, FP32, torch.int64, torch.bool]
    (outputs[0].float().sum() + outputs[2].sum()).backward()
    assert_at_rest(model)
    if requires_grad:
        assert table.grad is not None and table.grad.dtype is FP32 and torch.equal(table.grad, torch.ones(6))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_pb035_inputs_and_outputs_keep_their_dtypes(requires_grad: bool) -> None:
    run_ranks(2, _input_dtypes, requires_grad)
