# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Data parallelism over pieces that tensor parallelism has cut: whole values, norms, training and checkpoints."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron.core.distributed.fsdp.experimental import (
    GradientStatistics,
    MixedPrecisionPolicy,
    Placements,
    clip_grad_norm_,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    grad_norm,
    load_checkpoint,
    rows_of,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.experimental.layout import boxes
from megatron.core.distributed.fsdp.experimental.model_cut import ModelCut
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting

WIDTH, HIDDEN, TP = 6, 10, 2
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class _Copy(torch.autograd.Function):
    """Hands on, and adds up gradients over tensor parallelism."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    """Adds up over tensor parallelism, and hands gradients on."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Gated(nn.Module):
    """A gated MLP after a norm: whole without a group, else this rank's pieces of the same weights."""

    def __init__(self, seed: int, group: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.group = group
        self.norm = nn.Parameter(torch.rand(WIDTH, generator=generator, dtype=torch.float64))
        self.up = self._piece(torch.randn(2 * HIDDEN, WIDTH, generator=generator, dtype=torch.float64), 0, 2)
        self.bias = self._piece(torch.randn(2 * HIDDEN, generator=generator, dtype=torch.float64), 0, 2)
        self.down = self._piece(torch.randn(WIDTH, HIDDEN, generator=generator, dtype=torch.float64), 1, 1)

    def _piece(self, full: torch.Tensor, dim: int, stride: int) -> nn.Parameter:
        if self.group is None:
            return nn.Parameter(full)
        cut = ModelCut(1, dim, stride, self.group.size(), self.group.rank())
        parameter: Any = nn.Parameter(cut.take(full))
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
        return parameter  # type: ignore[no-any-return]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        normed = value * self.norm
        inner = normed if self.group is None else _Copy.apply(normed, self.group)
        gate, up = (inner @ self.up.t() + self.bias).chunk(2, -1)
        out = (torch.nn.functional.silu(gate) * up) @ self.down.t()
        return value + (out if self.group is None else _Reduce.apply(out, self.group))


def _mesh() -> Any:
    world_size = dist.get_world_size()
    return init_device_mesh(DEVICE, (world_size // TP, TP), mesh_dim_names=("dp", "tp"))


def _model(mesh: Any, strategy: str = "optim_grads_params", seed: int = 0, tp: bool = True) -> nn.Sequential:
    group = mesh.get_group("tp") if tp else None
    model = nn.Sequential(*[Gated(seed + index, group) for index in range(2)]).to(DEVICE)
    options = {
        "mesh": mesh,
        "placements": Placements.from_strategy(strategy, dp_axes=("dp",)),
        "mixed_precision_policy": MixedPrecisionPolicy(None),
    }
    with fully_shard_context(DEVICE):
        for layer in model:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    return model


def _reference(seed: int = 0) -> nn.Sequential:
    return nn.Sequential(*[Gated(seed + index) for index in range(2)]).to(DEVICE)


def _batch(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64).to(DEVICE)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _optimizer(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def _train(strategy: str) -> None:
    mesh = _mesh()
    dp, copies = mesh.get_local_rank("dp"), mesh.size(0)
    model, reference = _model(mesh, strategy), _reference()
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.shape == whole.shape and torch.equal(parameter.full_tensor(), whole)
    optimizer, plain = fully_shard_optimizer(_optimizer(model)), _optimizer(reference)
    statistics = GradientStatistics(dist.group.WORLD, torch.device(DEVICE))
    for step in range(3):
        _loss(model, _batch(step, dp)).backward()
        sum(_loss(reference, _batch(step, index)) for index in range(copies)).div(copies).backward()  # type: ignore[union-attr]
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        for gradient, whole in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-14)
        exact = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
        parameters = list(model.parameters())
        torch.testing.assert_close(grad_norm(parameters), exact, rtol=1e-14, atol=0)
        torch.testing.assert_close(statistics.norm(parameters), exact, rtol=1e-14, atol=0)
        zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
        assert float(statistics.count_zeros(parameters)) == zeros
        clip_grad_norm_(parameters, 0.5)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), whole, rtol=1e-11, atol=1e-13)
    states = optimizer.state_dict()["state"]
    for index, whole in enumerate(reference.parameters()):
        found = states[index]["exp_avg"]
        torch.testing.assert_close(found.full_tensor(), plain.state[whole]["exp_avg"], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", (2, 4))
def test_trains_as_one_process_does(world_size: int, strategy: str) -> None:
    run_ranks(world_size, _train, strategy)


def _placements() -> None:
    mesh = _mesh()
    model = _model(mesh)
    norm, up, bias, down = model[0].parameters()
    assert norm.placements == (Shard(0), Replicate()) and down.placements == (Shard(0), Shard(1))
    assert up.placements == bias.placements == (Shard(0), Shard(0)) and up.device_mesh is mesh
    assert tuple(up.shape) == (2 * HIDDEN, WIDTH) and tuple(down.shape) == (WIDTH, HIDDEN)
    assert isinstance(up, DTensor) and up.tensor_model_parallel and up.partition_stride == 2
    # Whatever is derived from a piece knows the cut as well.
    assert torch.equal((up.detach() * 2).full_tensor(), up.full_tensor() * 2)
    copy = pickle.loads(pickle.dumps(up))
    assert torch.equal(copy.full_tensor(), up.full_tensor())
    whole = up.full_tensor()
    for part in range(2):
        rows = rows_of(up, part * HIDDEN, (part + 1) * HIDDEN)
        assert torch.equal(rows.full_tensor(), whole[part * HIDDEN : (part + 1) * HIDDEN])
    assert torch.equal(rows_of(down, 1, 3).full_tensor(), down.full_tensor()[1:3])
    with pytest.raises(ValueError, match=r"rows of 0.up: expected a multiple of 10, .* got \[0, 4\)"):
        rows_of(up, 0, 4)
    state = {name: value.full_tensor() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(value.full_tensor(), state[name]) for name, value in model.state_dict().items())


def test_parameters_have_global_shapes_and_true_full_tensors() -> None:
    run_ranks(4, _placements)


def _save(folder: str) -> dict[str, torch.Tensor]:
    mesh = _mesh()
    model = _model(mesh, seed=5)
    optimizer = fully_shard_optimizer(_optimizer(model))
    for step in range(2):
        _loss(model, _batch(step, mesh.get_local_rank("dp"))).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(model, optimizer, Path(folder, "tp"))
    return _everything(model, optimizer)


def _everything(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()["state"]
    for index, (name, _) in enumerate(model.named_parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = states[index][key].full_tensor()
    return found


def _load(folder: str, tp: bool) -> dict[str, torch.Tensor]:
    mesh = _mesh() if tp else init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = _model(mesh, seed=9, tp=tp)
    optimizer = fully_shard_optimizer(_optimizer(model))
    load_checkpoint(model, optimizer, Path(folder, "tp"))
    return _everything(model, optimizer)


def test_checkpoint_moves_between_sizes(tmp_path: Path) -> None:
    saved = run_ranks(4, _save, str(tmp_path))[0]
    for world_size, tp in ((2, True), (4, True), (1, False), (3, False)):
        for found in run_ranks(world_size, _load, str(tmp_path), tp):
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], saved[name]) for name in saved), (world_size, tp)


ROWS = torch.arange(8 * 3, dtype=torch.float32).view(8, 3)


def _rows(folder: str, tp: bool) -> None:
    """Cut rows by tensor parallelism and data parallelism; save, or load without tensor parallelism."""
    mesh = _mesh() if tp else init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",))
    layer: Any = nn.Linear(3, 8 // (TP if tp else 1), bias=False, device=DEVICE)
    with torch.no_grad():
        layer.weight.copy_(ROWS.chunk(TP)[mesh.get_local_rank("tp")] if tp else torch.zeros_like(ROWS))
    if tp:
        layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0
    fully_shard(layer, mesh)
    optimizer = fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    if tp:
        save_checkpoint(layer, optimizer, Path(folder, "rows"))
    else:
        load_checkpoint(layer, optimizer, Path(folder, "rows"))
    assert torch.equal(layer.weight.full_tensor().cpu(), ROWS)


def test_pb052_rows_keep_their_order(tmp_path: Path) -> None:
    run_ranks(4, _rows, str(tmp_path), True)
    run_ranks(2, _rows, str(tmp_path), False)
    run_ranks(1, _rows, str(tmp_path), False)


def _wrong_attributes(dim: int, stride: int) -> None:
    mesh = _mesh()
    layer: Any = nn.Linear(4, 6)
    layer.weight.tensor_model_parallel = True
    layer.weight.partition_dim, layer.weight.partition_stride = dim, stride
    fully_shard(layer.to(DEVICE), mesh)


@pytest.mark.parametrize(("dim", "stride"), ((2, 1), (-1, 1), (0, 4), (1, 2), (0, 0)))
def test_attributes_that_do_not_fit_are_refused(dim: int, stride: int) -> None:
    for message in run_ranks_expecting(2, ValueError, _wrong_attributes, dim, stride):
        assert "partition_dim and partition_stride of weight: expected a dim of (6, 4)" in message


def _wrong_axis() -> None:
    mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "model"))
    fully_shard(nn.Linear(4, 6).to(DEVICE), mesh, Placements.from_strategy("optim", dp_axes=("dp",)))


