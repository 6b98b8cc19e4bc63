# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Low-bit weights have the same bits on a GPU as on its host, by kernels of torch and by Triton's; how fast each is.

    FSDP_TEST_DEVICE=cuda python -m tests.gpu.checks --ranks 1 number_formats

Without a GPU Triton's kernels run in Triton's interpreter, where Triton is installed. That rounds to bfloat16 in a way
of its own, so that values are asked for in other dtypes only.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from megatron.core.distributed.fsdp.experimental import format_kernels, number_formats
from megatron.core.distributed.fsdp.experimental.number_formats import Fp8Format, Mxfp8Format, Nvfp4Format
from megatron.core.distributed.fsdp.experimental.quantization import num_scales_of
from tests.gpu.checks import IS_DRY, Check
from tests.unit_tests.launch import DEVICE

if IS_DRY:
    # Read when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

FORMATS: dict[str, Any] = {
    "fp8_tensor": Fp8Format("tensor"),
    "fp8_row": Fp8Format("row"),
    "fp8_block": Fp8Format("block"),
    "mxfp8_floor": Mxfp8Format(),
    "mxfp8_ceil": Mxfp8Format("ceil"),
    "nvfp4": Nvfp4Format(),
}
# Whole and ragged blocks, odd rows in NVFP4, single rows, a matrix of one column; large enough for several programs.
SHAPES = [(3, 40), (1,), (7,), (5, 33), (130, 3), (129, 130), (2, 3, 5), (64, 64), (4500,), (3, 5000), (0, 40)]
LARGE_SHAPES = [] if IS_DRY else [(1000, 4096), (777, 1555), (3_000_001,)]
DTYPES = [torch.float32, torch.float16] + ([] if IS_DRY else [torch.bfloat16])
# Kernels are compiled for each dtype.
SHAPES_OF_ALL_DTYPES = [(64, 64), (130, 3), *LARGE_SHAPES]
HAS_TRITON = importlib.util.find_spec("triton") is not None
START = (1 << 32) - 1000
"""Index of the first element, for stochastic rounding: indices of 33 bits are among them."""

SPEED_SHAPE = (64, 256) if IS_DRY else (4096, 14336)
NUM_RUNS = 2 if IS_DRY else 50


@dataclass
class Planes:
    """A quantized tensor on one device."""

    number_format: Any
    shape: Sequence[int]
    payload: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None

    def to(self, device: str) -> Planes:
        amax = None if self.amax is None else self.amax.to(device)
        return replace(self, payload=self.payload.to(device), scales=self.scales.to(device), amax=amax)

    def values(self, dtype: torch.dtype, *, by_triton: bool) -> torch.Tensor:
        out = torch.full((math.prod(self.shape),), -7.0, dtype=dtype, device=self.payload.device)
        with using(by_triton):
            self.number_format.dequantize(self.payload, self.scales, self.shape, out, amax=self.amax)
        return out


@contextmanager
def using(by_triton: bool) -> Iterator[None]:
    """Use Triton's kernels, or those of torch, whatever the device."""
    kernels = format_kernels._kernels() if by_triton else None
    with mock.patch.object(number_formats, "kernels_for", lambda tensor: kernels):
        yield


