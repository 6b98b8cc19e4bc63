# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The device meshes of a Megatron-Core chunk, made of megatron-core's own process groups, without communication.

[Note: ranks as a grid]
megatron-core numbers ranks as a grid: along each kind of parallelism the number of a rank grows by a fixed stride. So
the rank at (i, j) of two kinds is that at i of one, plus that at j of the other, less this one's own. What ranks make
of it is compared before they communicate (agreement.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.device_mesh import DeviceMesh

from megatron.core import parallel_state

TENSOR_PARALLEL_AXIS = "tp"
EXPERT_AXIS = "expt_dp"
_GLOBAL: dict[str, Any] = {
    EXPERT_AXIS: parallel_state.get_expert_data_parallel_group,
    "expt_tp": parallel_state.get_expert_tensor_parallel_group,
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "embd": parallel_state.get_embedding_group,
    "pos_embd": parallel_state.get_position_embedding_group,
}


def find_group(pg_collection: ProcessGroupCollection | None, name: str) -> Any:
    """Return the collection's process group of this name, or megatron-core's global one; None if it has none."""
    group = getattr(pg_collection, name, None)
    if group is not None:
        return group
    if name == "inter_dist_opt":
        return parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    if name == "intra_expt_dp":
        return parallel_state.get_expert_data_parallel_group(False, partial_expert_data_parallel=True)
    if name == "intra_dist_opt":
        return parallel_state.get_intra_distributed_optimizer_instance_group()
    if name in _GLOBAL:
        return _GLOBAL[name](check_initialized=False)
    is_partial = name == "intra_dp_cp"
    return parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=is_partial)


def data_parallel_mesh(
    num_instances: int, pg_collection: ProcessGroupCollection | None, device_type: str, tensor_parallel_size: int
) -> DeviceMesh:
    """Return the mesh over which dense parameters lie.

    Its axes are that of all data-parallel ranks, or (instances, ranks of one instance), and with tensor parallelism a
    last one for that. Example: four ranks in two instances have inner groups [0, 1] and [2, 3], outer groups [0, 2] and
    [1, 3].

    Raises:
        ValueError: process groups that are not those of so many instances or ranks; on every rank, without
            communication.
    """
    whole = find_group(pg_collection, "dp_cp")
    ranks = torch.tensor(dist.get_process_group_ranks(whole))
    groups, names = [whole], ["dp_cp"]
    if num_instances > 1:
        groups, names = _instances(num_instances, pg_collection, whole, "intra_dp_cp"), ["dp_outer", "dp_inner"]
        ranks = ranks.view(num_instances, -1)
    ranks, group = _beside(ranks, "tp", tensor_parallel_size, pg_collection)
    if group is not None:
        groups, names = [*groups, group], [*names, TENSOR_PARALLEL_AXIS]
    return _mesh_of(groups, ranks, names, device_type)


def expert_mesh(
    copies: Any,
    num_instances: int,
    pg_collection: ProcessGroupCollection | None,
    device_type: str,
    tensor_parallel_size: int,
) -> DeviceMesh:
    """Return the mesh over which this rank's experts lie: along its ranks with copies, and those that share an expert.

    Example: of eight ranks in which two share an expert and two share the experts of a layer, ranks 0 and 1 hold pieces
    of an expert of which 4 and 5 hold a copy: `expt_dp` is [0, 4], `tp` is [0, 1].

    Args:
        copies: the process group along `expt_dp`.
        num_instances: optimizer instances.
        pg_collection: process groups; None means megatron-core's global ones.
        device_type: where shards lie.
        tensor_parallel_size: ranks that share an expert.

    Raises:
        ValueError: process groups of another number of instances or ranks; without communication.
    """
    ranks = torch.tensor(dist.get_process_group_ranks(copies))
    groups, names = [copies], [EXPERT_AXIS]
    if num_instances > 1:
        groups = _instances(num_instances, pg_collection, copies, "intra_expt_dp")
        names = [f"{EXPERT_AXIS}_outer", f"{EXPERT_AXIS}_inner"]
        ranks = ranks.view(num_instances, -1)
    ranks, group = _beside(ranks, "expt_tp", tensor_parallel_size, pg_collection)
    if group is not None:
        groups, names = [*groups, group], [*names, TENSOR_PARALLEL_AXIS]
    return _mesh_of(groups, ranks, names, device_type)


