# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a parameter group is made from, and what it asks of its context: values and protocols only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .allocator import StorageAllocator
from .layout import GroupLayout, plan_layout
from .model_cut import ModelCut, find_model_cut
from .policy import MixedPrecisionPolicy, Placements
from .te_weights import PrimaryWeight

GradientReduction = Literal["average", "sum"]
"""What gradients of different ranks become: their mean, or their sum (for losses that are sums)."""

_LASTING = frozenset(
    {
        *("main_weight", "main_grad", "model_weight", "model_scales", "model_padded_scales"),
        *("model_backward_weight", "model_backward_scales", "model_backward_padded_scales"),
    }
)


@dataclass
class OwnedParameter:
    """One parameter of a unit and every place in the module that holds it.

    Attributes:
        fqn: its first name, relative to the unit, or to the module of it that has the parameter.
        names: all of its names there.
        parameter: the original.
        places: ``module._parameters`` dicts and the names in them; several for a tied weight. A dict rather than its
            module, so that a unit and its group form no reference cycle.
        member: which of the unit's modules has it, where several form one unit.
        is_embedding: whether a torch module for embeddings has it.
        primary: what `parameter` stands for, if that is one of TransformerEngine's primary weights.
    """

    fqn: str
    parameter: nn.Parameter
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    member: int = 0
    names: list[str] = field(default_factory=list)
    is_embedding: bool = False
    primary: PrimaryWeight | None = None


@dataclass(frozen=True)
class GroupOptions:
    """What all groups of one unit share.

    Attributes:
        mesh: data-parallel axes, then perhaps one of tensor parallelism.
        placements: public placements.
        mixed_precision_policy: dtypes of main weights, gradients and their communication.
        grad_divisor: divides every reduced gradient, after averaging or summing.
        gradient_reduction: what the gradients of different ranks become.
        device: where the shards live.
        allocator: where storage comes from that lives and dies inside a step.
        lasting_allocator: where other storage comes from: of main and compute weights, and of main gradients.
        keeps_gradient_memory: whether cleared gradients keep their memory.
        separate_communicators: whether weights are gathered in process groups of their own.
    """

    mesh: DeviceMesh
    placements: Placements
    mixed_precision_policy: MixedPrecisionPolicy
    grad_divisor: float
    gradient_reduction: GradientReduction
    device: torch.device
    allocator: StorageAllocator
    lasting_allocator: StorageAllocator
    keeps_gradient_memory: bool = False
    separate_communicators: bool = False

    def plan_layout(self, shapes: Sequence[torch.Size], num_shards: int) -> GroupLayout:
        """Return where tensors of these shapes lie in their group's buffer, and what each shard owns."""
        atoms = [max(1, shape.numel()) for shape in shapes] if self.placements.tensor_atomic else None
        return plan_layout(shapes, num_shards, atoms=atoms)

    def allocator_of(self, kind: str) -> StorageAllocator:
        """Return where the buffer called `kind` takes its storage from."""
        return self.lasting_allocator if kind in _LASTING else self.allocator

    def model_cut(self, parameter: nn.Parameter, fqn: str) -> ModelCut | None:
        """Return how a parameter is a piece of a larger one along the mesh's axis of tensor parallelism."""
        axis = len(self.placements.dp_axes)
        if axis == self.mesh.ndim:
            return None
        return find_model_cut(parameter, fqn, axis, self.mesh.size(axis), self.mesh.get_local_rank(axis))


class GroupContext(Protocol):
    """What a group asks of the context of its unit."""

    def initialize_values(self) -> None:
        """Compute initial values that are missing."""
        ...

    def parameter_groups(self) -> Iterable[Any]:
        """Return the groups of all units, in one order on every rank."""
        ...

    def name_units(self) -> None:
        """Name units and parameters by their place."""
        ...

    @property
    def is_finalized(self) -> bool:
        """Whether names are fixed."""
        ...

    def refuse_strays(self) -> None:
        """Drop gradients of full parameters at rest and raise, naming their units."""
        ...

    def release_gradients(self, release: Callable[[], None]) -> None:
        """Call `release`, which frees gradients that compute may still read, where that is safe."""
        ...

    def await_gathers(self) -> None:
        """Let compute write main weights."""
        ...
