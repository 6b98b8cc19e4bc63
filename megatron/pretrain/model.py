# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Builds megatron-core's GPTModel from the arguments and wraps it for data parallelism.

With ``--use-megatron-fsdp-v2`` the wrapper is Megatron-FSDP v2's, otherwise megatron-core's DDP:
the model inside is the same, weight for weight.
"""

import argparse
import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core import parallel_state
from megatron.core.distributed.fsdp.mcore_fsdp_v2_shared_weights import drop_spare_weights
from megatron.pretrain.attention import SdpaCoreAttention
from megatron.pretrain.initial_experts import drawn_by_number
from megatron.pretrain.low_bit_flags import computes_in_low_bits, low_bit_config, low_bit_gathers
from megatron.pretrain.moe_flags import expert_config
from megatron.pretrain.norm import SequenceParallelNorm
from megatron.pretrain.pipeline import num_chunks
from megatron.pretrain.precision_flags import compute_dtype, gradient_dtype
from megatron.pretrain.prediction_flags import prediction_config
from megatron.pretrain.quantized_gather_flags import quantization_recipe
from megatron.pretrain.recompute_flags import recompute_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "auto": None}


def build_model(args: argparse.Namespace) -> list[MegatronModule]:
    """Build this rank's chunks of the model on its device and wrap them.

    Args:
        args: Validated arguments.

    Returns:
        One chunk, or several with an interleaved schedule: each a data-parallel wrapper (megatron-core's DDP
        interface) around, with ``--bf16`` or ``--fp16``, a Float16Module around a GPTModel. Initial weights follow from
        ``--seed`` and the stage and are equal on all data-parallel ranks.
    """
    config = _build_config(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    # All before the first is wrapped: of a tied weight one stage waits for the other's.
    with drawn_by_number(config):
        chunks = [_build_chunk(args, config, groups, index) for index in range(num_chunks(args))]
    return [_wrap(args, config, chunk, groups, is_first=index == 0) for index, chunk in enumerate(chunks)]


def _build_chunk(
    args: argparse.Namespace, config: TransformerConfig, groups: ProcessGroupCollection, index: int
) -> MegatronModule:
    stages, chunks = args.pipeline_model_parallel_size, num_chunks(args)
    stage = parallel_state.get_pipeline_model_parallel_rank() if stages > 1 else 0
    vp_stage = index if chunks > 1 else None
    uses_te = uses_transformer_engine(args)
    layers = _build_layer_spec(args, config, vp_stage, uses_te=uses_te)
    model: MegatronModule = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=_build_prediction_spec(args, config, layers, vp_stage, uses_te=uses_te),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        pre_process=stage == 0 and index == 0,
        post_process=stage == stages - 1 and index == chunks - 1,
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    drop_spare_weights(model)
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if torch.cuda.is_available():
        model = model.cuda(torch.cuda.current_device())
    return model if compute_dtype(args) == "fp32" else Float16Module(config, model)


def uses_transformer_engine(args: argparse.Namespace) -> bool:
    """Whether the layers are TransformerEngine's.

    Raises:
        ValueError: They were asked for and cannot run here.
    """
    is_possible = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    is_needed = computes_in_low_bits(args)
    if (is_needed or args.transformer_impl == "transformer_engine") and not is_possible:
        flag = "--fp8-format or --fp4-format" if is_needed else "--transformer-impl transformer_engine"
        raise ValueError(
            "Layers: expected CUDA and an installed transformer-engine, got a host that lacks one of them for "
            f"{flag}. Install it, or use --transformer-impl local in bf16."
        )
    return is_possible and args.transformer_impl != "local"


def _build_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        add_bias_linear=not args.disable_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=args.qk_layernorm,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        # With several chunks two neighbours may send to each other at once, in an order that only this matches.
        overlap_p2p_comm=num_chunks(args) > 1,
        batch_p2p_comm=num_chunks(args) == 1,
        # With several chunks a send may still read what would be freed.
        deallocate_pipeline_outputs=num_chunks(args) == 1,
        context_parallel_size=args.context_parallel_size,
        use_cpu_initialization=args.use_cpu_initialization,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=DTYPES[compute_dtype(args)],
        pipeline_dtype=DTYPES[compute_dtype(args)],
        calculate_per_token_loss=args.calculate_per_token_loss,
        first_last_layers_bf16=args.first_last_layers_bf16,
        num_layers_at_start_in_bf16=args.num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=args.num_layers_at_end_in_bf16,
        **recompute_config(args),
        **prediction_config(args),
        **expert_config(args),
        **low_bit_config(args),
        # These need Apex, TransformerEngine or a C++ compiler at run time.
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def _build_layer_spec(
    args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None, *, uses_te: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    if uses_te:
        return get_gpt_layer_with_transformer_engine_spec(num_experts=args.num_experts, qk_layernorm=args.qk_layernorm)
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    if not args.sequence_parallel:
        return spec
    # megatron-core's own norm without TransformerEngine and Apex refuses sequence parallelism.
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SequenceParallelNorm
    if args.qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = SequenceParallelNorm
    return TransformerBlockSubmodules([spec] * get_num_layers_to_build(config, vp_stage), SequenceParallelNorm)


def _build_prediction_spec(
    args: argparse.Namespace, config: TransformerConfig, layers: Any, vp_stage: int | None, *, uses_te: bool
) -> Any:
    """Return what builds the layers that predict further tokens, like the model's own; None but in the last chunk."""
    if args.mtp_num_layers is None:
        return None
    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=uses_te, vp_stage=vp_stage)
    if block is None:
        return None
    if args.sequence_parallel and not uses_te:
        for layer in block.layer_specs:
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = SequenceParallelNorm
    return block


