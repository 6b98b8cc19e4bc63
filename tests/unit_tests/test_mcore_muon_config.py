# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What an OptimizerConfig means for Muon: settings, which parameters are matrices, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer_config import ParamKey

from megatron.core.distributed.fsdp.experimental import Muon
from megatron.core.optimizer import fully_sharded_optimizer_muon as ours
from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer, get_megatron_optimizer
from megatron.core.optimizer.fully_sharded_optimizer_config import FullyShardedOptimizerConfig
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.mcore import (
    Tower,
    build_gpt,
    build_tower,
    cpu_shim,
    full_weights,
    model_config,
    my_rank,
    optimizer_config,
    start,
    tower_loss,
    wrap,
)
from tests.unit_tests.mcore_experts import WITH_EXPERTS

NESTEROV = "muon_nesterov" if hasattr(optimizer_config(), "muon_nesterov") else "muon_use_nesterov"
"""The field's name in the installed megatron-core."""


def muon_config(**changes: Any) -> FullyShardedOptimizerConfig:
    values = {"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0}
    return FullyShardedOptimizerConfig(**{**values, **changes})


def build(chunk: Any, *, overrides: Any = None, **changes: Any) -> FullyShardedOptimizer:
    optimizer = get_megatron_optimizer(muon_config(**changes), [chunk], overrides)
    assert isinstance(optimizer, FullyShardedOptimizer) and isinstance(optimizer.optimizer, Muon)
    return optimizer


def by_name(optimizer: FullyShardedOptimizer, chunk: Any) -> dict[str, dict[str, Any]]:
    """Return each parameter's group by the parameter's name in the model."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {name: groups[id(p)] for name, p in chunk.module.named_parameters()}


# --- settings ---------------------------------------------------------------------------------------------------------


def _settings() -> None:
    start()
    chunk = wrap(build_tower())
    group = build(chunk).optimizer.matrix_groups[0]
    defaults = {
        "momentum": 0.95,
        "nesterov": False,
        "num_ns_steps": 5,
        "coefficients": "quintic",
        "precision": "medium",
        "scale_mode": "spectral",
        "extra_scale_factor": 1.0,
        "joins_pieces": False,
        "lr": 0.01,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
        "momentum_dtype": torch.float32,
    }
    assert {key: group[key] for key in defaults} == defaults
    given = {
        "muon_momentum": ("momentum", 0.8),
        NESTEROV: ("nesterov", True),
        "muon_num_ns_steps": ("num_ns_steps", 3),
        "muon_coefficient_type": ("coefficients", "simple"),
        "muon_fp32_matmul_prec": ("precision", "high"),
        "muon_scale_mode": ("scale_mode", "unit_rms_norm"),
        "muon_extra_scale_factor": ("extra_scale_factor", 0.2),
        "decoupled_weight_decay": ("decoupled_weight_decay", False),
        "lr": ("lr", 0.5),
        "weight_decay": ("weight_decay", 0.25),
    }
    for field, (setting, value) in given.items():
        found = build(chunk, **{field: value}).optimizer.matrix_groups[0]
        assert {key for key in defaults if found[key] != defaults[key]} == {setting}, field
        assert found[setting] == value
    optimizer = build(chunk, muon_tp_mode="duplicated", adam_beta1=0.7, adam_beta2=0.8, adam_eps=1e-3)
    assert all(group["joins_pieces"] for group in optimizer.optimizer.matrix_groups)
    rest = optimizer.optimizer.rest
    assert type(rest).__name__ == "AdamW"
    assert (rest.param_groups[0]["betas"], rest.param_groups[0]["eps"]) == ((0.7, 0.8), 1e-3)
    # megatron-core's own config has fewer options.
    plain = get_megatron_optimizer(optimizer_config(optimizer="muon"), [chunk])
    assert plain.optimizer.matrix_groups[0]["coefficients"] == "quintic"


def test_settings_are_those_of_the_config() -> None:
    run_ranks(1, _settings)


# --- which parameters are matrices ------------------------------------------------------------------------------------

LAYER = "decoder.layers.0."
GATED: dict[str, Any] = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}


def _grouping() -> None:
    start()
    with cpu_shim():
        chunk = wrap(build_gpt(num_query_groups=1, **GATED))
        groups = by_name(build(chunk), chunk)
        matrices = {name: group["parts"] for name, group in groups.items() if group["algorithm"] == "muon"}
        # Width 12, two heads of 6 in one group: 12 rows of queries, 6 of keys, 6 of values.
        expected = {
            "self_attention.linear_proj.weight": (),
            "self_attention.linear_qkv.weight": (12, 6, 6),
            "mlp.linear_fc1.weight": (),
            "mlp.linear_fc2.weight": (),
        }
        layers = [f"decoder.layers.{index}." for index in range(2)]
        assert matrices == {layer + name: parts for layer in layers for name, parts in expected.items()}
        adam = {name for name, group in groups.items() if group["algorithm"] == "AdamW"}
        assert adam | matrices.keys() == groups.keys()
        assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= adam
        assert "embedding.position_embeddings.weight" in adam and f"{LAYER}mlp.linear_fc1.bias" in adam
        assert groups[f"{LAYER}mlp.linear_fc1.bias"]["wd_mult"] == 0.0
        assert groups["output_layer.weight"]["wd_mult"] == 1.0

        optimizer = build(chunk, muon_split_gate_up=True, muon_split_qkv=False)
        groups = by_name(optimizer, chunk)
        assert groups[f"{LAYER}mlp.linear_fc1.weight"]["parts"] == (20, 20)
        assert groups[f"{LAYER}self_attention.linear_qkv.weight"]["parts"] == ()
        lines = [" ".join(line.split()) for line in optimizer.table.splitlines()]
        assert "Muon 2 40x12 matrix, parts of rows 20+20" in lines and "Muon 2 24x12 matrix" in lines
        assert "AdamW 2 29x12 embedding or output layer" in lines and "AdamW 1 6x12 embedding" in lines


def test_matrices_of_a_gpt() -> None:
    run_ranks(1, _grouping)


def _experts() -> None:
    start()
    with cpu_shim():
        chunk = wrap(build_gpt(add_bias_linear=False, **WITH_EXPERTS))
        groups = by_name(build(chunk, muon_split_gate_up=True), chunk)
        router, expert = f"{LAYER}mlp.router.weight", f"{LAYER}mlp.experts.local_experts.3."
        assert groups[router]["algorithm"] == groups[f"{expert}linear_fc2.weight"]["algorithm"] == "muon"
        assert groups[f"{expert}linear_fc1.weight"]["parts"] == (10, 10)
        optimizer = build(chunk, muon_router_adam=True)
        assert by_name(optimizer, chunk)[router]["algorithm"] == "AdamW"
        assert any(line.split()[-1] == "router" for line in optimizer.table.splitlines())


def test_matrices_of_a_gpt_with_experts() -> None:
    run_ranks(1, _experts)


def test_a_gated_attention_has_four_parts() -> None:
    model = SimpleNamespace(num_attention_heads=8, num_query_groups=2, kv_channels=4, attention_output_gate=True)
    weight = SimpleNamespace(geometry=SimpleNamespace(piece_shape=(80, 32)))
    parts = ours._parts(muon_config(), f"{LAYER}self_attention.linear_qkv.weight", weight, model)
    assert parts == (16, 16, 4, 4)


def test_queries_of_half_a_group_are_refused() -> None:
    model = SimpleNamespace(num_attention_heads=8, num_query_groups=1, kv_channels=4)
    weight = SimpleNamespace(geometry=SimpleNamespace(piece_shape=(20, 32)))
    name = f"{LAYER}self_attention.linear_qkv.weight"
    with pytest.raises(ValueError, match=r"whole groups of query heads, 40 rows each, on every tensor.*, got 20 rows"):
        ours._parts(muon_config(), name, weight, model)
    assert ours._parts(muon_config(muon_split_qkv=False), name, weight, model) == ()


def test_experts_side_by_side_are_refused() -> None:
    owner: Any = SimpleNamespace(num_local_experts=2)
    name = "decoder.layers.0.mlp.experts.weight1"
    with pytest.raises(ValueError, match=rf"matrices of {name}: expected one expert in each parameter .*, got 2 side"):
        ours._refuse_side_by_side(name, owner)
    owner.num_local_experts = 1
    ours._refuse_side_by_side(name, owner)


class Biased(Tower):
    """A tower whose matrices are frozen or not."""

    def freeze(self) -> Any:
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.ndim < 2)
        return self


def _stages(problem: str) -> None:
    """Ranks of one model with other parameters each, as pipeline stages have."""
    start()
    chunk = wrap(build_tower())
    patch = pytest.MonkeyPatch()
    original = ours.choose_matrices

    def choose(config: Any, chunks: Any) -> Any:
        if problem and my_rank() == 1:
            raise ValueError(problem)
        choice = original(config, chunks)
        if my_rank() == 1 or problem == "none":
            choice.others.update({name: item.parameter for name, item in choice.matrices.items()})
            choice.reasons.update(dict.fromkeys(choice.matrices, "another stage's"))
            choice.matrices.clear()
        return choice

    with patch.context() as context:
        context.setattr(ours, "choose_matrices", choose)
        optimizer = build(chunk)
    assert optimizer.optimizer.matrix_groups[0]["params"] == [] or my_rank() == 0
    assert len(optimizer.get_parameters()) == len(list(chunk.parameters()))


def test_a_stage_may_hold_no_matrix() -> None:
    run_ranks(2, _stages, "")


def test_a_problem_of_one_rank_is_raised_on_all() -> None:
    for message in run_ranks_expecting(2, ValueError, _stages, "matrices of x: expected y, got z."):
        assert message == "matrices of x: expected y, got z."


def _no_matrices() -> None:
    start()
    torch.manual_seed(7)
    build(wrap(Biased(model_config()).freeze()))


def test_a_model_without_matrices_is_refused() -> None:
    for message in run_ranks_expecting(2, ValueError, _no_matrices):
        assert "expected matrices in the model with 'muon', got none that is trainable. Use 'adam'." in message


def _idle(option: str) -> None:
    start()
    with cpu_shim():
        build(wrap(build_gpt()), **{option: True})


@pytest.mark.parametrize("option", ["muon_split_gate_up", "muon_router_adam"])
def test_options_without_effect_are_refused(option: str) -> None:
    for message in run_ranks_expecting(1, ValueError, _idle, option):
        assert f"OptimizerConfig.{option}: expected False for a model without such layers, got True" in message


class _Tied(torch.nn.Module):
    """An embedding whose weight a later layer has, too."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 6)
        self.body, self.head = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 8, bias=False)
        self.head.weight = self.table.weight
        body: Any = self.body.weight
        body.geometry = SimpleNamespace(piece_shape=(6, 6))


