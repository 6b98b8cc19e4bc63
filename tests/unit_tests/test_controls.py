# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Settings between steps: gradient synchronisation, prefetch, resharding under FSDP2's names; freezing."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    SchedulePolicy,
    fully_shard,
    fully_shard_optimizer,
)
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest, compare_gradients, full_gradients
from tests.unit_tests.trace import CollectiveLog, Trace

PATTERNS = list(itertools.product([True, False], repeat=3))


def _backward(model: Any, index: int, rank: int) -> None:
    inputs, targets = make_batch(model, 4, seed=10 * index + rank)
    loss_of(model, inputs, targets).backward()


def _sync_patterns() -> None:
    """Whatever is reduced when, the gradients are the sum over the backwards of the mean over ranks."""
    world_size = dist.get_world_size()
    reference = build("mlp")
    for index, rank in itertools.product(range(3), range(world_size)):
        _backward(reference, index, rank)
    model = shard_layers(build("mlp"))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for pattern in PATTERNS:
        optimizer.zero_grad()
        reductions = []
        for index, sync in enumerate((*pattern[:2], True)):
            model.set_requires_gradient_sync(sync)
            with CollectiveLog() as log:
                _backward(model, index, dist.get_rank())
            reductions.append(sum(entry[0] == "reduce_scatter" for entry in log.entries))
        assert reductions == [4 if sync else 0 for sync in (*pattern[:2], True)]
        assert_at_rest(model)
        for name, gradient in full_gradients(model).items():
            expected = reference.get_parameter(name).grad / world_size
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_pb013_sync_and_no_sync_in_every_pattern() -> None:
    run_ranks(2, _sync_patterns)


def _step_without_sync() -> None:
    model = shard_layers(build("mlp"))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for sync in (True, False):
        model.set_requires_gradient_sync(sync)
        _backward(model, 0, dist.get_rank())
    optimizer.step()


def test_pb013_stepping_on_unreduced_gradients_raises() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _step_without_sync):
        assert "expected reduced gradients, got some that are held back on each rank for groups" in message


