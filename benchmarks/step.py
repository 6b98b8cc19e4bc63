# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Measures one training step of a decoder LM under one data-parallel runtime.

    torchrun --nproc_per_node 2 benchmarks/step.py --runtime fsdp_v2 --model llama1b

Runtimes: none (no communication and no optimizer), fsdp2 (PyTorch's), fsdp_v2 (ours). Run each in a process of its own
on the same machine, one after another, and compare ratios (`benchmarks/compare.sh`). Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder LM and of one rank's batch."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    sequence: int
    vocab: int = 32000
    batch: int = 1


SHAPES = {
    "tiny": Shape(64, 2, 4, 128, 32, vocab=256),
    "small": Shape(1024, 32, 16, 2816, 512),
    "llama1b": Shape(2048, 16, 16, 5632, 4096),
    "llama7b": Shape(4096, 16, 32, 11008, 4096),
}


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.projection = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.hidden)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, sequence, hidden] to the same shape."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Embedding, layers, norm, head and loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of [batch, sequence] tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def no_runtime(model: Decoder, mesh: Any, fused: bool) -> None:
    """Train nothing: forward and backward in bf16 on every rank by itself."""
    model.bfloat16()


def fsdp2(model: Decoder, mesh: Any, fused: bool) -> torch.optim.Optimizer:
    """Shard with PyTorch's FSDP2: bf16 compute and reductions, fp32 shards."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def fsdp_v2(model: Decoder, mesh: Any, fused: bool) -> torch.optim.Optimizer:
    """Shard with Megatron-FSDP v2: bf16 compute and reductions, fp32 main weights."""
    from megatron.core.distributed.fsdp.experimental import (
        MixedPrecisionPolicy,
        fully_shard,
        fully_shard_context,
        fully_shard_optimizer,
    )

    policy = MixedPrecisionPolicy(torch.float32, main_grads_dtype=torch.bfloat16)
    model.bfloat16()
    with fully_shard_context():
        for layer in model.layers:
            fully_shard(layer, mesh, mixed_precision_policy=policy)
        fully_shard(model, mesh, mixed_precision_policy=policy)
    return fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused))


RUNTIMES: dict[str, Callable[[Decoder, Any, bool], torch.optim.Optimizer | None]] = {
    "none": no_runtime,
    "fsdp2": fsdp2,
    "fsdp_v2": fsdp_v2,
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train `warmup + steps` steps and return what they took."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    shape = SHAPES[arguments.model]
    torch.manual_seed(0)
    with device:
        model = Decoder(shape)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    optimizer = RUNTIMES[arguments.runtime](model, mesh, has_gpu)
    generator = torch.Generator(device=device).manual_seed(100 + dist.get_rank())
    text = torch.randint(0, shape.vocab, (shape.batch, shape.sequence + 1), device=device, generator=generator)
    synchronize = torch.cuda.synchronize if has_gpu else (lambda: None)
    seconds, host, losses = [], [], []
    for step in range(arguments.warmup + arguments.steps):
        if step == arguments.warmup and has_gpu:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        if optimizer is None:
            model.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
        issued = time.perf_counter()
        synchronize()
        if step >= arguments.warmup:
            seconds.append(time.perf_counter() - start)
            host.append(issued - start)
        losses.append(loss.item())
    gib = 2**30
    return {
        "runtime": arguments.runtime,
        "model": arguments.model,
        "ranks": dist.get_world_size(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "ms": round(1e3 * statistics.median(seconds), 2),
        "ms_min": round(1e3 * min(seconds), 2),
        "ms_max": round(1e3 * max(seconds), 2),
        "host_ms": round(1e3 * statistics.median(host), 2),
        "tokens_per_s_per_rank": round(shape.batch * shape.sequence / statistics.median(seconds)),
        "peak_gib": round(torch.cuda.max_memory_allocated() / gib, 2) if has_gpu else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / gib, 2) if has_gpu else None,
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(os.path.abspath(__file__)))
    return result.stdout.strip() or "unknown"


def main() -> None:
    """Read the command line, measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=RUNTIMES, required=True)
    parser.add_argument("--model", choices=SHAPES, default="llama1b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=6)
    result = measure(parser.parse_args())
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
