# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FsdpDTensor`: a DTensor whose local part is the run of elements that a group layout gives this rank.

It owns no storage and issues no collective but the gather that a caller asks for by name.

[Note: why a subclass]
torch's DTensor knows one way to cut dim 0: equal chunks. With any other cut, element-wise operations, norms and
optimizers are right, because they only look at the local part, but whatever gathers or moves rows (`full_tensor`,
`redistribute`, matmul, softmax over dim 0) is silently wrong. The subclass answers the first kind, hands its own cut on
to the results, and raises for the second, so that no tensor derived from a sharded parameter can be quietly wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed._state_dict_utils import _distribute_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from .chunks import chunk_list, elements_at, write_items
from .geometry import ShardGeometry
from .layout import GroupLayout, TensorSlot
from .model_cut import ModelCut
from .operations import (
    ELEMENTWISE,
    attribute_name,
    base_name,
    gives_no_tensor,
    is_attribute_of_elements,
    is_reduction,
    writes_first_operand,
)
from .scalars import pend
from .shard_mesh import ShardMesh

_ONE_DTYPE = frozenset({"fused_adam", "fused_adamw", "lerp"})
"""Operations for which torch does not promote operands of different dtypes."""


class FsdpDTensor(DTensor):
    """A DTensor cut by a `ShardGeometry`. Made by `shard_dtensor`, never constructed."""

    _geometry: ShardGeometry

    @property
    def geometry(self) -> ShardGeometry:
        """Which elements each rank owns."""
        return self._geometry

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the unit was given; torch may remember an earlier one of the same ranks, whose groups ended."""
        return self._geometry.mesh.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each mesh axis; ``Shard(0)`` stands for our cut, which torch cannot say.

        Raises:
            NotImplementedError: asked by ``set_model_state_dict`` with ``broadcast_from_rank0``, which would write the
                rows that torch's own cut gives this rank.
        """
        if sys._getframe(1).f_code is _distribute_tensors.__code__:
            raise NotImplementedError(
                f"set_model_state_dict of {self._geometry.fqn}: expected broadcast_from_rank0=False, got True, with "
                "which torch would write rows of its own cut. Give the full state dict to every rank, or use "
                "load_checkpoint."
            )
        return self._spec.placements

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's elements: [rows, *shape[1:]] or 1-D, shared with the flat buffer.

        Any rank may call it alone. A write through it reaches the next forward if it happens before that, on all ranks
        alike, by an operation that torch counts; ask anew for each later write. After any other (``.data``, a
        collective, numpy) say so on all ranks: ``parameter.add_(0)`` without gradient.
        """
        self._geometry.notify_lent(self._local_tensor)
        local = super().to_local(grad_placements=grad_placements)
        # A tensor of its own, so that memory of a cleared gradient is not freed under whoever holds it.
        return local.detach() if local is self._local_tensor else local

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Gather the full tensor; every rank of the mesh must call it.

        Returns:
            The logical shape, this dtype, without autograd history.

        Raises:
            NotImplementedError: `grad_placements` is given; gradients do not flow through a sharded parameter.
        """
        if grad_placements is not None:
            raise NotImplementedError(
                f"full_tensor of {self._geometry.fqn}: expected grad_placements=None, got {grad_placements}. "
                "Gradients reach sharded parameters through their unit's backward only."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is not None and torch.is_grad_enabled():
                raise _no_gradient("full_tensor", self)
        self._geometry.notify_use(writes=False)
        return self._geometry.gather(self._local_tensor)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        """Return this tensor as it is, or replicated; every rank of the mesh must call it.

        Raises:
            NotImplementedError: any other placement, another mesh or further options.
        """
        target = None if placements is None else tuple(placements)
        if device_mesh not in (None, self.device_mesh) or kwargs or target is None:
            target = None
        elif target == self.placements:
            return self
        elif all(isinstance(placement, Replicate) for placement in target):
            return DTensor.from_local(self.full_tensor(), self.device_mesh, target, run_check=False)
        raise NotImplementedError(
            f"redistribute of {self._geometry.fqn}: expected its own placements or Replicate() on its own mesh, got "
            f"{placements}. Use full_tensor() and distribute the result."
        )

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        """Tell torch.distributed.checkpoint what this rank writes of the tensor."""
        self._geometry.notify_use(writes=False)
        return write_items(fqn, self._local_tensor, self._geometry)

    def __create_chunk_list__(self) -> Any:
        """Tell torch.distributed.checkpoint what this rank holds of the tensor, and is about to read into it.

        A parameter counts as written from here on, on every rank alike: which of them get elements is no matter.
        """
        self._geometry.notify_use(writes=True)
        return chunk_list(self._geometry)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Give torch.distributed.checkpoint the elements of one of these boxes, to read or to write."""
        return elements_at(self._local_tensor, self._geometry, index)

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpDTensor:
        """Copy a derived tensor; refuse to copy a parameter, whose buffers belong to its unit.

        Raises:
            RuntimeError: this is a sharded parameter.
        """
        if hasattr(self, "_fsdp_group"):
            raise RuntimeError(
                f"deepcopy of the sharded parameter {self._geometry.fqn}: expected a model that is not sharded yet; a "
                "copy would not be connected to its unit. Copy the model before fully_shard."
            )
        copy: Any = self.detach().clone()
        memo[id(self)] = copy
        result: FsdpDTensor = copy
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this rank's elements and the cut, without the rest of the flat buffer or the way back to the unit."""
        return shard_dtensor, (self._local_tensor.detach().clone(), self._geometry)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation that respects the cut and mark its results; refuse any other before it communicates."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__set__":
            _check_assignment(func, args)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if args[1] is None and attribute_name(func) == "grad":
                args[0]._geometry.notify_cleared()
            return result
        operation = base_name(name)
        if operation == "requires_grad":
            _freeze(args[0], args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
        elif name != "__get__" and (writes_first_operand(name) or not gives_no_tensor(operation)):
            _notify(args, kwargs, writes_first_operand(name))
        with torch._C.DisableTorchFunctionSubclass():
            if not is_attribute_of_elements(func):
                _check_operation(operation, args, kwargs)
            result = func(*args, **kwargs)
            if result is None and name == "__get__" and attribute_name(func) == "grad":
                return args[0]._geometry.waiting_gradient()
            if isinstance(result, (DTensor, tuple, list)) and not isinstance(result, FsdpDTensor):
                _adopt(result, list(_sharded_inputs(args, kwargs)), operation)
        return result


def shard_dtensor(local: torch.Tensor, geometry: ShardGeometry) -> FsdpDTensor:
    """Return a DTensor of the logical shape around this rank's elements.

    Args:
        local: the elements that the geometry gives this rank: [rows, *shape[1:]] or 1-D; shared, not copied.
        geometry: which elements each rank owns.
    """
    shape = geometry.shape
    stride = torch.empty(shape, device="meta").stride()
    mesh = geometry.mesh
    dtensor: Any = DTensor.from_local(
        local, mesh.device_mesh, geometry.placements, run_check=False, shape=shape, stride=stride
    )
    return _mark(dtensor, geometry)


def rows_of(tensor: FsdpDTensor, start: int, stop: int) -> FsdpDTensor:
    """Return rows ``[start, stop)`` of a sharded tensor, sharing memory with it; the local part is 1-D."""
    geometry, part = tensor.geometry, tensor.geometry.rows(start, stop)
    begin = part.layout.slots[0].offset - geometry.layout.slots[geometry.index].offset
    first = begin + part.owned.start - geometry.owned.start if part.owned.numel else 0
    return shard_dtensor(tensor._local_tensor.detach().view(-1)[first : first + part.owned.numel], part)


def gather_full(tensor: DTensor, like: FsdpDTensor) -> torch.Tensor:
    """Gather a DTensor that is cut like a sharded parameter, e.g. an optimizer state; every rank must call it.

    Args:
        tensor: same logical shape and local part as `like`; a plain DTensor where torch has lost the cut.
        like: the sharded parameter.

    Raises:
        ValueError: the shapes differ.
    """
    geometry = like.geometry
    local = tensor.to_local()
    if tensor.shape != like.shape or local.numel() != like._local_tensor.numel():
        raise ValueError(
            f"gather_full: expected a tensor cut like {geometry.fqn} {tuple(like.shape)}, got shape "
            f"{tuple(tensor.shape)}. Pass the parameter that the tensor belongs to."
        )
    return geometry.gather(local)


def _mark(dtensor: Any, geometry: ShardGeometry) -> FsdpDTensor:
    dtensor.__class__ = FsdpDTensor
    dtensor._geometry = geometry
    marked: FsdpDTensor = dtensor
    return marked


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _sharded_inputs(args: Any, kwargs: dict[str, Any]) -> Iterator[FsdpDTensor]:
    for tensor in _tensors((args, tuple(kwargs.values()))):
        if isinstance(tensor, FsdpDTensor):
            yield tensor


def _notify(args: Any, kwargs: dict[str, Any], writes_first: bool) -> None:
    for tensor in _sharded_inputs(args, kwargs):
        tensor._geometry.notify_use(writes=False)
    written = (args[:1] or tuple(kwargs.values())[:1]) if writes_first else ()
    for tensor in _sharded_inputs((written, kwargs.get("out")), {}):
        tensor._geometry.notify_use(writes=True)


def _check_assignment(func: Any, args: tuple[Any, ...]) -> None:
    if attribute_name(func) == "requires_grad":
        _freeze(args[0], args[1])
    if attribute_name(func) == "grad" and args[1] is not None and not isinstance(args[1], DTensor):
        raise ValueError(
            f"gradient of {args[0]._geometry.fqn}: expected a DTensor cut like its parameter, got "
            f"{type(args[1]).__name__} of shape {tuple(args[1].shape)}. Change gradients in place, or assign what an "
            "operation on them returns."
        )


def _freeze(tensor: Any, requires_grad: Any) -> None:
    """Let the group follow a parameter that is frozen or unfrozen."""
    with torch._C.DisableTorchFunctionSubclass():
        if hasattr(tensor, "_fsdp_group") and tensor.requires_grad != bool(requires_grad):
            tensor._geometry.notify_requires_grad(bool(requires_grad))


def _check_operation(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse, on every rank alike, an operation that looks beyond the local part or mixes different cuts."""
    lists = [arg for arg in args if isinstance(arg, (tuple, list)) and arg]
    for values in lists:
        _check_mixture(operation, values)
    if operation in ELEMENTWISE:
        for operands in zip(*lists, strict=False) if lists else [(*args, *kwargs.values())]:
            _check_cuts(operation, operands)
    elif is_reduction(operation, args, kwargs):
        if torch.is_grad_enabled():
            for source in _sharded_inputs(args, kwargs):
                if source.requires_grad:
                    raise _no_gradient(operation, source)
    elif not gives_no_tensor(operation):
        raise _refusal(operation, next(_sharded_inputs(args, kwargs)))


def _no_gradient(operation: str, source: FsdpDTensor) -> RuntimeError:
    return RuntimeError(
        f"{operation} of the sharded parameter {source._geometry.fqn}: expected detach() or no_grad(), got an "
        "operation whose gradient torch would spread over other rows. Compute a parameter's loss terms in its unit's "
        "forward."
    )


def _refusal(operation: str, source: FsdpDTensor) -> RuntimeError:
    if operation in ("register_hook", "register_post_accumulate_grad_hook"):
        return RuntimeError(
            f"{operation} of the sharded parameter {source._geometry.fqn}: expected none, since autograd works on the "
            "gathered parameter and would never run it. FsdpModule.register_post_backward_hook tells when a unit's "
            "backward ends."
        )
    if operation.startswith("fused_"):
        return RuntimeError(
            f"{operation} of the sharded parameter {source._geometry.fqn}: expected an operation that torch knows for "
            "DTensors, got a fused optimizer step. Adapt the optimizer with fully_shard_optimizer."
        )
    return RuntimeError(
        f"{operation} of the sharded parameter {source._geometry.fqn}: expected an element-wise operation or a "
        "reduction to a scalar, since this rank holds a run of elements that torch cannot describe. Call full_tensor() "
        "first, or use the parameter inside its unit's forward."
    )


def _check_mixture(operation: str, values: Sequence[Any]) -> None:
    """Refuse a list that mixes sharded and plain tensors, which torch cannot run as one."""
    sharded = next((value for value in values if isinstance(value, FsdpDTensor)), None)
    others = [value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, FsdpDTensor)]
    if sharded is not None and others:
        raise RuntimeError(
            f"{operation} of the sharded parameter {sharded._geometry.fqn}: expected a list of sharded parameters, got "
            f"one with a plain tensor of shape {tuple(others[0].shape)}, too. Give the plain one an optimizer of its "
            "own, or pass foreach=False."
        )


def _check_cuts(operation: str, operands: Sequence[Any]) -> None:
    """Refuse to combine a sharded tensor with one that is not cut as it is, unless that is a single number."""
    tensors = [tensor for tensor in operands if isinstance(tensor, torch.Tensor)]
    source = next((tensor for tensor in tensors if isinstance(tensor, FsdpDTensor)), None)
    for operand in tensors:
        if source is not None and operation in _ONE_DTYPE and operand.dtype != source.dtype and operand.ndim:
            raise RuntimeError(
                f"{operation} of the sharded parameter {source._geometry.fqn}: expected operands of its dtype "
                f"{source.dtype}, got {operand.dtype}, as gradients may have. Adapt the optimizer with "
                "fully_shard_optimizer, which casts them."
            )
        if source is None or operand is source or (operand.numel() == 1 and not isinstance(operand, FsdpDTensor)):
            continue
        is_alike = isinstance(operand, FsdpDTensor) and operand._geometry.cut == source._geometry.cut
        if not is_alike or operand.shape != source.shape:
            raise RuntimeError(
                f"{operation} of the sharded parameter {source._geometry.fqn}: expected operands of its shape, cut as "
                f"it is, got {type(operand).__name__} of shape {tuple(operand.shape)}. Call full_tensor() first, or "
                "use the parameter inside its unit's forward."
            )


def _is_cut(tensor: DTensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)


def _adopt(result: Any, inputs: Sequence[FsdpDTensor], operation: str) -> None:
    """Mark the DTensors of a result with the cut of the inputs they come from, or refuse the operation."""
    outputs = [tensor for tensor in _tensors(result) if isinstance(tensor, DTensor)]
    for position, output in enumerate(outputs):
        if isinstance(output, FsdpDTensor):
            continue
        source = inputs[position] if len(outputs) > 1 and position < len(inputs) else inputs[0]
        keeps = operation in ELEMENTWISE or operation == "get"
        if keeps and _cut_alike(output, source):
            _mark(output, source._geometry)
        elif keeps or output.ndim > 0 or _is_cut(output):
            raise _refusal(operation, source)
        else:
            pend(output)


def _cut_alike(output: DTensor, source: FsdpDTensor) -> bool:
    return (
        output.shape == source.shape
        and output.placements == source.placements
        and output._local_tensor.shape == source._local_tensor.shape
    )


torch.serialization.add_safe_globals([shard_dtensor, ShardGeometry, ShardMesh, GroupLayout, TensorSlot, ModelCut])
