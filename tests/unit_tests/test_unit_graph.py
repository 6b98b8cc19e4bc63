# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Units with graphs of their own, on a double of CUDA graphs that writes over whatever a replay may write over.

tests/gpu/unit_graphs.py runs on real ones.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    Placements,
    capture_iteration,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
    register_fsdp_forward_method,
)
from megatron.core.distributed.fsdp.experimental.context_graphs import PATIENCE
from megatron.core.distributed.fsdp.experimental.graphed_forward import MAX_KINDS
from tests.gpu.unit_graphs import equals_eager
from tests.unit_tests.graph_double import graphs_on_the_host
from tests.unit_tests.launch import lasting_mesh, run_ranks, run_ranks_expecting
from tests.unit_tests.models import Block

WIDTH = 6
CASES = [
    ("no_shard", None, 1),
    ("optim", None, 4),
    ("optim_grads", None, 4),
    ("optim_grads_params", None, 1),
    ("optim_grads_params", None, 4),
    ("optim_grads_params", "no_shard", 4),
    ("optim_grads_params", "optim", 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graphs_equal_eager_units(case: Any) -> None:
    run_ranks(2, equals_eager, *case)


# --- one model with and without graphs --------------------------------------------------------------------------------


class _Stack(nn.Module):
    """Layers that are units, below a root that says what happens between them."""

    def __init__(self, layers: list[nn.Module], between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self, self.first(x))


def _one_by_one(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


class _Training:
    def __init__(self, model: Any, cuda_graph: bool, strategy: str = "optim_grads_params") -> None:
        self.model = model
        mesh = lasting_mesh((dist.get_world_size(),))
        options: dict[str, Any] = {"placements": Placements.from_strategy(strategy)}
        with fully_shard_context(trace_pool=True) as self.context:
            for layer in model.layers:
                fully_shard(layer, mesh, **options, cuda_graph=cuda_graph)
            fully_shard(model, mesh, **options)
        self.optimizer: Any = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        self.graphs: Any = self.context.graphs
        torch.manual_seed(7 + dist.get_rank())

    def batch(self, seed: int, rows: int = 4) -> torch.Tensor:
        generator = torch.Generator().manual_seed(31 * seed + dist.get_rank())
        return torch.randn(rows, WIDTH, generator=generator)

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs).square().mean()

    def step(self, seed: int, rows: int = 4) -> list[torch.Tensor]:
        """Run one step; return the loss and all gradients."""
        loss = self.loss(self.batch(seed, rows))
        loss.backward()
        return [loss.detach(), *self.update()]

    def update(self) -> list[torch.Tensor]:
        """Step the optimizer; return the gradients that it had."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        found = [gradient.to_local().clone() for gradient in gradients if gradient is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def _compare(build: Callable[[], Any], train: Callable[[_Training], list[Any]], **options: Any) -> tuple[int, int]:
    """Train with and without graphs and compare what is seen and the weights; return captures and replays."""
    found = []
    for cuda_graph in (False, True):
        with graphs_on_the_host():
            torch.manual_seed(0)
            training = _Training(build(), cuda_graph, **options)
            seen = train(training)
            found.append([*seen, *(parameter.to_local().detach() for parameter in training.model.parameters())])
    differ = [number for number, pair in enumerate(zip(*found, strict=True)) if not torch.equal(*pair)]
    assert not differ, f"{len(differ)} of {len(found[0])} differ: {differ[:10]}"
    assert all(tensor.isfinite().all() for tensor in found[0])
    return training.graphs.num_captures, training.graphs.num_replays


def _blocks(number: int = 3) -> list[nn.Module]:
    return [Block(WIDTH) for _ in range(number)]


def _steps(training: _Training, number: int = 6) -> list[torch.Tensor]:
    return [tensor for seed in range(number) for tensor in training.step(seed)]


# --- what runs between units ------------------------------------------------------------------------------------------


def _in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
        x += 1
    return x


def _skip(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = model.layers
    a = first(x)
    b = second(a)
    return third(a + b) * a + x


def _twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = model.layers
    return third(first(second(first(x)))) + first(x)


def _detached(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = model.layers
    return third(second(first(x).detach()))


def _dropped(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = model.layers
    return second(x) + 0 * first(x).detach() + third(x)


def _around(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = model.layers
    x = checkpoint(first, x, use_reentrant=True)
    return third(checkpoint(second, x, use_reentrant=False))


BETWEEN = {
    "in place": (_in_place, 6),
    "skip": (_skip, 6),
    "twice": (_twice, 6),
    "detached": (_detached, 4),
    "dropped": (_dropped, 4),
    "checkpoints around": (_around, 2),
}


def _between(name: str) -> None:
    between, captures = BETWEEN[name]
    assert _compare(lambda: _Stack(_blocks(), between), _steps)[0] == captures


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_runs_between_units(name: str) -> None:
    run_ranks(2, _between, name)


# --- how a loop uses them ---------------------------------------------------------------------------------------------


def _replays(training: _Training) -> int:
    return 0 if training.graphs is None else training.graphs.num_replays


def _accumulate_without_backward(training: _Training) -> list[torch.Tensor]:
    seen = []
    for step in range(5):
        loss = sum(training.loss(training.batch(10 * step + part)) for part in range(3))
        loss.backward()
        seen += [loss.detach(), *training.update()]
    return seen


def _forwards_without_backward(training: _Training) -> list[torch.Tensor]:
    seen = []
    for step in range(5):
        dropped = training.model(training.batch(50 + step)).detach()
        kept = training.model(training.batch(60 + step))
        del kept
        seen += [dropped, *training.step(step)]
    return seen


def _kept_outputs(training: _Training) -> list[torch.Tensor]:
    """A hook keeps all outputs of the middle layer, the loop those of the model."""
    kept: list[torch.Tensor] = []
    training.model.layers[1].register_forward_hook(lambda module, args, output: kept.append(output.detach()))
    seen = _steps(training, 7)
    return [*seen, *kept]


def _evaluations(training: _Training) -> list[torch.Tensor]:
    seen = []
    for step in range(8):
        training.model.train(step % 2 == 0)
        seen += training.step(step)
        with torch.no_grad():
            seen.append(training.model(training.batch(70)))
        with torch.inference_mode():
            seen.append(training.model(training.batch(71)).clone())
    return seen


def _gradient_of_inputs(training: _Training) -> list[torch.Tensor]:
    seen = []
    for step in range(6):
        inputs = training.batch(step).requires_grad_()
        if step == 4:
            seen += torch.autograd.grad(training.loss(inputs), [inputs])
            seen += training.update()
        else:
            training.loss(inputs).backward()
            seen += [inputs.grad, *training.update()]
    return seen


def _freezing(training: _Training) -> list[torch.Tensor]:
    seen = _steps(training, 5)
    layer = training.model.layers[1]
    layer.up.weight.requires_grad_(False)
    seen += _steps(training, 5)
    layer.up.weight.requires_grad_(True)
    return seen + _steps(training, 5)


def _memory_given_back(training: _Training) -> list[torch.Tensor]:
    seen = _steps(training, 5)
    training.context.release_memory_pool()
    with torch.no_grad():
        seen.append(training.model(training.batch(70)))
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    seen += _steps(training, 5)
    training.model.load_state_dict(state)
    return seen + _steps(training, 5)


def _broken_backward(training: _Training) -> list[torch.Tensor]:
    seen = _steps(training, 5)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            raise ValueError("broken")

    hook = training.model.layers[0].register_forward_hook(lambda module, args, output: Broken.apply(output))
    with pytest.raises(ValueError, match="broken"):
        training.loss(training.batch(0)).backward()
    hook.remove()
    training.optimizer.zero_grad()
    return seen + _steps(training, 5)


def _microbatches_without_sync(training: _Training) -> list[torch.Tensor]:
    seen = []
    for step in range(6):
        for part in range(3):
            training.model.set_requires_gradient_sync(part == 2)
            with microbatch(training.context, is_last=part == 2):
                training.loss(training.batch(5 * step + part)).backward()
        seen += training.update()
    return seen


LOOPS: dict[str, tuple[Callable[[_Training], list[torch.Tensor]], int]] = {
    "accumulate without backward": (_accumulate_without_backward, 6),
    "forwards without backward": (_forwards_without_backward, 6),
    "kept outputs": (_kept_outputs, 6),
    "evaluations": (_evaluations, 12),
    "gradient of inputs": (_gradient_of_inputs, 6),
    "freezing": (_freezing, 18),
    "memory given back": (_memory_given_back, 12),
    "broken backward": (_broken_backward, 6),
    "microbatches without sync": (_microbatches_without_sync, 6),
}


def _loop(name: str, strategy: str) -> None:
    train, captures = LOOPS[name]
    found = _compare(
        lambda: _Stack([*_blocks(2), nn.Sequential(Block(WIDTH), nn.Dropout(0.2))], _one_by_one),
        train,
        strategy=strategy,
    )
    print(name, found)
    assert found[0] == captures and found[1] > captures, found


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("name", LOOPS)
def test_however_a_loop_uses_them(name: str, strategy: str) -> None:
    run_ranks(2, _loop, name, strategy)
