# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Low-bit weights in CUDA graphs give the bits of eager ones, and a GPU's those of the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    Fp8Recipe,
    MixedPrecisionPolicy,
    Mxfp8Recipe,
    Nvfp4Recipe,
    fully_shard,
    fully_shard_context,
)
from tests.gpu import graphs, unit_graphs
from tests.gpu.checks import IS_DRY, Check
from tests.unit_tests.launch import DEVICE

RECIPES: dict[str, dict[str, Any]] = {
    "fp8": {"fp8": True},
    "fp8_row": {"fp8": Fp8Recipe(scaling="row")},
    "fp8_block": {"fp8": Fp8Recipe(scaling="block")},
    "mxfp8": {"mxfp8": True},
    "nvfp4": {"nvfp4": True},
    "nvfp4_stochastic": {"nvfp4": Nvfp4Recipe(rounding="stochastic", seed=5)},
}
SHAPES = ((24, 40), (33, 7)) if IS_DRY else ((1024, 4096), (333, 77), (130, 257))


def has_the_bits_of_the_host(recipe: dict[str, Any]) -> str:
    """Compute weights are the same as the host makes them from the same main weights, by the same units."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        originals = [torch.randn(shape) * torch.logspace(-6, 6, shape[0])[:, None] for shape in SHAPES]
    policy = MixedPrecisionPolicy(**recipe)
    form: Any = policy.recipe
    model = nn.Module()
    for index, original in enumerate(originals):
        model.register_parameter(f"weight{index}", nn.Parameter(original.to(DEVICE)))
    model.to(torch.bfloat16)
    with torch.device("cpu"):
        expected = [_whole(form.format, parameter.detach().cpu()) for parameter in model.parameters()]
    with fully_shard_context():
        unit = fully_shard(model, mixed_precision_policy=policy)
    unit.unshard()
    for index, wanted in enumerate(expected):
        found = getattr(unit, f"weight{index}").detach().cpu()
        assert torch.equal(found, wanted), f"{int((found != wanted).sum())} elements of {SHAPES[index]} differ"
    unit.reshard()
    return f"{sum(wanted.numel() for wanted in expected)} elements equal"


def _whole(form: Any, weight: torch.Tensor) -> torch.Tensor:
    flat = weight.float().view(-1)
    payload = torch.zeros(-(-flat.numel() // form.elements_per_byte), dtype=torch.uint8)
    scales = torch.zeros(form.geometry(weight.shape).num_scales * form.scale_bytes, dtype=torch.uint8)
    amax = flat.abs().max() if form.needs_amax else None
    form.quantize(flat, weight.shape, payload, scales, amax=amax)
    out = torch.empty(flat.numel(), dtype=weight.dtype)
    form.dequantize(payload, scales, weight.shape, out, amax=amax)
    return out.view(weight.shape)


CHECKS = [
    *(Check(f"{name}_has_the_bits_of_the_host", has_the_bits_of_the_host, (each,)) for name, each in RECIPES.items()),
    *(
        Check(f"{name}_in_a_whole_graph", graphs.equals_eager, ("optim_grads_params", None, 2, each))
        for name, each in RECIPES.items()
    ),
    Check("fp8_of_zero1_in_a_whole_graph", graphs.equals_eager, ("optim", None, 2, {"fp8": True})),
    Check("mxfp8_of_hfsdp_in_a_whole_graph", graphs.equals_eager, ("optim_grads_params", "optim", 1, {"mxfp8": True})),
    *(
        Check(f"{name}_in_graphs_of_units", unit_graphs.equals_eager, ("optim_grads_params", None, 2, False, each))
        for name, each in RECIPES.items()
    ),
    Check(
        "mxfp8_by_the_smallest_power",
        has_the_bits_of_the_host,
        ({"mxfp8": Mxfp8Recipe(scale_rounding="ceil")},),
    ),
]
