# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's primary weights, with doubles of its classes: bytes, planes, what travels, what is refused."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    Fp8Recipe,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    check_shardable,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    is_primary_weight,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.experimental.te_group import TransformerEngineGroup
from tests.unit_tests import te_double as te
from tests.unit_tests.launch import DEVICE, lasting_mesh, run_ranks
from tests.unit_tests.trace import CollectiveLog

RECIPES = list(te.QUANTIZERS)
MADE = [name for name in RECIPES if name != "mxfp8"]
"""Recipes with transposes."""
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LAYOUTS: list[tuple[str, str | None, tuple[int, ...]]] = [
    *((strategy, None, (2,)) for strategy in STRATEGIES),
    *(("optim_grads_params", None, (n,)) for n in (1, 3, 4)),
    *((strategy, outer, (2, 2)) for strategy in ("optim_grads_params", "optim") for outer in ("no_shard", "optim")),
]
DEPTH, WIDTH, HIDDEN = 3, 128, 384


class Block(nn.Module):
    """Two linear layers whose weights are primary ones, and a norm whose weight is not."""

    def __init__(self, recipe: str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = te.Linear(WIDTH, HIDDEN, recipe, dtype)
        self.down = te.Linear(HIDDEN, WIDTH, recipe, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, each a unit, and whether all are computed again in backward."""

    def __init__(self, recipe: str | None, dtype: torch.dtype = torch.bfloat16, recomputes: str = "none") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recipe, dtype) for _ in range(DEPTH))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.recomputes == "units":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = te.checkpoint(block, x) if self.recomputes == "units, by TransformerEngine" else block(x)
        return x


class PartlyRecomputed(Block):
    """A block of which one layer alone is computed again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.up, self.norm(x), use_reentrant=False)
        return x + self.down(torch.tanh(y))


def _build(
    recipe: str | None,
    strategy: str = "optim_grads_params",
    outer: str | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    seed: int = 0,
    policy: MixedPrecisionPolicy | None = None,
    context: dict[str, Any] | None = None,
    recomputes: str = "none",
    **options: Any,
) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Stack(recipe, recomputes=recomputes)
    if recomputes == "layers":
        for block in model.blocks:
            block.__class__ = PartlyRecomputed
    mesh = lasting_mesh(shape or (dist.get_world_size(),))
    placements = Placements.from_strategy(strategy, outer=outer)
    with fully_shard_context(DEVICE, **(context or {})) as found:
        for block in model.blocks:
            fully_shard(block, mesh, placements, policy, **options)
        fully_shard(model, mesh, placements, policy)
    return model, found


def _train(model: Any, context: Any, steps: int = 4, microbatches: int = 2, lr: float = 0.01) -> list[float]:
    """Train on this rank's data; return losses."""
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=lr))
    losses = []
    for step in range(steps):
        for index in range(microbatches):
            generator = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank())
            x = torch.randn(8, WIDTH, generator=generator).bfloat16().to(DEVICE)
            with microbatch(context, is_last=index == microbatches - 1):
                loss = model(x).float().square().mean()
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _groups(model: Any) -> list[TransformerEngineGroup]:
    units = [module for module in model.modules() if isinstance(module, FsdpModule)]
    return [group for unit in units for group in unit.parameter_groups if isinstance(group, TransformerEngineGroup)]


def _primary(model: Any) -> list[Any]:
    return [parameter for group in _groups(model) for parameter in group.unsharded_parameters]


