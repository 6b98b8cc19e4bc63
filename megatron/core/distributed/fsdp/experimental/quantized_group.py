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

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import Replicate

from . import collectives
from .dbuffer import DBuffer
from .device import report_access
from .group_options import GroupOptions, OwnedParameter
from .layout import GroupLayout, plan_layout
from .parameter_group import FsdpParameterGroup
from .quantization import WeightFormat
from .secondary_shard import SecondarilyShardedGroup
from .weight_planes import Part, WeightPlanes


class QuantizedGroup(FsdpParameterGroup):
    """A parameter group whose compute weights are made from low-bit planes; see [Note: the life of a quantized weight].

    Args:
        parameters: as for `FsdpParameterGroup`.
        options: likewise; its policy has a recipe.
        unit: likewise.
        index: likewise.

    Attributes:
        format: what weights are quantized to.
        plane_sets: the bytes of the weights in each format that they are kept in.
        model_weight: payload, uint8, [local_numel / elements_per_byte]; what is gathered.
        amaxes: [tensors], float32; the largest magnitude of each whole tensor, if the format needs it.
        keeps_transposes: whether a policy's keep_fp8_transpose_cache has an effect.
    """

    keeps_transposes = False

    def __init__(self, parameters: Sequence[OwnedParameter], options: GroupOptions, unit: str, index: int) -> None:
        self.format: WeightFormat = self._choose_format(parameters, options)
        self.has_amaxes = False
        super().__init__(parameters, options, unit, index)

    def _choose_format(self, parameters: Sequence[OwnedParameter], options: GroupOptions) -> WeightFormat:
        recipe = options.mixed_precision_policy.recipe
        assert recipe is not None, "the group was chosen for it"
        return recipe.format

    def _plan_layout(self, shapes: Sequence[torch.Size]) -> GroupLayout:
        if self.options.placements.tensor_atomic:
            raise NotImplementedError(
                "Placements.tensor_atomic: expected False for weights in low bits, which are cut between their blocks, "
                "got True. Leave out one of the two."
            )
        atoms = [self.format.geometry(shape).atom for shape in shapes]
        return plan_layout(shapes, self._mesh.num_shards, atoms=atoms, alignment=self.format.alignment)

    @property
    def atoms(self) -> list[int]:
        """Elements of each tensor that no shard may cut."""
        return [self.format.geometry(slot.shape).atom for slot in self.layout.slots]

    @property
    def padded_share(self) -> float:
        """Bytes of the gathered planes, over those of the weights in their compute dtype without padding."""
        num_bytes = sum(plane.full.layout.global_numel for plane in self.plane_sets[0].planes)
        return num_bytes / max(1, self.numel * self.full_weight.dtype.itemsize)

    def _make_weights(self, compute_dtype: torch.dtype) -> None:
        self.full_weight = self._buffer("full_weight", (Replicate(),) * self._mesh.ndim, compute_dtype, True)
        self._make_planes({"": self.format})

    def _make_planes(self, formats: Mapping[str, WeightFormat]) -> None:
        """Make planes of these formats; the keys are prefixes of their names."""
        placements = self.options.placements.parameter
        self.amaxes = torch.zeros(len(self.layout.slots), dtype=torch.float32, device=self.options.device)
        self.plane_sets = [
            WeightPlanes(form, self.main_weight, placements, self._buffer, prefix) for prefix, form in formats.items()
        ]
        self.model_weight = self.plane_sets[0].payload.resting
        owned = [part.index for part in self.plane_sets[0].parts]
        self._owned = torch.tensor(owned, dtype=torch.int64, device=self.options.device)

    @property
    def buffers(self) -> tuple[DBuffer, ...]:
        """All buffers of weights and gradients, each once."""
        planes = (buffer for planes in self.plane_sets for buffer in planes.buffers)
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
        # What has been written through a lent tensor may have been written after another unit had asked for all.
        if self.format.needs_amax and (not self.has_amaxes or self.lent.is_written):
            context = self.live_context()
            find_amaxes([self] if context is None else context.parameter_groups())
        with torch.no_grad():
            self._find_factors()
        for planes in self.plane_sets:
            planes.quantize(self._values_of, self._amax)
        self.has_amaxes = False

    def _find_factors(self) -> None:
        """Find what follows from the largest magnitudes of tensors; for subclasses."""

    def _values_of(self, part: Part) -> torch.Tensor:
        return part.values

    def _gather(self) -> None:
        """Gather the planes and make the compute weights from them."""
        (planes,) = self.plane_sets
        planes.gather()
        planes.dequantize(self.full_weight, self._amax)
        planes.release()

    def _amax(self, index: int) -> torch.Tensor | None:
        return self.amaxes[index] if self.format.needs_amax else None

    def local_amaxes(self) -> torch.Tensor:
        """Return the largest magnitudes among this rank's elements, [tensors], float32; 0 where it has none."""
        found = torch.zeros_like(self.amaxes)
        parts = self.plane_sets[0].parts
        if parts:
            norms = torch._foreach_norm([part.values for part in parts], float("inf"))
            found.index_copy_(0, self._owned, torch.stack(norms).to(found.dtype))
        return found


