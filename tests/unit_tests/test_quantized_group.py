# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Low-bit weights: the bits of whole tensors on every cut, the numbers of one process, and what travels and rests."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    Fp8Recipe,
    MixedPrecisionPolicy,
    Mxfp8Recipe,
    Nvfp4Recipe,
    Placements,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.experimental.allocator import default_allocator
from megatron.core.distributed.fsdp.experimental.quantized_group import QuantizedGroup
from tests.unit_tests.accounting import Cost
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks, run_ranks_expecting
from tests.unit_tests.oracle import Recipe, Run, assert_parity, run_reference, run_sharded
from tests.unit_tests.trace import CollectiveLog

RECIPES: dict[str, Any] = {
    "fp8-tensor": Fp8Recipe(),
    "fp8-row": Fp8Recipe(scaling="row"),
    "fp8-block": Fp8Recipe(scaling="block"),
    "mxfp8": Mxfp8Recipe(),
    "nvfp4": Nvfp4Recipe(),
    "mxfp8-stochastic": Mxfp8Recipe(rounding="stochastic", seed=3),
    "nvfp4-stochastic": Nvfp4Recipe(rounding="stochastic", seed=3),
}
NEAREST = [name for name in RECIPES if "stochastic" not in name]
"""Stochastic rounding looks at the last bits of weights, which differ where sums have another order."""
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LAYOUTS: list[tuple[str, str | None, tuple[int, ...]]] = [
    *((strategy, None, (n,)) for strategy in STRATEGIES for n in (1, 2)),
    *(("optim_grads_params", None, (n,)) for n in (3, 4)),
    *((strategy, outer, (2, 2)) for strategy in ("optim_grads_params", "optim") for outer in ("no_shard", "optim")),
]
EVEN = [each for each in LAYOUTS if math.prod(each[2]) in (2, 4)]
"""Layouts without padding."""


def policy_of(name: str, **options: Any) -> MixedPrecisionPolicy:
    recipe = RECIPES[name]
    return MixedPrecisionPolicy(**{recipe.name: recipe}, **options)


def quantized(name: str, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return what a whole weight becomes, in one piece."""
    form = RECIPES[name].format
    flat = weight.detach().float().contiguous().view(-1)
    geometry = form.geometry(weight.shape)
    payload = torch.zeros(math.ceil(flat.numel() / form.elements_per_byte), dtype=torch.uint8, device=weight.device)
    scales = torch.zeros(geometry.num_scales * form.scale_bytes, dtype=torch.uint8, device=weight.device)
    amax = flat.abs().max() if form.needs_amax else None
    form.quantize(flat, weight.shape, payload, scales, amax=amax)
    out = torch.empty(flat.numel(), dtype=dtype or weight.dtype, device=weight.device)
    form.dequantize(payload, scales, weight.shape, out, amax=amax)
    return out.view(weight.shape)


def _named(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Several(nn.Module):
    """Matrices of one unit with gaps between them, of which every row has whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 7)
        self.down = nn.Linear(32, 5, bias=False)
        self.gate = nn.Linear(96, 3)


