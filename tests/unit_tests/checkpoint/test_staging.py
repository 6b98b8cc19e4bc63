# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""State dicts on the host: equal, of the same classes, independent of what training does next, memory used again."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron.core.distributed.fsdp.experimental import FsdpDTensor, fully_shard
from megatron.core.distributed.fsdp.experimental.checkpoint import staging
from megatron.core.distributed.fsdp.experimental.checkpoint.staging import HostStaging
from tests.unit_tests.launch import DEVICE, run_ranks


def _addresses(value: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in staging._tensors(value)]


def test_staged_values_are_equal_and_independent() -> None:
    namespace = SimpleNamespace(rate=0.1, names=["a"])
    state: dict[str, Any] = {
        "weight": torch.randn(5, 3),
        "transposed": torch.randn(4, 6).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "low": torch.randn(9).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "nested": OrderedDict(list=[torch.arange(3), "text", None], tuple=(torch.ones(2, dtype=torch.complex64), 2.5)),
        "args": namespace,
    }
    expected = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    staged = HostStaging().stage(state)
    for tensor in staging._tensors(state):
        tensor.untyped_storage().fill_(0)
    namespace.names.append("b")
    for key, value in expected.items():
        assert torch.equal(staged[key], value) and staged[key].dtype == value.dtype, key
        assert staged[key].is_contiguous() and staged[key].device.type == "cpu"
    assert type(staged["nested"]) is OrderedDict and staged["nested"]["list"][1:] == ["text", None]
    assert torch.equal(staged["nested"]["list"][0], torch.arange(3))
    assert type(staged["nested"]["tuple"]) is tuple and staged["nested"]["tuple"][0].dtype is torch.complex64
    assert staged["args"].names == ["a"] and list(staged) == list(state)


def test_memory_is_used_again_for_the_same_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    allocate = staging.host_buffer

    def count(num_bytes: int, device: torch.device) -> torch.Tensor:
        sizes.append(num_bytes)
        return allocate(num_bytes, device)

    monkeypatch.setattr(staging, "host_buffer", count)
    stager = HostStaging()
    first = stager.stage({"a": torch.zeros(1000), "b": [torch.ones(3, 3)]})
    second = stager.stage({"a": torch.full((1000,), 2.0), "b": [torch.full((3, 3), 5.0)]})
    assert len(sizes) == 1 and _addresses(first) == _addresses(second)
    assert torch.equal(second["a"], torch.full((1000,), 2.0)) and torch.equal(second["b"][0], torch.full((3, 3), 5.0))
    grown = stager.stage({"a": torch.zeros(1001), "b": [torch.ones(3, 3)]})
    assert len(sizes) == 2 and grown["a"].shape == (1001,)
    stager.release()
    stager.stage({"a": torch.zeros(1)})
    assert len(sizes) == 3


def test_blocks_are_powers_of_two_and_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    allocate = staging.host_buffer
    monkeypatch.setattr(staging, "_LEAST_BLOCK_BYTES", 1024)
    monkeypatch.setattr(staging, "host_buffer", lambda n, device: sizes.append(n) or allocate(n, device))
    # 3000 bytes need 3008 of a block of 4096, in whose rest 1000 find room, and 3 of 256 share a block of 1024.
    tensors = [torch.full((n,), i, dtype=torch.uint8) for i, n in enumerate((256, 1000, 3000, 256, 256))]
    staged = HostStaging().stage({str(i): tensor for i, tensor in enumerate(tensors)})
    assert sizes == [4096, 1024]
    assert all(torch.equal(staged[str(i)], tensor) for i, tensor in enumerate(tensors))
    starts = sorted((t.data_ptr(), t.nbytes) for t in staged.values())
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(starts))
    assert all(start % 64 == starts[0][0] % 64 for start, _ in starts)


def test_views_of_a_large_buffer_take_their_own_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_LEAST_BLOCK_BYTES", 64)
    flat = torch.randn(1 << 16)
    views = {str(i): flat[i * 10 : i * 10 + 5] for i in range(4)}
    staged = HostStaging().stage(views)
    assert all(torch.equal(staged[key], view) for key, view in views.items())
    assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in staged.values()}.values()) <= 256


def test_one_tensor_under_two_names_is_copied_once() -> None:
    tensor = torch.ones(4)
    staged = HostStaging().stage({"a": tensor, "b": {"c": tensor}})
    assert staged["a"] is staged["b"]["c"]


def test_attributes_are_kept_and_parameters_are_plain() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    staged = HostStaging().stage({"p": parameter})["p"]
    assert staged.tensor_model_parallel and not staged.requires_grad and not isinstance(staged, nn.Parameter)


def test_wrapped_tensors_of_unknown_classes_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(TypeError, match=r"expected tensors and DTensors, got a TwoTensor of shape \(2,\)"):
        HostStaging().stage({"odd": TwoTensor(torch.ones(2), torch.ones(2))})


def _sharded_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model)
    moments = {name: p.detach() * 2 for name, p in model.named_parameters()}
    return {"model": dict(model.named_parameters()), "moments": moments, "keep": [model]}


def _stage_sharded() -> None:
    state = _sharded_state()
    model = state.pop("keep")[0]
    hook = object()
    next(iter(state["model"].values()))._local_tensor.geometry_hook = hook
    expected = {key: {n: t._local_tensor.clone() for n, t in part.items()} for key, part in state.items()}
    staged = HostStaging().stage(state)
    for unit_parameter in model.parameters():
        with torch.no_grad():
            unit_parameter.add_(1)
    for key, part in staged.items():
        for name, tensor in part.items():
            original = state[key][name]
            assert type(tensor) is type(original) and isinstance(tensor, FsdpDTensor)
            assert tensor.shape == original.shape and tensor.placements == original.placements
            assert tensor.device_mesh is original.device_mesh and not tensor.requires_grad
            assert torch.equal(tensor._local_tensor, expected[key][name].cpu())
            assert tensor.geometry.cut == original.geometry.cut and tensor.geometry.fqn == original.geometry.fqn
            assert tensor.geometry.owner is None and not hasattr(tensor, "_fsdp_group")
            assert tensor._local_tensor.device.type == "cpu"
    assert next(iter(staged["model"].values()))._local_tensor.geometry_hook is hook
    full = next(iter(staged["model"].values())).to_local()
    assert full.numel() == next(iter(staged["model"].values()))._local_tensor.numel()


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_tensors_keep_their_cut_and_leave_their_unit(world_size: int) -> None:
    run_ranks(world_size, _stage_sharded)


def _stage_plain_dtensor() -> None:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    tensor = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    staged = HostStaging().stage({"t": tensor})["t"]
    assert type(staged) is DTensor and staged.device_mesh is mesh and staged.placements == tensor.placements
    assert torch.equal(staged._local_tensor, tensor._local_tensor.cpu())
    assert staged._local_tensor.is_pinned() == (DEVICE == "cuda")
    assert staged._local_tensor.data_ptr() != tensor._local_tensor.data_ptr()


def test_plain_dtensors_stay_dtensors() -> None:
    run_ranks(2, _stage_plain_dtensor)
