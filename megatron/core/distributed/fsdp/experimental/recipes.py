# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a user may choose about low-bit weights: the number format, its rounding, and which parameters stay as they are.

Frozen values only. Nothing here quantizes: the formats are `number_formats.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from .number_formats import Fp8Format, Mxfp8Format, Nvfp4Format
from .quantization import WeightFormat

Rounding = Literal["nearest", "stochastic"]

KEPT = ("*embed*", "*norm*", "*router*", "lm_head.*", "*.lm_head.*", "output_layer.*", "*.output_layer.*")
"""Patterns of the names of parameters that stay in their compute dtype unless a recipe says otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What all recipes have.

    Attributes:
        rounding: "nearest", ties to even; or "stochastic": up or down with the odds that keep the mean, decided by a
            hash of the seed, the element's index and its bits: the same for every cut, and after a resume.
        seed: of stochastic rounding.
        keep: shell patterns of names, as in the unit, of parameters that stay in their compute dtype. Vectors and the
            weights of torch's embedding modules always do.
    """

    rounding: Rounding = "nearest"
    seed: int = 0
    keep: tuple[str, ...] = KEPT

    name: ClassVar[str]

    def __post_init__(self) -> None:
        _require(self, "rounding", ("nearest", "stochastic"))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"{type(self).__name__}.seed: expected an int, got {self.seed!r}.")
        if self.seed and self.rounding == "nearest":
            raise ValueError(
                f"{type(self).__name__}.seed: expected 0 with rounding='nearest', got {self.seed}; it would have no "
                "effect. Set rounding='stochastic', or leave it out."
            )
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"{type(self).__name__}.seed: expected an int in [0, 2**64), got {self.seed}.")
        if not isinstance(self.keep, tuple) or any(not isinstance(pattern, str) for pattern in self.keep):
            raise ValueError(f"{type(self).__name__}.keep: expected a tuple of shell patterns, got {self.keep!r}.")

    def keeps(self, fqn: str) -> bool:
        """Return whether a parameter of this name stays in its compute dtype."""
        return any(fnmatchcase(fqn, pattern) for pattern in self.keep)

    @property
    def format(self) -> WeightFormat:
        """What the weights are quantized to."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe(_Recipe):
    """Weights in FP8 E4M3, a byte an element.

    Attributes:
        scaling: what shares one scale: a whole "tensor", a "row", or a "block" of 128 x 128 elements.
    """

    scaling: Literal["tensor", "row", "block"] = "tensor"
    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "scaling", ("tensor", "row", "block"))

    @property
    def format(self) -> WeightFormat:
        """What the weights are quantized to."""
        return Fp8Format(scaling=self.scaling, rounding=self.rounding, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Mxfp8Recipe(_Recipe):
    """Weights in MXFP8: E4M3 with a power of two as the scale of 32 elements of a row, 1.03 bytes an element.

    Attributes:
        scale_rounding: "floor", as the OCP specification has it, which saturates what lies above 448 times the scale;
            or "ceil", the smallest scale with which nothing saturates.
    """

    scale_rounding: Literal["floor", "ceil"] = "floor"
    name: ClassVar[str] = "mxfp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "scale_rounding", ("floor", "ceil"))

    @property
    def format(self) -> WeightFormat:
        """What the weights are quantized to."""
        return Mxfp8Format(scale_rounding=self.scale_rounding, rounding=self.rounding, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Nvfp4Recipe(_Recipe):
    """Weights in NVFP4: E2M1, E4M3 scales of 16 elements of a row, a scale of the tensor; 0.56 bytes an element."""

    name: ClassVar[str] = "nvfp4"

    @property
    def format(self) -> WeightFormat:
        """What the weights are quantized to."""
        return Nvfp4Format(rounding=self.rounding, seed=self.seed)


QuantizationRecipe = Fp8Recipe | Mxfp8Recipe | Nvfp4Recipe


def choose_recipe(fp8: Any, mxfp8: Any, nvfp4: Any) -> QuantizationRecipe | None:
    """Return the one recipe that a policy's fields name; True stands for a recipe's defaults.

    Raises:
        ValueError: a value of another kind, or more than one.
    """
    kinds: tuple[tuple[Any, type[QuantizationRecipe]], ...] = (
        (fp8, Fp8Recipe),
        (mxfp8, Mxfp8Recipe),
        (nvfp4, Nvfp4Recipe),
    )
    chosen: list[QuantizationRecipe] = []
    for value, kind in kinds:
        if value is None or value is False:
            continue
        if value is not True and not isinstance(value, kind):
            raise ValueError(
                f"MixedPrecisionPolicy.{kind.name}: expected a {kind.__name__}, True or None, got {value!r}."
            )
        chosen.append(kind() if value is True else value)
    if len(chosen) > 1:
        raise ValueError(
            f"MixedPrecisionPolicy: expected one of fp8, mxfp8 and nvfp4, got {[recipe.name for recipe in chosen]}. A "
            "unit's weights travel in one format; give units policies of their own for several."
        )
    return chosen[0] if chosen else None


def _require(recipe: Any, field: str, allowed: Sequence[str]) -> None:
    if getattr(recipe, field) not in allowed:
        raise ValueError(
            f"{type(recipe).__name__}.{field}: expected one of {tuple(allowed)}, got {getattr(recipe, field)!r}."
        )
