# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads the command line and explains what it does not know.

The flags of training are declared in ``flags.py``; ``validation.py`` decides whether their values fit together,
and ``refused.py`` knows the flags of Megatron-LM that have no meaning here.
"""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import NoReturn

from megatron.pretrain.flags import add_flags
from megatron.pretrain.refused import REFUSED_FLAGS


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line of the training script.

    Args:
        argv: The words after the script's name.

    Returns:
        See ``read_flags``.
    """
    return read_flags(_build_parser(), argv, REFUSED_FLAGS)


def read_flags(parser: "FlagParser", argv: Sequence[str], refused: Mapping[str, str]) -> argparse.Namespace:
    """Read a command line.

    Args:
        parser: Knows the flags.
        argv: The words after the script's name.
        refused: Flags of Megatron-LM that the script does not honour, with what to do instead.

    Returns:
        One attribute per flag, and ``given``: the set of the flags written on the command line.

    Raises:
        ValueError: For unknown flags, with the nearest known one, and refused flags, with the
            reason, all at once; or a word that is no value for its flag.
    """
    known = sorted(parser._option_string_actions)
    flags = [word.split("=", 1)[0] for word in argv if word.startswith("--")]
    unknown = dict.fromkeys(flag for flag in flags if flag not in known)
    if unknown:
        raise ValueError("\n".join(_explain_unknown(flag, known, refused) for flag in unknown))
    args, rest = parser.parse_known_args(argv)
    if rest:
        raise ValueError(
            f"Command line: expected flags that start with --, got {rest[0]!r} for no flag. "
            "Put a flag before the value or remove it."
        )
    args.given = set(flags)
    return args


def _explain_unknown(flag: str, known: Sequence[str], refused: Mapping[str, str]) -> str:
    if flag in refused:
        return (
            "Unsupported flag: expected a flag that this script honours, got "
            f"{flag} for the command line. {refused[flag]}"
        )
    nearest = max(known, key=lambda name: _similarity(flag, name))
    hint = f"Did you mean {nearest}? " if _similarity(flag, nearest) > 0.7 else ""
    return (
        f"Unknown flag: expected a flag that this script honours, got {flag} for the command line. "
        f"{hint}See --help for all flags."
    )


def _similarity(flag: str, name: str) -> float:
    """Compare letters and whole words: --fsdp-v2 is near --use-megatron-fsdp-v2."""
    num_shared_words = len(set(flag[2:].split("-")) & set(name[2:].split("-")))
    return difflib.SequenceMatcher(None, flag, name).ratio() + 0.3 * num_shared_words


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that are values, not None or a switch that is off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


class FlagParser(argparse.ArgumentParser):
    """Raises ValueError for what it cannot read, with the flag's name.

    Args:
        prog: How the script is called.
        description: What it does.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            exit_on_error=False,
            formatter_class=_HelpFormatter,
        )

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse as argparse does."""
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            found = "got no value" if error.message.startswith("expected") else "got a bad one"
            raise ValueError(
                f"Command line: {error.message}"
                + ("" if ", got " in error.message else f", {found}")
                + f" for {error.argument_name}. Correct the value; --help shows each flag's."
            ) from None

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise ValueError(f"Command line: {message}. See --help for all flags.")


def _build_parser() -> FlagParser:
    parser = FlagParser(
        "pretrain_gpt.py",
        "Train a GPT with megatron-core; without a data flag, on the bytes of the Python standard library.",
    )
    add_flags(parser)
    return parser
