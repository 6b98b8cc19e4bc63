# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Small modules whose parameters have all kinds of shapes and uses; each maps [batch, width] to the same shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Mlp(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class _RecomputedMlp(_Mlp):
    """Recomputed inside, with the module's own parameters on both sides of the recomputed part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(checkpoint(lambda y: torch.tanh(self.up(y)), x, use_reentrant=False))


class _TiedMlp(_Mlp):
    """One weight under two names, used as it is and transposed."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.down = nn.Linear(width, size, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x)) @ self.down.weight


class _Vector(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _OneElement(_Vector):
    def __init__(self, width: int, size: int) -> None:
        super().__init__(1, 0)


class _Scalar(_Vector):
    def __init__(self, width: int, size: int) -> None:
        super().__init__(1, 0)
        self.weight = nn.Parameter(torch.empty(()))


class _Cube(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("bi,cij->bcj", x, self.weight)).mean(1)


class _Convolution(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, size, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x.view(-1, 1, 1, x.shape[-1]))).mean(1).view(x.shape)


class _Norm(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class _Lookup(nn.Module):
    """Reads its parameter without reading its input."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(torch.arange(x.shape[0]) % self.embedding.num_embeddings)


class _Transposed(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(size, width).t())
        self.second = nn.Parameter(torch.empty(width, size).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first @ self.second


class _Empty(_Vector):
    """A parameter without elements beside one with."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.rows = nn.Parameter(torch.empty(0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.rows.sum(0)


class _Unused(_Vector):
    """A parameter that is never used, and a buffer."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.idle = nn.Parameter(torch.empty(size, width))
        self.register_buffer("offset", torch.linspace(-1, 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.offset


class _LowRank(nn.Module):
    """A frozen weight whose value is read after the gradients of the others are known."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, size, bias=False), nn.Linear(size, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class _DetachedUse(nn.Module):
    """A weight that is read once more without gradient, by an operation whose backward comes last."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.detach()).sin() + F.linear(x, self.weight)


class _Linear(nn.Linear):
    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


LEAVES: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": _Linear,
    "mlp": _Mlp,
    "recomputed_mlp": _RecomputedMlp,
    "tied_mlp": _TiedMlp,
    "vector": _Vector,
    "one_element": _OneElement,
    "scalar": _Scalar,
    "cube": _Cube,
    "convolution": _Convolution,
    "norm": _Norm,
    "lookup": _Lookup,
    "transposed": _Transposed,
    "empty": _Empty,
    "unused": _Unused,
    "low_rank": _LowRank,
    "detached_use": _DetachedUse,
}
