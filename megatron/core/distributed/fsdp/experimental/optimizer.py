# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers that step local shards.

It changes neither the optimizer's rule nor its hyperparameters. Checkpoint formats are elsewhere.

[Note: local step]
A step over DTensors pays DTensor dispatch for every parameter. The rule of an element-wise optimizer does not need it,
so an adapted optimizer lends its own `step` the plain local tensors, and takes them back: outside the step,
param_groups hold the sharded parameters. `optimizer.state` is keyed by sharded parameter and holds local tensors, which
the step shares; `state_dict()` wraps them into DTensors and `load_state_dict()` takes DTensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .dtensor import FsdpDTensor, shard_dtensor
from .elementwise import ElementwiseOnly
from .parameter_group import FsdpParameterGroup

_NOT_ELEMENTWISE = ("adafactor", "lamb", "lars", "lbfgs", "muon", "novograd", "shampoo", "soap", "sparseadam")
"""Parts of the names of optimizers whose update of an element depends on others, or that need a closure."""

_FUSED = frozenset({"FusedAdagrad", "FusedAdam", "FusedSGD"})
"""Element-wise optimizers of Apex and TransformerEngine, whose kernels are not torch functions."""

_NAMES = "fsdp_names"
"""Key of the parameters' names in a saved param_group: what groups are matched by at load."""

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
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    if refused := [name for name in names if any(word in name.lower() for word in _NOT_ELEMENTWISE)]:
        raise ValueError(
            f"fully_shard_optimizer: expected an element-wise optimizer such as AdamW or SGD, got {kind}. "
            f"{refused[0]} needs whole tensors or a closure, which local shards cannot give it."
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
        optimizer: Any = self
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)  # type: ignore[misc]
        optimizer._fsdp_step.follow_zero_grad()

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
        with self._fsdp_step.lend_locals(self) as shapes, _guard(cls, shapes):
            original(self)

    return step


def _guard(cls: type, shapes: Callable[[], dict[int, Any]]) -> AbstractContextManager[Any]:
    """Return what holds an optimizer of unknown making to element-wise rules; it costs host time in every operation."""
    package = cls.__module__.partition(".")[0]
    is_fused = package in ("apex", "transformer_engine") and cls.__name__ in _FUSED
    is_known = is_fused or cls.__module__.startswith("torch.optim.")
    return nullcontext() if is_known else ElementwiseOnly(cls.__name__, shapes())


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

    def follow_zero_grad(self) -> None:
        """Forget gradients that wait for a reduction, and free the memory of those that are gone."""
        for group in self._groups:
            group.drop_unreduced_gradients()
            group.release_cleared_gradients()

    def ensure_names(self) -> None:
        """Have parameters named by their place in the root, also before the first forward."""
        for group in self._groups:
            group.ensure_names()

    @contextmanager
    def lend_locals(self, optimizer: Any) -> Iterator[Callable[[], dict[int, Any]]]:
        """Let the optimizer's param_groups and state speak of local tensors inside the block."""
        held = [group.name for group in self._groups if group.has_unreduced_gradients]
        if held:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected reduced gradients, got some that are held back on each "
                f"rank for groups {held[:3]}. Run the last backward with set_requires_gradient_sync(True)."
            )
        unfinished = [group.name for group in self._groups if not group.has_final_gradients]
        if unfinished:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected gradients of all microbatches, got a last backward inside "
                f"microbatch(context, is_last=False) for groups {unfinished[:3]}. Run the last one with is_last=True."
            )
        self._settle()
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
            yield lambda: _shapes(sharded, lent)
        finally:
            for param_group, params in zip(optimizer.param_groups, sharded, strict=True):
                param_group["params"] = params
            optimizer.state = state
            self._take_back(sharded, lent, state)

    def _settle(self) -> None:
        """Refuse gradients of unknown origin, and wait for gathers that still read what the step will write."""
        contexts: dict[int, Any] = {}
        for group in self._groups:
            context = None if group.context is None else group.context()
            if context is not None:
                contexts[id(context)] = context
                if group.has_strays:
                    context.refuse_strays()
        for context in contexts.values():
            context.await_gathers()

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


def _shapes(sharded: Any, lent: Any) -> dict[int, tuple[torch.Size, torch.Size]]:
    """Return the logical and the local shape of every lent tensor and its gradient, by id."""
    shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
    for params, local_params in zip(sharded, lent, strict=True):
        for parameter, local in zip(params, local_params, strict=True):
            for tensor in (local, local.grad):
                if tensor is not None:
                    shapes[id(tensor)] = (parameter.geometry.shape, local.shape)
    return shapes


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


