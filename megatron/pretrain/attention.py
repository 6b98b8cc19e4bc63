# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Core attention for megatron-core's local layers on torch's scaled_dot_product_attention.

It runs on CPU and CUDA without TransformerEngine and never holds the [sequence, sequence] scores
where torch has a fused kernel. Where context parallelism has cut the sequence, it gathers keys and
values. It knows neither packed sequences nor an additive bias.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.pretrain.context_parallel import causal_attention


class SdpaCoreAttention(MegatronModule):
    """Drop-in for megatron-core's DotProductAttention, as ``core_attention`` of a layer spec.

    Args:
        config: Gives the attention dropout.
        layer_number: Unused: no scaling by layer.
        attn_mask_type: Causal masks are applied by torch, others come as a tensor.
        attention_type: Unused.
        attention_dropout: Overrides the config's.
        softmax_scale: Overrides 1 / sqrt(head width).
        cp_comm_type: Unused: keys and values are gathered.
        pg_collection: Gives the group of context parallelism; heads are local.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        del layer_number, attention_type, cp_comm_type
        self.context_group = None if config.context_parallel_size == 1 else pg_collection.cp
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [sequence, batch, heads, width].
            key: [sequence, batch, groups, width].
            value: [sequence, batch, groups, width].
            attention_mask: True where attention is forbidden, broadcastable to [batch, heads,
                sequence, sequence]; None for what the mask type says.
            attn_mask_type: Overrides the layer's.
            attention_bias: Must be None.
            packed_seq_params: Must be None.

        Returns:
            [sequence, batch, heads * width].

        Raises:
            NotImplementedError: A bias, packed sequences, or a mask type other than causal without
                a mask.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError(
                "Attention: expected neither a bias nor packed sequences, got one of them for "
                "SdpaCoreAttention. "
                "Use --transformer-impl transformer_engine."
            )
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if attention_mask is None and mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise NotImplementedError(
                f"Attention: expected a mask, got none for mask type {mask_type.name}. Pass attention_mask."
            )
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        is_causal = attention_mask is None and mask_type is AttnMaskType.causal
        if self.context_group is not None:
            if not is_causal:
                raise NotImplementedError(
                    "Attention: expected a causal mask with context parallelism, got another one. Use "
                    "--context-parallel-size 1."
                )
            attend = partial(causal_attention, q, k, v, self.context_group, dropout, self.softmax_scale)
        else:
            attend = partial(
                torch.nn.functional.scaled_dot_product_attention,
                *(q, k, v),
                attn_mask=None if attention_mask is None else ~attention_mask,
                is_causal=is_causal,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=k.size(1) != q.size(1),
            )
        # Tensor-parallel ranks hold different heads, so they must draw different masks. With sequence parallelism
        # megatron-core has forked around all layers; where a layer is recomputed that fork is over, and a second one
        # here would begin with another state than in forward.
        forks = dropout > 0.0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if forks else nullcontext():
            context = attend()
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