def _held_by_an_idle_unit() -> None:
    """A unit that held gradients back and does not run in the backward that reduces still gets them reduced."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    reference = copy.deepcopy(model)
    for unit in model.values():
        fully_shard(unit)
    root: Any = fully_shard(model)
    for module in (root, reference):
        for sync, name in ((False, "a"), (True, "b")):
            if module is root:
                root.set_requires_gradient_sync(sync)
            for rank in [dist.get_rank()] if module is root else range(dist.get_world_size()):
                module[name](torch.full((1, 3), rank + 1.0)).square().sum().backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad / dist.get_world_size(), msg=name)


def test_pb013_gradients_of_an_idle_unit_are_not_lost() -> None:
    run_ranks(2, _held_by_an_idle_unit)


def _narrow_without_sync() -> None:
    """PB-023 as well: what is held back is summed in the main-gradient dtype."""
    model = nn.Linear(8, 4, bias=False).bfloat16()
    plain = copy.deepcopy(model)
    fully_shard(model)
    total = torch.zeros(4, 8)
    for index in range(32):
        model.set_requires_gradient_sync(index == 31)
        for rank in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(100 * index + rank)
            x = torch.randn(2, 8, generator=generator).mul_(10.0 ** (index % 5 - 2)).bfloat16()
            plain.zero_grad()
            plain(x).sum().backward()
            total += plain.weight.grad.float() / dist.get_world_size()
            if rank == dist.get_rank():
                model(x).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), total, rtol=1e-6, atol=1e-5)


def test_pb023_held_gradients_are_wide() -> None:
    run_ranks(2, _narrow_without_sync)


def _traced() -> list[str]:
    trace = Trace()
    from megatron.core.distributed.fsdp.experimental.device import observe

    with observe(trace):
        model = shard_layers(build("mlp"))
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            for sync in (False, False, True):
                model.set_requires_gradient_sync(sync)
                _backward(model, 0, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
    assert any(operation == "hold" for _, operation, _ in trace.events)
    return trace.races


def test_no_races_without_sync() -> None:
    assert run_ranks(2, _traced) == [[], []]


def _last_backward() -> None:
    model = shard_layers(build("mlp"))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.set_is_last_backward(False)
    _backward(model, 0, 0)
    with pytest.raises(RuntimeError, match="expected gradients of all microbatches"):
        optimizer.step()
    model.set_is_last_backward(True)
    _backward(model, 1, 0)
    optimizer.step()


def test_set_is_last_backward() -> None:
    run_ranks(1, _last_backward)


def _named_prefetch() -> None:
    model = shard_layers(build("mlp"))
    model.set_modules_to_forward_prefetch([model.layers[2], model.layers[0]])
    model.layers[2].set_modules_to_backward_prefetch([])
    gathered: list[list[bool]] = []
    model.layers[0].register_forward_pre_hook(
        lambda module, args: gathered.append([layer.unshard_event is not None for layer in model.layers])
    )
    out = model(torch.ones(1, 7))
    # The first layer's own policy adds the second one.
    assert gathered == [[True, True, True]]
    out.register_hook(lambda grad: gathered.append([layer.unshard_event is not None for layer in model.layers]))
    out.sum().backward()
    assert_at_rest(model)
    with pytest.raises(
        ValueError, match="set_modules_to_forward_prefetch: expected units of the same context, got Linear"
    ):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])


def test_prefetch_of_named_units() -> None:
    run_ranks(2, _named_prefetch)


def _kept_weights() -> None:
    def gathers(model: Any) -> int:
        with CollectiveLog() as log:
            _backward(model, 0, dist.get_rank())
        assert_at_rest(model)
        return sum(entry[0] == "all_gather" for entry in log.entries)

    # Three layers and the root; weights that are kept are gathered once.
    assert gathers(shard_layers(build("mlp"))) == 7
    assert gathers(shard_layers(build("mlp"), reshard_after_forward=False)) == 4
    model = shard_layers(build("mlp"), reshard_after_forward=True)
    assert gathers(model) == 8
    model.set_reshard_after_forward(False)
    assert gathers(model) == 4
    model.layers[0].set_reshard_after_forward(True, recurse=False)
    assert gathers(model) == 5


def test_reshard_after_forward() -> None:
    run_ranks(2, _kept_weights)


def _bad_settings() -> None:
    model = shard_layers(build("mlp"))
    for setting in ("set_requires_gradient_sync", "set_is_last_backward", "set_reshard_after_forward"):
        with pytest.raises(TypeError, match=f"{setting}: expected True or False, got 'no'"):
            getattr(model, setting)("no")
    with pytest.raises(ValueError, match="expected None with a schedule_policy that sets it, got True"):
        fully_shard(
            nn.Linear(1, 1), schedule_policy=SchedulePolicy(reshard_after_forward=False), reshard_after_forward=True
        )
    with pytest.raises(ValueError, match=r"got ModuleList with parameters such as 0\.weight, which would never"):
        fully_shard(nn.ModuleList([nn.Linear(1, 1)]))


def test_bad_settings() -> None:
    run_ranks(1, _bad_settings)


def _freezing(set_to_none: bool) -> None:
    """Parameters are frozen and unfrozen between steps, one by one and whole units; optimizer and numbers follow."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6))
    reference[2].requires_grad_(False)
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (reference, model)]
    fully_shard_optimizer(optimizers[1])
    changes = [
        lambda module: None,
        lambda module: module[1].requires_grad_(False),
        lambda module: module[0].weight.requires_grad_(False),
        lambda module: module.requires_grad_(True),
        lambda module: setattr(module[2].bias, "requires_grad", False),
        lambda module: module[:2].requires_grad_(False),
        lambda module: module.requires_grad_(True),
    ]
    world_size = dist.get_world_size()
    for step, change in enumerate(changes):
        batches = torch.randn(world_size, 4, 6, generator=torch.Generator().manual_seed(step))
        for module, optimizer in zip((reference, model), optimizers, strict=True):
            change(module)
            for rank in [dist.get_rank()] if module is model else range(world_size):
                share = 1 if module is model else world_size
                (module(batches[rank]).square().sum() / share).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        assert_at_rest(model)
        for name, parameter in reference.named_parameters():
            found: Any = model.get_parameter(name)
            assert found.requires_grad == parameter.requires_grad, name
            assert (found.grad is None) == (parameter.grad is None), f"{name} in step {step}"
            torch.testing.assert_close(
                found.full_tensor(), parameter, rtol=1e-4, atol=1e-5, msg=f"{name} in step {step}"
            )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_freezing_between_steps(set_to_none: bool) -> None:
    run_ranks(2, _freezing, set_to_none)


def _adversary() -> None:
    """As GANs do: one model is frozen while gradients pass through it to the other."""
    torch.manual_seed(0)
    reference = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    model = copy.deepcopy(reference)
    for part in model:
        fully_shard(part)
    fully_shard(model)

    def step(module: Any, batch: torch.Tensor) -> None:
        generator, discriminator = module
        discriminator.requires_grad_(False)
        discriminator(generator(batch)).square().sum().backward()
        discriminator.requires_grad_(True)
        discriminator(generator(batch).detach()).sin().sum().backward()

    compare_gradients(model, reference, step)


def test_freezing_alternately() -> None:
    run_ranks(2, _adversary)


def _refused_freezing() -> None:
    unit = fully_shard(nn.Linear(3, 3))
    unit.register_forward_pre_hook(lambda module, args: None)
    sharded: Any = unit.weight
    failures: list[str] = []

    def freeze(*args: Any) -> None:
        with pytest.raises(RuntimeError, match="requires_grad in unit FsdpLinear: expected a change while the unit is"):
            sharded.requires_grad_(False)
        failures.append("refused")

    handle = unit.register_forward_pre_hook(freeze)
    unit(torch.ones(1, 3)).sum().backward()
    handle.remove()
    assert failures == ["refused"] and sharded.requires_grad
    narrow = fully_shard(
        nn.Linear(3, 3).bfloat16().requires_grad_(False), mixed_precision_policy=MixedPrecisionPolicy(torch.float32)
    )
    with pytest.raises(
        RuntimeError, match=r"requires_grad of weight in unit .*: expected a parameter with main weights"
    ):
        narrow.requires_grad_(True)
    assert not any(parameter.requires_grad for parameter in narrow.parameters())
    driven = fully_shard(nn.Linear(3, 3), register_hooks=False)
    with pytest.raises(RuntimeError, match="with register_hooks=False"):
        driven.requires_grad_(False)


def test_freezing_at_the_wrong_time_is_refused() -> None:
    run_ranks(1, _refused_freezing)
