# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a user may choose: where states lie, in which dtypes, and how far ahead to communicate.

Frozen values only. Nothing here acts; a choice without a meaning is refused when the value is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .recipes import Fp8Recipe, Mxfp8Recipe, Nvfp4Recipe, QuantizationRecipe, choose_recipe

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron's names for what the inner data-parallel axis shards: nothing, ZeRO-1, ZeRO-2, ZeRO-3."""

OUTER_STRATEGIES = ("no_shard", "optim")
"""What the outer axis of a two-axis mesh shards: nothing (HSDP) or the optimizer state (HFSDP)."""


_STATES = ("parameter", "gradient", "optimizer")


@dataclass(frozen=True)
class Placements:
    """Where compute weights, accumulating gradients and main weights lie on the data-parallel mesh axes.

    Everything else follows: weights are gathered before each use over the axes that shard them, gradients reduced in
    every microbatch over those that shard them. Over an axis that shards the optimizer only, gradients are reduced, and
    weights gathered, once per optimizer step.

    Attributes:
        dp_axes: names or indices of the mesh axes, outer to inner.
        parameter: placement of the compute weights between uses, one per axis: `Shard(0)` or `Replicate()`.
        gradient: placement of gradients while microbatches accumulate, one per axis; `Replicate()` means that each rank
            keeps its own sum over them.
        optimizer: placement of the main weights, the finished gradients and the optimizer state, one per axis.
        tensor_atomic: let each tensor lie whole in one shard, at the price of padding: every shard is as large as the
            one with most. Matrix optimizers have little to send then; ``layout --report`` says what is padded.
    """

    dp_axes: tuple[str | int, ...]
    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]
    tensor_atomic: bool = False

    def __post_init__(self) -> None:
        if self.tensor_atomic and not self._sharded_axes("optimizer"):
            raise ValueError(
                "Placements.tensor_atomic: expected an axis that shards the optimizer, got True with whole weights on "
                "every rank. Leave it out."
            )
        for field in _STATES:
            value = getattr(self, field)
            if len(value) != len(self.dp_axes) or any(
                item != Shard(0) and not isinstance(item, Replicate) for item in value
            ):
                raise ValueError(
                    f"Placements.{field}: expected one Shard(0) or Replicate() for each of the axes "
                    f"{self.dp_axes}, got {value}. Use Placements.from_strategy for the named strategies."
                )
        for name, axis in ((name, axis) for name in ("parameter", "gradient") for axis in range(len(self.dp_axes))):
            if getattr(self, name)[axis] == Shard(0) and self.optimizer[axis] != Shard(0):
                raise ValueError(
                    f"Placements: expected axis {self.dp_axes[axis]} to shard the optimizer as it shards the {name}, "
                    f"got optimizer {self.optimizer[axis]}. Each rank would update whole weights, for which it needs "
                    f"whole gradients and keeps whole main weights: replicate the {name}, too, or shard the optimizer."
                )
        weights, gradients = self._sharded_axes("parameter"), self._sharded_axes("gradient")
        if not (weights <= gradients or gradients <= weights):
            raise ValueError(
                "Placements: expected the axes that shard the parameter among those that shard the gradient, or the "
                f"other way round, got {sorted(weights)} and {sorted(gradients)}. No order of shards makes both runs "
                "of one buffer: shard one of them over more axes."
            )

    def _sharded_axes(self, name: str) -> set[int]:
        return {axis for axis, at in enumerate(getattr(self, name)) if at == Shard(0)}

    @property
    def shard_axes(self) -> tuple[int, ...]:
        """Indices of the axes that shard anything, most significant first.

        Those that shard most come first, so that what fewer axes cut is a run of what more axes cut; the innermost
        first among equals.
        """
        count = [sum(axis in self._sharded_axes(name) for name in _STATES) for axis in range(len(self.dp_axes))]
        return tuple(sorted(self._sharded_axes("optimizer"), key=lambda axis: (-count[axis], -axis)))

    @classmethod
    def from_strategy(
        cls,
        strategy: str,
        *,
        outer: str | None = None,
        dp_axes: Sequence[str | int] | None = None,
        tensor_atomic: bool = False,
    ) -> Placements:
        """Return the placements of a named strategy.

        Args:
            strategy: what the inner axis shards, one of `STRATEGIES`.
            outer: what the outer axis shards, one of `OUTER_STRATEGIES`; None for a mesh of one axis.
            dp_axes: the mesh axes, outer to inner; None means the first one or two.
            tensor_atomic: as in the result.

        Raises:
            ValueError: an unknown name, axes that do not fit `outer`, or `tensor_atomic` where nothing is sharded.
        """
        num_axes = 1 if outer is None else 2
        axes = tuple(range(num_axes)) if dp_axes is None else tuple(dp_axes)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected one of {STRATEGIES}, got {strategy!r}.")
        if outer is not None and outer not in OUTER_STRATEGIES:
            raise ValueError(f"outer strategy: expected one of {OUTER_STRATEGIES}, got {outer!r}.")
        if len(axes) != num_axes:
            raise ValueError(
                f"dp_axes: expected {num_axes} axes for outer={outer!r}, got {axes}. "
                "Give `outer` exactly when the mesh has an outer data-parallel axis."
            )
        level = STRATEGIES.index(strategy)
        inner = {3: level >= 3, 2: level >= 2, 1: level >= 1}
        heads: tuple[Placement, ...] = () if outer is None else (Replicate(),)
        outer_state: tuple[Placement, ...] = (Shard(0),) if outer == "optim" else heads

        def place(shards: bool) -> Placement:
            return Shard(0) if shards else Replicate()

        return cls(
            axes,
            (*heads, place(inner[3])),
            (*heads, place(inner[2])),
            (*outer_state, place(inner[1])),
            tensor_atomic,
        )


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of what the runtime keeps and sends; the compute dtype is the dtype of the module's parameters.

    With `fp8`, `mxfp8` or `nvfp4` weights rest and travel in that format, and the compute weights are made from it
    after each gather; see docs/precision.md.

    Attributes:
        main_params_dtype: dtype of the main weights, which the optimizer updates. None keeps the compute dtype.
        main_grads_dtype: dtype in which gradients accumulate over microbatches. None means the dtype of the main
            weights, which is what a torch optimizer expects of ``.grad``.
        grad_comm_dtype: dtype in which gradients are sent. None means `main_grads_dtype`.
        fp8: recipe for weights in FP8; True for its defaults.
        mxfp8: recipe for weights in MXFP8; True for its defaults.
        nvfp4: recipe for weights in NVFP4; True for its defaults.
        keep_fp8_transpose_cache: keep the transposes that TransformerEngine's modules make of primary weights until
            the weights change, rather than until the unit's backward ends; see docs/transformer_engine.md.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    fp8: Fp8Recipe | bool | None = None
    mxfp8: Mxfp8Recipe | bool | None = None
    nvfp4: Nvfp4Recipe | bool | None = None
    keep_fp8_transpose_cache: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.keep_fp8_transpose_cache, bool):
            raise ValueError(
                "MixedPrecisionPolicy.keep_fp8_transpose_cache: expected True or False, got "
                f"{self.keep_fp8_transpose_cache!r}."
            )
        for field in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(
                    f"MixedPrecisionPolicy.{field}: expected a floating-point torch.dtype or None, got {value!r}."
                )
            if value is not None and value.itemsize < 2:
                raise ValueError(
                    f"MixedPrecisionPolicy.{field}: expected a dtype of 16 bits or more, got {value}. Weights in fewer "
                    "bits are fp8, mxfp8 and nvfp4; gradients and main weights are never that narrow."
                )
        choose_recipe(self.fp8, self.mxfp8, self.nvfp4)

    @property
    def recipe(self) -> QuantizationRecipe | None:
        """How weights are quantized; None for weights in their compute dtype."""
        return choose_recipe(self.fp8, self.mxfp8, self.nvfp4)

    def main_dtype(self, compute_dtype: torch.dtype, is_trainable: bool) -> torch.dtype:
        """Return the dtype of main weights; frozen ones keep their compute dtype."""
        return self.main_params_dtype if is_trainable and self.main_params_dtype is not None else compute_dtype


