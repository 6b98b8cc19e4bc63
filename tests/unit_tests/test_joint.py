# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Units of several modules train as units of one do, with fewer collectives, whatever the model does between them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    register_fsdp_forward_method,
    save_checkpoint,
)
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks
from tests.unit_tests.oracle import assert_at_rest
from tests.unit_tests.trace import CollectiveLog

WIDTH = 64
DEPTH = 6


class Block(nn.Module):
    """A residual block whose sizes are multiples of a vector, however tensors are cut: kernels then round alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """Blocks that run in the way that `run` says."""

    def __init__(self, run: Callable[[Tower, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(DEPTH)])
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x * self.scale)


def straight(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def with_all_outputs(model: Tower, x: torch.Tensor) -> torch.Tensor:
    outputs = [x]
    for block in model.blocks:
        outputs.append(block(outputs[-1]))
    return torch.stack(outputs).sum(dim=0)


def reversed_order(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for block in reversed(model.blocks):
        x = block(x)
    return x


def twice(model: Tower, x: torch.Tensor) -> torch.Tensor:
    return straight(model, straight(model, x))


def early_exit(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks[:4]:
        x = block(x)
    return x


def without_the_first(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks[1:]:
        x = block(x)
    return x


def recomputed(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def recomputed_reentrant(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def recomputed_in_chunks(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for start in (0, 2, 4):
        x = checkpoint(nn.Sequential(*model.blocks[start : start + 2]), x, use_reentrant=False)
    return x


def recomputed_at_first(model: Tower, x: torch.Tensor) -> torch.Tensor:
    """What begins a unit's forward keeps no graph, what goes on with it does."""
    for index, block in enumerate(model.blocks):
        x = checkpoint(block, x, use_reentrant=True) if index in (0, 2, 4) else block(x)
    return x


def recomputed_at_last(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for index, block in enumerate(model.blocks):
        x = checkpoint(block, x, use_reentrant=True) if index in (1, 3, 5) else block(x)
    return x


def recomputed_without_gradients(model: Tower, x: torch.Tensor) -> torch.Tensor:
    """A reentrant checkpoint of an input without a gradient trains nothing inside."""
    return without_the_first(model, checkpoint(model.blocks[0], x.detach(), use_reentrant=True) + x)


RUNS = (
    straight,
    with_all_outputs,
    reversed_order,
    twice,
    early_exit,
    without_the_first,
    recomputed,
    recomputed_reentrant,
    recomputed_in_chunks,
    recomputed_at_first,
    recomputed_at_last,
    recomputed_without_gradients,
)


def _build(
    run: Any, group_size: int, strategy: str, outer: str | None = None, units_ahead: int = 1
) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Tower(run).to(DEVICE)
    ranks = dist.get_world_size()
    mesh = lasting_mesh((ranks,)) if outer is None else lasting_mesh((ranks, 1))
    options: dict[str, Any] = {"placements": Placements.from_strategy(strategy, outer=outer)}
    options["schedule_policy"] = SchedulePolicy(backward_prefetch_units=units_ahead)
    blocks = list(model.blocks)
    with fully_shard_context() as context:
        for start in range(0, DEPTH, group_size):
            group = blocks[start : start + group_size]
            fully_shard(group if group_size > 1 else group[0], mesh, **options)
        fully_shard(model, mesh, **options)
    return model, context, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def _train(model: Any, context: Any, optimizer: Any, num_microbatches: int = 1, steps: int = 4) -> list[Any]:
    seen: list[Any] = []
    for step in range(steps):
        for index in range(num_microbatches):
            generator = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank())
            batch = torch.randn(3, WIDTH, generator=generator).to(DEVICE)
            with microbatch(context, is_last=index == num_microbatches - 1):
                loss = model(batch).square().mean()
                loss.backward()
            seen.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        assert_at_rest(model)
        with torch.no_grad():
            seen.append(model(torch.ones(2, WIDTH, device=DEVICE)).sum())
        assert_at_rest(model)
    return seen


