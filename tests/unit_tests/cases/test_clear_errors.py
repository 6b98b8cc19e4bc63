# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Uses that torch itself would answer with a crash or a nameless error, or not at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import MixedPrecisionPolicy, fully_shard
from tests.unit_tests.cases.compare import assert_close
from tests.unit_tests.cases.test_options import DDP_METHODS, OURS, _all_keywords
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest, full_gradients


def _second_derivative() -> None:
    """A gradient penalty: the second backward would read weights that the first one has released."""
    model: Any = shard_layers(build("mlp"))
    x = torch.ones(2, 7, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def test_pb086_second_derivatives_are_refused() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _second_derivative):
        assert "backward of unit FsdpMlp" in message and "create_graph" in message


def _failed_backward() -> None:
    """A backward that raises leaves sharded parameters in the module, so that zero_grad() reaches their gradients."""
    plain: Any = build("mlp")
    model: Any = shard_layers(copy.deepcopy(plain))
    batches = [make_batch(plain, 4, seed=rank) for rank in range(dist.get_world_size())]
    mine = batches[dist.get_rank()]
    loss = loss_of(model, *mine)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert_at_rest(model)
    model.zero_grad()
    assert not full_gradients(model)
    loss_of(model, *mine).backward()
    for batch in batches:
        (loss_of(plain, *batch) / len(batches)).backward()
    for name, parameter in plain.named_parameters():
        assert_close(full_gradients(model)[name], parameter.grad, name)


def test_pb086_zero_grad_after_a_failed_backward() -> None:
    run_ranks(2, _failed_backward)


def _plain_beside_sharded(optimizer: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    model = fully_shard(nn.Linear(3, 3))
    bias = nn.Parameter(torch.ones(3))
    stepped = optimizer([*model.parameters(), bias], lr=0.1, **options)  # type: ignore[call-arg]
    model(torch.ones(1, 3)).sum().backward()
    bias.grad = torch.ones(3)
    stepped.step()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_pb102_plain_beside_sharded_parameters_in_one_list(
    optimizer: type[torch.optim.Optimizer], options: dict[str, bool]
) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _plain_beside_sharded, optimizer, options):
        assert "of the sharded parameter weight" in message and "an optimizer of its own" in message


def _fused_sgd() -> None:
    model = fully_shard(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_pb102_fused_sgd_needs_an_adapted_optimizer() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _fused_sgd):
        assert "of the sharded parameter weight" in message and "fully_shard_optimizer" in message


def _other_gradient_dtype(main: torch.dtype | None, grads: torch.dtype, options: dict[str, bool]) -> None:
    model = fully_shard(nn.Linear(3, 3).bfloat16(), mixed_precision_policy=MixedPrecisionPolicy(main, grads))
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=["foreach", "per_tensor", "fused"]
)
@pytest.mark.parametrize(("main", "grads"), [(torch.float32, torch.bfloat16), (None, torch.float32)])
def test_pb103_gradients_of_another_dtype_need_an_adapted_optimizer(
    main: torch.dtype | None, grads: torch.dtype, options: dict[str, bool]
) -> None:
    for message in run_ranks_expecting(2, RuntimeError, _other_gradient_dtype, main, grads, options):
        assert "of the sharded parameter weight" in message and "fully_shard_optimizer" in message


def test_pb123_remaining_methods_of_megatron_core_work_or_are_refused_by_name() -> None:
    run_ranks(1, _all_keywords, sorted(DDP_METHODS.keys() - OURS))
