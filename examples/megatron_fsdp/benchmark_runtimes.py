# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""How each runtime that `benchmark.py` compares is set up: one recipe each. Measures nothing.

A recipe gets the fp32 model, the same on every rank. All compute in bf16; those that train keep fp32 weights (only
`plain_adamw` has bf16 ones) and step AdamW; those that shard (ZeRO-3) have one unit per layer and one for the rest,
and send gradients in bf16. Between microbatches they accumulate as each of them does it best.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from benchmark_floor import capture_floor
from benchmark_models import Inputs, Training
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Iteration = Callable[..., torch.Tensor]
"""Forward, backward, optimizer step and zeroing: maps the inputs of all microbatches to the loss."""


class Capture(Protocol):
    """Makes an iteration into what runs instead of it: captured in the call after the first `warmup` ones."""

    def __call__(self, iteration: Iteration, example_inputs: Inputs, *, warmup: int) -> Iteration: ...


LEARNING_RATE = 2**-13
"""About 1e-4, and the same in fp32, in which a graph reads it."""


def _no_context(is_last: bool) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True)
class Setup:
    """What a training loop needs of a runtime.

    Attributes:
        model: is called with the inputs of a microbatch.
        optimizer: None to train nothing.
        forward_context: is entered around each forward.
        microbatch: is entered around forward and backward of each microbatch, if there are several in a step.
        capture: for a runtime that does not run the loop's iteration step by step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    microbatch: Callable[[bool], AbstractContextManager[object]] = _no_context
    capture: Capture | None = None


def adamw(parameters: Iterable[nn.Parameter], *, capturable: bool = False) -> torch.optim.AdamW:
    """Return the optimizer that all runtimes share."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True, capturable=capturable)


def compile_layers(training: Training) -> None:
    """Compile each layer's forward; hooks of a runtime stay outside of the compiled code."""
    for layer in training.layers:
        layer.forward = torch.compile(layer.forward)


def plain(training: Training, mesh: DeviceMesh) -> Setup:
    """No communication and no optimizer: what the bare module costs."""
    return Setup(training.model.bfloat16())


def plain_adamw(training: Training, mesh: DeviceMesh) -> Setup:
    """No communication: every rank steps AdamW over its own bf16 weights, which are plain tensors."""
    model = training.model.bfloat16()
    return Setup(model, adamw(model.parameters()))