def test_an_embedding_that_is_tied_to_another_layer_is_no_matrix() -> None:
    chunks: Any = [_Tied()]
    choice = ours.choose_matrices(muon_config(), chunks)
    assert set(choice.matrices) == {"body.weight"} and choice.reasons == {"table.weight": "embedding"}


# --- overrides --------------------------------------------------------------------------------------------------------


def _overrides() -> None:
    """Rates and weight decay of single parameters, among matrices and others."""
    start()
    chunk = wrap(build_tower())
    names = [name for name, _ in chunk.module.named_parameters()]
    weights = [name for name in names if name.endswith("weight")]
    biases = [name for name in names if name.endswith("bias")]
    overrides = {
        ParamKey(name=f"*{weights[0]}"): {"max_lr": 0.5, "wd_mult": 0.0},
        ParamKey(name=f"*{biases[0]}"): {"max_lr": 0.25},
    }
    optimizer = build(chunk, overrides=overrides)
    groups = by_name(optimizer, chunk)
    assert (groups[weights[0]]["algorithm"], groups[biases[0]]["algorithm"]) == ("muon", "AdamW")
    assert [groups[name]["max_lr"] for name in (weights[0], biases[0], weights[1])] == [0.5, 0.25, 0.01]
    assert [groups[name]["wd_mult"] for name in (weights[0], weights[1])] == [0.0, 1.0]
    assert [groups[name]["default_config"] for name in (weights[0], biases[0], weights[1])] == [False, False, True]
    before = full_weights(chunk)
    for group in optimizer.param_groups:  # as megatron-core's scheduler does at its peak
        group.update(lr=group["max_lr"], weight_decay=0.1 * group["wd_mult"])
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    optimizer.step()
    moved = {name: float((value - before[name]).abs().max()) for name, value in full_weights(chunk).items()}
    assert all(moved.values())
    # Adam's first step has the size of the rate, but for a tenth of rate and weight, which decay.
    assert [moved[name] for name in biases[:2]] == pytest.approx([0.25, 0.01], rel=0.1)


