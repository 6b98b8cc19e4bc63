# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`fully_shard`: checks a module, groups its parameters, shards them and attaches `FsdpModule`.

Everything that can be wrong with the arguments is found here, before anything is changed or sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from .agreement import record_unit
from .allocator import ResizingAllocator
from .device import current_device, resolve_device
from .module import FsdpModule
from .parameter_group import FsdpParameterGroup, GradientReduction, GroupOptions, OwnedParameter
from .policy import MixedPrecisionPolicy, Placements, SchedulePolicy
from .replaced import retire
from .schedule import FsdpContext

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_active_context: ContextVar[FsdpContext | None] = ContextVar("fsdp_context", default=None)
_sharded_classes: dict[type, type] = {}
_allocator = ResizingAllocator()


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
) -> Iterator[FsdpContext]:
    """Build roots that share streams, prefetch orders and the microbatch flag; ready to run after the block.

    Args:
        device: device that the units compute on; None means the current accelerator, or the host if there is none.
        use_symmetric_memory: see `FsdpContext`.
        unify_communication_stream: see `FsdpContext`.

    Raises:
        RuntimeError: another `fully_shard_context` block is open.
    """
    if _active_context.get() is not None:
        raise RuntimeError(
            "fully_shard_context: expected no open block, got one inside another. Shard all modules in one block."
        )
    context = FsdpContext(
        _default_device() if device is None else resolve_device(device),
        use_symmetric_memory=use_symmetric_memory,
        unify_communication_stream=unify_communication_stream,
    )
    token = _active_context.set(context)
    try:
        yield context
    finally:
        _active_context.reset(token)
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
    register_hooks: bool = True,
) -> ModuleT:
    """Make `module` a unit: shard the parameters that no unit inside it owns, in place.

    Shard inner modules first, then the root. Outside a `fully_shard_context` the units of one root share an implicit
    context, which is ready at the root's first forward.

    Args:
        module: any module whose parameters are full and equal on every rank.
        mesh: data-parallel mesh; None means one axis over the default process group.
        placements: where weights, gradients and optimizer state lie; None means sharded over every axis (ZeRO-3).
        mixed_precision_policy: dtypes of main weights and gradients; the compute dtype is the parameters' own.
        grad_divisor: divides reduced gradients once per contribution, on top of the average or sum.
        gradient_reduction: "average" over the data-parallel ranks, or "sum".
        schedule_policy: prefetch budgets and when weights are released.
        register_hooks: see `FsdpModule`.

    Returns:
        The same module, now also an `FsdpModule`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: arguments that do not fit each other, or parameters that cannot be sharded.
        RuntimeError: the module is a unit already, or its context is closed.
        NotImplementedError: placements that are not supported yet.
    """
    _check_types(module, mesh, placements, mixed_precision_policy, schedule_policy)
    _check_numbers(grad_divisor, gradient_reduction)
    policy = mixed_precision_policy or MixedPrecisionPolicy()
    if isinstance(module, FsdpModule):
        raise RuntimeError(
            f"fully_shard: expected a module that is not sharded yet, got {type(module).__name__}, which is a unit "
            "already. Call fully_shard once per module, inner modules first."
        )
    mesh = _default_mesh() if mesh is None else mesh
    placements = _check_placements(mesh, placements)
    owned = _owned_parameters(module)
    _check_parameters(module, owned, policy)
    _check_attributes(module)
    context, absorbed = _join_context(module, mesh)
    options = GroupOptions(
        mesh=mesh,
        placements=placements,
        mixed_precision_policy=policy,
        grad_divisor=grad_divisor,
        gradient_reduction=gradient_reduction,
        device=context.device,
        allocator=_allocator,
    )
    _attach(module, context, absorbed, owned, options, schedule_policy or SchedulePolicy(), register_hooks)
    return module


def _attach(
    module: nn.Module,
    context: FsdpContext,
    absorbed: list[FsdpContext],
    owned: list[OwnedParameter],
    options: GroupOptions,
    schedule_policy: SchedulePolicy,
    register_hooks: bool,
) -> None:
    label = f"{type(module).__name__}#{len(context.units())}"
    record = record_unit(owned, options, schedule_policy, register_hooks)
    groups = tuple(
        FsdpParameterGroup(members, options, label, index) for index, members in enumerate(_group_parameters(owned))
    )
    for item in owned:
        retire(item.parameter, item.fqn, label)
    _move_buffers(module, context.device)
    module.__class__ = _sharded_class(type(module))
    unit: Any = module
    owners = list(dict.fromkeys(_own_modules(module)))
    unit._fsdp_setup(
        context, groups, schedule_policy, [owner._parameters for owner in owners], register_hooks=register_hooks
    )
    for owner in owners:
        owner.register_load_state_dict_pre_hook(_refuse_assign)  # type: ignore[no-untyped-call]
    for other in absorbed:
        context.absorb(other)
    context.register_module(unit, record)


def _check_types(module: Any, mesh: Any, placements: Any, policy: Any, schedule: Any) -> None:
    expected = (
        ("module", module, nn.Module, False),
        ("mesh", mesh, DeviceMesh, True),
        ("placements", placements, Placements, True),
        ("mixed_precision_policy", policy, MixedPrecisionPolicy, True),
        ("schedule_policy", schedule, SchedulePolicy, True),
    )
    for name, value, kind, is_optional in expected:
        if not isinstance(value, kind) and not (is_optional and value is None):
            raise TypeError(
                f"fully_shard {name}: expected {kind.__name__}{' or None' if is_optional else ''}, got "
                f"{type(value).__name__}."
            )


