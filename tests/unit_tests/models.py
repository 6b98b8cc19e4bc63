# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A handful of tiny models whose sizes do not divide, and how each is cut into units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.distributed.fsdp.experimental import fully_shard


class Mlp(nn.Module):
    """Three linear units of odd sizes below a root that owns a parameter of its own."""

    in_features = 7
    out_features = 3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 11), nn.Linear(11, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


class Block(nn.Module):
    """A pre-norm residual block, the shape of a transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TiedLm(nn.Module):
    """Embedding and head share one weight; both are the root's."""

    in_features = 0
    out_features = 10

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([Block(6) for _ in range(3)])
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FrozenBackbone(Mlp):
    """A fully frozen unit, a unit that mixes frozen and trainable parameters, and a frozen root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)


class Convolutions(nn.Module):
    """Parameters with more than two dims, and fewer rows than ranks."""

    in_features = 2 * 5 * 5
    out_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 1, 3, padding=1)])
        self.head = nn.Linear(25, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 2, 5, 5)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x.flatten(1))


class OneElement(nn.Module):
    """One parameter of one element: on most ranks there is nothing."""

    in_features = 1
    out_features = 1

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 0.7))
        self.layers = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": Mlp,
    "tied": TiedLm,
    "frozen": FrozenBackbone,
    "convolutions": Convolutions,
    "one_element": OneElement,
}


def build(name: str, seed: int = 0) -> Any:
    """Return a model on the default device whose initial weights depend on `seed` alone."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = MODELS[name]()
    return model.to(torch.get_default_device())


def shard_layers(model: Any, **options: Any) -> Any:
    """Make every layer a unit and the model the root; returns the model."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def make_batch(model: Any, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `size` samples; every rank takes its own slice of them, so that no two ranks see the same data."""
    generator = torch.Generator().manual_seed(seed)
    if model.in_features == 0:
        tokens = torch.randint(0, 10, (size, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(size, model.in_features, generator=generator)
    return inputs, torch.randn(size, model.out_features, generator=generator)


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over a batch."""
    outputs = model(inputs)
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets.to(outputs.dtype))
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