def _wrap(
    args: argparse.Namespace,
    config: TransformerConfig,
    model: MegatronModule,
    groups: ProcessGroupCollection,
    *,
    is_first: bool,
) -> MegatronModule:
    """Wrap for data parallelism; gradients are reduced in fp32 unless flags of precision say otherwise."""
    if args.use_megatron_fsdp_v2:
        from megatron.core.distributed.fsdp import mcore_fsdp_v2_adapter as v2

        ddp_config = v2.DistributedDataParallelConfig(
            use_megatron_fsdp_v2=True,
            data_parallel_sharding_strategy=args.data_parallel_sharding_strategy,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            outer_dp_sharding_strategy=args.outer_dp_sharding_strategy,
            expert_data_parallel_sharding_strategy=args.expert_data_parallel_sharding_strategy,
            expert_outer_dp_sharding_strategy=args.expert_outer_dp_sharding_strategy,
            grad_reduce_in_fp32=gradient_dtype(args) == "fp32",
            megatron_fsdp_main_params_dtype=DTYPES[args.megatron_fsdp_main_params_dtype],
            megatron_fsdp_main_grads_dtype=DTYPES[args.megatron_fsdp_main_grads_dtype],
            megatron_fsdp_grad_comm_dtype=DTYPES[args.megatron_fsdp_grad_comm_dtype],
            megatron_fsdp_static_gradients=args.megatron_fsdp_static_gradients,
            megatron_fsdp_trace_pool=args.fsdp_trace_pool,
            megatron_fsdp_create_all_gather_group=args.create_all_gather_group,
            megatron_fsdp_min_unit_numel=args.megatron_fsdp_min_unit_numel,
            megatron_fsdp_quantized_gather=quantization_recipe(args),
            nccl_ub=args.nccl_ub,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            # With a graph the loop looks at the norm once the iteration is over.
            check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad and args.cuda_graph_impl == "none",
            **low_bit_gathers(args),
        )
        return v2.FullyShardedDataParallel(config, ddp_config, model, pg_collection=groups)

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    plain_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=gradient_dtype(args) == "fp32",
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        bucket_size=args.ddp_bucket_size,
        average_in_collective=args.ddp_average_in_collective,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
    )
    # Of later chunks backward comes first, when there is enough to hide one large reduction behind.
    return DistributedDataParallel(config, plain_config, model, disable_bucketing=not is_first)
