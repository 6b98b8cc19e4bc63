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
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    Placements,
    capture_iteration,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.experimental.context_graphs import PATIENCE
from megatron.core.distributed.fsdp.experimental.graphed_forward import MAX_KINDS
from tests.gpu.unit_graphs import equals_eager
from tests.unit_tests.graph_double import graphs_on_the_host
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks
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


def _compare(
    build: Callable[[], Any],
    train: Callable[[_Training], list[Any]],
    *,
    watches_values: bool = True,
    **options: Any,
) -> tuple[int, int]:
    """Train with and without graphs and compare what is seen and the weights; return captures and replays."""
    found = []
    for cuda_graph in (False, True):
        with graphs_on_the_host(watches_values):
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


def _originals() -> None:
    for between, expected in (
        (_one_by_one, [False, True, True]),
        (_in_place, [False] * 3),
        (_skip, [False, True, False]),
    ):
        with graphs_on_the_host():
            training = _Training(_Stack(_blocks(), between), cuda_graph=True)
            _steps(training)
            graphs = [graph for table in training.graphs._tables for graph in table.values()]
            assert [graph._originals[0] is not None for graph in graphs] == expected


def test_a_graph_reads_the_one_before_where_it_is_if_nobody_has_written_it() -> None:
    run_ranks(1, _originals)


# --- how a loop uses them ---------------------------------------------------------------------------------------------


def _replays(training: _Training) -> int:
    return 0 if training.graphs is None else training.graphs.num_replays


def _accumulate_without_backward(training: _Training) -> list[torch.Tensor]:
    seen = []
    for step in range(8):
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


def _backwards_in_parts(training: _Training) -> list[torch.Tensor]:
    """The first layer is called again while the second one, which has read its output, waits for its backward."""
    first, second, _ = training.model.layers
    seen = []
    for step in range(12):
        whole = training.loss(training.batch(step))
        whole.backward()
        found = first(training.batch(step).requires_grad_())
        found.square().mean().backward()
        then = second(found.detach()).square().mean()
        again = first(training.batch(30 + step).requires_grad_()).square().mean()
        then.backward()
        again.backward()
        seen += [whole.detach(), then.detach(), again.detach(), *training.update()]
    return seen


LOOPS: dict[str, tuple[Callable[[_Training], list[torch.Tensor]], int]] = {
    "accumulate without backward": (_accumulate_without_backward, 6),
    "forwards without backward": (_forwards_without_backward, 2),
    "kept outputs": (_kept_outputs, 6),
    "evaluations": (_evaluations, 12),
    "gradient of inputs": (_gradient_of_inputs, 6),
    "freezing": (_freezing, 18),
    "memory given back": (_memory_given_back, 12),
    "broken backward": (_broken_backward, 6),
    "backwards in parts": (_backwards_in_parts, 6),
    "microbatches without sync": (_microbatches_without_sync, 6),
}


def _stack_with_dropout() -> Any:
    return _Stack([*_blocks(2), nn.Sequential(Block(WIDTH), nn.Dropout(0.2))], _one_by_one)


def _loop(name: str) -> None:
    train, captures = LOOPS[name]
    for strategy in ("optim", "optim_grads_params"):
        found = _compare(_stack_with_dropout, train, strategy=strategy)
        assert found[0] >= captures and found[1] > captures, (strategy, found)


@pytest.mark.parametrize("name", LOOPS)
def test_however_a_loop_uses_them(name: str) -> None:
    run_ranks(2, _loop, name)


# --- what a unit is ---------------------------------------------------------------------------------------------------


class _Odd(nn.Module):
    """Tied, frozen, unused and differently typed weights, buffers, a flag, a checkpoint; several inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.up.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.narrow = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, *, scales: dict[str, Any], power: float = 1.0) -> Any:
        y = self.tied(torch.tanh(self.up(x))) + self.frozen(x) * scales["inner"][0]
        y = checkpoint(self.statistics, y, use_reentrant=False, preserve_rng_state=False)
        y = (y * self.narrow) ** power
        return {"out": y, "side": (y.sum(-1), (y > 0).sum(), None), "in": x, "number": 3}


def _odd_calls(model: Any, x: torch.Tensor) -> torch.Tensor:
    total = 0
    for number, layer in enumerate(model.layers):
        scale = x.detach()[:, :1] + number
        found = layer(x, scales={"inner": [scale, number]}, power=1.0)
        assert found["number"] == 3 and found["side"][2] is None
        x = found["out"] + found["in"]
        total = total + found["side"][0].mean() if number else total
        x = x + found["side"][1] * 0.001
    return x + total


def _odd() -> None:
    class Linear(nn.Module):
        """Its input needs no gradient; one of its outputs leads to no weight."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), x.exp()

    def first_of_all(model: Any, x: torch.Tensor) -> torch.Tensor:
        made, other = model.layers[0](x.detach())
        return model.layers[1](made)[0] + other

    assert _compare(lambda: _Stack([_Odd(), _Odd()], _odd_calls), _steps)[0] == 4
    assert _compare(lambda: _Stack([Linear(), Linear()], first_of_all), _steps)[0] == 4


