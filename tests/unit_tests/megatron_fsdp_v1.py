# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP v1, as megatron-core ships it, trained, saved and loaded on CPU ranks; no test of it is here.

Everything that decides about a checkpoint is v1's own code. What stands in for something else:

- v1 asks for "cuda" by name: `v1_on_cpu` answers with the CPU.
- gloo has no PREMUL_SUM: gradients are averaged in the collective.
- TransformerEngine's FusedAdam, which v1 has on GPUs, holds state for every parameter. torch's AdamW, used here, holds
  none without a gradient, and v1 gives none to a parameter of which a rank has no elements; v1's collectives, one
  for each tensor of the state, then differ between ranks. `_with_every_gradient` gives such parameters empty gradients.
- megatron-core has no training loop: `save` and `load` call v1's functions in the order in which Megatron-LM's does.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from megatron.core.optimizer import get_megatron_optimizer
from tests.unit_tests.mcore import build_gpt, gpt_losses, optimizer_config, tokens

_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
_V1 = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_SHARDING = {"distrib_optim_sharding_type": "fsdp_dtensor"}


@dataclass(frozen=True)
class Box:
    """What a rank holds of a tensor: `values` from `offsets` on, of the whole `shape`."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor


class _Mesh:
    """`DeviceMesh` as v1's adapter sees it: of process groups on the CPU."""

    @staticmethod
    def from_group(*args: Any, device_type: str, **options: Any) -> DeviceMesh:
        assert device_type == "cuda"
        return DeviceMesh.from_group(*args, device_type="cpu", **options)


class _Torch(types.ModuleType):
    """The name `torch` as v1's modules see it: every device is the CPU."""

    @staticmethod
    def device(*_: Any) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def v1_on_cpu() -> Iterator[None]:
    """Let v1 run on the CPU; inside `cpu_shim` only."""
    adapter = importlib.import_module(_ADAPTER)
    modules = [
        adapter,
        *(importlib.import_module(f"{_V1}.{name}") for name in ("megatron_fsdp", "param_and_grad_buffer")),
    ]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(adapter, "DeviceMesh", _Mesh))
        for module in modules:
            stack.enter_context(mock.patch.object(module, "torch", _Torch("torch")))
        yield


def build_model(*, narrow: bool = True, **changes: Any) -> Any:
    """Return a GPT as Megatron-LM hands it to v1: one in bf16 has a wrapper of its own."""
    model = build_gpt(dtype=torch.bfloat16 if narrow else torch.float32, **changes)
    model.config.bf16 = narrow
    return Float16Module(model.config, model) if narrow else model


def build(*, trains: bool, **changes: Any) -> tuple[Any, Any]:
    """Return a chunk under v1 and its optimizer after one step, or with zeros for weights."""
    model = build_model(**changes)
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=True,
        average_in_collective=True,
    )
    chunk = importlib.import_module(_ADAPTER).FullyShardedDataParallel(model.config, config, model)
    optimizer = get_megatron_optimizer(
        optimizer_config(use_distributed_optimizer=True, bf16=model.config.bf16), [chunk]
    )
    if trains:
        chunk.zero_grad_buffer()
        text, labels, _ = tokens(0, 0, dist.get_rank())
        gpt_losses(chunk, text, labels).float().mean().backward()
        chunk.finish_grad_sync()
        _with_every_gradient(optimizer)
        optimizer.step()
    else:
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.zero_()
        _with_every_gradient(optimizer)
        optimizer.optimizer.step()
    return chunk, optimizer


def _with_every_gradient(optimizer: Any) -> None:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def save(chunk: Any, optimizer: Any, folder: str) -> dict[str, Any]:
    """Write a checkpoint; returns what was saved."""
    raw = _raw(chunk, optimizer, is_loading=False)
    state = _preprocessed(chunk, raw)
    dcp.save(state, checkpoint_id=folder)
    return state


def load(chunk: Any, optimizer: Any, folder: str) -> None:
    """Read a checkpoint, strictly."""
    raw = _raw(chunk, optimizer, is_loading=True)
    dcp.load(_preprocessed(chunk, raw), checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=False))
    chunk.load_state_dict(raw["model"])
    optimizer.load_state_dict(raw["optimizer"])


def contents(chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Return a rank's boxes of weights and state, and the settings, by the keys of a checkpoint."""
    return local(_preprocessed(chunk, _raw(chunk, optimizer, is_loading=False)))


def _raw(chunk: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    model = chunk.module.state_dict_for_save_checkpoint()  # first: it puts the sharded parameters into the modules
    return {"model": model, "optimizer": optimizer.sharded_state_dict({}, is_loading=is_loading, metadata=_SHARDING)}


def _preprocessed(chunk: Any, raw: dict[str, Any]) -> dict[str, Any]:
    checkpoint = importlib.import_module("megatron.core.transformer.fsdp_dtensor_checkpoint")
    uneven = importlib.import_module(f"{_V1}.uneven_dtensor")
    model, optimizer = raw["model"].copy(), raw["optimizer"].copy()
    checkpoint.handle_fp8_extra_state_case(model)
    if chunk.config.gated_linear_unit:
        model, optimizer = checkpoint.handle_swiglu_in_state_dict(chunk.module, model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    uneven.preprocess_state_dict_for_uneven_dtensor(state)
    return state


def local(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested state dict as one of `Box`es and values, by key."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            found |= local(value, f"{key}.")
        elif isinstance(value, DTensor):
            (chunk,) = value.__create_chunk_list__()
            found[key] = Box(tuple(value.shape), tuple(chunk.offsets), value.to_local().detach().clone())
        else:
            found[key] = value
    return found
