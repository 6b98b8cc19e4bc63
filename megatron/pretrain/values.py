# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Says what a flag's value may be by itself, for argparse."""

import argparse
from collections.abc import Callable


def integer(at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    """Return a converter to an integer within bounds."""
    bounds = f">= {at_least}" if at_most is None else f"in [{at_least}, {at_most}]"

    def convert(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = None
        if value is None or value < at_least or (at_most is not None and value > at_most):
            raise argparse.ArgumentTypeError(f"expected an integer {bounds}, got {word!r}")
        return value

    return convert


def number(at_least: float, at_most: float = float("inf")) -> Callable[[str], float]:
    """Return a converter to a finite number within bounds."""
    bounds = f">= {at_least:g}" if at_most == float("inf") else f"in [{at_least:g}, {at_most:g}]"

    def convert(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = float("nan")
        if not at_least <= value <= at_most or value == float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {word!r}")
        return value

    return convert


def above_zero(word: str) -> float:
    """Convert a finite number above 0."""
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {word!r}")
    return value


def decay(word: str) -> float:
    """Convert the decay of a moment: with 1 it would never take in a gradient."""
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number in [0, 1), got {word!r}")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    """Return a converter that lets only these names pass."""

    def convert(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {word!r}")
        return word

    return convert