def _beside(
    ranks: torch.Tensor, name: str, size: int, pg_collection: ProcessGroupCollection | None
) -> tuple[torch.Tensor, Any]:
    """Return a grid of ranks with those of tensor parallelism as its last axis, and their process group, if any."""
    if size == 1:
        return ranks, None
    group = find_group(pg_collection, name)
    found = 1 if group is None else group.size()
    if found != size:
        field = "expert_tensor_parallel_size" if name == "expt_tp" else "tensor_model_parallel_size"
        raise ValueError(
            f"{field}: expected the size {found} of the process group {name}, got {size} in the model's config. Call "
            "initialize_model_parallel with the same size."
        )
    return ranks.unsqueeze(-1) + torch.tensor(dist.get_process_group_ranks(group)) - dist.get_rank(), group


def _mesh_of(groups: list[Any], ranks: torch.Tensor, names: list[str], device_type: str) -> DeviceMesh:
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(names))


def check_stages(pg_collection: ProcessGroupCollection | None, num_stages: int) -> None:
    """Refuse process groups of another number of pipeline stages than the model's; without communication.

    Raises:
        ValueError: they are.
    """
    group = find_group(pg_collection, "pp")
    size = 1 if group is None else group.size()
    if size != num_stages:
        raise ValueError(
            f"pipeline_model_parallel_size: expected the size {size} of the process group pp, got {num_stages} in the "
            "model's config. Call initialize_model_parallel with the same size."
        )


def whole_model_group(pg_collection: ProcessGroupCollection | None, model_parallel_size: int) -> dist.ProcessGroup:
    """Return the group of all ranks that hold a part of the model or of a copy of it.

    That of one optimizer instance holds all model-parallel ranks, and all data-parallel ones unless there are several
    instances, whose ranks hold some of the copies or shards only.
    """
    group = find_group(pg_collection, "intra_dist_opt")
    whole = find_group(pg_collection, "dp_cp")
    if group.size() >= whole.size() * model_parallel_size:
        return group
    return whole if model_parallel_size == 1 else dist.group.WORLD


def _instances(num_instances: int, pg_collection: ProcessGroupCollection | None, whole: Any, inner: str) -> list[Any]:
    """Return the process groups (across instances, within this one), if they are those of so many instances."""
    ranks = dist.get_process_group_ranks(whole)
    if len(ranks) % num_instances:
        what = "data-parallel size" if inner == "intra_dp_cp" else "number of copies of each expert,"
        raise ValueError(
            f"num_distributed_optimizer_instances: expected a divisor of the {what} {len(ranks)}, got "
            f"{num_instances}. Change --num-distributed-optimizer-instances or the number of ranks."
        )
    rows = torch.tensor(ranks).view(num_instances, -1)
    place = whole.rank()
    expected = (rows[:, place % rows.shape[1]].tolist(), rows[place // rows.shape[1]].tolist())
    groups = [find_group(pg_collection, name) for name in ("inter_dist_opt", inner)]
    found = tuple(None if group is None else dist.get_process_group_ranks(group) for group in groups)
    if found != expected:
        raise ValueError(
            f"num_distributed_optimizer_instances={num_instances}: expected process groups inter_dist_opt and "
            f"{inner} of ranks {expected[0]} and {expected[1]}, got {found[0]} and {found[1]}. Call "
            f"initialize_model_parallel(num_distributed_optimizer_instances={num_instances}), or pass such groups in "
            "pg_collection."
        )
    return groups
