# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`fully_shard`: makes a module a unit of a context: groups its parameters, shards them and attaches `FsdpModule`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import hooks, registration
from .agreement import record_unit
from .allocator import default_allocator
from .checks import (
    check_cuda_graph,
    check_modules,
    check_numbers,
    check_placements,
    check_primary_unit,
    check_schedule,
    check_types,
    check_unit,
    merge_schedule,
)
from .context_graphs import graphs_of
from .device import current_device, resolve_device
from .full_values import cut_values
from .graphed_forward import graph_forward
from .group_options import GradientReduction, GroupOptions, OwnedParameter
from .joint import register_joint_hooks
from .module import FsdpModule
from .ownership import group_parameters, is_quantized, jointly_owned_parameters, own_modules, owned_parameters
from .parameter_group import FsdpParameterGroup
from .policy import MixedPrecisionPolicy, Placements, SchedulePolicy
from .quantized_group import KeptQuantizedGroup, QuantizedGroup
from .replaced import retire
from .schedule import FsdpContext
from .secondary_shard import SecondarilyShardedGroup
from .step_guard import watch_steps
from .te_group import TransformerEngineGroup, prepare_modules
from .te_weights import is_primary_weight, take_primary

ModuleT = TypeVar("ModuleT", bound=nn.Module | list[nn.Module])

_active_context: ContextVar[FsdpContext | None] = ContextVar("fsdp_context", default=None)
_sharded_classes: dict[type, type] = {}


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
    trace_pool: bool = False,
    separate_communicators: bool = False,
) -> Iterator[FsdpContext]:
    """Build roots that share streams, prefetch orders and the microbatch flag; ready to run after the block.

    Args:
        device: device that the units compute on; None means the current accelerator, or the host if there is none.
        use_symmetric_memory: register the pool's memory with the other ranks, so that NCCL reaches it directly; for
            CUDA, torch 2.12 or newer and `trace_pool`. It has not run on hardware yet.
        unify_communication_stream: see `FsdpContext`.
        trace_pool: keep memory that lives and dies inside a step in places that do not change, planned from a recorded
            iteration; gradients keep their memory, too. See `ContextMemory`.
        separate_communicators: see `FsdpContext`.

    Raises:
        RuntimeError: another `fully_shard_context` block is open.
        ValueError: `trace_pool` without a unit that could use it, `use_symmetric_memory` without `trace_pool`, or
            `separate_communicators` without effect.
        NotImplementedError: `use_symmetric_memory` on the host, or with an older torch; `separate_communicators` over a
            mesh without some ranks of the program.
    """
    if _active_context.get() is not None:
        raise RuntimeError(
            "fully_shard_context: expected no open block, got one inside another. Shard all modules in one block."
        )
    context = FsdpContext(
        _default_device() if device is None else resolve_device(device),
        use_symmetric_memory=use_symmetric_memory,
        unify_communication_stream=unify_communication_stream,
        trace_pool=trace_pool,
        separate_communicators=separate_communicators,
    )
    token = _active_context.set(context)
    try:
        yield context
    finally:
        _active_context.reset(token)
    context.check_pool()
    context.finalize()


