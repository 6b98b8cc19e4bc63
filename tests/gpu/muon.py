# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon on shards: the bits of a plain loop over whole matrices, in graphs, with slow streams; overlap and memory.

The plain loop takes the gradients that the sharded model has, gathered: forward and backward are asked elsewhere.
"""

from __future__ import annotations

import gc
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp.experimental import (
    Placements,
    fully_shard,
    fully_shard_muon,
    matrix_pipeline,
)
from megatron.core.distributed.fsdp.experimental.device import observe
from megatron.pretrain.profiling import ScheduleProfiler
from tests.gpu import graphs
from tests.gpu.checks import IS_DRY, Check
from tests.gpu.streams import COMPUTE_SLEEP_CYCLES, Tampering, sleep, synchronize, tampered
from tests.unit_tests.launch import DEVICE
from tests.unit_tests.matrix_oracle import STEPS
from tests.unit_tests.trace import Trace

WIDTH = 24 if IS_DRY else 1024
HIDDEN = 2 * WIDTH + 40
NUM_STEPS = 10
PACKAGE_BYTES = 2 * 4 * HIDDEN * WIDTH
"""Two of the larger matrices, so that a step has several packages."""
RATE = float(torch.tensor(1e-3))
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Layer(nn.Module):
    """A wide matrix, a tall one, a stack of matrices, and a bias for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.stack = nn.Parameter(torch.randn(3, WIDTH, WIDTH // 2 + 8) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x + torch.einsum("bi,eio,ejo->bj", x, self.stack, self.stack)


def _sharded(num_layers: int, strategy: str = "optim_grads_params") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(num_layers)]).to(DEVICE)
    mesh, placements = init_device_mesh(DEVICE, (dist.get_world_size(),)), Placements.from_strategy(strategy)
    for layer in model:
        fully_shard(layer, mesh, placements)
    return fully_shard(model, mesh, placements)


def _muon(model: Any, **settings: Any) -> Any:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, fused=True, capturable=True)

    settings = {"package_bytes": PACKAGE_BYTES, **settings}
    return fully_shard_muon(model, RATE, rest=adamw, report=None, **settings)


def _backward(model: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    batch = torch.randn(16, WIDTH, generator=generator).to(DEVICE)
    (model(batch) - batch.flip(1)).square().mean().backward()


def _orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz once more; the norm is that of what has travelled, in its dtype."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True, dtype=torch.float32).clamp_min(1e-7)
    x = (matrix.float() / norm).bfloat16()
    add = torch.baddbmm if x.ndim == 3 else torch.addmm
    for a, b, c in STEPS["quintic"]:
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = add(gram, gram, gram, beta=b, alpha=c)
        x = add(x, x, polynomial, beta=a) if is_tall else add(x, polynomial, x, beta=a)
    return x.float()


class _Plain:
    """The same steps over whole matrices in one process."""

    def __init__(self, model: Any, nesterov: bool, travel_dtype: torch.dtype | None) -> None:
        self.weights = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters() if p.ndim > 1}
        self.momenta = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.nesterov, self.travel_dtype = nesterov, travel_dtype

    @torch.no_grad()
    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        rate = torch.tensor(RATE, device=DEVICE)
        for name, weight in self.weights.items():
            momentum, gradient = self.momenta[name], gradients[name]
            momentum.lerp_(gradient, 1 - 0.95)
            update = gradient.lerp(momentum, 0.95) if self.nesterov else momentum
            update = _orthogonalised(update.to(self.travel_dtype or torch.float32))
            weight.mul_(1 - rate * 0.1)
            weight.addcmul_(update, rate * max(weight.shape[-2:]) ** 0.5, value=-1)


