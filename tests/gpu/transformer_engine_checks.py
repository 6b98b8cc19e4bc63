# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The checks of tests/gpu/transformer_engine.py: shards of TransformerEngine's weights beside the library alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformer_engine.common import recipe as recipes

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    is_primary_weight,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.experimental.te_formats import (
    Mxfp8ColumnsFormat,
    Mxfp8RowsFormat,
    TiledNvfp4Format,
)

DEVICE = torch.device("cuda", 0)
_FORMAT = recipes.Format
RECIPES: dict[str, Any] = {
    "delayed": recipes.DelayedScaling(fp8_format=_FORMAT.HYBRID, amax_history_len=1, amax_compute_algo="most_recent"),
    "tensorwise": recipes.Float8CurrentScaling(fp8_format=_FORMAT.HYBRID),
    "blockwise": recipes.Float8BlockScaling(fp8_format=_FORMAT.E4M3),
}
CHECKS: dict[str, Callable[[], str]] = {}
WIDTH, HIDDEN, TOKENS, DEPTH = 512, 1536, 256, 3
PLANES = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
MADE = ("_transpose", "_columnwise_data")


def _check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS[function.__name__] = function
    return function


class Block(nn.Module):
    """What a layer is made of: a norm with two linear layers, and one more."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        common = {"params_dtype": torch.bfloat16, "device": "cuda"} | options
        self.mlp = te.LayerNormMLP(WIDTH, HIDDEN, **common)
        self.out = te.Linear(WIDTH, WIDTH, bias=False, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.mlp(x))


class Stack(nn.Module):
    """Blocks, and whether each is computed again in backward."""

    def __init__(self, recomputes: bool = False, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(DEPTH))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            # Not PyTorch's, which would compute a block again in bf16: backward begins after the end of the autocast.
            x = te.checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def _init(recipe: Any) -> Any:
    if recipe is None:
        return contextlib.nullcontext()
    return te.fp8_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True)


def _build(name: str, primary: bool, **options: Any) -> Any:
    torch.manual_seed(5)
    with _init(RECIPES[name] if primary else None):
        return Stack(**options)


@contextlib.contextmanager
def _one_rank() -> Iterator[Any]:
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29541")
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", rank=0, world_size=1, device_id=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield init_device_mesh("cuda", (1,))


def _shard(model: Any, policy: MixedPrecisionPolicy | None = None, **context: Any) -> Any:
    with _one_rank() as mesh, fully_shard_context(DEVICE, **context) as found:
        for block in model.blocks:
            fully_shard(block, mesh, mixed_precision_policy=policy)
        fully_shard(model, mesh, mixed_precision_policy=policy)
    return found


def _inputs(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(100 * step + index)
    return torch.randn(TOKENS, WIDTH, device=DEVICE, generator=generator).bfloat16()


def _loss(model: Any, name: str, step: int, index: int) -> torch.Tensor:
    x = _inputs(step, index)
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[name]):
        y = model(x)
    return (y.float() - x.float().roll(1, 0)).square().mean() / 2


def _train_alone(name: str, primary: bool, steps: int = 6) -> list[float]:
    """Train without shards: float32 masters, and weights made from them after each step."""
    model = _build(name, primary)
    parameters = list(model.parameters())
    masters = []
    for parameter in parameters:
        values = parameter.get_high_precision_init_val() if is_primary_weight(parameter) else parameter.detach()
        masters.append(nn.Parameter(values.to(DEVICE).float()))
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    losses = []
    for step in range(steps):
        for index in range(2):
            loss = _loss(model, name, step, index)
            loss.backward()
            losses.append(loss.item())
            for parameter, master in zip(parameters, masters, strict=True):
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                if is_primary_weight(parameter):
                    parameter.quantize_(master.detach().bfloat16())
                else:
                    parameter.copy_(master)
    return losses


def _train_sharded(name: str, primary: bool, steps: int = 6, **options: Any) -> tuple[list[float], Any]:
    policy, context = options.pop("policy", None), options.pop("context", {})
    model = _build(name, primary, **options)
    found = _shard(model, policy, **context)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for step in range(steps):
        for index in range(2):
            with microbatch(found, is_last=index == 1):
                loss = _loss(model, name, step, index)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def _differ(ours: list[float], theirs: list[float]) -> str:
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if first is None:
        return ""
    return f"microbatch {first}: {ours[first]:.9f} and {theirs[first]:.9f}, at the end {ours[-1]:.6f}, {theirs[-1]:.6f}"


def _all_recipes(check: Callable[[str], str]) -> str:
    """Run a check with every recipe, and fail once all have run."""
    found, failed = [], []
    for name in RECIPES:
        try:
            found.append(f"{name}: {check(name)}")
        # Whatever goes wrong is this recipe's failure, and the others are to run.
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:400]}")
    assert not failed, f"{failed}; others {found}"
    return "; ".join(found)


def _gathered(model: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        if is_primary_weight(parameter):
            yield name, parameter


@_check
def bytes_are_transformer_engines() -> str:
    """Gathered planes against the library's own quantization of the same weights, at first and after a step."""

    def check(name: str) -> str:
        model = _build(name, primary=True)
        original = {fqn: {at: getattr(p, at).clone() for at in PLANES if hasattr(p, at)} for fqn, p in _gathered(model)}
        assert original, "no primary weights"
        _shard(model)
        count = 0
        for block in model.blocks:
            block.unshard()
        for fqn, parameter in _gathered(model):
            for at, expected in original[fqn].items():
                found = getattr(parameter, at)
                assert found.shape == expected.shape, (fqn, at, found.shape, expected.shape)
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (fqn, at, "at first")
                count += 1
        for block in model.blocks:
            block.reshard()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.37)
        whole = {fqn: p.full_tensor() for fqn, p in model.named_parameters()}
        for block in model.blocks:
            block.unshard()
        for fqn, parameter in _gathered(model):
            expected = parameter._quantizer(whole[fqn].bfloat16())
            for at in original[fqn]:
                same = torch.equal(getattr(parameter, at).view(torch.uint8), getattr(expected, at).view(torch.uint8))
                # A factor that is still 1 is replaced after a load, which this is like.
                assert same or name == "delayed", (fqn, at, "after a write")
        return f"{count} planes"

    return _all_recipes(check)


