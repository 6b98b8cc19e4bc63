# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Groups whose weights are kept and gathered in a low-bit format: what lies where, and when it is made.

How numbers become bytes is the format's affair (`quantization.py`), when weights are gathered the schedule's.

[Note: the life of a quantized weight]
Main weights are as in any group: what the optimizer updates and checkpoints hold. After a step or a load the next
unshard quantizes this rank's shard of them, once, into its part of two planes of bytes, payload and scales, which lie
as compute weights do in other groups. Every use gathers these planes into transient ones, makes the compute weights
from them, and frees them at once: low-bit planes travel and rest, forward and backward see `full_weight`.

No block is ever cut: the blocks of a format are the atoms of the layout. A tensor therefore has the bits that it would
have if it were quantized as a whole, on every number of ranks. Where a format scales whole tensors, ranks agree on the
largest magnitudes first, of all tensors of the context that have been written, in one collective per axis that shards
main weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard

from . import collectives
from .dbuffer import DBuffer
from .device import report_access
from .group_options import GroupOptions, OwnedParameter
from .layout import GroupLayout, TensorSlot, plan_layout
from .parameter_group import FsdpParameterGroup
from .placement import flatten
from .quantization import WeightFormat
from .scale_plan import ScalePlan, plan_scales
from .secondary_shard import SecondarilyShardedGroup