def _named(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- bytes ------------------------------------------------------------------------------------------------------------

SHAPES = {
    "delayed": [(41, 7), (3, 5), (384, 256)],
    "tensorwise": [(41, 7), (3, 5), (384, 256)],
    "blockwise": [(384, 512), (200, 400), (129, 130), (64, 8)],
    "mxfp8": [(384, 256), (32, 32), (96, 160), (256, 128)],
    "nvfp4": [(384, 256), (16, 32), (48, 80), (128, 64)],
}
ROWS = {"delayed": ("_data", "_scale_inv"), "tensorwise": ("_data", "_scale_inv")}
PLANES = ("_rowwise_data", "_rowwise_scale_inv")
COLUMNS = ("_columnwise_data", "_columnwise_scale_inv")


class Weights(nn.Module):
    """Primary weights of many sizes, and of many magnitudes."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number, (rows, columns) in enumerate(SHAPES[recipe]):
            layer = te.Linear(columns, rows, recipe)
            values = (torch.randn(rows, columns) * torch.logspace(-2, 2, columns) * 10.0**number).bfloat16()
            layer.weight = te.primary(values, te.QUANTIZERS[recipe]())
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: one element may be contiguous with any stride, which a view in bytes does not accept.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _same_bytes(found: Any, expected: Any, name: str) -> None:
    ours, theirs = getattr(found, name), getattr(expected, name)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (name, ours.shape, theirs.shape)
    assert ours.is_contiguous()
    assert torch.equal(_bytes_of(ours), _bytes_of(theirs)), name


def _check_bytes(recipe: str, strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    model: Any = Weights(recipe)
    values = [layer.weight.get_high_precision_init_val() for layer in model.layers]
    quantizers = [layer.weight._quantizer for layer in model.layers]
    with fully_shard_context(DEVICE):
        fully_shard(model, lasting_mesh(shape), Placements.from_strategy(strategy, outer=outer))
    for _ in range(2):
        model.unshard()
        for layer, value, quantizer in zip(model.layers, values, quantizers, strict=True):
            weight = layer.weight
            if recipe == "delayed":
                assert quantizer.amax == value.float().abs().max(), "the module's own maximum is noted"
            expected = quantizer.copy()(value.to(DEVICE))
            for name in ROWS.get(recipe, PLANES):
                _same_bytes(weight, expected, name)
            assert weight.dtype == torch.bfloat16 and weight.shape == value.shape
            assert torch.equal(weight.by_rows(), expected.by_rows())
            if recipe == "nvfp4":
                assert torch.equal(weight._amax_rowwise, expected._amax_rowwise)
            if recipe == "delayed":
                quantizer.amax.zero_()
        model.reshard()
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        values = [parameter.full_tensor().bfloat16().cpu() for parameter in model.parameters()]


def _check_all_bytes(*layout: Any) -> None:
    for recipe in RECIPES:
        _check_bytes(recipe, *layout)


@pytest.mark.parametrize(("strategy", "outer", "shape"), LAYOUTS, ids=_named)
def test_planes_have_the_bytes_of_the_whole(strategy: str, outer: str | None, shape: tuple[int, ...]) -> None:
    """Of initial weights and of those after a step; every class, on every cut."""
    run_ranks(math.prod(shape), _check_all_bytes, strategy, outer, shape)


def _columns_in_backward(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    model: Any = Weights("mxfp8")
    values = [layer.weight.get_high_precision_init_val() for layer in model.layers]
    with fully_shard_context(DEVICE):
        fully_shard(model, lasting_mesh(shape))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            model.unshard()
            for layer, value in zip(model.layers, values, strict=True):
                expected = te.MXFP8Quantizer()(value.to(DEVICE))
                assert layer.weight._rowwise_data is None
                for name in COLUMNS:
                    _same_bytes(layer.weight, expected, name)
            model.reshard()
            return dy

    Probe.apply(torch.ones(1, device=DEVICE, requires_grad=True)).backward()


@pytest.mark.parametrize("shape", [(1,), (2,), (3,)], ids=_named)
def test_mxfp8_has_the_column_planes_bytes_in_backward(shape: tuple[int, ...]) -> None:
    run_ranks(math.prod(shape), _columns_in_backward, shape)


def _lost_weights() -> None:
    for recipe in RECIPES:
        torch.manual_seed(0)
        model: Any = Stack(recipe)
        model.blocks[0].up.weight.get_high_precision_init_val()[5, 7] = math.inf
        with fully_shard_context(DEVICE):
            fully_shard(model.blocks[0])
        model.blocks[0].unshard()
        assert model.blocks[0].up.weight.by_rows().isnan().any(), recipe
        assert model.blocks[0].down.weight.by_rows().isfinite().all(), recipe
        model.blocks[0].reshard()


def test_a_weight_that_has_overflowed_is_seen() -> None:
    run_ranks(2, _lost_weights)


# --- grouping ---------------------------------------------------------------------------------------------------------


def _grouping() -> None:
    torch.manual_seed(0)
    module: Any = nn.Module()
    recipes = ("tensorwise", "blockwise", "tensorwise", None, "mxfp8", "delayed")
    module.layers = nn.ModuleList(te.Linear(64, 64, recipe) for recipe in recipes)
    originals = [layer.weight for layer in module.layers]
    originals[0].tensor_model_parallel = True
    module.forward = lambda x: x
    fully_shard(module)
    assert [group.fqns for group in module.parameter_groups] == [
        ["layers.0.weight", "layers.2.weight"],
        *([f"layers.{number}.weight"] for number in (1, 3, 4, 5)),
    ]
    kinds = [type(group) is TransformerEngineGroup for group in module.parameter_groups]
    assert kinds == [True, True, False, True, True]
    for group in module.parameter_groups:
        assert group.main_weight.dtype == torch.float32
    module.unshard()
    for layer, original in zip(module.layers, originals, strict=True):
        weight = layer.weight
        assert type(weight) is type(original) or not is_primary_weight(original)
        assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
        if is_primary_weight(original):
            assert not hasattr(weight, "_high_precision_init_val") and not hasattr(original, "_high_precision_init_val")
            assert weight._quantizer.columnwise_usage is False, "forward makes no transposes"
    assert module.layers[0].weight.tensor_model_parallel and module.parameter_groups[0].gathers
    module.reshard()
    assert module.layers[0].weight.tensor_model_parallel and not hasattr(module.layers[2].weight, "_quantizer")
    with pytest.raises(ValueError, match=r"got weight, which unit .* has sharded already"):
        again: Any = nn.Module()
        again.weight = originals[0]
        again.forward = lambda x: x
        fully_shard(again)


def test_weights_of_one_kind_form_a_group() -> None:
    run_ranks(2, _grouping)


# --- training ---------------------------------------------------------------------------------------------------------


def _bits(model: Any, losses: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(losses), *(parameter.full_tensor().cpu() for parameter in model.parameters())]


def _runs_of(recipe: str, variants: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    found = []
    for variant in variants:
        model, context = _build(recipe, **variant)
        found.append(_bits(model, _train(model, context)))
    torch.save(found, buffer)
    return buffer.getvalue()


def _assert_same(answers: list[bytes]) -> None:
    for answer in answers:
        first, *others = torch.load(io.BytesIO(answer))
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        assert len({value.item() for value in first[0]}) == len(first[0]), "every microbatch differs"


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_strategies_have_the_same_bits(recipe: str) -> None:
    """On two ranks, where a sum has one order; HSDP and HFSDP with two ranks on either axis."""
    variants: list[dict[str, Any]] = [
        *({"strategy": strategy} for strategy in STRATEGIES),
        *({"outer": outer, "shape": shape} for outer in ("no_shard", "optim") for shape in ((1, 2), (2, 1))),
    ]
    _assert_same(run_ranks(2, _runs_of, recipe, variants))


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_schedule_changes_a_bit(recipe: str) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"reshard_after_forward": False},
        {"schedule_policy": SchedulePolicy(0, 0)},
        {"schedule_policy": SchedulePolicy(3, 2)},
        {"context": {"trace_pool": True}},
        {"context": {"unify_communication_stream": True}},
    ]
    if recipe in MADE:
        variants.append({"policy": MixedPrecisionPolicy(keep_fp8_transpose_cache=True)})
    if recipe != "delayed":
        # A delayed scale moves whenever a forward ends, also one that is computed again.
        variants += [{"recomputes": kind} for kind in ("units", "units, by TransformerEngine", "layers")]
    _assert_same(run_ranks(2, _runs_of, recipe, variants))


def _beside_plain_weights(recipe: str) -> tuple[list[float], list[float]]:
    """Return losses with primary weights, and with bf16 weights that are quantized before each use."""
    model, context = _build(recipe)
    ours = _train(model, context)
    plain, context = _build(None)

    def quantized(layer: Any, args: Any) -> None:
        if isinstance(layer.weight, nn.Parameter) and not isinstance(layer.weight, te.QuantizedTensor):
            layer.made = te.QUANTIZERS[recipe]()(layer.weight.detach())

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, made: Any) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.made, ctx.columns = made, made.by_columns()
            return x @ made.by_rows().to(x.dtype).t()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            gradient = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            return dy @ ctx.columns.to(dy.dtype), gradient, None

    class Quantizing(te.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            quantized(self, ())
            y: torch.Tensor = Straight.apply(x, self.weight, self.made)
            return y

    for module in plain.modules():
        if type(module) is te.Linear:
            module.__class__ = Quantizing
    return ours, _train(plain, context)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_losses_are_those_of_gathered_bf16_weights(recipe: str) -> None:
    """So that a run can change from one to the other: values are rounded to bf16 before they are quantized."""
    for ours, plain in run_ranks(2, _beside_plain_weights, recipe):
        assert ours == plain


# --- planes, transposes, and what travels -----------------------------------------------------------------------------


def _views(recipe: str) -> None:
    model, context = _build(recipe)
    _train(model, context, steps=1)
    block, (group, *_) = model.blocks[1], _groups(model.blocks[1])
    block.unshard()
    storages = {buffer.local.untyped_storage()._cdata for buffer in group.buffers}
    for parameter in group.unsharded_parameters:
        planes = [getattr(parameter, name) for name in ROWS.get(recipe, PLANES)]
        assert planes[0].untyped_storage()._cdata == group.full_weight.local.untyped_storage()._cdata
        assert len(planes[1]) == 1 or planes[1].untyped_storage()._cdata in storages
    assert group.full_weight.local.untyped_storage().nbytes() > 0
    block.reshard()
    assert group.full_weight.local.untyped_storage().nbytes() == 0, "released"
    assert all(buffer.local.untyped_storage().nbytes() == 0 for buffer in group.buffers if buffer.is_transient)


@pytest.mark.parametrize("recipe", RECIPES)
def test_planes_are_views_of_what_is_gathered(recipe: str) -> None:
    run_ranks(2, _views, recipe)


def _misplaced(recipe: str, strategy: str, pools: bool) -> list[tuple[str, int]]:
    """Return what lies where cuBLAS cannot read it, of all tensors that modules pass on in a step."""
    model, _ = _build(recipe, strategy, context={"trace_pool": pools})
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    names = (*ROWS["delayed"], *PLANES, *COLUMNS, "_transpose", "_amax_rowwise", "_amax_columnwise")
    seen: dict[str, set[int]] = {}

    def look(*_: Any) -> None:
        for weight in (layer.weight for layer in model.modules() if isinstance(layer, te.Linear)):
            for name in names:
                tensor = getattr(weight, name, None)
                if tensor is not None and tensor.untyped_storage().nbytes():
                    seen.setdefault(name, set()).add(tensor.data_ptr() % 16)
                    assert tensor.is_contiguous(), name

    for block in model.blocks:
        block.up.register_forward_hook(look)
        block.up.register_full_backward_hook(look)
    for _ in range(3):
        model(torch.randn(4, WIDTH).bfloat16().to(DEVICE).requires_grad_()).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) >= 2, seen
    return [(name, remainder) for name, remainders in seen.items() for remainder in sorted(remainders - {0})]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("strategy", "pools"), [("optim", False), ("optim_grads_params", False), ("optim_grads_params", True)]
)
def test_what_products_read_begins_at_multiples_of_16_bytes(recipe: str, strategy: str, pools: bool) -> None:
    """cuBLAS refuses elements and scales that lie elsewhere, those of a whole tensor, too."""
    assert run_ranks(3, _misplaced, recipe, strategy, pools) == [[]] * 3


def _made(parameter: Any) -> bool:
    return (
        getattr(parameter, "_transpose", None) is not None or getattr(parameter, "_columnwise_data", None) is not None
    )


def _transposes(recipe: str, strategy: str, keeps: bool) -> list[int]:
    """Return how many parameters have transposes after forward, after backward, and after the next gather."""
    policy = MixedPrecisionPolicy(keep_fp8_transpose_cache=keeps)
    model, _ = _build(recipe, strategy, policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    parameters = _primary(model)
    x = torch.randn(4, WIDTH).bfloat16().to(DEVICE)
    counts = []
    y = model(x)
    counts.append(sum(map(_made, parameters)))
    y.float().sum().backward()
    counts.append(sum(map(_made, parameters)))
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    counts.append(sum(map(_made, parameters)))
    return counts


@pytest.mark.parametrize("recipe", MADE)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_transposes_are_dropped_at_rest_or_when_weights_change(recipe: str, strategy: str) -> None:
    everything = 2 * DEPTH
    assert run_ranks(2, _transposes, recipe, strategy, False) == [[0, 0, 0]] * 2
    assert run_ranks(2, _transposes, recipe, strategy, True) == [[0, everything, 0]] * 2


BYTES = {
    "delayed": [2 * WIDTH * HIDDEN],
    "tensorwise": [2 * WIDTH * HIDDEN],
    "blockwise": [2 * WIDTH * HIDDEN, 2 * 3 * 4],
    "mxfp8": [2 * WIDTH * HIDDEN, 2 * WIDTH * HIDDEN // 32],
    "nvfp4": [WIDTH * HIDDEN, 2 * WIDTH * HIDDEN // 256],
}
"""Of the planes of one block's weights."""


def _log(recipe: str, recomputes: str) -> tuple[Counter[Any], dict[str, list[Any]]]:
    """Return the gathers of the second step with two microbatches, and those of forward and of backward."""
    model, context = _build(recipe, recomputes=recomputes)
    _train(model, context, steps=1, lr=0.1)
    x = torch.randn(4, WIDTH).bfloat16().to(DEVICE)
    phases: dict[str, list[Any]] = {"forward": [], "backward": []}
    for _ in range(2):
        with CollectiveLog() as log:
            y = model(x)
        phases["forward"] += log.entries
        with CollectiveLog() as log:
            y.float().sum().backward()
        phases["backward"] += log.entries
    low = {phase: [e for e in entries if e[0] == "all_gather" and "uint8" in e[1]] for phase, entries in phases.items()}
    amaxes = Counter(
        entry for entries in phases.values() for entry in entries if entry[0] == "all_gather" and "float32" in entry[1]
    )
    return amaxes, low


@pytest.mark.parametrize("recipe", RECIPES)
def test_low_bit_planes_are_all_that_is_gathered_of_them(recipe: str) -> None:
    """One set of planes per unit in forward, and one in backward; maxima of all tensors once in the step."""
    amaxes, low = run_ranks(2, _log, recipe, "none")[0]
    expected = Counter({("all_gather", "torch.float32", 2 * 2 * DEPTH, 2): 1})
    assert amaxes == (expected if recipe in ("delayed", "tensorwise", "nvfp4") else Counter())
    for entries in low.values():
        sizes = Counter(entry[2] for entry in entries)
        assert sizes == Counter(dict.fromkeys(BYTES[recipe], 2 * DEPTH))


def _planes_by_direction(recomputes: str) -> dict[str, list[str]]:
    """Return which planes of MXFP8 weights are gathered in each half of a step."""
    model, _ = _build("mxfp8", recomputes=recomputes)
    gathered: list[str] = []
    for group in _groups(model):
        for number, planes in enumerate(group.plane_sets):
            _count(planes, ("rows", "columns")[number], gathered)
    x = torch.randn(4, WIDTH).bfloat16().to(DEVICE)
    y = model(x)
    forward = list(gathered)
    gathered.clear()
    y.float().sum().backward()
    return {"forward": forward, "backward": gathered}


def _count(planes: Any, name: str, into: list[str]) -> None:
    gather: Callable[[], None] = planes.gather

    def counting() -> None:
        into.append(name)
        gather()

    planes.gather = counting


def test_mxfp8_gathers_rows_in_forward_and_columns_in_backward() -> None:
    for answer in run_ranks(2, _planes_by_direction, "none"):
        assert answer == {"forward": ["rows"] * DEPTH, "backward": ["columns"] * DEPTH}
    for kind in ("units", "layers"):
        for answer in run_ranks(2, _planes_by_direction, kind):
            assert answer["forward"] == ["rows"] * DEPTH
            assert Counter(answer["backward"]) == {"rows": DEPTH, "columns": DEPTH}, kind


def _fp8_modules() -> None:
    for strategy, primary, expected in (
        ("optim_grads_params", None, True),
        ("optim", None, False),
        ("optim_grads_params", "tensorwise", False),
    ):
        model, _ = _build(primary, strategy)
        layers = [module for module in model.modules() if isinstance(module, te.Linear)]
        assert [hasattr(layer, "_is_fsdp2") for layer in layers] == [expected] * len(layers), (strategy, primary)


def test_modules_that_quantize_gathered_weights_are_told_to_keep_no_copy() -> None:
    run_ranks(2, _fp8_modules)


# --- delayed scaling --------------------------------------------------------------------------------------------------


def _alone(steps: int) -> list[float]:
    """Train without shards, on the data of one rank: weights are quantized after each step."""
    torch.manual_seed(0)
    model = Stack("delayed")
    parameters = list(model.parameters())
    masters = []
    for parameter in parameters:
        values = parameter.get_high_precision_init_val() if is_primary_weight(parameter) else parameter.detach()
        masters.append(nn.Parameter(values.float()))
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    losses = []
    for step in range(steps):
        for index in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * index)
            loss = model(torch.randn(8, WIDTH, generator=generator).bfloat16()).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            for parameter, master in zip(parameters, masters, strict=True):
                assert parameter.grad is not None
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                if isinstance(parameter, te.QuantizedTensor):
                    new = parameter._quantizer(master.detach().bfloat16())
                    for name in ("_data", "_scale_inv", "_transpose"):
                        setattr(parameter, name, getattr(new, name))
                else:
                    parameter.copy_(master)
    return losses


