# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The models and runtimes of benchmarks/muon.py, whose docstring says what they are. Measures nothing."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.experimental import (
    capture_iteration,
    fully_shard,
    fully_shard_muon,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.experimental.newton_schulz import count_operations, newton_schulz

RATE, MOMENTUM, DECAY, STEPS = 1e-4, 0.95, 0.1, 5
MIB = 2**20
TRAVEL = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder's layers."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return rows and columns of a layer's weights."""
        kv = self.hidden // self.heads * self.kv_heads
        square, up = (self.hidden, self.hidden), (self.ffn, self.hidden)
        return {"q": square, "k": (kv, self.hidden), "v": (kv, self.hidden), "o": square} | {
            "gate": up,
            "up": up,
            "down": (self.hidden, self.ffn),
        }

    def operations(self) -> int:
        """Return those of Newton-Schulz for all layers."""
        return self.layers * sum(count_operations(1, *shape, STEPS) for shape in self.matrices().values())


MODELS = {
    "tiny": Size(64, 176, 3, 4, 2),
    "llama1b": Size(2048, 5632, 22, 32, 4),
    "llama7b": Size(4096, 11008, 32, 32, 32),
}


class Layer(nn.Module):
    """The weights of a layer."""

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__()
        for name, (rows, columns) in size.matrices().items():
            self.add_module(name, nn.Linear(columns, rows, bias=False, device=device))


@dataclass
class Contestant:
    """A way to step a model.

    Attributes:
        model: sharded, with gradients.
        step: of the optimizer.
        optimizer: ours; None for another.
        release: to be called at the end.
    """

    model: nn.Module
    step: Callable[[], object]
    optimizer: Any = None
    release: Callable[[], object] = gc.collect


def build(size: Size, mesh: DeviceMesh, shard: Callable[..., Any]) -> nn.Module:
    """Return a model whose layers are sharded as soon as they are made, with gradients."""
    device = torch.device(mesh.device_type)
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(size.layers):
        layer = Layer(size, device)
        shard(layer, mesh=mesh)
        model.append(layer)
    shard(model, mesh=mesh)
    generator = torch.Generator(device).manual_seed(1)
    for parameter in model.parameters():
        full = torch.randn(parameter.shape, device=device, generator=generator).mul_(1e-3)
        parameter.grad = torch.zeros_like(parameter)
        target = parameter.grad.to_local()
        geometry = getattr(parameter, "geometry", None)
        if geometry is None:
            target.copy_(rows_of_rank(full, mesh))
        else:
            target.view(-1).copy_(full.view(-1)[geometry.owned.start : geometry.owned.stop])
    return model


def rows_of_rank(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the rows that FSDP2 gives this rank."""
    parts, rank = full.chunk(mesh.size()), mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else full[:0]


def muon(size: Size, mesh: DeviceMesh, arguments: argparse.Namespace) -> Contestant:
    """Muon of this project."""
    model = build(size, mesh, fully_shard)
    optimizer = fully_shard_muon(
        model,
        RATE,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        num_ns_steps=STEPS,
        report=None,
        travel_dtype=TRAVEL[arguments.travel_dtype],
        package_bytes=arguments.package_mib * MIB,
    )
    return Contestant(model, optimizer.step, optimizer)


def muon_graph(size: Size, mesh: DeviceMesh, arguments: argparse.Namespace) -> Contestant:
    """The same as replays of a graph."""
    eager = muon(size, mesh, arguments)
    nothing = torch.zeros((), device=mesh.device_type)

    def step(result: torch.Tensor) -> torch.Tensor:
        eager.optimizer.step()
        return result

    captured = capture_iteration(eager.model, eager.optimizer, step, (nothing,))
    for _ in range(4):  # three eager ones, and the capture
        captured(nothing)
    return Contestant(eager.model, lambda: captured(nothing), eager.optimizer, captured.release)


def adamw(size: Size, mesh: DeviceMesh, arguments: argparse.Namespace) -> Contestant:
    """AdamW over shards."""
    model = build(size, mesh, fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=True)
    return Contestant(model, fully_shard_optimizer(optimizer).step)


def fsdp2_full(size: Size, mesh: DeviceMesh, arguments: argparse.Namespace) -> Contestant:
    """Newton-Schulz on every rank over FSDP2's shards: `full_tensor()` of each matrix."""
    model = build(size, mesh, fsdp2_fully_shard)
    momenta = [torch.zeros_like(parameter.to_local()) for parameter in model.parameters()]

    @torch.no_grad()
    def step() -> None:
        for parameter, momentum in zip(model.parameters(), momenta, strict=True):
            weight, gradient = parameter.to_local(), parameter.grad.to_local()
            momentum.lerp_(gradient, 1 - MOMENTUM)
            local = gradient.lerp(momentum, MOMENTUM)
            sharded = DTensor.from_local(
                local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            update = newton_schulz(sharded.full_tensor(), STEPS)
            weight.mul_(1 - RATE * DECAY)
            weight.sub_(rows_of_rank(update, mesh).float(), alpha=RATE * max(parameter.shape) ** 0.5)

    return Contestant(model, step)


RUNTIMES = {"muon": muon, "muon_graph": muon_graph, "adamw": adamw, "fsdp2_full": fsdp2_full}
