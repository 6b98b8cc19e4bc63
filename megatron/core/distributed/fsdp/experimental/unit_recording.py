# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`UnitRecording`: the forward and backward of one unit as they run while a graph captures them.

It neither captures nor replays: unit_graph.py does.

[Note: what a unit's graph reads and writes]
    weights     at their fixed addresses, through parameters of the recording's own, so that hooks and accumulation
                nodes of the unit's full parameters belong to eager calls alone
    inputs      static copies; or the output of another unit's graph, read where that graph leaves it
    activations stay in the graphs' memory pool from the capture on, held by `_kept` and by the history
    gradients   of weights and inputs, and of outputs on their way in, lie in memory that all graphs share in turn
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .allocator import num_storage_uses
from .graph_values import UnknownValueError, apart, flatten, rebuild
from .hooks import kept_tensors
from .parameter_group import FsdpParameterGroup

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class SharedMemory:
    """Memory that all graphs of a context use in turn; what they leave there is taken away before the next one runs.

    Args:
        device: where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[Any, torch.Tensor] = {}
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._lent: list[tuple[nn.Parameter, torch.Tensor]] = []

    def like(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor like another one that has this role in every graph."""
        key = (role, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._tensors:
            self._tensors[key] = torch.empty_like(tensor.detach())
        return self._tensors[key]

    def gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return places for the gradients of one unit's parameters, like them, beside each other."""
        sizes: dict[torch.dtype, int] = {}
        starts = []
        for parameter in parameters:
            starts.append(sizes.get(parameter.dtype, 0))
            # Kernels are faster at aligned addresses.
            sizes[parameter.dtype] = starts[-1] + -(-parameter.numel() // 64) * 64
        for dtype, numel in sizes.items():
            if dtype not in self._flat or self._flat[dtype].numel() < numel:
                self._flat[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
        return [
            self._flat[parameter.dtype][start : start + parameter.numel()].view(parameter.shape)
            for parameter, start in zip(parameters, starts, strict=True)
        ]

    @torch.no_grad()
    def lend(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Let a parameter's gradient be, or grow by, what a graph has left in its place."""
        if parameter.grad is None:
            parameter.grad = gradient
            self._lent.append((parameter, gradient))
        else:
            parameter.grad.add_(gradient)

    def take_back(self) -> None:
        """Move gradients that no reduction has packed yet to memory of their own."""
        for parameter, gradient in self._lent:
            if parameter.grad is gradient:
                parameter.grad = gradient.clone()
        self._lent.clear()


class _StandIns:
    """Parameters over one group's full weights that stand for its own while a graph is captured."""

    def __init__(self, group: FsdpParameterGroup, places: Sequence[torch.Tensor], written: set[int]) -> None:
        self.group = group
        full = group.full_weight
        self._local = full.local
        before = num_storage_uses(full.local)
        flat = apart(full.local)
        # A graph at rest must not look like one whose backward will come: the pool may move the weights.
        self._num_views = num_storage_uses(full.local) - before
        full.num_plan_views += self._num_views
        self.parameters = [
            _stand_in(parameter, flat.as_strided(piece.shape, piece.stride(), piece.storage_offset()))
            for parameter, piece in zip(group.unsharded_parameters, full.pieces, strict=True)
        ]
        for parameter, place in zip(self.parameters, places, strict=True):
            if parameter.requires_grad:
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(_IntoPlace(place, written))

    def close(self) -> None:
        """Forget the views of the weights."""
        if self.group.full_weight.local is self._local:
            self.group.full_weight.num_plan_views -= self._num_views


def _stand_in(parameter: nn.Parameter, values: torch.Tensor) -> Any:
    made: Any = nn.Parameter(values, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    made.get_main_grad = _no_main_grad
    return made


def _no_main_grad() -> torch.Tensor:
    raise NotImplementedError(
        "get_main_grad: expected gradients from autograd in a unit with cuda_graph=True, got a kernel that writes them "
        "itself. Turn gradient_accumulation_fusion off."
    )


class _IntoPlace:
    """Moves a gradient to its place as soon as it is there, so that the graph holds one at a time."""

    def __init__(self, place: torch.Tensor, written: set[int]) -> None:
        self._place = place
        self._written = written

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "it has just been accumulated"
        self._place.copy_(parameter.grad)
        parameter.grad = None
        self._written.add(id(self._place))


class UnitRecording:
    """One unit's forward and backward on static tensors.

    Args:
        unit: an `FsdpModule` in forward, with full parameters.
        run: calls the unit's forward without a graph.
        args: of the forward.
        kwargs: of the forward.
        inputs: the tensors in the arguments: static ones, in the order of `flatten`.
        memory: what all graphs share.

    Attributes:
        inputs: as given.
        trainable: the unit's full parameters that need a gradient.
        result: what the forward returned, for its containers.
        outputs: the tensors in it, with their history.
        input_gradients: where the backward leaves them; None for an input that needs or gets none.
    """

    def __init__(
        self,
        unit: Any,
        run: Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        memory: SharedMemory,
    ) -> None:
        self._unit: Callable[[], Any] = weakref.ref(unit)
        self._run = run
        self.inputs = inputs
        self._args, self._kwargs = rebuild((args, kwargs), iter(inputs))
        self._written: set[int] = set()
        self._parameters = [each for group in unit.parameter_groups for each in group.unsharded_parameters]
        self.trainable = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._places = memory.gradients(self._parameters)
        places = iter(self._places)
        self._stand_ins = [
            _StandIns(group, [next(places) for _ in group.unsharded_parameters], self._written)
            for group in unit.parameter_groups
        ]
        self._memory = memory
        self._kept: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._buffers: list[torch.Tensor] = []
        self.result: Any = None
        self.outputs: list[torch.Tensor] = []
        self._input_places = [
            memory.like(f"input {index}", tensor) if tensor.requires_grad else None
            for index, tensor in enumerate(inputs)
        ]
        self.input_gradients: list[torch.Tensor | None] = [None] * len(inputs)

    def close(self) -> None:
        """Forget the views of the weights, so that they look as without a graph."""
        for stand_ins in self._stand_ins:
            stand_ins.close()

    def forward(self) -> list[torch.Tensor]:
        """Run the forward; return its outputs without history. Captured."""
        unit = self._unit()
        kept = self._kept = []
        self._versions = [tensor._version for tensor in self.inputs]
        self._buffers = list(unit.buffers())

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # A backward that is captured once frees what it has read; replays read it again.
            kept.append(tensor.detach())
            return kept[-1]

        call, unit._fsdp_open_call = unit._fsdp_open_call, None
        try:
            with saved_tensors_hooks(keep, _same), self._standing_in():
                self.result = self._run(unit, self._args, self._kwargs)
        finally:
            unit._fsdp_open_call = call
        outputs: list[torch.Tensor] = []
        try:
            flatten(self.result, outputs)
        except UnknownValueError as error:
            raise TypeError(
                f"output of unit {unit.name}: expected tensors in tuples, lists and dicts, got {error}"
            ) from error
        foreign = {_address(tensor) for tensor in (*self.inputs, *self._weights(), *unit.buffers())}
        # What a caller gets must be memory that nobody but this graph writes.
        self.outputs = [output.clone() if _address(output) in foreign else output for output in outputs]
        return [output.detach() for output in self.outputs]

    def problem(self) -> str | None:
        """Return what the forward has done that a replay could not do, if so; asked right after it ran."""
        unit = self._unit()
        if any(True for _ in kept_tensors(unit, unit._fsdp_open_call)):
            return "tensors that need gradients in attributes of its modules, besides its outputs"
        found: list[torch.Tensor] = []
        flatten((self._args, self._kwargs), found)
        if len(found) != len(self.inputs) or any(a is not b for a, b in zip(found, self.inputs, strict=True)):
            return "lists or dicts in its arguments that it has changed"
        if [tensor._version for tensor in self.inputs] != self._versions:
            return "an input that it writes in place"
        if any(a is not b for a, b in zip(unit.buffers(), self._buffers, strict=True)):
            return "buffers that it replaces instead of writing them"
        return None

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the backward of the last forward. Captured.

        Args:
            gradients: static ones, for each output; None for one that has none.
        """
        pairs = [pair for pair in zip(self.outputs, gradients, strict=True) if pair[1] is not None]
        with self._standing_in():
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
        for index, tensor in enumerate(self.inputs):
            if tensor.grad is not None:
                place = self.input_gradients[index] = self._input_places[index]
                assert place is not None, "it needs a gradient"
                place.copy_(tensor.grad)
                tensor.grad = None

    def views_of_weights(self) -> list[torch.Tensor]:
        """Return new views of gathered weights, which look to a pool as what autograd saves of them."""
        groups = (stand_ins.group for stand_ins in self._stand_ins)
        return [group.full_weight.local.detach() for group in groups if group.gathers]

    def lend_gradients(self) -> None:
        """Let the unit's full parameters have the gradients that a backward has left."""
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if id(place) in self._written:
                self._memory.lend(parameter, place)

    def _weights(self) -> Iterator[torch.Tensor]:
        return (parameter for stand_ins in self._stand_ins for parameter in stand_ins.parameters)

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        for stand_ins in self._stand_ins:
            stand_ins.group.attach(stand_ins.parameters)
        try:
            yield
        finally:
            for stand_ins in self._stand_ins:
                stand_ins.group.attach(stand_ins.group.unsharded_parameters)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
