# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`WeightPlanes`: the bytes of a group's weights in one number format, at rest and gathered.

It quantizes and gathers when it is told to. What becomes of gathered bytes is the group's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .dbuffer import DBuffer
from .device import report_access
from .layout import GroupLayout, TensorSlot
from .placement import flatten
from .quantization import BlockGeometry, WeightFormat
from .scale_plan import ScalePlan, plan_scales


@dataclass(frozen=True)
class Plane:
    """Bytes of a group's weights at rest, placed like compute weights, and as a whole while these are in use."""

    resting: DBuffer
    full: DBuffer

    @property
    def gathers(self) -> bool:
        """Whether the whole is gathered, rather than at rest on every rank."""
        return self.full is not self.resting


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank quantizes at once: views of its main weights and of its part of the planes at rest.

    Attributes:
        index: which tensor's; any where tensors are one vector.
        shape: of the whole tensor, or of the vector.
        start: which of its elements `values` begins with.
        values: [n].
        payload: of these.
        scales: of these.
    """

    index: int
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    payload: torch.Tensor
    scales: torch.Tensor


class WeightPlanes:
    """Payload and scales of a group's weights; see [Note: the life of a quantized weight] in quantized_group.py.

    Args:
        form: what weights are quantized to; its blocks are whole in the layout of the main weights.
        main_weight: [local_numel]; what is quantized.
        placements: public placements of compute weights.
        make: makes a buffer of a kind, with placements, a dtype, whether it is transient, and a layout.
        prefix: before the kinds of buffers, where a group has several planes.

    Attributes:
        format: as given.
        payload: uint8, [local_numel / elements_per_byte] at rest.
        scales: uint8; None where the format has none.
        planes: payload, and scales if there are any.
        parts: what this rank quantizes of each tensor of which it owns main weights, or at once.
        is_vector: whether the tensors are one long vector to the format: their blocks are runs of as many elements with
            a scale each, which lie in proportion to them, so that one call serves all.
    """

    def __init__(
        self,
        form: WeightFormat,
        main_weight: DBuffer,
        placements: Sequence[Placement],
        make: Callable[..., DBuffer],
        prefix: str = "",
    ) -> None:
        self.format, self._main = form, main_weight
        layout = main_weight.layout
        self._slots = layout.slots
        geometries = [form.geometry(slot.shape) for slot in layout.slots]
        self.payload = _plane(f"{prefix}weight", _payload_layout(layout, form.elements_per_byte), placements, make)
        self.scales: Plane | None = None
        self._scale_pieces: list[range] = [range(0)] * len(layout.slots)
        self._scale_plan: ScalePlan | None = None
        if form.scale_bytes:
            self._scale_plan = plan_scales(layout, geometries)
            slots, self._scale_pieces = _scale_slots(self._scale_plan, layout, form.scale_bytes)
            shard_numel = self._scale_plan.shard_numel * form.scale_bytes
            self.scales = _plane(
                f"{prefix}scales", GroupLayout(slots, layout.num_shards, shard_numel), placements, make
            )
        self.planes = [self.payload] if self.scales is None else [self.payload, self.scales]
        self.is_vector = self._forms_vector()
        # Stochastic rounding goes by an element's index in its tensor.
        is_nearest = getattr(form, "rounding", "nearest") == "nearest"
        self.parts = [self._whole_part()] if self.is_vector and is_nearest else list(self._own_parts())

    def _forms_vector(self) -> bool:
        if self.format.needs_amax or self._scale_plan is None or self._scale_plan.ratio is None:
            return False
        ratio, numel = self._scale_plan.ratio, self._main.layout.global_numel
        is_run = self.format.geometry((numel,)) == BlockGeometry(ratio, 1, numel // ratio)
        # A last, shorter block would have elements of what lies behind it.
        return is_run and all(slot.numel % ratio == 0 for slot in self._slots)

    def _whole_part(self) -> Part:
        placements, local = self._main.placements, self._main.local
        assert self.scales is not None, "a vector has scales"
        payload, scales = (plane.resting.own_part(placements) for plane in self.planes)
        return Part(index=0, shape=tuple(local.shape), start=0, values=local, payload=payload, scales=scales)

    def _own_parts(self) -> Iterator[Part]:
        placements, layout = self._main.placements, self._main.layout
        shard, num_merged = self._main.mesh.position(placements)
        payload = self.payload.resting.own_part(placements)
        begin = self.payload.resting.layout.shard_range(shard, num_merged).start
        per_byte, scale_bytes = self.format.elements_per_byte, self.format.scale_bytes
        for index, slot in enumerate(layout.slots):
            owned = self._main.owned(index)
            if owned.numel == 0:
                continue
            start = (slot.offset + owned.start) // per_byte - begin
            scales = payload[:0]
            if self._scale_plan is not None and self.scales is not None:
                assert num_merged == 1, "main weights are cut into all shards"
                part = self._scale_plan.parts[index][shard].shift(-shard * self._scale_plan.shard_numel)
                plane = self.scales.resting.own_part(placements)
                scales = plane[part.start * scale_bytes : part.stop * scale_bytes]
            yield Part(
                index=index,
                shape=slot.shape,
                start=owned.start,
                values=self._main.pieces[index].view(-1),
                payload=payload[start : start + -(-owned.numel // per_byte)],
                scales=scales,
            )

    @property
    def buffers(self) -> tuple[DBuffer, ...]:
        """All buffers, each once."""
        return tuple(dict.fromkeys(buffer for plane in self.planes for buffer in (plane.resting, plane.full)))

    @property
    def is_gathered(self) -> bool:
        """Whether the whole can be read."""
        return self.payload.full.has_storage

    def quantize(
        self,
        values: Callable[[Part], torch.Tensor],
        amax: Callable[[int], torch.Tensor | None],
    ) -> None:
        """Quantize this rank's main weights, and gather what it needs to keep of the others'; on the current stream.

        Args:
            values: what to quantize of a part, [n].
            amax: what the format is told of the whole tensor of this index.
        """
        names = [plane.resting.name for plane in self.planes]
        report_access("quantize", reads=(self._main.name,), writes=names)
        with torch.no_grad():
            for part in self.parts:
                self.format.quantize(
                    values(part),
                    part.shape,
                    part.payload,
                    part.scales,
                    amax=amax(part.index),
                    start=part.start,
                )
        for plane in self.planes:
            plane.resting.join(self._main.placements)

    def gather(self) -> None:
        """Have the whole on this rank; on the current stream."""
        for plane in self.planes:
            if plane.gathers:
                if not plane.full.has_storage:
                    plane.full.allocate()
                plane.resting.redistribute(plane.full)

    def release(self) -> None:
        """Free what has been gathered; on the current stream."""
        for plane in reversed(self.planes):
            if plane.gathers and plane.full.has_storage:
                plane.full.release()

    def dequantize(self, out: DBuffer, amax: Callable[[int], torch.Tensor | None]) -> None:
        """Make compute weights from the gathered planes."""
        report_access("dequantize", reads=[plane.full.name for plane in self.planes], writes=(out.name,))
        with torch.no_grad():
            if self.is_vector and self.scales is not None:
                planes = self.payload.full.local, self.scales.full.local
                self.format.dequantize(*planes, tuple(out.local.shape), out.local)
                return
            for index, slot in enumerate(self._slots):
                if slot.numel:
                    self.format.dequantize(
                        self.payload.full.pieces[index],
                        self.gathered_scales(index),
                        slot.shape,
                        out.pieces[index].view(-1),
                        amax=amax(index),
                    )

    def gathered_scales(self, index: int) -> torch.Tensor:
        """Return the scales of a tensor, [scales * scale_bytes]; a copy where borders have cut them apart."""
        if self.scales is None:
            return self.payload.full.local[:0]
        pieces = [self.scales.full.pieces[number] for number in self._scale_pieces[index]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @property
    def has_whole_scales(self) -> bool:
        """Whether the gathered scales of every tensor are one run, whose number is that of the tensor."""
        return self.scales is not None and all(len(pieces) == 1 for pieces in self._scale_pieces)


def _plane(what: str, layout: GroupLayout, placements: Sequence[Placement], make: Callable[..., DBuffer]) -> Plane:
    resting = make(f"model_{what}", flatten(placements), torch.uint8, layout=layout)
    if not any(isinstance(at, Shard) for at in placements):
        return Plane(resting, resting)
    full = (Replicate(),) * resting.mesh.ndim
    return Plane(resting, make(f"full_{what}_plane", full, torch.uint8, True, layout))


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
