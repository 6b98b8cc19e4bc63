# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients over all ranks, zero counts, and clipping: each gradient by its own DTensor layout.

It neither makes gradients nor steps anything.

[Note: counted once]
A mesh axis that shards a gradient holds different elements on its ranks, any other axis copies. Either statistics are
summed over the axes that shard and over no other, mesh by mesh; or, where a process group spans ranks with different
parameters, over that group, and of all copies in it only the one on the lowest rank counts.
Sums over elements and over ranks are taken in float64, over ranks in their order, so that all ranks get the same bits
and the number of ranks does not show after rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import collectives
from .compiling import untraced

_dtype_of, _grad_of = attrgetter("dtype"), attrgetter("grad")

_SMALL_NUMEL = 4096
"""Gradients with fewer elements are copied into one tensor for a norm: an operation each would cost the host more."""


@untraced
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm over all parameters and ranks is at most `max_norm`.

    Every rank must call it with the same parameters. There is no host synchronisation unless `error_if_nonfinite`.

    Args:
        parameters: sharded parameters, or plain ones that are equal on every rank; those without gradient are skipped.
        max_norm: upper bound, > 0; a 0-d tensor is not looked at, so that the host need not wait for it.
        norm_type: order of the norm, > 0; may be inf.
        error_if_nonfinite: raise rather than scale by a norm that is nan or inf.

    Returns:
        The norm before clipping: a 0-d tensor, the same on every rank; float32, or float64 if a parameter is.

    Raises:
        ValueError: a bound or order out of range.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    if (not isinstance(max_norm, torch.Tensor) and not max_norm > 0) or not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: expected max_norm > 0 and norm_type > 0, got {max_norm} and {norm_type}.")
    plan = _Plan([parameters] if isinstance(parameters, torch.Tensor) else list(parameters))
    plan.require_reduced()
    found = plan.gradients()
    total = _norm(plan, found, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite gradient norm, got {float(total)}. Lower the learning rate or the "
            "loss scale, or pass error_if_nonfinite=False to go on."
        )
    _scale(found, max_norm, total)
    return total


