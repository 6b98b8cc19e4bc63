# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's primary weights: which parameters they are, what their attributes mean, and which are refused.

The only file that knows TransformerEngine's classes. It knows them by name, and imports nothing of the library, which
need not be installed. Shards, gathers and schedules are other files' business.

[Note: primary weights]
A module that is built under ``fp8_model_init`` has parameters that are QuantizedTensors: tensors of a nominal dtype
without storage, whose bytes lie in attributes. A module reads these in each forward and backward, so that a weight is
installed by an assignment, and freed and filled between forward and backward like any other. TransformerEngine's
products take operands by rows. What backward needs is the transpose, which is made from the weight where it has the
same elements (FP8 on Hopper, blocks of 128 x 128, NVFP4 in tiles), and a plane of its own where blocks are rows
(MXFP8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .number_formats import Fp8Format
from .quantization import WeightFormat, as_matrix
from .te_formats import GivenFp8Format, Mxfp8ColumnsFormat, Mxfp8RowsFormat, TiledNvfp4Format

_E4M3, _E2M1 = 7, 10
"""Numbers of dtypes in TransformerEngine's enumeration."""


@dataclass(frozen=True)
class ScaleShape:
    """How a plane of scales lies, as TransformerEngine's products read it.

    Attributes:
        block: rows and columns that share a scale.
        pad: what the rows and columns of the plane are multiples of.
        dtype: of one scale.
        repeat: how often each row of scales is there.
    """

    block: tuple[int, int]
    pad: tuple[int, int]
    dtype: torch.dtype = torch.uint8
    repeat: int = 1

    def logical(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of scales of a weight."""
        rows, columns = as_matrix(shape)
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    def padded(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of the plane."""
        rows, columns = self.logical(shape)
        down, across = self.pad
        return -(-rows * self.repeat // down) * down, -(-columns // across) * across


@dataclass(frozen=True)
class Direction:
    """One of the planes that a kind of weight is kept in, and the attributes that have it.

    Attributes:
        form: its number format.
        data: attribute of the payload.
        scale_attribute: attribute of the scales.
        scales: how they lie; None where the tensor has one, float32, [1].
    """

    form: WeightFormat
    data: str
    scale_attribute: str
    scales: ScaleShape | None = None

    def data_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the payload."""
        return (*shape[:-1], shape[-1] // self.form.elements_per_byte)


@dataclass(frozen=True)
class Kind:
    """A class of weights as one recipe of TransformerEngine makes them.

    Attributes:
        name: the class of the tensor.
        quantizer: the class of its quantizer.
        forward: what forward reads.
        backward: what only backward reads, and cannot be made from that; None where it can.
        made: attributes of what is made for backward.
        amax_attribute: attribute of the tensor's own largest magnitude, float32, [1].
        is_delayed: whether the factor is the quantizer's own.
        required: settings of the quantizer, and of the tensor, with the values that they must have.
        dtype: number of the elements' dtype.
        multiple: of which both sizes of a weight are multiples.
    """

    name: str
    quantizer: str
    forward: Direction
    backward: Direction | None = None
    made: tuple[str, ...] = ()
    amax_attribute: str | None = None
    is_delayed: bool = False
    required: tuple[tuple[str, Any], ...] = ()
    dtype: int = _E4M3
    multiple: int = 1


_FP8 = Direction(GivenFp8Format(), "_data", "_scale_inv")
_BLOCKS = ScaleShape((128, 128), (1, 4), torch.float32)
KINDS = (
    Kind("Float8Tensor", "Float8Quantizer", _FP8, made=("_transpose",), is_delayed=True),
    Kind(
        "Float8Tensor",
        "Float8CurrentScalingQuantizer",
        _FP8,
        made=("_transpose",),
        required=(("force_pow_2_scales", False), ("amax_epsilon", 0.0)),
    ),
    Kind(
        "Float8BlockwiseQTensor",
        "Float8BlockQuantizer",
        Direction(Fp8Format("block"), "_rowwise_data", "_rowwise_scale_inv", _BLOCKS),
        made=("_columnwise_data", "_columnwise_scale_inv"),
        required=(
            *(("force_pow_2_scales", True), ("amax_epsilon", 0.0), ("block_scaling_dim", 2), ("_is_2D_scaled", True)),
        ),
    ),
    Kind(
        "MXFP8Tensor",
        "MXFP8Quantizer",
        Direction(Mxfp8RowsFormat(), "_rowwise_data", "_rowwise_scale_inv", ScaleShape((1, 32), (128, 4))),
        Direction(Mxfp8ColumnsFormat(), "_columnwise_data", "_columnwise_scale_inv", ScaleShape((32, 1), (4, 128))),
        required=(("with_2d_quantization", False), ("_with_gemm_swizzled_scales", False)),
        multiple=32,
    ),
    Kind(
        "NVFP4Tensor",
        "NVFP4Quantizer",
        Direction(TiledNvfp4Format(), "_rowwise_data", "_rowwise_scale_inv", ScaleShape((16, 16), (128, 4), repeat=16)),
        made=("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
        amax_attribute="_amax_rowwise",
        required=(
            ("with_2d_quantization", True),
            ("with_rht", False),
            ("row_scaled_nvfp4", False),
            ("nvfp4_use_4over6", False),
            ("_with_gemm_swizzled_scales", False),
        ),
        dtype=_E2M1,
        multiple=16,
    ),
)


def is_primary_weight(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is one of TransformerEngine's quantized tensors."""
    return any(cls.__name__ == "QuantizedTensor" for cls in type(parameter).__mro__)


def kind_of(parameter: Any) -> Kind | None:
    """Return what kind of primary weight a parameter is; None for one that no kind describes."""
    names = type(parameter).__name__, type(getattr(parameter, "_quantizer", None)).__name__
    return next((kind for kind in KINDS if (kind.name, kind.quantizer) == names), None)


def check_primary(where: str, fqn: str, parameter: Any) -> None:
    """Refuse a primary weight that cannot be sharded.

    Args:
        where: begins the message.
        fqn: the parameter's name.
        parameter: one for which `is_primary_weight` holds.

    Raises:
        NotImplementedError: a class, or settings of its quantizer, that were not looked at.
        ValueError: there are no initial values in high precision.
    """
    kind = kind_of(parameter)
    if kind is None:
        known = sorted({f"{each.name} by {each.quantizer}" for each in KINDS})
        raise NotImplementedError(
            f"{where}: expected TransformerEngine weights of one of the kinds {known}, got {fqn}, a "
            f"{type(parameter).__name__} by {type(getattr(parameter, '_quantizer', None)).__name__}. Choose another "
            "recipe, or build the module outside of fp8_model_init."
        )
    found_dtype = int(parameter._fp4_dtype if hasattr(parameter, "_fp4_dtype") else parameter._fp8_dtype)
    settings = [(name, expected, _setting(parameter, name, expected)) for name, expected in kind.required]
    for name, expected, found in (*settings, ("number of the dtype", kind.dtype, found_dtype)):
        if found != expected:
            raise NotImplementedError(
                f"{where}: expected TransformerEngine weights with {name.lstrip('_')}={expected}, got {found} for "
                f"{fqn}, a {kind.name}. Leave that setting of the recipe as it is by default."
            )
    if any(size % kind.multiple for size in as_matrix(parameter.shape)):
        raise NotImplementedError(
            f"{where}: expected sizes that are multiples of {kind.multiple}, got {tuple(parameter.shape)} for {fqn}, a "
            f"{kind.name}. Choose another recipe for this layer."
        )
    if _initial_values(parameter) is None:
        raise ValueError(
            f"{where}: expected initial values in high precision, got none for {fqn}, a {kind.name}, whose main "
            "weights would begin with its rounding. Build it under fp8_model_init(preserve_high_precision_init_val="
            "True)."
        )


def has_backward_plane(parameter: Any) -> bool:
    """Return whether backward reads a plane of its own."""
    kind = kind_of(parameter)
    return kind is not None and kind.backward is not None


def take_primary(parameter: Any, device: torch.device) -> tuple[nn.Parameter, PrimaryWeight]:
    """Return a plain parameter that stands for a primary weight until a group has replaced both, and what that is.

    Args:
        parameter: one that `check_primary` has accepted.
        device: where the plain one is to lie.
    """
    kind = kind_of(parameter)
    assert kind is not None, "checked before"
    primary = PrimaryWeight(kind, parameter)
    return primary.plain(device), primary


def check_not_deferred(where: str, module: nn.Module) -> None:
    """Refuse a module that will make primary weights later, from parameters on the meta device.

    Raises:
        NotImplementedError: it is one.
    """
    if getattr(module, "primary_weights_in_fp8", False):
        names = [name for name, tensor in module._parameters.items() if tensor is not None and tensor.is_meta]
        if names:
            raise NotImplementedError(
                f"{where}: expected TransformerEngine's primary weights on a real device, got {names} on the meta "
                "device, which the module quantizes itself when it computes initial values. Build it on the device."
            )


def _setting(parameter: Any, name: str, default: Any) -> Any:
    """Return a setting of a weight or its quantizer; older releases lack some, which cannot be switched on there."""
    return getattr(parameter if hasattr(parameter, name) else parameter._quantizer, name, default)


def _initial_values(parameter: Any) -> torch.Tensor | None:
    get = getattr(parameter, "get_high_precision_init_val", None)
    values: torch.Tensor | None = None if get is None else get()
    return values


@dataclass(frozen=True)
class PrimaryWeight:
    """A primary weight that a group is about to replace.

    Attributes:
        kind: what it is.
        original: the parameter.
    """

    kind: Kind
    original: Any

    def plain(self, device: torch.device) -> nn.Parameter:
        """Return a plain parameter with the initial values, and whatever users have set on the original."""
        original, values = self.original, _initial_values(self.original)
        assert values is not None, "checked before"
        plain = nn.Parameter(values.to(device, original.dtype), requires_grad=original.requires_grad)
        known = {*vars(original.detach()), "_is_param", "_high_precision_init_val"}
        known |= {"get_high_precision_init_val", "clear_high_precision_init_val"}
        for name, value in vars(original).items():
            if name not in known:
                setattr(plain, name, value)
        original.clear_high_precision_init_val()
        return plain

    def unsharded(self) -> nn.Parameter:
        """Return a parameter of the same class, whose planes are to be installed, and empty the original's."""
        kind, original = self.kind, self.original
        parameter = nn.Parameter(original, requires_grad=original.requires_grad)
        weight: Any = parameter
        leave_transposes_to_backward(weight)
        drop_made(kind, parameter)
        if kind.backward is not None:
            uninstall(kind.backward, parameter)
        for name in (kind.forward.data, *kind.made):
            setattr(original, name, None)
        return parameter

    def retire(self, unit: str) -> None:
        """Let the next `fully_shard` that meets the original see that a unit has it."""
        self.original._fsdp_unit = unit


def leave_transposes_to_backward(parameter: Any) -> None:
    """Let forward read a weight without making what backward reads; modules may have given it another quantizer."""
    parameter._quantizer.set_usage(rowwise=True, columnwise=False)


def uninstall(direction: Direction, parameter: Any) -> None:
    """Take a direction's planes from a parameter."""
    setattr(parameter, direction.data, None)
    setattr(parameter, direction.scale_attribute, None)


def drop_made(kind: Kind, parameter: Any) -> None:
    """Drop what was made for backward."""
    for name in kind.made:
        setattr(parameter, name, None)
    if kind.name == "Float8Tensor":
        parameter._transpose_invalid = True


def quantizer_scale(parameter: Any) -> torch.Tensor:
    """Return the factor of delayed scaling, 0-d float32; TransformerEngine's own, which moves."""
    scale: torch.Tensor = parameter._quantizer.scale
    return scale.view(())


def quantizer_amax(parameter: Any) -> torch.Tensor:
    """Return where delayed scaling notes the largest magnitude, 0-d float32; TransformerEngine's own."""
    amax: torch.Tensor = parameter._quantizer.amax
    return amax.view(())


def requantize_in_backward(module: nn.Module) -> None:
    """Let a module whose weights are gathered keep no quantized copy of them from forward to backward."""
    if hasattr(module, "fp8_meta"):
        # As under PyTorch's own FSDP: neither a workspace that lasts for a step, nor one in the autograd graph.
        owner: Any = module
        owner._is_fsdp2 = True
