# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A model with every kind of tensor that a checkpoint has to hold, and its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from tests.unit_tests.launch import lasting_mesh

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "plain_sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
}


class Zoo(nn.Module):
    """Tied, frozen, 4-D, one-row, odd and tiny weights, and buffers."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.conv = nn.Conv2d(2, 3, (1, 3), bias=False)
        self.frozen = nn.Linear(6, 6)
        self.row = nn.Parameter(torch.randn(1, 7))
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 6)])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 13, bias=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.embedding(tokens)
        x = x + self.frozen(x) + self.conv(x.reshape(1, 2, -1, 3)).sum() * self.scale.to(x.dtype)
        x = self.layers[1](torch.tanh(self.layers[0](x) * self.row))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), (tokens * 7 + 3).flatten() % 13)


@dataclass(frozen=True)
class Cut:
    """How a model is sharded."""

    strategy: str = "optim_grads_params"
    outer: str | None = None
    units: str = "layers"
    dtype: torch.dtype = torch.float32
    main_dtype: torch.dtype = torch.float32
    tied: bool = True
    seed: int = 0


def make(cut: Cut, optimizer: str) -> tuple[Any, Any]:
    """Return a sharded model and its optimizer."""
    return make_of(build(cut), cut, optimizer)


def build(cut: Cut) -> Any:
    """Return a model that is not sharded yet."""
    torch.manual_seed(cut.seed)
    return Zoo(cut.tied).to(cut.dtype)


def make_of(model: Any, cut: Cut, optimizer: str) -> tuple[Any, Any]:
    """Shard a model made by `build`; return it and its optimizer."""
    world_size = dist.get_world_size()
    mesh = lasting_mesh((world_size,) if cut.outer is None else (2, world_size // 2))
    placements = Placements.from_strategy(cut.strategy, outer=cut.outer)
    policy = MixedPrecisionPolicy(cut.main_dtype)
    with fully_shard_context():
        for unit in {"layers": list(model.layers), "one": [], "conv": [model.conv, model.frozen]}[cut.units]:
            fully_shard(unit, mesh, placements, policy)
        fully_shard(model, mesh, placements, policy)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "lr": 0.02},
        {"params": [p for p in trainable if p.ndim <= 1]},
    ]
    return model, fully_shard_optimizer(OPTIMIZERS[optimizer](groups))


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Train with other data on each rank; return the losses of this rank."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randint(13, (2, 6), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tensors_by_name(model: Any, optimizer: Any) -> dict[str, tuple[Any, torch.Tensor]]:
    """Return weights, buffers and states by name, each with the parameter that it is cut like, if with any."""
    found = {name: (parameter, parameter.to_local()) for name, parameter in model.named_parameters()}
    found |= {name: (None, buffer) for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}:{key}"] = (parameter if value.ndim else None, value)
    return found


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return what each group has besides parameters; torch's own state dict functions make lists of tuples."""
    return [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return full weights, buffers and states by name, and the optimizer's settings; every rank must call it."""
    found: dict[str, Any] = {
        name: local.clone() if parameter is None else parameter.geometry.gather(local)
        for name, (parameter, local) in tensors_by_name(model, optimizer).items()
    }
    return {**found, "settings": settings(optimizer)}


def assert_same(model: Any, optimizer: Any, expected: dict[str, Any], what: Any = None) -> None:
    """Require the bits of what `everything` returned; each rank looks at its own elements."""
    found = tensors_by_name(model, optimizer)
    assert found.keys() | {"settings"} == expected.keys(), found.keys() ^ expected.keys()
    for name, (parameter, local) in found.items():
        wanted = expected[name]
        if parameter is not None:
            owned = parameter.geometry.owned
            wanted = wanted.reshape(-1)[owned.start : owned.stop]
        assert torch.equal(local.reshape(-1), wanted.reshape(-1)), f"{name} in {what}: {local} and {wanted}"
    assert settings(optimizer) == expected["settings"]
