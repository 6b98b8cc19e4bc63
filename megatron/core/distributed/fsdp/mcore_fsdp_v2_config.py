# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The data-parallel config of a Megatron-Core chunk: FSDP v2's own fields, what each one means, which are refused."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as _StockConfig,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    OUTER_STRATEGIES,
    STRATEGIES,
    MixedPrecisionPolicy,
    Placements,
    QuantizationRecipe,
    SchedulePolicy,
    is_primary_weight,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_experts import check_expert_layout
from megatron.core.distributed.fsdp.mcore_fsdp_v2_precision import mixed_precision_policy


@dataclass
class DistributedDataParallelConfig(_StockConfig):
    """megatron-core's config plus the choices of FSDP v2; fields that a release lacks are added.

    Of megatron-core's own fields, `data_parallel_sharding_strategy` names what is sharded: "no_shard", the default, is
    plain data parallelism. `num_distributed_optimizer_instances` is the number of ranks along an outer data-parallel
    axis, and `outer_dp_sharding_strategy` says whether that axis shards the optimizer state, too.

    Attributes:
        use_megatron_fsdp_v2: wrap model chunks with this module's `FullyShardedDataParallel`.
        expert_data_parallel_sharding_strategy: what is sharded of experts that ranks share, over the ranks with copies
            of them; None means `data_parallel_sharding_strategy`.
        expert_outer_dp_sharding_strategy: the same of the outer axis; None means `outer_dp_sharding_strategy`.
        megatron_fsdp_main_params_dtype: dtype of the main weights.
        megatron_fsdp_main_grads_dtype: dtype in which gradients accumulate; None means float32 with
            `grad_reduce_in_fp32`, else the compute dtype, the widest one where parameters differ.
        megatron_fsdp_grad_comm_dtype: dtype in which gradients are sent, no wider than the main-gradient dtype, which
            None means.
        megatron_fsdp_forward_prefetch_units: units whose weights are gathered ahead in forward (with
            `overlap_param_gather`).
        megatron_fsdp_backward_prefetch_units: the same in backward.
        megatron_fsdp_reshard_after_forward: see `SchedulePolicy.reshard_after_forward`.
        megatron_fsdp_unify_communication_stream: see `FsdpContext`.
        megatron_fsdp_static_gradients: see `SchedulePolicy.static_gradients`.
        megatron_fsdp_trace_pool: see `fully_shard_context`.
        megatron_fsdp_create_all_gather_group: gather weights in process groups of their own, as
            `fully_shard_context(separate_communicators=True)` does. They are made here: the all-gather group of
            megatron-core's `initialize_model_parallel(create_all_gather_group=True)` is not needed.
        megatron_fsdp_quantized_gather: keep and gather the layers' matrices in a low-bit format: a recipe, or "fp8",
            "mxfp8" or "nvfp4" for its defaults. With the model config's `first_last_layers_bf16` some layers are not.
        megatron_fsdp_min_unit_numel: join neighbouring units until one has so many parameters, so that small layers are
            gathered and reduced together; 0 for none.
    """

    use_megatron_fsdp_v2: bool = False
    expert_data_parallel_sharding_strategy: str | None = None
    expert_outer_dp_sharding_strategy: str | None = None
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_forward_prefetch_units: int = 1
    megatron_fsdp_backward_prefetch_units: int = 1
    megatron_fsdp_reshard_after_forward: bool | None = None
    megatron_fsdp_unify_communication_stream: bool = False
    megatron_fsdp_static_gradients: bool = False
    megatron_fsdp_trace_pool: bool = False
    megatron_fsdp_create_all_gather_group: bool = False
    megatron_fsdp_min_unit_numel: int = 0
    megatron_fsdp_quantized_gather: QuantizationRecipe | str | None = None
    fp4_param_gather: bool = False


_HONOURED = frozenset(
    {
        "average_in_collective",  # the mean is taken in the collective or before it: the same number
        "check_for_nan_in_grad",
        "data_parallel_sharding_strategy",
        "expert_data_parallel_sharding_strategy",
        "expert_outer_dp_sharding_strategy",
        "fp4_param_gather",  # primary weights are gathered in their format in any case; see check_primary_weights
        "fp8_param_gather",
        "grad_reduce_in_fp32",
        "keep_fp8_transpose_cache",
        "megatron_fsdp_backward_prefetch_units",
        "megatron_fsdp_create_all_gather_group",
        "megatron_fsdp_forward_prefetch_units",
        "megatron_fsdp_grad_comm_dtype",
        "megatron_fsdp_main_grads_dtype",
        "megatron_fsdp_main_params_dtype",
        "megatron_fsdp_min_unit_numel",
        "megatron_fsdp_quantized_gather",
        "megatron_fsdp_reshard_after_forward",
        "megatron_fsdp_static_gradients",
        "megatron_fsdp_trace_pool",
        "megatron_fsdp_unify_communication_stream",
        "nccl_ub",  # symmetric memory for what is communicated
        "num_distributed_optimizer_instances",
        "outer_dp_sharding_strategy",
        "overlap_grad_reduce",  # reductions overlap in any case; loops read it to bracket microbatches with no_sync
        "overlap_param_gather",
        "use_distributed_optimizer",  # the strategy says whether optimizer state is sharded; loops read it
        "use_megatron_fsdp_v2",
    }
)


