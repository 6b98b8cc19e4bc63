# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`TransformerEngineGroup`: primary weights of TransformerEngine, whose gathered planes modules compute with.

What classes and attributes there are is said in te_weights.py, how bytes are made in te_formats.py.

[Note: the life of a primary weight]
As that of any quantized weight ([Note: the life of a quantized weight] in quantized_group.py), but that nothing is made
from the gathered planes: they are installed in the parameter that the module holds while it computes, as views. Values
are rounded to the parameter's nominal dtype before they are quantized, so that a run has the numbers of one whose
modules quantize gathered weights of that dtype.

Forward gathers what forward reads. Where backward reads a plane of its own, backward gathers that one, and a forward
that is recomputed in it gathers the other besides, just before the module that needs it. The transposes that modules
make for backward are dropped when the unit comes to rest, unless the policy keeps them until the weights change.

Scales lie in their plane without padding. Where TransformerEngine reads something else than one run of it that begins
at a multiple of 16 bytes, they are copied to where they lie as it needs them, in a buffer of their own. A scale of a
whole tensor lies at such an address, too: cuBLAS refuses products by scales that lie elsewhere.

Delayed scaling is TransformerEngine's: the factor is the one that its quantizer has when weights are quantized, and the
largest magnitude, of all ranks, goes to where its kernels note it. After a load a factor that is still 1, as in a
module that has not run yet, is replaced by the weight's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from .backward_task import is_in_backward
from .compiling import untraced
from .dbuffer import DBuffer
from .device import report_access
from .group_options import GroupOptions, OwnedParameter
from .layout import GroupLayout, TensorSlot
from .parameter_group import FsdpParameterGroup
from .quantization import WeightFormat
from .quantized_group import QuantizedGroup
from .te_formats import factors_of, inverses_of
from .te_weights import (
    PrimaryWeight,
    ScaleShape,
    drop_made,
    leave_transposes_to_backward,
    quantizer_amax,
    quantizer_scale,
    requantize_in_backward,
    uninstall,
)
from .weight_planes import Part, WeightPlanes

_ALIGNMENT = 16
"""Bytes: what addresses of scales are multiples of."""
_SLOT = 128
"""Bytes: what copied scales, and those of whole tensors, begin at multiples of."""


