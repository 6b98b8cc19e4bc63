# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Chunks with experts that ranks share, in test workers: how they are built, run, saved and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.experimental.checkpoint import OpenCheckpoint, Ranks, write_checkpoint
from megatron.core.distributed.fsdp.mcore_fsdp_v2_finalize import finalize_model_grads
from tests.unit_tests.mcore import build_gpt, build_optimizer, gpt_losses, my_rank, start, tokens, wrap

EXPERTS = 4
WITH_EXPERTS: dict[str, Any] = {
    "num_moe_experts": EXPERTS,
    "moe_ffn_hidden_size": 10,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}


def build_with_experts(expert_parallel_size: int, **changes: Any) -> Any:
    """Return a GPT with experts that so many ranks share; inside `cpu_shim` only."""
    # megatron-core 0.16 cannot add biases of experts unless ranks share the experts.
    has_biases = expert_parallel_size > 1
    changes = {"expert_model_parallel_size": expert_parallel_size, "add_bias_linear": has_biases, **changes}
    return build_gpt(**WITH_EXPERTS, **changes)


def accumulate(model: Any, chunk: Any, microbatches: int, step: int = 0) -> None:
    """Run forwards and backwards of a step; all but the last one inside the chunk's `no_sync`."""
    for index in range(microbatches):
        text, labels, mask = tokens(step, index, my_rank())
        loss = (gpt_losses(model, text, labels) * mask).sum() / mask.sum()
        if chunk is None or index == microbatches - 1:
            loss.backward()
        else:
            with chunk.no_sync():
                loss.backward()


def whole_values(chunk: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return whole main weights and moments that this rank holds parts of, by a checkpoint's keys."""
    found = {f"model.{key}": tensor for key, tensor in names.model_keys(chunk).items()}
    for name, values in names.optimizer_keys(optimizer, chunk)["state"].items():
        found |= {f"{name}.{key}": value for key, value in values.items()}
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in found.items()}


def save_chunk(folder: str, expert_parallel_size: int, **options: Any) -> dict[str, torch.Tensor]:
    """Write what a chunk of the layout is after a step, and return it."""
    start(expert_parallel_size=expert_parallel_size)
    chunk = wrap(build_with_experts(expert_parallel_size, add_bias_linear=False), **options)
    optimizer = build_optimizer(chunk)
    accumulate(chunk, chunk, 1)
    finalize_model_grads([chunk])
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": names.model_keys(chunk), "optimizer": names.optimizer_keys(optimizer, chunk)}
    write_checkpoint(state, Path(folder), Ranks(torch.device("cpu")))
    return whole_values(chunk, optimizer)


def read_chunk(folder: str, expert_parallel_size: int, **options: Any) -> dict[str, torch.Tensor]:
    """Return what a chunk of the layout is that has read what was written."""
    start(expert_parallel_size=expert_parallel_size)
    chunk = wrap(build_with_experts(expert_parallel_size, add_bias_linear=False), **options)
    optimizer = build_optimizer(chunk)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.zero_()
    opened = OpenCheckpoint(Path(folder), Ranks(torch.device("cpu")))
    tensors = names.find_model(chunk, opened.keys) | names.find_optimizer(optimizer, chunk, opened.keys)
    assert set(tensors) <= opened.keys
    opened.read(tensors)
    names.load_settings(optimizer, chunk, opened.objects(names.settings_keys(opened.keys)))
    assert {group["is_expert_parallel"] for group in optimizer.param_groups} == {False, expert_parallel_size > 1}
    return whole_values(chunk, optimizer)
