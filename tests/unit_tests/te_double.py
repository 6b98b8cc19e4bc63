# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Doubles of TransformerEngine's weights and of a linear layer that computes with them, on any device.

The classes have the names, attributes and shapes of TransformerEngine 2.20's, `update_usage` makes, keeps and refuses
what theirs does, and layers read weights when theirs do: by rows in forward, by columns in backward. Numbers are made
by the definitions of the formats, apart from the runtime's own, and layers multiply what the bytes mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

E4M3, E2M1 = 7, 10
_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Quantizer:
    """What all quantizers have."""

    def __init__(self, dtype: int = E4M3) -> None:
        self.rowwise_usage = self.columnwise_usage = True
        self.internal = self.optimize_for_gemm = False
        self.dtype = dtype

    def copy(self) -> Any:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def __call__(self, values: torch.Tensor) -> Any:
        raise NotImplementedError


class QuantizedTensor(torch.Tensor):
    """A tensor of a nominal dtype whose bytes are attributes."""

    planes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, shape: Any, dtype: torch.dtype, device: Any, quantizer: Any, **attributes: Any) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._dtype, self._quantizer = dtype, quantizer.copy()
        for name in (*cls.planes, *cls.others):
            setattr(self, name, attributes[name])
        return self

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def detach(self) -> Any:
        attributes = {name: getattr(self, name) for name in (*self.planes, *self.others)}
        device = torch._C.TensorBase.device.__get__(self, type(self))
        return type(self)(self.shape, self.dtype, device, self._quantizer, **attributes)

    def untyped_storage(self) -> Any:
        return torch.UntypedStorage(0)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        raise AssertionError(f"{func} on a quantized weight, which would dequantize it")


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def _of_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _factor(amax: torch.Tensor, largest: float = 448.0) -> torch.Tensor:
    return torch.where(amax == 0, torch.ones_like(amax), torch.full_like(amax, largest) / amax)


def _pad(plane: torch.Tensor, down: int, across: int) -> torch.Tensor:
    rows, columns = plane.shape
    return torch.nn.functional.pad(plane, (0, -columns % across, 0, -rows % down))


# --- FP8 of whole tensors ---------------------------------------------------------------------------------------------


class Float8Tensor(QuantizedTensor):
    planes = ("_data", "_scale_inv", "_transpose")
    others = ("_fp8_dtype", "_transpose_invalid")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if columnwise_usage and (self._transpose is None or self._transpose_invalid):
            self._transpose, self._transpose_invalid = self._data.t().contiguous(), False

    def by_rows(self) -> torch.Tensor:
        return _of_e4m3(self._data) * self._scale_inv

    def by_columns(self) -> torch.Tensor:
        return (_of_e4m3(self._transpose) * self._scale_inv).t()


def _float8(quantizer: Any, values: torch.Tensor, scale: torch.Tensor) -> Float8Tensor:
    data = _e4m3(values.float() * scale)
    return Float8Tensor(
        values.shape,
        values.dtype,
        values.device,
        quantizer,
        _data=data,
        _scale_inv=scale.reciprocal().view(1),
        _transpose=data.t().contiguous(),
        _transpose_invalid=False,
        _fp8_dtype=E4M3,
    )


class Float8CurrentScalingQuantizer(Quantizer):
    force_pow_2_scales = False
    amax_epsilon = 0.0

    def __call__(self, values: torch.Tensor) -> Float8Tensor:
        return _float8(self, values, _factor(values.float().abs().max()))


class Float8Quantizer(Quantizer):
    """Delayed scaling: `scale` and `amax` are the module's, shared by all copies."""

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor) -> None:
        super().__init__()
        self.scale, self.amax = scale, amax

    def __call__(self, values: torch.Tensor) -> Float8Tensor:
        self.amax.copy_(torch.maximum(self.amax, values.float().abs().max()))
        return _float8(self, values, self.scale)

    def end_forward(self) -> None:
        """Move the scale, as the end of the outermost autocast does."""
        self.scale.copy_(torch.where(self.amax[0] == 0, self.scale, 448 / self.amax[0]))
        self.amax.zero_()


# --- FP8 in blocks ----------------------------------------------------------------------------------------------------


class _TwoPlanes(QuantizedTensor):
    planes: tuple[str, ...] = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if rowwise_usage and self._rowwise_data is None:
            raise RuntimeError("missing row-scaled data")
        if columnwise_usage and self._columnwise_data is None:
            self._make_columns()

    def _make_columns(self) -> None:
        raise RuntimeError("missing column-scaled data")


