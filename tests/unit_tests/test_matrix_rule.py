# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Other rules than Muon's on sharded matrices: what travels, and who computes, knows nothing of Newton-Schulz."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.experimental import (
    STRATEGIES,
    MatrixOptimizer,
    MatrixRule,
    Placements,
    fully_shard,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.experimental.matrix_rule import require
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.matrix_oracle import build_net, loss_of_net

NUM_STEPS = 10


class RowRule(MatrixRule):
    """Divides each row of the momentum by its norm: cheap, by rows, in float32."""

    name = "rows"

    def defaults(self) -> dict[str, Any]:
        """With the least norm."""
        return {**super().defaults(), "least": 1e-8}

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse a least norm of zero."""
        super().check(group)
        require(group["least"] > 0, self.name, "least", "> 0", group["least"])

    def cost(self, count: int, rows: int, columns: int, group: Mapping[str, Any]) -> int:
        """One pass."""
        return count * rows * columns

    def solve(self, matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """In place, as it may be."""
        return matrix.div_(matrix.norm(dim=-1, keepdim=True).clamp_min(group["least"]))

    def scale(self, rows: int, columns: int, group: Mapping[str, Any]) -> float:
        """Wide rows move less."""
        return columns**-0.5


class RootRule(MatrixRule):
    """Multiplies a matrix by inverse fourth roots of its two Gram matrices, as Shampoo does with sums of them.

    It is given the bare gradient: it has no state, and cannot travel in anything but float32.
    """

    name = "roots"

    def cost(self, count: int, rows: int, columns: int, group: Mapping[str, Any]) -> int:
        """Two eigenvalue problems."""
        return count * (rows**3 + columns**3)

    def new_state(self, weight: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def accumulate(self, gradients: Any, states: Any, group: Any) -> None:
        """Keep nothing."""

    def prepare(self, gradients: Any, states: Any, group: Any, into: Any) -> None:
        """Hand over the gradients."""
        assert all(state == {} for state in states)
        torch._foreach_copy_(into, gradients)

    def solve(self, matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """See `solve_by_roots`."""
        return solve_by_roots(matrix)


def solve_by_roots(matrix: torch.Tensor) -> torch.Tensor:
    """Return (M M^T)^(-1/4) M (M^T M)^(-1/4)."""
    return _inverse_root(matrix @ matrix.mT) @ matrix @ _inverse_root(matrix.mT @ matrix)


def _inverse_root(square: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(square)
    return (vectors * values.clamp_min(1e-6).pow(-0.25).unsqueeze(-2)) @ vectors.mT


RULES: dict[str, type[MatrixRule]] = {"rows": RowRule, "roots": RootRule}


def _matrices(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.ndim > 1}


def _reference(world_size: int, rule: str) -> dict[str, torch.Tensor]:
    model = build_net(world_size)
    rest = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.001)
    momenta: dict[str, torch.Tensor] = {}
    for step in range(NUM_STEPS):
        model.zero_grad()
        for rank in range(world_size):
            loss_of_net(model, step, rank).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(world_size)
        _step_plainly(_matrices(model), momenta, rule)
        rest.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@torch.no_grad()
def _step_plainly(matrices: Mapping[str, torch.Tensor], momenta: dict[str, torch.Tensor], rule: str) -> None:
    for name, weight in matrices.items():
        if weight.grad is None:
            continue
        matrix = weight.grad.flatten(1) if "kernel" in name else weight.grad
        if rule == "rows":
            momentum = momenta.setdefault(name, torch.zeros_like(matrix))
            momentum.lerp_(matrix, 1 - 0.9)
            update, scale = momentum / momentum.norm(dim=-1, keepdim=True).clamp_min(1e-8), matrix.shape[-1] ** -0.5
        else:
            update, scale = solve_by_roots(matrix), 1.0
        rate = torch.tensor(0.01)
        weight.mul_(1 - rate * 0.1).addcmul_(update.view(weight.shape), rate * scale, value=-1)


def _train(rule: str, strategy: str) -> tuple[dict[str, torch.Tensor], int]:
    model: Any = build_net(dist.get_world_size())
    for layer in (*model.layers, model.spare):
        fully_shard(layer, placements=Placements.from_strategy(strategy))
    fully_shard(model, placements=Placements.from_strategy(strategy))
    stacks = [p for name, p in _matrices(model).items() if "stack" in name]
    others = [p for name, p in _matrices(model).items() if "stack" not in name]
    rest = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.001)
    settings = {"momentum": 0.9} if rule == "rows" else {}
    optimizer: Any = MatrixOptimizer(
        [{"params": stacks, "is_stack": True}, {"params": others}],
        RULES[rule](),
        lr=0.01,
        weight_decay=0.1,
        rest=rest,
        package_bytes=2500,
        **settings,
    )
    fully_shard_optimizer(optimizer)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of_net(model, step, dist.get_rank()).backward()
        optimizer.step()
    (work,) = optimizer.works
    has_momenta = any("momentum_buffer" in state for state in optimizer.state.values())
    assert has_momenta == (rule == "rows")
    return {name: p.full_tensor() for name, p in model.named_parameters()}, work.plan.travelling_numel


def _compare(expected: dict[str, torch.Tensor], rule: str) -> None:
    for strategy in STRATEGIES:
        found, travelling = _train(rule, strategy)
        different = [name for name, value in expected.items() if not torch.equal(found[name].cpu(), value.cpu())]
        assert not different, (strategy, different)
        assert (travelling > 0) == (strategy != "no_shard" and dist.get_world_size() > 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_other_rules_are_those_of_whole_matrices(world_size: int, rule: str) -> None:
    expected = run_ranks(1, _reference, world_size, rule)[0]
    run_ranks(world_size, _compare, expected, rule)


def _local_rows(rule: str) -> tuple[bool, bool]:
    """Return whether a step on local shards as if they were matrices would be another one."""
    torch.manual_seed(0)
    gradient = torch.randn(6, 5)
    whole = RULES[rule]().solve(gradient.clone(), RULES[rule]().defaults())
    halves = gradient.reshape(-1).split([17, 13])
    parts = [RULES[rule]().solve(half.clone().view(1, -1), RULES[rule]().defaults()).view(-1) for half in halves]
    return torch.equal(torch.cat(parts).view(6, 5), whole), bool(torch.isfinite(whole).all())


@pytest.mark.parametrize("rule", RULES)
def test_these_rules_look_at_whole_matrices(rule: str) -> None:
    assert _local_rows(rule) == (False, True)


def test_settings_of_a_rule_of_ones_own_are_checked() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError) as raised:
        MatrixOptimizer([weight], RowRule(), least=0.0)
    assert str(raised.value) == "rows least: expected > 0, got 0.0. Correct it in the param_group."
    with pytest.raises(ValueError, match=r"rows: expected settings among \['least', 'momentum', .* got \['nesterow'\]"):
        MatrixOptimizer([weight], RowRule(), nesterow=True)


def _state_of_another() -> None:
    optimizers: list[Any] = []
    for rule in (RowRule(), RootRule()):
        model = fully_shard(torch.nn.Linear(4, 6, bias=False))
        optimizers.append(fully_shard_optimizer(MatrixOptimizer(list(model.parameters()), rule)))
        model(torch.ones(2, 4)).sum().backward()
        optimizers[-1].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())


def test_state_of_one_matrix_rule_is_refused_by_another() -> None:
    for message in run_ranks_expecting(2, ValueError, _state_of_another):
        assert message.startswith("optimizer state of weight: expected that of roots, got that of rows. Go on")