def fully_shard(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: float = 1,
    *,
    gradient_reduction: GradientReduction = "average",
    schedule_policy: SchedulePolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    register_hooks: bool = True,
    cuda_graph: bool = False,
) -> ModuleT:
    """Make `module` a unit: shard the parameters that no unit inside it owns, in place.

    Shard inner modules first. Outside a `fully_shard_context` the units of a root share one, ready at its forward.

    Args:
        module: any module whose parameters are full and equal on every rank; or a list of modules that run one after
            another, which share one gather and one reduction: less host time for small layers, more memory at a time.
        mesh: data-parallel mesh; None means one axis over the default process group.
        placements: where weights, gradients and optimizer state lie; None means sharded over every axis (ZeRO-3).
        mixed_precision_policy: dtypes of main weights and gradients; the compute dtype is the parameters' own.
        grad_divisor: divides reduced gradients once per contribution, on top of the average or sum.
        gradient_reduction: "average" over the data-parallel ranks, or "sum".
        schedule_policy: prefetch budgets and when weights are released.
        reshard_after_forward: the policy's setting of this name, for those who set nothing else.
        register_hooks: see `FsdpModule`.
        cuda_graph: replay the unit's forward and backward as CUDA graphs, gathers and reductions outside; sharded
            parameters need ``fully_shard_context(trace_pool=True)``.

    Returns:
        The same module, now also an `FsdpModule`; of a list the first one is.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: arguments that do not fit each other, or parameters that cannot be sharded.
        RuntimeError: the module is a unit already, or its context is closed.
        NotImplementedError: `cuda_graph` with several modules or on a device without CUDA graphs, or a number for
            `reshard_after_forward` where several axes shard the parameters.
    """
    modules = check_modules(module, register_hooks)
    check_types(mesh, placements, mixed_precision_policy, schedule_policy, cuda_graph)
    check_numbers(grad_divisor, gradient_reduction)
    policy = mixed_precision_policy or MixedPrecisionPolicy()
    mesh = mesh or _default_mesh()
    placements = check_placements(mesh, placements)
    schedule = check_schedule(merge_schedule(schedule_policy, reshard_after_forward), placements, mesh, policy)
    owned = _owned_parameters(modules, policy)
    check_primary_unit(owned, schedule, register_hooks, cuda_graph)
    context, absorbed = _join_context(modules[0], mesh)
    if cuda_graph:
        check_cuda_graph(modules, placements, policy, register_hooks, has_pool=context.pool is not None)
        graphs_of(context)
    memory = _memory_options(context, schedule)
    options = GroupOptions(mesh, placements, policy, grad_divisor, gradient_reduction, **memory)
    _attach(modules, context, absorbed, owned, options, schedule, register_hooks)
    if cuda_graph:
        graph_forward(modules[0])
    return module


def _memory_options(context: FsdpContext, schedule: SchedulePolicy) -> dict[str, Any]:
    """Return where a unit's groups lie, take their memory from and gather."""
    return {
        "device": context.device,
        "allocator": context.allocator,
        "lasting_allocator": default_allocator,
        "keeps_gradient_memory": context.keeps_gradients(schedule.static_gradients),
        "separate_communicators": context.communicators.is_separate,
    }