class Float8BlockwiseQTensor(_TwoPlanes):
    others = ("_fp8_dtype", "_is_2D_scaled")

    def _make_columns(self) -> None:
        self._columnwise_data = self._rowwise_data.t().contiguous()
        rows = -(-self.shape[0] // 128)
        across = -(-self.shape[1] // 128)
        self._columnwise_scale_inv = _pad(self._rowwise_scale_inv[:, :across].t(), 1, 4)[:, : -(-rows // 4) * 4]

    def by_rows(self) -> torch.Tensor:
        return self._values(self._rowwise_data, self._rowwise_scale_inv)

    def by_columns(self) -> torch.Tensor:
        return self._values(self._columnwise_data, self._columnwise_scale_inv).t()

    def _values(self, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        rows, columns = data.shape
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        return _of_e4m3(data) * whole


class Float8BlockQuantizer(Quantizer):
    force_pow_2_scales, amax_epsilon, block_scaling_dim, block_len = True, 0.0, 2, 128

    def __call__(self, values: torch.Tensor) -> Float8BlockwiseQTensor:
        rows, columns = values.shape
        padded = _pad(values.float(), 128, 128)
        tiles = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        factor = _factor(tiles.abs().amax((1, 3)))
        factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
        data = _e4m3(tiles * factor[:, None, :, None]).view(padded.shape)[:rows, :columns].contiguous()
        new = Float8BlockwiseQTensor(
            values.shape,
            values.dtype,
            values.device,
            self,
            _rowwise_data=data,
            _rowwise_scale_inv=_pad(factor.reciprocal(), 1, 4),
            _columnwise_data=None,
            _columnwise_scale_inv=None,
            _fp8_dtype=E4M3,
            _is_2D_scaled=True,
        )
        new._make_columns()
        return new


# --- MXFP8 ------------------------------------------------------------------------------------------------------------


class MXFP8Tensor(_TwoPlanes):
    others = ("_fp8_dtype", "_with_gemm_swizzled_scales")

    def by_rows(self) -> torch.Tensor:
        rows, columns = self._rowwise_data.shape
        powers = torch.exp2(self._rowwise_scale_inv[:rows, : columns // 32].float() - 127)
        return _of_e4m3(self._rowwise_data) * powers.repeat_interleave(32, 1)

    def by_columns(self) -> torch.Tensor:
        rows, columns = self._columnwise_data.shape
        powers = torch.exp2(self._columnwise_scale_inv[: rows // 32, :columns].float() - 127)
        return _of_e4m3(self._columnwise_data) * powers.repeat_interleave(32, 0)


def _mx(runs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements and exponents of runs of 32 in the last dim."""
    amax = runs.abs().amax(-1)
    exponents = torch.ceil(torch.log2(amax / 448)).clamp(-127, 127)
    exponents = torch.where(amax == 0, torch.full_like(exponents, -127), exponents)
    return _e4m3(runs * torch.exp2(-exponents)[..., None]), (exponents + 127).to(torch.uint8)


class MXFP8Quantizer(Quantizer):
    with_2d_quantization = False

    def __call__(self, values: torch.Tensor) -> MXFP8Tensor:
        rows, columns = values.shape
        row_data, row_scales = _mx(values.float().view(rows, columns // 32, 32))
        column_data, column_scales = _mx(values.float().t().reshape(columns, rows // 32, 32))
        return MXFP8Tensor(
            values.shape,
            values.dtype,
            values.device,
            self,
            _rowwise_data=row_data.view(rows, columns),
            _rowwise_scale_inv=_pad(row_scales, 128, 4),
            _columnwise_data=column_data.view(columns, rows).t().contiguous(),
            _columnwise_scale_inv=_pad(column_scales.t(), 4, 128).contiguous(),
            _fp8_dtype=E4M3,
            _with_gemm_swizzled_scales=False,
        )


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


class NVFP4Tensor(_TwoPlanes):
    planes = (*_TwoPlanes.planes, "_amax_rowwise", "_amax_columnwise")
    others = ("_fp4_dtype", "_with_gemm_swizzled_scales", "_row_scaled_nvfp4")

    def _make_columns(self) -> None:
        rows, columns = self.shape
        codes = _unpack(self._rowwise_data).t().contiguous()
        self._columnwise_data = _pack(codes)
        tiles = self._rowwise_scale_inv[:rows:16, : columns // 16]
        self._columnwise_scale_inv = _pad(tiles.t().repeat_interleave(16, 0), 128, 4)
        self._amax_columnwise = self._amax_rowwise.clone()

    def by_rows(self) -> torch.Tensor:
        return _fp4_values(self._rowwise_data, self._rowwise_scale_inv, self._amax_rowwise)

    def by_columns(self) -> torch.Tensor:
        return _fp4_values(self._columnwise_data, self._columnwise_scale_inv, self._amax_columnwise).t()


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpack(data: torch.Tensor) -> torch.Tensor:
    return torch.stack([data & 15, data >> 4], -1).view(data.shape[0], -1)


def _fp4_values(data: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    codes = _unpack(data)
    rows, columns = codes.shape
    values = _LEVELS.to(data.device)[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    decoded = _of_e4m3(scales[:rows, : columns // 16].contiguous()).repeat_interleave(16, 1)
    return values * decoded / _factor(amax, 2688.0)


class NVFP4Quantizer(Quantizer):
    with_2d_quantization, with_rht, row_scaled_nvfp4, nvfp4_use_4over6 = True, False, False, False

    def __init__(self) -> None:
        super().__init__(E2M1)

    def __call__(self, values: torch.Tensor) -> NVFP4Tensor:
        rows, columns = values.shape
        tiles = values.float().view(rows // 16, 16, columns // 16, 16)
        amax = tiles.abs().max()
        factor = _factor(amax, 2688.0)
        scales = _e4m3(tiles.abs().amax((1, 3)) * (factor * (1 / 6)))
        decoded = _of_e4m3(scales)
        scaled = tiles * torch.where(decoded == 0, torch.zeros_like(decoded), factor / decoded)[:, None, :, None]
        levels = _LEVELS.to(values.device)
        # Halfway between two levels the one with the even index is nearer.
        middles = (levels[1:] + levels[:-1]) / 2
        magnitude = scaled.abs()
        index = torch.zeros_like(magnitude, dtype=torch.uint8)
        for below, middle in enumerate(middles):
            index += (magnitude > middle) if below % 2 == 0 else (magnitude >= middle)
        codes = (index | (torch.signbit(scaled).to(torch.uint8) << 3)).view(rows, columns)
        new = NVFP4Tensor(
            values.shape,
            values.dtype,
            values.device,
            self,
            _rowwise_data=_pack(codes),
            _rowwise_scale_inv=_pad(scales.repeat_interleave(16, 0), 128, 4),
            _columnwise_data=None,
            _columnwise_scale_inv=None,
            _amax_rowwise=amax.view(1),
            _amax_columnwise=None,
            _fp4_dtype=E2M1,
            _with_gemm_swizzled_scales=False,
            _row_scaled_nvfp4=False,
        )
        new._make_columns()
        return new


# --- recomputation ----------------------------------------------------------------------------------------------------


def checkpoint(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Compute a function again in backward, as TransformerEngine's `checkpoint` with ``use_reentrant=False`` does.

    Unlike PyTorch's it runs the whole function again, and backward gets new objects of all that was saved then, of
    weights, too.
    """
    saved: list[torch.Tensor | None] = []
    count = itertools.count()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor.detach()

    def again(index: int) -> torch.Tensor:
        if not saved:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                function(*args)
        tensor, saved[index] = saved[index], None
        assert tensor is not None, "read once"
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: next(count), again):
        return function(*args)


# --- a layer ----------------------------------------------------------------------------------------------------------


def _delayed() -> Float8Quantizer:
    return Float8Quantizer(torch.ones(()), torch.zeros(1))


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "delayed": _delayed,
    "tensorwise": Float8CurrentScalingQuantizer,
    "blockwise": Float8BlockQuantizer,
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
}


def primary(values: torch.Tensor, quantizer: Any) -> Any:
    """Return a primary weight with its initial values, as a module has it after `reset_parameters`."""
    parameter: Any = nn.Parameter(quantizer(values))
    parameter._high_precision_init_val = values.detach().cpu()

    def get(self: Any) -> Any:
        return getattr(self, "_high_precision_init_val", None)

    def clear(self: Any) -> None:
        del self._high_precision_init_val

    parameter.get_high_precision_init_val = MethodType(get, parameter)
    parameter.clear_high_precision_init_val = MethodType(clear, parameter)
    return parameter


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        if isinstance(weight, QuantizedTensor):
            quantizer = weight._quantizer
            weight.update_usage(quantizer.rowwise_usage or None, quantizer.columnwise_usage or None)
        ctx.save_for_backward(x, weight)
        return x @ (weight.by_rows() if isinstance(weight, QuantizedTensor) else weight).to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole = weight
        if isinstance(weight, QuantizedTensor):
            weight.update_usage(columnwise_usage=True)
            whole = weight.by_columns()
        gradient = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return dy @ whole.to(dy.dtype), gradient.to(weight.dtype)


class Linear(nn.Module):
    """A linear layer without a bias, whose weight is a primary one if a recipe is named."""

    def __init__(self, inputs: int, outputs: int, recipe: str | None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        values = (torch.randn(outputs, inputs) / math.sqrt(inputs)).to(dtype)
        self.weight = nn.Parameter(values) if recipe is None else primary(values, QUANTIZERS[recipe]())
        self.fp8_meta: dict[str, Any] = {}
        self.primary_weights_in_fp8 = recipe is not None
        self.quantizer = getattr(self.weight, "_quantizer", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x, self.weight)
        if isinstance(self.quantizer, Float8Quantizer) and torch.is_grad_enabled():
            self.quantizer.end_forward()
        return y
