# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights of experts under --use-cpu-initialization: of each its own, on whichever rank it lies.

megatron-core draws a rank's experts one after another from the generator that all ranks have in common. Ranks of expert
parallelism then start with copies of the same few experts, and what is drawn after them depends on how many each has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig


@contextmanager
def drawn_by_number(config: TransformerConfig) -> Iterator[None]:
    """While models are built inside, let each expert's weights depend on the seed, its layer and its number there.

    Nothing changes without --use-cpu-initialization, since each rank then has a generator for experts of its own.

    Args:
        config: Of the model.
    """
    if not (config.use_cpu_initialization and config.num_moe_experts):
        yield
        return
    build = SequentialMLP.__init__

    @functools.wraps(build)
    def build_and_draw(self: Any, num_local_experts: int, *args: Any, **keywords: Any) -> None:
        # One number from the common generator, however many experts this rank has.
        seed = int(torch.randint(2**62, ()))
        after = torch.get_rng_state()
        try:
            build(self, num_local_experts, *args, **keywords)
            _draw(self, seed + self.ep_group.rank() * num_local_experts)
        finally:
            torch.set_rng_state(after)

    SequentialMLP.__init__ = build_and_draw
    try:
        yield
    finally:
        SequentialMLP.__init__ = build


@torch.no_grad()
def _draw(experts: Any, seed: int) -> None:
    """Draw the weights of a layer's local experts, in float32 as megatron-core does; biases are zero."""
    config = experts.config
    for index, expert in enumerate(experts.local_experts):
        # Generators of GPUs, which dropout draws from, stay as they are.
        torch.default_generator.manual_seed(seed + index)
        for linear, draw in (
            (expert.linear_fc1, config.init_method),
            (expert.linear_fc2, config.output_layer_init_method),
        ):
            linear.weight.copy_(_drawn_piece(linear.weight, draw, experts.tp_group))


def _drawn_piece(weight: Any, draw: Callable[[torch.Tensor], Any], group: Any) -> torch.Tensor:
    """Draw a whole weight and return the piece of it that this rank holds, if ranks share the expert."""
    size, dim, shape = group.size(), weight.partition_dim, list(weight.shape)
    shape[dim] *= size
    whole = torch.empty(shape, dtype=torch.float32)
    draw(whole)
    blocks = whole.unflatten(dim, (weight.partition_stride, size, -1))
    return blocks.select(dim + 1, group.rank()).flatten(dim, dim + 1)