def _delayed_beside_alone() -> None:
    model, context = _build("delayed")
    assert _train(model, context, steps=5) == _alone(5)


def test_delayed_scaling_is_transformer_engines() -> None:
    """The scale that a module's quantizer has, moved by maxima that each quantization notes."""
    run_ranks(1, _delayed_beside_alone)


def _scales_after_a_load(folder: str) -> None:
    model, context = _build("delayed")
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    _train(model, context, steps=2)
    save_checkpoint(model, optimizer, folder)
    loaded, _ = _build("delayed", seed=5)
    load_checkpoint(loaded, fully_shard_optimizer(torch.optim.AdamW(loaded.parameters(), lr=0.01)), folder)
    for block, saved in zip(loaded.blocks, model.blocks, strict=True):
        block.unshard()
        for name in ("up", "down"):
            weight, main = getattr(block, name).weight, getattr(saved, name).weight.full_tensor()
            rounded = main.bfloat16().float()
            expected = rounded.abs().max() / 448
            assert torch.allclose(weight._scale_inv, expected), "the weight's own"
            assert torch.equal(weight._data, te._e4m3(rounded * expected.reciprocal()))
        block.reshard()


def test_after_a_load_a_scale_that_has_not_moved_is_the_weights_own(tmp_path: Path) -> None:
    run_ranks(2, _scales_after_a_load, str(tmp_path / "saved"))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _pass_on(folder: str) -> list[dict[str, torch.Tensor]]:
    seen = []
    for number, recipe in enumerate([None, *RECIPES, None]):
        model, context = _build(recipe, seed=number)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        if number:
            load_checkpoint(model, optimizer, f"{folder}/{number - 1}")
        else:
            _train(model, context, steps=2)
        seen.append({fqn: parameter.full_tensor().cpu() for fqn, parameter in model.named_parameters()})
        save_checkpoint(model, optimizer, f"{folder}/{number}")
        assert all(value.dtype == torch.float32 for value in seen[-1].values())
    return seen