def _check_numbers(grad_divisor: Any, gradient_reduction: Any) -> None:
    if isinstance(grad_divisor, bool) or not isinstance(grad_divisor, (int, float)) or grad_divisor <= 0:
        raise ValueError(f"fully_shard grad_divisor: expected a number > 0, got {grad_divisor!r}.")
    if gradient_reduction not in ("average", "sum"):
        raise ValueError(f"fully_shard gradient_reduction: expected 'average' or 'sum', got {gradient_reduction!r}.")


def _check_placements(mesh: DeviceMesh, placements: Placements | None) -> Placements:
    """Return placements with one entry per mesh axis, refusing what is not supported yet."""
    if mesh.ndim != 1:
        raise NotImplementedError(
            f"fully_shard mesh: expected one axis, got {mesh.ndim} axes {mesh.mesh_dim_names}; hybrid sharding is not "
            "supported yet. Pass a one-dimensional mesh, e.g. mesh['dp']."
        )
    zero3 = Placements.from_strategy("optim_grads_params")
    if placements is None:
        return zero3
    names = mesh.mesh_dim_names or ()
    axis = placements.dp_axes[0]
    if len(placements.dp_axes) != 1 or axis not in (0, *names):
        raise ValueError(
            f"fully_shard placements: expected the axis 0 or one of {names}, got {placements.dp_axes}. "
            "Name the mesh's own axes."
        )
    fields = (placements.parameter, placements.gradient, placements.optimizer)
    if any(field != (Shard(0),) for field in fields):
        raise NotImplementedError(
            f"fully_shard placements: expected Shard(0) for parameter, gradient and optimizer (ZeRO-3), got "
            f"{placements}; other strategies are not supported yet. Leave placements out."
        )
    return placements


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


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module` and the modules inside it, stopping at units."""
    yield module
    for child in module.children():
        if not isinstance(child, FsdpModule):
            yield from _own_modules(child)


def _owned_parameters(module: nn.Module) -> list[OwnedParameter]:
    """Return the parameters below `module` that no inner unit owns, each once, with every place that holds it."""
    owned: dict[int, OwnedParameter] = {}
    names = {id(child): name for name, child in module.named_modules(remove_duplicate=True)}
    for owner in dict.fromkeys(_own_modules(module)):
        prefix = names[id(owner)]
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            entry = owned.setdefault(id(parameter), OwnedParameter(fqn, parameter))
            entry.places.append((owner._parameters, name))
    return list(owned.values())


def _group_parameters(owned: list[OwnedParameter]) -> list[list[OwnedParameter]]:
    """Group by (dtype, requires_grad), in the order in which they first occur."""
    groups: dict[tuple[torch.dtype, bool], list[OwnedParameter]] = {}
    for item in owned:
        key = (item.parameter.dtype, item.parameter.requires_grad)
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def _check_parameters(module: nn.Module, owned: list[OwnedParameter], policy: MixedPrecisionPolicy) -> None:
    kind = type(module).__name__
    for item in owned:
        parameter = item.parameter
        sharded_by = getattr(parameter, "_fsdp_unit", None)
        if sharded_by is not None:
            raise ValueError(
                f"fully_shard of {kind}: expected parameters of one unit, got {item.fqn}, which unit {sharded_by} has "
                "sharded already: a weight tied across two units. Shard the smallest module that holds both uses as "
                "one unit."
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"fully_shard of {kind}: expected plain parameters, got the DTensor {item.fqn}. Parameters that are "
                "distributed already are not supported yet."
            )
        if parameter.is_meta:
            raise ValueError(
                f"fully_shard of {kind}: expected parameters with values, got {item.fqn} on the meta device. "
                "Materialise and initialise the module first (to_empty, reset_parameters)."
            )
        if parameter.grad is not None:
            raise ValueError(
                f"fully_shard of {kind}: expected parameters without gradients, got one on {item.fqn}. Call "
                "zero_grad() first."
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"fully_shard of {kind}: expected parameters without hooks, got some on {item.fqn}, which would never "
                "run. Remove them; FsdpModule.register_post_backward_hook tells when a unit's backward ends."
            )
        if parameter.ndim == 0:
            raise ValueError(
                f"fully_shard of {kind}: expected parameters with at least one dim, got the scalar {item.fqn}. "
                "Give it shape (1,)."
            )
        _check_main_dtype(kind, item, policy)


def _check_main_dtype(kind: str, item: OwnedParameter, policy: MixedPrecisionPolicy) -> None:
    parameter, main = item.parameter, policy.main_params_dtype
    if not parameter.requires_grad or main is None:
        return
    if torch.promote_types(parameter.dtype, main) != main:
        raise ValueError(
            f"fully_shard of {kind}: expected main_params_dtype at least as wide as {parameter.dtype} of {item.fqn}, "
            f"got {main}. Widen it, or pass None to keep the parameters' dtype."
        )


def _check_attributes(module: nn.Module) -> None:
    names = {name for name in vars(FsdpModule) if not name.startswith("__") and name != "_apply"} | {"unshard_event"}
    taken = sorted(name for name in names if hasattr(module, name))
    if taken:
        raise ValueError(
            f"fully_shard of {type(module).__name__}: expected no attributes named like FsdpModule's, got "
            f"{taken}. Rename them, or shard a plain module around it."
        )


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
    for owner in _own_modules(module):
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)


def _sharded_class(cls: type) -> type:
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"Fsdp{cls.__name__}", (FsdpModule, cls), {})
    return _sharded_classes[cls]


def _refuse_assign(module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise RuntimeError(
            f"load_state_dict of {type(module).__name__} at {prefix or 'the root'!r}: expected assign=False, got "
            "assign=True, which would replace sharded parameters by ones that the runtime does not know. Load in place."
        )
