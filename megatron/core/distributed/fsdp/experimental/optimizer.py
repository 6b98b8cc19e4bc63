# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`fully_shard_optimizer`: which optimizers may step local shards, and what their state dicts look like.

It changes neither the optimizer's rule nor its hyperparameters. How a step works is local_step.py's; checkpoint formats
are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .compiling import untraced
from .dtensor import FsdpDTensor, shard_dtensor
from .elementwise import ElementwiseOnly
from .full_values import cut_like
from .local_step import LocalStep
from .matrix_rule import is_of_matrices, require_same_rule
from .parameter_group import FsdpParameterGroup

_NOT_ELEMENTWISE = ("adafactor", "lamb", "lars", "lbfgs", "muon", "novograd", "shampoo", "soap", "sparseadam")
"""Parts of the names of optimizers whose update of an element depends on others, or that need a closure."""

_FUSED = frozenset({"FusedAdagrad", "FusedAdam", "FusedSGD"})
"""Element-wise optimizers of Apex and TransformerEngine, whose kernels are not torch functions."""

_NAMES = "fsdp_names"
"""Key of the parameters' names in a saved param_group: what groups are matched by at load."""

_adapted_classes: dict[type, type] = {}


def fully_shard_optimizer(optimizer: Optimizer, *, precision_aware: bool = False) -> Optimizer:
    """Let an element-wise optimizer, or a `MatrixOptimizer`, step the local shards of an FSDP model, in place.

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
    rest = getattr(optimizer, "rest", None) if _steps_shards(type(optimizer)) else None
    if rest is not None:
        _check_optimizer(rest, False)
    cls = type(optimizer)
    is_fused = _is_fused(cls) or _is_fused(type(rest))
    # TransformerEngine's kernels (issue 3207) update nothing of a list that ends with a tensor without elements.
    # Matrices keep the order that all ranks have.
    lender = LocalStep(_validated_groups, precision_aware, lambda group: is_fused and not is_of_matrices(group))
    lender.match(optimizer)
    if cls not in _adapted_classes:
        _adapted_classes[cls] = type(f"Fsdp{cls.__name__}", (_FsdpOptimizer, cls), {"step": _make_step(cls)})
    adapted: Any = optimizer
    adapted.__class__ = _adapted_classes[cls]
    adapted._fsdp_step = lender
    for parameter, state in list(adapted.state.items()):
        adapted.state[parameter] = {key: _local(value) for key, value in state.items()}
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
    refused = [name for name in names if any(word in name.lower() for word in _NOT_ELEMENTWISE)]
    if refused and not _steps_shards(type(optimizer)):
        raise ValueError(
            f"fully_shard_optimizer: expected an element-wise optimizer such as AdamW or SGD, got {kind}. "
            f"{refused[0]} needs whole tensors or a closure, which local shards cannot give it. For Muon use "
            "fully_shard_muon."
        )
    if "step" in vars(optimizer):
        raise RuntimeError(
            f"fully_shard_optimizer: expected {kind}.step to be untouched, got one that an LR scheduler or a tool has "
            "wrapped. Adapt the optimizer first and build the scheduler after."
        )
    takes_decoupled = getattr(optimizer, "use_decoupled_grad", False) or any(
        group.get("use_decoupled_grad") for group in optimizer.param_groups
    )
    if precision_aware and not takes_decoupled:
        raise ValueError(
            f"fully_shard_optimizer precision_aware: expected an optimizer with use_decoupled_grad=True, got {kind}, "
            "which reads .grad. Leave precision_aware out."
        )
    if takes_decoupled and not precision_aware:
        raise ValueError(
            f"fully_shard_optimizer precision_aware: expected True for an optimizer with use_decoupled_grad=True, got "
            f"False for {kind}, which would not see a gradient. Pass True (with Megatron-Core, "
            "--use-precision-aware-optimizer), or build it without use_decoupled_grad."
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

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, those that wait for a reduction, too; of this optimizer's parameters only."""
        optimizer: Any = self
        with torch._C.DisableTorchFunctionSubclass():
            if optimizer._fsdp_step.precision_aware:
                # Its own zero_grad may clear `decoupled_grad` only, which a step gets from `.grad` anew.
                Optimizer.zero_grad(optimizer, set_to_none)
            else:
                super().zero_grad(set_to_none)  # type: ignore[misc]
        optimizer._fsdp_step.follow_zero_grad(optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add sharded parameters, as torch does; refuse any other and leave the optimizer as it was."""
        optimizer: Any = self
        super().add_param_group(param_group)  # type: ignore[misc]
        try:
            _validated_groups(optimizer)
        except ValueError:
            optimizer.param_groups.pop()
            raise


def _make_step(cls: Any) -> Any:
    inherited = cls.step
    original = inherited.__wrapped__ if getattr(inherited, "hooked", False) else inherited

    @untraced
    def step(self: Any, closure: Any = None) -> None:
        """Update the main weights; the next forward makes the compute weights from them."""
        if closure is not None:
            raise ValueError(
                f"{type(self).__name__}.step: expected no closure, got one. A closure re-runs forward and backward "
                "while the step holds local shards. Compute the loss before the step."
            )
        with self._fsdp_step.lend(self) as shapes, _guard(cls, shapes):
            if _steps_shards(cls):
                self.guard_rest = partial(_guard, type(self.rest), shapes)
            original(self)

    return step


def _guard(cls: type, shapes: Callable[[], dict[int, Any]]) -> AbstractContextManager[Any]:
    """Return what holds an optimizer of unknown making to element-wise rules; it costs host time in every operation."""
    is_known = _is_fused(cls) or _steps_shards(cls) or cls.__module__.startswith("torch.optim.")
    return nullcontext() if is_known else ElementwiseOnly(cls.__name__, shapes())


def _steps_shards(cls: type) -> bool:
    """Return whether an optimizer knows how the shards that it is lent are cut; see `MatrixOptimizer`."""
    return bool(getattr(cls, "steps_shards", False))


def _is_fused(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("apex", "transformer_engine") and cls.__name__ in _FUSED


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for param_group in optimizer.param_groups for parameter in param_group["params"]]


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _names(optimizer: Any) -> list[list[str]]:
    optimizer._fsdp_step.ensure_names(optimizer)
    return [[parameter.geometry.fqn for parameter in group["params"]] for group in optimizer.param_groups]


def _wrap_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict that names its parameters, and whose tensors that are cut like one are DTensors."""
    parameters = _parameters(optimizer)
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
        ValueError: another optimizer's state, other parameters or another grouping, or a plain tensor that is neither a
            single number nor full, so that its cut is unknown.
    """
    _require_same_rules(optimizer, state_dict["param_groups"])
    groups = _matched_groups(optimizer, state_dict["param_groups"])
    by_key = {
        key: parameter
        for param_group, group in zip(optimizer.param_groups, groups, strict=True)
        for parameter, key in zip(param_group["params"], group["params"], strict=True)
    }
    cut = {
        key: {name: _cut(value, by_key[key], name) for name, value in item.items()}
        for key, item in state_dict["state"].items()
        if key in by_key and isinstance(item, dict)
    }
    _check_cuts(optimizer, groups, cut)
    local = {key: {name: _local(value) for name, value in item.items()} for key, item in cut.items()}
    return {**state_dict, "state": {**state_dict["state"], **local}, "param_groups": groups}


def _require_same_rules(optimizer: Any, saved: Sequence[dict[str, Any]]) -> None:
    by_name = {name: group for group in saved for name in group.get(_NAMES, ())}
    for param_group, names in zip(optimizer.param_groups, _names(optimizer), strict=True):
        for name in names:
            require_same_rule(name, param_group, by_name.get(name, param_group))


def _cut(value: Any, parameter: FsdpDTensor, name: str) -> Any:
    """Return a saved state as the parameter is cut, also where it was saved in full."""
    found = cut_like(value, parameter)
    if isinstance(found, torch.Tensor) and not isinstance(found, DTensor) and found.numel() > 1:
        raise ValueError(
            f"optimizer state {name!r} of {parameter.geometry.fqn}: expected a DTensor as state_dict() gives it, or a "
            f"full tensor, got a plain tensor of shape {tuple(found.shape)}. Load what an adapted optimizer has saved."
        )
    return found


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
