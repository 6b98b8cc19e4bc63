# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with the arguments of `fully_shard`; found before anything is changed or sent."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .controls import UnitControls
from .group_options import OwnedParameter
from .initial_values import RESET_METHODS, reset_method
from .module import FsdpModule
from .ownership import is_of_unit, own_modules, owned_parameters
from .policy import MixedPrecisionPolicy, Placements, SchedulePolicy
from .te_weights import check_not_deferred, check_primary, has_backward_plane, is_primary_weight

TENSOR_PARALLEL_AXIS = "tp"
"""Name of a mesh's last axis along which parameters are pieces, or the same; data parallelism knows nothing of it."""


def check_shardable(modules: Sequence[nn.Module], mixed_precision_policy: MixedPrecisionPolicy | None = None) -> None:
    """Raise what `fully_shard` of these modules, one after another, would raise about them, and change nothing.

    Args:
        modules: inner modules first.
        mixed_precision_policy: as for `fully_shard`.
    """
    policy = mixed_precision_policy or MixedPrecisionPolicy()
    units: set[nn.Module] = set()
    owners: dict[int, str] = {}
    for module in modules:
        owned = owned_parameters(module, units)
        check_unit(module, owned, policy)
        kind = type(module).__name__
        for item in owned:
            if id(item.parameter) in owners:
                raise _tied(kind, item.fqn, owners[id(item.parameter)])
            owners[id(item.parameter)] = kind
        units.add(module)


def check_unit(module: nn.Module, owned: list[OwnedParameter], policy: MixedPrecisionPolicy) -> None:
    """Refuse a module that cannot become a unit with these parameters."""
    check_module(module)
    _check_container(module, owned)
    _check_parameters(module, owned, policy)
    _check_initial_values(module)
    _check_attributes(module)


def check_modules(value: Any, register_hooks: bool) -> list[nn.Module]:
    """Return the modules that are to form one unit; refuse those that cannot."""
    modules = list(value) if isinstance(value, (list, tuple)) else [value]
    foreign = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]
    if foreign or not modules:
        raise TypeError(f"fully_shard module: expected Module or a list of them, got {', '.join(foreign) or 'none'}.")
    if len(modules) > 1:
        _check_joint(modules, register_hooks)
    return modules


def _check_joint(modules: Sequence[nn.Module], register_hooks: bool) -> None:
    kinds = [type(module).__name__ for module in modules]
    inside = [inner for module in modules for inner in module.modules()]
    if len(set(inside)) < len(inside):
        raise ValueError(
            f"fully_shard of several modules: expected modules beside each other, got {kinds}, of which some are the "
            "same or lie inside each other. Name each once."
        )
    if any(isinstance(module, UnitControls) for module in inside):
        raise ValueError(
            f"fully_shard of several modules: expected modules without units inside, got {kinds}. Shard what is inside "
            "them with them, or them one by one."
        )
    if not register_hooks:
        raise ValueError(
            "fully_shard of several modules: expected register_hooks=True, got False. Drive units of one module each."
        )


def check_types(mesh: Any, placements: Any, policy: Any, schedule: Any, cuda_graph: Any) -> None:
    """Refuse arguments of the wrong kind."""
    if not isinstance(cuda_graph, bool):
        raise TypeError(f"fully_shard cuda_graph: expected True or False, got {cuda_graph!r}.")
    expected = (
        ("mesh", mesh, DeviceMesh),
        ("placements", placements, Placements),
        ("mixed_precision_policy", policy, MixedPrecisionPolicy),
        ("schedule_policy", schedule, SchedulePolicy),
    )
    for name, value, kind in expected:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"fully_shard {name}: expected {kind.__name__} or None, got {type(value).__name__}.")


def check_module(module: nn.Module) -> None:
    """Refuse a module that is a unit already."""
    if is_of_unit(module):
        raise RuntimeError(
            f"fully_shard: expected a module that is not sharded yet, got {type(module).__name__}, which is a unit "
            "already. Call fully_shard once per module, inner modules first."
        )