@dataclass(frozen=True)
class SchedulePolicy:
    """How far ahead of compute a unit gathers weights, and how long it keeps them.

    Attributes:
        forward_prefetch_units: successors in forward order to gather while a unit computes; 0 turns it off.
        backward_prefetch_units: the same in backward order.
        forward_prefetch_numel: upper bound on the parameter elements gathered ahead; None for no bound.
        backward_prefetch_numel: the same in backward.
        reshard_after_forward: whether weights are released between forward and backward. None means yes except
            for the root, whose weights backward needs first. A number n means yes, but n neighbouring ranks keep them
            among each other, from which backward gathers: a divisor of the ranks that shard the weights, all of which
            mean True, and 1 means False.
        static_gradients: keep the memory of gradients between steps, so that their addresses do not change. Otherwise
            clearing gradients frees it.
    """

    forward_prefetch_units: int = 1
    backward_prefetch_units: int = 1
    forward_prefetch_numel: int | None = None
    backward_prefetch_numel: int | None = None
    reshard_after_forward: bool | int | None = None
    static_gradients: bool = False

    def __post_init__(self) -> None:
        for field in ("forward_prefetch_units", "backward_prefetch_units"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"SchedulePolicy.{field}: expected an int >= 0, got {value!r}.")
        for direction in ("forward", "backward"):
            numel = getattr(self, f"{direction}_prefetch_numel")
            if numel is None:
                continue
            if not isinstance(numel, int) or isinstance(numel, bool) or numel < 1:
                raise ValueError(
                    f"SchedulePolicy.{direction}_prefetch_numel: expected an int >= 1 or None, got {numel!r}. "
                    f"Set {direction}_prefetch_units=0 to turn prefetch off."
                )
            if getattr(self, f"{direction}_prefetch_units") == 0:
                raise ValueError(
                    f"SchedulePolicy.{direction}_prefetch_numel: expected None with "
                    f"{direction}_prefetch_units=0, got {numel}; it would have no effect."
                )
        reshard = self.reshard_after_forward
        if not (reshard is None or isinstance(reshard, bool) or (isinstance(reshard, int) and reshard >= 1)):
            raise ValueError(
                f"SchedulePolicy.reshard_after_forward: expected True, False, None or an int >= 1, got {reshard!r}."
            )
        if not isinstance(self.static_gradients, bool):
            raise ValueError(f"SchedulePolicy.static_gradients: expected a bool, got {self.static_gradients!r}.")