def _full(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def _same_bits(
    run_name: str, group_size: int, strategy: str, outer: str | None, num_microbatches: int, units_ahead: int = 1
) -> None:
    run = next(run for run in RUNS if run.__name__ == run_name)
    single, joint = (_build(run, size, strategy, outer, units_ahead) for size in (1, group_size))
    expected, found = _train(*single, num_microbatches), _train(*joint, num_microbatches)
    # Three gradients of an output that is used elsewhere, too, are added in another order: a unit's inputs are views.
    is_same = torch.equal if run is not with_all_outputs else _are_close
    assert all(map(is_same, expected, found)), [float(a - b) for a, b in zip(expected, found, strict=True)]
    weights, others = _full(single[0]), _full(joint[0])
    assert list(weights) == list(others)
    assert all(is_same(weights[name], others[name]) for name in weights)


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_same_bits_as_units_of_one(run: Any, group_size: int) -> None:
    run_ranks(2, _same_bits, run.__name__, group_size, "optim_grads_params", None, 1)


@pytest.mark.parametrize("run", [recomputed_at_first, recomputed_without_gradients], ids=lambda run: run.__name__)
def test_a_forward_that_begins_without_a_graph(run: Any) -> None:
    """Nothing is gathered ahead that could be taken for the unit's own gather."""
    run_ranks(2, _same_bits, run.__name__, 2, "optim_grads_params", None, 2, 0)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_every_strategy(strategy: str, num_microbatches: int) -> None:
    run_ranks(2, _same_bits, "straight", 3, strategy, None, num_microbatches)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_two_axes(outer: str) -> None:
    run_ranks(2, _same_bits, "straight", 3, "optim_grads_params", outer, 3)


def _collectives() -> None:
    logs = []
    for size in (1, 3):
        model, context, optimizer = _build(straight, size, "optim_grads_params")
        _train(model, context, optimizer, steps=1)
        with CollectiveLog() as log:
            _train(model, context, optimizer, steps=1)
        logs.append([operation for operation, *_ in log.entries])
        units = context.units()
        assert len(units) == DEPTH // size + 1
    # Three passes gather (forward, backward, evaluation), the root's weights stay for backward; one pass reduces.
    assert [log.count("all_gather") for log in logs] == [3 * DEPTH + 2, 3 * DEPTH // 3 + 2]
    assert [log.count("reduce_scatter") for log in logs] == [DEPTH + 1, DEPTH // 3 + 1]


def test_one_gather_and_one_reduction_for_all() -> None:
    run_ranks(2, _collectives)


def _names(folder: str) -> None:
    model, context, optimizer = _build(straight, 3, "optim_grads_params")
    _train(model, context, optimizer)
    for name, parameter in model.named_parameters():
        assert parameter.geometry.fqn == name
    state = _full(model)
    save_checkpoint(model, optimizer, f"{folder}/joint")
    for size in (1, 2):
        torch.manual_seed(1)
        other, others_context, others_optimizer = _build(straight, size, "optim_grads_params")
        load_checkpoint(other, others_optimizer, f"{folder}/joint")
        assert all(torch.equal(tensor, state[name]) for name, tensor in _full(other).items())
        third, *_ = _build(straight, size, "optim_grads_params")
        third.load_state_dict(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in _full(third).items())
        expected, found = _train(model, context, optimizer), _train(other, others_context, others_optimizer)
        assert all(map(torch.equal, expected, found))
        load_checkpoint(model, optimizer, f"{folder}/joint")


def test_names_and_checkpoints(tmp_path: Path) -> None:
    run_ranks(2, _names, str(tmp_path))


def _fails(model: Tower, x: torch.Tensor) -> torch.Tensor:
    for index, block in enumerate(model.blocks):
        if index == 2 and model.is_broken:
            x = x[:, :2]
        x = block(x)
    return x


def _failure_between() -> None:
    model, context, optimizer = _build(_fails, 3, "optim_grads_params")
    expected = _train(*_build(straight, 3, "optim_grads_params"))
    model.is_broken = True
    for needs_grad in (True, False):
        with torch.set_grad_enabled(needs_grad), pytest.raises(RuntimeError, match="normalized_shape"):
            model(torch.ones(2, WIDTH, device=DEVICE))
        assert_at_rest(model)
    model.is_broken = False
    assert all(map(torch.equal, expected, _train(model, context, optimizer)))


def test_an_error_between_leaves_the_unit_at_rest() -> None:
    run_ranks(2, _failure_between)


def _deletion() -> None:
    gc.disable()
    try:
        model, context, optimizer = _build(straight, 3, "optim_grads_params")
        _train(model, context, optimizer, steps=1)
        references = [weakref.ref(block) for block in model.blocks]
        del model, context, optimizer
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


def test_deletion_frees_at_once() -> None:
    run_ranks(1, _deletion)


def _mixed() -> None:
    torch.manual_seed(0)
    towers = [Tower(straight).to(DEVICE, torch.bfloat16) for _ in range(2)]
    towers[1].load_state_dict(towers[0].state_dict())
    policy = MixedPrecisionPolicy(torch.float32)
    losses = []
    for tower, size in zip(towers, (1, 2), strict=True):
        tower.blocks[1].norm.requires_grad_(False)
        blocks = list(tower.blocks)
        for start in range(0, DEPTH, size):
            fully_shard(blocks[start : start + size], mixed_precision_policy=policy)
        fully_shard(tower, mixed_precision_policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(tower.parameters()))
        for _ in range(4):
            batch = torch.full((2, WIDTH), 0.5 + dist.get_rank(), device=DEVICE, dtype=torch.bfloat16)
            loss = tower(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[0] == losses[1]


def test_mixed_precision_and_frozen_parameters() -> None:
    run_ranks(2, _mixed)


def _refused(modules: Callable[[], Sequence[Any]], error: type[Exception], message: str, options: Any) -> None:
    with pytest.raises(error, match=message):
        fully_shard(modules(), **options)


def _inside() -> list[nn.Module]:
    block = Block(WIDTH)
    return [block, block.norm]


def _with_unit() -> list[nn.Module]:
    block = Block(WIDTH)
    fully_shard(block.up)
    return [block, Block(WIDTH)]


def _with_number() -> list[Any]:
    return [Block(WIDTH), 3]


def _two_blocks() -> list[nn.Module]:
    return [Block(WIDTH), Block(WIDTH)]


def _follower() -> nn.Module:
    blocks = [Block(WIDTH), Block(WIDTH)]
    fully_shard(blocks)
    return blocks[1]


@pytest.mark.parametrize(
    ("modules", "error", "message", "options"),
    [
        (list, TypeError, "fully_shard module: expected Module or a list of them, got none", {}),
        (_with_number, TypeError, "expected Module or a list of them, got int", {}),
        (_inside, ValueError, "expected modules beside each other, got .'Block', 'LayerNorm'.", {}),
        (_with_unit, ValueError, "expected modules without units inside, got .'Block', 'Block'.", {}),
        (_two_blocks, ValueError, "expected register_hooks=True", {"register_hooks": False}),
        (_follower, RuntimeError, "expected a module that is not sharded yet, got Block, which is a unit already", {}),
    ],
)
def test_refusals(modules: Any, error: Any, message: str, options: Any) -> None:
    run_ranks(1, _refused, modules, error, message, options)


def _without_root() -> None:
    blocks = [Block(WIDTH).to(DEVICE), Block(WIDTH).to(DEVICE)]
    fully_shard(blocks)
    with pytest.raises(
        ValueError, match="fully_shard of 2 modules from FsdpBlock on: expected a unit around all of them"
    ):
        blocks[0](torch.ones(1, WIDTH, device=DEVICE))
    with pytest.raises(NotImplementedError, match="register_fsdp_forward_method of FsdpBlock: expected a unit of one"):
        register_fsdp_forward_method(blocks[0], "extra_repr")


def test_needs_a_unit_around() -> None:
    run_ranks(1, _without_root)


def _weight_between() -> None:
    model, _, _ = _build(straight, 3, "optim_grads_params")
    model.blocks[1].forward = lambda x: model.blocks[1].up.weight[:3]
    with pytest.raises(RuntimeError, match="expected a tensor of its own, got a view of its parameter"):
        model(torch.ones(3, WIDTH, device=DEVICE))
    assert_at_rest(model)


def test_a_weight_as_output_in_the_middle_is_refused() -> None:
    run_ranks(1, _weight_between)
