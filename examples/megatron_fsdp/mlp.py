# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A residual MLP, the smallest model that has many layers. Knows of no runtime."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    """Norm, two matrix products and a GELU between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    """Layers, a projection and the squared error."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(hidden) for _ in range(layers)])
        self.head = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of [rows, hidden] in fp32."""
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x).float(), target.float())