class Wide(nn.Module):
    """Matrices of many sizes: rows of whole blocks and not, fewer rows than ranks, a convolution, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict(
                    {"even": nn.Linear(64, 96), "odd": nn.Linear(41, 7), "row": nn.Linear(33, 1, bias=False)}
                ),
                nn.ModuleDict({"large": nn.Linear(130, 257), "conv": nn.Conv2d(3, 5, 3)}),
                nn.ModuleDict({"several": Several()}),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _weights_of_all(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    for name in RECIPES:
        for dtype in (torch.bfloat16, torch.float32):
            _weights_of(name, strategy, outer, shape, dtype)


def _weights_of(name: str, strategy: str, outer: str | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = Wide().to(DEVICE, dtype)
    for index, parameter in enumerate(model.parameters()):
        # Magnitudes that differ between rows, tensors, and elements.
        with torch.no_grad():
            parameter.mul_(
                torch.logspace(-3, 3, parameter.shape[0], device=DEVICE).view(-1, *[1] * (parameter.ndim - 1))
            )
            parameter.mul_(10.0 ** (index % 3))
    whole = {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}
    placements = Placements.from_strategy(strategy, outer=outer)
    with fully_shard_context(DEVICE):
        units = [
            fully_shard(unit, lasting_mesh(shape), placements, policy_of(name))
            for layer in model.layers
            for unit in layer.values()
        ]
    for unit in units:
        unit.unshard()
        for fqn, parameter in unit.named_parameters():
            prefix = next(path for path, module in model.named_modules() if module is unit)
            original = whole[f"{prefix}.{fqn}"]
            expected = quantized(name, original) if original.ndim > 1 else original
            assert parameter.dtype == dtype
            assert torch.equal(parameter.detach(), expected), (fqn, original.shape)
        unit.reshard()


@pytest.mark.parametrize(("strategy", "outer", "shape"), LAYOUTS, ids=_named)
def test_shards_have_the_bits_of_the_whole(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    """Every format, on every number of ranks that there is a layout for."""
    run_ranks(math.prod(shape), _weights_of_all, strategy, outer, shape)


# --- training ---------------------------------------------------------------------------------------------------------


def _save(run: Run) -> bytes:
    buffer = io.BytesIO()
    torch.save(run, buffer)
    return buffer.getvalue()


def _train(recipe: Recipe) -> bytes:
    return _save(run_sharded(recipe))


def _load(answers: list[bytes]) -> list[Run]:
    return [torch.load(io.BytesIO(answer), weights_only=False) for answer in answers]


def _reference(name: str, recipe: Recipe, world_size: int) -> Run:
    def compute(fqn: str, weight: torch.Tensor) -> torch.Tensor:
        return quantized(name, weight) if weight.ndim > 1 and "embedding" not in fqn else weight

    return run_reference(recipe, world_size, compute)


@pytest.mark.parametrize("name", NEAREST)
@pytest.mark.parametrize("model", ["mlp", "convolutions"])
def test_training_equals_one_process(name: str, model: str) -> None:
    """In float32, so that only quantization is narrow; two ranks of different data, three microbatches."""
    recipe = Recipe(model=model, microbatches=3, policy=policy_of(name))
    for run in _load(run_ranks(2, _train, recipe)):
        assert_parity(run, _reference(name, recipe, 2), rtol=1e-5, atol=1e-6)


def _bits(run: Run) -> list[torch.Tensor]:
    states = [value for _, state in sorted(run.state.items()) for _, value in sorted(state.items())]
    return [torch.tensor(run.losses), torch.tensor(run.norms), *run.weights.values(), *states]


def _assert_same_bits(runs: list[Run]) -> None:
    for run in runs[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(_bits(run), _bits(runs[0]), strict=True))


def _train_all(recipes: list[Recipe]) -> bytes:
    buffer = io.BytesIO()
    torch.save([run_sharded(recipe) for recipe in recipes], buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", RECIPES)
def test_all_strategies_have_the_same_bits(name: str) -> None:
    """On two ranks, where a sum has one order; HSDP and HFSDP with two ranks on either axis."""
    base = Recipe(dtype=torch.bfloat16, policy=policy_of(name, main_grads_dtype=torch.float32))
    recipes = [
        replace(base, mesh=shape, shard={"placements": Placements.from_strategy(strategy, outer=outer)})
        for strategy, outer, shape in (
            *((strategy, None, (2,)) for strategy in STRATEGIES),
            *(("optim_grads_params", outer, shape) for outer in ("no_shard", "optim") for shape in ((1, 2), (2, 1))),
        )
    ]
    for answer in run_ranks(2, _train_all, recipes):
        _assert_same_bits(torch.load(io.BytesIO(answer), weights_only=False))


@pytest.mark.parametrize("name", ["fp8-row", "nvfp4"])
def test_no_schedule_changes_a_bit(name: str) -> None:
    """Prefetch, weights kept whole or by a few ranks, a pool, one stream, joint accumulation: the same numbers."""
    base = Recipe(dtype=torch.bfloat16, microbatches=2, policy=policy_of(name, main_grads_dtype=torch.float32), steps=3)
    recipes = [
        base,
        replace(base, shard={"reshard_after_forward": False}),
        replace(base, shard={"reshard_after_forward": 2}),
        replace(base, shard={"reshard_after_forward": False, "placements": Placements.from_strategy("optim_grads")}),
        replace(base, shard={"schedule_policy": SchedulePolicy(0, 0)}),
        replace(base, shard={"schedule_policy": SchedulePolicy(3, 2)}),
        replace(base, context={"trace_pool": True}),
        replace(base, context={"unify_communication_stream": True}),
        replace(base, context={"separate_communicators": True}),
    ]
    for answer in run_ranks(4, _train_all, recipes):
        _assert_same_bits(torch.load(io.BytesIO(answer), weights_only=False))


@pytest.mark.parametrize("model", ["tied", "frozen", "convolutions", "mlp"])
@pytest.mark.parametrize("name", ["fp8-row", "nvfp4"])
def test_models_of_all_kinds_have_the_same_bits_under_all_strategies(name: str, model: str) -> None:
    base = Recipe(model=model, steps=4, policy=policy_of(name))
    recipes = [
        replace(base, shard={"placements": Placements.from_strategy(strategy)})
        for strategy in ("no_shard", "optim_grads_params")
    ]
    for answer in run_ranks(2, _train_all, recipes):
        _assert_same_bits(torch.load(io.BytesIO(answer), weights_only=False))


# --- what travels and rests -------------------------------------------------------------------------------------------

DEPTH, WIDTH = 3, 512
PLANES = {
    "fp8-tensor": [WIDTH * WIDTH],
    "fp8-row": [WIDTH * WIDTH, 4 * WIDTH],
    "fp8-block": [WIDTH * WIDTH, 4 * (WIDTH // 128) ** 2],
    "mxfp8": [WIDTH * WIDTH, WIDTH * WIDTH // 32],
    "nvfp4": [WIDTH * WIDTH // 2, WIDTH * WIDTH // 16],
}
"""Bytes of payload and scales of a square matrix."""
SCALED_AS_A_WHOLE = ("fp8-tensor", "nvfp4")
MOST = {"mxfp8": 0.53, "nvfp4": 0.29}
"""Of what bfloat16 would send."""


class Tower(nn.Module):
    """Equal square matrices, each a unit, below a root without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _build_tower(name: str | None, placements: Placements, shape: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    model = Tower().to(DEVICE, torch.bfloat16)
    policy = MixedPrecisionPolicy() if name is None else policy_of(name)
    with fully_shard_context(DEVICE) as context:
        for layer in model.layers:
            fully_shard(layer, lasting_mesh(shape), placements, policy)
        fully_shard(model, lasting_mesh(shape), placements, policy)
    return model, context


def _step_of_tower(name: str, strategy: str, outer: str | None, shape: tuple[int, ...]) -> list[Any]:
    """Return the collectives of the second step, with two microbatches."""
    placements = Placements.from_strategy(strategy, outer=outer)
    model, context = _build_tower(name, placements, shape)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with CollectiveLog() as log:
            for index in range(2):
                with microbatch(context, is_last=index == 1):
                    model(torch.randn(4, WIDTH, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return log.entries


def _plane_gathers(name: str, placements: Placements, shape: tuple[int, ...]) -> Counter[Any]:
    """Return the gathers of a step of two microbatches, by formula."""
    expected: Counter[Any] = Counter()
    for num_bytes in PLANES[name]:
        cost = Cost(placements, shape, DEPTH, num_bytes, 1, 4, False)
        expected += cost.collectives(2, "torch.uint8", "torch.float32")
    if name in SCALED_AS_A_WHOLE:
        for size, at in zip(shape, placements.optimizer, strict=True):
            if at.is_shard():
                expected["all_gather", "torch.float32", DEPTH * size, size] += 1
    return Counter({key: count for key, count in expected.items() if key[0] == "all_gather" and key[3] > 1})


def _log_all(strategy: str, outer: str | None, shape: tuple[int, ...]) -> dict[str, list[Any]]:
    return {name: _step_of_tower(name, strategy, outer, shape) for name in NEAREST}


@pytest.mark.parametrize(("strategy", "outer", "shape"), EVEN, ids=_named)
def test_low_bit_planes_are_all_that_is_gathered(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    """The planes in each pass or step, as placements say, and one small collective per axis for scales of tensors."""
    placements = Placements.from_strategy(strategy, outer=outer)
    for name, log in run_ranks(math.prod(shape), _log_all, strategy, outer, shape)[0].items():
        gathered = Counter(entry for entry in log if entry[0] == "all_gather" and entry[3] > 1)
        assert gathered == _plane_gathers(name, placements, shape), name


@pytest.mark.parametrize("name", MOST)
def test_a_pass_sends_the_share_of_bfloat16_that_the_format_promises(name: str) -> None:
    """Forward and backward of two microbatches are four passes over all units."""
    log = run_ranks(2, _step_of_tower, name, "optim_grads_params", None, (2,))[0]
    sent = sum(numel * getattr(torch, dtype[6:]).itemsize for kind, dtype, numel, _ in log if kind == "all_gather")
    assert sent <= MOST[name] * 4 * DEPTH * 2 * WIDTH * WIDTH


def _rest_of_tower(name: str, placements: Placements, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes of buffers at rest, and at the peak of an evaluation, which holds no gradients."""
    # gloo's thread lets go of the tensors of its last call with the next one.
    dist.barrier()
    before = default_allocator.allocated_bytes
    model, _ = _build_tower(name, placements, shape)
    x = torch.randn(4, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
        rest = default_allocator.allocated_bytes - before
        default_allocator.reset_peak()
        model(x)
    return rest, default_allocator.peak_bytes - before


def _rest_of_all(placements: Placements, shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    return {name: _rest_of_tower(name, placements, shape) for name in NEAREST}


@pytest.mark.parametrize(("strategy", "outer", "shape"), EVEN, ids=_named)
def test_bytes_at_rest_and_at_the_peak(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    """At rest planes and main weights; at the peak two units of compute weights, and the planes of one."""
    placements = Placements.from_strategy(strategy, outer=outer)
    shards = {
        field: math.prod(size for size, at in zip(shape, getattr(placements, field), strict=True) if at.is_shard())
        for field in ("parameter", "optimizer")
    }
    for answer in run_ranks(math.prod(shape), _rest_of_all, placements, shape):
        for name, (rest, peak) in answer.items():
            planes, numel = sum(PLANES[name]), WIDTH * WIDTH
            expected = DEPTH * (planes / shards["parameter"] + 4 * numel / shards["optimizer"])
            assert rest == expected, name
            assert peak == expected + 2 * 2 * numel + (planes if shards["parameter"] > 1 else 0), name


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _pass_on(folder: str, names: list[str | None]) -> list[dict[str, torch.Tensor]]:
    """Save after two steps, and load and save again under each further policy; return the main weights each time."""
    seen = []
    for number, name in enumerate(names):
        model, _ = _build_tower(name, Placements.from_strategy("optim_grads_params"), (dist.get_world_size(),))
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        if number:
            load_checkpoint(model, optimizer, f"{folder}/{number - 1}")
        else:
            for _ in range(2):
                model(torch.randn(4, WIDTH, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        seen.append({fqn: parameter.full_tensor() for fqn, parameter in model.named_parameters()})
        if name is not None:
            layer = model.layers[1]
            layer.unshard()
            expected = quantized(name, seen[-1]["layers.1.weight"], torch.bfloat16)
            assert torch.equal(layer.weight.detach(), expected), "compute weights are made anew after a load"
            layer.reshard()
        save_checkpoint(model, optimizer, f"{folder}/{number}")
    return seen


def test_main_weights_pass_through_checkpoints_of_all_formats(tmp_path: Path) -> None:
    names = [None, "mxfp8", None, "nvfp4", "fp8-block", "fp8-row", "fp8-tensor", None]
    for seen in run_ranks(2, _pass_on, str(tmp_path), names):
        for weights in seen[1:]:
            assert weights.keys() == seen[0].keys()
            assert all(torch.equal(weight, seen[0][fqn]) for fqn, weight in weights.items())


# --- when weights are made --------------------------------------------------------------------------------------------


def _count_quantizations(strategy: str) -> list[int]:
    """Return how many tensors this rank has quantized after each of several points."""
    model, context = _build_tower("nvfp4", Placements.from_strategy(strategy), (2,))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    counted = [0]

    def counting(quantize: Callable[..., None]) -> Callable[..., None]:
        def count(*args: Any, **options: Any) -> None:
            counted[-1] += 1
            quantize(*args, **options)

        return count

    for group in context.parameter_groups():
        assert isinstance(group, QuantizedGroup)
        object.__setattr__(group.format, "quantize", counting(group.format.quantize))
    x = torch.randn(4, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(2):
        for index in range(3):
            with microbatch(context, is_last=index == 2):
                model(x).float().sum().backward()
        with torch.no_grad():
            model(x)
        counted.append(0)
        optimizer.step()
        optimizer.zero_grad()
    model(x).float().sum().backward()
    counted.append(0)
    with torch.no_grad():
        model.layers[0].weight.mul_(2.0)
    model(x).float().sum().backward()
    return counted


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_quantized_once_a_step_and_after_a_write(strategy: str) -> None:
    """Three microbatches and an evaluation a step; afterwards one of the three units is written, on both ranks."""
    for counted in run_ranks(2, _count_quantizations, strategy):
        assert counted == [DEPTH, DEPTH, DEPTH, 1]


def _write_what_has_not_run(name: str, shares_mesh: bool) -> tuple[float, int]:
    """Train one of two units, then write the other one through its local tensor, 1000 times as large; return how far
    its compute weights are from that, and the gathers of magnitudes of one step.
    """
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2)).to(DEVICE, torch.bfloat16)
    mesh = lasting_mesh((2,)) if shares_mesh else None
    units = [fully_shard(unit, mesh, mixed_precision_policy=policy_of(name)) for unit in model]
    fully_shard(model, mesh, mixed_precision_policy=policy_of(name))
    model.unshard()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 64, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(2):
        with CollectiveLog() as log:
            units[0](x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        units[0](x)
        units[1].weight.to_local().mul_(1000)
    units[1].unshard()
    wanted = units[1].weight.detach().float()
    units[1].reshard()
    expected = units[1].weight.full_tensor().float()
    num_gathers = sum(entry[0] == "all_gather" and entry[1] == "torch.float32" for entry in log.entries)
    return float((wanted - expected).norm() / expected.norm()), num_gathers


@pytest.mark.parametrize("shares_mesh", [True, False])
@pytest.mark.parametrize("name", NEAREST)
def test_a_unit_that_has_not_run_is_quantized_by_its_own_magnitudes(name: str, shares_mesh: bool) -> None:
    """Its magnitudes were asked for with the other unit's, before it was written."""
    for error, num_gathers in run_ranks(2, _write_what_has_not_run, name, shares_mesh):
        assert error < (0.2 if name == "nvfp4" else 0.05)
        assert num_gathers == (name in SCALED_AS_A_WHOLE)


def _other_default_dtype(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        _weights_of(name, "optim_grads_params", None, (2,), torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", SCALED_AS_A_WHOLE)
def test_magnitudes_are_float32_whatever_the_default_is(name: str) -> None:
    run_ranks(2, _other_default_dtype, name)


def _empty_matrices(name: str) -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.zeros(4, 0, device=DEVICE))
    model.none = nn.Parameter(torch.zeros(0, 4, device=DEVICE))
    model.some = nn.Parameter(torch.randn(3, 5, device=DEVICE))
    unit: Any = fully_shard(model, lasting_mesh((2,)), mixed_precision_policy=policy_of(name))
    expected = quantized(name, unit.some.full_tensor())
    unit.unshard()
    assert torch.equal(unit.some.detach(), expected) and unit.empty.shape == (4, 0)
    unit.reshard()


@pytest.mark.parametrize("name", NEAREST)
def test_matrices_without_elements(name: str) -> None:
    run_ranks(2, _empty_matrices, name)


def _padded() -> None:
    policy = policy_of("fp8-block")
    with pytest.warns(
        UserWarning, match=r"expected fewer bytes than in torch.bfloat16, got 2.00 times as many, since FP8"
    ):
        model = nn.Sequential(nn.Linear(256, 128, bias=False)).to(DEVICE, torch.bfloat16)
        with fully_shard_context(DEVICE):
            fully_shard(model, lasting_mesh((4,)), mixed_precision_policy=policy)


def test_blocks_that_make_gathers_larger_are_warned_of() -> None:
    """Four shards, of which one has the only block: four times the bytes of FP8."""
    run_ranks(4, _padded)


def _other_recipes() -> None:
    keep = ("*",) if dist.get_rank() == 0 else ()
    model = nn.Sequential(nn.Linear(32, 32)).to(DEVICE)
    with fully_shard_context(DEVICE):
        fully_shard(model, lasting_mesh((2,)), mixed_precision_policy=MixedPrecisionPolicy(fp8=Fp8Recipe(keep=keep)))


def test_ranks_with_other_recipes_are_named() -> None:
    """Also where one of them has nothing to quantize, which is an error by itself."""
    for error in run_ranks_expecting(2, RuntimeError, _other_recipes):
        assert "mixed_precision_policy" in error


def _graphs_without_pool() -> None:
    policy, placements = policy_of("mxfp8"), Placements.from_strategy("optim")
    fully_shard(nn.Linear(32, 32).to(DEVICE), lasting_mesh((1,)), placements, policy, cuda_graph=True)


def test_graphs_of_units_need_a_pool_where_weights_are_made_anew() -> None:
    (error,) = run_ranks_expecting(1, ValueError, _graphs_without_pool)
    assert "expected gathered weights at fixed addresses, got a context without a pool" in error


def _calls_of_several(recipe: Any) -> list[int]:
    """Return how often the format has quantized and dequantized when a unit of three matrices has been gathered."""
    with fully_shard_context(DEVICE) as context:
        unit: Any = fully_shard(Several().to(DEVICE), lasting_mesh((2,)), mixed_precision_policy=recipe)
    (group,) = (group for group in context.parameter_groups() if isinstance(group, QuantizedGroup))
    form = group.format
    kind = type(form)
    with (
        mock.patch.object(kind, "quantize", autospec=True, side_effect=kind.quantize) as quantize,
        mock.patch.object(kind, "dequantize", autospec=True, side_effect=kind.dequantize) as dequantize,
    ):
        unit.unshard()
        unit.reshard()
    return [quantize.call_count, dequantize.call_count]


def test_matrices_that_are_one_vector_to_the_format_take_one_call() -> None:
    """Their bits are those of single ones in any case (`test_shards_have_the_bits_of_the_whole`)."""
    assert run_ranks(2, _calls_of_several, MixedPrecisionPolicy(mxfp8=True))[0] == [1, 1]
    stochastic = MixedPrecisionPolicy(mxfp8=Mxfp8Recipe(rounding="stochastic"))
    num_parts, num_calls = run_ranks(2, _calls_of_several, stochastic)[0]
    assert num_parts >= 1 and num_calls == 1
    assert run_ranks(2, _calls_of_several, MixedPrecisionPolicy(nvfp4=True))[0][1] == 3
