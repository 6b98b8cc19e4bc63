# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FsdpParameterGroup`: parameters of one dtype and one requires_grad, with the buffers that hold them.

Its verbs (unshard, reshard, reduce, sync) say what happens to the data. When, and on which stream, is the schedule's.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .allocator import StorageAllocator
from .dbuffer import DBuffer
from .device import report_access
from .dtensor import FsdpDTensor, ShardGeometry, shard_dtensor
from .layout import plan_layout
from .placement import Flat
from .policy import MixedPrecisionPolicy, Placements

GradientReduction = Literal["average", "sum"]
"""What gradients of different ranks become: their mean, or their sum (for losses that are sums)."""

_REFERENCES_OF_OURS = 3
"""What sys.getrefcount says of a gradient that only the group holds: its list, the loop variable, the argument."""

_RUNTIME_ATTRIBUTES = frozenset({"main_grad", "_fsdp_group", "_fsdp_unit"})


@dataclass
class OwnedParameter:
    """One parameter of a unit and every place in the module that holds it.

    Attributes:
        fqn: its first name, relative to the unit.
        parameter: the original.
        places: ``module._parameters`` dicts and the names in them; several for a tied weight. A dict rather than its
            module, so that a unit and its group form no reference cycle.
    """

    fqn: str
    parameter: nn.Parameter
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)


@dataclass(frozen=True)
class GroupOptions:
    """What all groups of one unit share.

    Attributes:
        mesh: data-parallel mesh.
        placements: public placements.
        mixed_precision_policy: dtypes of main weights, gradients and their communication.
        grad_divisor: divides every reduced gradient, after averaging or summing.
        gradient_reduction: what the gradients of different ranks become.
        device: where the shards live.
        allocator: where full-size storage comes from.
    """

    mesh: DeviceMesh
    placements: Placements
    mixed_precision_policy: MixedPrecisionPolicy
    grad_divisor: float
    gradient_reduction: GradientReduction
    device: torch.device
    allocator: StorageAllocator


