# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Chunks whose ranks hold different experts: units, scale of gradients, experts without tokens, norms, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed.fsdp import mcore_fsdp_v2_experts
from megatron.core.distributed.fsdp.mcore_fsdp_v2_config import check_gather_group
from megatron.core.distributed.fsdp.mcore_fsdp_v2_experts import check_expert_pieces, expert_modules, units_with_experts
from megatron.core.distributed.fsdp.mcore_fsdp_v2_finalize import finalize_model_grads
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import (
    Tower,
    assert_close,
    assert_equal,
    build_optimizer,
    build_tower,
    cpu_shim,
    ddp_config,
    full_gradients,
    model_config,
    my_rank,
    start,
    wrap,
)
from tests.unit_tests.mcore_experts import EXPERTS, accumulate, build_with_experts, read_chunk, save_chunk


def _send_to_own_half(model: nn.Module) -> None:
    """Let tokens of the first half of the ranks go to the first half of the experts only, others to the second."""
    here = torch.arange(EXPERTS) // (EXPERTS // 2) == my_rank() // (dist.get_world_size() // 2)

    def keep(module: Any, args: Any, output: Any) -> Any:
        probs, routing_map = output
        chosen = here.expand_as(routing_map)
        return probs * chosen + 0.25 * chosen, chosen.clone()

    for layer in model.decoder.layers:  # type: ignore[union-attr]
        layer.mlp.router.register_forward_hook(keep)


