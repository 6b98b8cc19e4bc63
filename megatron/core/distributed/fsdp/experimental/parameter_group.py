# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FsdpParameterGroup`: parameters of one dtype and one requires_grad, with the buffers that hold them.

Its verbs (unshard, release, sync) say what happens to the weights; its gradients are gradients.py's. When, and on which
stream, is the schedule's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from . import parameter_pair
from .checksum import MULTIPLIER, checksum_of
from .dbuffer import DBuffer
from .device import report_access
from .geometry import ShardGeometry
from .gradient_buffers import make_gradient_buffers
from .gradients import GroupGradients
from .group_options import GroupContext, GroupOptions, OwnedParameter
from .layout import GroupLayout
from .lent import LentTensors
from .parameter_pair import NoMainGrad, make_pair
from .placement import flatten
from .shard_mesh import ShardMesh


class FsdpParameterGroup:
    """Parameters of one dtype and one requires_grad, their buffers and their (sharded, unsharded) pairs.

    Args:
        parameters: the unit's parameters that go together, full and equal on every rank.
        options: what all groups of the unit share.
        unit: names the group's buffers and parameters until `rename`.
        index: position of the group in its unit.

    Attributes:
        options: as given.
        name: the unit's name and the group's index.
        main_weight: [local_numel], main dtype; what the optimizer updates and checkpoints hold.
        model_weight: [local_numel], compute dtype; what is gathered. `main_weight` itself where its cast can be.
        full_weight: [global_numel], compute dtype; what compute reads. Transient, or `model_weight` if that is whole.
        gradients: buffers and life of the gradients; None as long as no parameter has been trainable.
        sharded_parameters: what the module holds at rest: DTensors over `main_weight`.
        unsharded_parameters: what the module holds while it computes: views of `full_weight`.
        trainable: per parameter, its requires_grad.
        requires_grad: whether any parameter is trainable.
        has_final_gradients: False after a microbatch that was not the last; set by the schedule.
        on_requires_grad: called before a parameter is frozen or unfrozen, and may refuse; a weak method of the unit.
        context: the context of its unit, held weakly; None until the unit has one.
        lent: local main weights that this rank has given away since its weights were last gathered.
        values_checksum: of initial values that were computed after sharding; 0 if there were none.
        num_steps: how often the main weights have been stepped or written.
        num_freezes: how often a parameter has been frozen or unfrozen.
    """

    def __init__(self, parameters: Sequence[OwnedParameter], options: GroupOptions, unit: str, index: int) -> None:
        originals, placements = [owned.parameter for owned in parameters], options.placements
        self.name, self._index = f"{unit}.{index}", index
        self.trainable = [original.requires_grad for original in originals]
        self.requires_grad = any(self.trainable)
        self.fqns = [owned.fqn for owned in parameters]
        self._members = [owned.member for owned in parameters]
        self._places = [owned.places for owned in parameters]
        self.options = options
        self._is_stale, self.lent = True, LentTensors()
        self.has_final_gradients = True
        self.num_steps = self.num_freezes = 0
        self.on_requires_grad: weakref.WeakMethod[Callable[[], None]] | None = None
        self.context: weakref.ref[GroupContext] | None = None
        compute_dtype = originals[0].dtype
        main_dtype = options.mixed_precision_policy.main_dtype(compute_dtype, self.requires_grad)
        self._mesh = ShardMesh(options.mesh, placements.shard_axes, len(placements.dp_axes))
        self.layout = self._plan_layout([tensor.shape for tensor in originals])
        self._built_on_meta = frozenset(index for index, tensor in enumerate(originals) if tensor.is_meta)
        self._without_values = set(self._built_on_meta)
        self.values_checksum: torch.Tensor | int = 0
        self.main_weight = self._buffer("main_weight", flatten(placements.optimizer), main_dtype)
        for index, original in enumerate(originals):
            if not original.is_meta:
                self.main_weight.distribute(index, original)
        self._make_weights(compute_dtype)
        self.gradients: GroupGradients | None = None
        self._make_parameters(originals)
        if self.requires_grad:
            self._plan_gradients()
        self.rename(unit, [f"{unit}+{number}" if number else unit for number in range(max(self._members) + 1)])
        self.attach_sharded()

    def _plan_layout(self, shapes: Sequence[torch.Size]) -> GroupLayout:
        return self.options.plan_layout(shapes, self._mesh.num_shards)

    def _make_weights(self, compute_dtype: torch.dtype) -> None:
        """Make what is gathered, and what it is gathered into."""
        placements = self.options.placements
        self.model_weight = self.main_weight
        gathers = any(isinstance(at, Shard) for at in placements.parameter)
        if placements.parameter != placements.optimizer or (self.main_weight.dtype != compute_dtype and not gathers):
            self.model_weight = self._buffer("model_weight", flatten(placements.parameter), compute_dtype)
        self.full_weight = self.model_weight
        if gathers:
            self.full_weight = self._buffer("full_weight", (Replicate(),) * self._mesh.ndim, compute_dtype, True)

    def _buffer(
        self,
        kind: str,
        placements: Sequence[Placement],
        dtype: torch.dtype,
        is_transient: bool = False,
        layout: GroupLayout | None = None,
    ) -> DBuffer:
        return DBuffer(
            self.layout if layout is None else layout,
            self._mesh,
            placements,
            dtype=dtype,
            device=self.options.device,
            name=f"{self.name}.{kind}",
            allocator=self.options.allocator_of(kind),
            is_transient=is_transient,
        )

    def _plan_gradients(self) -> None:
        options = self.options
        self.gradients = GroupGradients(
            make_gradient_buffers(options, self._mesh.ndim, self.main_weight.dtype, self._buffer),
            self.sharded_parameters,
            self.unsharded_parameters,
            options.grad_divisor,
            options.keeps_gradient_memory,
        )

    def _make_parameters(self, originals: Sequence[nn.Parameter]) -> None:
        self.sharded_parameters, self.unsharded_parameters = list[nn.Parameter](), list[nn.Parameter]()
        for index, (original, fqn) in enumerate(zip(originals, self.fqns, strict=True)):
            cut = self.options.model_cut(original, fqn)
            geometry = ShardGeometry(fqn, self.layout, index, self._mesh, weakref.ref(self), cut)
            main = self.main_weight.pieces[index]
            sharded, unsharded = make_pair(original, main, self._full_tensor(index), geometry)
            self.sharded_parameters.append(sharded)
            self.unsharded_parameters.append(unsharded)
        self.full_weight.followers = self.unsharded_parameters

    def _full_tensor(self, index: int) -> torch.Tensor:
        return self.full_weight.pieces[index]

    def rename(self, unit: str, prefixes: Sequence[str]) -> None:
        """Name buffers after their unit, and parameters by their path, for errors and observers.

        Args:
            unit: the unit's name.
            prefixes: what comes before the parameters' own names, for each of the unit's modules: its path in the root.
        """
        self.name = f"{unit}.{self._index}"
        fqns = [f"{prefixes[i]}.{fqn}" if prefixes[i] else fqn for i, fqn in zip(self._members, self.fqns, strict=True)]
        if self.gradients is not None:
            self.gradients.rename(fqns)
        for buffer in self.buffers:
            buffer.name = f"{self.name}.{buffer.name.rpartition('.')[2]}"
        for fqn, sharded, unsharded in zip(fqns, self.sharded_parameters, self.unsharded_parameters, strict=True):
            named: Any = sharded
            named._geometry = replace(named._geometry, fqn=fqn)
            gathered: Any = unsharded
            gathered.main_grad = NoMainGrad(fqn)

    @property
    def buffers(self) -> tuple[DBuffer, ...]:
        """All buffers of weights and gradients, each once."""
        gradients = () if self.gradients is None else tuple(self.gradients.at)
        weights = dict.fromkeys((self.full_weight, self.model_weight, self.main_weight))
        return (*weights, *gradients)

    @property
    def numel(self) -> int:
        """Elements of the full parameters."""
        return self.layout.tensor_numel

    def name_at(self, offset: int) -> str:
        """Return the name of the parameter that holds element `offset` of `full_weight`."""
        return self.fqns[self.layout.tensor_at(offset)]

    @property
    def gathers(self) -> bool:
        """Whether forward and backward read gathered copies of the weights, rather than resident ones."""
        return self.full_weight.is_transient

    @property
    def is_incomplete(self) -> bool:
        """Whether a gather would bring more than there is, though that is current."""
        return False

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether gradients of earlier backwards wait for a reduction."""
        return self.gradients is not None and self.gradients.has_unreduced

    @property
    def has_unfinished_gradients(self) -> bool:
        """Whether there are gradients of an accumulation whose last microbatch has not come."""
        return not self.has_final_gradients and self.gradients is not None and not self.gradients.is_cleared

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters to None, with what waits for a reduction, and free their memory."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.sharded_parameters:
                parameter.grad = None
        self.drop_unreduced_gradients()
        self.release_cleared_gradients()

    def drop_unreduced_gradients(self) -> None:
        """Forget gradients that wait for a reduction, as zero_grad does."""
        gradients = self.gradients
        if gradients is None:
            return
        gradients.drop_held()
        if (context := self.live_context()) and gradients.has_partly:
            context.release_gradients(gradients.release_partly)

    def waiting_gradient(self, index: int) -> torch.Tensor | None:
        """Return what stands for the gradient of parameter `index` if it waits for a reduction."""
        return None if self.gradients is None else self.gradients.waiting(index)

    def clear_gradient(self, index: int) -> None:
        """Follow parameter `index`, whose ``.grad`` has been set to None."""
        if self.gradients is not None:
            if self.gradients.drop_unreduced_of(index):
                self.drop_unreduced_gradients()
            self.release_cleared_gradients()

    def release_cleared_gradients(self) -> None:
        """Free the memory of gradients if all parameters' are None."""
        gradients, context = self.gradients, self.live_context()
        if context and gradients and gradients.holds_memory and gradients.is_cleared:
            context.release_gradients(gradients.release_main)

    def live_context(self) -> GroupContext | None:
        """Return the context, if there is one and it is alive."""
        return None if self.context is None else self.context()

    @property
    def has_strays(self) -> bool:
        """Whether full parameters at rest have gradients: the unit's backward never began, or was over."""
        return self.gradients is not None and self.gradients.has_strays

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze parameter `index`; called by the sharded parameter before it changes itself.

        Raises:
            RuntimeError: the unit computes, or the parameter has no main weight that could be trained.
        """
        policy = self.options.mixed_precision_policy
        fqn = self.fqns[index]
        if requires_grad and policy.main_params_dtype not in (None, self.main_weight.dtype):
            raise parameter_pair.frozen_when_sharded(
                fqn, self.name.rpartition(".")[0], policy.main_params_dtype, self.main_weight.dtype
            )
        if self.on_requires_grad is not None and (callback := self.on_requires_grad()) is not None:
            callback()
        if self.has_unreduced_gradients:
            raise parameter_pair.frozen_with_gradients(fqn, self.name.rpartition(".")[0])
        self.num_freezes += 1
        self.trainable[index] = requires_grad
        self.requires_grad = any(self.trainable)
        self.unsharded_parameters[index].requires_grad_(requires_grad)
        if requires_grad and self.gradients is None:
            self._plan_gradients()

    @property
    def lacks_values(self) -> bool:
        """Whether parameters that were built on the meta device have no initial values yet."""
        return bool(self._without_values)

    def is_without_values(self, index: int) -> bool:
        """Return whether parameter `index` has no initial values yet."""
        return index in self._without_values

    def was_without_values(self, index: int) -> bool:
        """Return whether parameter `index` was built on the meta device."""
        return index in self._built_on_meta

    def ensure_values(self) -> None:
        """Have initial values computed that are still missing."""
        if self._without_values and (context := self.live_context()):
            context.initialize_values()

    def ensure_names(self) -> None:
        """Have parameters named by their place under the root, also before the first forward."""
        if (context := self.live_context()) and not context.is_finalized:
            context.name_units()

    def set_values(self, index: int, tensor: torch.Tensor) -> None:
        """Give parameter `index` its initial values: full, logical shape, the same on every rank."""
        self.main_weight.distribute(index, tensor)
        self.values_checksum = self.values_checksum * MULTIPLIER + checksum_of(tensor)
        self._without_values.discard(index)
        self.mark_main_weight_written()

    @property
    def is_stale(self) -> bool:
        """Whether main weights have been written since compute weights were made from them; alike on every rank."""
        return self._is_stale or self.lent.is_written

    def mark_main_weight_lent(self, local: torch.Tensor) -> None:
        """Watch a local tensor, through which this rank may write main weights."""
        self.lent.lend(local, self.main_weight.local)

    def mark_main_weight_written(self, is_certain: bool = False) -> None:
        """Note that main weights have changed; the next unshard makes the compute weights from them.

        Args:
            is_certain: whether they are about to change, after gathers that read them and with no backward to come.
        """
        if is_certain and not self._is_stale and (context := self.live_context()):
            context.await_gathers()
        self._is_stale = True
        self.num_steps += is_certain

    def sync_model_weight(self) -> None:
        """Make the compute weights from the main weights, if these have been written; sent where they lie apart."""
        # What is no communication one rank may do alone, for writes that torch does not count.
        if self.is_stale or (self.lent and self._syncs_alone):
            self._refresh_model_weight()
        self._is_stale = False
        self.lent.clear()

    @property
    def _syncs_alone(self) -> bool:
        """Whether each rank makes its compute weights from its own main weights."""
        return self.model_weight.placements == self.main_weight.placements

    def _refresh_model_weight(self) -> None:
        if self.model_weight is not self.main_weight:
            self.model_weight.refresh_from(self.main_weight)

    def unshard(self) -> None:
        """Gather the compute weights into `full_weight`, allocating it unless it is there already."""
        self.sync_model_weight()
        if not self.gathers:
            return
        if not self.full_weight.has_storage:
            self.full_weight.allocate()
        self._gather()

    def _gather(self) -> None:
        """Fill `full_weight`, which has storage."""
        if self.model_weight.dtype == self.full_weight.dtype:
            self.model_weight.redistribute(self.full_weight)
        else:
            self.full_weight.refresh_from(self.model_weight)

    def release_full_weight(self) -> None:
        """Free the gathered weights."""
        if self.gathers:
            self.full_weight.release()

    def attach_sharded(self) -> None:
        """Let the module hold the sharded parameters.

        Raises:
            RuntimeError: a gathered parameter has been frozen or unfrozen, which its sharded one does not know of.
        """
        self.attach(self.sharded_parameters)
        found = [parameter.requires_grad for parameter in self.unsharded_parameters]
        if found != self.trainable:
            for parameter, requires_grad in zip(self.unsharded_parameters, self.trainable, strict=True):
                parameter.requires_grad_(requires_grad)
            raise parameter_pair.frozen_while_gathered(self.name.rpartition(".")[0])

    def attach_unsharded(self) -> None:
        """Let the module hold the gathered parameters, for compute."""
        for index, places in enumerate(self._places):
            for parameters_dict, name in places:
                held = parameters_dict.get(name)
                if held is not self.sharded_parameters[index] and held is not self.unsharded_parameters[index]:
                    raise parameter_pair.foreign_parameter(held, self.fqns[index], self.name.rpartition(".")[0])
        self.attach(self.unsharded_parameters)

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the module hold these parameters, one for each of the group's."""
        for parameter, places in zip(parameters, self._places, strict=True):
            for parameters_dict, name in places:
                parameters_dict[name] = parameter

    def report_compute(self, operation: str) -> None:
        """Tell an observer that compute reads the gathered weights now."""
        report_access(operation, reads=(self.full_weight.name,))

    def begin_step(self) -> None:
        """Note that an optimizer reads main gradients and writes main weights now."""
        self.num_steps += 1
        if self.gradients is not None:
            report_access("step", reads=(self.gradients.at.main.name,), writes=(self.main_weight.name,))
