# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon over whole matrices in one process, in plain words, and a model whose gradients have one sum in any order.

[Note: sums without an order]
Ranks add their gradients up in an order that depends on their number, so that float sums of three or more differ in the
last bits. Here every rank rounds its gradients to multiples of ``ranks * 2**-12``: their average is a multiple of
2**-12, which float32 holds exactly below 4096, in whatever order it is summed. What differs then is the optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

GRADIENT_UNIT = 2.0**-12
STEPS = {
    "simple": [(3.4445, -4.7750, 2.0315)] * 5,
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}
"""Coefficients of five steps."""


class _Rounded(torch.autograd.Function):
    """Hands a weight on, and rounds its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, unit: float) -> torch.Tensor:
        ctx.unit = unit
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient / ctx.unit).round() * ctx.unit, None


def rounded(weight: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the weight; its gradient will be rounded, see [Note: sums without an order]."""
    return _Rounded.apply(weight, ranks * GRADIENT_UNIT)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A unit with matrices of several sizes, a bias, a norm, a stack of experts and a small convolution.

    Cut in two to four, `large` lies on several shards, `wide` and `stack` across borders, and `small` on one.
    """

    width = 12

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.small = nn.Parameter(torch.randn(3, 12) / 4)
        self.large = nn.Parameter(torch.randn(50, 12) / 4)
        self.bias = nn.Parameter(torch.randn(50) / 4)
        self.wide = nn.Parameter(torch.randn(12, 50) / 7)
        self.stack = nn.Parameter(torch.randn(3, 4, 12) / 4)
        self.kernel = nn.Conv1d(1, 2, 3, padding=1, bias=False)
        self.norm = nn.Parameter(torch.rand(12) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: rounded(p, self.ranks) for name, p in self.named_parameters()}
        hidden = torch.tanh(x @ weights["large"].mT + weights["bias"]) @ weights["wide"].mT
        few = torch.tanh(x @ weights["small"].mT)
        experts = torch.tanh(torch.einsum("bi,eoi->beo", x, weights["stack"])).flatten(1)
        taps = torch.nn.functional.conv1d(x.unsqueeze(1), weights["kernel.weight"], padding=1)
        out = hidden + experts + taps.mean(1) + few.repeat(1, 4)
        return x + out * weights["norm"]


class Net(nn.Module):
    """Two layers, one that no forward uses, and a head; the head's matrix is the root's."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.layers = nn.ModuleList([Layer(ranks) for _ in range(2)])
        self.head = nn.Parameter(torch.randn(5, 12) / 4)
        self.spare = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ rounded(self.head, self.ranks).mT


def build_net(ranks: int, dtype: torch.dtype = torch.float32) -> Net:
    """Return a model with initial weights that do not depend on the number of ranks."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Net(ranks)
    return model.to(torch.get_default_device(), dtype)


def loss_of_net(model: Callable[[torch.Tensor], torch.Tensor], step: int, rank: int, microbatch: int = 0) -> Any:
    """Return the loss over samples that only this rank sees, and only in this step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
    inputs, targets = torch.randn(6, 12, generator=generator), torch.randn(6, 5, generator=generator)
    dtype = next(model.parameters()).dtype  # type: ignore[attr-defined]
    return (model(inputs.to(dtype)) - targets.to(dtype)).float().square().sum()


def weight_of(*shape: int) -> nn.Parameter:
    """Return a parameter whose values depend on its shape alone."""
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))


def give_gradients(parameters: Iterable[torch.Tensor], seed: int) -> None:
    """Give parameters gradients that depend on their shapes and the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@dataclass(frozen=True)
class PlainMuon:
    """The settings of a loop over whole matrices; `Muon` says what they mean."""

    lr: float = 0.01
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    is_decoupled: bool = True
    momentum_dtype: torch.dtype = torch.float32
    travel_dtype: torch.dtype = torch.float32
    coefficients: str = "quintic"
    scale: str = "spectral"
    extra_scale: float = 1.0


def orthogonalised(matrix: torch.Tensor, coefficients: str = "quintic") -> torch.Tensor:
    """Return what five steps in bfloat16 make of one matrix, or a stack."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.float()
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).bfloat16()
    for a, b, c in STEPS[coefficients]:
        square = x.mT @ x if is_tall else x @ x.mT
        add = torch.addmm if x.ndim == 2 else torch.baddbmm
        polynomial = add(square, square, square, beta=b, alpha=c)
        x = add(x, x, polynomial, beta=a) if is_tall else add(x, polynomial, x, beta=a)
    return x


def _matrix_of(view: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns], or [count, rows, columns] of a stack, of either or of [count, groups, rows, columns]."""
    if view.ndim < 4:
        return view
    stack = view.flatten(1, 2)
    return stack if stack.shape[0] > 1 else stack[0]


Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def scale_of(matrix: torch.Tensor, how: str) -> float:
    """Return what the update of a matrix, or of each of a stack, is multiplied by."""
    rows, columns = matrix.shape[-2:]
    scales = {"spectral": max(rows, columns) ** 0.5, "shape_scaling": max(1.0, rows / columns) ** 0.5}
    return scales[how]


@torch.no_grad()
def step_plainly(
    parameters: Iterable[Any], momenta: dict[Any, torch.Tensor], muon: PlainMuon, split: dict[Any, Split]
) -> None:
    """Step whole parameters by their gradients.

    Args:
        parameters: those with a gradient are stepped.
        momenta: by parameter.
        muon: settings.
        split: for parameters that are no matrix or stack of matrices, what returns views of those that they hold;
            where rows of several interleave, as [count, groups, rows, columns].
    """
    rate = torch.tensor(muon.lr, dtype=torch.float32, device="cpu")
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = parameter.grad.float()
        if muon.weight_decay and not muon.is_decoupled:
            gradient = torch.add(gradient, parameter, alpha=muon.weight_decay)
        momentum = momenta.setdefault(parameter, torch.zeros_like(parameter, dtype=muon.momentum_dtype))
        momentum.copy_(momentum.float().lerp(gradient, 1 - muon.momentum))
        blended = gradient.lerp(momentum.float(), muon.momentum) if muon.nesterov else momentum.float()
        blended = blended.to(muon.travel_dtype)
        weight = parameter.float()
        if muon.weight_decay and muon.is_decoupled:
            weight = weight * (1 - rate * muon.weight_decay)
        views = split.get(parameter, lambda tensor: [tensor])
        for source, target in zip(views(blended), views(weight), strict=True):
            matrix = _matrix_of(source)
            update = orthogonalised(matrix, muon.coefficients).float().reshape(target.shape)
            target.addcmul_(update, rate * (scale_of(matrix, muon.scale) * muon.extra_scale), value=-1)
        parameter.copy_(weight)
