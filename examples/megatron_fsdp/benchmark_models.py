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
from qwen_image import CHANNELS, TEXT_WIDTH, QwenImage
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
        has_unused: whether some parameters get no gradient.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    draw: Callable[[torch.Generator], Inputs]
    tokens: int
    has_unused: bool = False


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


def build_dit(
    blocks: int, heads: int, side: int, text: int, batch: int, device: torch.device, tokens: int | None
) -> Training:
    """Return QwenImage's transformer that learns random noise; `side` is the square image's, in patches.

    The last block's text goes nowhere, so that its weights get no gradient.
    """
    assert tokens is None, "its tokens are those of a square image and a text"
    with device:
        model = QwenImage(blocks, heads)

    def draw(generator: torch.Generator) -> Inputs:
        image, target = (batch, side**2, CHANNELS), (batch, side**2, CHANNELS)
        shapes = (image, (batch, text, TEXT_WIDTH), (batch,), target)
        return tuple(torch.rand(*size, device=device, generator=generator, dtype=torch.bfloat16) for size in shapes)

    layers = list(model.transformer.transformer_blocks)
    return Training(model, layers, draw, batch * (side**2 + text), has_unused=True)


MODELS: dict[str, Model] = {
    **{name: Model(partial(build_decoder, shape)) for name, shape in SHAPES.items()},
    "mlp32": Model(partial(build_mlp, 32, 1024, 1024)),  # 269M parameters, bound by the host
    # 12 of 60 blocks at 512 px: 4.1B parameters, 1024 patches and 128 tokens of text in each of 4 samples.
    "dit": Model(partial(build_dit, 12, 24, 32, 128, 4), has_tokens=False, needs="diffusers"),
    "dit_tiny": Model(partial(build_dit, 2, 2, 4, 8, 2), has_tokens=False, needs="diffusers"),
}
FOR_CPUS = ("tiny", "dit_tiny")
"""Small enough for a CPU, too small to say anything about a GPU."""