def test_rates_and_decay_of_single_parameters() -> None:
    run_ranks(2, _overrides)


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"fp16": True}, NotImplementedError, "fp16: expected False with optimizer 'muon', as in megatron-core, got True"),
    ({"muon_tp_mode": "distributed"}, NotImplementedError, "each whole matrix is computed once, by one rank"),
    ({"muon_tp_mode": "x"}, ValueError, "muon_tp_mode: expected 'blockwise' or 'duplicated', got 'x'"),
    ({"muon_scalar_optimizer": "lion"}, NotImplementedError, "muon_scalar_optimizer: expected 'adam' .*, got 'lion'"),
    ({"use_precision_aware_optimizer": True}, NotImplementedError, "expected False with optimizer 'muon', got True"),
    ({"use_layer_wise_distributed_optimizer": True}, NotImplementedError, "layer_wise_distributed_optimizer: expected"),
    ({"muon_fp32_matmul_prec": "low"}, ValueError, "OptimizerConfig of Muon: muon precision: expected one of"),
    ({"muon_coefficient_type": "aol"}, ValueError, "OptimizerConfig of Muon: muon coefficients: expected one of"),
    ({"muon_num_ns_steps": 0}, ValueError, "OptimizerConfig of Muon: muon num_ns_steps: expected an int from 1"),
    ({"muon_momentum": 1.0}, ValueError, r"OptimizerConfig of Muon: muon momentum: expected in \[0, 1\), got 1.0"),
    ({"optimizer": "dist_muon"}, NotImplementedError, "got 'dist_muon'. Use 'muon'"),
]


def _refusals() -> None:
    start()
    chunk = wrap(build_tower())
    for changes, error, match in REFUSED:
        config = muon_config()
        for name, value in changes.items():  # megatron-core's own checks would be first
            setattr(config, name, value)
        gather: Callable[..., Any] = dist.all_gather_object
        with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match=match):
            patch.setattr(dist, "all_gather_object", lambda *_, **__: pytest.fail("communicates first"))
            get_megatron_optimizer(config, [chunk])
        assert dist.all_gather_object is gather
        base = torch.optim.SGD(chunk.parameters(), lr=0.1)
        with pytest.raises(error, match=match):
            FullyShardedOptimizer(base, config, None, None, [chunk])


def test_refusals() -> None:
    run_ranks(1, _refusals)
