# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Elements of low-bit number formats as bits: rounding to them, and their values; the same bits on every device.

It knows no blocks: what elements are scaled by is in `number_formats.py`.

[Note: bits]
Passes over integers and over float32 are what hosts are fast at and where devices agree. So an element's value is made
by moving its exponent and mantissa to where float16 has them: read with float16's larger bias that is the value times
a power of two, for subnormal elements too, and one exact product undoes that. Not float32: hosts take a hundred times
longer for its subnormal numbers, but not for those of float16 on their way to float32.

Two things are avoided because they give other bits on CUDA than on hosts: dividing by a Python number, which multiplies
by the reciprocal there, and the sign of NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT32_EXPONENT = 0x7F800000
"""The exponent's bits in float32: those of infinity."""

_MAGNITUDE = 0x7FFFFFFF
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class ElementBits:
    """A sign, an exponent and a mantissa in at most eight bits, with subnormal numbers and without infinities.

    Attributes:
        exponent_bits: of one element.
        mantissa_bits: of one element.
        bias: of the exponent.
        largest: finite magnitude; whatever is larger is rounded to it.
        has_nan: whether all ones are NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    has_nan: bool

    def encode(self, values: torch.Tensor, codes: torch.Tensor, noise: torch.Tensor | None = None) -> None:
        """Round values to elements: ties go to even, or noise decides.

        Args:
            values: float32, of any shape; used up. NaN becomes zero.
            codes: uint8, of the same shape; overwritten with elements in the low bits.
            noise: int64 in [0, 2**32), of the same shape, for stochastic rounding.
        """
        # Clamping keeps NaN, whose bits would differ between devices.
        values.nan_to_num_(nan=0.0).clamp_(-self.largest, self.largest)
        if self is E4M3 and noise is None:
            codes.view(torch.float8_e4m3fn).copy_(values)
            return
        mantissa = self.mantissa_bits
        sign_bit = 1 << (self.exponent_bits + mantissa)
        signs = (values.view(torch.int32) >> (31 - self.exponent_bits - mantissa)).bitwise_and_(sign_bit)
        magnitudes = values.abs_()
        lowest = 128 - self.bias  # the exponent of the smallest normal element, as float32 has it
        powers = (magnitudes.view(torch.int32) & FLOAT32_EXPONENT).clamp_(min=lowest << 23)
        if noise is None:
            steps = self._steps_to_nearest(magnitudes, powers)
        else:
            steps = self._steps_by_noise(magnitudes, powers, noise)
        # A step too many is the first element of the next power of two, which is what the sum says, too.
        powers.bitwise_right_shift_(23 - mantissa).sub_(lowest << mantissa)
        codes.copy_(steps.add_(powers).bitwise_or_(signs))

    def _steps_to_nearest(self, magnitudes: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
        """Return how many steps of its power of two each magnitude is, by letting float32 round a sum.

        Example, E2M1: 2.6 lies in [2, 4), where elements are 1 apart. Float32 are 1 apart from 2**23 on: 2**23 + 2.6 is
        rounded to 2**23 + 3, three steps.
        """
        large = powers + ((23 - self.mantissa_bits) << 23)
        return (magnitudes + large.view(torch.float32)).view(torch.int32).sub_(large)

    def _steps_by_noise(self, magnitudes: torch.Tensor, powers: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the steps below or above each magnitude: above as often as it is near to it.

        Noise has as many bits as float32 drops, so that sums are exact and whole steps stay.
        """
        dropped = 23 - self.mantissa_bits
        inverse = ((254 << 23) - powers).add_(self.mantissa_bits << 23)
        fractions = (noise >> (32 - dropped)).to(torch.float32).mul_(2.0**-dropped)
        return magnitudes.mul_(inverse.view(torch.float32)).add_(fractions).floor_().to(torch.int32)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the values of elements, float32, exactly.

        Args:
            codes: uint8, of any shape, elements in the high bits.
        """
        unit = 10 - self.mantissa_bits  # the lowest bit of the mantissa, as float16 has it
        fields = ((1 << (self.exponent_bits + self.mantissa_bits)) - 1) << unit
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(3 + self.exponent_bits)
        bits.bitwise_and_(fields - (1 << 15))
        if self.has_nan:
            # One more than all ones carries, and that bit before all ones makes NaN of float16: five ones and more.
            bits |= (bits + (1 << unit)).bitwise_and_(1 << 14)
        return bits.view(torch.float16).to(torch.float32).mul_(2.0 ** (15 - self.bias))


E4M3 = ElementBits(exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0, has_nan=True)
"""FP8 with more precision: OCP 8-bit floating point, E4M3; torch's float8_e4m3fn."""

E2M1 = ElementBits(exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0, has_nan=False)
"""FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def decode_powers(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of E8M0 scales, float32: 2 ** (code - 127), NaN for 255.

    Args:
        codes: uint8, of any shape.
    """
    bits = codes.to(torch.int32) << 23
    # 2**-127 is a subnormal number of float32, and what would be infinity is NaN.
    bits = bits.clamp_(min=1 << 22).masked_fill_(codes == 255, FLOAT32_EXPONENT | 1 << 22)
    return bits.view(torch.float32)


def magnitude_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of magnitudes, int32: they are ordered as magnitudes are, infinity and NaN above all others.

    Args:
        values: float32, of any shape.
    """
    return values.view(torch.int32) & _MAGNITUDE


def pack_nibbles(codes: torch.Tensor, payload: torch.Tensor) -> None:
    """Put two elements of four bits into each byte, the earlier one into the low bits.

    Args:
        codes: [2 * bytes], uint8, contiguous; elements in the low bits.
        payload: [bytes], uint8.
    """
    # Devices have the earlier byte of a word in its low bits, too: 0x0b0a -> 0x0bba, whose low byte counts.
    words = codes.view(torch.int16)
    payload.copy_((words >> 4).bitwise_or_(words))


def unpack_nibbles(payload: torch.Tensor) -> torch.Tensor:
    """Return elements of four bits as bytes, in the high bits as `decode` wants them: uint8, [2 * bytes]."""
    words = payload.to(torch.int16).bitwise_left_shift_(4)
    return (words << 4).bitwise_or_(words).bitwise_and_(0xF0F0 - (1 << 16)).view(torch.uint8)


def noise(indices: torch.Tensor, values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return pseudo-random words, int64 in [0, 2**32), that depend on nothing but the arguments.

    A number's index, its bits and the seed are mixed into its word: no generator moves, so that any cut of a tensor and
    any resumed run give the same words.

    Args:
        indices: of the numbers in their tensor, int64, of any shape.
        values: the numbers, float32, of the same shape.
        seed: in [0, 2**64).
    """
    words = _mixed(indices.bitwise_and(_WORD).bitwise_xor_(seed & _WORD))
    words ^= indices >> 32
    words ^= values.view(torch.int32).to(torch.int64).bitwise_and_(_WORD)
    return _mixed(words.bitwise_xor_(seed >> 32))


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix words of 32 bits in place, one to one: every bit depends on every bit.

    Products stay below 2**63, so that no device needs to say what an overflow is. Source: Chris Wellons' search for
    integer hash functions with low bias, whose constants these are (public domain).
    """
    words ^= words >> 15
    words.mul_(0x2C1B3C6D).bitwise_and_(_WORD)
    words ^= words >> 12
    words.mul_(0x297A2D39).bitwise_and_(_WORD)
    words ^= words >> 15
    return words