def _names(optimizer: Any) -> list[list[str]]:
    optimizer._fsdp_step.ensure_names()
    return [[parameter.geometry.fqn for parameter in group["params"]] for group in optimizer.param_groups]


def _wrap_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict that names its parameters, and whose tensors that are cut like one are DTensors."""
    parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    ids = [i for param_group in state_dict["param_groups"] for i in param_group["params"]]
    by_id = dict(zip(ids, parameters, strict=True))
    wrapped = {
        key: {name: _wrap(value, by_id[key]) for name, value in state.items()} if key in by_id else state
        for key, state in state_dict["state"].items()
    }
    groups = [
        {**group, _NAMES: names} for group, names in zip(state_dict["param_groups"], _names(optimizer), strict=True)
    ]
    return {**state_dict, "state": wrapped, "param_groups": groups}


def _wrap(value: Any, parameter: FsdpDTensor) -> Any:
    is_cut = isinstance(value, torch.Tensor) and value.shape == parameter._local_tensor.shape
    return shard_dtensor(value, parameter.geometry) if is_cut and not isinstance(value, DTensor) else value


def _unwrap_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of local tensors for torch's own load, with groups and parameters in the optimizer's order.

    Raises:
        ValueError: other parameters or another grouping, or a plain tensor of more than one element, whose cut is
            unknown.
    """
    for key, item in state_dict["state"].items():
        for name, value in item.items() if isinstance(item, dict) else ():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
                raise ValueError(
                    f"optimizer state {name!r} of parameter {key}: expected a DTensor as state_dict() gives it, got a "
                    f"plain tensor of shape {tuple(value.shape)}. Load what an adapted optimizer has saved."
                )
    groups = _matched_groups(optimizer, state_dict["param_groups"])
    _check_cuts(optimizer, groups, state_dict["state"])
    state = {
        key: {name: _local(value) for name, value in item.items()} if isinstance(item, dict) else item
        for key, item in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def _check_cuts(optimizer: Any, groups: Sequence[dict[str, Any]], state: dict[Any, Any]) -> None:
    """Refuse state of parameters of another shape, or cut for another number of ranks."""
    for param_group, group in zip(optimizer.param_groups, groups, strict=True):
        for parameter, key in zip(param_group["params"], group["params"], strict=True):
            for name, value in state.get(key, {}).items():
                found = value.geometry if isinstance(value, FsdpDTensor) else None
                ours = parameter.geometry
                if found is not None and (found.shape, found.cut) != (ours.shape, ours.cut):
                    raise ValueError(
                        f"optimizer state {name} of {ours.fqn}: expected shape {tuple(ours.shape)} cut into "
                        f"{ours.layout.num_shards}, got {tuple(found.shape)} cut into {found.layout.num_shards}. Load "
                        "what the same model has saved on as many ranks."
                    )


def _matched_groups(optimizer: Any, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups as the optimizer has them: matched by their parameters' names, not by position."""
    wanted = _names(optimizer)
    flat = [name for names in wanted for name in names]
    # Roots that share an optimizer may have parameters of one name: then only the same order will do.
    is_ambiguous = len(set(flat)) != len(flat)
    by_names = {_key(group.get(_NAMES, ()), position, is_ambiguous): group for position, group in enumerate(saved)}
    matched = []
    for position, names in enumerate(wanted):
        group = by_names.get(_key(names, position, is_ambiguous))
        if group is None or len(by_names) != len(optimizer.param_groups):
            raise ValueError(
                f"optimizer state: expected {len(optimizer.param_groups)} groups with this optimizer's parameters, got "
                f"{len(saved)}, none of which holds {names[:3]} of param_groups[{position}]. Build the optimizer with "
                "the groups of the saved one, and load what an adapted optimizer has saved."
            )
        ids = dict(zip(group[_NAMES], group["params"], strict=True))
        kept = {key: value for key, value in group.items() if key != _NAMES}
        matched.append({**kept, "params": group["params"] if is_ambiguous else [ids[name] for name in names]})
    return matched


def _key(names: Sequence[str], position: int, is_ambiguous: bool) -> tuple[Any, ...]:
    return (position, *names) if is_ambiguous else tuple(sorted(names))