def quantized(number_format: Any, values: torch.Tensor, shape: Sequence[int], *, by_triton: bool = False) -> Planes:
    """Quantize a tensor on its device into bytes that hold something else before."""
    amax = None
    if number_format.needs_amax:
        amax = values.float().abs().max() if values.numel() else torch.zeros((), device=values.device)
    payload = torch.full((-(-values.numel() // number_format.elements_per_byte),), 0xAB, dtype=torch.uint8)
    num_scales = num_scales_of(number_format.geometry(shape), values.numel())
    scales = torch.full((num_scales * number_format.scale_bytes,), 0xAB, dtype=torch.uint8)
    planes = Planes(number_format, shape, payload, scales, amax)
    planes = replace(planes.to(str(values.device)), amax=amax)
    with using(by_triton):
        number_format.quantize(values, shape, planes.payload, planes.scales, amax=amax, start=START)
    return planes


def host_values(shape: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield values on the host: of any magnitude, at both ends of float32, halfway between elements, not finite."""
    generator = torch.Generator("cpu").manual_seed(math.prod(shape))
    numel = math.prod(shape)
    normal = torch.randn(numel, generator=generator, device="cpu")
    powers = torch.rand(numel, generator=generator, device="cpu")
    largest = torch.finfo(torch.float32).max
    yield "equal magnitudes", normal
    yield "several magnitudes", normal * 2.0 ** (12 * powers - 6)
    yield "all magnitudes", (normal.double() * 2.0 ** (270 * powers.double() - 145)).clamp(-largest, largest).float()
    yield "subnormal", normal * 2.0**-126 * 2.0 ** (-20 * powers)
    yield "largest", normal.sign() * largest * (1 - powers * 2.0**-20)
    yield "halves", (normal * 8).round() / 4
    yield "zeros", normal * 0
    for value in (math.nan, math.inf, -math.inf):
        lost = normal.clone()
        lost[numel // 2 : numel // 2 + 1] = value
        yield str(value), lost


def assert_same(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bits; of NaN, that it is one."""
    got = got.cpu()
    if got.is_floating_point():
        is_same = (got == expected) & (got.signbit() == expected.signbit()) | (got.isnan() & expected.isnan())
    else:
        is_same = got == expected
    if not is_same.all():
        first = int((~is_same).nonzero()[0])
        number = int((~is_same).sum())
        raise AssertionError(
            f"{what}: {number} of {got.numel()} differ, the first at {first}: {got[first]} for {expected[first]}"
        )


def _scales_to_compare(planes: Planes) -> torch.Tensor:
    return planes.scales.view(torch.float32) if planes.number_format.scale_bytes == 4 else planes.scales


def _ways() -> list[bool]:
    return [False, True] if HAS_TRITON else [False]


def _dtypes_of(shape: Sequence[int]) -> list[torch.dtype]:
    return DTYPES if shape in SHAPES_OF_ALL_DTYPES else DTYPES[:1]


def device_has_the_bits_of_the_host(kind: str, rounding: str) -> str:
    """Payload, scales and values, for odd shapes and all kinds of numbers."""
    number_format = replace(FORMATS[kind], rounding=rounding)
    count = 0
    for shape in [*SHAPES, *LARGE_SHAPES]:
        for name, values in host_values(shape):
            what = f"{kind}, {rounding}, {shape}, {name}"
            host = quantized(number_format, values, shape)
            for by_triton in _ways():
                way = f"{'Triton' if by_triton else 'torch'}, {what}"
                device = quantized(number_format, values.to(DEVICE), shape, by_triton=by_triton)
                assert_same(f"payload by {way}", device.payload, host.payload)
                assert_same(f"scales by {way}", _scales_to_compare(device), _scales_to_compare(host))
                # Decoding does not know how elements have been rounded.
                for dtype in _dtypes_of(shape) if rounding == "nearest" else []:
                    expected = host.values(dtype, by_triton=False)
                    assert_same(f"{dtype} by {way}", device.values(dtype, by_triton=by_triton), expected)
            count += values.numel()
    return (
        f"{count} elements in {len(SHAPES) + len(LARGE_SHAPES)} shapes; Triton {'too' if HAS_TRITON else 'is missing'}"
    )


def any_bytes_are_decoded_alike(kind: str) -> str:
    """Whatever the bytes are, all elements with all scales, NaN among them."""
    number_format = FORMATS[kind]
    generator = torch.Generator("cpu").manual_seed(0)
    for shape in [*SHAPES, *LARGE_SHAPES]:
        numel = math.prod(shape)
        planes = quantized(number_format, torch.ones(numel, device="cpu"), shape)
        planes.payload.random_(0, 256, generator=generator)
        if number_format.scale_bytes == 1:
            planes.scales.random_(0, 256, generator=generator)
        amaxes = [0.0, 1e-45, 1e-30, 0.3, 448.0, 2688.0, 3.4e38, math.inf] if number_format.needs_amax else [None]
        for amax in amaxes:
            host = replace(planes, amax=None if amax is None else torch.tensor(amax, device="cpu"))
            for dtype in _dtypes_of(shape):
                expected = host.values(dtype, by_triton=False)
                for by_triton in _ways():
                    got = host.to(DEVICE).values(dtype, by_triton=by_triton)
                    assert_same(f"{kind}, {shape}, amax {amax}, {dtype}, Triton {by_triton}", got, expected)
    return "torch and Triton" if HAS_TRITON else "torch; Triton is missing"


def works_in_a_graph(kind: str) -> str:
    """Nothing waits: a CUDA graph of quantizing and decoding does as eager calls do, with other values, too."""
    if IS_DRY:
        return "no GPU, no graph"
    for rounding in ("nearest", "stochastic"):
        for by_triton in _ways():
            with using(by_triton):
                _compare_graph(replace(FORMATS[kind], rounding=rounding), f"{kind}, {rounding}, Triton {by_triton}")
    return "3 replays each of nearest and stochastic rounding" + (", torch and Triton" if HAS_TRITON else "")


def _compare_graph(number_format: Any, what: str) -> None:
    shape = (384, 1024)
    generator = torch.Generator("cpu").manual_seed(1)
    batches = [torch.randn(math.prod(shape), generator=generator, device="cpu") for _ in range(3)]
    values = batches[0].to(DEVICE)
    planes = quantized(number_format, values, shape)
    out = torch.empty(values.numel(), dtype=torch.bfloat16, device=DEVICE)

    def both() -> None:
        if planes.amax is not None:
            planes.amax.copy_(values.abs().max())
        number_format.quantize(values, shape, planes.payload, planes.scales, amax=planes.amax, start=START)
        number_format.dequantize(planes.payload, planes.scales, shape, out, amax=planes.amax)

    # Triton compiles in the first call.
    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for index, batch in enumerate(batches):
        values.copy_(batch)
        graph.replay()
        host = quantized(number_format, batch, shape)
        assert_same(f"payload of {what}, replay {index}", planes.payload, host.payload)
        assert_same(f"values of {what}, replay {index}", out, host.values(torch.bfloat16, by_triton=False))


def _seconds(work: Callable[[], None]) -> float:
    """Return the time of one run on the GPU, the median of NUM_RUNS; nothing for the host."""
    work()
    work()
    if IS_DRY:
        return math.nan
    times_ms = []
    for _ in range(NUM_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return sorted(times_ms)[NUM_RUNS // 2] / 1000


def speed(kind: str) -> str:
    """Bytes read and written a second; what one pass would take, besides the launch, is the memory's speed."""
    number_format = FORMATS[kind]
    numel = math.prod(SPEED_SHAPE)
    values = torch.linspace(-1, 1, numel, device=DEVICE)
    planes = quantized(number_format, values, SPEED_SHAPE)
    dtype = torch.float16 if IS_DRY else torch.bfloat16
    out = torch.empty(numel, dtype=dtype, device=DEVICE)
    plane_bytes = planes.payload.nbytes + planes.scales.nbytes
    found = []
    for by_triton in _ways():
        with using(by_triton):
            seconds = _seconds(
                lambda: number_format.dequantize(planes.payload, planes.scales, SPEED_SHAPE, out, amax=planes.amax)
            )
        name = "Triton" if by_triton else "torch"
        found.append(
            f"decoding by {name} {(plane_bytes + out.nbytes) / seconds / 1e9:6.0f} GB/s {seconds * 1e6:6.0f} us"
        )
        for rounding in ("nearest", "stochastic"):
            rounded = replace(number_format, rounding=rounding)

            def quantize(rounded: Any = rounded) -> None:
                rounded.quantize(values, SPEED_SHAPE, planes.payload, planes.scales, amax=planes.amax)

            with using(by_triton):
                seconds = _seconds(quantize)
            moved = (plane_bytes + values.nbytes) / seconds / 1e9
            found.append(f"encoding ({rounding}) by {name} {moved:6.0f} GB/s {seconds * 1e6:6.0f} us")
    if IS_DRY:
        return "no GPU, nothing to measure"
    return f"{SPEED_SHAPE} {str(dtype).removeprefix('torch.')}: " + ", ".join(found)


CHECKS = [
    Check(f"{kind}_{rounding}_has_the_bits_of_the_host", device_has_the_bits_of_the_host, (kind, rounding))
    for kind in FORMATS
    for rounding in ("nearest", "stochastic")
]
CHECKS += [Check(f"{kind}_of_any_bytes", any_bytes_are_decoded_alike, (kind,)) for kind in FORMATS]
CHECKS += [Check(f"{kind}_in_a_graph", works_in_a_graph, (kind,)) for kind in FORMATS]
CHECKS += [Check(f"{kind}_speed", speed, (kind,)) for kind in FORMATS]