@_check
def training_is_as_without_shards() -> str:
    """Losses of sharded primary weights, of sharded bf16 weights and of unsharded ones, to the last bit."""

    def check(name: str) -> str:
        alone = _train_alone(name, primary=True)
        ours, _ = _train_sharded(name, primary=True)
        assert not (found := _differ(ours, alone)), f"primary and alone, {found}"
        plain, _ = _train_sharded(name, primary=False)
        plain_alone = _train_alone(name, primary=False)
        if name == "delayed":
            gap = max(abs(a - b) for a, b in zip(plain, plain_alone, strict=True))
            assert gap < 2e-2, f"bf16 weights {gap}"
            return f"primary the same, bf16 within {gap:.1e}, loss {ours[-1]:.5f} from {ours[0]:.5f}"
        assert not (found := _differ(plain, plain_alone)), f"bf16 and alone, {found}"
        assert not (found := _differ(ours, plain)), f"primary and bf16, {found}"
        return f"all the same, loss {ours[-1]:.5f} from {ours[0]:.5f}"

    return _all_recipes(check)


@_check
def options_change_no_bit() -> str:
    """Recomputation, the pool, kept transposes and a single stream."""

    def check(name: str) -> str:
        base, _ = _train_sharded(name, primary=True)
        failed = []
        for title, options in (
            ("recompute", {"recomputes": True}),
            ("pool", {"context": {"trace_pool": True}}),
            ("transposes", {"policy": MixedPrecisionPolicy(keep_fp8_transpose_cache=True)}),
            ("one stream", {"context": {"unify_communication_stream": True}}),
        ):
            try:
                losses, _ = _train_sharded(name, primary=True, **options)
            # Whatever goes wrong is this option's failure, and the others are to run.
            except Exception as error:
                failed.append(f"{title}, {type(error).__name__}: {str(error)[:200]}")
                continue
            # Delayed scales move in a forward that is computed twice, as they do without shards.
            if (found := _differ(losses, base)) and (name, title) != ("delayed", "recompute"):
                failed.append(f"{title}, {found}")
        assert not failed, failed
        return "the same"

    return _all_recipes(check)


