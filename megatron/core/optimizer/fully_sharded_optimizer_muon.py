# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon for FSDP v2 chunks, as an `OptimizerConfig` asks for it: what it means, and which parameters are matrices.

What Muon computes, and which rank, is experimental/muon.py's; the optimizer of all other parameters is made by
fully_sharded_optimizer_config.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import nn

from megatron.core.distributed.fsdp.experimental import MatrixChoice, MatrixParameter, Muon, MuonRule, describe_choice
from megatron.core.distributed.fsdp.mcore_fsdp_v2_checkpoint import canonical_name, is_gated
from megatron.core.optimizer.fully_sharded_optimizer_config import base_optimizer


def check_muon(config: OptimizerConfig) -> None:
    """Refuse what Muon cannot do as it is asked; nothing if the optimizer is another.

    Raises:
        NotImplementedError: a field that it does not support.
        ValueError: a value without a meaning.
    """
    if config.optimizer != "muon":
        return
    if config.fp16:
        raise NotImplementedError(
            "OptimizerConfig.fp16: expected False with optimizer 'muon', as in megatron-core, got True. Train in bf16."
        )
    if config.use_precision_aware_optimizer:
        raise NotImplementedError(
            "OptimizerConfig.use_precision_aware_optimizer: expected False with optimizer 'muon', got True; momentum "
            "is float32. Drop --use-precision-aware-optimizer."
        )
    scalar = getattr(config, "muon_scalar_optimizer", "adam")
    if scalar != "adam":
        raise NotImplementedError(
            f"OptimizerConfig.muon_scalar_optimizer: expected 'adam' with Megatron-FSDP v2, got {scalar!r}. Drop "
            "--muon-scalar-optimizer."
        )
    if config.muon_tp_mode == "distributed":
        raise NotImplementedError(
            "OptimizerConfig.muon_tp_mode: expected 'blockwise' or 'duplicated' with Megatron-FSDP v2, got "
            "'distributed'. Use 'duplicated': each whole matrix is computed once, by one rank, so that nothing is done "
            "twice."
        )
    if config.muon_tp_mode not in ("blockwise", "duplicated"):
        raise ValueError(
            f"OptimizerConfig.muon_tp_mode: expected 'blockwise' or 'duplicated', got {config.muon_tp_mode!r}."
        )
    rule = MuonRule()
    try:
        rule.check({**rule.defaults(), **_settings(config)})
    except ValueError as error:
        raise ValueError(f"OptimizerConfig of Muon: {error}") from error


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return `Muon`'s settings; two of the fields have other names, or none, in older releases of megatron-core."""
    given: Any = config
    return {
        "momentum": config.muon_momentum,
        "nesterov": given.muon_nesterov if hasattr(given, "muon_nesterov") else given.muon_use_nesterov,
        "num_ns_steps": config.muon_num_ns_steps,
        "coefficients": getattr(given, "muon_coefficient_type", "quintic"),
        "precision": config.muon_fp32_matmul_prec,
        "scale_mode": config.muon_scale_mode,
        "extra_scale_factor": config.muon_extra_scale_factor,
    }


def muon_optimizer(
    config: OptimizerConfig, param_groups: Sequence[dict[str, Any]], model_chunks: Sequence[MegatronModule]
) -> tuple[Muon, str]:
    """Return Muon over the chunks' matrices with an Adam for everything else, and a table of what goes where.

    Every rank of the model must call it.

    Args:
        config: passed by `check_muon`.
        param_groups: of all trainable parameters, as megatron-core makes them; not empty.
        model_chunks: wrapped by FSDP v2.

    Raises:
        ValueError: on every rank: on some rank there are parameters that cannot be told apart into matrices, or there
            are no matrices at all, or an option has no effect on any of them.
    """
    found: tuple[Muon, str] | None = None
    mine = _Findings()
    try:
        choice = choose_matrices(config, model_chunks)
        found = _build(config, param_groups, choice, model_chunks[0].device)
        mine = _Findings(len(choice.matrices), _idle_options(config, choice, model_chunks[0].config))
    except ValueError as error:
        mine = _Findings(problem=str(error))
    group = model_chunks[0].model_group
    theirs = [mine] * group.size()
    dist.all_gather_object(theirs, mine, group=group)
    if problem := next((one.problem for one in theirs if one.problem), None):
        raise ValueError(problem)
    if not any(one.num_matrices for one in theirs):
        raise ValueError(
            "OptimizerConfig.optimizer: expected matrices in the model with 'muon', got none that is trainable. Use "
            "'adam'."
        )
    if idle := sorted(frozenset.intersection(*(one.idle_options for one in theirs))):
        raise ValueError(
            f"OptimizerConfig.{idle[0]}: expected False for a model without such layers, got True, which would have no "
            "effect. Leave it out."
        )
    assert found is not None, "whoever has no problem has an optimizer"
    return found


@dataclass(frozen=True)
class _Findings:
    """What one rank has found: how many matrices, which options have no effect on its part, what is wrong."""

    num_matrices: int = 0
    idle_options: frozenset[str] = frozenset()
    problem: str = ""


def _idle_options(config: OptimizerConfig, choice: MatrixChoice, model: Any) -> frozenset[str]:
    has_effect = {
        "muon_split_gate_up": any(is_gated(name.rpartition(": ")[2], model) for name in choice.matrices),
        "muon_router_adam": "router" in choice.reasons.values(),
    }
    return frozenset(name for name, is_used in has_effect.items() if getattr(config, name, False) and not is_used)