class QuantizedGroup(FsdpParameterGroup):
    """A parameter group whose compute weights are made from low-bit planes; see [Note: the life of a quantized weight].

    Args:
        parameters: as for `FsdpParameterGroup`.
        options: likewise; its policy has a recipe.
        unit: likewise.
        index: likewise.

    Attributes:
        format: what weights are quantized to.
        model_weight: payload, uint8, [local_numel / elements_per_byte]; what is gathered.
        model_scales: scales, uint8; None where the format has none.
        amaxes: [tensors], float32; the largest magnitude of each whole tensor, if the format needs it.
    """

    def __init__(self, parameters: Sequence[OwnedParameter], options: GroupOptions, unit: str, index: int) -> None:
        recipe = options.mixed_precision_policy.recipe
        assert recipe is not None, "the group was chosen for it"
        self.format: WeightFormat = recipe.format
        self.has_amaxes = False
        super().__init__(parameters, options, unit, index)

    def _plan_layout(self, shapes: Sequence[torch.Size]) -> GroupLayout:
        atoms = [self.format.geometry(shape).atom for shape in shapes]
        return plan_layout(shapes, self._mesh.num_shards, atoms=atoms, alignment=self.format.alignment)

    def _make_weights(self, compute_dtype: torch.dtype) -> None:
        layout, full = self.layout, (Replicate(),) * self._mesh.ndim
        self._geometries = [self.format.geometry(slot.shape) for slot in layout.slots]
        self.amaxes = torch.zeros(len(layout.slots), device=self.options.device)
        self.full_weight = self._buffer("full_weight", full, compute_dtype, True)
        self._payload = self._plane("weight", _payload_layout(layout, self.format.elements_per_byte))
        self.model_weight = self._payload.resting
        self._planes, self._scales = [self._payload], None
        self._scale_pieces: list[range] = [range(0)] * len(layout.slots)
        self._scale_plan: ScalePlan | None = None
        if self.format.scale_bytes:
            self._scale_plan = plan_scales(layout, self._geometries)
            slots, self._scale_pieces = _scale_slots(self._scale_plan, layout, self.format.scale_bytes)
            shard_numel = self._scale_plan.shard_numel * self.format.scale_bytes
            self._scales = self._plane("scales", GroupLayout(slots, layout.num_shards, shard_numel))
            self._planes.append(self._scales)
        self._parts = list(self._own_parts())

    def _plane(self, what: str, layout: GroupLayout) -> _Plane:
        placements = self.options.placements.parameter
        resting = self._buffer(f"model_{what}", flatten(placements), torch.uint8, layout=layout)
        full = (Replicate(),) * self._mesh.ndim
        gathers = any(isinstance(at, Shard) for at in placements)
        return _Plane(
            resting, self._buffer(f"full_{what}_plane", full, torch.uint8, True, layout) if gathers else resting
        )

    def _own_parts(self) -> Iterator[_Part]:
        """Yield what this rank quantizes of each tensor of which it owns main weights."""
        placements = self.main_weight.placements
        shard, num_merged = self._mesh.position(placements)
        payload = self._payload.resting.own_part(placements)
        begin = self._payload.resting.layout.shard_range(shard, num_merged).start
        per_byte, scale_bytes = self.format.elements_per_byte, self.format.scale_bytes
        for index, slot in enumerate(self.layout.slots):
            owned = self.main_weight.owned(index)
            if owned.numel == 0:
                continue
            start = (slot.offset + owned.start) // per_byte - begin
            scales = payload[:0]
            if self._scale_plan is not None and self._scales is not None:
                assert num_merged == 1, "main weights are cut into all shards"
                part = self._scale_plan.parts[index][shard].shift(-shard * self._scale_plan.shard_numel)
                plane = self._scales.resting.own_part(placements)
                scales = plane[part.start * scale_bytes : part.stop * scale_bytes]
            yield _Part(
                index=index,
                start=owned.start,
                values=self.main_weight.pieces[index].view(-1),
                payload=payload[start : start + -(-owned.numel // per_byte)],
                scales=scales,
            )

    @property
    def buffers(self) -> tuple[DBuffer, ...]:
        """All buffers of weights and gradients, each once."""
        planes = (buffer for plane in self._planes for buffer in (plane.resting, plane.full))
        return tuple(dict.fromkeys((*super().buffers, *planes)))

    @property
    def _syncs_alone(self) -> bool:
        return super()._syncs_alone and not (self.format.needs_amax and self._mesh.axes)

    def mark_main_weight_written(self, is_certain: bool = False) -> None:
        """Note that main weights have changed; the next unshard quantizes them."""
        super().mark_main_weight_written(is_certain)
        self.has_amaxes = False

    def _refresh_model_weight(self) -> None:
        """Quantize this rank's main weights and gather what it needs to keep of the others'."""
        if self.format.needs_amax and not self.has_amaxes:
            context = self.live_context()
            find_amaxes([self] if context is None else context.parameter_groups())
        names = [plane.resting.name for plane in self._planes]
        report_access("quantize", reads=(self.main_weight.name,), writes=names)
        with torch.no_grad():
            for part in self._parts:
                self.format.quantize(
                    part.values,
                    self.layout.slots[part.index].shape,
                    part.payload,
                    part.scales,
                    amax=self._amax(part.index),
                    start=part.start,
                )
        for plane in self._planes:
            plane.resting.join(self.main_weight.placements)
        self.has_amaxes = False

    def _gather(self) -> None:
        """Gather the planes and make the compute weights from them."""
        for plane in self._planes:
            if plane.full is not plane.resting:
                plane.full.allocate()
                plane.resting.redistribute(plane.full)
        self._dequantize()
        for plane in reversed(self._planes):
            if plane.full is not plane.resting:
                plane.full.release()

    def _dequantize(self) -> None:
        names = [plane.full.name for plane in self._planes]
        report_access("dequantize", reads=names, writes=(self.full_weight.name,))
        with torch.no_grad():
            for index, slot in enumerate(self.layout.slots):
                if slot.numel:
                    self.format.dequantize(
                        self._payload.full.pieces[index],
                        self._gathered_scales(index),
                        slot.shape,
                        self.full_weight.pieces[index].view(-1),
                        amax=self._amax(index),
                    )

    def _gathered_scales(self, index: int) -> torch.Tensor:
        """Return the scales of a tensor, [scales * scale_bytes]; a copy where borders have cut them apart."""
        if self._scales is None:
            return self._payload.full.local[:0]
        pieces = [self._scales.full.pieces[number] for number in self._scale_pieces[index]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _amax(self, index: int) -> torch.Tensor | None:
        return self.amaxes[index] if self.format.needs_amax else None

    def local_amaxes(self) -> torch.Tensor:
        """Return the largest magnitudes among this rank's elements, [tensors], float32; 0 where it has none."""
        found = torch.zeros_like(self.amaxes)
        if self._parts:
            norms = torch._foreach_norm([part.values for part in self._parts], float("inf"))
            found[[part.index for part in self._parts]] = torch.stack(norms).to(found.dtype)
        return found


class KeptQuantizedGroup(SecondarilyShardedGroup, QuantizedGroup):
    """A quantized group of which subgroups of ranks keep the compute weights between forward and backward."""


@dataclass(frozen=True)
class _Plane:
    """Bytes of a group's weights at rest, placed like compute weights, and as a whole while these are made."""

    resting: DBuffer
    full: DBuffer


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one rank quantizes of one tensor: views of its main weights and of its part of the planes at rest."""

    index: int
    start: int
    values: torch.Tensor
    payload: torch.Tensor
    scales: torch.Tensor


def check_recipes(groups: Iterable[FsdpParameterGroup]) -> None:
    """Refuse recipes that no weight of a context follows.

    Raises:
        ValueError: all parameters of units with a recipe are vectors, embeddings, or kept by name.
    """
    asked = [group for group in groups if group.options.mixed_precision_policy.recipe is not None]
    if asked and not any(isinstance(group, QuantizedGroup) for group in asked):
        recipe = asked[0].options.mixed_precision_policy.recipe
        assert recipe is not None, "chosen for it"
        raise ValueError(
            f"MixedPrecisionPolicy.{recipe.name}: expected units with matrices that it does not keep, got "
            f"{[fqn for group in asked for fqn in group.fqns][:6]}, which stay as they are. Leave it out, or "
            "change the recipe's keep."
        )


def find_amaxes(groups: Iterable[FsdpParameterGroup]) -> None:
    """Let ranks agree on the largest magnitude of every tensor whose main weights have been written.

    One collective for all groups that are cut alike, per axis that cuts them; what has been written is the same on
    every rank. A tensor with a nan has a nan.

    Args:
        groups: of one context.
    """
    pending: dict[tuple[tuple[int, ...], int], list[QuantizedGroup]] = {}
    for group in groups:
        if isinstance(group, QuantizedGroup) and group.format.needs_amax and group.is_stale and not group.lacks_values:
            mesh = group.main_weight.mesh
            pending.setdefault((mesh.axes, id(mesh.device_mesh)), []).append(group)
    for alike in pending.values():
        report_access("amax", reads=[group.main_weight.name for group in alike])
        with torch.no_grad():
            amaxes = torch.cat([group.local_amaxes() for group in alike])
            mesh = alike[0].main_weight.mesh
            for process_group in map(mesh.group, mesh.axes):
                of_all = amaxes.new_empty(amaxes.numel() * process_group.size())
                collectives.all_gather(of_all, amaxes, process_group, what="largest magnitudes of quantized weights")
                # Not an all-reduce, whose maximum loses a nan on some backends.
                amaxes = of_all.view(process_group.size(), -1).amax(0)
            for group, part in zip(alike, torch.split(amaxes, [group.amaxes.numel() for group in alike]), strict=True):
                group.amaxes.copy_(part)
                group.has_amaxes = True


def _payload_layout(layout: GroupLayout, elements_per_byte: int) -> GroupLayout:
    """Return where the payload of each tensor lies, in bytes."""
    slots = tuple(
        TensorSlot((-(-slot.numel // elements_per_byte),), slot.offset // elements_per_byte) for slot in layout.slots
    )
    return GroupLayout(slots, layout.num_shards, layout.shard_numel // elements_per_byte)


def _scale_slots(plan: ScalePlan, layout: GroupLayout, scale_bytes: int) -> tuple[tuple[TensorSlot, ...], list[range]]:
    """Return the runs of all tensors' scales, in bytes, and which of them are each tensor's."""
    slots: list[TensorSlot] = []
    pieces = []
    for index in range(len(layout.slots)):
        runs = plan.runs(index)
        pieces.append(range(len(slots), len(slots) + len(runs)))
        slots += [TensorSlot((run.numel * scale_bytes,), run.start * scale_bytes) for run in runs]
    return tuple(slots), pieces