def _reduced(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of an unwrapped model, as sums over the ranks with copies by the number of all ranks."""
    world = dist.get_world_size()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        is_local = not getattr(parameter, "allreduce", True)
        group = parallel_state.get_expert_data_parallel_group() if is_local else dist.group.WORLD
        dist.all_reduce(gradient, group=group)
        found[name] = gradient / world
    return found


def _gradients(strategy: str, microbatches: int) -> list[bool]:
    start(expert_parallel_size=2)
    with cpu_shim():
        model, plain = build_with_experts(2), build_with_experts(2)
        chunk = wrap(model, data_parallel_sharding_strategy=strategy)
        for each in (model, plain):
            _send_to_own_half(each)
        optimizer = build_optimizer(chunk, clip_grad=1e-3)
        accumulate(chunk, chunk, microbatches)
        accumulate(plain, None, microbatches)
        finalize_model_grads([chunk])
        expected = _reduced(plain)
        assert_close(full_gradients(chunk), expected)
        squares = torch.zeros(())
        for name, gradient in expected.items():
            is_local = "experts" in name
            copies = dist.get_world_size() // (2 if is_local else 1)
            squares += gradient.double().square().sum() / copies
        dist.all_reduce(squares)
        norm = float(optimizer.get_grad_norm())
        assert norm == pytest.approx(math.sqrt(float(squares)), rel=1e-5)
        zeros = sum(int((g == 0).sum()) / (2 if "experts" in n else 4) for n, g in expected.items())
        counted = torch.tensor(zeros)
        dist.all_reduce(counted)
        assert optimizer.count_zeros() == float(counted)
        had_tokens = [
            bool((parameter.grad is not None) and parameter.grad.any())
            for name, parameter in plain.named_parameters()
            if "layers.1.mlp.experts" in name and "fc2.weight" in name
        ]
        optimizer.step()
    return had_tokens


@pytest.mark.parametrize(("strategy", "microbatches"), [("optim_grads_params", 2), ("optim", 1)])
def test_pb039_gradients_and_norms_are_those_of_all_tokens_even_of_experts_without_any(
    strategy: str, microbatches: int
) -> None:
    found = run_ranks(4, _gradients, strategy, microbatches)
    # Ranks 0 and 2 hold the first two experts, 1 and 3 the others.
    assert found == [[True, True], [False, False], [False, False], [True, True]]


def _repeated_gradients() -> None:
    start(expert_parallel_size=2)
    with cpu_shim():
        model = build_with_experts(2)
        chunk = wrap(model)
        optimizer = build_optimizer(chunk)
        initial = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
        runs = []
        for _ in range(2):
            with torch.no_grad():
                for name, parameter in chunk.named_parameters():
                    parameter.copy_(initial[name])
            steps = []
            for _ in range(10):
                accumulate(chunk, chunk, 2)
                finalize_model_grads([chunk])
                steps.append(full_gradients(chunk))
                optimizer.zero_grad()
                with torch.no_grad():
                    for parameter in chunk.parameters():
                        parameter.mul_(0.99)
            runs.append(steps)
    for first, second in zip(*runs, strict=True):
        assert_equal(first, second)


def test_pb071_gradients_have_the_same_bits_in_every_run() -> None:
    run_ranks(2, _repeated_gradients)


# --- checkpoints --------------------------------------------------------------------------------------------------


def _resharded(folder: str, before: int, after: int) -> list[str]:
    with cpu_shim():
        saved, read = save_chunk(folder, before), read_chunk(folder, after)
    experts = {key for key in saved | read if ".experts." in key}
    both = saved.keys() & read.keys()
    assert both & experts
    assert_equal({key: saved[key] for key in both}, {key: read[key] for key in both})
    assert saved.keys() - experts == read.keys() - experts
    assert max(float(value.abs().max()) for key, value in read.items() if key.endswith("exp_avg")) > 0
    return sorted(key for key in (saved if before > after else read) if "layers.0.mlp.experts" in key)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_of_shared_experts_is_read_by_ranks_that_hold_all_and_back(
    tmp_path: Path, before: int, after: int
) -> None:
    """Moments and weights bit for bit; a rank's experts have the numbers that they have in the layer."""
    of_ranks = run_ranks(2, _resharded, str(tmp_path / "saved"), before, after)
    for rank, keys in enumerate(of_ranks):
        numbers = {key.partition("local_experts.")[2].partition(".")[0] for key in keys}
        assert numbers == {str(2 * rank), str(2 * rank + 1)}
        assert any(key.endswith("linear_fc1.weight_w") for key in keys)


def _load_state_dict() -> None:
    start(expert_parallel_size=2)
    with cpu_shim():
        chunk, other = wrap(build_with_experts(2)), wrap(build_with_experts(2))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(chunk.state_dict_for_save_checkpoint())
        expected = {name: parameter.full_tensor() for name, parameter in chunk.named_parameters()}
        assert_equal({name: parameter.full_tensor() for name, parameter in other.named_parameters()}, expected)


def test_a_state_dict_with_experts_counted_in_the_layer_is_loaded() -> None:
    run_ranks(2, _load_state_dict)


# --- the bias of routers ------------------------------------------------------------------------------------------


def _biases() -> list[list[float]]:
    start(expert_parallel_size=2)
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    with cpu_shim():
        chunk = wrap(build_with_experts(2, **bias, moe_router_bias_update_rate=0.5))
        accumulate(chunk, chunk, 1)
        routers = [layer.mlp.router for layer in chunk.module.decoder.layers]
        counts = [router.local_tokens_per_expert.clone() for router in routers]
        finalize_model_grads([chunk])
        for router, count in zip(routers, counts, strict=True):
            dist.all_reduce(count)
            expected = 0.5 * torch.sign(count.mean() - count)
            assert torch.equal(router.expert_bias, expected)
            assert expected.any()
            assert not router.local_tokens_per_expert.any()
        return [router.expert_bias.tolist() for router in routers]


def test_router_biases_follow_the_tokens_of_all_ranks() -> None:
    first, second = run_ranks(2, _biases)
    assert first == second


# --- what is refused ----------------------------------------------------------------------------------------------


class _Mixed(Tower):
    """Has an expert's weight beside others, in one module."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.expert: Any = nn.Parameter(torch.ones(3))
        self.expert.allreduce = False


def _refusals() -> None:
    start()
    with pytest.raises(ValueError, match=r"expected experts in modules of their own, got expert beside other param"):
        wrap(_Mixed(model_config()))
    tower = build_tower()
    for parameter in tower.net.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
    options = ddp_config(num_distributed_optimizer_instances=2)
    with pytest.raises(ValueError, match=r"instances: expected a divisor of the number of copies of each expert, 1, g"):
        wrap(tower, config=options)
    missing = mock.patch.object(mcore_fsdp_v2_experts, "find_group", lambda *unused: None)
    with missing, pytest.raises(ValueError, match=r"expected a process group expt_dp of the ranks .*, got none"):
        wrap(tower)
    for tp, etp, ep, message in (
        (1, 2, 2, "expert_tensor_parallel_size: expected 1 or tensor_model_parallel_size 1, got 2"),
        (
            2,
            None,
            2,
            "add_bias_linear: expected False with expert_tensor_parallel_size 2, got True; all ranks that share",
        ),
        (2, 1, 1, "expert_model_parallel_size: expected a multiple of tensor_model_parallel_size 2, .* got 1"),
    ):
        tower = build_tower()
        sizes = {"num_moe_experts": 4, "expert_tensor_parallel_size": etp, "expert_model_parallel_size": ep}
        vars(tower.config).update(sizes, tensor_model_parallel_size=tp)
        with pytest.raises(NotImplementedError, match=message):
            wrap(tower)
    tower = build_tower()
    vars(tower.config).update(num_moe_experts=4, expert_model_parallel_size=2, moe_grouped_gemm=True)
    with pytest.raises(NotImplementedError, match="moe_grouped_gemm: expected False with expert parallelism, got True"):
        wrap(tower)
    gathers = ddp_config(data_parallel_sharding_strategy="optim_grads_params")
    gathers.megatron_fsdp_create_all_gather_group = True
    check_gather_group(gathers, model_config(), 1)
    with pytest.raises(NotImplementedError, match=r"create_all_gather_group: expected False .* 1 stage.* 2 of each"):
        check_gather_group(gathers, model_config(), 2)
    config = model_config()
    config.pipeline_model_parallel_size = 2
    with pytest.raises(NotImplementedError, match=r"create_all_gather_group: expected False .* 2 stage.* 1 of each"):
        check_gather_group(gathers, config, 1)


def test_experts_that_cannot_be_sharded_are_refused_before_ranks_communicate() -> None:
    run_ranks(1, _refusals)


def test_pieces_that_are_cut_along_the_wrong_dim_are_refused() -> None:
    model = nn.Module()
    model.experts = nn.ModuleDict({"0": nn.ModuleDict({"linear_fc2": nn.Linear(2, 2, bias=False)})})
    outer = nn.ModuleDict({"mlp": model})
    config: Any = SimpleNamespace(num_moe_experts=2, expert_tensor_parallel_size=2, tensor_model_parallel_size=2)
    (weight,) = outer.parameters()
    weight.partition_dim = 1  # type: ignore[attr-defined]
    check_expert_pieces(outer, config)
    weight.partition_dim = 0  # type: ignore[attr-defined]
    with pytest.raises(
        NotImplementedError, match=r"partition_dim of mlp\.experts\.0\.linear_fc2\.weight: expected 1 wi"
    ):
        check_expert_pieces(outer, config)
    config.expert_tensor_parallel_size = 1
    check_expert_pieces(outer, config)


def test_units_of_experts_are_the_largest_modules_without_other_parameters() -> None:
    experts = nn.Module()
    experts.all = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for parameter in experts.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
    layer = nn.ModuleDict({"norm": nn.LayerNorm(2), "router": nn.Linear(2, 4), "experts": experts})
    model = nn.ModuleDict({"layer": layer, "head": nn.Linear(2, 2)})
    assert expert_modules(model) == [experts]
    runs = [[experts], [layer], [model]]
    assert list(units_with_experts(runs)) == [([experts], True), ([layer], False), ([model], False)]
    assert expert_modules(layer["router"]) == []
