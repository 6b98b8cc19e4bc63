# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A run with megatron-core's DDP and distributed optimizer goes on with Megatron-FSDP v2."""

from __future__ import annotations

from pathlib import Path

import pytest

from .launch_script import launch_forked, launch_once

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64", "--swiglu"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "8", "--log-interval", "1"),
    *("--num-workers", "0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--eval-interval", "4", "--eval-iters", "1"),
)
DISTRIBUTED = ("--use-distributed-optimizer",)


def test_torch_dist_to_fsdp_dtensor(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "ddp"), "--exit-interval", "4")
    straight, begun = launch_once((*FLAGS, *DISTRIBUTED), 2), launch_forked((*FLAGS, *DISTRIBUTED, *save), 2)
    assert begun.returncode == 0, begun.stderr[-3000:]
    load = ("--use-megatron-fsdp-v2", "--load", str(tmp_path / "ddp"), "--save", str(tmp_path / "v2"))
    resumed = launch_forked((*FLAGS, *load, "--no-load-rng"), 1)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    for name in ("lm_loss", "grad_norm", "validation_loss"):
        expected = straight.series(name)
        both = begun.series(name) + resumed.series(name)
        assert len(both) == len(expected) and both == pytest.approx(expected, rel=2e-6), name
    assert begun.series("learning_rate") + resumed.series("learning_rate") == straight.series("learning_rate")
    assert (tmp_path / "v2/iter_0000008/manifest.json").is_file()
