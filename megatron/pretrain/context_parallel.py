# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Causal attention over sequences of which each rank of context parallelism holds two chunks.

[Note: two chunks a rank]
megatron-core cuts a sequence into twice as many chunks as there are ranks and gives rank r the chunks r and, counted
from the end, r: later tokens attend to more, so that all ranks have the same work. Keys and values are gathered and put
in order; each of this rank's two chunks of queries then attends to all that comes before its end.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention


class _Gather(torch.autograd.Function):
    """Stacks the tensors of all ranks of a group; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        gathered = local.new_empty(group.size(), *local.shape)
        dist.all_gather(list(gathered.unbind()), local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        [gathered] = gradients
        local = torch.empty_like(gathered[0])
        dist.reduce_scatter(local, [part.contiguous() for part in gathered.unbind()], group=ctx.group)
        return local, None


def cut_sequences(batch: dict[str, torch.Tensor], group: Any) -> dict[str, torch.Tensor]:
    """Return a batch with this rank's two chunks of every sequence.

    Args:
        batch: Tensors [samples, tokens].
        group: Process group of context parallelism.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        return batch
    cut = {name: tensor.chunk(2 * size, dim=1) for name, tensor in batch.items()}
    return {name: torch.cat([chunks[rank], chunks[-1 - rank]], dim=1) for name, chunks in cut.items()}


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, dropout: float, scale: float | None
) -> torch.Tensor:
    """Attend to all tokens of the sequence up to each query.

    Args:
        query: [batch, heads, 2 chunks, width]; the chunks that megatron-core gives this rank.
        key: [batch, groups, 2 chunks, width].
        value: As the keys.
        group: Process group of context parallelism.
        dropout: Probability with which a weight is left out.
        scale: Of the scores; None for 1 / sqrt(width).

    Returns:
        As the queries.
    """
    both = _Gather.apply(torch.stack([key, value]), group)
    first, second = both.chunk(2, dim=-2)  # [ranks, keys or values, batch, groups, chunk, width]
    keys, values = torch.cat([*first.unbind(), *second.flip(0).unbind()], dim=-2).unbind()
    chunk = query.size(-2) // 2
    outputs = []
    for part, number in zip(query.chunk(2, dim=-2), (group.rank(), 2 * group.size() - 1 - group.rank()), strict=True):
        end = (number + 1) * chunk
        allowed = torch.ones(chunk, end, dtype=torch.bool, device=query.device).tril(number * chunk)
        outputs.append(
            scaled_dot_product_attention(
                part,
                keys[..., :end, :],
                values[..., :end, :],
                attn_mask=allowed,
                dropout_p=dropout,
                scale=scale,
                enable_gqa=key.size(1) != query.size(1),
            )
        )
    return torch.cat(outputs, dim=-2)