def test_main_weights_pass_through_checkpoints_of_all_recipes(tmp_path: Path) -> None:
    for seen in run_ranks(2, _pass_on, str(tmp_path)):
        for weights in seen[1:]:
            assert weights.keys() == seen[0].keys()
            assert all(torch.equal(weight, seen[0][fqn]) for fqn, weight in weights.items())


# --- refusals ---------------------------------------------------------------------------------------------------------


class IdentityTensor(te.Float8Tensor):
    """A class of TransformerEngine's that no kind describes."""


def _refuse(error: type[Exception], match: str, layer: Any, **options: Any) -> None:
    module: Any = nn.Sequential(layer)
    with pytest.raises(error, match=match):
        fully_shard(module, **options)
    assert not isinstance(module, FsdpModule)


def _changed(recipe: str, **settings: Any) -> Any:
    layer = te.Linear(64, 64, recipe)
    for name, value in settings.items():
        setattr(layer.weight if hasattr(layer.weight, name) else layer.weight._quantizer, name, value)
    return layer


def _refusals() -> None:
    unknown = te.Linear(64, 64, "tensorwise")
    unknown.weight.__class__ = IdentityTensor
    match = (
        r"expected TransformerEngine weights of one of the kinds .*Float8Tensor by Float8Quantizer.*got 0.weight, a Id"
    )
    _refuse(NotImplementedError, match, unknown)
    with pytest.raises(NotImplementedError, match="got weight, a IdentityTensor"):
        check_shardable([unknown])
    for recipe, name, value, expected in (
        ("tensorwise", "force_pow_2_scales", True, False),
        ("tensorwise", "_fp8_dtype", 8, 7),
        ("blockwise", "_is_2D_scaled", False, True),
        ("blockwise", "amax_epsilon", 0.5, 0.0),
        ("mxfp8", "with_2d_quantization", True, False),
        ("mxfp8", "_with_gemm_swizzled_scales", True, False),
        ("nvfp4", "with_2d_quantization", False, True),
        ("nvfp4", "nvfp4_use_4over6", True, False),
    ):
        found = rf"=?{expected}, got {value} for 0.weight.*Leave that setting"
        _refuse(NotImplementedError, found, _changed(recipe, **{name: value}))
    sizes = te.Linear(64, 64, "mxfp8")
    sizes.weight = te.primary(torch.randn(64, 64).bfloat16(), te.Float8CurrentScalingQuantizer())
    odd = te.primary(torch.randn(40, 64).bfloat16(), te.Float8CurrentScalingQuantizer())
    odd.__class__, odd._quantizer = te.MXFP8Tensor, te.MXFP8Quantizer()
    odd._with_gemm_swizzled_scales = False
    sizes.weight = odd
    _refuse(NotImplementedError, r"sizes that are multiples of 32, got \(40, 64\) for 0.weight, a MXFP8Tensor", sizes)
    without = te.Linear(64, 64, "tensorwise")
    without.weight.clear_high_precision_init_val()
    _refuse(ValueError, r"initial values in high precision, got none for 0.weight.*preserve_high_precision", without)
    later = te.Linear(64, 64, None)
    later.primary_weights_in_fp8 = True
    later.weight = nn.Parameter(torch.empty(64, 64, device="meta"))
    later.reset_parameters = lambda: None
    _refuse(NotImplementedError, r"primary weights on a real device, got \['weight'\] on the meta device", later)
    _refuse(
        ValueError,
        r"expected no MixedPrecisionPolicy.fp8 for weights .*got it for 0.weight. Use one of the two",
        te.Linear(64, 64, "tensorwise"),
        mixed_precision_policy=MixedPrecisionPolicy(fp8=Fp8Recipe()),
    )
    _refuse(
        NotImplementedError,
        "expected cuda_graph=False, got True; a unit's graph",
        te.Linear(64, 64, "tensorwise"),
        cuda_graph=True,
    )
    _refuse(
        NotImplementedError,
        "expected register_hooks=True, got False; which plane",
        te.Linear(64, 64, "mxfp8"),
        register_hooks=False,
    )


def test_refusals() -> None:
    run_ranks(1, _refusals)


def _refuse_a_few_ranks() -> None:
    match = "expected True, False or None for reshard_after_forward, got 2; a few ranks' copy has no scales"
    _refuse(NotImplementedError, match, te.Linear(64, 64, "tensorwise"), reshard_after_forward=2)


def test_a_few_ranks_cannot_keep_primary_weights() -> None:
    run_ranks(4, _refuse_a_few_ranks)


def _idle_transposes() -> None:
    policy = MixedPrecisionPolicy(keep_fp8_transpose_cache=True)
    for recipe in (None, "mxfp8"):
        match = (
            "keep_fp8_transpose_cache: expected TransformerEngine's primary weights that are transposed for backward"
        )
        with pytest.raises(ValueError, match=match):
            _build(recipe, policy=policy)
    with pytest.raises(ValueError, match="keep_fp8_transpose_cache: expected True or False, got 1"):
        replace(policy, keep_fp8_transpose_cache=1)  # type: ignore[arg-type]


def test_transposes_that_nobody_makes_are_not_kept() -> None:
    run_ranks(1, _idle_transposes)