def equals_plain(strategy: str, nesterov: bool, travel_dtype: torch.dtype | None) -> str:
    """Weights have the bits of the plain loop after every step."""
    model = _sharded(3, strategy)
    optimizer = _muon(model, nesterov=nesterov, travel_dtype=travel_dtype)
    plain = _Plain(model, nesterov, travel_dtype)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        _backward(model, step)
        gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if n in plain.weights}
        optimizer.step()
        plain.step(gradients)
        named = dict(model.named_parameters())
        differ = [name for name, weight in plain.weights.items() if not torch.equal(named[name].full_tensor(), weight)]
        assert not differ, f"step {step}: {differ} differ"
    assert all(weight.isfinite().all() for weight in plain.weights.values())
    (work,) = optimizer.works
    assert dist.get_world_size() == 1 or work.plan.travelling_numel or strategy == "no_shard", "nothing travels"
    return f"{len(plain.weights)} parameters equal after each of {NUM_STEPS} steps, {len(work.plan.rounds)} packages"


class _GraphRun(graphs.Run):
    """graphs.py's training with Muon."""

    def make_optimizer(self) -> Any:
        return _muon(self.model, package_bytes=4 * graphs.WIDTH * (3 * graphs.WIDTH + 1))


def graph_equals_eager(strategy: str, num_microbatches: int) -> str:
    """Whole iterations in one graph have the bits of eager ones; learning rates change on the way."""
    return graphs.equals_eager(strategy, None, num_microbatches, None, _GraphRun)


# --- streams ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What is slow in a training run, and which wait is left out."""

    has_slow_exchanges: bool = False
    has_slow_compute: bool = False
    is_synchronised: bool = False
    dropped_wait: str | None = None


WAITS = {
    "_after_compute": Program(has_slow_compute=True),
    "_solve": Program(has_slow_exchanges=True),
    "_apply": Program(has_slow_exchanges=True),
}
"""For each function of matrix_pipeline.py that waits, what goes wrong without."""


def _train(program: Program) -> tuple[list[torch.Tensor], set[str], list[str]]:
    """Return full weights, the functions that have waited, and races that a host has seen."""
    slow = ("matrices",) if program.has_slow_exchanges else ()
    tampering, trace = Tampering(slow, program.dropped_wait, program.is_synchronised), Trace()
    with tampered(tampering, matrix_pipeline), observe(trace) if IS_DRY else nullcontext():
        model = _sharded(2)
        optimizer = _muon(model)
        for step in range(3):
            optimizer.zero_grad()
            _backward(model, step)
            if program.has_slow_compute:
                sleep(COMPUTE_SLEEP_CYCLES)
            optimizer.step()
            synchronize()
    return [parameter.full_tensor().detach() for parameter in model.parameters()], tampering.sites, trace.races


def slow_streams_change_nothing() -> str:
    """Slow exchanges and slow compute give the bits of a run in which the host waits all the time."""
    expected, sites, races = _train(Program(is_synchronised=True))
    assert sites == {*WAITS} and not races, (sites, races)
    for program in (Program(), Program(has_slow_exchanges=True), Program(has_slow_compute=True)):
        found, _, races = _train(program)
        assert not races, races
        assert all(map(torch.equal, found, expected)), program
    return f"{len(expected)} tensors equal, waits in {', '.join(sorted(sites))}"