def choose_matrices(config: OptimizerConfig, model_chunks: Sequence[MegatronModule]) -> MatrixChoice:
    """Sort the trainable parameters of this rank's chunks by name and logical shape, as megatron-core does.

    Matrices have two dims. Other than megatron-core's, embeddings of positions are none, and with ``muon_router_adam``
    neither are routers.

    Raises:
        ValueError: one tensor that holds several experts side by side, or queries, keys and values that a piece of
            tensor parallelism holds in other numbers than the groups of heads.
    """
    choice = MatrixChoice()
    for index, chunk in enumerate(model_chunks):
        prefix = f"chunk {index}: " if len(model_chunks) > 1 else ""
        owners: dict[int, list[nn.Module]] = {}
        for module in chunk.modules():
            for held in module._parameters.values():
                owners.setdefault(id(held), []).append(module)
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            short = canonical_name(name)
            reason = _reason_against(config, short, parameter, owners[id(parameter)])
            if reason is None:
                _refuse_side_by_side(short, owners[id(parameter)][0])
                parts = _parts(config, short, parameter, chunk.config)
                choice.matrices[prefix + short] = MatrixParameter(parameter, parts=parts)
            else:
                choice.others[prefix + short] = parameter
                choice.reasons[prefix + short] = reason
    return choice


def _reason_against(config: OptimizerConfig, name: str, parameter: Any, owners: Sequence[nn.Module]) -> str | None:
    """Return why a parameter is not for Muon, or None if it is.

    The copy of an embedding that a later pipeline stage has for predictions lacks megatron-core's mark of embeddings.
    """
    if parameter.ndim != 2:
        return f"{parameter.ndim}-D"
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        return "embedding or output layer"
    if any(isinstance(owner, (nn.Embedding, VocabParallelEmbedding)) for owner in owners):
        return "embedding"
    if getattr(config, "muon_router_adam", False) and name.endswith("router.weight"):
        return "router"
    return None


def _refuse_side_by_side(name: str, owner: nn.Module) -> None:
    num_experts = getattr(owner, "num_local_experts", 1)
    if name.endswith((".experts.weight1", ".experts.weight2")) and num_experts > 1:
        raise ValueError(
            f"matrices of {name}: expected one expert in each parameter with optimizer 'muon', got {num_experts} side "
            f"by side in one of {type(owner).__name__}. Use experts one by one, or TransformerEngine's grouped layers "
            "(no moe_use_legacy_grouped_gemm)."
        )


def _parts(config: OptimizerConfig, name: str, parameter: Any, model: Any) -> tuple[int, ...]:
    """Return the rows of the matrices that are fused in a parameter, per repetition; empty for one matrix."""
    rows = parameter.geometry.piece_shape[0]
    if config.muon_split_qkv and name.endswith("linear_qkv.weight"):
        queries = model.num_attention_heads // model.num_query_groups * model.kv_channels
        gate = (queries,) if getattr(model, "attention_output_gate", False) else ()
        parts = (queries, *gate, model.kv_channels, model.kv_channels)
        if rows % sum(parts):
            raise ValueError(
                f"parts of {name}: expected whole groups of query heads, {sum(parts)} rows each, on every "
                f"tensor-parallel rank, got {rows} rows. Use a tensor-parallel size that divides num_query_groups, or "
                "muon_split_qkv=False (--muon-no-split-qkv)."
            )
        return parts
    if getattr(config, "muon_split_gate_up", False) and is_gated(name, model):
        # Halves of the piece if pieces are orthogonalised one by one, else of the whole.
        half = (parameter.shape[0] if config.muon_tp_mode == "duplicated" else rows) // 2
        return (half, half)
    return ()


def _build(
    config: OptimizerConfig, param_groups: Sequence[dict[str, Any]], choice: MatrixChoice, device: torch.device
) -> tuple[Muon, str]:
    parts_of = {id(item.parameter): item.parts for item in choice.matrices.values()}
    joins = config.muon_tp_mode == "duplicated"
    matrices, others = [], []
    for group in param_groups:
        by_parts: dict[tuple[int, ...], list[Any]] = {}
        rest = []
        for parameter in group["params"]:
            if id(parameter) in parts_of:
                by_parts.setdefault(parts_of[id(parameter)], []).append(parameter)
            else:
                rest.append(parameter)
        matrices += [
            {**group, "params": params, "parts": parts, "joins_pieces": joins} for parts, params in by_parts.items()
        ]
        others += [{**group, "params": rest}] if rest else []
    # A pipeline stage may hold no matrix.
    matrices = matrices or [{**param_groups[0], "params": [], "joins_pieces": joins}]
    adam = None
    if others:
        adam_config = copy.copy(config)
        adam_config.optimizer = "adam"
        adam = base_optimizer(adam_config, others, device)
    assert config.lr is not None, "megatron-core's groups come with a learning rate"
    muon = Muon(
        matrices,
        config.lr,
        weight_decay=config.weight_decay,
        decoupled_weight_decay=config.decoupled_weight_decay,
        rest=adam,
        **_settings(config),
    )
    return muon, describe_choice(choice, "none" if adam is None else type(adam).__name__)