class TransformerEngineGroup(QuantizedGroup):
    """A parameter group of TransformerEngine's primary weights of one kind; see [Note: the life of a primary weight].

    Args:
        parameters: as for `FsdpParameterGroup`; each has a `primary`.
        options: likewise.
        unit: likewise.
        index: likewise.

    Attributes:
        kind: what the weights are.
        full_weight: payload, uint8, [global_numel / elements_per_byte]; what forward reads.
        factors: [tensors], float32; by what tensors are multiplied, where it is one number.
        inverses: [tensors], float32; what their elements are multiplied by.
    """

    def __init__(self, parameters: Sequence[OwnedParameter], options: GroupOptions, unit: str, index: int) -> None:
        self._primaries: list[PrimaryWeight] = [owned.primary for owned in parameters if owned.primary is not None]
        self.kind = self._primaries[0].kind
        self.keeps_transposes = bool(self.kind.made)
        self._is_initial, self._is_stepped = True, False
        super().__init__(parameters, options, unit, index)

    def _choose_format(self, parameters: Sequence[OwnedParameter], options: GroupOptions) -> WeightFormat:
        return self.kind.forward.form

    def _make_weights(self, compute_dtype: torch.dtype) -> None:
        self._nominal_dtype = compute_dtype
        kind = self.kind
        formats: dict[str, WeightFormat] = {"": kind.forward.form}
        if kind.backward is not None:
            formats["backward_"] = kind.backward.form
        self._make_planes(formats)
        self.full_weight = self.plane_sets[0].payload.full
        self.amaxes, self.factors, self.inverses = (_one_each(self.amaxes) for _ in range(3))
        self._directions = [kind.forward, *([] if kind.backward is None else [kind.backward])]
        self._scales = [
            _ScalePlane(planes, direction.scales, self.layout, self._buffer, prefix)
            if direction.scales is not None
            else None
            for planes, direction, prefix in zip(self.plane_sets, self._directions, formats, strict=True)
        ]

    def _make_parameters(self, originals: Sequence[nn.Parameter]) -> None:
        self._made = [primary.unsharded() for primary in self._primaries]
        super()._make_parameters(originals)
        for planes, scales, direction in zip(self.plane_sets, self._scales, self._directions, strict=True):
            shapes = [slot.shape for slot in self.layout.slots]
            planes.payload.full.followers = [
                _Installed(parameter, direction.data, direction.data_shape(shape))
                for parameter, shape in zip(self._made, shapes, strict=True)
            ]
            if scales is not None:
                scales.follow(self._made, direction.scale_attribute)
        if self.kind.forward.scales is None:
            for parameter, inverse in zip(self._made, self.inverses, strict=True):
                setattr(parameter, self.kind.forward.scale_attribute, inverse.view(1))
        if self.kind.amax_attribute is not None:
            for parameter, amax in zip(self._made, self.amaxes, strict=True):
                setattr(parameter, self.kind.amax_attribute, amax.view(1))
        # Where weights are whole at rest, for good.
        for number, planes in enumerate(self.plane_sets):
            if number == 0 or not planes.payload.gathers:
                self._install(number)
        del self._made, self._primaries

    def _full_tensor(self, index: int) -> torch.Tensor:
        return self._made[index]

    @property
    def buffers(self) -> tuple[DBuffer, ...]:
        """All buffers of weights and gradients, each once."""
        copies = [scales.copies for scales in self._scales if scales is not None and scales.copies is not None]
        return tuple(dict.fromkeys((*super().buffers, *copies)))

    # --- quantization ---------------------------------------------------------------------------------------------

    def mark_main_weight_written(self, is_certain: bool = False) -> None:
        """Note that main weights have changed; the next unshard quantizes them."""
        super().mark_main_weight_written(is_certain)
        self._is_initial = False

    def begin_step(self) -> None:
        """Note that an optimizer reads main gradients and writes main weights now."""
        super().begin_step()
        self._is_stepped = True

    def _values_of(self, part: Part) -> torch.Tensor:
        return part.values.to(self._nominal_dtype)

    def local_amaxes(self) -> torch.Tensor:
        """Return the largest magnitudes among this rank's elements, [tensors], float32, rounded as elements are."""
        return super().local_amaxes().to(self._nominal_dtype).float()

    def _amax(self, index: int) -> torch.Tensor | None:
        return self.factors[index] if self.kind.forward.scales is None else super()._amax(index)

    def _refresh_model_weight(self) -> None:
        """Quantize this rank's main weights, and let what modules have made of earlier ones go."""
        super()._refresh_model_weight()
        for parameter in self.unsharded_parameters:
            leave_transposes_to_backward(parameter)
            drop_made(self.kind, parameter)
        for scales in self._scales:
            if scales is not None and not self.gathers:
                scales.fill()
        self._is_initial = self._is_stepped = False

    def _find_factors(self) -> None:
        if self.kind.forward.scales is not None:
            return
        own = factors_of(self.amaxes)
        if self.kind.is_delayed:
            given = torch.stack([quantizer_scale(parameter) for parameter in self.unsharded_parameters])
            is_loaded = not self._is_stepped and (not self._is_initial or self.lent.is_written)
            own = torch.where(given == 1, own, given) if is_loaded else given
            noted = [quantizer_amax(parameter) for parameter in self.unsharded_parameters]
            torch._foreach_maximum_(noted, list(self.amaxes))
        self.factors.copy_(own)
        self.inverses.copy_(inverses_of(self.factors, self.amaxes))

    # --- gathers --------------------------------------------------------------------------------------------------

    @property
    def _needed(self) -> int:
        """Which of the plane sets is needed at this point of a step."""
        return 1 if len(self.plane_sets) > 1 and is_in_backward() else 0

    @property
    def is_incomplete(self) -> bool:
        """Whether planes are missing that this point of a step needs, while others may be there."""
        return not self.plane_sets[self._needed].is_gathered

    def unshard(self) -> None:
        """Gather what forward reads, or in backward what backward reads, unless it is there already."""
        was_stale = self.is_stale
        self.sync_model_weight()
        if not self.gathers:
            return
        if was_stale or not any(planes.is_gathered for planes in self.plane_sets):
            wanted = {self._needed, *(number for number, planes in enumerate(self.plane_sets) if planes.is_gathered)}
        else:
            wanted = {self._needed} if self.is_incomplete else set()
        for number in sorted(wanted):
            self._gather_planes(number)

    def _gather_planes(self, number: int) -> None:
        for other, planes in enumerate(self.plane_sets):
            if not planes.is_gathered and other != number:
                for parameter in self.unsharded_parameters:
                    uninstall(self._directions[other], parameter)
        self.plane_sets[number].gather()
        scales = self._scales[number]
        if scales is not None:
            scales.fill()
        self._install(number)

    def _install(self, number: int) -> None:
        """Give the parameters their views of a plane set."""
        planes, scales = self.plane_sets[number], self._scales[number]
        for follower, piece in zip(planes.payload.full.followers, planes.payload.full.pieces, strict=True):
            follower.data = piece
        if scales is not None:
            scales.install()

    def release_full_weight(self) -> None:
        """Free the gathered planes, and what modules have made of them unless it is to be kept."""
        if not self.options.mixed_precision_policy.keep_fp8_transpose_cache:
            for parameter in self.unsharded_parameters:
                drop_made(self.kind, parameter)
        if self.gathers:
            for planes, scales in zip(self.plane_sets, self._scales, strict=True):
                planes.release()
                if scales is not None:
                    scales.release()

    @property
    def has_forward_planes(self) -> bool:
        """Whether a forward could run on what is gathered."""
        return self.plane_sets[0].is_gathered

    def ensure_forward_planes(self) -> None:
        """Gather what forward reads besides what is there, on the all-gather stream."""
        context: Any = self.live_context()
        stream = context.allgather_stream
        stream.wait_stream(context.current_stream())
        with stream:
            self._gather_planes(0)
            event = stream.record_event()
        context.current_stream().wait_event(event)