def test_another_axis_is_refused() -> None:
    for message in run_ranks_expecting(2, ValueError, _wrong_axis):
        assert "expected the mesh's axes ('dp', 'model')" in message and "called 'tp'" in message


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1), st.data())  # type: ignore[misc]
def test_pieces_are_disjoint_and_whole(size: int, stride: int, block: int, other: int, dim: int, data: Any) -> None:
    stride = stride if dim == 0 else 1
    shape = [size * stride * block, other] if dim == 0 else [other, size * block]
    full = torch.arange(shape[0] * shape[1]).view(shape)
    cuts = [ModelCut(1, dim, stride, size, rank) for rank in range(size)]
    pieces = [cut.take(full) for cut in cuts]
    assert torch.equal(cuts[0].join(pieces), full)
    seen = torch.zeros_like(full)
    for cut, piece in zip(cuts, pieces, strict=True):
        assert cut.shape(piece.shape) == tuple(shape)
        middle = data.draw(st.integers(0, piece.numel()))
        for start, stop in ((0, middle), (middle, piece.numel())):
            position = start
            for box in boxes(piece.shape, start, stop):
                for part in cut.boxes(box, piece.shape):
                    where = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
                    found = full[where].reshape(-1)
                    assert torch.equal(found, piece.reshape(-1)[position : position + found.numel()])
                    position += found.numel()
                    seen[where] += 1
            assert position == stop
    assert bool((seen == 1).all())


def _other_copy(place: int) -> str:
    """One rank has another norm in the second layer; its piece of the first matrix is its own in any case."""
    mesh = _mesh()
    model = nn.Sequential(*[Gated(index, mesh.get_group("tp")) for index in range(2)]).to(DEVICE)
    if dist.get_rank() == place:
        with torch.no_grad():
            model[1].norm[2] += 1
    with fully_shard_context(DEVICE):
        fully_shard(model, mesh, Placements.from_strategy("optim", dp_axes=("dp",)), MixedPrecisionPolicy(None))
    _loss(model, _batch(0, 0))
    raise AssertionError("a forward with other copies")


def test_copies_that_differ_between_tensor_parallel_ranks_are_named_on_all_ranks() -> None:
    for rank, message in enumerate(run_ranks_expecting(4, RuntimeError, _other_copy, 3)):
        assert f"initial weights that ranks {[[0, 1], [2, 3]][rank // 2]} of model parallelism hold" in message
        where = "on ranks 2 and 3 for 1.norm of unit" if rank > 1 else "on other ranks, which name them"
        assert where in message
