# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of megatron-core's models as units: shared norms, hybrid stacks with Mamba layers, further predictions.

The reference is one process on the data of all ranks, which differ. Sums over ranks come in another order, hence the
tolerances of `assert_close`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from megatron.core.distributed.fsdp import mcore_fsdp_v2_units
from megatron.pretrain.attention import SdpaCoreAttention
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import (
    assert_close,
    build_gpt,
    cpu_shim,
    full_gradients,
    full_weights,
    model_config,
    my_rank,
    start,
    wrap,
)
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks
from tests.unit_tests.trace import CollectiveLog

WIDTH = 12
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS = 3
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}


def _inputs(step: int, rank: int) -> torch.Tensor:
    # Of which a reentrant checkpoint needs one that asks for gradients.
    return torch.randn(5, 2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


def _assert_trains_as_alone(build: Callable[[], nn.Module], ranks: int, **options: Any) -> tuple[Any, CollectiveLog]:
    """Train a chunk and one process for some steps; return the chunk and the last step's collectives."""
    reference, chunk = build(), wrap(build(), **options)
    for step in range(STEPS):
        for rank in range(ranks):
            (reference(_inputs(step, rank)).square().mean() / ranks).backward()
        with CollectiveLog() as log:
            chunk(_inputs(step, my_rank())).square().mean().backward()
            chunk.finish_grad_sync()
        assert_same_on_all_ranks(log.entries)
        assert_at_rest(chunk.module)
        expected = {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}
        assert all(float(gradient.abs().max()) > 1e-4 for gradient in expected.values())
        assert_close(full_gradients(chunk), expected)
        with torch.no_grad():
            for p, q in zip(chunk.parameters(), reference.parameters(), strict=True):
                p.add_(p.grad, alpha=-0.1)
                q.add_(q.grad, alpha=-0.1)
        chunk.zero_grad_buffer()
        reference.zero_grad()
    return chunk, log


# --- modules of several units -----------------------------------------------------------------------------------------


class _Layer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class _Sharing(MegatronModule):
    """Layers that share one norm, which the model calls at the end, too; its own linear layer is shared by two."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__(model_config())
        torch.manual_seed(3)
        norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList([_Layer(norm) for _ in range(num_layers)])
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def _shared(strategy: str, min_numel: int) -> int:
    start()
    options = {"data_parallel_sharding_strategy": strategy, "megatron_fsdp_min_unit_numel": min_numel}
    chunk, log = _assert_trains_as_alone(_Sharing, 2, fsdp_unit_modules=[_Layer], **options)
    owned = {unit.name: {name for g in unit.parameter_groups for name in g.fqns} for unit in chunk.fsdp_units()}
    assert owned["layers.0.norm"] == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(owned[f"layers.{index}"] == {"up.weight", "up.bias"} for index in range(3))
    again = wrap(_Sharing(), fsdp_unit_modules=[_Layer], **options)
    again.load_state_dict(chunk.module.state_dict())
    assert_close(full_weights(again), full_weights(chunk), rtol=0)
    assert [name for name in chunk.state_dict_for_save_checkpoint() if "norm.1.weight" in name] == [
        "module.layers.0.norm.1.weight"
    ]
    return sum(name == "all_gather" for name, *_ in log.entries)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_norm_of_several_units_is_gathered_where_it_is_used(strategy: str) -> None:
    """It is called four times a step: gathered once for forward, and once for the backward of each call."""
    numbers = run_ranks(2, _shared, strategy, 0)
    if strategy == "optim_grads_params":
        assert numbers[0] == 3 * 2 + (1 + 3), numbers


def _unit_inside() -> None:
    start()
    chunk, _ = _assert_trains_as_alone(_Sharing, 2, fsdp_unit_modules=[_Layer, nn.LayerNorm])
    owned = {unit.name: {name for g in unit.parameter_groups for name in g.fqns} for unit in chunk.fsdp_units()}
    assert owned["layers.0.norm"] == {"1.weight", "1.bias"}
    assert owned["layers.0.norm.0"] == {"weight", "bias"}


def test_a_shared_module_may_have_a_unit_inside() -> None:
    run_ranks(2, _unit_inside)


def test_layers_that_share_a_norm_are_not_joined() -> None:
    run_ranks(2, _shared, "optim_grads_params", 10**6)


class _Decoder(MegatronModule):
    """The layers of a GPT without its embedding, all of whose norms but the first layer's are one."""

    def __init__(self, **changes: Any) -> None:
        model = build_gpt(num_layers=3, **changes)
        super().__init__(model.config)
        self.decoder = model.decoder
        for layer in model.decoder.layers:
            layer.pre_mlp_layernorm = model.decoder.layers[1].input_layernorm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(hidden_states=x, attention_mask=None)


def _shared_in_gpt(strategy: str, changes: dict[str, Any]) -> None:
    start()
    with cpu_shim():
        build = partial(_Decoder, **changes)
        chunk, _ = _assert_trains_as_alone(build, 2, data_parallel_sharding_strategy=strategy)
        names = [unit.name for unit in chunk.fsdp_units()]
        assert "decoder.layers.0.pre_mlp_layernorm" in names
        assert "decoder.layers.2" in names


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("optim", {}),
        ("optim_grads_params", {}),
        ("optim_grads_params", RECOMPUTE),
    ],
)
def test_layers_of_megatron_core_may_share_a_norm(strategy: str, changes: dict[str, Any]) -> None:
    run_ranks(2, _shared_in_gpt, strategy, changes)