def _check_container(module: nn.Module, owned: list[OwnedParameter]) -> None:
    """Refuse a container that nobody calls, as a unit with parameters."""
    if owned and isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard: expected a module with a forward, got {type(module).__name__} with parameters such as "
            f"{owned[0].fqn}, which would never be gathered. Shard the modules inside it, or the module around it."
        )


def merge_schedule(policy: SchedulePolicy | None, reshard_after_forward: bool | int | None) -> SchedulePolicy:
    """Return the schedule that both arguments describe, refusing two values for one setting."""
    schedule = policy or SchedulePolicy()
    if reshard_after_forward is None:
        return schedule
    if schedule.reshard_after_forward is not None:
        raise ValueError(
            f"fully_shard reshard_after_forward: expected None with a schedule_policy that sets it, got "
            f"{reshard_after_forward}. Set it in one place."
        )
    return replace(schedule, reshard_after_forward=reshard_after_forward)


def check_cuda_graph(
    modules: Sequence[nn.Module],
    placements: Placements,
    policy: MixedPrecisionPolicy,
    register_hooks: bool,
    *,
    has_pool: bool,
) -> None:
    """Refuse graphs of what is no unit by itself, or has no weights at fixed addresses."""
    kind = type(modules[0]).__name__
    if len(modules) > 1:
        raise NotImplementedError(
            f"fully_shard cuda_graph: expected one module, got {len(modules)} from {kind} on that form one unit, with "
            "whatever runs between them. Shard them one by one, or a module around them."
        )
    if not register_hooks:
        raise ValueError(
            f"fully_shard cuda_graph of {kind}: expected register_hooks=True, got False; a graph is replayed between "
            "the unit's own hooks. Leave one of the two out."
        )
    inner = [name for name, module in modules[0].named_modules() if isinstance(module, UnitControls)]
    if inner:
        raise ValueError(
            f"fully_shard cuda_graph of {kind}: expected a module without units inside, got {inner[:3]}, whose gathers "
            "and reductions would be captured, too. Give cuda_graph to the units inside instead."
        )
    is_made_anew = policy.recipe is not None or any(isinstance(at, Shard) for at in placements.parameter)
    if not has_pool and is_made_anew:
        raise ValueError(
            f"fully_shard cuda_graph of {kind}: expected gathered weights at fixed addresses, got a context without a "
            "pool. Build it with fully_shard_context(trace_pool=True), or replicate the parameters, without a recipe."
        )


def check_numbers(grad_divisor: Any, gradient_reduction: Any) -> None:
    """Refuse a divisor or reduction that means nothing."""
    if isinstance(grad_divisor, bool) or not isinstance(grad_divisor, (int, float)) or grad_divisor <= 0:
        raise ValueError(f"fully_shard grad_divisor: expected a number > 0, got {grad_divisor!r}.")
    if gradient_reduction not in ("average", "sum"):
        raise ValueError(f"fully_shard gradient_reduction: expected 'average' or 'sum', got {gradient_reduction!r}.")


def check_placements(mesh: DeviceMesh, placements: Placements | None) -> Placements:
    """Return placements whose axes are the mesh's, by index; refuse other axes."""
    indices, names = tuple(range(mesh.ndim)), mesh.mesh_dim_names or ()
    if placements is None:
        data_axes = indices[:-1] if len(names) > 1 and names[-1] == TENSOR_PARALLEL_AXIS else indices
        everywhere = (Shard(0),) * len(data_axes)
        return Placements(data_axes, everywhere, everywhere, everywhere)
    axes = placements.dp_axes
    count = len(axes)
    has_other = mesh.ndim == count + 1 and names[count:] == (TENSOR_PARALLEL_AXIS,)
    if axes not in (indices[:count], names[:count]) or (count != mesh.ndim and not has_other):
        raise ValueError(
            f"fully_shard placements: expected the mesh's axes {mesh.mesh_dim_names or indices}, outer to inner, got "
            f"{placements.dp_axes}. Name every axis of the mesh but a last one called {TENSOR_PARALLEL_AXIS!r}, and "
            "give `outer` exactly for two data-parallel axes."
        )
    return replace(placements, dp_axes=indices[:count])


