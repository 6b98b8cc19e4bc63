# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers that step local shards, and gradient statistics that know how gradients are distributed.

It changes neither the optimizer's rule nor its hyperparameters. Checkpoint formats are elsewhere.

[Note: local step]
A step over DTensors pays DTensor dispatch for every parameter. The rule of an element-wise optimizer does not need it,
so an adapted optimizer lends its own `step` the plain local tensors, and takes them back: outside the step,
param_groups hold the sharded parameters. `optimizer.state` is keyed by sharded parameter and holds local tensors, which
the step shares; `state_dict()` wraps them into DTensors and `load_state_dict()` takes DTensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from . import collectives
from .dtensor import FsdpDTensor, shard_dtensor
from .parameter_group import FsdpParameterGroup

_NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
"""torch optimizers whose update of an element depends on elements that other ranks hold, or that need a closure."""

_adapted_classes: dict[type, type] = {}


def fully_shard_optimizer(optimizer: Optimizer, *, precision_aware: bool = False) -> Optimizer:
    """Let an element-wise optimizer step the local shards of an FSDP model, in place.

    Args:
        optimizer: built from the parameters of a sharded model. Build LR schedulers after this call.
        precision_aware: hand gradients over as ``decoupled_grad``, in the main-gradient dtype, to an optimizer that
            takes them so (TransformerEngine's FusedAdam with ``use_decoupled_grad=True``); otherwise gradients of
            another dtype than the main weights are cast for the step.

    Returns:
        The same optimizer.

    Raises:
        TypeError: not a torch optimizer.
        ValueError: a rule that local shards cannot follow, or parameters that are not sharded parameters of a unit.
        RuntimeError: adapted already, or a scheduler wraps its step already.
    """
    _check_optimizer(optimizer, precision_aware)
    groups = _validated_groups(optimizer)
    cls = type(optimizer)
    if cls not in _adapted_classes:
        _adapted_classes[cls] = type(f"Fsdp{cls.__name__}", (_FsdpOptimizer, cls), {"step": _make_step(cls)})
    adapted: Any = optimizer
    adapted.__class__ = _adapted_classes[cls]
    adapted._fsdp_step = _LocalStep(adapted, groups, precision_aware)
    adapted._patch_step_function()
    adapted.register_state_dict_post_hook(_wrap_state)
    adapted.register_load_state_dict_pre_hook(_unwrap_state)
    return optimizer


