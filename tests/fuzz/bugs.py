# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Bugs to plant in the runtime, to see that the fuzzer finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import FsdpContext, FsdpModule, collectives
from megatron.core.distributed.fsdp.experimental.gradients import GroupGradients
from megatron.core.distributed.fsdp.experimental.parameter_group import FsdpParameterGroup


def _missing_wait() -> Any:
    """Compute does not wait for the gather of its weights."""
    return patch.object(FsdpContext, "wait_for_unshard", lambda self, unit: None)


def _missing_reduction() -> Any:
    """Every rank keeps its own gradients."""

    def keep_local(
        output: torch.Tensor, input: torch.Tensor, reduction: str, group: dist.ProcessGroup, *, what: str
    ) -> None:
        output.copy_(input.view(group.size(), -1)[group.rank()])

    return patch.object(collectives, "reduce_scatter", keep_local)


def _missing_second_reduction() -> Any:
    """A unit's gradients of the second microbatch are dropped."""
    reduce = GroupGradients.reduce

    def drop(self: Any, is_last: bool, from_full: bool) -> None:
        if from_full and any(parameter.grad is not None for parameter in self._sharded):
            self.at.full.local.zero_()
        reduce(self, is_last, from_full)

    return patch.object(GroupGradients, "reduce", drop)


def _stale_weight() -> Any:
    """Compute weights are made from main weights only once."""
    sync_model_weight = FsdpParameterGroup.sync_model_weight

    def sync(self: Any) -> None:
        if self.num_steps == 0:
            sync_model_weight(self)
        self._is_stale = False

    return patch.object(FsdpParameterGroup, "sync_model_weight", sync)


def _stale_gather() -> Any:
    """Weights that were gathered before the optimizer stepped are used after it."""
    unshard = FsdpContext.unshard

    def keep(self: FsdpContext, unit: FsdpModule) -> None:
        if unit.unshard_event is None:
            unshard(self, unit)

    return patch.object(FsdpContext, "unshard", keep)


BUGS: dict[str, Callable[[], Any]] = {
    "missing_wait": _missing_wait,
    "missing_reduction": _missing_reduction,
    "missing_second_reduction": _missing_second_reduction,
    "stale_weight": _stale_weight,
    "stale_gather": _stale_gather,
}


@contextmanager
def plant(bug: str | None) -> Iterator[None]:
    """Plant a bug inside the block; None plants nothing."""
    if bug is None:
        yield
        return
    with BUGS[bug]():
        yield