_STRATEGIES = {"data_parallel_sharding_strategy": STRATEGIES, "outer_dp_sharding_strategy": OUTER_STRATEGIES}
_UNSUPPORTED_MODEL_FLAGS = {
    "has_cond_embedder": "a model without a conditional embedder",
    "flextron": "a model without it",
    "defer_embedding_wgrad_compute": "no --defer-embedding-wgrad-compute",
    "enable_cuda_graph": "no --enable-cuda-graph",
    "external_cuda_graph": "no --external-cuda-graph",
    "cuda_graph_impl": "--cuda-graph-impl none",
    "delay_wgrad_compute": "no --delay-wgrad-compute",
    "init_model_with_meta_device": "no --init-model-with-meta-device",
}


def check_model_config(config: TransformerConfig) -> None:
    """Refuse a model layout or feature that FSDP v2 does not compose with yet."""
    check_expert_layout(config)
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if (getattr(config, name, None) or 1) > 1:
            raise NotImplementedError(
                f"Megatron-FSDP v2 {name}: expected 1, got {getattr(config, name)}; not supported yet. Leave it out."
            )
    if "quantile_balancing" in str(getattr(config, "moe_router_load_balancing_type", "")):
        raise NotImplementedError(
            "Megatron-FSDP v2 moe_router_load_balancing_type: expected another than quantile_balancing, got it; its "
            "biases would not move. Use --moe-router-load-balancing-type aux_loss."
        )
    for name, cure in _UNSUPPORTED_MODEL_FLAGS.items():
        value = getattr(config, name, None)
        if value and value != "none":
            raise NotImplementedError(
                f"Megatron-FSDP v2 {name}: expected it off, got {value!r}; not supported yet. Use {cure}."
            )


def check_primary_weights(config: TransformerConfig, ddp_config: _StockConfig, module: nn.Module) -> None:
    """Refuse configs that say something else than the model's weights are.

    Raises:
        ValueError: the two configs differ about weights in FP8 or FP4, they ask for some and there are none, or for
            their transposes without them.
    """
    has_primary = any(is_primary_weight(parameter) for parameter in module.parameters())
    for field, gathers, bits in (("fp8_param", "fp8_param_gather", 8), ("fp4_param", "fp4_param_gather", 4)):
        of_model, of_ddp = bool(getattr(config, field, False)), bool(getattr(ddp_config, gathers, False))
        if of_model != of_ddp:
            raise ValueError(
                f"ddp_config.{gathers}: expected {of_model}, as {field} of the model's config says, got {of_ddp}. Set "
                f"both, with --fp{bits}-param-gather, or none."
            )
        # A pipeline stage may have nothing but layers that are kept in bf16.
        if of_model and not has_primary and config.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"{field}: expected a model with TransformerEngine's weights in FP{bits}, got one without. Build it "
                "with TransformerEngine's layers, at least one of which computes in that format."
            )
    if ddp_config.keep_fp8_transpose_cache and not has_primary:
        raise ValueError(
            "ddp_config.keep_fp8_transpose_cache: expected False without weights in FP8 or FP4, got True; it would do "
            "nothing. Drop --keep-fp8-transpose-cache, or add --fp8-param-gather."
        )


def check_pipeline(config: TransformerConfig) -> None:
    """Refuse settings of pipeline parallelism under which stages would exchange the wrong tensors.

    Between two stages of several chunks, sends and receives in both directions meet; only those that overlap with
    computation, one by one, are paired in order.

    Raises:
        ValueError: several chunks on two stages with other exchanges than these, or two kinds of them at once.
    """
    if config.pipeline_model_parallel_size == 1:
        return
    overlaps, batches = bool(config.overlap_p2p_comm), bool(config.batch_p2p_comm)
    is_open = config.virtual_pipeline_model_parallel_size is None or config.pipeline_model_parallel_size > 2
    if (overlaps and batches) or not (overlaps or is_open):
        raise ValueError(
            "Megatron-FSDP v2 overlap_p2p_comm: expected True with batch_p2p_comm=False for several chunks on two "
            f"stages, and never both True, got {overlaps} with batch_p2p_comm={batches}; stages would exchange wrong "
            "tensors. Set overlap_p2p_comm=True and batch_p2p_comm=False."
        )