@untraced
def clip_grads_with_norm_(parameters: Iterable[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
    """Scale gradients by max_norm / total_norm if that is below one; no communication, no host synchronisation.

    Args:
        parameters: sharded or plain parameters; those without gradient are skipped.
        max_norm: upper bound of the norm.
        total_norm: the norm as it is, 0-d, the same on every rank.
    """
    _scale(_Plan(list(parameters)).gradients(), max_norm, total_norm)


@untraced
def grad_norm(parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients over all ranks, 0-d, as `clip_grad_norm_` does; every rank must call it.

    Shards are summed over the mesh axes that shard them and over no other ([Note: counted once]). Every mesh among the
    parameters takes part, whether this rank has gradients there or not.
    """
    plan = _Plan(parameters)
    plan.require_reduced()
    return _norm(plan, plan.gradients(), norm_type)


class GradientStatistics:
    """Statistics over a process group whose ranks may hold different parameters, on meshes of their own.

    It remembers how the parameters of the last call lie, so that asking again for the same ones is cheap.

    Args:
        group: every rank of it calls each method, with parameters of its own. Of a sharded gradient it holds all
            shards; copies count once ([Note: counted once]).
        device: where to compute, for ranks that have no parameters, too.
        is_counted: says of a parameter whether it counts; not if other ranks of the group count what it is a copy of.
            It is clipped in any case.

    Attributes:
        group: as given.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        is_counted: Callable[[torch.Tensor], bool] = lambda parameter: True,
    ) -> None:
        self.group = group
        self._device = device
        self._is_counted = is_counted
        self._ranks = frozenset(dist.get_process_group_ranks(group))
        self._counting: dict[_Spread, bool] = {}
        self._plan = _Plan([])

    def local_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients, those without an element left out; shared, not copied."""
        found = self._planned(parameters).gradients()
        return [gradient for lists in found.values() for gradients in lists for gradient in gradients]

    def counted_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the local parts of the gradients that this rank counts; as `local_gradients`.

        Over all ranks of the group, every gradient element is in exactly one of these lists.

        Raises:
            ValueError: the group lacks ranks that hold shards of a gradient.
            RuntimeError: gradients wait for a reduction.
        """
        return [gradient for gradients in self._counted(parameters) for gradient in gradients]

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all gradients, 0-d float64, the same bits on every rank; raises as `counted_gradients`.

        Args:
            parameters: this rank's; those without gradient are skipped.
            norm_type: order of the norm, > 0; may be inf.
        """
        gradients = self._counted(parameters)
        with torch.no_grad():
            here = _combine(_norms(gradients, norm_type, self._device), norm_type)
            return _combine(_on_every_rank(here, [self.group]), norm_type)

    def count_zeros(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return how many gradient elements are zero, 0-d float64; raises as `counted_gradients`."""
        gradients = self._counted(parameters)
        numel = sum(gradient.numel() for alike in gradients for gradient in alike)
        with torch.no_grad():
            # Numbers below 2**53 are exact in float64.
            here = numel - _norms(gradients, 0.0, self._device).sum()
            return _on_every_rank(here, [self.group]).sum()

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
        """Scale gradients as `clip_grads_with_norm_` does."""
        _scale(self._planned(parameters).gradients(), max_norm, total_norm)

    def _counted(self, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        plan = self._planned(parameters)
        plan.require_reduced()
        # Every way to lie is asked about, so that a group that is too small is refused without gradients, too.
        return [gradients for spread, lists in plan.gradients().items() if self._counts(spread) for gradients in lists]

    def _planned(self, parameters: Sequence[torch.Tensor]) -> _Plan:
        if not self._plan.is_of(parameters):
            self._plan = _Plan(parameters, self._is_counted)
        return self._plan

    def _counts(self, spread: _Spread) -> bool:
        if spread not in self._counting:
            shards, copies = spread.ranks()
            if missing := shards - self._ranks:
                raise ValueError(
                    f"gradient statistics: expected a process group with all ranks that shard the gradients, got one "
                    f"of {len(self._ranks)} ranks that lacks {sorted(missing)[:8]}. Give the optimizer a larger "
                    "grad_stats_parallel_group."
                )
            is_first = min(copies & self._ranks, default=None) == dist.get_rank()
            self._counting[spread] = spread.is_counted and is_first
        return self._counting[spread]


@dataclass(frozen=True)
class _Spread:
    """How a gradient lies on ranks.

    Attributes:
        mesh: None for a plain tensor, which is the same on every rank there is.
        axes: the axes of the mesh that shard it; all others replicate.
        is_counted: False for a copy of what other ranks count.
    """

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    is_counted: bool = True

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups over which shards are summed."""
        return [] if self.mesh is None else [self.mesh.get_group(axis) for axis in self.axes]

    def ranks(self) -> tuple[set[int], set[int]]:
        """Return the global ranks among which the gradient is sharded, and those that hold a copy of this one's shard.

        This rank is in both, unless the mesh lacks it. Example: on the (2, 2) mesh [[0, 1], [2, 3]], sharded by axis 1,
        rank 1 has {0, 1} and {1, 3}.
        """
        if self.mesh is None:
            return set(), set(range(dist.get_world_size()))
        mesh, here = self.mesh, self.mesh.get_coordinate()
        if here is None:
            return set(), set()

        def along(axes: Sequence[int]) -> set[int]:
            where: list[Any] = [slice(None) if axis in axes else at for axis, at in enumerate(here)]
            return set(mesh.mesh[tuple(where)].reshape(-1).tolist())

        return along(self.axes), along([axis for axis in range(mesh.ndim) if axis not in self.axes])


_Gradients = dict[_Spread, list[list[torch.Tensor]]]
"""Local gradients that have elements, by how they lie, in lists of one dtype each."""


class _Plan:
    """How parameters lie, and where their gradients are to be found.

    Args:
        parameters: sharded or plain ones, with gradients or without.
        is_counted: which of them statistics over a group count.

    Attributes:
        spreads: every way in which some of the parameters lie, with those of them that have elements on this rank.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        is_counted: Callable[[torch.Tensor], bool] = lambda parameter: True,
    ) -> None:
        self.parameters = list(parameters)
        self.spreads: dict[_Spread, list[torch.Tensor]] = {}
        self._owners: list[Any] = []
        last: Any = None
        here: list[torch.Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                # What costs more than an attribute is asked once per unit, whose parameters follow one another.
                geometry = getattr(parameter, "_geometry", None)
                counts = is_counted(parameter)
                lies = None if geometry is None else (geometry.mesh, geometry.model_cut is None, counts)
                if lies is None or lies != last:
                    last = lies
                    here = self.spreads.setdefault(replace(_spread_of(parameter, geometry), is_counted=counts), [])
                    if hasattr(parameter, "_fsdp_group"):
                        self._owners.append(parameter._fsdp_group)
                if getattr(parameter, "_local_tensor", parameter).numel():
                    here.append(parameter)

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether it was made from these very parameters."""
        return len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters))

    def require_reduced(self) -> None:
        """Refuse gradients that wait for a reduction, without communication; on all ranks alike.

        Raises:
            RuntimeError: there are some.
        """
        for owner in self._owners:
            group = owner()
            if group is not None and group.has_unreduced_gradients:
                raise RuntimeError(
                    f"gradient norm of {group.name}: expected reduced gradients, got some that are held back on each "
                    "rank. Run the last backward with is_last=True and set_requires_gradient_sync(True)."
                )

    def gradients(self) -> _Gradients:
        """Return the local gradients of all parameters that have elements here."""
        with torch._C.DisableTorchFunctionSubclass():
            found = {}
            for spread, here in self.spreads.items():
                wrapped = [gradient for gradient in map(_grad_of, here) if gradient is not None]
                found[spread] = _by_dtype([getattr(gradient, "_local_tensor", gradient) for gradient in wrapped])
            return found


def _spread_of(parameter: torch.Tensor, geometry: Any) -> _Spread:
    if geometry is not None:
        return _Spread(geometry.mesh.device_mesh, geometry.sharding_axes)
    if not isinstance(parameter, DTensor):
        return _Spread(None, ())
    axes = tuple(axis for axis, at in enumerate(parameter.placements) if at.is_shard())
    return _Spread(parameter.device_mesh, axes)


def _norm(plan: _Plan, found: _Gradients, norm_type: float) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        device = plan.parameters[0].device if plan.parameters else torch.device("cpu")
        norms = []
        for spread, gradients in found.items():
            here = _combine(_norms(gradients, norm_type, device), norm_type)
            norms.append(_combine(_on_every_rank(here, spread.groups()), norm_type))
        norm = _combine(_stack(norms, device), norm_type)
        return norm if torch.float64 in set(map(_dtype_of, plan.parameters)) else norm.float()


def _norms(gradients: Sequence[list[torch.Tensor]], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return norms of parts of some gradients, float64, 1-D or 0-d; of order 0, how many elements are not zero."""
    norms: list[torch.Tensor] = []
    for alike in gradients:
        small = [gradient for gradient in alike if gradient.numel() < _SMALL_NUMEL]
        if small:
            joined = torch._C._nn.flatten_dense_tensors(small)
            norms.append(torch.linalg.vector_norm(joined, norm_type, dtype=torch.float64))
        if len(small) < len(alike):
            large = [gradient for gradient in alike if gradient.numel() >= _SMALL_NUMEL]
            norms += torch._foreach_norm(large, norm_type, dtype=torch.float64)
    return _stack(norms, device)


def _stack(scalars: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return 0-d float64 tensors as one, 0-d if it is a single one or zero in place of none."""
    if len(scalars) == 1:
        return scalars[0]
    return torch.stack(scalars) if scalars else torch.zeros((), dtype=torch.float64, device=device)


def _combine(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of a whole, given those of its parts."""
    return norms if norms.ndim == 0 else torch.linalg.vector_norm(norms, norm_type)


def _on_every_rank(part: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """Return the parts of all ranks, in the same order and with the same bits on each of them; 1-D if they are several.

    A rank fills its own slot among zeros. So a sum over ranks is exact whatever its order, while that of the parts
    themselves would depend on it, and a backend's maximum may lose a nan.
    """
    for group in groups:
        if group.size() > 1:
            slots = part.new_zeros(group.size(), part.numel())
            slots[group.rank()] = part
            collectives.all_reduce(slots, "sum", group, what="the gradient statistics")
            part = slots.view(-1)
    return part


def _scale(found: _Gradients, max_norm: float | torch.Tensor, total_norm: torch.Tensor) -> None:
    with torch.no_grad():
        scale = (total_norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
        for lists in found.values():
            for alike in lists:
                torch._foreach_mul_(alike, scale)


def _by_dtype(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return lists of one dtype each, which foreach operations take at once."""
    dtypes = dict.fromkeys(map(_dtype_of, tensors))
    if len(dtypes) == 1:
        return [tensors]
    return [[tensor for tensor in tensors if tensor.dtype is dtype] for dtype in dtypes]
