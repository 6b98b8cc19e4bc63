# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The tensors at a unit's border: which gradient begins a unit's backward, and which gradients end it.

It knows autograd and nothing of sharding: a unit is whatever has the two callbacks of `Boundary`.

[Note: when a unit's backward ends]
That all parameters have their gradients does not mean that their values are no longer needed: in ``w(x) + b(a(x))``
with a frozen w, the gradients of a and b are there before w is read for the gradient of x. A unit has done with its
weights when, besides, the gradients of the inputs that need one are known and the units inside have done with theirs,
since every operation of its backward leads to a parameter, to an input, or to a unit inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch


class Boundary(Protocol):
    """What a unit is told."""

    def _fsdp_begin_backward(self, call: ForwardCall) -> None:
        """A gradient of an output of `call` is known; may come several times in one backward."""
        ...

    def _fsdp_inputs_done(self) -> None:
        """The gradients of all inputs of one call are known."""
        ...


class ForwardCall:
    """One forward of a unit.

    Args:
        unit: the unit, held weakly.
        inputs: its arguments, nested at will.

    Attributes:
        num_inputs: tensors among the inputs that need a gradient.
        inner_calls: forwards of units inside, made during this one, whose backward is expected.
        is_closed: whether the unit has done with this call's backward.
    """

    def __init__(self, unit: Boundary, inputs: Any) -> None:
        self._unit = weakref.ref(unit)
        self.num_inputs = 0
        self.inner_calls: list[weakref.ref[ForwardCall]] = []
        self.is_closed = False
        self._num_pending = 0
        self._handles: list[Any] = []
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                self.num_inputs += 1
                self._watch_input(tensor)

    def _watch_input(self, tensor: Any) -> None:
        producer = getattr(tensor, "_fsdp_output_hook", None)
        if producer is not None:
            # The tensor is another unit's output: that unit's own hook tells us first and goes on after, so that our
            # weights are released before it gathers further ones.
            producer.consumers.append(weakref.ref(self))
            return
        handle = tensor.register_hook(_InputHook(weakref.ref(self)))
        if tensor.grad_fn is None:
            self._handles.append(handle)

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()

    def watch_outputs(self, outputs: Any) -> bool:
        """Announce the unit's backward at the first gradient of `outputs`; return whether any of them needs one."""
        is_needed = False
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and tensor.grad_fn is not None:
                is_needed = True
                hook = _OutputHook(self)
                any_tensor: Any = tensor
                any_tensor.register_hook(hook)
                any_tensor._fsdp_output_hook = hook
        return is_needed

    def output_ready(self) -> None:
        """Tell the unit that a gradient of an output is known."""
        unit = self._unit()
        if unit is not None:
            unit._fsdp_begin_backward(self)

    def arm(self) -> None:
        """Start counting the inputs' gradients of one backward."""
        self.is_closed = False
        self._num_pending = self.num_inputs

    def input_ready(self) -> None:
        """Count the gradient of one input; tell the unit of the last one."""
        if self._num_pending == 0:
            return
        self._num_pending -= 1
        unit = self._unit()
        if self._num_pending == 0 and unit is not None:
            unit._fsdp_inputs_done()

    @property
    def is_waiting(self) -> bool:
        """Whether an input still needs its gradient in this backward, or a unit inside has not done with its own."""
        inner = (reference() for reference in self.inner_calls)
        return self._num_pending > 0 or any(call is not None and not call.is_closed for call in inner)


class _InputHook:
    """Gradient hook of an input; weak, since an input may outlive the call."""

    def __init__(self, call: weakref.ref[ForwardCall]) -> None:
        self._call = call

    def __call__(self, grad: torch.Tensor) -> None:
        call = self._call()
        if call is not None:
            call.input_ready()


class _OutputHook:
    """Gradient hook of an output; keeps the call alive as long as the graph."""

    def __init__(self, call: ForwardCall) -> None:
        self._call = call
        self.consumers: list[weakref.ref[ForwardCall]] = []

    def __call__(self, grad: torch.Tensor) -> None:
        for reference in self.consumers:
            consumer = reference()
            if consumer is not None:
                consumer.input_ready()
        self._call.output_ready()


def has_unknown_container(value: Any) -> bool:
    """Return whether a value holds an object in which tensors may hide: no tensor, no plain value, no container."""
    if value is None or isinstance(value, (torch.Tensor, str, bytes, int, float, complex)):
        return False
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(has_unknown_container(item) for item in value)
    if isinstance(value, Mapping):
        return any(has_unknown_container(item) for item in value.values())
    return not is_dataclass(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name))
