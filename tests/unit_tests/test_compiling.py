# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""torch.compile in every form that docs/compile.md lists: the same bits as eager, and no graph after the first step."""

from __future__ import annotations

import gc
import shutil
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    STRATEGIES,
    Placements,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    gather_full,
    microbatch,
    register_fsdp_forward_method,
)
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.models import Block, shard_layers

NUM_STEPS = 5
Gradients = list[list[torch.Tensor | None]]


class _Layer(Block):
    """Its graph depends on `training`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class _Inside(_Layer):
    """Checkpoints a part of itself, so that recomputation is in its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._branch, x, use_reentrant=False)

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class _Linear(nn.Linear):
    """What torch.nn defines: torch compiles such a forward only where a graph begins with it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)


_Linear.forward = nn.Linear.forward  # type: ignore[method-assign]


class _Model(nn.Module):
    def __init__(self, recompute: str = "no", layer: Callable[[int], nn.Module] = _Layer, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.layers = nn.ModuleList([layer(6) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            if self.recompute == "no":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return x * self.scale


class _Unrolled(_Model):
    """Without a loop around its units: the root's forward is compiled in pieces between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x * self.scale) * self.scale
        x = self.layers[1](x) + 1
        return self.layers[2](x) * self.scale


def _keeps_activations(module: Any, args: Any, output: Any) -> None:
    module.seen = output


class _Hooked(_Model):
    """A forward hook of somebody else's inside each unit ends the unit's graph."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.register_forward_hook(_keeps_activations)  # type: ignore[union-attr,operator]


MODELS: dict[str, Callable[[], Any]] = {
    "loop": _Model,
    "unrolled": _Unrolled,
    "hooked": _Hooked,
    "inside": lambda: _Model(layer=_Inside),
    "linear": lambda: _Model(layer=_Linear),
    "nonreentrant": lambda: _Model("nonreentrant"),
    "reentrant": lambda: _Model("reentrant"),
}


def _compile(model: Any, form: str, **options: Any) -> Any:
    """Return the callable to train."""
    if form == "root":
        return torch.compile(model, **options)
    if form == "root.compile()":
        model.compile(**options)
    for name, layer in list(model.layers.named_children()):
        if form == "layer.compile()":
            layer.compile(**options)
        elif form == "layer.forward":
            layer.forward = torch.compile(layer.forward, **options)
        elif form == "layer":
            setattr(model.layers, name, torch.compile(layer, **options))
        elif form == "child.forward":
            layer.up.forward = torch.compile(layer.up.forward, **options)
    return model


def _batch(step: int, index: int) -> torch.Tensor:
    seed = 100 * step + 10 * index + dist.get_rank()
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def _train(build: Callable[[], Any], form: str, order: str, backend: str, strategy: str = STRATEGIES[3]) -> Gradients:
    """Train with accumulation, frozen parameters and evaluation in between; only the first step may compile."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = build()
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    call = _compile(model, form, backend=backend) if order == "before" else model
    shard_layers(model, placements=Placements.from_strategy(strategy))
    if order == "after":
        call = _compile(model, form, backend=backend)
    optimizer = fully_shard_optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    gradients: Gradients = []
    for step in range(NUM_STEPS):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            torch.manual_seed(step)
            optimizer.zero_grad()
            for index in range(2):
                with microbatch(model.context, is_last=index == 1):
                    call(_batch(step, index)).square().mean().backward()
            gradients.append([_full(parameter) for parameter in model.parameters()])
            optimizer.step()
            model.eval()
            with torch.no_grad():
                call(_batch(step, 2))
            model.train()
        if step == 0:
            num_graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert (num_graphs > 0) == (form != "none")
    torch._dynamo.reset()
    return gradients


def _full(parameter: Any) -> torch.Tensor | None:
    return None if parameter.grad is None else gather_full(parameter.grad, like=parameter).clone()


def _assert_equal(ours: Gradients, theirs: Gradients) -> None:
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), (step, index)  # type: ignore[arg-type]


def _as_eager(model: str, form: str, order: str, backend: str, strategy: str) -> None:
    eager = _train(MODELS[model], "none", order, backend, strategy)
    assert any(gradient is not None and gradient.any() for gradient in eager[-1])
    _assert_equal(_train(MODELS[model], form, order, backend, strategy), eager)


FORMS = ["root.compile()", "layer.compile()", "layer.forward", "layer", "root", "child.forward"]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_pb111_every_form_has_the_bits_of_eager(form: str, backend: str, order: str) -> None:
    run_ranks(2, _as_eager, "loop", form, order, backend, STRATEGIES[3])


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_pb111_every_strategy(strategy: str) -> None:
    run_ranks(2, _as_eager, "loop", "root.compile()", "after", "aot_eager", strategy)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "loop"])