def test_whatever_a_unit_is() -> None:
    run_ranks(2, _odd)


def _compiled() -> None:
    captures = []
    for place in ("layer.forward", "unit.compile", "layer.compile"):

        def build(place: str = place) -> Any:
            model = _Stack(_blocks(2), _one_by_one)
            for layer in model.layers:
                if place == "layer.forward":
                    layer.forward = torch.compile(layer.forward, backend="aot_eager")
            return model

        def train(training: _Training, place: str = place) -> list[torch.Tensor]:
            if place != "layer.forward":
                units = training.model.layers if place == "layer.compile" else [training.model]
                for unit in units:
                    unit.compile(backend="aot_eager")
            return _steps(training)

        torch._dynamo.reset()
        captures.append(_compare(build, train, watches_values=False)[0])
    assert captures == [4, 4, 4]


def test_compiled_units() -> None:
    run_ranks(1, _compiled)


def _late_compile(training: _Training) -> list[torch.Tensor]:
    seen = _steps(training)
    training.model.layers[0].compile(backend="aot_eager")
    return seen + _steps(training)


def _compiled_later() -> None:
    assert _compare(lambda: _Stack(_blocks(2), _one_by_one), _late_compile, watches_values=False)[0] == 8


def test_a_unit_that_is_compiled_later_is_captured_anew() -> None:
    run_ranks(1, _compiled_later)


# --- how many graphs there are ----------------------------------------------------------------------------------------


def _kinds() -> None:
    def train(training: _Training) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        counts = []
        for rows in (4, 5, 6):
            for seed in range(4):
                seen += training.step(seed, rows)
            counts.append(training.graphs and training.graphs.num_captures)
        if training.graphs:
            assert counts == [4, 8, 8], "the third kind runs without graphs"
        for seed in range(PATIENCE):
            seen += training.step(seed, 6)
        if training.graphs:
            assert training.graphs.num_captures == 12, "and takes the others' place if it goes on coming"
        return seen

    _compare(lambda: _Stack(_blocks(2), _one_by_one), train)


def test_a_bounded_number_of_kinds_has_graphs() -> None:
    assert MAX_KINDS == 2
    run_ranks(1, _kinds)


def _modes() -> None:
    def train(training: _Training) -> list[torch.Tensor]:
        seen = _steps(training, 5)
        training.model.layers[2][1].eval()
        return seen + _steps(training, PATIENCE + 4)

    assert _compare(_stack_with_dropout, train)[0] == 12, "with its neighbours, since it comes after them"


def test_a_mode_of_a_module_inside_is_a_kind() -> None:
    run_ranks(1, _modes)


# --- what is refused --------------------------------------------------------------------------------------------------


def _arguments() -> None:
    mesh = lasting_mesh((1,))
    with graphs_on_the_host():
        with pytest.raises(TypeError, match=r"cuda_graph: expected True or False, got 1\."):
            fully_shard(Block(WIDTH), mesh, cuda_graph=1)
        with pytest.raises(NotImplementedError, match="cuda_graph: expected one module, got 2 from Block on that form"):
            fully_shard(_blocks(2), mesh, cuda_graph=True)
        with pytest.raises(ValueError, match="cuda_graph of Block: expected register_hooks=True, got False"):
            fully_shard(Block(WIDTH), mesh, register_hooks=False, cuda_graph=True)
        with pytest.raises(
            ValueError, match="cuda_graph of Block: expected gathered weights at fixed addresses, got a"
        ):
            fully_shard(Block(WIDTH), mesh, cuda_graph=True)
        outer = nn.Sequential(*_blocks(2))
        fully_shard(outer[1], mesh)
        with pytest.raises(ValueError, match=r"expected a module without units inside, got \['1'\]"):
            fully_shard(outer, mesh, cuda_graph=True)
        replicated = fully_shard(Block(WIDTH), mesh, Placements.from_strategy("no_shard"), cuda_graph=True)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(replicated.parameters(), fused=True, capturable=True))
        with pytest.raises(ValueError, match=r"expected units without cuda_graph=True, got \['FsdpBlock'\]"):
            capture_iteration(replicated, optimizer, lambda x: x, [torch.ones(1)])


def test_arguments_that_are_refused() -> None:
    run_ranks(1, _arguments)


def _host() -> None:
    with pytest.raises(
        NotImplementedError, match="fully_shard cuda_graph: expected a model on a CUDA device, got one on"
    ):
        fully_shard(Block(WIDTH), lasting_mesh((1,)), Placements.from_strategy("optim"), cuda_graph=True)


if DEVICE == "cpu":

    def test_devices_without_graphs_are_refused() -> None:
        run_ranks(1, _host)