def wait_is_needed(wait: str) -> str:
    """Without the wait, and with what it waits for delayed, bits differ; `muon_slow_streams` has the same with it."""
    expected, _, _ = _train(Program(is_synchronised=True))
    program = WAITS[wait]
    without = Program(program.has_slow_exchanges, program.has_slow_compute, dropped_wait=wait)
    found, _, races = _train(without)
    number = sum(not torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if IS_DRY:
        assert races
        return f"without it {len(races)} races"
    assert number, f"without it 0 of {len(found)} tensors differ"
    return f"without it {number} of {len(found)} tensors differ"


# --- overlap and memory -----------------------------------------------------------------------------------------------

LARGE = 48 if IS_DRY else 4096
NUM_LARGE = 8
MIN_HIDDEN = 0.5
"""Of the exchanges of eight packages only the first gather and the last results have no compute beside them."""
ROUNDING_BYTES = 16 * 2**20
"""What torch's allocator and cuBLAS's workspace may add."""


def _large(num_layers: int) -> Any:
    """Return a sharded model of square matrices, each a package of its own, with gradients, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(LARGE, LARGE, bias=False, device=DEVICE) for _ in range(num_layers)])
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().normal_()
    return model, fully_shard_muon(model, RATE, report=None, package_bytes=4 * LARGE * LARGE)


def matrices_travel_during_compute() -> str:
    """At least half of the time of exchanges is hidden behind Newton-Schulz."""
    _, optimizer = _large(NUM_LARGE)
    with tempfile.TemporaryDirectory() as folder:
        profiler = ScheduleProfiler(Path(folder), "muon", skip=2, num_steps=2, is_writer=True)
        for _ in range(4):
            # A rank that starts late would make the others' first exchange last as long.
            dist.barrier()
            synchronize()
            with profiler.step():
                optimizer.step()
    exposure = profiler.exposure
    assert exposure is not None
    (work,) = optimizer.works
    assert len(work.plan.rounds) == NUM_LARGE // dist.get_world_size(), work.plan.rounds
    if IS_DRY:
        return str(exposure)
    hidden = 1 - exposure.communication.exposed_ms / exposure.communication.busy_ms
    measured = f"hidden {hidden:.2f}, at least {MIN_HIDDEN} ({exposure})"
    assert hidden > MIN_HIDDEN, measured
    return measured


def memory_is_bounded(nesterov: bool) -> str:
    """A step takes its buffers and what one matrix or package needs, whatever the number of layers."""
    peaks = {}
    numel = LARGE * LARGE
    for num_layers in (4, 12):
        model, optimizer = _large(num_layers)
        for group in optimizer.matrix_groups:
            group["nesterov"] = nesterov
        for _ in range(2):  # the first makes momentum
            gc.collect()
            synchronize()
            before = 0 if IS_DRY else torch.cuda.memory_allocated()
            if not IS_DRY:
                torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            synchronize()
        peaks[num_layers] = 0 if IS_DRY else torch.cuda.max_memory_allocated() - before
        (work,) = optimizer.works
        del model, optimizer
    # Newton-Schulz has four matrices of bf16; an update in fp32 takes less.
    bound = work.buffer_bytes + 4 * 2 * numel + ROUNDING_BYTES
    in_slots = 2 * numel * (4 + 2)
    assert in_slots <= work.buffer_bytes <= 2 * in_slots + 4096, (work.buffer_bytes, in_slots)
    measured = f"peaks {peaks}, bound {bound}, buffers {work.buffer_bytes}"
    assert IS_DRY or all(work.buffer_bytes <= peak <= bound for peak in peaks.values()), measured
    return measured


CHECKS = [
    *(
        Check(f"muon_equals_plain_{strategy}_{name}", equals_plain, (strategy, nesterov, None))
        for strategy in STRATEGIES
        for name, nesterov in (("nesterov", True), ("momentum", False))
    ),
    Check("muon_equals_plain_in_bf16", equals_plain, ("optim_grads_params", True, torch.bfloat16)),
    *(Check(f"muon_graph_equals_eager_{strategy}", graph_equals_eager, (strategy, 1)) for strategy in STRATEGIES),
    Check("muon_graph_equals_eager_of_three", graph_equals_eager, ("optim_grads_params", 3)),
    Check("muon_slow_streams", slow_streams_change_nothing),
    *(Check(f"muon_wait_in{wait}_is_needed", wait_is_needed, (wait,), min_ranks=2) for wait in WAITS),
    Check("muon_overlap", matrices_travel_during_compute, min_ranks=2),
    Check("muon_memory", memory_is_bounded, (True,)),
    Check("muon_memory_without_nesterov", memory_is_bounded, (False,)),
]