def test_pb111_every_model(model: str) -> None:
    """Recomputation around and inside units, roots with and without a loop, modules of torch.nn, hooks of others."""
    run_ranks(2, _as_eager, model, "root.compile()", "after", "aot_eager", STRATEGIES[3])


@pytest.mark.parametrize("recompute", ["nonreentrant", "reentrant"])
@pytest.mark.parametrize("form", ["layer.compile()", "layer.forward", "layer"])
def test_pb111_recomputed_layers_compiled_before(recompute: str, form: str) -> None:
    run_ranks(2, _as_eager, recompute, form, "before", "aot_eager", STRATEGIES[3])


def _num_graphs(num_layers: int, recompute: str) -> int:
    torch._dynamo.reset()
    counters.clear()
    model: Any = shard_layers(_Model(recompute, num_layers=num_layers))
    model.compile(backend="eager")
    for step in range(2):
        model(_batch(step, 0)).square().mean().backward()
    graphs: int = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs


def test_equal_units_share_a_graph() -> None:
    """One of 32 layers; with reentrant recomputation one without and one with gradients. torch's limit is 8."""
    assert run_ranks(1, _num_graphs, 32, "no") == [1]
    assert run_ranks(1, _num_graphs, 32, "reentrant") == [2]


def _whole_step(is_compiled: bool) -> list[torch.Tensor]:
    """Compile the training step itself, with backward, clipping and the optimizer; the weights after five steps."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = shard_layers(_Unrolled())
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    run = torch.compile(step, backend="aot_eager") if is_compiled else step
    for index in range(NUM_STEPS):
        # Lists of parameters are seen in their final state, and gradients for the first time, in the second step.
        with torch._dynamo.config.patch(error_on_recompile=index > 1):
            torch.manual_seed(index)
            run(_batch(index, 0))
    assert (counters["stats"]["unique_graphs"] > 0) == is_compiled
    torch._dynamo.reset()
    return [parameter.full_tensor() for parameter in model.parameters()]


def test_pb111_compiled_training_step() -> None:
    for eager, compiled in zip(run_ranks(2, _whole_step, False), run_ranks(2, _whole_step, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def _optimised(backend: str) -> None:
    def build() -> Any:
        return _Model(layer=Block)

    eager = _train(build, "none", "after", backend)
    compiled = _train(build, "root.compile()", "after", backend)
    for one, other in zip(eager, compiled, strict=True):
        for a, b in zip(one, other, strict=True):
            # Kernels that are fused round less often.
            assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_pb111_optimised_graphs() -> None:
    """Inductor's kernels; on a host without a C++ compiler what Inductor starts from: decomposed and partitioned."""
    has_compiler = DEVICE == "cuda" or any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    run_ranks(2, _optimised, "inductor" if has_compiler else "aot_eager_decomp_partition")


def _sharded_parameters() -> None:
    model = fully_shard(Block(6))
    model(torch.ones(2, 6))
    parameter: Any = model.up.weight

    def twice(p: Any) -> Any:
        return p * 2

    with torch.no_grad():
        ours = torch.compile(twice, backend="aot_eager")(parameter)
        assert torch.equal(ours.full_tensor(), parameter.full_tensor() * 2)
        torch.compile(lambda p: p[0], backend="aot_eager")(parameter)


def test_sharded_parameters_in_compiled_code() -> None:
    """They end the graph: right where eager is right, refused where eager refuses."""
    for message in run_ranks_expecting(2, RuntimeError, _sharded_parameters):
        assert "getitem of the sharded parameter" in message


def _warnings(form: str, order: str, recompute: str, layer: Callable[[int], nn.Module], steps: int = 2) -> list[str]:
    torch._dynamo.reset()
    model: Any = _Model(recompute, layer, 2)
    call = _compile(model, form, backend="eager") if order == "before" else model
    shard_layers(model)
    if order == "after":
        call = _compile(model, form, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(steps):
            call(_batch(index, 0)).mean().backward()
    torch._dynamo.reset()
    return [str(item.message) for item in caught if "torch.compile around" in str(item.message)]


@pytest.mark.parametrize(
    ("form", "order", "recompute", "layer"),
    [
        ("root", "after", "nonreentrant", _Layer),
        ("root", "before", "reentrant", _Layer),
        ("root.compile()", "before", "nonreentrant", _Layer),
        ("root", "after", "no", _Linear),
        ("layer.compile()", "before", "no", _Linear),
    ],
)
def test_units_that_stay_uncompiled_are_named(
    form: str, order: str, recompute: str, layer: Callable[[int], nn.Module]
) -> None:
    (messages,) = run_ranks(1, _warnings, form, order, recompute, layer)
    assert [message.split(":")[0] for message in messages] == [
        "torch.compile around unit layers.0",
        "torch.compile around unit layers.1",
    ]
    assert "Call compile() on the root, or on each unit, after fully_shard" in messages[0]


def _compiled_twice() -> int:
    """What torch.nn defines is compiled by the second call only: the first one compiles the call, before sharding."""
    torch._dynamo.reset()
    counters.clear()
    layer: Any = _Linear(6)
    layer.compile(backend="eager")
    fully_shard(layer).compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.ones(2, 6)).sum().backward()
    graphs: int = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs


def test_compiling_again_replaces() -> None:
    assert run_ranks(1, _compiled_twice) == [1]


@pytest.mark.parametrize("form", ["none", *FORMS[:5]])
def test_compiled_units_warn_of_nothing(form: str) -> None:
    assert run_ranks(1, _warnings, form, "after", "no", _Layer) == [[]]


def _with_graphs(options: dict[str, Any]) -> None:
    shard_layers(_Model()).compile(**options)


@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}]
)
def test_graph_modes_are_refused(options: dict[str, Any]) -> None:
    for message in run_ranks_expecting(1, NotImplementedError, _with_graphs, options):
        assert message.startswith("compile of unit Fsdp_Model: expected a mode without CUDA graphs, got")


def _whole_graph() -> None:
    model = shard_layers(_Model())
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 6))


def test_one_graph_around_units_is_refused() -> None:
    for message in run_ranks_expecting(1, torch._dynamo.exc.Unsupported, _whole_graph):
        assert "weights of a fully_shard unit come and go at its border" in message


def _one_graph_per_unit() -> int:
    torch._dynamo.reset()
    counters.clear()
    model: Any = shard_layers(_Model())
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)
        layer.compile(backend="aot_eager", fullgraph=True)
    model(torch.ones(2, 6)).sum().backward()
    graphs: int = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs


def test_units_are_whole_graphs() -> None:
    assert run_ranks(1, _one_graph_per_unit) == [1]


def _patched_forward(is_compiled: bool) -> tuple[int, torch.Tensor | None]:
    """A forward that somebody has put in a unit's place is compiled as it is; one that is compiled stays so."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = _Model(layer=Block, num_layers=2)
    first, second = model.layers
    first.forward = lambda x: x * 2 + first.up.bias.sum()
    mine = second.forward = torch.compile(second.forward, backend="eager")
    shard_layers(model)
    if is_compiled:
        model.compile(backend="eager")
    assert second.forward is mine
    model(torch.linspace(-1, 1, 12).view(2, 6)).square().sum().backward()
    graphs: int = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs, _full(first.up.bias)


def test_forwards_of_instances_are_respected() -> None:
    ((graphs, gradient),) = run_ranks(1, _patched_forward, True)
    ((fewer, expected),) = run_ranks(1, _patched_forward, False)
    assert (fewer, graphs) == (1, 2)
    assert expected.any() and torch.equal(gradient, expected)


def _compiled_backward() -> None:
    model: Any = shard_layers(_Model())

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")(torch.ones(2, 6))


def test_compiled_autograd_is_refused() -> None:
    for message in run_ranks_expecting(1, NotImplementedError, _compiled_backward):
        assert "expected torch._dynamo.config.compiled_autograd=False" in message


def _deleted() -> None:
    model: Any = shard_layers(_Model())
    model.compile(backend="aot_eager")
    model(torch.ones(2, 6)).sum().backward()
    alive = [weakref.ref(model), *(weakref.ref(group.full_weight) for group in model.layers[0].parameter_groups)]
    gc.disable()
    try:
        del model
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()
        torch._dynamo.reset()


def test_a_deleted_model_leaves_nothing() -> None:
    run_ranks(1, _deleted)


class _Encoder(Block):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def _method() -> int:
    torch._dynamo.reset()
    counters.clear()
    unit: Any = fully_shard(_Encoder(6))
    register_fsdp_forward_method(unit, "encode")
    unit.encode = torch.compile(unit.encode, backend="aot_eager")
    for index in range(3):
        unit.encode(_batch(index, 0)).sum().backward()
    assert unit.up.weight.grad is not None
    graphs: int = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs


def test_registered_methods_are_compiled() -> None:
    assert run_ranks(2, _method) == [1, 1]