@_check
def transposes_are_dropped() -> str:
    """None after a backward, unless they are to be kept, and planes are views of the group's buffer."""

    def check(name: str) -> str:
        sizes = []
        for keeps in (False, True):
            policy = MixedPrecisionPolicy(keep_fp8_transpose_cache=keeps)
            _, model = _train_sharded(name, primary=True, steps=1, policy=policy)
            # After the step nothing has been gathered yet: run one more backward.
            _loss(model, name, 9, 0).backward()
            kept = 0
            for unit in model.blocks:
                for group in unit.parameter_groups:
                    for parameter in filter(is_primary_weight, group.unsharded_parameters):
                        kept += sum(getattr(parameter, at, None) is not None for at in MADE)
                        plane = getattr(parameter, "_data", None)
                        plane = parameter._rowwise_data if plane is None else plane
                        mine = group.full_weight.local.untyped_storage()
                        assert plane.untyped_storage()._cdata == mine._cdata, "a plane is no view"
                        assert mine.nbytes() == 0, "gathered planes are not released"
            sizes.append(kept)
        assert sizes[0] == 0 and sizes[1] == 3 * DEPTH, sizes
        return f"{sizes}"

    return _all_recipes(check)


@_check
def bf16_weights_keep_no_copies() -> str:
    """What FP8 computation on gathered bf16 weights holds after forward, with and without the flag that we set."""

    def check(name: str) -> str:
        held = []
        for flag in (True, False):
            model = _build(name, primary=False)
            _shard(model)
            for module in model.modules():
                if hasattr(module, "fp8_meta"):
                    assert module.is_fsdp2, "the flag is not set"
                    module._is_fsdp2 = flag
            _loss(model, name, 0, 0).backward()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = _loss(model, name, 0, 1)
            torch.cuda.synchronize()
            held.append((torch.cuda.memory_allocated() - before) / 2**20)
            loss.backward()
        numel = DEPTH * (2 * WIDTH * HIDDEN + WIDTH * WIDTH) / 2**20
        assert held[1] - held[0] > numel, held
        return f"{held[0]:.1f} MiB held after forward, {held[1]:.1f} without the flag, {numel:.1f} M weights"

    return _all_recipes(check)


@_check
def fused_gradients() -> str:
    """Kernels that write gradients of weights where our reductions send them from."""

    def check(name: str) -> str:
        base, _ = _train_sharded(name, primary=True)
        fused, model = _train_sharded(name, primary=True, fuse_wgrad_accumulation=True)
        gap = max(abs(a - b) for a, b in zip(base, fused, strict=True))
        assert gap < 1e-2, gap
        kinds = {
            type(p.main_grad).__name__ for b in model.blocks for g in b.parameter_groups for p in g.unsharded_parameters
        }
        assert kinds == {"NoMainGrad"}, kinds
        return f"gap {gap:.1e}"

    return _all_recipes(check)