class KeptQuantizedGroup(SecondarilyShardedGroup, QuantizedGroup):
    """A quantized group of which subgroups of ranks keep the compute weights between forward and backward."""


def check_recipes(groups: Sequence[FsdpParameterGroup]) -> None:
    """Refuse recipes that no weight of a context follows, and transposes to keep that nobody makes.

    Raises:
        ValueError: all parameters of units with a recipe are vectors, embeddings, or kept by name; or no weight is one
            of those that modules transpose.
    """
    keeping = [group for group in groups if group.options.mixed_precision_policy.keep_fp8_transpose_cache]
    if keeping and not any(isinstance(group, QuantizedGroup) and group.keeps_transposes for group in keeping):
        raise ValueError(
            "MixedPrecisionPolicy.keep_fp8_transpose_cache: expected TransformerEngine's primary weights that are "
            f"transposed for backward, got none in {[group.name for group in keeping][:6]}. Leave it out."
        )
    asked = [group for group in groups if group.options.mixed_precision_policy.recipe is not None]
    if asked and not any(isinstance(group, QuantizedGroup) for group in asked):
        recipe = asked[0].options.mixed_precision_policy.recipe
        assert recipe is not None, "chosen for it"
        raise ValueError(
            f"MixedPrecisionPolicy.{recipe.name}: expected units with matrices that it does not keep, got "
            f"{[fqn for group in asked for fqn in group.fqns][:6]}, which stay as they are. Leave it out, or "
            "change the recipe's keep."
        )
    _warn_of_padding([group for group in groups if isinstance(group, QuantizedGroup)])


def _warn_of_padding(groups: Sequence[QuantizedGroup]) -> None:
    """Say where more bytes travel than without a recipe, since large blocks leave gaps in small shards."""
    worst, group = max(((group.padded_share, group) for group in groups), key=lambda pair: pair[0], default=(0.0, None))
    if group is not None and worst > 1:
        warnings.warn(
            f"low-bit weights of {group.name}: expected fewer bytes than in {group.full_weight.dtype}, got "
            f"{worst:.2f} times as many, since {group.format.name} keeps {max(group.atoms)} elements together in "
            f"{group.layout.num_shards} shards. Use a recipe with smaller blocks, or larger units.",
            stacklevel=2,
        )


def find_amaxes(groups: Iterable[FsdpParameterGroup]) -> None:
    """Let ranks agree on the largest magnitude of every tensor whose main weights have been written.

    One collective for all groups that are cut alike, per axis that cuts them; what has been written is the same on
    every rank. A tensor with a nan has a nan.

    Args:
        groups: of one context.
    """
    pending: dict[tuple[str, ...], list[QuantizedGroup]] = {}
    for group in groups:
        if isinstance(group, QuantizedGroup) and group.format.needs_amax and group.is_stale and not group.lacks_values:
            mesh = group.main_weight.mesh
            pending.setdefault(tuple(mesh.group(axis).group_name for axis in mesh.axes), []).append(group)
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
