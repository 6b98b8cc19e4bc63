# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Weights that several ranks of model parallelism hold, such as an embedding that is the output layer's as well.

Here they are found, and those of pipeline stages laid out and compared. mcore_fsdp_v2_finalize.py adds up gradients.

[Note: one place on all stages]
Gradients are added up on this rank's elements, which must be the same elements on every stage. Where elements lie in a
buffer depends on what else is in it, so each such weight has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.core.distributed.fsdp.mcore_fsdp_v2_experts import is_expert
from megatron.core.distributed.fsdp.mcore_fsdp_v2_mesh import find_group

GROUPS = ("embd", "pos_embd")
"""megatron-core's process groups of the stages that hold word embeddings, and position embeddings."""

_QK_NORMS = ("q_layernorm", "k_layernorm")
_COPY, _ORIGINAL = "output_layer.weight", "embedding.word_embeddings.weight"


def stage_group(pg_collection: ProcessGroupCollection | None, name: str) -> Any:
    """Return one of GROUPS if this rank shares weights with others there, else None."""
    group = find_group(pg_collection, name)
    return group if isinstance(group, dist.ProcessGroup) and group.size() > 1 else None


def find_shared_weights(module: nn.Module, pg_collection: ProcessGroupCollection | None) -> dict[str, list[Any]]:
    """Return the chunk's weights that other stages hold, too, by the group of those stages."""
    found: dict[str, list[Any]] = {}
    for name, find in zip(GROUPS, (_word_embeddings, _position_embeddings), strict=True):
        weights = [] if stage_group(pg_collection, name) is None else list(find(module))
        if weights:
            found[name] = weights
    return found


def _word_embeddings(module: nn.Module) -> Iterator[Any]:
    """Yield those that another stage has for its output layer, or for layers that predict further tokens."""
    for model in module.modules():
        is_tied = getattr(model, "share_embeddings_and_output_weights", None)
        predicts = getattr(getattr(model, "config", None), "mtp_num_layers", None)
        if is_tied or (is_tied is not None and predicts):
            weight = model.shared_embedding_or_output_weight()  # type: ignore[operator]
            if weight is not None:
                yield weight


def drop_spare_weights(module: nn.Module) -> None:
    """Take away output weights that nothing reads, which megatron-core makes nevertheless; before they are sharded.

    On a last stage with layers that predict further tokens, a tied output layer is given the embedding's weight.
    """
    for model in module.modules():
        is_tied = getattr(model, "share_embeddings_and_output_weights", False)
        if is_tied and getattr(model, "mtp_process", False) and model.post_process and not model.pre_process:
            model.output_layer.weight = None  # type: ignore[union-attr, assignment]


def _position_embeddings(module: nn.Module) -> Iterator[Any]:
    for model in module.modules():
        if isinstance(embeddings := getattr(model, "position_embeddings", None), nn.Embedding):
            yield embeddings.weight


def set_apart(shared: dict[str, list[Any]]) -> None:
    """Give each of these weights a buffer of its own; before they are sharded."""
    for name, weights in shared.items():
        for index, weight in enumerate(weights):
            weight.fsdp_group = (name, index)


def check_equal_shards(shared: dict[str, list[Any]], pg_collection: ProcessGroupCollection | None) -> None:
    """Compare what this rank has of these weights with the other stages; they must have been sharded.

    Raises:
        ValueError: stages differ; on each of them.
    """
    for name, weights in shared.items():
        group = stage_group(pg_collection, name)
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, [_describe(weight) for weight in weights], group=group)
        if any(of_stage != found[0] for of_stage in found):
            index = next(index for index, of_stage in enumerate(found) if of_stage != found[0])
            raise ValueError(
                f"weights that stages share over {name}: expected the same elements on all of them, got {found[0]} on "
                f"the first and {found[index]} on stage {index} of those that hold them. Wrap the chunks of all stages "
                "with the same config, on as many data-parallel ranks."
            )


def _describe(weight: Any) -> str:
    offset, shard_numel, num_shards, axes, _ = weight.geometry.cut
    gradients = weight._fsdp_group().gradients
    kind = f"{tuple(weight.shape)} {weight.dtype}"
    kind += " frozen" if gradients is None else f" with {gradients.at.main.dtype} gradients"
    return f"{kind} at {offset} of {num_shards} shards of {shard_numel} over axes {axes}"


def find_seen_in_parts(module: nn.Module, config: TransformerConfig) -> list[tuple[Any, bool]]:
    """Return the weights of which each rank of tensor parallelism sees a part of the sequence or of the heads.

    Args:
        module: a chunk whose units are sharded.
        config: of the model.

    Returns:
        In one order on all ranks of tensor parallelism; with each whether gradients are averaged instead of added up.
    """
    if config.tensor_model_parallel_size == 1:
        return []
    found: list[tuple[Any, bool]] = []
    for name, parameter in module.named_parameters():
        averages = getattr(parameter, "average_gradients_across_tp_domain", False)
        adds = (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)) or (
            config.qk_layernorm and any(norm in name for norm in _QK_NORMS)
        )
        # A rank's experts are its own, although megatron-core marks their biases as if ranks shared them.
        if (averages or adds) and not is_expert(parameter):
            found.append((parameter, averages))
    return found


def is_counted(parameter: Any) -> bool:
    """Return whether statistics count a parameter; not if another stage's, which it is a copy of, is counted."""
    return not getattr(parameter, "shared", False)


def shared_name(name: str, parameter: Any) -> str:
    """Return the name of the weight that a parameter is a copy of, for an output layer's; any other's own."""
    is_copy = name.endswith(_COPY) and not is_counted(parameter)
    return name[: -len(_COPY)] + _ORIGINAL if is_copy else name