def check_overlap(config: TransformerConfig, ddp_config: _StockConfig) -> None:
    """Refuse what schedule plans, which run the parts of a layer one by one, do not go with.

    Raises:
        NotImplementedError: it is set.
    """
    if not getattr(config, "overlap_moe_expert_parallel_comm", False):
        return
    for name, value, cure in (
        ("mtp_num_layers", getattr(config, "mtp_num_layers", None), "Leave --mtp-num-layers out"),
        ("megatron_fsdp_trace_pool", getattr(ddp_config, "megatron_fsdp_trace_pool", False), "Drop --fsdp-trace-pool"),
        (
            "megatron_fsdp_min_unit_numel",
            getattr(ddp_config, "megatron_fsdp_min_unit_numel", 0),
            "Drop --megatron-fsdp-min-unit-numel",
        ),
    ):
        if value:
            raise NotImplementedError(
                f"Megatron-FSDP v2 {name}: expected it off with overlap_moe_expert_parallel_comm, got {value!r}. "
                f"{cure}, or --overlap-moe-expert-parallel-comm."
            )
    dropout = max(config.hidden_dropout, config.attention_dropout)
    if config.sequence_parallel and dropout:
        raise NotImplementedError(
            f"Megatron-FSDP v2 hidden_dropout and attention_dropout: expected 0 with sequence_parallel and "
            f"overlap_moe_expert_parallel_comm, got {dropout}; plans do not give tensor-parallel ranks generators of "
            "their own. Turn dropout off, or drop --overlap-moe-expert-parallel-comm."
        )


def check_gather_group(ddp_config: _StockConfig, config: TransformerConfig, num_expert_copies: int) -> None:
    """Refuse gathers in groups of their own where a mesh lacks some ranks, which would have to make the groups, too.

    Args:
        ddp_config: of the wrapper.
        config: of the model.
        num_expert_copies: ranks that hold copies of this rank's experts; 1 without experts of its own.
    """
    stages = config.pipeline_model_parallel_size
    if getattr(ddp_config, "megatron_fsdp_create_all_gather_group", False) and (stages > 1 or num_expert_copies > 1):
        raise NotImplementedError(
            "megatron_fsdp_create_all_gather_group: expected False with pipeline parallelism and with experts that "
            f"have copies, got True with {stages} stage(s) and {num_expert_copies} of each expert. Drop "
            "--create-all-gather-group."
        )


def check_fused_gradients(config: TransformerConfig, policy: MixedPrecisionPolicy, module: nn.Module) -> None:
    """Refuse gradient-accumulation fusion where megatron-core's product cannot write the dtype that gradients have."""
    if not getattr(config, "gradient_accumulation_fusion", False) or find_spec("transformer_engine") is not None:
        return
    sent = policy.grad_comm_dtype or policy.main_grads_dtype
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.ndim > 1 and sent not in (None, parameter.dtype):
            raise ValueError(
                f"gradient_accumulation_fusion: expected gradients sent in {parameter.dtype}, the dtype of {name}, got "
                f"{sent}, which only TransformerEngine's kernels write. Install TransformerEngine, set "
                "--megatron-fsdp-grad-comm-dtype, or use --no-gradient-accumulation-fusion."
            )


def check_ddp_config(ddp_config: _StockConfig) -> None:
    """Refuse unknown strategies, those that contradict each other, and every field that would have no effect."""
    if not isinstance(ddp_config, _StockConfig):
        raise TypeError(
            "FullyShardedDataParallel ddp_config: expected DistributedDataParallelConfig, got "
            f"{type(ddp_config).__name__}. Use the one of this module, or megatron-core's."
        )
    _check_strategies(ddp_config)
    for field in fields(ddp_config):
        has_effect = ddp_config.overlap_param_gather or "prefetch_units" not in field.name
        if field.name in _HONOURED and has_effect:
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value = getattr(ddp_config, field.name)
        if value != default:
            raise NotImplementedError(
                f"ddp_config.{field.name}: expected {default!r}, got {value!r}; it would have no effect with "
                "Megatron-FSDP v2. Leave it at its default."
            )


