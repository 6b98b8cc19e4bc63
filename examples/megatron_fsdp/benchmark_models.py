# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The trainings that the benchmark measures: a model, its layers, and one rank's random batches. Knows of no runtime.

A training is a module that maps its inputs to a loss, whatever it is inside; the sizes are in MODELS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from decoder import SHAPES, Decoder, Shape
from mlp import MLP
from torch import nn

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Training:
    """One model and its data.

    Attributes:
        model: fp32, the same on every rank; `model(*inputs)` is the loss.
        layers: the modules, all of one class, that runtimes shard or compile one by one.
        draw: one microbatch from a random generator of the model's device; floating-point inputs are bf16.
        tokens: tokens of a microbatch.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    draw: Callable[[torch.Generator], Inputs]
    tokens: int


@dataclass(frozen=True)
class Model:
    """How a training is built.

    Attributes:
        build: makes it on a device; with a number of tokens a sample instead of its own if `has_tokens`.
        has_tokens: whether the number of tokens can be chosen.
        needs: a package that it comes from, or None.
    """

    build: Callable[[torch.device, int | None], Training]
    has_tokens: bool = True
    needs: str | None = None


def build_decoder(shape: Shape, device: torch.device, tokens: int | None) -> Training:
    """Return a language model that learns random text."""
    shape = shape if tokens is None else replace(shape, sequence=tokens)
    with device:
        model = Decoder(shape)

    def draw(generator: torch.Generator) -> Inputs:
        size = (shape.batch, shape.sequence + 1)
        text = torch.randint(0, shape.vocab, size, device=device, generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Training(model, list(model.layers), draw, shape.batch * shape.sequence)


def build_mlp(layers: int, hidden: int, rows: int, device: torch.device, tokens: int | None) -> Training:
    """Return an MLP that learns random targets; its tokens are the rows of a batch."""
    rows = rows if tokens is None else tokens
    with device:
        model = MLP(layers, hidden)

    def draw(generator: torch.Generator) -> Inputs:
        x, target = torch.randn(2, rows, hidden, device=device, generator=generator, dtype=torch.bfloat16)
        return x, target

    return Training(model, list(model.layers), draw, rows)


MODELS: dict[str, Model] = {
    **{name: Model(partial(build_decoder, shape)) for name, shape in SHAPES.items()},
    "mlp32": Model(partial(build_mlp, 32, 1024, 1024)),  # 269M parameters, bound by the host
}
FOR_CPUS = ("tiny",)
"""Small enough for a CPU, too small to say anything about a GPU."""
