# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares the flags of saving and loading, and checks them; no file is read here."""

import argparse

from megatron.pretrain.values import integer, one_of

_count = integer(1)


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of saving and loading."""
    add = parser.add_argument_group("checkpoints").add_argument
    add("--save", metavar="FOLDER", help="write checkpoints here, each into a folder iter_0000020 or the like")
    add("--save-interval", type=_count, help="iterations between checkpoints; default: one at the end")
    add("--load", metavar="FOLDER", help="go on from the latest checkpoint here, or from the one that this folder is")
    add("--ckpt-step", type=_count, help="load the checkpoint of this iteration instead of the latest")
    add(
        "--ckpt-format",
        type=one_of("fsdp_dtensor", "torch_dist"),
        help="fsdp_dtensor with --use-megatron-fsdp-v2, megatron-core's torch_dist without it, which is the default",
    )
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--keep-last", type=_count, help="delete all but this many checkpoints of --save")
    add("--no-save-optim", action="store_true", help="leave the optimizer's state out of checkpoints")
    add("--no-save-rng", action="store_true", help="leave random number generators out of checkpoints")
    add("--no-load-optim", action="store_true", help="load weights without the optimizer's state")
    add("--no-load-rng", action="store_true", help="do not load random number generators")
    add("--finetune", action="store_true", help="load weights only, and start with iteration 1")
    add("--exit-on-missing-checkpoint", action="store_true", help="fail if --load holds none, instead of starting anew")
    add("--verify-checksums", action="store_true", help="compare the checksums of all files before they are loaded")
    add(
        "--override-opt_param-scheduler",
        action="store_true",
        help="take the learning rate schedule from the flags, not from the checkpoint",
    )
    add(
        "--use-checkpoint-opt_param-scheduler",
        action="store_true",
        help="take the learning rate schedule from the checkpoint, whatever the flags say",
    )
    add("--exit-interval", type=_count, help="save and end after an iteration that is a multiple of this")


def complete_checkpoint_flags(args: argparse.Namespace) -> None:
    """Check the flags of saving and loading, and fill in what follows from others.

    Raises:
        ValueError: A format that the wrapper does not write.
    """
    writes = "fsdp_dtensor" if args.use_megatron_fsdp_v2 else "torch_dist"
    if args.ckpt_format not in (None, writes):
        wrapper = "Megatron-FSDP v2" if args.use_megatron_fsdp_v2 else "megatron-core's DDP"
        also = "; it reads torch_dist without being told" if args.use_megatron_fsdp_v2 else ""
        raise ValueError(
            f"Checkpoints: expected {writes}, which is what {wrapper} writes{also}, got {args.ckpt_format} for "
            "--ckpt-format. Drop the flag."
        )
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "Schedule: expected one of --override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler, got "
            "both for --override-opt_param-scheduler. Drop one."
        )
    if args.load and not args.use_megatron_fsdp_v2:
        raise NotImplementedError(
            f"Checkpoints: expected --use-megatron-fsdp-v2, got a run without it for --load {args.load}. "
            "megatron-core's DDP only saves here, for other programs and for Megatron-FSDP v2 to load."
        )
