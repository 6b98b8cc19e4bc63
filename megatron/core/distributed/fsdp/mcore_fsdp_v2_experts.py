# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""How FSDP v2 shards the experts of a Megatron-Core chunk whose ranks hold different ones; it shards nothing itself.

[Note: gradients of experts]
A rank's experts see the tokens of all ranks that share a layer's experts with it, so that fewer ranks hold copies of an
expert than of a dense weight, and every copy has the gradient of several ranks' tokens. Dense gradients are means over
all data-parallel ranks. For experts that is their sum over the ranks with copies, divided by the number of all
data-parallel ranks. Example: of four ranks, 0 and 1 share the experts, and so do 2 and 3. An expert of rank 0 has a
copy on rank 2; the mean over these two is divided by 4 / 2 once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.core.distributed.fsdp.mcore_fsdp_v2_mesh import EXPERT_AXIS, expert_mesh, find_group

_STRATEGIES = ("expert_data_parallel_sharding_strategy", "expert_outer_dp_sharding_strategy")
"""Fields of FSDP v2's config that say what is sharded of experts."""


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether ranks of expert parallelism hold different ones in a parameter's place."""
    return not getattr(parameter, "allreduce", True)


def check_expert_layout(config: TransformerConfig) -> None:
    """Refuse experts cut otherwise than dense layers, several in one tensor, or with copies where layers are cut.

    Raises:
        NotImplementedError: there are such.
    """
    if getattr(config, "num_moe_experts", None) is None:
        return
    size, dense_size = _num_pieces(config), config.tensor_model_parallel_size
    if size not in (1, dense_size):
        raise NotImplementedError(
            f"Megatron-FSDP v2 expert_tensor_parallel_size: expected 1 or tensor_model_parallel_size {dense_size}, got "
            f"{size}. Set --expert-tensor-parallel-size to one of them."
        )
    if size > 1 and config.add_bias_linear:
        raise NotImplementedError(
            f"Megatron-FSDP v2 add_bias_linear: expected False with expert_tensor_parallel_size {size}, got True; all "
            "ranks that share an expert would hold its biases. Add --disable-bias-linear."
        )
    if config.moe_grouped_gemm and config.expert_model_parallel_size > 1:
        raise NotImplementedError(
            "Megatron-FSDP v2 moe_grouped_gemm: expected False with expert parallelism, got True; checkpoints tell "
            "experts apart by tensors of their own. Drop --moe-grouped-gemm."
        )
    if size < dense_size and config.expert_model_parallel_size % dense_size:
        raise NotImplementedError(
            f"Megatron-FSDP v2 expert_model_parallel_size: expected a multiple of tensor_model_parallel_size "
            f"{dense_size}, so that its ranks hold different experts, got {config.expert_model_parallel_size}. Set "
            "--expert-model-parallel-size, or --expert-tensor-parallel-size."
        )


def check_expert_strategies(ddp_config: DistributedDataParallelConfig, config: TransformerConfig) -> None:
    """Refuse strategies of experts in a model without experts that ranks share, whatever this rank's chunk holds.

    Raises:
        ValueError: they would have no effect.
    """
    num_experts, size = getattr(config, "num_moe_experts", None), config.expert_model_parallel_size
    for name in _STRATEGIES:
        strategy = getattr(ddp_config, name, None)
        if strategy is not None and not (num_experts and size > 1):
            raise ValueError(
                f"{name}: expected None without expert parallelism, got {strategy!r} with num_moe_experts="
                f"{num_experts} and expert_model_parallel_size={size}; experts that every rank holds are sharded as "
                f"the rest is. Set --expert-model-parallel-size above 1, or drop --{name.replace('_', '-')}."
            )


def check_expert_pieces(module: nn.Module, config: TransformerConfig) -> None:
    """Refuse experts in pieces whose second matrices say that they are cut along another dim than their input.

    Raises:
        NotImplementedError: TransformerEngine's layers of experts do so; shapes and checkpoints would be wrong.
    """
    if getattr(config, "num_moe_experts", None) is None or _num_pieces(config) == 1:
        return
    for name, parameter in module.named_parameters():
        if ".experts." not in name or ".linear_fc2.weight" not in name:
            continue
        dim = getattr(parameter, "partition_dim", -1)
        if dim != 1:
            raise NotImplementedError(
                f"partition_dim of {name}: expected 1 with expert_tensor_parallel_size {_num_pieces(config)}, got "
                f"{dim}, as TransformerEngine's layers set it. Set --expert-tensor-parallel-size 1, or "
                "--transformer-impl local."
            )


def _num_pieces(config: TransformerConfig) -> int:
    """Return how many ranks share an expert; by default as many as share a dense layer."""
    size = getattr(config, "expert_tensor_parallel_size", None)
    return int(config.tensor_model_parallel_size if size is None else size)


def expert_modules(module: nn.Module) -> list[nn.Module]:
    """Return the largest modules that hold nothing but experts of this rank; none without expert parallelism."""
    found: list[nn.Module] = []
    for child in module.children():
        kinds = {is_expert(parameter) for parameter in child.parameters()}
        if True in kinds:
            found += expert_modules(child) if False in kinds else [child]
    return found


def units_with_experts(runs: Sequence[Sequence[nn.Module]]) -> Iterator[tuple[Sequence[nn.Module], bool]]:
    """Yield each unit, a list of modules, and whether it holds experts.

    Args:
        runs: inner units first, which own the parameters that outer ones have, too.

    Raises:
        ValueError: a unit of experts and other parameters.
    """
    seen: set[int] = set()
    for run in runs:
        owned = [(name, p) for member in run for name, p in member.named_parameters() if id(p) not in seen]
        seen |= {id(parameter) for _, parameter in owned}
        experts = [name for name, parameter in owned if is_expert(parameter)]
        if experts and len(experts) < len(owned):
            raise ValueError(
                f"FullyShardedDataParallel of {type(run[0]).__name__}: expected experts in modules of their own, got "
                f"{experts[0]} beside other parameters, which lie on other ranks. Put experts into a module."
            )
        yield run, bool(experts)


def expert_options(
    options: dict[str, Any],
    num_instances: int,
    pg_collection: ProcessGroupCollection | None,
    device_type: str,
    config: TransformerConfig,
) -> dict[str, Any]:
    """Return what `fully_shard` of experts is told; see [Note: gradients of experts].

    Args:
        options: what the configs say of experts.
        num_instances: optimizer instances.
        pg_collection: process groups; None means megatron-core's global ones.
        device_type: where shards lie.
        config: of the model.

    Raises:
        ValueError: no process group of the ranks with copies, or groups of other numbers of instances or ranks.
    """
    copies, whole = find_group(pg_collection, EXPERT_AXIS), find_group(pg_collection, "dp_cp")
    if copies is None:
        raise ValueError(
            f"FullyShardedDataParallel pg_collection: expected a process group {EXPERT_AXIS} of the ranks with copies "
            "of this rank's experts, got none. Pass it, or call "
            "initialize_model_parallel(expert_model_parallel_size=...)."
        )
    averages = options["gradient_reduction"] == "average"
    return {
        **options,
        "mesh": expert_mesh(copies, num_instances, pg_collection, device_type, _num_pieces(config)),
        "grad_divisor": whole.size() / copies.size() if averages else 1,
    }
