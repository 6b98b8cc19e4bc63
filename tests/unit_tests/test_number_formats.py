# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""FP8, MXFP8 and NVFP4 against an oracle of numpy and ml_dtypes, and against torchao where definitions agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from megatron.core.distributed.fsdp.experimental import block_views, float_bits, format_kernels, number_formats
from megatron.core.distributed.fsdp.experimental.number_formats import Fp8Format, Mxfp8Format, Nvfp4Format
from megatron.core.distributed.fsdp.experimental.quantization import as_matrix, num_scales_of
from tests.unit_tests.number_oracle import E2M1, E4M3, E8M0, FLOAT, LARGEST, elements_of, tensor_of

FORMATS: dict[str, Any] = {
    "tensor": Fp8Format("tensor"),
    "row": Fp8Format("row"),
    "block": Fp8Format("block"),
    "floor": Mxfp8Format(),
    "ceil": Mxfp8Format("ceil"),
    "nvfp4": Nvfp4Format(),
}
BLOCKS = {"tensor": (1, 32), "row": (1, 32), "block": (128, 128), "floor": (1, 32), "ceil": (1, 32), "nvfp4": (1, 16)}
SHAPES = [(3, 40), (1,), (7,), (), (64,), (5, 33), (129, 130), (2, 3, 5), (0, 40), (3, 0), (1, 100), (4, 64), (130, 3)]
kinds = pytest.mark.parametrize("kind", FORMATS)
BLOCKED = ["row", "block", "floor", "ceil"]


@dataclass
class Planes:
    """A quantized run: its bytes, and the tensor's amax where the format has one."""

    number_format: Any
    shape: Sequence[int]
    payload: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None

    def values(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.full((numel,), -7.0, dtype=dtype)
        self.number_format.dequantize(self.payload, self.scales, self.shape, out, amax=self.amax)
        return out


def quantized(
    number_format: Any, values: torch.Tensor, shape: Sequence[int], *, amax: Any = None, start: int = 0
) -> Planes:
    """Quantize a run into planes that hold something else before."""
    if number_format.needs_amax and amax is None:
        amax = values.float().abs().max() if values.numel() else torch.zeros(())
    num_scales = num_scales_of(number_format.geometry(shape), values.numel())
    payload = torch.full((-(-values.numel() // number_format.elements_per_byte),), 0xAB, dtype=torch.uint8)
    scales = torch.full((num_scales * number_format.scale_bytes,), 0xAB, dtype=torch.uint8)
    planes = Planes(number_format, shape, payload, scales, amax)
    number_format.quantize(values, shape, payload, scales, amax=planes.amax, start=start)
    return planes


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def assert_same_values(got: torch.Tensor, expected: np.ndarray) -> None:
    """Compare bits, but for which NaN it is."""
    expected = np.ascontiguousarray(expected).reshape(-1)
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got.numpy()), is_nan)
    assert np.array_equal(got.numpy().view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


def assert_as_oracle(kind: str, values: np.ndarray, shape: Sequence[int]) -> None:
    """Compare payload, scales and values with the oracle's, bit for bit."""
    payload, scales, expected = tensor_of(kind, values.reshape(as_matrix(shape)))
    planes = quantized(FORMATS[kind], torch.from_numpy(values.reshape(-1)), shape)
    assert bytes_of(planes.payload) == payload
    # Which NaN a scale of float32 is, is not defined.
    if FORMATS[kind].scale_bytes == 4:
        assert_same_values(planes.scales.view(torch.float32), np.frombuffer(scales, FLOAT))
    else:
        assert bytes_of(planes.scales) == scales
    assert_same_values(planes.values(values.size), expected)


def random_rows(rng: np.random.Generator, num_rows: int, length: int, *, spread: float) -> np.ndarray:
    """Return rows whose magnitudes differ by powers of two up to 2**spread, and within rows by up to 2**12."""
    powers = rng.uniform(-spread, spread, (num_rows, 1)) + rng.uniform(-12, 0, (num_rows, length))
    rows = rng.standard_normal((num_rows, length)) * 2.0**powers
    rows[rng.random((num_rows, length)) < 0.02] = 0.0
    rows[rng.random((num_rows, length)) < 0.02] *= -0.0
    rows[rng.random(num_rows) < 0.01] = 0.0
    return np.clip(rows, -LARGEST, LARGEST).astype(FLOAT)


def ties(kind: str, rng: np.random.Generator, num_rows: int, length: int) -> np.ndarray:
    """Return rows of elements and midpoints between them, scaled by powers of two that the format will choose."""
    grid = elements_of(E2M1 if kind == "nvfp4" else E4M3)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    rows = rng.choice(points, (num_rows, length))
    rows[:, 0] = grid[-1]
    rows *= 2.0 ** rng.integers(-6, 6, (num_rows, 1))
    # NVFP4: the tensor's scale is a power of two, too.
    if kind == "nvfp4":
        rows[0, 0] = 2688.0
    return rows.astype(FLOAT)


@kinds
@pytest.mark.parametrize("spread", [0, 4, 30, 150], ids="spread_{}".format)
def test_thousands_of_random_blocks(kind: str, spread: int) -> None:
    """10,000 blocks in four files of magnitudes: equal ones, some, those of any weight, and all that float32 has."""
    rng = np.random.default_rng(spread)
    height, width = BLOCKS[kind]
    # Blocks of 128 x 128 are as many elements as 500 others.
    num_rows = 25 if kind == "block" else 2500
    rows = random_rows(rng, num_rows, height * width, spread=spread)
    matrix = rows.reshape(num_rows, height, width).reshape(-1, width)
    if kind == "tensor":
        for part in np.split(matrix, 100):
            assert_as_oracle(kind, part, part.shape)
    assert_as_oracle(kind, matrix, matrix.shape)


@kinds
def test_ties_go_to_even(kind: str) -> None:
    height, width = BLOCKS[kind]
    matrix = ties(kind, np.random.default_rng(0), 512, max(width, height))
    assert_as_oracle(kind, matrix, matrix.shape)
    if kind == "nvfp4":
        halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0])
        got = quantized(FORMATS[kind], halves, halves.shape, amax=torch.tensor(2688.0)).values(10)
        assert got.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -4.0, 6.0]


