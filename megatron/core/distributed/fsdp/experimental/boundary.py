# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The tensors at a unit's border: which gradient begins a unit's backward, and which gradients end it.

It knows autograd and nothing of sharding: a unit is whatever has the two callbacks of `Boundary`.

[Note: when a unit's backward ends]
That all parameters have their gradients does not mean that their values are no longer needed: in ``w(x) + b(a(x))``
with a frozen w, the gradients of a and b are there before w is read for the gradient of x. A unit has done when the
gradients of the inputs that need one are known and the units inside have done: autograd runs what was recorded last
first, so that it comes to the producer of an input only after all operations of the unit that can run. Parameters that
were not used have no gradient then and get none. A unit none of whose inputs needs a gradient has no such sign: its
backward ends with the whole one. Its parameters cannot give the sign, since ranks may use different ones, and would
then reduce in different orders.

[Note: what a call may hold]
A hook on an output's node holds the call, so that it lives as long as the graph. The call must therefore not hold that
node, or any later one: such a cycle runs through C++, where no garbage collector finds it. It holds the nodes of its
inputs, which come before, and asks those whether the running backward comes to it at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from .compiling import untraced


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
        version: what the unit's weights were when it ran.

    Attributes:
        version: as given.
        is_opaque: whether the inputs hold an object in which further ones may hide.
        inner_calls: forwards of units inside, made during this one, whose backward is expected.
        has_left_outputs: whether an output that somebody may use was returned before the end of this call.
        is_closed: whether the unit has done with this call's backward.
        closed_in: the backward in which it has; -1 for none.
    """

    def __init__(self, unit: Boundary, version: tuple[int, int]) -> None:
        self._unit = weakref.ref(unit)
        self.version = version
        self.is_opaque = self.has_left_outputs = False
        self.inner_calls: list[weakref.ref[ForwardCall]] = []
        self._outer: weakref.ref[ForwardCall] | None = None
        self.is_closed = False
        self.closed_in = -1
        self._first_node: int = torch._C._autograd._get_sequence_nr()
        self._inputs: list[Any] = []
        self._passing: list[torch.Tensor] = []
        self._writable: list[tuple[Any, list[torch.Tensor]]] = []
        self._lent: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        self._pending: set[int] = set()
        self._tells = False

    @property
    def num_inputs(self) -> int:
        """Tensors among the inputs that need a gradient."""
        return len(self._inputs)

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's last operation was recorded since this call began."""
        return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._first_node

    def watch_inputs(self, value: Any) -> Any:
        """Return arguments with every tensor that needs a gradient watched, which may mean a view in its place.

        A hook on an input itself would wait for the gradients of everything that uses it; a view's gradient is this
        call's own, and known before the unit that made the input begins: our weights are released before it gathers.

        Args:
            value: the positional arguments, a tuple, or the keyword arguments, a dict.
        """
        if type(value) is dict:
            items = [self._watch(item) for item in value.values()]
            return dict(zip(value, items, strict=True)) if _differ(items, value.values()) else value
        return self._watch(value)

    def _watch(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._watch_input(value) if value.requires_grad else value
        if type(value) is tuple:
            items = [self._watch(item) for item in value]
            return tuple(items) if _differ(items, value) else value
        if type(value) in (list, dict):
            # What the unit may write to stays the object that its caller has; views are in it only while forward runs.
            for key, item in _entries(value):
                watched = self._watch(item)
                if watched is not item:
                    value[key] = watched
                    self._lent.append((value, watched, item))
            self._writable.append((value, list(tensors_in(value))))
            return value
        inside = list(tensors_in(value))
        for tensor in inside:
            if tensor.requires_grad:
                self._passing.append(tensor)
                self._hook(tensor)
        if inside or isinstance(value, (list, Mapping)):
            self._writable.append((value, inside))
        self.is_opaque = self.is_opaque or has_unknown_container(value)
        return value

    def added_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that forward has put into lists, mappings and dataclasses that were passed to it."""
        for value, before in self._writable:
            known = {id(tensor) for tensor in before}
            yield from (tensor for tensor in tensors_in(value) if id(tensor) not in known)

    def _watch_input(self, tensor: Any) -> torch.Tensor:
        view: torch.Tensor = tensor.view_as(tensor)
        self._passing.append(view)
        self._hook(view)
        return view

    def _hook(self, tensor: Any) -> None:
        tensor.register_hook(_InputHook(weakref.ref(self), self._number(tensor)))

    def _number(self, tensor: torch.Tensor) -> int:
        self._inputs.append(tensor.grad_fn)
        return len(self._inputs) - 1

    def watch_outputs(self, outputs: Any, is_final: bool = True) -> bool:
        """Announce the unit's backward at the first gradient of `outputs`; return whether any of them needs one.

        Args:
            outputs: tensors, or containers of tensors.
            is_final: False for tensors that the unit may go on to use.
        """
        is_needed = False
        passing = {id(tensor) for tensor in self._passing}
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and self.has_made(tensor) and id(tensor) not in passing:
                is_needed = True
                hook = _OutputHook(self)
                inner = getattr(tensor, "_fsdp_output_hook", None)
                if inner is not None:
                    inner.outer = hook
                self._hook_producer(tensor, hook)
                if is_final:
                    any_tensor: Any = tensor
                    any_tensor._fsdp_output_hook = hook
        return is_needed

    def pass_on(self, output: Any) -> Any:
        """Return `output` with inputs that are handed on replaced by views, so that a gradient of theirs begins ours.

        Without that a rank on which the unit does nothing else would not take part in its reduction.
        """
        passing = {id(tensor) for tensor in self._passing}

        def replace(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.view_as(value) if id(value) in passing else value
            if isinstance(value, tuple):
                items = [replace(item) for item in value]
                make = getattr(type(value), "_make", type(value))
                return make(items) if _differ(items, value) else value
            for key, item in _entries(value):
                replaced = replace(item)
                if replaced is not item:
                    _put(value, key, replaced)
            return value

        return replace(output) if passing else output

    def _hook_producer(self, tensor: Any, hook: _OutputHook) -> None:
        """Call `hook` with the gradient of `tensor` as it is now, whatever is written into it later.

        A view that is written in place gets another history, and hooks on it are lost; what produced its base stays. An
        input's base was produced before the unit, which is too late in backward.
        """
        tensor.register_hook(hook)
        base = tensor._base if tensor._is_view() else None
        bases = {id(item._base) if item._is_view() else id(item) for item in self._passing}
        if base is not None and base.grad_fn is not None and id(base) not in bases:
            base.grad_fn.register_prehook(hook)

    def contain(self, inner: ForwardCall) -> None:
        """Note a call that was made during this one and whose backward is expected."""
        self.inner_calls.append(weakref.ref(inner))
        inner._outer = weakref.ref(self)

    def close_forward(self) -> None:
        """Let go of what is only needed while forward runs, and give lists and dicts their own tensors back."""
        for container, watched, original in self._lent:
            for key, item in _entries(container):
                if item is watched:
                    container[key] = original
        for held in (self._passing, self._writable, self._lent):
            held.clear()

    def output_ready(self) -> None:
        """Tell the unit that a gradient of an output is known; the unit around it first.

        Where that one returns our output as it is, on some ranks perhaps, nothing else would put it first.
        """
        outer = None if self._outer is None else self._outer()
        if outer is not None:
            outer.output_ready()
        unit = self._unit()
        if unit is None:
            raise RuntimeError(
                "backward of a unit: expected its model to be alive, got one that was deleted with its weights. Keep "
                "the model until backward has run."
            )
        unit._fsdp_begin_backward(self)

    def arm(self) -> None:
        """Expect the inputs and the inner calls that the running backward reaches; ranks may differ in which."""
        self.is_closed = False
        self._pending = {number for number, node in enumerate(self._inputs) if _is_reached(node)}
        self._tells = bool(self._pending) and not self.is_opaque
        for inner in self._inner():
            inner.is_closed = bool(inner._inputs) and not any(_is_reached(node) for node in inner._inputs)

    def input_ready(self, number: int) -> None:
        """Note the gradient of one input; tell the unit of the last one."""
        if number not in self._pending:
            return
        self._pending.discard(number)
        unit = self._unit()
        if not self._pending and unit is not None:
            unit._fsdp_inputs_done()

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of inputs are known, and so all of this call's operations have run in this backward."""
        return self._tells and not self._pending and all(inner.is_closed for inner in self._inner())

    def _inner(self) -> Iterator[ForwardCall]:
        for reference in self.inner_calls:
            call = reference()
            if call is not None:
                yield call


class _InputHook:
    """Gradient hook of an input; weak, since an input may outlive the call."""

    def __init__(self, call: weakref.ref[ForwardCall], number: int) -> None:
        self._call = call
        self._number = number

    @untraced
    def __call__(self, grad: Any) -> None:
        call = self._call()
        if call is not None:
            call.input_ready(self._number)


class _OutputHook:
    """Gradient hook of an output; keeps the call alive as long as the graph."""

    def __init__(self, call: ForwardCall) -> None:
        self._call = call
        self.outer: _OutputHook | None = None

    @untraced
    def __call__(self, gradients: Any) -> None:
        if self.outer is not None:
            # A unit around ours returned our output as it is: that unit comes first, as elsewhere.
            self.outer(gradients)
        self._call.output_ready()

    def __reduce__(self) -> Any:
        """Pickle as None: a saved output belongs to no graph."""
        return type(None), ()


def _is_reached(node: Any) -> bool:
    """Return whether the running backward comes to a node; a leaf, which has none, counts as reached."""
    return node is None or bool(torch._C._will_engine_execute_node(node))


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Return (key, item) of a list, a mapping that can be written, or a dataclass; nothing of anything else."""
    if isinstance(value, list):
        return list(enumerate(value))
    if isinstance(value, MutableMapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(item.name, getattr(value, item.name)) for item in fields(value)]
    return []


def _put(value: Any, key: Any, item: Any) -> None:
    if isinstance(value, (list, MutableMapping)):
        value[key] = item
    else:
        object.__setattr__(value, key, item)


def _differ(items: Iterable[Any], originals: Iterable[Any]) -> bool:
    return any(item is not original for item, original in zip(items, originals, strict=True))


def has_unknown_container(value: Any) -> bool:
    """Return whether a value holds an object in which tensors may hide: no tensor, no plain value, no container."""
    if value is None or isinstance(value, _PLAIN) or type(value).__module__ == "numpy":
        return False
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(has_unknown_container(item) for item in value)
    if isinstance(value, Mapping):
        return any(has_unknown_container(item) for item in value.values())
    return not is_dataclass(value)


_PLAIN = (torch.Tensor, torch.dtype, torch.device, torch.Size, str, bytes, int, float, complex, Enum, slice, type)


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