def _tied_weight() -> str:
    start()
    model = _Sharing()
    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]
    with pytest.raises(ValueError) as raised:
        wrap(model, fsdp_unit_modules=[_Layer])
    assert not any(hasattr(module, "parameter_groups") for module in model.modules())
    return str(raised.value)


def test_a_weight_of_two_modules_in_two_units_is_refused_by_name() -> None:
    (message,) = run_ranks(1, _tied_weight)
    assert "up.weight, which unit _Layer has sharded already: a weight tied across two units." in message


def test_shared_modules_are_the_largest_ones() -> None:
    model = _Sharing()
    layers = list(model.layers)
    assert mcore_fsdp_v2_units.shared_modules(model, layers) == [model.norm]
    # A part that others use without the rest is a unit inside.
    model.part = model.norm[1]  # type: ignore[index]
    assert mcore_fsdp_v2_units.shared_modules(model, layers) == [model.norm]
    other = _Layer(model.norm[1])  # type: ignore[index]
    model.layers.append(other)  # type: ignore[operator]
    assert mcore_fsdp_v2_units.shared_modules(model, [*layers, other]) == [model.norm, model.norm[1]]  # type: ignore[index]
    assert mcore_fsdp_v2_units.shared_modules(model, []) == []


# --- hybrid stacks ----------------------------------------------------------------------------------------------------


class _Mixer(MegatronModule):
    """Stands for Mamba's mixer, whose kernels need a GPU: a running sum over the sequence between two products."""

    def __init__(self, config: Any, d_model: int, **unused: Any) -> None:
        super().__init__(config)
        self.rise, self.fall = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model, bias=False)

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        return self.fall(torch.cumsum(torch.tanh(self.rise(hidden_states)), dim=0)), None


def _hybrid_submodules() -> dict[str, Any]:
    parts = get_gpt_layer_local_spec().submodules
    parts.self_attention.submodules.core_attention = SdpaCoreAttention
    bda = get_bias_dropout_add
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm, self_attention=parts.self_attention, self_attn_bda=bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=bda)
    experts = get_gpt_layer_local_spec(num_experts=2).submodules
    moe = TransformerLayerSubmodules(pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=experts.mlp, mlp_bda=bda)
    mamba = MambaLayerSubmodules(norm=parts.input_layernorm, mixer=_Mixer, mamba_bda=bda)
    return {
        "mamba_layer": ModuleSpec(module=MambaLayer, submodules=mamba),
        "attention_layer": ModuleSpec(module=TransformerLayer, submodules=attention),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp),
        "moe_layer": ModuleSpec(module=TransformerLayer, submodules=moe),
    }


class _Hybrid(MegatronModule):
    """A hybrid stack of this megatron-core, with inputs of numbers."""

    def __init__(self, pattern: str, **changes: Any) -> None:
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        torch.manual_seed(5)
        config = model_config(num_layers=len(pattern), num_moe_experts=2, add_bias_linear=False, **changes)
        super().__init__(config)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        options: dict[str, Any] = {"pg_collection": groups, "post_layer_norm": False}
        try:
            block: Any = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
        except ImportError:
            # Before 0.19 the stack chooses its layers itself.
            block = importlib.import_module("megatron.core.ssm.mamba_block")
            submodules = block.MambaStackSubmodules(**_hybrid_submodules())
            self.decoder = block.MambaStack(config, submodules, hybrid_override_pattern=pattern, **options)
        else:
            submodules = block.HybridStackSubmodules(**_hybrid_submodules())
            self.decoder = block.HybridStack(config, submodules, layer_type_list=list(pattern), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x, attention_mask=None)


def _hybrid(strategy: str) -> None:
    start()
    with cpu_shim():
        chunk, _ = _assert_trains_as_alone(lambda: _Hybrid("M*-EM"), 2, data_parallel_sharding_strategy=strategy)
        assert [unit.name for unit in chunk.fsdp_units()][1:] == [f"decoder.layers.{index}" for index in range(5)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_of_hybrid_stacks_are_units(strategy: str) -> None:
    run_ranks(2, _hybrid, strategy)


# --- further predictions ----------------------------------------------------------------------------------------------


def _further_predictions() -> None:
    start()
    with cpu_shim():
        chunk = wrap(build_gpt(tied=True, mtp_num_layers=2))
        modules = dict(chunk.module.named_modules())
        owned = {unit.name: {name for g in unit.parameter_groups for name in g.fqns} for unit in chunk.fsdp_units()}
        outer = [name for name in owned if name.startswith("mtp.layers.") and name.count(".") == 2]
        inner = [name for name in owned if name.startswith("mtp.layers.") and name.count(".") == 3]
        assert outer == ["mtp.layers.0", "mtp.layers.1"] and len(inner) == 2
        assert all(isinstance(modules[name], TransformerLayer) for name in inner)
        assert all({"eh_proj.weight", "enorm.weight", "final_layernorm.bias"} <= owned[name] for name in outer)
        assert all("mlp.linear_fc1.weight" in owned[name] for name in inner)
        # Embedding and output layer, which they use, too, are the root's.
        assert "embedding.word_embeddings.weight" in owned[type(chunk.module).__name__]


def test_layers_of_further_predictions_are_units() -> None:
    run_ranks(2, _further_predictions)


def test_layers_that_cannot_be_imported_are_no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MambaLayer in mcore_fsdp_v2_units.default_classes()
    # As on an installation that lacks what the module imports.
    monkeypatch.setitem(sys.modules, "megatron.core.ssm.mamba_layer", None)
    names = [cls.__name__ for cls in mcore_fsdp_v2_units.default_classes()]
    assert names == ["TransformerLayer", "MultiTokenPredictionLayer"]
