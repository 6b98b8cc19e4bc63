# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The console command ``mfsdp-ckpt``: reads its arguments and calls the one of its commands that is named."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

with warnings.catch_warnings():
    # megatron-core warns at import of packages that train faster; nothing is trained here.
    warnings.simplefilter("ignore")
    from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError

from megatron.inspector import convert
from megatron.inspector.diff import diff
from megatron.inspector.elements import Tolerance
from megatron.inspector.export import export
from megatron.inspector.listing import list_keys, show_key
from megatron.inspector.llama import ModelArguments
from megatron.inspector.safetensors_file import EXPORT_DTYPES
from megatron.inspector.text import parse_bytes, safe
from megatron.inspector.verify import verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the command's name; default those of the process.

    Returns:
        The exit code: 0; 1 where checkpoints differ or one is not whole; 2 for an error, which is printed.
    """
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        code = run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (CheckpointError, OSError) as error:
        print(f"mfsdp-ckpt: {safe(str(error))}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mfsdp-ckpt",
        description="Look into checkpoints in the format of PyTorch DCP, compare, verify and export them. Works in one "
        "CPU process; nothing in a checkpoint is executed. A training's folder stands for its latest checkpoint.",
        epilog="Exit codes: 0; 1 when checkpoints differ or one is not whole; 2 for an error.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_list(commands.add_parser("list", help="all keys, with shapes, dtypes, sizes and totals"))
    _add_show(commands.add_parser("show", help="one key: chunks, norm, extremes, first values"))
    _add_diff(commands.add_parser("diff", help="compare two checkpoints, by default bit for bit"))
    _add_verify(commands.add_parser("verify", help="check that a checkpoint is whole"))
    _add_export(commands.add_parser("export", help="write the model as safetensors"))
    convert.add_parser(commands)
    return parser


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda args: list_keys(args.folder, as_json=args.json))


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("key", metavar="KEY")
    parser.add_argument("--first", type=_count, default=8, metavar="N", help="values to print (default 8)")
    _add_max_memory(parser)
    parser.set_defaults(
        run=lambda args: show_key(args.folder, args.key, max_memory=args.max_memory, num_first=args.first)
    )


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument("--rtol", type=_tolerance, default=0.0, help="allowed |a - b| / |b| (default 0)")
    parser.add_argument("--atol", type=_tolerance, default=0.0, help="allowed |a - b| (default 0); both 0: bit for bit")
    parser.add_argument("--equal-nan", action="store_true", help="take NaN as equal to NaN")
    parser.add_argument("--all", action="store_true", help="print the keys that are the same, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_max_memory(parser)
    parser.set_defaults(
        run=lambda args: diff(
            (args.first, args.second),
            Tolerance(args.rtol, args.atol, args.equal_nan),
            max_memory=args.max_memory,
            show_all=args.all,
            as_json=args.json,
        )
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--no-checksums", action="store_true", help="check sizes and headers, do not read every byte")
    parser.set_defaults(run=lambda args: verify(args.folder, checksums=not args.no_checksums))


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument(
        "--format",
        choices=("safetensors", "hf"),
        default="safetensors",
        help="safetensors: the model's own names (default); hf: Hugging Face's Llama, with config.json",
    )
    parser.add_argument("--dtype", choices=sorted(EXPORT_DTYPES), help="of floating-point tensors (default: as saved)")
    parser.add_argument("--max-shard-size", type=_bytes, default=5 * 1000**3, metavar="BYTES", help="default 5GB")
    _add_max_memory(parser)
    group = parser.add_argument_group("model, for --format hf", "default: the arguments saved in the checkpoint")
    for name, kind in ModelArguments.flags():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")
    parser.set_defaults(
        run=lambda args: export(
            args.folder,
            args.output,
            layout=args.format,
            dtype=args.dtype,
            max_shard_bytes=args.max_shard_size,
            max_memory=args.max_memory,
            given={name: getattr(args, name) for name, _ in ModelArguments.flags() if getattr(args, name) is not None},
        )
    )


def _add_max_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-memory",
        type=_bytes,
        default=1 << 30,
        metavar="BYTES",
        help="for tensors, besides the program itself; for example 256MiB (default 1GiB)",
    )


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of values, got {text!r}")
    return int(text)


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value
