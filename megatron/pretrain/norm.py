# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Norms for layers whose inputs tensor parallelism has cut along the sequence, on torch's own."""

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class SequenceParallelNorm:
    """Builds a LayerNorm or RMSNorm, as the config says, when megatron-core's layers build it by this signature.

    Its weights are marked as such of which each rank sees a part of the sequence only, so that their gradients are
    added up over tensor parallelism.

    Args:
        config: Gives the kind.
        hidden_size: Width of the last dim.
        eps: Added to the variance.
        unused: What other norms ask for.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """Return a norm of torch's own."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm: nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            marked: Any = parameter
            marked.sequence_parallel = config.sequence_parallel
        return norm