@kinds
def test_small_numbers(kind: str) -> None:
    """Subnormal float32, alone and beside normal ones, and scales that have none smaller."""
    rng = np.random.default_rng(3)
    for power in (-149, -140, -127, -126, -120, -118, -117, -100):
        matrix = (rng.integers(-16, 17, (40, 64)) * 2.0**power * rng.choice([1.0, 1.0, 2.0**-9], (40, 64))).astype(
            FLOAT
        )
        assert_as_oracle(kind, matrix, matrix.shape)


@kinds
@pytest.mark.parametrize("value", [LARGEST, FLOAT(1.75 * 2.0**127), FLOAT(2.0**-149), FLOAT(2.0**-126), FLOAT(0)])
def test_ends_of_float32_stay_finite(kind: str, value: np.floating) -> None:
    """Also next to the end, where rounding up would be infinity."""
    for steps in range(4):
        bits = value.view(np.uint32) - np.uint32(min(steps, int(value.view(np.uint32))))
        matrix = np.full((2, 48), bits.view(FLOAT))
        matrix[0, 1::2] *= FLOAT(-0.999)
        assert_as_oracle(kind, matrix, matrix.shape)
        assert quantized(FORMATS[kind], torch.from_numpy(matrix.reshape(-1)), (2, 48)).values(96).isfinite().all()


