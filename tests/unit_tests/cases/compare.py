# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Any module and any step, trained sharded and in one process, compared after every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import fully_shard_optimizer
from tests.unit_tests.oracle import OPTIMIZERS, assert_at_rest, assert_same_on_all_ranks, full_gradients
from tests.unit_tests.trace import CollectiveLog

Step = Callable[[Any, torch.Tensor], torch.Tensor]
"""Runs forward and backward of a module on one rank's batch and returns the loss."""


def compare_training(
    reference: nn.Module,
    shard: Callable[[Any], Any],
    step: Step,
    *,
    optimizer: str = "adamw",
    steps: int = 10,
    width: int = 6,
    main_dtype: torch.dtype | None = torch.float32,
) -> Any:
    """Train a sharded copy of `reference` on this rank's batches, `reference` on everybody's, and compare the two.

    Losses, every full gradient and every full parameter must agree after each step; all units are at rest then, and
    all ranks have communicated alike. A parameter without gradient in one process may have zeros in a unit that ran.

    Args:
        reference: a plain module, equal on every rank; left trained.
        shard: makes units of a copy of it, in place.
        step: called with [4, width] batches, which differ by rank and step; torch is seeded before each call.
        optimizer: a name of `OPTIMIZERS`.
        steps: how many.
        width: features of a batch.
        main_dtype: dtype of main weights, in which the reference averages and steps, too; None for the compute dtypes.

    Returns:
        The sharded copy.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model: Any = copy.deepcopy(reference)
    shard(model)
    one_process = _OneProcess(reference, optimizer, main_dtype)
    sharded = [p for p in model.parameters() if p.requires_grad]
    adapted = fully_shard_optimizer(OPTIMIZERS[optimizer](sharded)) if sharded else None
    for index in range(steps):
        batches = torch.randn(world_size, 4, width, generator=torch.Generator().manual_seed(index))
        expected = one_process.run(step, batches, index)
        for parameter in sharded:
            parameter.grad = None
        with CollectiveLog() as log:
            loss = _seeded(step, model, batches[rank], index, rank)
        assert_at_rest(model)
        assert_same_on_all_ranks(log.entries)
        assert_mean_over_ranks(loss, expected)
        one_process.assert_same_gradients(model)
        if adapted is not None:
            adapted.step()
        one_process.step()
        one_process.assert_same_weights(model)
    return model


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare two tensors whose sums over ranks come in another order; bfloat16 and float16 by their own precision."""
    rtol = max(1e-5, 2 * torch.finfo(found.dtype).eps) if found.is_floating_point() else 0.0
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=rtol / 10, check_dtype=False, msg=lambda text: f"{what}: {text}"
    )


def assert_mean_over_ranks(loss: torch.Tensor, expected: float) -> None:
    """Compare the mean of the ranks' losses with one process'."""
    total = loss.detach().double()
    dist.all_reduce(total)
    assert_close(total / dist.get_world_size(), torch.tensor(expected, dtype=torch.float64), "loss")


def _seeded(step: Step, module: Any, batch: torch.Tensor, index: int, rank: int) -> torch.Tensor:
    torch.manual_seed(1000 * index + rank)
    return step(module, batch.clone())


class _OneProcess:
    """The same training in this process alone: one rank's batch after another, averages and steps in main dtypes."""

    def __init__(self, module: nn.Module, optimizer: str, main_dtype: torch.dtype | None) -> None:
        self.module = module
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.main: dict[str, Any] = {
            name: nn.Parameter(p.detach().to(main_dtype or p.dtype, copy=True)) for name, p in self.trainable.items()
        }
        self.optimizer = OPTIMIZERS[optimizer](self.main.values()) if self.main else None

    def run(self, step: Step, batches: torch.Tensor, index: int) -> float:
        """Set the gradients of all ranks' batches, averaged, and return the mean loss."""
        loss = 0.0
        for main in self.main.values():
            main.grad = None
        for rank, batch in enumerate(batches):
            self.module.zero_grad()
            loss += float(_seeded(step, self.module, batch, index, rank)) / len(batches)
            for name, parameter in self.trainable.items():
                if parameter.grad is not None:
                    main = self.main[name]
                    share = parameter.grad.to(main.dtype) / len(batches)
                    main.grad = share if main.grad is None else main.grad + share
        return loss

    def assert_same_gradients(self, model: nn.Module) -> None:
        """Compare with the sharded gradients, and go on with the zeros that an unused parameter gets there."""
        gradients = full_gradients(model)
        for name, main in self.main.items():
            if main.grad is None and name in gradients:
                assert not gradients[name].any(), f"{name} is not used and has a gradient"
                main.grad = torch.zeros_like(main)
            assert (name in gradients) == (main.grad is not None), f"gradient of {name}"
            if main.grad is not None:
                assert_close(gradients[name], main.grad, f"gradient of {name}")

    def step(self) -> None:
        """Step the main weights and write them into the module."""
        if self.optimizer is not None:
            self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(self.main[name])

    def assert_same_weights(self, model: nn.Module) -> None:
        """Compare with the sharded main weights, frozen ones bit by bit."""
        for name, parameter in model.named_parameters():
            full: Any = parameter
            full = full.full_tensor()
            if name in self.main:
                assert full.dtype is self.main[name].dtype, name
                assert_close(full, self.main[name], f"weight of {name}")
            else:
                assert torch.equal(full, self.module.get_parameter(name)), name