def check_schedule(
    schedule: SchedulePolicy, placements: Placements, mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> SchedulePolicy:
    """Return the schedule with what a number for reshard_after_forward means; refuse a setting without effect."""
    reshard = schedule.reshard_after_forward
    axes = [axis for axis, at in enumerate(placements.parameter) if isinstance(at, Shard)]
    # Compute weights that are made from low-bit planes are released where the planes are whole, too.
    has_effect = axes or (policy.recipe is not None and isinstance(reshard, bool))
    if reshard is not None and not has_effect:
        raise ValueError(
            f"fully_shard reshard_after_forward: expected None where parameters are replicated, got "
            f"{reshard}; it would have no effect. Leave it out, or shard the parameters."
        )
    if type(reshard) is not int:
        return schedule
    sizes = [mesh.size(axis) for axis in axes]
    if len(sizes) > 1:
        raise NotImplementedError(
            f"fully_shard reshard_after_forward: expected True, False or None where several axes shard the parameters, "
            f"got {reshard}. Shard them over a mesh of one axis, or over one of its axes."
        )
    if sizes[0] % reshard:
        raise ValueError(
            f"fully_shard reshard_after_forward: expected a divisor of the {sizes[0]} ranks that shard the parameters, "
            f"got {reshard}. Give the number of ranks of one node, or True."
        )
    if reshard == 1:
        warnings.warn(
            "fully_shard reshard_after_forward: expected True or False, or a number above 1, got the number 1, which "
            "keeps whole weights on every rank, as False does. Say True to release them.",
            stacklevel=3,
        )
    return schedule if 1 < reshard < sizes[0] else replace(schedule, reshard_after_forward=reshard > 1)


def _check_parameters(module: nn.Module, owned: list[OwnedParameter], policy: MixedPrecisionPolicy) -> None:
    """Refuse parameters that cannot be sharded as they are."""
    kind = type(module).__name__
    for item in owned:
        parameter = item.parameter
        sharded_by = getattr(parameter, "_fsdp_unit", None)
        if sharded_by is not None:
            raise _tied(kind, item.fqn, sharded_by)
        if is_primary_weight(parameter):
            _check_primary(kind, item, policy)
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"fully_shard of {kind}: expected plain parameters, got the DTensor {item.fqn}. Parameters that are "
                "distributed already are not supported yet."
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
        _check_gradient_dtype(kind, item, policy)


def _check_primary(kind: str, item: OwnedParameter, policy: MixedPrecisionPolicy) -> None:
    """Refuse one of TransformerEngine's primary weights that cannot be sharded as it is."""
    check_primary(f"fully_shard of {kind}", item.fqn, item.parameter)
    if policy.recipe is not None and not policy.recipe.keeps(item.fqn):
        raise ValueError(
            f"fully_shard of {kind}: expected no MixedPrecisionPolicy.{policy.recipe.name} for weights that are "
            f"TransformerEngine's own low-bit ones, got it for {item.fqn}. Use one of the two."
        )


def check_primary_unit(
    owned: Sequence[OwnedParameter], schedule: SchedulePolicy, register_hooks: bool, cuda_graph: bool
) -> None:
    """Refuse what units of TransformerEngine's primary weights cannot do."""
    for item in owned:
        if not is_primary_weight(item.parameter):
            continue
        where = f"fully_shard of a unit with {item.fqn}, one of TransformerEngine's primary weights"
        if type(schedule.reshard_after_forward) is int:
            raise NotImplementedError(
                f"{where}: expected True, False or None for reshard_after_forward, got "
                f"{schedule.reshard_after_forward}; a few ranks' copy has no scales. Use True."
            )
        if cuda_graph:
            raise NotImplementedError(
                f"{where}: expected cuda_graph=False, got True; a unit's graph knows gathered weights of one buffer. "
                "Capture whole iterations instead."
            )
        if not register_hooks and has_backward_plane(item.parameter):
            raise NotImplementedError(
                f"{where}: expected register_hooks=True, got False; which plane is gathered follows from the unit's "
                "own hooks. Use a format whose backward reads the transposed weight."
            )


def _check_initial_values(module: nn.Module) -> None:
    """Refuse tensors on the meta device that nothing would give values to, or only together with others."""
    missing: list[str] = []
    names = {owner: prefix for prefix, owner in module.named_modules()}
    for owner in dict.fromkeys(own_modules(module)):
        check_not_deferred(f"fully_shard of {type(module).__name__}", owner)
        own = {
            name: tensor for name, tensor in (*owner._parameters.items(), *owner._buffers.items()) if tensor is not None
        }
        on_meta = [f"{names[owner]}.{name}".lstrip(".") for name, tensor in own.items() if tensor.is_meta]
        if on_meta and len(on_meta) < len(own):
            raise ValueError(
                f"fully_shard of {type(module).__name__}: expected all tensors of {names[owner] or 'the module'} on "
                f"the meta device, or none, since they are initialised together, got {on_meta} there. Build it in "
                "one place."
            )
        missing += on_meta if reset_method(owner) is None else []
    if missing:
        raise ValueError(
            f"fully_shard of {type(module).__name__}: expected modules that can compute initial values for their "
            f"tensors on the meta device, got {missing} without {' or '.join(RESET_METHODS)}. Give their modules such "
            "a method, or build them on a real device."
        )


def _tied(kind: str, fqn: str, other: str) -> ValueError:
    return ValueError(
        f"fully_shard of {kind}: expected parameters of one unit, got {fqn}, which unit {other} has sharded already: a "
        "weight tied across two units. Shard the smallest module that holds both uses as one unit."
    )


def _check_main_dtype(kind: str, item: OwnedParameter, policy: MixedPrecisionPolicy) -> None:
    parameter, main = item.parameter, policy.main_params_dtype
    if not parameter.requires_grad or main is None:
        return
    if torch.promote_types(parameter.dtype, main) != main:
        raise ValueError(
            f"fully_shard of {kind}: expected main_params_dtype at least as wide as {parameter.dtype} of {item.fqn}, "
            f"got {main}. Widen it, or pass None to keep the parameters' dtype."
        )


def _check_gradient_dtype(kind: str, item: OwnedParameter, policy: MixedPrecisionPolicy) -> None:
    """Refuse to accumulate in a dtype that loses what has been sent in a wider one."""
    main = policy.main_grads_dtype or policy.main_params_dtype or item.parameter.dtype
    sent = policy.grad_comm_dtype
    if item.parameter.requires_grad and sent is not None and torch.promote_types(sent, main) != main:
        raise ValueError(
            f"fully_shard of {kind}: expected grad_comm_dtype no wider than {main}, in which gradients of {item.fqn} "
            f"accumulate, got {sent}. Set main_grads_dtype={sent}, or send less."
        )


def _check_attributes(module: nn.Module) -> None:
    """Refuse a module whose own attributes the mixin would hide."""
    own = {name for cls in (FsdpModule, UnitControls) for name in vars(cls)} | {"unshard_event"}
    names = {name for name in own if not name.startswith("__") and not hasattr(nn.Module, name)}
    taken = sorted(name for name in names if hasattr(module, name))
    if taken:
        raise ValueError(
            f"fully_shard of {type(module).__name__}: expected no attributes named like FsdpModule's, got "
            f"{taken}. Rename them, or shard a plain module around it."
        )
