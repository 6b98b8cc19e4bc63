# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt convert``: between megatron-core's ``torch_dist`` and ``fsdp_dtensor``, in one CPU process.

States of random number generators are left out; what each format is made of is said in ``to_*.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError, iteration_folder, read_latest
from megatron.core.distributed.fsdp.torch_dist_checkpoint import is_torch_dist
from megatron.inspector.streams import open_source, write_new
from megatron.inspector.text import bytes_text, parse_bytes
from megatron.inspector.to_fsdp_dtensor import Choices, fsdp_dtensor_from
from megatron.inspector.to_torch_dist import torch_dist_from

FORMATS = ("fsdp_dtensor", "torch_dist")


def add_parser(commands: Any) -> None:
    """Add the command to what ``add_subparsers`` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="torch_dist to fsdp_dtensor, or back",
        description="Write a checkpoint in another format. States of random number generators are left out: load the "
        "result with --no-load-rng.",
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint, or a training's folder for its latest")
    parser.add_argument("output", type=Path, metavar="DST", help="a folder that does not exist yet")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the new format")
    parser.add_argument("--weights-only", action="store_true", help="leave out the optimizer")
    parser.add_argument(
        "--swiglu",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="gated layers are to be split for fsdp_dtensor (default: by the saved arguments)",
    )
    parser.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default=None,
        help="whose names layer norms get in fsdp_dtensor (default: by the saved arguments)",
    )
    parser.add_argument(
        "--max-memory",
        type=_bytes,
        default=1 << 30,
        metavar="BYTES",
        help="for tensors, besides the program itself; for example 256MiB (default 1GiB)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert.

    Returns:
        0.

    Raises:
        CheckpointError: the source is not in the other format, cannot be converted, or the result cannot be written;
            nothing is left of it then.
    """
    source = _checkpoint_in(args.source)
    if is_torch_dist(source) == (args.to == "torch_dist"):
        other = next(name for name in FORMATS if name != args.to)
        raise CheckpointError(
            f"{source}: expected a checkpoint in {other} format for --to {args.to}, got one that is not. Name another "
            "one, or the other format."
        )
    if args.to == "torch_dist" and (args.swiglu is not None or args.transformer_impl is not None):
        raise CheckpointError(
            "convert: expected --swiglu and --transformer-impl with --to fsdp_dtensor only, got --to torch_dist. Leave "
            "them out: names say it."
        )
    opened = open_source(source)
    if args.to == "torch_dist":
        new = torch_dist_from(opened, weights_only=args.weights_only)
    else:
        local = None if args.transformer_impl is None else args.transformer_impl == "local"
        new = fsdp_dtensor_from(opened, Choices(args.swiglu, local, args.weights_only))
    num_bytes = write_new(new, opened, args.output, args.max_memory)
    print(f"{args.output}: {len(new.tensors)} tensors, {bytes_text(num_bytes)}, in {args.to} format")
    return 0


def _checkpoint_in(folder: Path) -> Path:
    """Return the folder, or that of a training's latest checkpoint."""
    if (folder / ".metadata").exists():
        return folder
    iteration = read_latest(folder)
    return folder if iteration is None else iteration_folder(folder, iteration)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