def floor(training: Training, mesh: DeviceMesh) -> Setup:
    """What no runtime can beat: the bare module in one CUDA graph, then AdamW over one rank's part of fp32 weights."""
    numel = sum(parameter.numel() for parameter in training.model.parameters())
    weight = nn.Parameter(torch.zeros(numel // mesh.size(), device=mesh.device_type))
    weight.grad = torch.zeros_like(weight)
    return Setup(training.model.bfloat16(), capture=partial(capture_floor, adamw([weight])))


def ddp(training: Training, mesh: DeviceMesh) -> Setup:
    """PyTorch's DistributedDataParallel: fp32 weights, gradients and reductions, bf16 compute by autocast."""
    wrapped = nn.parallel.DistributedDataParallel(
        training.model, gradient_as_bucket_view=True, find_unused_parameters=training.has_unused
    )
    return Setup(
        wrapped,
        adamw(wrapped.parameters()),
        forward_context=partial(torch.autocast, mesh.device_type, torch.bfloat16),
        microbatch=lambda is_last: nullcontext() if is_last else wrapped.no_sync(),
    )


def fsdp1(training: Training, mesh: DeviceMesh) -> Setup:
    """PyTorch's FullyShardedDataParallel: fp32 shards, bf16 compute and reductions."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        training.model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({type(training.layers[0])}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        device_id=torch.cuda.current_device() if mesh.device_type == "cuda" else None,
        use_orig_params=True,
    )
    return Setup(
        wrapped,
        adamw(wrapped.parameters()),
        microbatch=lambda is_last: nullcontext() if is_last else wrapped.no_sync(),
    )


def fsdp2(training: Training, mesh: DeviceMesh, *, is_compiled: bool = False) -> Setup:
    """PyTorch's fully_shard: fp32 shards, bf16 compute and reductions."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = training.model
    if is_compiled:
        compile_layers(training)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in training.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextmanager
    def microbatch(is_last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(is_last)
        yield

    return Setup(model, adamw(model.parameters()), microbatch=microbatch)


def megatron_fsdp(training: Training, mesh: DeviceMesh) -> Setup:
    """Megatron-FSDP v1 as PyPI has it: ZeRO-3, fp32 main weights and gradients, bf16 compute and reductions.

    It overlaps communication by default, makes its own mesh over all ranks, and needs CUDA.
    """
    # It prefers the configuration class of an installed megatron-core, whose fields are those of another release:
    # 0.6.1 fails on megatron-core 0.16.1's. Without megatron-core, which nothing here needs, it uses its own.
    sys.modules["megatron.core"] = None  # type: ignore[assignment]
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16
    )
    wrapped = fully_shard_model(
        training.model.bfloat16(),
        fsdp_unit_modules=[type(training.layers[0])],
        zero_dp_strategy="optim_grads_params",
        mixed_precision_policy=policy,
    )

    @contextmanager
    def microbatch(is_last: bool) -> Iterator[None]:
        wrapped.set_model_auto_sync(is_last)
        yield

    return Setup(wrapped, fully_shard_optimizer(adamw(wrapped.parameters())), microbatch=microbatch)


def fsdp_v2(
    training: Training,
    mesh: DeviceMesh,
    *,
    strategy: str = "optim_grads_params",
    outer: str | None = None,
    is_compiled: bool = False,
    is_capturable: bool = False,
    layers_per_unit: int = 1,
    has_unit_graphs: bool = False,
    gather: str | None = None,
    **context_options: bool,
) -> Setup:
    """Megatron-FSDP v2, this repository: fp32 main weights and gradients, bf16 compute and reductions.

    With an outer strategy all ranks lie along the outer of two axes; with unit graphs each layer has graphs of its own;
    `gather` names the low-bit format in which weights rest and travel.
    """
    from megatron.core.distributed.fsdp.experimental import (
        MixedPrecisionPolicy,
        Placements,
        fully_shard,
        fully_shard_context,
        fully_shard_optimizer,
        microbatch,
    )

    formats = {} if gather is None else {gather: True}
    policy = MixedPrecisionPolicy(torch.float32, grad_comm_dtype=torch.bfloat16, **formats)
    placements = Placements.from_strategy(strategy, outer=outer)
    if outer is not None:
        mesh = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("outer", "inner"))
    if is_compiled:
        compile_layers(training)
    model = training.model.bfloat16()
    with fully_shard_context(**context_options) as context:
        layers = list(training.layers)
        for start in range(0, len(layers), layers_per_unit):
            unit = layers[start : start + layers_per_unit]
            fully_shard(unit, mesh, placements, mixed_precision_policy=policy, cuda_graph=has_unit_graphs)
        fully_shard(model, mesh, placements, mixed_precision_policy=policy)
    optimizer = fully_shard_optimizer(adamw(model.parameters(), capturable=is_capturable))
    return Setup(model, optimizer, microbatch=partial(microbatch, context))


def fsdp_v2_graph(
    training: Training,
    mesh: DeviceMesh,
    *,
    is_compiled: bool = False,
    layers_per_unit: int = 1,
    gather: str | None = None,
) -> Setup:
    """FSDP v2 with the whole iteration, optimizer step included, in one CUDA graph."""
    from megatron.core.distributed.fsdp.experimental import capture_iteration

    options: dict[str, Any] = {"layers_per_unit": layers_per_unit, "gather": gather}
    setup = fsdp_v2(training, mesh, is_compiled=is_compiled, is_capturable=True, **options)
    return replace(setup, capture=partial(capture_iteration, setup.model, setup.optimizer))


Recipe = Callable[[Training, DeviceMesh], Setup]

RUNTIMES: dict[str, Recipe] = {
    "plain": plain,
    "plain_adamw": plain_adamw,
    "floor": floor,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdp2_compile": partial(fsdp2, is_compiled=True),
    "megatron_fsdp": megatron_fsdp,
    "fsdp_v2": fsdp_v2,
    "fsdp_v2_joint": partial(fsdp_v2, layers_per_unit=4),
    "fsdp_v2_joint_graph": partial(fsdp_v2_graph, layers_per_unit=4),
    "fsdp_v2_pool": partial(fsdp_v2, trace_pool=True),
    "fsdp_v2_unit_graph": partial(fsdp_v2, trace_pool=True, has_unit_graphs=True),
    "fsdp_v2_compile": partial(fsdp_v2, is_compiled=True),
    "fsdp_v2_compile_unit_graph": partial(fsdp_v2, is_compiled=True, trace_pool=True, has_unit_graphs=True),
    "fsdp_v2_graph": fsdp_v2_graph,
    "fsdp_v2_compile_graph": partial(fsdp_v2_graph, is_compiled=True),
}
VARIANTS: dict[str, Recipe] = {
    "fsdp_v2_no_shard": partial(fsdp_v2, strategy="no_shard"),
    "fsdp_v2_optim": partial(fsdp_v2, strategy="optim"),
    "fsdp_v2_optim_grads": partial(fsdp_v2, strategy="optim_grads"),
    "fsdp_v2_hsdp": partial(fsdp_v2, outer="no_shard"),
    "fsdp_v2_hfsdp": partial(fsdp_v2, outer="optim"),
    **{f"fsdp_v2_{name}": partial(fsdp_v2, gather=name) for name in ("fp8", "mxfp8", "nvfp4")},
    **{f"fsdp_v2_{name}_graph": partial(fsdp_v2_graph, gather=name) for name in ("fp8", "mxfp8", "nvfp4")},
}
"""Other settings of this repository, which are measured when they are asked for."""
NEEDS_CUDA = (
    "floor",
    "fsdp1",
    "fsdp_v2_graph",
    "fsdp_v2_compile_graph",
    "fsdp_v2_joint_graph",
    "fsdp_v2_unit_graph",
    "fsdp_v2_compile_unit_graph",
    *(f"fsdp_v2_{name}_graph" for name in ("fp8", "mxfp8", "nvfp4")),
)
SLOW_ON_CPUS = ("fsdp2_compile", "fsdp_v2_compile")
"""Compiling takes longer there than all else, so that they are measured when they are asked for."""
NEEDS_PACKAGE = {"megatron_fsdp": "megatron_fsdp"}
"""The packages that runtimes need and a machine may lack."""