class FsdpParameterGroup:
    """Parameters of one dtype and one requires_grad, their buffers and their (sharded, unsharded) pairs.

    Args:
        parameters: the unit's parameters that go together, full and equal on every rank.
        options: what all groups of the unit share.
        unit: names the group's buffers and parameters until `rename`.
        index: position of the group in its unit.

    Attributes:
        name: the unit's name and the group's index.
        main_weight: [local_numel], main dtype; what the optimizer updates and checkpoints hold.
        model_weight: [local_numel], compute dtype; `main_weight` itself where dtypes and placements agree.
        full_weight: [global_numel], compute dtype, transient; what forward and backward read.
        full_grad: [global_numel], communication dtype, transient; this rank's packed gradients. None if frozen.
        main_grad: [local_numel], main-gradient dtype; reduced and accumulated. None if frozen.
        sharded_parameters: what the module holds at rest: DTensors over `main_weight`.
        unsharded_parameters: what the module holds while it computes: views of `full_weight`.
        has_final_gradients: False after a microbatch that was not the last; set by the schedule.
        num_steps: optimizer steps that the main weights have taken.
    """

    def __init__(self, parameters: Sequence[OwnedParameter], options: GroupOptions, unit: str, index: int) -> None:
        first = parameters[0].parameter
        policy = options.mixed_precision_policy
        self.name = f"{unit}.{index}"
        self._index = index
        self.requires_grad = first.requires_grad
        self.fqns = [owned.fqn for owned in parameters]
        self._places = [owned.places for owned in parameters]
        self._options = options
        self._is_stale = True
        self.has_final_gradients = True
        self.num_steps = 0
        self._assigned_gradients: list[Any] = []
        compute_dtype = first.dtype
        main_dtype = _main_dtype(first, policy)
        originals = [owned.parameter for owned in parameters]
        mesh, device = options.mesh, options.device
        weight_at, grad_at, main_at = (
            tuple(_flatten(item) for item in axis_placements)
            for axis_placements in (
                options.placements.parameter,
                options.placements.gradient,
                options.placements.optimizer,
            )
        )
        self.layout = plan_layout([tensor.shape for tensor in originals], mesh.size())
        self.main_weight = DBuffer.distribute_tensors(
            originals, self.layout, mesh, main_at, dtype=main_dtype, device=device, name="main_weight"
        )
        if main_dtype == compute_dtype and weight_at == main_at:
            self.model_weight = self.main_weight
        else:
            self.model_weight = DBuffer(
                self.layout, mesh, weight_at, dtype=compute_dtype, device=device, name="model_weight"
            )
        everywhere = (Replicate(),) * mesh.ndim
        self.full_weight = DBuffer(
            self.layout,
            mesh,
            everywhere,
            dtype=compute_dtype,
            device=device,
            name="full_weight",
            allocator=options.allocator,
        )
        self.full_grad: DBuffer | None = None
        self.main_grad: DBuffer | None = None
        if self.requires_grad:
            self._plan_gradients(grad_at, main_dtype)
        self._make_parameters(originals)
        self.rename(unit, unit)
        self.attach_sharded()

    def _plan_gradients(self, placements: tuple[Placement, ...], main_dtype: torch.dtype) -> None:
        options = self._options
        main_grads_dtype = options.mixed_precision_policy.main_grads_dtype or main_dtype
        comm_dtype = options.mixed_precision_policy.grad_comm_dtype or main_grads_dtype
        reduce_op = "avg" if options.gradient_reduction == "average" else "sum"

        def buffer(at: Sequence[Placement], dtype: torch.dtype, kind: str, transient: bool) -> DBuffer:
            return DBuffer(
                self.layout,
                options.mesh,
                at,
                dtype=dtype,
                device=options.device,
                name=kind,
                allocator=options.allocator if transient else None,
            )

        pending = (Partial(reduce_op),) * options.mesh.ndim
        self.full_grad = buffer(pending, comm_dtype, "full_grad", True)
        self.main_grad = buffer(placements, main_grads_dtype, "main_grad", False)
        self._reduced_grad = buffer(placements, comm_dtype, "reduced_grad", True)

    def _make_parameters(self, originals: Sequence[nn.Parameter]) -> None:
        mesh = self._options.mesh
        on_write = weakref.WeakMethod(self.mark_main_weight_written)
        self.sharded_parameters: list[nn.Parameter] = []
        self.unsharded_parameters: list[nn.Parameter] = []
        self._gradients: list[FsdpDTensor] = []
        for index, original in enumerate(originals):
            fqn = self.fqns[index]
            geometry = ShardGeometry(fqn, self.layout, index, mesh, on_write)
            local = self.main_weight.pieces[index]
            sharded: Any = nn.Parameter(_plain_dtensor(local, geometry), requires_grad=self.requires_grad)
            sharded.__class__ = FsdpDTensor
            sharded._geometry = geometry
            sharded._fsdp_group = weakref.ref(self)
            # `.data` gives the view its own version counter, so that refilling the buffer between forward and
            # backward is not taken for an in-place change of a saved weight.
            unsharded: Any = nn.Parameter(self.full_weight.pieces[index].data, requires_grad=self.requires_grad)
            for attribute, value in vars(original).items():
                if attribute not in _RUNTIME_ATTRIBUTES:
                    setattr(sharded, attribute, value)
                    setattr(unsharded, attribute, value)
            if self.main_grad is not None:
                sharded.grad_dtype = None
                self._gradients.append(
                    shard_dtensor(self.main_grad.pieces[index], ShardGeometry(fqn, self.layout, index, mesh))
                )
            self.sharded_parameters.append(sharded)
            self.unsharded_parameters.append(unsharded)

    def rename(self, unit: str, prefix: str) -> None:
        """Name buffers after their unit, and parameters by their path, for errors and observers.

        Args:
            unit: the unit's name.
            prefix: what comes before the parameters' own names: the unit's path in its root; empty for the root.
        """
        self.name = f"{unit}.{self._index}"
        buffers = [self.main_weight, self.model_weight, self.full_weight]
        if self.main_grad is not None and self.full_grad is not None:
            buffers += [self.main_grad, self.full_grad, self._reduced_grad]
        for buffer in buffers:
            buffer.name = f"{self.name}.{buffer.name.rpartition('.')[2]}"
        for tensors in (self.sharded_parameters, self._gradients):
            for fqn, tensor in zip(self.fqns, tensors, strict=bool(tensors)):
                named: Any = tensor
                named._geometry = replace(named._geometry, fqn=f"{prefix}.{fqn}" if prefix else fqn)

    @property
    def numel(self) -> int:
        """Elements of the full parameters."""
        return self.layout.tensor_numel

    @property
    def is_stale(self) -> bool:
        """Whether main weights have been written since the compute weights were last made from them."""
        return self._is_stale

    def mark_main_weight_written(self) -> None:
        """Note that main weights have changed; the next unshard makes the compute weights from them."""
        self._is_stale = True

    def sync_model_weight(self) -> None:
        """Make the sharded compute weights from the main weights, if these have been written."""
        if self._is_stale and self.model_weight is not self.main_weight:
            self.model_weight.copy_from(self.main_weight)
        self._is_stale = False

    def unshard(self) -> None:
        """Gather the compute weights into `full_weight`, allocating it unless it is there already."""
        self.sync_model_weight()
        if not self.full_weight.is_allocated:
            self.full_weight.allocate()
        self.model_weight.redistribute(self.full_weight)

    def release_full_weight(self) -> None:
        """Free the gathered weights."""
        self.full_weight.release()

    def attach_sharded(self) -> None:
        """Let the module hold the sharded parameters."""
        self._attach(self.sharded_parameters)

    def attach_unsharded(self) -> None:
        """Let the module hold the gathered parameters, for compute."""
        for index, places in enumerate(self._places):
            for parameters_dict, name in places:
                held = parameters_dict.get(name)
                if held is not self.sharded_parameters[index] and held is not self.unsharded_parameters[index]:
                    raise RuntimeError(
                        f"parameter {self.fqns[index]} of unit {self.name.rpartition('.')[0]}: expected the one that "
                        f"fully_shard put there, got {type(held).__name__}. Write new values with copy_; tie or "
                        "replace parameters before fully_shard."
                    )
        self._attach(self.unsharded_parameters)

    def _attach(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, places in zip(parameters, self._places, strict=True):
            for parameters_dict, name in places:
                parameters_dict[name] = parameter

    def report_compute(self, operation: str) -> None:
        """Tell an observer that compute reads the gathered weights now."""
        report_access(operation, reads=(self.full_weight.name,))

    def begin_step(self) -> None:
        """Note that an optimizer reads main gradients and writes main weights now."""
        self.num_steps += 1
        if self.main_grad is not None:
            report_access("step", reads=(self.main_grad.name,), writes=(self.main_weight.name,))

    def pack_gradients(self) -> None:
        """Move the gradients of this backward into `full_grad`, on the stream that computed them.

        A parameter that got none contributes zeros.
        """
        assert self.full_grad is not None, "frozen groups have no gradients"
        self.full_grad.allocate()
        report_access("pack", writes=(self.full_grad.name,))
        targets: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for parameter, piece in zip(self.unsharded_parameters, self.full_grad.pieces, strict=True):
            if parameter.grad is None:
                piece.zero_()
                continue
            targets.append(piece)
            gradients.append(parameter.grad)
            parameter.grad = None
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, gradients)

    def drop_gradients(self) -> None:
        """Forget full gradients that will not be reduced."""
        for parameter in self.unsharded_parameters:
            parameter.grad = None

    def reduce_gradients(self) -> None:
        """Reduce `full_grad` over ranks and add it to what has accumulated since gradients were last cleared."""
        assert self.full_grad is not None and self.main_grad is not None
        is_first = self._prepare_accumulation()
        divisor = self._options.grad_divisor
        into_main = is_first and self.main_grad.dtype == self.full_grad.dtype
        target = self.main_grad if into_main else self._reduced_grad
        if not into_main:
            target.allocate()
        self.full_grad.redistribute(target)
        if divisor != 1:
            target.local.div_(divisor)
        if not into_main:
            report_access("accumulate", reads=(target.name,), writes=(self.main_grad.name,))
            if is_first:
                self.main_grad.local.copy_(target.local)
            else:
                self.main_grad.local.add_(target.local)
            target.release()
        self._install_gradients()

    def release_full_grad(self) -> None:
        """Free the packed gradients once they have been reduced."""
        assert self.full_grad is not None
        self.full_grad.release()
        self._assigned_gradients.clear()

    def _prepare_accumulation(self) -> bool:
        """Bring `main_grad` in line with every parameter's ``.grad``; return whether none has a gradient yet.

        ``.grad`` is the truth, as in torch: None means that nothing has accumulated, a tensor that the user put there
        is what the next gradient is added to.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            current = [parameter.grad for parameter in self.sharded_parameters]
            if all(grad is None for grad in current):
                if any(sys.getrefcount(own) > _REFERENCES_OF_OURS for own in self._gradients):
                    self._renew_gradients()
                return True
            # What the user has put there is read on this stream: keep it until the reduction is over.
            pairs = zip(current, self._gradients, strict=True)
            self._assigned_gradients = [grad for grad, own in pairs if grad is not None and grad is not own]
            for grad, own in zip(current, self._gradients, strict=True):
                if grad is None:
                    own._local_tensor.zero_()
                elif grad is not own:
                    if not isinstance(grad, DTensor):
                        raise ValueError(
                            f"gradient of {own.geometry.fqn}: expected a DTensor cut like its parameter, got "
                            f"{type(grad).__name__} of shape {tuple(grad.shape)}. Change gradients in place, or assign "
                            "what an operation on them returns."
                        )
                    own._local_tensor.copy_(grad._local_tensor.view_as(own._local_tensor))
        return False

    def _renew_gradients(self) -> None:
        """Leave gradients that somebody still holds as they are, and go on with new ones."""
        assert self.main_grad is not None
        old = self.main_grad
        self.main_grad = DBuffer(
            old.layout, old.mesh, old.placements, dtype=old.dtype, device=old.local.device, name=old.name
        )
        self._gradients = [
            shard_dtensor(piece, own.geometry)
            for piece, own in zip(self.main_grad.pieces, self._gradients, strict=True)
        ]

    def _install_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, own in zip(self.sharded_parameters, self._gradients, strict=True):
                if parameter.grad is not own:
                    parameter.grad = own


def _plain_dtensor(local: torch.Tensor, geometry: ShardGeometry) -> Any:
    """Return a plain DTensor, which `nn.Parameter` accepts; the caller gives it its class afterwards."""
    dtensor: Any = shard_dtensor(local, geometry)
    dtensor.__class__ = dtensor.__class__.__mro__[1]
    return dtensor


def _flatten(placement: Placement) -> Placement:
    return Flat() if isinstance(placement, Shard) else placement


def _main_dtype(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
    dtype: torch.dtype = parameter.dtype
    if not parameter.requires_grad or policy.main_params_dtype is None:
        return dtype
    return policy.main_params_dtype
