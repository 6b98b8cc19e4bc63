# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``torch_dist`` checkpoints written by megatron-core itself: in workers, with its own models and optimizers."""

from __future__ import annotations

import argparse
import multiprocessing
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module

from megatron.core import dist_checkpointing
from megatron.core import optimizer as mcore_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from tests.unit_tests import mcore
from tests.unit_tests.launch import run_ranks

SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
STEP = 3
SLOTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Source:
    """How a checkpoint is made.

    Attributes:
        ranks: that save it.
        distributed: the distributed optimizer, not the plain one.
        swiglu: gated layers without biases.
        tied: one matrix for embedding and head.
        dtype: of the model; main weights are float32.
        content: megatron-core's choices of layout.
        layers: of the model.
    """

    ranks: int = 1
    distributed: bool = False
    swiglu: bool = False
    tied: bool = False
    dtype: torch.dtype = torch.bfloat16
    content: tuple[tuple[str, Any], ...] = ()
    layers: int = 2

    @property
    def is_mixed(self) -> bool:
        """Whether main weights differ from the model's."""
        return self.dtype != torch.float32

    @property
    def metadata(self) -> dict[str, Any]:
        """What megatron-core is told, and keeps, of the layout."""
        kind = {"distrib_optim_sharding_type": "fully_reshardable"} if self.distributed else {}
        return {"chained_optim_avoid_prefix": True, **kind, **dict(self.content)}

    def model(self) -> Any:
        """Return the model; inside `mcore.cpu_shim` only."""
        gated = SWIGLU if self.swiglu else {}
        bf16 = {"bf16": True} if self.is_mixed else {}
        model = mcore.build_gpt(tied=self.tied, dtype=self.dtype, num_layers=self.layers, **gated, **bf16)
        for parameter in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        return model

    def optimizer_options(self) -> dict[str, Any]:
        """Return options of `mcore.optimizer_config`."""
        return {"bf16": True, "params_dtype": torch.bfloat16} if self.is_mixed else {}


Truth = dict[str, dict[str, torch.Tensor]]
"""By slot ("weight", "model", "exp_avg", "exp_avg_sq") and parameter name: full tensors."""


def make_source(path: Path, source: Source) -> Truth:
    """Save a checkpoint and return what was in it."""
    parts = run_ranks(source.ranks, _save, str(path), source)
    truth: Truth = {slot: {} for slot in ("weight", "model", *SLOTS)}
    for slot, name, shape, begin, part in (entry for rank in parts for entry in rank):
        whole = truth[slot].setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
        whole.view(-1)[begin : begin + part.numel()] = part.view(-1)
    return truth


def build(source: Source) -> tuple[Any, Any, Any]:
    """Return megatron-core's model, wrapper and optimizer; inside `mcore.cpu_shim` only."""
    model = source.model()
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=source.distributed)
    chunk = DistributedDataParallel(
        model.config, config, Float16Module(model.config, model) if source.is_mixed else model
    )
    options = {"use_distributed_optimizer": source.distributed, **source.optimizer_options()}
    # megatron-core's own, whatever this project puts in its place
    optimizer = mcore_optimizer.get_megatron_optimizer(mcore.optimizer_config(**options), [chunk])
    return model, chunk, optimizer


def train(model: Any, chunk: Any, optimizer: Any, steps: int) -> None:
    """Step an optimizer by random gradients, the same on all ranks, as after a reduction."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        chunk.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()


def _save(path: str, source: Source) -> list[tuple[str, str, torch.Size, int, torch.Tensor]]:
    mcore.start()
    with mcore.cpu_shim(), saving_on_cpu():
        model, chunk, optimizer = build(source)
        train(model, chunk, optimizer, STEP)
        sharded = model.sharded_state_dict(metadata=source.metadata)
        state = {
            "model": sharded,
            "optimizer": optimizer.sharded_state_dict(sharded, metadata=source.metadata),
            "iteration": 40,
            "checkpoint_version": 3.0,
            "num_floating_point_operations_so_far": 7,
            "args": arguments(source),
            "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 320},
        }
        if dist.get_rank() == 0:
            Path(path).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state, path, content_metadata=source.metadata)
    return list(contents(model, optimizer))


def arguments(source: Source) -> argparse.Namespace:
    """Return what Megatron's training would have kept of its arguments."""
    return argparse.Namespace(
        swiglu=source.swiglu, transformer_impl="local", num_layers=source.layers, bf16=source.is_mixed, fp16=False
    )


def contents(model: Any, optimizer: Any) -> Iterator[tuple[str, str, torch.Size, int, torch.Tensor]]:
    """Yield what this rank's megatron-core optimizer holds: slot, name, full shape, first element, elements."""
    (inner,) = optimizer.chained_optimizers
    for name, parameter in model.named_parameters():
        main = getattr(parameter, "main_param", None)
        begin = 0
        if hasattr(inner, "_get_model_param_range_map"):
            try:
                begin = inner._get_model_param_range_map(parameter)["param"].start
            except KeyError:
                main = None  # all of it is another rank's
        elif main is None:
            main = parameter
        yield "model", name, parameter.shape, 0, parameter.detach().clone()
        if main is not None:
            yield "weight", name, parameter.shape, begin, main.detach().clone()
            for slot in SLOTS:
                yield slot, name, parameter.shape, begin, inner.optimizer.state[main][slot].clone()


@contextmanager
def saving_on_cpu() -> Iterator[None]:
    """Let megatron-core save from a worker: it wants psutil, a manager process, and to have children."""
    process: Mapping[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = filesystem_async._results_queue, filesystem_async._process_memory, process["daemon"]
    filesystem_async._results_queue = queue.Queue()
    filesystem_async._process_memory = lambda: 0
    process["daemon"] = False  # type: ignore[index]
    try:
        yield
    finally:
        filesystem_async._results_queue, filesystem_async._process_memory, daemon = before
        process["daemon"] = daemon  # type: ignore[index]
