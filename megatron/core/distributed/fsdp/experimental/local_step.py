# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`LocalStep`: lends plain local tensors to an optimizer's step and takes them back.

What an optimizer may be, and what its state dict looks like, is optimizer.py's.

[Note: local step]
A step over DTensors pays DTensor dispatch for every parameter. The rule of an element-wise optimizer does not need it,
so an adapted optimizer lends its own `step` the plain local tensors, and takes them back: outside the step,
param_groups hold the sharded parameters. `optimizer.state` is keyed by sharded parameter and holds local tensors, which
the step shares. Lists and state that have not changed since the last step are lent as they are; who replaced what is
seen by identity. Only gradients are handed over one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .dtensor import FsdpDTensor
from .parameter_group import FsdpParameterGroup
from .step_guard import require_finished

_grad_of = attrgetter("grad")


class LocalStep:
    """Lends plain local tensors to one optimizer's step and takes them back.

    Args:
        find_groups: returns the runtime's groups behind an optimizer's parameters, and refuses foreign parameters.
        precision_aware: hand gradients over as ``decoupled_grad``, in their own dtype.
        empty_first: tells of a param_group whether tensors without elements are lent before its others. Their order
            differs between ranks then.

    Attributes:
        precision_aware: as given.
    """

    def __init__(
        self,
        find_groups: Callable[[Any], list[FsdpParameterGroup]],
        precision_aware: bool,
        empty_first: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        self._find_groups = find_groups
        self.precision_aware = precision_aware
        self._empty_first = empty_first
        self._groups: list[FsdpParameterGroup] = []
        self._gathered: list[Any] = []
        self._owned: list[tuple[FsdpParameterGroup, list[int] | None]] = []
        self._sharded: list[list[Any]] = []
        self._local: list[list[Any]] = []
        self._lent: list[tuple[Any, Any, torch.dtype]] = []
        self._sharded_of: dict[int, Any] = {}
        self._state: _Snapshot | None = None
        self._local_state: Any = defaultdict(dict)

    def match(self, optimizer: Any) -> None:
        """Follow the optimizer's parameters, which are the same ones as a rule: their local tensors and their groups.

        Raises:
            ValueError: some are no sharded parameters.
        """
        sharded = [param_group["params"] for param_group in optimizer.param_groups]
        if len(sharded) == len(self._sharded) and all(map(_are_same, sharded, self._sharded)):
            return
        groups = self._find_groups(optimizer)
        known = {id(parameter): local for parameter, local, _ in self._lent}
        self._sharded = [list(params) for params in sharded]
        self._local, self._lent, self._state, self._sharded_of = [], [], None, {}
        indices: dict[int, set[int]] = {id(group): set() for group in groups}
        for param_group, params in zip(optimizer.param_groups, self._sharded, strict=True):
            lent = [known.get(id(parameter), parameter._local_tensor.detach()) for parameter in params]
            self._lent += [(parameter, local, local.dtype) for parameter, local in zip(params, lent, strict=True)]
            self._sharded_of |= {id(local): parameter for parameter, local in zip(params, lent, strict=True)}
            is_sorted = self._empty_first(param_group)
            self._local.append(sorted(lent, key=lambda local: local.numel() > 0) if is_sorted else lent)
            for parameter in params:
                indices[id(parameter._fsdp_group())].add(parameter.geometry.index)
        self._groups = groups
        self._gathered = [parameter for group in groups for parameter in group.unsharded_parameters]
        self._owned = [
            (group, None if len(mine := indices[id(group)]) == len(group.sharded_parameters) else sorted(mine))
            for group in groups
        ]

    def sharded_of(self, local: torch.Tensor) -> Any:
        """Return the sharded parameter whose local tensor is lent."""
        return self._sharded_of[id(local)]

    def follow_zero_grad(self, optimizer: Any) -> None:
        """Forget what waits for a reduction of the optimizer's own parameters; free gradients if all are gone."""
        self.match(optimizer)
        for group, indices in self._owned:
            if indices is None:
                group.drop_unreduced_gradients()
            elif group.has_unreduced_gradients:
                for index in indices:
                    group.clear_gradient(index)
            group.release_cleared_gradients()

    def ensure_names(self, optimizer: Any) -> None:
        """Have parameters named by their place in the root, also before the first forward."""
        self.match(optimizer)
        for group in self._groups:
            group.ensure_names()

    @contextmanager
    def lend(self, optimizer: Any) -> Iterator[Callable[[], dict[int, Any]]]:
        """Let the optimizer's param_groups and state speak of local tensors inside the block.

        Yields:
            A function that returns the logical and the local shape of every lent tensor and its gradient, by id.

        Raises:
            RuntimeError: gradients are not final, or of unknown origin.
            ValueError: a gradient is not cut like its parameter, or a parameter is no sharded one.
        """
        self.match(optimizer)
        require_finished(type(optimizer).__name__, self._groups)
        self._settle()
        param_groups, state = optimizer.param_groups, optimizer.state
        sharded = [param_group["params"] for param_group in param_groups]
        try:
            with torch._C.DisableTorchFunctionSubclass():
                self._hand_over_gradients()
            self._match_state(state)
            before = _Snapshot(self._local_state)
            for group in self._groups:
                group.begin_step()
            optimizer.state = self._local_state
            for param_group, params in zip(param_groups, self._local, strict=True):
                param_group["params"] = params
            try:
                yield self._shapes
            finally:
                for param_group, params in zip(param_groups, sharded, strict=True):
                    param_group["params"] = params
                optimizer.state = state
                if not before.is_of(self._local_state):
                    self._take_back_state(state)
                for group in self._groups:
                    group.mark_main_weight_written()
        finally:
            self._take_back_gradients()

    def _settle(self) -> None:
        """Refuse gradients of unknown origin, and wait for gathers that still read what the step will write."""
        contexts: dict[int, Any] = {}
        for group in self._groups:
            context = None if group.context is None else group.context()
            if context is not None:
                contexts[id(context)] = context
        if any(map(is_not, map(_grad_of, self._gathered), repeat(None))):
            for group in self._groups:
                context = None if group.context is None else group.context()
                if context is not None and group.has_strays:
                    context.refuse_strays()
        for context in contexts.values():
            context.await_gathers()

    def _hand_over_gradients(self) -> None:
        for parameter, local, dtype in self._lent:
            gradient = parameter.grad
            if gradient is None:
                if self.precision_aware:
                    local.decoupled_grad = None
                continue
            # The exact class first: it is ours as a rule, and this runs for every parameter in every step.
            if type(gradient) is not FsdpDTensor and not isinstance(gradient, DTensor):
                raise ValueError(
                    f"gradient of {parameter.geometry.fqn}: expected a DTensor cut like its parameter, got "
                    f"{type(gradient).__name__} of shape {tuple(gradient.shape)}. Change gradients in place, or assign "
                    "what an operation on them returns."
                )
            piece = gradient._local_tensor
            if self.precision_aware:
                local.decoupled_grad = piece
            else:
                local.grad = piece if piece.dtype is dtype else piece.to(dtype)

    def _take_back_gradients(self) -> None:
        for _, local, _ in self._lent:
            local.grad = None
            if self.precision_aware:
                local.decoupled_grad = None

    def _match_state(self, state: Any) -> None:
        """Bring the state by local tensor in line with that by sharded parameter; they share its values."""
        if self._state is not None and self._state.is_of(state):
            return
        self._local_state.clear()
        for parameter, local, _ in self._lent:
            known = state.get(parameter)
            if known is not None:
                self._local_state[local] = known
        self._state = _Snapshot(state)

    def _take_back_state(self, state: Any) -> None:
        for parameter, local, _ in self._lent:
            if local in self._local_state:
                state[parameter] = self._local_state[local]
        self._state = _Snapshot(state)

    def _shapes(self) -> dict[int, tuple[torch.Size, torch.Size]]:
        shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        for parameter, local, _ in self._lent:
            for tensor in (local, local.grad):
                if tensor is not None:
                    shapes[id(tensor)] = (parameter.geometry.shape, local.shape)
        return shapes


class _Snapshot:
    """The keys and values of a dict at one time, compared by identity, since comparing tensors would compute."""

    def __init__(self, mapping: dict[Any, Any]) -> None:
        self._keys, self._values = list(mapping), list(mapping.values())

    def is_of(self, mapping: dict[Any, Any]) -> bool:
        """Return whether the dict still has these very keys and values, in this order."""
        return (
            len(mapping) == len(self._keys)
            and all(map(is_, mapping, self._keys))
            and all(map(is_, mapping.values(), self._values))
        )


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