def _check_optimizer(optimizer: Any, precision_aware: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fully_shard_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    kind = type(optimizer).__name__
    if isinstance(optimizer, _FsdpOptimizer):
        raise RuntimeError(f"fully_shard_optimizer: expected an optimizer that is not adapted yet, got {kind}.")
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    if refused := names & _NOT_ELEMENTWISE:
        raise ValueError(
            f"fully_shard_optimizer: expected an element-wise optimizer such as AdamW or SGD, got {kind}. "
            f"{refused.pop()} needs whole tensors or a closure, which local shards cannot give it."
        )
    if "step" in vars(optimizer):
        raise RuntimeError(
            f"fully_shard_optimizer: expected {kind}.step to be untouched, got one that an LR scheduler or a tool has "
            "wrapped. Adapt the optimizer first and build the scheduler after."
        )
    if (
        precision_aware
        and not any(group.get("use_decoupled_grad") for group in optimizer.param_groups)
        and (not getattr(optimizer, "use_decoupled_grad", False))
    ):
        raise ValueError(
            f"fully_shard_optimizer precision_aware: expected an optimizer with use_decoupled_grad=True, got {kind}, "
            "which reads .grad. Leave precision_aware out."
        )


def _validated_groups(optimizer: Optimizer) -> list[FsdpParameterGroup]:
    """Return the runtime's groups behind the optimizer's parameters, refusing foreign parameters."""
    found: dict[int, FsdpParameterGroup] = {}
    for position, param_group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(param_group["params"]):
            where = f"parameter {index} of param_groups[{position}]"
            if hasattr(parameter, "_fsdp_unit"):
                raise ValueError(
                    f"fully_shard_optimizer: expected sharded parameters, got {where}: the original "
                    f"{parameter._fsdp_fqn} that unit {parameter._fsdp_unit} has replaced. Build the optimizer after "
                    "fully_shard."
                )
            where = f"{where}, shape {tuple(parameter.shape)}"
            if not isinstance(parameter, FsdpDTensor):
                raise ValueError(
                    f"fully_shard_optimizer: expected sharded parameters, got {where}, which belongs to no unit. "
                    "Shard its module, or give it an optimizer of its own."
                )
            group = parameter._fsdp_group()  # type: ignore[attr-defined]
            if group is None:
                raise ValueError(
                    f"fully_shard_optimizer: expected parameters of a live model, got {where}, whose model is gone."
                )
            found[id(group)] = group
    return list(found.values())


class _FsdpOptimizer:
    """Marks an adapted optimizer; its `step` is made by `_make_step`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, without asking every parameter's class for each access."""
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add sharded parameters, as torch does; refuse any other and leave the optimizer as it was."""
        optimizer: Any = self
        super().add_param_group(param_group)  # type: ignore[misc]
        try:
            optimizer._fsdp_step.set_groups(_validated_groups(optimizer))
        except ValueError:
            optimizer.param_groups.pop()
            raise


def _make_step(cls: Any) -> Any:
    inherited = cls.step
    original = inherited.__wrapped__ if getattr(inherited, "hooked", False) else inherited

    def step(self: Any, closure: Any = None) -> None:
        """Update the main weights; the next forward makes the compute weights from them."""
        if closure is not None:
            raise ValueError(
                f"{type(self).__name__}.step: expected no closure, got one. A closure re-runs forward and backward "
                "while the step holds local shards. Compute the loss before the step."
            )
        with self._fsdp_step.lend_locals(self):
            original(self)

    return step


class _LocalStep:
    """Lends plain local tensors to an optimizer's step and takes them back."""

    def __init__(self, optimizer: Any, groups: Sequence[FsdpParameterGroup], precision_aware: bool) -> None:
        self._groups = groups
        self._precision_aware = precision_aware
        self._locals: dict[torch.Tensor, Any] = {}
        self._local_state: Any = defaultdict(dict)
        for parameter, state in list(optimizer.state.items()):
            optimizer.state[parameter] = {key: _local(value) for key, value in state.items()}

    def set_groups(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """Take the groups behind the optimizer's parameters after these have changed."""
        self._groups = groups

    @contextmanager
    def lend_locals(self, optimizer: Any) -> Iterator[None]:
        """Let the optimizer's param_groups and state speak of local tensors inside the block."""
        unfinished = [group.name for group in self._groups if not group.has_final_gradients]
        if unfinished:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected gradients of all microbatches, got a last backward inside "
                f"microbatch(context, is_last=False) for groups {unfinished[:3]}. Run the last one with is_last=True."
            )
        sharded = [param_group["params"] for param_group in optimizer.param_groups]
        state = optimizer.state
        with torch._C.DisableTorchFunctionSubclass():
            lent = [[self._lend(parameter, state) for parameter in params] for params in sharded]
        for group in self._groups:
            group.begin_step()
        optimizer.state = self._local_state
        for param_group, params in zip(optimizer.param_groups, lent, strict=True):
            param_group["params"] = params
        try:
            yield
        finally:
            for param_group, params in zip(optimizer.param_groups, sharded, strict=True):
                param_group["params"] = params
            optimizer.state = state
            self._take_back(sharded, lent, state)

    def _lend(self, parameter: Any, state: Any) -> Any:
        local = self._locals.get(parameter)
        if local is None:
            local = self._locals[parameter] = parameter._local_tensor.detach()
        grad = parameter.grad
        if grad is not None:
            grad = _cut_gradient(parameter, grad)
            if self._precision_aware:
                local.decoupled_grad = grad
                grad = None
            elif grad.dtype != local.dtype:
                grad = grad.to(local.dtype)
        elif self._precision_aware:
            local.decoupled_grad = None
        local.grad = grad
        known = state.get(parameter)
        if known is not None:
            self._local_state[local] = known
        else:
            self._local_state.pop(local, None)
        return local

    def _take_back(self, sharded: Any, lent: Any, state: Any) -> None:
        for params, local_params in zip(sharded, lent, strict=True):
            for parameter, local in zip(params, local_params, strict=True):
                local.grad = None
                if local in self._local_state:
                    state[parameter] = self._local_state[local]
        for group in self._groups:
            group.mark_main_weight_written()


def _cut_gradient(parameter: Any, grad: Any) -> torch.Tensor:
    """Return this rank's part of a gradient that the user may have put there."""
    if not isinstance(grad, DTensor):
        raise ValueError(
            f"gradient of {parameter.geometry.fqn}: expected a DTensor cut like its parameter, got "
            f"{type(grad).__name__} of shape {tuple(grad.shape)}. Change gradients in place, or assign what an "
            "operation on them returns."
        )
    return grad._local_tensor


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _wrap_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors that are cut like their parameter are DTensors."""
    parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    ids = [i for param_group in state_dict["param_groups"] for i in param_group["params"]]
    by_id = dict(zip(ids, parameters, strict=True))
    wrapped = {
        key: {name: _wrap(value, by_id[key]) for name, value in state.items()} if key in by_id else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": wrapped}


def _wrap(value: Any, parameter: FsdpDTensor) -> Any:
    is_cut = isinstance(value, torch.Tensor) and value.shape == parameter._local_tensor.shape
    return shard_dtensor(value, parameter.geometry) if is_cut and not isinstance(value, DTensor) else value


def _unwrap_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of local tensors for torch's own load.

    Raises:
        ValueError: a plain tensor of more than one element, whose cut is unknown.
    """
    for key, item in state_dict["state"].items():
        for name, value in item.items() if isinstance(item, dict) else ():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
                raise ValueError(
                    f"optimizer state {name!r} of parameter {key}: expected a DTensor as state_dict() gives it, got a "
                    f"plain tensor of shape {tuple(value.shape)}. Load what an adapted optimizer has saved."
                )
    state = {
        key: {name: _local(value) for name, value in item.items()} if isinstance(item, dict) else item
        for key, item in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm over all parameters and ranks is at most `max_norm`.

    Every rank must call it with the same parameters. There is no host synchronisation unless `error_if_nonfinite`.

    Args:
        parameters: sharded parameters, or plain ones that are equal on every rank; those without gradient are skipped.
        max_norm: upper bound, > 0.
        norm_type: order of the norm, > 0; may be inf.
        error_if_nonfinite: raise rather than scale by a norm that is nan or inf.

    Returns:
        The norm before clipping: a 0-d tensor, the same on every rank; float32, or float64 if a parameter is.

    Raises:
        ValueError: a bound or order out of range.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: expected max_norm > 0 and norm_type > 0, got {max_norm} and {norm_type}.")
    items = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    total = grad_norm(items, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite gradient norm, got {float(total)}. Lower the learning rate or the "
            "loss scale, or pass error_if_nonfinite=False to go on."
        )
    clip_grads_with_norm_(items, max_norm, total)
    return total


def clip_grads_with_norm_(parameters: Iterable[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
    """Scale gradients by max_norm / total_norm if that is below one; no communication, no host synchronisation.

    Args:
        parameters: sharded or plain parameters; those without gradient are skipped.
        max_norm: upper bound of the norm.
        total_norm: the norm as it is, 0-d, the same on every rank.
    """
    scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        gradients = [_local_gradient(item.grad) for item in parameters if item.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            torch._foreach_mul_([g for g in gradients if g.dtype is dtype], scale)


def grad_norm(parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients over all ranks, 0-d, as `clip_grad_norm_` does; every rank must call it.

    Shards are reduced over the mesh axes that shard them and over no other, so that replicas count once. Every mesh
    among the parameters is reduced over, whether this rank has gradients there or not. Sums are kept in float64, so
    that the norm, and with it clipping, does not depend on how many ranks share the gradients.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        buckets: dict[Any, tuple[list[dist.ProcessGroup], list[torch.Tensor]]] = {}
        for parameter in parameters:
            key, groups = _reduction_groups(parameter)
            gradients = buckets.setdefault(key, (groups, []))[1]
            if parameter.grad is not None:
                gradients.append(_local_gradient(parameter.grad))
        device = _local_gradient(parameters[0]).device if parameters else torch.device("cpu")
        is_wide = any(parameter.dtype is torch.float64 for parameter in parameters)
        total = torch.zeros((), dtype=torch.float64, device=device)
        is_max = math.isinf(norm_type)
        for groups, gradients in buckets.values():
            part = _power_sum(gradients, norm_type, like=total)
            for group in groups:
                collectives.all_reduce(part, "max" if is_max else "sum", group, what="the gradient norm")
            total = torch.maximum(total, part) if is_max else total + part
        norm = total if is_max else total.pow(1.0 / norm_type)
        return norm if is_wide else norm.float()


def _reduction_groups(parameter: torch.Tensor) -> tuple[Any, list[dist.ProcessGroup]]:
    if not isinstance(parameter, DTensor):
        return None, []
    mesh = parameter.device_mesh
    axes = tuple(axis for axis, at in enumerate(parameter.placements) if at.is_shard())
    return (mesh, axes), [mesh.get_group(axis) for axis in axes]


def _local_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _power_sum(gradients: Sequence[torch.Tensor], norm_type: float, *, like: torch.Tensor) -> torch.Tensor:
    """Return the sum over elements of |g|**norm_type, or their largest |g| for inf, in float64."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros_like(like)
    norms = torch.stack(torch._foreach_norm(filled, norm_type, dtype=like.dtype))
    if math.isinf(norm_type):
        return norms.max()
    return norms.pow(norm_type).sum()