@_check
def grouped_linear() -> str:
    """Experts' layers, whose weights are several parameters of one module."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = te.GroupedLinear(4, WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x, [TOKENS // 4] * 4)
            return y

    def check(name: str) -> str:
        outputs = []
        for shards in (False, True):
            torch.manual_seed(3)
            with _init(RECIPES[name]):
                model: Any = nn.Sequential(Grouped(), Grouped())
            if shards:
                with _one_rank() as mesh, fully_shard_context(DEVICE):
                    for layer in model:
                        fully_shard(layer, mesh)
            x = _inputs(0, 0).requires_grad_()
            with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[name]):
                y = model(x)
            y.float().square().mean().backward()
            outputs.append((y.detach(), x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True)), "outputs or gradients differ"
        return "the same"

    return _all_recipes(check)


@_check
def checkpoints() -> str:
    """A model that is loaded computes what the saved one would have; only main weights and states are saved."""
    # What delayed scaling knows of tensors is pickled by TransformerEngine, which loads it only when it is told to.
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"

    def check(name: str) -> str:
        _, saved = _train_sharded(name, primary=True, steps=3)
        with tempfile.TemporaryDirectory() as parent:
            folder = f"{parent}/{name}"
            optimizer = fully_shard_optimizer(torch.optim.AdamW(saved.parameters(), lr=1e-3))
            save_checkpoint(saved, optimizer, folder)
            torch.manual_seed(77)
            loaded = _build(name, primary=True)
            _shard(loaded)
            other = fully_shard_optimizer(torch.optim.AdamW(loaded.parameters(), lr=1e-3))
            load_checkpoint(loaded, other, folder)
        losses: list[list[float]] = [[], []]
        for found_losses, model in zip(losses, (saved, loaded), strict=True):
            for step in range(2):
                loss = _loss(model, name, 50 + step, 0)
                loss.backward()
                found_losses.append(loss.item())
        assert not (found := _differ(losses[1], losses[0])), found
        return f"loss {losses[0][0]:.6f}"

    return _all_recipes(check)


@_check
def blackwells_formats_by_partial_casts() -> str:
    """Our MXFP8 in both directions, and our NVFP4 scales, against the kernels that run on any chip."""
    from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_applier

    rows, columns = 256, 512
    weight = (torch.randn(rows, columns, device=DEVICE) * torch.logspace(-3, 3, columns, device=DEVICE)).bfloat16()
    flat = weight.view(-1)
    amaxes = [torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((rows, 16), (8, columns))]
    tex.mxfp8_scaling_compute_partial_amax(flat, *amaxes, rows, columns, 0)
    scales = [torch.zeros_like(each, dtype=torch.uint8) for each in amaxes]
    multi_tensor_applier(tex.multi_tensor_compute_scale_inv_e8m0, None, [amaxes, scales])
    payloads = [torch.empty(flat.numel(), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    tex.mxfp8_scaling_partial_cast(flat, *payloads, *scales, rows, columns, 0)
    for form, payload, scale in zip((Mxfp8RowsFormat(), Mxfp8ColumnsFormat()), payloads, scales, strict=True):
        ours, mine = torch.empty_like(payload), torch.empty(scale.numel(), dtype=torch.uint8, device=DEVICE)
        form.quantize(flat, weight.shape, ours, mine)
        assert torch.equal(mine, scale.view(-1)), f"{form.name}: scales"
        assert torch.equal(ours, payload), f"{form.name}: payload"
    tiles, amax = torch.zeros(16, 32, device=DEVICE), torch.zeros(1, device=DEVICE)
    tex.nvfp4_multi_tensor_compute_partial_amax([flat], [tiles], [amax], [rows], [columns], [0], 16)
    blocks, target = torch.zeros_like(tiles), torch.zeros(rows, 32, dtype=torch.uint8, device=DEVICE)
    told = torch.zeros(1, device=DEVICE)
    tex.nvfp4_multi_tensor_fused_scale([tiles], [amax], [blocks], [target], [told], [16], [32], [rows], 16)
    nvfp4 = TiledNvfp4Format()
    mine = torch.empty(16 * 32, dtype=torch.uint8, device=DEVICE)
    nvfp4.quantize(flat, weight.shape, torch.empty_like(flat[::2], dtype=torch.uint8), mine, amax=amax[0])
    assert torch.equal(mine.view(16, 32).repeat_interleave(16, 0), target), "NVFP4 scales"
    return "MXFP8 rows and columns, NVFP4 scales"


class _InBackward(torch.autograd.Function):
    """Calls something in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        ctx.call()
        return dy, None


@_check
def blackwells_classes_take_our_planes() -> str:
    """Shapes and dtypes of what is installed, and that the library's classes accept it in either direction."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    found = []
    for quantizer in (MXFP8Quantizer(DType.kFloat8E4M3), NVFP4Quantizer(with_2d_quantization=True)):
        for shape in ((256, 512), (96, 160)):
            values = torch.randn(shape).bfloat16()
            weight: Any = nn.Parameter(quantizer.make_empty(shape, dtype=torch.bfloat16, device=DEVICE))
            weight._high_precision_init_val = values
            weight.get_high_precision_init_val = lambda values=values: values
            weight.clear_high_precision_init_val = lambda: None
            module: Any = nn.Sequential(nn.Module())
            module[0].weight = weight
            with _one_rank() as mesh, fully_shard_context(DEVICE):
                fully_shard(module, mesh)
            specs = quantizer.inner_tensor_specs(shape)

            def compare(prefix: str, module: Any = module, specs: Any = specs) -> None:
                for name, (expected, dtype) in specs.items():
                    if prefix in name:
                        plane = getattr(module[0].weight, name)
                        assert plane.dtype == dtype, (name, plane.dtype, dtype)
                        assert tuple(plane.shape) == tuple(expected), (name, tuple(plane.shape), tuple(expected))

            def backward(module: Any = module, compare: Any = compare) -> None:
                module.unshard()
                module[0].weight.update_usage(columnwise_usage=True)
                compare("columnwise")
                module.reshard()

            module.unshard()
            module[0].weight.update_usage(rowwise_usage=True)
            compare("rowwise")
            module.reshard()
            _InBackward.apply(torch.ones(1, device=DEVICE, requires_grad=True), backward).backward()
            found.append(f"{type(weight).__name__} {shape}")
    return ", ".join(found)
