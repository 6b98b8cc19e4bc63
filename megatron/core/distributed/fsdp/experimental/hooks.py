# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Hooks around a unit's forward, and around other methods that are registered like it.

They watch the tensors that go in and out and call the unit's points; they decide nothing about memory or streams.

[Note: tensors that leave a forward by another way]
A unit's backward begins at its outputs. A tensor that is kept elsewhere and used in a loss leads into the unit, too.
Tensors left in attributes of the unit's modules (an auxiliary loss, attention weights), in lists, mappings and
dataclasses there or in one that was passed in, are found after the forward, and outputs of inner modules on which
somebody has registered a forward hook are watched, since such hooks often keep them.
Any other way is noticed at the end of the backward, at the latest.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from .boundary import ForwardCall, has_unknown_container, tensors_in
from .compiling import untraced, warn_if_uncompiled
from .module import FsdpModule
from .phase import UnitPhase

_MAX_KEPT = 64
"""Items of a list, mapping or dataclass in an attribute that are looked at for tensors that a forward has left there.

Megatron-Core's modules all have its config of some 200 fields, of which a layer's forward would read thousands.
"""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_WITHOUT_TENSORS = frozenset({int, float, bool, str, type(None)})


def register_hooks(unit: FsdpModule) -> None:
    """Let the unit's forward call its points."""
    module: Any = unit
    module.register_forward_pre_hook(begin_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(end_forward, always_call=True)
    unit._fsdp_keepers = tuple(inner for inner in unit._fsdp_inner_modules if not _is_of_torch(inner))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method as a forward: parameters are gathered while it runs, and its outputs lead to a backward.

    The method may call the module itself; the parameters stay gathered until it returns.

    Args:
        module: a unit.
        method_name: a method of its class, e.g. ``"encode"``.

    Raises:
        TypeError: the module is no unit.
        ValueError: its class has no such method, or it is forward itself.
    """
    if not isinstance(module, FsdpModule):
        raise TypeError(
            f"register_fsdp_forward_method: expected a unit, got {type(module).__name__}. Call fully_shard on it first."
        )
    if module._fsdp_followers:
        raise NotImplementedError(
            f"register_fsdp_forward_method of {type(module).__name__}: expected a unit of one module, got one of "
            f"{1 + len(module._fsdp_followers)}. Shard them one by one."
        )
    cls = type(module)
    method = inspect.getattr_static(cls, method_name, None)
    is_suspended = any(
        ask(method) for ask in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    )
    is_taken = method_name == "forward" or hasattr(FsdpModule, method_name) or method_name in vars(module)
    if is_taken or is_suspended or not inspect.isfunction(method):
        raise ValueError(
            f"register_fsdp_forward_method of {cls.__name__}: expected an ordinary method of its class besides "
            f"forward, got {method_name!r}. Name a function that the class defines, takes self and returns tensors."
        )
    if not getattr(method, "_fsdp_is_forward_method", False):
        setattr(cls, method_name, _as_forward(method, method_name))
    unit: Any = module
    unit._fsdp_forward_methods.add(method_name)


def _as_forward(method: Any, name: str) -> Any:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name not in self._fsdp_forward_methods or self._fsdp_is_in_method:
            return method(self, *args, **kwargs)
        replaced = begin_forward(self, args, kwargs)
        args, kwargs = (args, kwargs) if replaced is None else replaced
        self._fsdp_is_in_method = True
        output = None
        try:
            output = method(self, *args, **kwargs)
        finally:
            self._fsdp_is_in_method = False
            output = end_forward(self, args, output)
        return output

    marked: Any = run
    marked._fsdp_is_forward_method = True
    return run


@untraced
def begin_forward(unit: Any, args: Any, kwargs: Any) -> Any:
    """Begin a forward of the unit; return arguments whose tensors are watched, or None for those given."""
    if unit._fsdp_is_in_method:
        return None
    if unit.phase is UnitPhase.FORWARD and not _is_running(unit) and not unit.is_root():
        # A KeyboardInterrupt has ended its last call without hooks.
        unit._fsdp_abandon_backward()
    elif unit.phase is UnitPhase.FORWARD and _is_running(unit):
        raise NotImplementedError(
            f"forward of unit {unit.name}: expected one at a time, got a call from within itself. Shard the module "
            "around the recursion in its place."
        )
    unit.pre_forward()
    if not torch.is_grad_enabled() or unit.phase is not UnitPhase.FORWARD:
        return None
    return open_call(unit, args, kwargs)


def open_call(unit: Any, args: Any, kwargs: Any) -> Any:
    """Expect a backward of the unit's forward, which is under way; return arguments whose tensors are watched."""
    call = unit._fsdp_open_call = ForwardCall(unit, unit._fsdp_version())
    _watch_hooked_modules(unit)
    return call.watch_inputs(args), call.watch_inputs(kwargs)


@untraced
def end_forward(unit: Any, args: Any, output: Any) -> Any:
    """End a forward of the unit; return its output, which is watched."""
    if unit._fsdp_is_in_method or unit.phase is UnitPhase.RESTING:
        return None
    while unit._fsdp_open_joints:
        inner = unit._fsdp_open_joints.popitem()[1]()
        if inner is not None and inner.phase is UnitPhase.FORWARD:
            end_forward(inner, (), None)
    call, unit._fsdp_open_call = unit._fsdp_open_call, None
    if not unit._fsdp_has_run:
        unit._fsdp_has_run = True
        if not any(isinstance(inner, FsdpModule) and inner is not unit for inner in unit.modules()):
            warn_if_uncompiled(unit, unit.name)
    needs_backward = False
    if call is not None and torch.is_grad_enabled():
        output = call.pass_on(output)
        needs_backward = call.watch_outputs(output)
        for kept in (*call.added_tensors(), *kept_tensors(unit, call)):
            needs_backward = call.watch_outputs(kept) or needs_backward
    if call is not None:
        needs_backward = needs_backward or call.has_left_outputs
        call.close_forward()
    if needs_backward:
        parent = unit._fsdp_parent()
        if parent is not None and parent._fsdp_open_call is not None:
            parent._fsdp_open_call.contain(call)
    try:
        refuse_alias(unit, output)
    finally:
        unit.post_forward(needs_backward)
    may_need = call is not None and (call.num_inputs or any(group.requires_grad for group in unit.parameter_groups))
    if may_need and not needs_backward and has_unknown_container(output):
        raise TypeError(
            f"output of unit {unit.name}: expected tensors, or tuples, lists, mappings and dataclasses of them, got "
            f"{type(output).__name__}, in which tensors that need gradients cannot be found. Return one of these."
        )
    return output


def _is_running(module: nn.Module) -> bool:
    """Return whether a call of the module is under way besides the one that asks, rather than cut short."""
    frame: Any = sys._getframe()
    calls = 0
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def kept_tensors(unit: Any, call: ForwardCall) -> Iterator[torch.Tensor]:
    """Yield the tensors of `call` that its forward has left in attributes of the unit's modules."""
    for module in (unit, *unit._fsdp_keepers):
        for name, value in vars(module).items():
            if type(value) in _WITHOUT_TENSORS or name in _MODULE_ATTRIBUTES or name.startswith("_fsdp_"):
                continue
            for tensor in _tensors_near(value):
                if call.has_made(tensor) and not hasattr(tensor, "_fsdp_output_hook"):
                    yield tensor


def _tensors_near(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    """Yield tensors in small containers, so that a vocabulary in an attribute costs nothing."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)) and len(value) <= _MAX_KEPT:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_near(item, depth - 1)
    elif depth and is_dataclass(value) and not isinstance(value, type) and len(items := fields(value)) <= _MAX_KEPT:
        for item in items:
            yield from _tensors_near(getattr(value, item.name), depth - 1)


def _watch_hooked_modules(unit: Any) -> None:
    watched = unit._fsdp_watched
    for inner in unit._fsdp_inner_modules:
        if inner._forward_hooks and inner not in watched:
            watched.add(inner)
            inner.register_forward_hook(_InnerOutputs(weakref.ref(unit)))


class _InnerOutputs:
    """Forward hook of an inner module whose outputs somebody else's hook may keep."""

    def __init__(self, unit: weakref.ref[Any]) -> None:
        self._unit = unit

    @untraced
    def __call__(self, module: Any, args: Any, output: Any) -> None:
        unit = self._unit()
        call = None if unit is None else unit._fsdp_open_call
        if call is not None and torch.is_grad_enabled():
            call.watch_outputs(output, is_final=False)


def refuse_alias(unit: Any, output: Any) -> None:
    """Refuse an output that shares memory with a gathered parameter.

    Raises:
        RuntimeError: it does; names the parameter.
    """
    for tensor in tensors_in(output):
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not tensor.numel():
            continue
        pointer = tensor.untyped_storage().data_ptr()
        for group in unit.parameter_groups:
            full = group.full_weight
            if full.is_transient and group.numel and full.local.untyped_storage().data_ptr() == pointer:
                raise RuntimeError(
                    f"output of unit {unit.name}: expected a tensor of its own, got a view of its parameter "
                    f"{group.name_at(tensor.storage_offset())}, whose memory is released after forward. Return a copy: "
                    "clone() it."
                )