def _check_strategies(ddp_config: _StockConfig) -> None:
    instances = ddp_config.num_distributed_optimizer_instances
    if not isinstance(instances, int) or isinstance(instances, bool) or instances < 1:
        raise ValueError(
            f"num_distributed_optimizer_instances: expected an int >= 1, got {instances!r}. "
            "Set --num-distributed-optimizer-instances to the number of replicas, or leave it out."
        )
    for name, known in _STRATEGIES.items():
        strategy = getattr(ddp_config, name)
        if strategy not in known:
            raise ValueError(f"{name}: expected one of {known}, got {strategy!r}. Set {_flag(name)} to one of them.")
        _check_strategy_of_experts(ddp_config, name, known)
    outer = ddp_config.outer_dp_sharding_strategy
    if outer != "no_shard" and instances == 1:
        raise ValueError(
            f"outer_dp_sharding_strategy: expected 'no_shard' with num_distributed_optimizer_instances=1, got "
            f"{outer!r}; there is no outer axis to shard over. Set --num-distributed-optimizer-instances above 1, or "
            "drop --outer-dp-sharding-strategy."
        )
    dense, experts = (_shards_weights(shard_placements(ddp_config, of_experts=each)) for each in (False, True))
    for name, default, has_effect in (
        ("megatron_fsdp_reshard_after_forward", None, dense or experts),
        ("megatron_fsdp_create_all_gather_group", False, dense),  # experts with copies are refused (check_gather_group)
    ):
        value = getattr(ddp_config, name, default)
        if value is not default and not has_effect:
            raise ValueError(
                f"{name}: expected {default} with data_parallel_sharding_strategy="
                f"{ddp_config.data_parallel_sharding_strategy!r}, which keeps whole weights on every rank, got {value};"
                " it would have no effect. Leave it out, or set --data-parallel-sharding-strategy optim_grads_params."
            )


def _check_strategy_of_experts(ddp_config: _StockConfig, dense: str, known: tuple[str, ...]) -> None:
    name, dense_strategy = f"expert_{dense}", getattr(ddp_config, dense)
    strategy = getattr(ddp_config, name, None)
    if strategy is None:
        return
    if strategy not in known:
        raise ValueError(
            f"{name}: expected None or one of {known}, got {strategy!r}. Set {_flag(name)} to one of them."
        )
    if dense == "outer_dp_sharding_strategy" and ddp_config.num_distributed_optimizer_instances == 1:
        raise ValueError(
            f"{name}: expected None with num_distributed_optimizer_instances=1, got {strategy!r}; there is no outer "
            f"axis. Set --num-distributed-optimizer-instances above 1, or drop {_flag(name)}."
        )
    if strategy == dense_strategy:
        raise ValueError(
            f"{name}: expected another strategy than {dense}={dense_strategy!r}, got the same; it would have no "
            f"effect. Drop {_flag(name)}."
        )


def _shards_weights(placements: Placements) -> bool:
    return any(at.is_shard() for at in placements.parameter)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def shard_placements(ddp_config: _StockConfig, *, of_experts: bool = False) -> Placements:
    """Return what the strategies mean on the mesh: one axis, or an outer and an inner one with several instances.

    Args:
        ddp_config: of the wrapper.
        of_experts: of experts that ranks share, instead of everything else.
    """
    strategy, outer = (
        (getattr(ddp_config, f"expert_{name}", None) if of_experts else None) or getattr(ddp_config, name)
        for name in _STRATEGIES
    )
    has_outer = ddp_config.num_distributed_optimizer_instances > 1
    return Placements.from_strategy(strategy, outer=outer if has_outer else None)


def unit_options(
    ddp_config: _StockConfig, config: TransformerConfig, module: nn.Module, *, of_experts: bool = False
) -> dict[str, Any]:
    """Return what the configs say of units: the keywords of `fully_shard`, without the mesh.

    Args:
        ddp_config: of the wrapper.
        config: of the model.
        module: the chunk.
        of_experts: of experts that ranks share, instead of everything else.
    """
    placements = shard_placements(ddp_config, of_experts=of_experts)
    schedule = schedule_policy(ddp_config)
    if not _shards_weights(placements):
        # The other kind of weights may be released, these stay.
        schedule = replace(schedule, reshard_after_forward=None)
    return {
        "placements": placements,
        "mixed_precision_policy": mixed_precision_policy(ddp_config, module),
        "schedule_policy": schedule,
        "gradient_reduction": "sum" if config.calculate_per_token_loss else "average",
    }


def schedule_policy(ddp_config: _StockConfig) -> SchedulePolicy:
    """Return the prefetch budgets that the config means."""
    overlaps = ddp_config.overlap_param_gather
    return SchedulePolicy(
        forward_prefetch_units=getattr(ddp_config, "megatron_fsdp_forward_prefetch_units", 1) if overlaps else 0,
        backward_prefetch_units=getattr(ddp_config, "megatron_fsdp_backward_prefetch_units", 1) if overlaps else 0,
        reshard_after_forward=getattr(ddp_config, "megatron_fsdp_reshard_after_forward", None),
        static_gradients=getattr(ddp_config, "megatron_fsdp_static_gradients", False),
    )
