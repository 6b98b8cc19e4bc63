# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""In which precision the weights and gradients of a Megatron-Core chunk are kept and sent; it shards nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as _StockConfig,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    Fp8Recipe,
    MixedPrecisionPolicy,
    Mxfp8Recipe,
    Nvfp4Recipe,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_units import default_classes

QUANTIZED_GATHERS = {"fp8": Fp8Recipe, "mxfp8": Mxfp8Recipe, "nvfp4": Nvfp4Recipe}
"""Recipes by the names that `megatron_fsdp_quantized_gather` may have instead of one."""


def mixed_precision_policy(ddp_config: _StockConfig, module: nn.Module) -> MixedPrecisionPolicy:
    """Return the precision that the config means for this module."""
    main_grads = getattr(ddp_config, "megatron_fsdp_main_grads_dtype", None)
    if ddp_config.grad_reduce_in_fp32:
        if main_grads not in (None, torch.float32):
            raise ValueError(
                f"megatron_fsdp_main_grads_dtype: expected torch.float32 or None with grad_reduce_in_fp32, got "
                f"{main_grads}. Drop one of the two."
            )
        main_grads = torch.float32
    if main_grads is None:
        # Units share one policy, so that parameters kept in float32 among narrower ones lose nothing.
        dtypes = [parameter.dtype for parameter in module.parameters() if parameter.requires_grad]
        main_grads = reduce(torch.promote_types, dtypes) if dtypes else None
    policy = MixedPrecisionPolicy(
        main_params_dtype=getattr(ddp_config, "megatron_fsdp_main_params_dtype", torch.float32),
        main_grads_dtype=main_grads,
        grad_comm_dtype=getattr(ddp_config, "megatron_fsdp_grad_comm_dtype", None),
        keep_fp8_transpose_cache=ddp_config.keep_fp8_transpose_cache,
        **_recipe(ddp_config),
    )
    sent = policy.grad_comm_dtype
    if main_grads is not None and sent is not None and torch.promote_types(sent, main_grads) != main_grads:
        raise ValueError(
            f"megatron_fsdp_grad_comm_dtype: expected no wider than {main_grads}, in which gradients accumulate, got "
            f"{sent}. Set --megatron-fsdp-main-grads-dtype as wide, or send less."
        )
    return policy


def _recipe(ddp_config: _StockConfig) -> dict[str, Any]:
    """Return the policy's field for low-bit weights, if the config names a format or has a recipe."""
    asked = getattr(ddp_config, "megatron_fsdp_quantized_gather", None)
    if asked is None:
        return {}
    recipe = QUANTIZED_GATHERS[asked]() if isinstance(asked, str) and asked in QUANTIZED_GATHERS else asked
    if not isinstance(recipe, tuple(QUANTIZED_GATHERS.values())):
        raise ValueError(
            f"megatron_fsdp_quantized_gather: expected one of {tuple(QUANTIZED_GATHERS)} or a recipe, got {asked!r}. "
            "Set --quantized-gather to one of them."
        )
    return {recipe.name: recipe}


class LowBitUnits:
    """Which units of a chunk have low-bit weights.

    Args:
        module: the chunk, before any of it is sharded.
        config: its `first_last_layers_bf16` and the numbers of layers beside it.
    """

    def __init__(self, module: nn.Module, config: TransformerConfig) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._kept = set(_parameters_of_edges(module, config))
        self._seen: set[int] = set()
        self.num_quantized = 0

    def options_of(self, run: Sequence[nn.Module], options: dict[str, Any]) -> dict[str, Any]:
        """Return what `fully_shard` is told of a unit: without a recipe where all its weights stay as they are.

        Args:
            run: the unit's modules; inner units come before outer ones.
            options: of units like it.

        Raises:
            ValueError: a unit of layers that are quantized and of layers that are not.
        """
        policy = options["mixed_precision_policy"]
        parameters = {id(p): p for member in run for p in member.parameters() if id(p) not in self._seen}
        self._seen |= parameters.keys()
        if policy.recipe is None:
            return options
        matrices = {key for key, p in parameters.items() if p.ndim > 1 and not policy.recipe.keeps(self._names[key])}
        if matrices & self._kept and matrices - self._kept:
            kept = min(self._names[key] for key in matrices & self._kept)
            others = min(self._names[key] for key in matrices - self._kept)
            raise ValueError(
                "first_last_layers_bf16: expected units of layers that are quantized or of layers that are not, got "
                f"both in one unit: {kept} is kept and {others} is not. Drop --megatron-fsdp-min-unit-numel and "
                "disable_bucketing."
            )
        if matrices - self._kept:
            self.num_quantized += 1
            return options
        return options | {"mixed_precision_policy": replace(policy, fp8=None, mxfp8=None, nvfp4=None)}

    def check(self, options: dict[str, Any], num_stages: int) -> None:
        """Refuse a recipe that no unit follows; a chunk of several stages may have kept layers only.

        Raises:
            ValueError: it is so.
        """
        recipe = options["mixed_precision_policy"].recipe
        if recipe is not None and not self.num_quantized and num_stages == 1:
            raise ValueError(
                f"megatron_fsdp_quantized_gather {recipe.name}: expected layers with matrices that are quantized, got "
                "none: all are kept. Drop --quantized-gather, or lower --num-layers-at-start-in-bf16."
            )


def _parameters_of_edges(module: nn.Module, config: TransformerConfig) -> Iterator[int]:
    """Yield the ids of the parameters of the first and last layers, if these are kept; MTP's have other numbers."""
    if not getattr(config, "first_last_layers_bf16", False):
        return
    end = config.num_layers - config.num_layers_at_end_in_bf16
    for name, child in module.named_modules():
        is_layer = isinstance(child, default_classes()) and getattr(child, "layer_number", None) is not None
        if is_layer and "mtp" not in name.split("."):
            number: Any = child.layer_number
            if not config.num_layers_at_start_in_bf16 < number <= end:
                yield from map(id, child.parameters())