class _Refused(nn.Module):
    def __init__(self, forward: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.kept: Any = None
        self.does = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


def _waits(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(x) * (2 if x.sum().item() > 0 else 1)


def _keeps(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.kept = layer.linear(x)
    return layer.kept * 2


def _replaces(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.count = layer.count + 1
    return layer.linear(x) * layer.count


def _returns(layer: Any, x: torch.Tensor) -> Any:
    return {"out": layer.linear(x), "other": object()}


def _writes(layer: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask.add_(1)
    return layer.linear(x) * mask


def _adds(layer: Any, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
    found.append(layer.linear(x))
    return found[0] * 2


def _takes(layer: Any, x: torch.Tensor, what: object) -> torch.Tensor:
    return layer.linear(x)


def _asks(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return _Fused.apply(x, layer.linear.weight)


class _Fused(torch.autograd.Function):
    """A product whose kernel writes the weight's gradient itself."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        context.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        x, weight = context.saved_tensors
        context.weight.get_main_grad().copy_(gradient.t() @ x)
        return gradient @ weight, None


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 if gradient.sum().item() else 2)


def _no_arguments(x: torch.Tensor) -> tuple[Any, ...]:
    return ()


REFUSALS: dict[str, tuple[Any, Callable[[torch.Tensor], tuple[Any, ...]], str]] = {
    "waits": (_waits, _no_arguments, "expected a forward that only issues work to the device, got RuntimeError at .*:"),
    "keeps": (_keeps, _no_arguments, "expected a forward that passes on all .* got tensors that need gradients in att"),
    "replaces": (_replaces, _no_arguments, "got buffers that it replaces instead of writing them"),
    "returns": (
        _returns,
        _no_arguments,
        "output of unit layers.0: expected tensors in tuples, lists and dicts, got ob",
    ),
    "writes": (_writes, lambda x: (x.detach().clone(),), "got an input that it writes in place, which"),
    "adds": (_adds, lambda x: ([],), "got lists or dicts in its arguments that it has changed"),
    "takes": (_takes, lambda x: (object(),), "arguments of unit layers.0 with cuda_graph=True: expected tensors, numb"),
    "other device": (_takes, lambda x: (x.detach().to("meta"),), r"expected tensors on .*, got some on \['meta'\]"),
    "asks": (
        _asks,
        _no_arguments,
        "expected a backward that only issues .* get_main_grad: expected gradients from auto",
    ),
    "waits in backward": (
        lambda layer, x: _Waiting.apply(layer.linear(x)),
        _no_arguments,
        "cuda_graph of unit layers.0: expected a backward that only issues work to the device, got RuntimeError at",
    ),
}


def _refused() -> None:
    for forward, arguments, match in REFUSALS.values():

        def between(model: Any, x: torch.Tensor, arguments: Any = arguments) -> torch.Tensor:
            found: torch.Tensor | dict[str, Any] = model.layers[0](x, *arguments(x))
            return found["out"] if isinstance(found, dict) else found

        with graphs_on_the_host():
            training = _Training(_Stack([_Refused(forward)], between), cuda_graph=True)
            with pytest.raises((RuntimeError, TypeError, ValueError), match=match):
                _steps(training, 5)


def test_what_no_graph_can_hold_is_refused() -> None:
    run_ranks(1, _refused)


def _backwards() -> None:
    def unused(model: Any, x: torch.Tensor) -> torch.Tensor:
        out, side = model.layers[0](x)
        return out + side if model.uses_side else out

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.linear(x).exp()

    def train(training: _Training, first: bool, then: bool) -> list[torch.Tensor]:
        training.model.uses_side = first
        seen = _steps(training, 5)
        training.model.uses_side = then
        return seen + _steps(training, 2)

    _compare(lambda: _Stack([Two()], unused), lambda training: train(training, True, False))
    with graphs_on_the_host():
        training = _Training(_Stack([Two()], unused), cuda_graph=True)
        with pytest.raises(
            RuntimeError, match=r"expected gradients of the outputs that had some .* got one of output 1"
        ):
            train(training, False, True)
        training = _Training(_Stack(_blocks(2), _one_by_one), cuda_graph=True)
        _steps(training, 5)
        with pytest.raises(NotImplementedError, match="expected retain_graph=False with cuda_graph=True, got True"):
            training.loss(training.batch(0)).backward(retain_graph=True)
        training.optimizer.zero_grad()
        loss = training.loss(training.batch(0))
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        training.optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
            _steps(training, 4)
        with (
            torch.autocast(DEVICE, torch.bfloat16),
            pytest.raises(
                NotImplementedError, match=r"expected torch.autocast\(cache_enabled=False\), got autocast with"
            ),
        ):
            training.loss(training.batch(0))


def test_backwards_that_are_refused() -> None:
    run_ranks(1, _backwards)


def _deleted() -> None:
    gc.collect()
    gc.disable()
    try:
        with graphs_on_the_host():
            training = _Training(_Stack(_blocks(2), _one_by_one), cuda_graph=True)
            _steps(training, 5)
            assert training.graphs.num_replays > 0
            buffers = [
                weakref.ref(group.full_weight) for layer in training.model.layers for group in layer.parameter_groups
            ]
            del training
            assert [buffer() for buffer in buffers] == [None, None]
    finally:
        gc.enable()


def test_a_deleted_model_frees_its_memory_at_once() -> None:
    run_ranks(1, _deleted)