def _owned_parameters(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> list[OwnedParameter]:
    for member in modules:
        check_unit(member, owned_parameters(member), policy)
    return jointly_owned_parameters(modules)


def _attach(
    modules: Sequence[nn.Module],
    context: FsdpContext,
    absorbed: list[FsdpContext],
    owned: list[OwnedParameter],
    options: GroupOptions,
    schedule_policy: SchedulePolicy,
    register_hooks: bool,
) -> None:
    module, *followers = modules
    label = f"{type(module).__name__}#{len(context.units())}"
    for item in owned:
        if is_primary_weight(item.parameter):
            item.parameter, item.primary = take_primary(item.parameter, context.device)
    record = record_unit(owned, options, register_hooks)
    members = group_parameters(owned, options.mixed_precision_policy.recipe)
    kinds = [_group_kind(group[0], options, schedule_policy) for group in members]
    groups = tuple(
        kind(group, options, label, index) for index, (kind, group) in enumerate(zip(kinds, members, strict=True))
    )
    for item in owned:
        retire(item.parameter, item.fqn, label)
        if item.primary is not None:
            item.primary.retire(label)
    for member in modules:
        _move_buffers(member, context.device)
    module.__class__ = _sharded_class(type(module))
    unit: Any = module
    owners = list(dict.fromkeys(owner for member in modules for owner in own_modules(member)))
    for follower in followers:
        follower.__dict__["_fsdp_leader"] = weakref.ref(unit)
    unit._fsdp_setup(context, groups, schedule_policy, owners[1:], followers=followers, register_hooks=register_hooks)
    if followers:
        register_joint_hooks(unit, followers)
    elif register_hooks:
        hooks.register_hooks(unit)
    registration.watch(owners, unit)
    prepare_modules(owners, groups)
    for owner in owners:
        owner.register_load_state_dict_pre_hook(_check_load)  # type: ignore[no-untyped-call]
        owner.register_state_dict_pre_hook(_check_state_dict)  # type: ignore[no-untyped-call]
    for other in absorbed:
        context.absorb(other)
    context.register_module(unit, record)
    watch_steps()


def _group_kind(
    member: OwnedParameter, options: GroupOptions, schedule_policy: SchedulePolicy
) -> Callable[..., FsdpParameterGroup]:
    """Return what makes the group of a parameter."""
    if member.primary is not None:
        return TransformerEngineGroup
    quantizes = is_quantized(member, options.mixed_precision_policy.recipe)
    reshard = schedule_policy.reshard_after_forward
    if type(reshard) is int:
        return partial(KeptQuantizedGroup if quantizes else SecondarilyShardedGroup, num_ranks=reshard)
    return QuantizedGroup if quantizes else FsdpParameterGroup


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current_device("cpu" if accelerator is None else accelerator.type)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard mesh: expected an initialised default process group for mesh=None, got none. "
            "Call torch.distributed.init_process_group() or pass a DeviceMesh."
        )
    return init_device_mesh(_default_device().type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def _join_context(module: nn.Module, mesh: DeviceMesh) -> tuple[FsdpContext, list[FsdpContext]]:
    """Return the context for a new unit, and the implicit contexts of units inside it that it takes over."""
    device = current_device(mesh.device_type)
    inner: dict[int, FsdpContext] = {}
    for child in module.modules():
        if isinstance(child, FsdpModule):
            inner[id(child.context)] = child.context
    active = _active_context.get()
    if active is None:
        context = FsdpContext(device)
        context.is_implicit = True
    else:
        context = active
    if context.device != device:
        raise ValueError(
            f"fully_shard mesh: expected a mesh on the context's device {context.device}, got one on {device}. "
            "Give fully_shard_context the device of the mesh."
        )
    absorbed = [other for other in inner.values() if other is not context]
    if any(other.is_finalized for other in absorbed) or (active is not None and absorbed):
        raise RuntimeError(
            f"fully_shard of {type(module).__name__}: expected units inside it that belong to this context, got "
            "units of another one. Shard inner and outer modules in one fully_shard_context(), before any forward."
        )
    if context.is_finalized:
        context.register_module(module)  # type: ignore[arg-type]
    return context, absorbed


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in own_modules(module):
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)


def _sharded_class(cls: type) -> type:
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"Fsdp{cls.__name__}", (FsdpModule, cls), {})
    return _sharded_classes[cls]


def _check_load(module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
    where = f"load_state_dict of {type(module).__name__} at {prefix or 'the root'!r}"
    _ready(module, where)
    if metadata.get("assign_to_params_buffers", False):
        raise RuntimeError(
            f"{where}: expected assign=False, got assign=True, which would replace sharded parameters by ones that the "
            "runtime does not know. Load in place."
        )
    cut_values(state_dict, prefix, module._parameters)


def _check_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _ready(module, f"state_dict of {type(module).__name__} at {prefix or 'the root'!r}")


def _ready(module: nn.Module, where: str) -> None:
    """Have a module's values computed, and refuse while they are gathered."""
    unit = registration.unit_of(module)
    if unit is not None:
        unit.context.initialize_values()
    # Of everything inside, so that a refused load has written nothing yet.
    if any(getattr(parameter, "_fsdp_is_gathered", False) for parameter in module.parameters()):
        raise RuntimeError(
            f"{where}: expected a unit at rest, got gathered parameters, whose memory is released after the forward or "
            "backward that runs. Save and load between steps, and reshard() what you have unsharded."
        )