def _one_each(like: torch.Tensor) -> torch.Tensor:
    """Return ones, [tensors], float32; a view whose elements lie `_SLOT` bytes apart."""
    return like.new_ones(like.numel(), _SLOT // like.itemsize)[:, 0]


class _ScalePlane:
    """The gathered scales of a group in the form in which modules read them.

    Args:
        planes: have the scales.
        shape: how modules read them.
        layout: of the weights.
        make: makes a buffer; see `WeightPlanes`.
        prefix: likewise.

    Attributes:
        copies: where they lie so, if they do not do so in their plane.
    """

    def __init__(
        self,
        planes: WeightPlanes,
        shape: ScaleShape,
        layout: GroupLayout,
        make: Callable[..., DBuffer],
        prefix: str,
    ) -> None:
        self._planes, self._shape = planes, shape
        self._shapes = [slot.shape for slot in layout.slots]
        self.copies: DBuffer | None = None
        scales = planes.scales
        assert scales is not None, "formats with blocks have scales"
        is_plain = all(shape.logical(of) == shape.padded(of) for of in self._shapes) and planes.has_whole_scales
        if is_plain and all(slot.offset % _ALIGNMENT == 0 for slot in scales.full.layout.slots):
            self._source = scales.full
            return
        slots, offset = [], 0
        for of in self._shapes:
            rows, columns = shape.padded(of)
            slots.append(TensorSlot((rows * columns * shape.dtype.itemsize,), offset))
            offset += -(-slots[-1].numel // _SLOT) * _SLOT
        num_shards, gathers = layout.num_shards, scales.gathers
        self.copies = self._source = make(
            f"{'full' if gathers else 'model'}_{prefix}padded_scales",
            (Replicate(),) * scales.full.mesh.ndim,
            torch.uint8,
            gathers,
            GroupLayout(tuple(slots), num_shards, -(-max(offset, 1) // num_shards)),
        )

    def follow(self, parameters: Sequence[Any], attribute: str) -> None:
        """Let parameters have the scales as an attribute."""
        self._source.followers = [
            _Installed(parameter, attribute, self._shape.padded(of), self._shape.dtype)
            for parameter, of in zip(parameters, self._shapes, strict=True)
        ]

    def fill(self) -> None:
        """Bring gathered scales into this form; on the stream of the gather."""
        copies = self.copies
        if copies is None:
            return
        if not copies.has_storage:
            copies.allocate()
        scales = self._planes.scales
        assert scales is not None, "formats with blocks have scales"
        report_access("copy", reads=(scales.full.name,), writes=(copies.name,))
        copies.local.zero_()
        for index, of in enumerate(self._shapes):
            rows, columns = self._shape.logical(of)
            logical = self._planes.gathered_scales(index).view(self._shape.dtype).view(rows, columns)
            padded = copies.pieces[index].view(self._shape.dtype).view(self._shape.padded(of))
            padded[: rows * self._shape.repeat, :columns].copy_(logical.repeat_interleave(self._shape.repeat, 0))

    def install(self) -> None:
        """Give the parameters their views."""
        for follower, piece in zip(self._source.followers, self._source.pieces, strict=True):
            follower.data = piece

    def release(self) -> None:
        """Free the copies of what has been gathered."""
        if self.copies is not None and self.copies.is_transient and self.copies.has_storage:
            self.copies.release()


class _Installed:
    """An attribute of a parameter that follows a piece of a buffer, wherever that moves."""

    def __init__(self, parameter: Any, attribute: str, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> None:
        self._parameter, self._attribute = parameter, attribute
        self._shape, self._dtype = tuple(shape), dtype

    @property
    def data(self) -> torch.Tensor:
        """The attribute."""
        value: torch.Tensor = getattr(self._parameter, self._attribute)
        return value

    @data.setter
    def data(self, piece: torch.Tensor) -> None:
        setattr(self._parameter, self._attribute, piece.data.view(self._dtype).view(self._shape))


class _ForwardPlanes:
    """Forward pre-hook of a module that may be run again in backward, for which other planes have been gathered."""

    def __init__(self, group: TransformerEngineGroup) -> None:
        self._group = weakref.ref(group)

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        group = self._group()
        if group is not None and is_in_backward() and not group.has_forward_planes:
            group.ensure_forward_planes()


def prepare_modules(modules: Iterable[nn.Module], groups: Iterable[FsdpParameterGroup]) -> None:
    """Let TransformerEngine's modules of a unit know of gathers.

    Args:
        modules: the unit's own.
        groups: likewise.
    """
    groups = list(groups)
    for module in modules:
        own = [group for group in groups if _is_held(module, group)]
        primary = [group for group in own if isinstance(group, TransformerEngineGroup)]
        for group in primary:
            if len(group.plane_sets) > 1 and group.gathers:
                module.register_forward_pre_hook(_ForwardPlanes(group))
        if not primary and any(group.gathers for group in own):
            requantize_in_backward(module)


def _is_held(module: nn.Module, group: FsdpParameterGroup) -> bool:
    """Return whether a module holds parameters of a group."""
    return any(held is module._parameters for places in group._places for held, _ in places)
