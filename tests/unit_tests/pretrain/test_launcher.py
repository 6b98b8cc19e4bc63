# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import argparse
import importlib.util
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.pretrain.launcher import Place, find_place, start_process_groups


def test_without_a_launcher_the_process_is_alone() -> None:
    place = find_place({"PATH": "/bin"})
    assert (place.rank, place.world_size, place.local_rank, place.is_launched) == (0, 1, 0, False)


def test_the_launchers_variables_are_read() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    place = find_place(variables)
    assert (place.rank, place.world_size, place.local_rank, place.is_launched) == (5, 8, 1, True)
    assert place.local_world_size == 8
    assert find_place(variables | {"LOCAL_WORLD_SIZE": "4"}).local_world_size == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "abc"}, "expected an integer >= 0, got 'abc' for the environment variable RANK"),
        ({"RANK": "-1"}, "expected an integer >= 0, got '-1' for the environment variable RANK"),
        ({"RANK": ""}, "expected an integer >= 0, got '' for the environment variable RANK"),
        ({"WORLD_SIZE": None}, "got nothing for the environment variable WORLD_SIZE"),
        ({"LOCAL_RANK": None}, "got nothing for the environment variable LOCAL_RANK"),
        ({"RANK": None}, "got nothing for the environment variable RANK"),
        ({"LOCAL_WORLD_SIZE": "two"}, "got 'two' for the environment variable LOCAL_WORLD_SIZE"),
        ({"RANK": "2"}, "expected a rank below WORLD_SIZE 2, got 2 for the environment variable RANK"),
    ],
)
def test_a_bad_variable_is_no_rank_0(changes: dict[str, str | None], message: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | changes
    with pytest.raises(ValueError, match=message):
        find_place({name: word for name, word in environment.items() if word is not None})


def _args(**changes: object) -> argparse.Namespace:
    kinds = ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
    sizes = {f"{kind}_parallel_size": 1 for kind in kinds} | {"num_distributed_optimizer_instances": 1}
    sizes |= {"virtual_pipeline_model_parallel_size": None}
    return argparse.Namespace(**{"distributed_backend": None, **sizes, **changes})


def test_nccl_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = _args(distributed_backend="nccl")
    with pytest.raises(ValueError, match="expected gloo on a host without CUDA, got nccl"):
        start_process_groups(args, Place(0, 1, 0, is_launched=False))


def test_timeout_and_backend_are_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, object] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **words: found.update(words, backend=backend))
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **words: found.update(words))
    args = _args(distributed_timeout_minutes=7, num_distributed_optimizer_instances=3)
    start_process_groups(args, Place(0, 1, 0, is_launched=False))
    assert (found["backend"], found["timeout"]) == ("gloo", timedelta(minutes=7))
    assert found["num_distributed_optimizer_instances"] == 3


def test_optimizer_instances_need_einops(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "einops" else found(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = _args(num_distributed_optimizer_instances=2)
    with pytest.raises(ValueError, match=r"expected the package einops, .* got a Python without it for --num-dist"):
        start_process_groups(args, Place(0, 2, 0, is_launched=True))


def test_each_local_rank_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = _args()
    with pytest.raises(ValueError, match=r"at most 2 local rank\(s\), .* got local rank 2 for --nproc"):
        start_process_groups(args, Place(2, 3, 2, is_launched=True))