def test_reciprocal_of_a_factor_never_overflows() -> None:
    """Two roundings could take 448 / (448 / amax) beyond float32 only next to its end: these amax are tried."""
    bits = LARGEST.view(np.uint32) - np.arange(64, dtype=np.uint32)
    values = torch.from_numpy(bits.view(FLOAT))
    got = quantized(FORMATS["row"], values, (64, 1)).values(64)
    assert got.isfinite().all() and ((got - values).abs() <= values * 2.0**-22).all()


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_sizes(kind: str, shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    values = random_rows(np.random.default_rng(numel), 1, numel, spread=3)
    assert_as_oracle(kind, values, shape)


def test_sizes_of_planes() -> None:
    """The example of [Note: planes], and what else there is."""
    expected = {
        ("floor", (3, 40)): (40, 2, 6),
        ("floor", (3, 64)): (32, 1, 6),
        ("floor", (40,)): (32, 1, 2),
        ("nvfp4", (3, 40)): (40, 3, 9),
        ("nvfp4", (2, 4, 8)): (16, 1, 4),
        ("row", (3, 40)): (40, 1, 3),
        ("row", (40,)): (40, 1, 1),
        ("block", (300, 140)): (128 * 140, 2, 6),
        ("block", (3, 40)): (120, 1, 1),
        ("block", (1, 300)): (128, 1, 3),
        ("tensor", (3, 40)): (1, 0, 0),
        ("floor", (0, 40)): (40, 2, 0),
        ("row", (3, 0)): (1, 1, 0),
    }
    for (kind, shape), sizes in expected.items():
        geometry = FORMATS[kind].geometry(shape)
        assert (geometry.atom, geometry.scales_per_atom, geometry.num_scales) == sizes, (kind, shape)
    for kind in FORMATS:
        for shape in SHAPES:
            geometry = FORMATS[kind].geometry(shape)
            assert num_scales_of(geometry, math.prod(shape)) == geometry.num_scales, (kind, shape)
            assert geometry.atom >= 1


@kinds
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_is_loud(kind: str, value: float) -> None:
    """One overflowed element: its block is NaN, whatever the others are, and no other block is."""
    matrix = random_rows(np.random.default_rng(5), 200, 160, spread=2)
    matrix[1, 70] = value
    assert_as_oracle(kind, matrix, matrix.shape)
    planes = quantized(FORMATS[kind], torch.from_numpy(matrix.reshape(-1)), matrix.shape)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        is_nan = planes.values(matrix.size, dtype).isnan().view(matrix.shape)
        expected = torch.zeros_like(is_nan)
        rows, columns = {
            "tensor": (slice(None), slice(None)),
            "row": (1, slice(None)),
            "block": (slice(128), slice(128)),
            "nvfp4": (slice(None), slice(None)),
        }.get(kind, (1, slice(64, 96)))
        expected[rows, columns] = True
        assert torch.equal(is_nan, expected)


def test_nvfp4_block_is_lost_on_its_own_too() -> None:
    """Should an amax have been taken without the overflowed element, its block is still NaN."""
    values = torch.ones(48)
    values[20] = math.inf
    got = quantized(Nvfp4Format(), values, (48,), amax=torch.tensor(1.0)).values(48)
    assert got.isnan().tolist() == [16 <= index < 32 for index in range(48)]


def test_all_elements_and_scales_are_decoded() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    fp8 = Planes(FORMATS["tensor"], (256,), every, every[:0], torch.tensor(448.0))
    assert_same_values(fp8.values(256), every.numpy().view(E4M3).astype(FLOAT))

    ones = torch.full((256 * 32,), 0x38, dtype=torch.uint8)
    powers = Planes(FORMATS["floor"], (256 * 32,), ones, every, None).values(256 * 32)
    assert_same_values(powers, np.repeat(every.numpy().view(E8M0).astype(FLOAT), 32))

    # Tensor scale 1; pairs of all 16 elements, the earlier one in the low bits.
    pairs = torch.tensor([low | low + 1 << 4 for low in range(0, 16, 2)], dtype=torch.uint8)
    elements = np.arange(16, dtype=np.uint8).view(E2M1).astype(FLOAT)
    planes = Planes(FORMATS["nvfp4"], (16 * 256,), pairs.repeat(256), every, torch.tensor(2688.0))
    expected = every.numpy().view(E4M3).astype(FLOAT)[:, None] * elements
    assert_same_values(planes.values(16 * 256), expected)


@kinds
def test_dtypes(kind: str) -> None:
    """Narrower values are what they are in float32; outputs are rounded once, to nearest even."""
    wide = torch.from_numpy(random_rows(np.random.default_rng(8), 4, 96, spread=1).reshape(-1))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = wide.to(dtype)
        planes, same = (quantized(FORMATS[kind], values, (4, 96)) for values in (narrow, narrow.float()))
        assert torch.equal(planes.payload, same.payload) and torch.equal(planes.scales, same.scales)
    planes = quantized(FORMATS[kind], wide * 3e4, (4, 96))
    exact = planes.values(wide.numel()).numpy()
    expected = exact.astype(ml_dtypes.bfloat16).view(np.int16)
    assert np.array_equal(planes.values(exact.size, torch.bfloat16).view(torch.int16).numpy(), expected)
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float16).view(np.int16)
    assert np.array_equal(planes.values(exact.size, torch.float16).view(torch.int16).numpy(), expected)
    assert np.isinf(expected.view(np.float16)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_as_torchao(dtype: torch.dtype) -> None:
    """The same planes, but where definitions differ: torchao divides by 2**-126 at the least, and keeps infinities."""
    values = torch.from_numpy(random_rows(np.random.default_rng(9), 4000, 32, spread=100)).to(dtype)
    values[7, 3] = math.nan
    for kind, mode in (("floor", ScaleCalculationMode.FLOOR), ("ceil", ScaleCalculationMode.RCEIL)):
        planes = quantized(FORMATS[kind], values.view(-1), values.shape)
        scales, elements = to_mx(values, torch.float8_e4m3fn, 32, mode)
        scales = scales.view(torch.uint8).view(-1)
        comparable = (scales > 0) & (scales < 255)
        assert comparable.sum() > 3500 and planes.scales[7] == scales[7] == 255
        assert torch.equal(planes.scales[comparable], scales[comparable]), kind
        payload = planes.payload.view(-1, 32)
        assert torch.equal(payload[comparable], elements.view(torch.uint8).view(-1, 32)[comparable]), kind


def test_nvfp4_as_torchao() -> None:
    """The same planes, but where definitions differ: torchao's smallest scale of a block is the smallest normal one.

    It also multiplies by a rounded reciprocal, which changes elements next to ties only: none of these.
    """
    values = torch.from_numpy(random_rows(np.random.default_rng(10), 4000, 16, spread=2))
    amax = values.abs().max()
    planes = quantized(Nvfp4Format(), values.view(-1), values.shape, amax=amax)
    scales, elements = nvfp4_quantize(values, 16, per_tensor_amax_to_scale(amax))
    scales = scales.view(torch.uint8).view(-1)
    comparable = scales > 0x08
    assert comparable.sum() > 2000
    assert torch.equal(planes.scales[comparable], scales[comparable])
    assert torch.equal(planes.payload.view(-1, 8)[comparable], elements.view(torch.uint8).view(-1, 8)[comparable])


def test_nvfp4_does_not_erase_small_blocks() -> None:
    """A block far below the tensor's largest keeps what the smallest scale can say of it."""
    values = torch.zeros(32)
    values[0], values[16:] = 2688.0, 0.0039
    planes = quantized(Nvfp4Format(), values, (32,))
    assert planes.scales.tolist() == [0x7E, 0x01]
    assert torch.equal(planes.values(32)[16:], torch.full((16,), 2.0 * 2.0**-9))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_cuts_change_nothing(kind: str, data: st.DataObject) -> None:
    """Runs of whole atoms, quantized each for itself, are the planes of the whole; stochastic rounding, too."""
    largest = (300, 140) if kind == "block" else (6, 100)
    shape = data.draw(st.one_of(st.tuples(*(st.integers(1, size) for size in largest)), st.tuples(st.integers(1, 300))))
    number_format = replace(FORMATS[kind], rounding=data.draw(st.sampled_from(["nearest", "stochastic"])), seed=3)
    numel, geometry = math.prod(shape), number_format.geometry(shape)
    values = torch.from_numpy(random_rows(np.random.default_rng(numel), 1, numel, spread=2).reshape(-1))
    whole = quantized(number_format, values, shape)
    cut = data.draw(st.integers(0, -(-numel // geometry.atom))) * geometry.atom
    runs = [values[:cut], values[cut:]]
    parts = [
        quantized(number_format, run, shape, amax=whole.amax, start=start)
        for run, start in zip(runs, (0, min(cut, numel)), strict=True)
    ]
    assert torch.equal(torch.cat([part.scales for part in parts]), whole.scales)
    got = torch.cat([part.values(run.numel()) for part, run in zip(parts, runs, strict=True)])
    assert torch.equal(got, whole.values(numel))
    if cut % number_format.alignment == 0:
        assert torch.equal(torch.cat([part.payload for part in parts]), whole.payload)


@kinds
def test_aligned_runs_find_their_scales(kind: str) -> None:
    """Where rows are whole blocks, the scales of an aligned run begin at its first element / block."""
    number_format = FORMATS[kind]
    geometry = number_format.geometry((8, 64))
    if number_format.scale_bytes == 1:
        assert geometry.atom == number_format.alignment and geometry.scales_per_atom == 1
    else:
        assert geometry.atom % number_format.alignment == 0 or geometry.atom == 1


@kinds
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("shape", "numels"), [((3, 100), (17, 70)), ((700,), (17, 70)), ((300, 150), (4000, 40000))])
def test_pieces_change_nothing(
    kind: str, rounding: str, shape: tuple[int, ...], numels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by working on pieces: of any size, blocks that are larger included."""
    number_format = replace(FORMATS[kind], rounding=rounding)
    values = torch.from_numpy(random_rows(np.random.default_rng(1), 1, math.prod(shape), spread=2).reshape(-1))
    monkeypatch.setattr(block_views, "HOST_PIECE_NUMEL", 1 << 30)
    whole = quantized(number_format, values, shape)
    expected = whole.values(values.numel())
    for numel in numels:
        monkeypatch.setattr(block_views, "HOST_PIECE_NUMEL", numel)
        planes = quantized(number_format, values, shape)
        assert torch.equal(planes.payload, whole.payload) and torch.equal(planes.scales, whole.scales)
        assert torch.equal(planes.values(values.numel()), expected)


def test_example_of_spans() -> None:
    runs = [(span.start, span.stop, span.num_blocks, span.block) for span in block_views.spans(70, 16, 40)]
    assert runs == [(0, 32, 2, 0), (32, 64, 2, 2), (64, 70, 1, 4)]
    cut = [(span.start, span.stop, span.num_blocks, span.block) for span in block_views.spans(70, 50, 40)]
    assert cut == [(0, 40, 1, 0), (40, 50, 1, 0), (50, 70, 1, 1)]
    assert block_views.spans(0, 16, 40) == []


def _dequantize(grid: block_views.Grid, payload: torch.Tensor, **given: Any) -> None:
    """Do what the kernel does with what it is told."""
    bits, scales, amax, out, element = (given[name] for name in ("scale_bits", "scales", "amax", "out", "element"))
    if bits == "amax":
        plane = (1 / (torch.tensor(448.0) / amax)).view(1, 1)
    elif bits == "float32":
        plane = scales.view(torch.float32).view(grid.num_blocks)
    elif bits == "e8m0":
        plane = float_bits.decode_powers(scales).view(grid.num_blocks)
    else:
        plane = float_bits.E4M3.decode(scales.view(grid.num_blocks)) * (amax / torch.tensor(2688.0))
    codes = float_bits.unpack_nibbles(payload)[: out.numel()] if element is float_bits.E2M1 else payload
    block_views.decode_blocks(grid, codes, element=element, plane=plane, out=out)


def _quantize(grid: block_views.Grid, values: torch.Tensor, **given: Any) -> None:
    """Likewise, by the oracle's formats where the kernel finds scales."""
    bits, source, payload = given["scale_bits"], given["source"], given["payload"]
    if bits == "factors":
        block_views.encode_blocks(
            grid,
            values,
            scale=torch.mul,
            factors=given["factors"],
            element=given["element"],
            codes=payload,
            source=source,
        )
        return
    assert source is None and given["factors"] is None and grid.block_rows == 1
    assert (bits == "e4m3") == (given["amax"] is not None) == (given["element"] is float_bits.E2M1)
    kind = "nvfp4" if bits == "e4m3" else bits
    found = tensor_of(kind, values.view(grid.rows, grid.columns).numpy())
    for plane, data in zip((payload, given["scales"]), found[:2], strict=True):
        plane.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@kinds
@pytest.mark.parametrize("shape", [(3, 40), (5, 33), (300, 150), (64, 64), (70,)], ids=str)
def test_kernels_are_told_all_of_it(kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA kernels do it: doubles do the same with what they are given. number_formats.py has the real ones."""
    values = torch.randn(math.prod(shape))
    planes = quantized(FORMATS[kind], values, shape)
    expected = planes.values(math.prod(shape))
    kernels = mock.Mock(
        amax_bits=mock.Mock(side_effect=block_views.Grid.amax_bits),
        quantize=mock.Mock(side_effect=_quantize),
        dequantize=mock.Mock(side_effect=_dequantize),
    )
    monkeypatch.setattr(number_formats, "kernels_for", lambda tensor: kernels)
    again = quantized(FORMATS[kind], values, shape)
    assert torch.equal(again.payload, planes.payload) and torch.equal(again.scales, planes.scales)
    assert torch.equal(planes.values(math.prod(shape)), expected)
    assert kernels.amax_bits.call_count == (kind in ("row", "block"))
    assert kernels.quantize.call_count == kernels.dequantize.call_count == 1


@pytest.mark.parametrize("kind", ["row", "nvfp4", "floor"])
def test_kernels_are_told_of_noise(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = mock.Mock(amax_bits=block_views.Grid.amax_bits)
    monkeypatch.setattr(number_formats, "kernels_for", lambda tensor: kernels)
    quantized(replace(FORMATS[kind], rounding="stochastic", seed=3), torch.randn(64), (64,), start=64)
    assert kernels.quantize.call_args.kwargs["source"] == block_views.Noise(seed=3, start=64)


def test_hosts_have_no_kernels() -> None:
    assert format_kernels.kernels_for(torch.ones(1)) is None


class _Watch(TorchDispatchMode):
    """Notes the bytes of the largest result, and refuses what would wait for a device or depend on values."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique"}, name
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self._known:
            self.largest_bytes = max(self.largest_bytes, result.nbytes)
        return result


@kinds
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nothing_waits_and_memory_is_small(kind: str, rounding: str) -> None:
    """No result is larger than a piece in int64; but for NVFP4, whose elements are bytes for a while."""
    numel = 1 << 20
    number_format = replace(FORMATS[kind], rounding=rounding)
    values = torch.linspace(-3, 3, numel).to(torch.bfloat16)
    planes = quantized(number_format, values, (1, numel))
    out = torch.empty(numel)
    with _Watch(values, planes.payload, planes.scales, out) as watch:
        number_format.quantize(values, (1, numel), planes.payload, planes.scales, amax=planes.amax)
        number_format.dequantize(planes.payload, planes.scales, (1, numel), out, amax=planes.amax)
    assert 0 < watch.largest_bytes <= max(8 * block_views.HOST_PIECE_NUMEL, numel if kind == "nvfp4" else 0)


STOCHASTIC = {"fp8": Fp8Format("tensor", "stochastic"), "nvfp4": Nvfp4Format("stochastic")}
stochastic = pytest.mark.parametrize("kind", STOCHASTIC)


def _amax_of(kind: str) -> torch.Tensor:
    """Return the amax with which elements of FP8, and of NVFP4 in a block with a 6, are scaled by one."""
    return torch.tensor(448.0 if kind == "fp8" else 6.0 * 448.0)


def _values_of(kind: str, value: float, numel: int) -> torch.Tensor:
    values = torch.full((numel,), value)
    values[::16] = 6.0
    return values


@stochastic
@pytest.mark.parametrize("value", [0.3, -0.3, 0.001, 0.0175, 1.3, 2.6, 5.9])
def test_stochastic_rounding_is_unbiased(kind: str, value: float) -> None:
    """The mean over half a million elements, and that over seeds at one element, within five standard deviations."""
    numel, grid = 1 << 19, elements_of(E4M3 if kind == "fp8" else E2M1)
    position = np.searchsorted(grid, value, side="right")
    low, high = grid[position - 1], grid[position]
    share = (FLOAT(value) - low) / (high - low)
    values = _values_of(kind, value, numel)
    got = quantized(STOCHASTIC[kind], values, (numel,), amax=_amax_of(kind)).values(numel)
    assert torch.equal(got[::16], values[::16])
    got = got.view(-1, 16)[:, 1:]
    assert ((got == float(low)) | (got == float(high))).all(), "other elements than the neighbours"
    up = (got == float(high)).double()
    assert abs(up.mean() - share) < 5 * math.sqrt(share * (1 - share) / up.numel())
    # Neighbouring elements are independent.
    both = (up[:, 1:] * up[:, :-1]).mean()
    assert abs(both - share**2) < 5 * math.sqrt(share**2 * (1 - share**2) / up.numel())

    seeds = range(500)
    values = _values_of(kind, value, 16)
    ups = [
        quantized(replace(STOCHASTIC[kind], seed=seed), values, (16,), amax=_amax_of(kind)).values(16)[5] == high
        for seed in seeds
    ]
    assert abs(sum(map(float, ups)) / len(ups) - share) < 5 * math.sqrt(share * (1 - share) / len(ups))


@stochastic
def test_stochastic_rounding_keeps_elements(kind: str) -> None:
    grid = torch.from_numpy(elements_of(E4M3 if kind == "fp8" else E2M1))
    values = torch.cat([torch.full((1,), 6.0), grid, -grid]) if kind == "fp8" else torch.cat([grid, torch.zeros(1)])
    for seed in range(50):
        number_format = replace(STOCHASTIC[kind], seed=seed)
        assert torch.equal(
            quantized(number_format, values, values.shape, amax=_amax_of(kind)).values(len(values)), values
        )


@pytest.mark.parametrize("kind", ["tensor", "row", "block", "floor", "ceil"])
def test_stochastic_rounding_takes_a_neighbour_of_any_value(kind: str) -> None:
    """The two elements around the scaled value, whatever its magnitude; beyond the largest, that one."""
    values = torch.from_numpy(random_rows(np.random.default_rng(2), 256, 128, spread=5).reshape(-1))
    shape = (256, 128)
    nearest = quantized(FORMATS[kind], values, shape)
    planes = quantized(replace(FORMATS[kind], rounding="stochastic"), values, shape)
    assert torch.equal(planes.scales, nearest.scales)
    ones = replace(planes, payload=torch.full_like(planes.payload, 0x38))  # 1.0, so that values are scales
    scaled = (values.double() / ones.values(values.numel()).double()).clamp(-448, 448).numpy()
    grid = elements_of(E4M3).astype(np.float64)
    got = planes.payload.numpy().view(E4M3).astype(np.float64)
    # Scales of rows and tensors are rounded reciprocals of what values have been scaled by.
    slack = abs(scaled) * (1e-6 if kind in ("tensor", "row") else 0.0)
    low = grid[(np.searchsorted(grid, scaled - slack, side="right") - 1).clip(0)]
    high = grid[np.searchsorted(grid, scaled + slack, side="left").clip(None, len(grid) - 1)]
    assert ((low <= got) & (got <= high)).all()
    assert (planes.payload != nearest.payload).float().mean() > 0.1


def test_stochastic_rounding_depends_on_seed_index_and_value() -> None:
    number_format = Fp8Format("row", "stochastic", seed=5)
    values = torch.rand(4096) + 1

    def payload(start: int = 0, seed: int = 5, run: torch.Tensor = values) -> torch.Tensor:
        return quantized(replace(number_format, seed=seed), run, (4096,), start=start).payload

    first = payload()
    assert torch.equal(first, payload())
    beyond = 1 << 32
    others = [payload(seed=6), payload(seed=5 + beyond), payload(start=4096), payload(start=beyond)]
    assert all((first != other).float().mean() > 0.05 for other in others)
    moved = payload(run=values * (1 + 2.0**-20))
    assert (first != moved).float().mean() > 0.05


def _expected_word(index: int, bits: int, seed: int) -> int:
    def mixed(word: int) -> int:
        word ^= word >> 15
        word = word * 0x2C1B3C6D % 2**32
        word ^= word >> 12
        word = word * 0x297A2D39 % 2**32
        return word ^ word >> 15

    return mixed(mixed(index % 2**32 ^ seed % 2**32) ^ index >> 32 ^ bits ^ seed >> 32)


def test_noise_is_defined_and_even() -> None:
    """Words as Python's integers say, and every bit of them is set half of the time."""
    values = torch.cat([torch.randn(4096, generator=torch.Generator().manual_seed(0)), torch.tensor([-0.0, math.inf])])
    for start, seed in ((0, 0), ((1 << 32) - 7, 1), ((1 << 40) + 5, (1 << 64) - 1)):
        indices = torch.arange(values.numel()) + start
        words = float_bits.noise(indices, values, seed)
        bits = values.numpy().view(np.uint32)
        assert words.tolist() == [
            _expected_word(start + index, int(word), seed) for index, word in enumerate(bits.tolist())
        ]
        shares = torch.stack([(words >> bit & 1).double().mean() for bit in range(32)])
        assert (shares - 0.5).abs().max() < 5 * 0.5 / math.sqrt(values.numel())


def _bad_arguments() -> Iterator[tuple[Any, str]]:
    yield lambda: Fp8Format("column"), "FP8 scaling: expected one of tensor, row, block, got 'column'"
    yield lambda: Mxfp8Format("even"), "MXFP8 scale rounding: expected one of floor, ceil, got 'even'"
    yield lambda: Nvfp4Format("up"), "rounding: expected one of nearest, stochastic, got 'up'"
    yield lambda: Fp8Format("row", seed=-1), r"rounding seed: expected an integer in \[0, 2\*\*64\), got -1"
    yield lambda: Nvfp4Format(seed=1 << 64), "rounding seed: expected an integer"
    values, planes = torch.ones(64), torch.zeros(64, dtype=torch.uint8)
    short = r"planes: expected 64 bytes of payload and 2 of scales for 64 elements of shape \(64,\), got 64 and 1"
    yield lambda: Mxfp8Format().quantize(values, (64,), planes, planes[:1]), short
    yield lambda: Mxfp8Format().dequantize(planes, planes[:1], (64,), values), short
    missing = "NVFP4 amax: expected an amax, got none. Do as `needs_amax` says"
    yield lambda: Nvfp4Format().quantize(values, (64,), planes[:32], planes[:4]), missing
    surplus = "amax: expected no amax, got one"
    yield lambda: Mxfp8Format().dequantize(planes, planes[:2], (64,), values, amax=values[0]), surplus


@pytest.mark.parametrize(("call", "message"), list(_bad_arguments()))
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
