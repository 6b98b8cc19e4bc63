# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""FSDP v2 trains under every parallel layout as megatron-core's DDP does under it, and as one rank does.

Initial weights are drawn whole and cut, so that they are the same under every layout. What differs is the order of
sums.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from .launch_script import Run, launch_forked, launch_once
from .tensors import load_tensors

TOLERANCE = 1e-6
"""As in test_parity.py: sums in float32 in another order."""

NUM_ITERATIONS = 4
V2 = "--use-megatron-fsdp-v2"
MODEL = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--swiglu", "--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2"),
    *("--use-cpu-initialization", "--make-vocab-size-divisible-by", "512"),
)
RUN = (
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", str(NUM_ITERATIONS)),
    *("--lr", "1e-2", "--lr-warmup-iters", "1", "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "4"),
)
TP = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "256")
SP = (*TP, "--sequence-parallel")
CP = ("--context-parallel-size", "2")
ZERO1 = (V2, "--data-parallel-sharding-strategy", "optim")
HSDP = (V2, "--num-distributed-optimizer-instances", "2")
ROPE = (
    *("--position-embedding-type", "rope", "--qk-layernorm", "--calculate-per-token-loss"),
    "--untie-embeddings-and-output-weights",
)


@dataclass(frozen=True)
class Layout:
    """Ranks, and the flags that say what they share."""

    name: str
    ranks: int
    flags: tuple[str, ...]


TP2 = Layout("tp2", 2, TP)
TP2_DP2 = Layout("tp2_dp2", 4, TP)
TP2_SP_DP2 = Layout("tp2_sp_dp2", 4, SP)
CP2 = Layout("cp2", 2, CP)
CP2_DP2 = Layout("cp2_dp2", 4, CP)
TP2_CP2 = Layout("tp2_sp_cp2", 4, (*SP, *CP))

CASES = [
    (TP2, (V2,), ()),
    (TP2, (V2,), ROPE),
    (TP2_DP2, (V2,), ()),
    (TP2_DP2, ZERO1, ()),
    (TP2_DP2, HSDP, ()),
    (TP2_SP_DP2, (V2,), ROPE),
    (CP2, (V2,), ROPE),
    (CP2_DP2, (V2,), ()),
    (CP2_DP2, ZERO1, ROPE),
    (TP2_CP2, (V2,), ROPE),
]


def assert_close(found: Run, expected: Run, tolerance: float = TOLERANCE) -> None:
    for name, count in (("lm_loss", NUM_ITERATIONS), ("grad_norm", NUM_ITERATIONS), ("validation_loss", 2)):
        have, want = found.series(name), expected.series(name)
        assert len(have) == len(want) == count, name
        assert have == pytest.approx(want, rel=tolerance), name


def _named(value: object) -> str:
    if isinstance(value, Layout):
        return value.name
    return " ".join(word.removeprefix("--") for word in value) or "plain" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("layout", "wrapper", "model"), CASES, ids=_named)
def test_trains_as_one_rank_and_as_ddp(layout: Layout, wrapper: tuple[str, ...], model: tuple[str, ...]) -> None:
    flags = (*MODEL, *RUN, *model)
    found = launch_once((*wrapper, *flags, *layout.flags, "--log-num-zeros-in-grad"), layout.ranks)
    assert_close(found, launch_once((*flags, "--log-num-zeros-in-grad"), 1))
    assert_close(found, launch_once((*flags, *layout.flags), layout.ranks))
    # Those of tokens that do not occur, but for single ones that a sum in another order makes.
    zeros = launch_once((*flags, "--log-num-zeros-in-grad"), 1).series("num_zeros")
    assert found.series("num_zeros") == pytest.approx(zeros, abs=3)
    assert model != ROPE or min(zeros) > 1000


@pytest.mark.parametrize("layout", [TP2_SP_DP2, CP2], ids=_named)
def test_bf16_trains_as_ddp(layout: Layout) -> None:
    flags = (*MODEL, *RUN, *layout.flags, "--bf16", "--micro-batch-size", "4")
    found, expected = (launch_once((*wrapper, *flags), layout.ranks) for wrapper in ((V2,), ()))
    # A gradient that differs in its last bit may round a weight to the next of bf16's 256 steps.
    assert_close(found, expected, tolerance=1e-4)
    for name in ("lm_loss", "grad_norm"):
        assert found.series(name)[0] == pytest.approx(expected.series(name)[0], rel=TOLERANCE), name


@cache
def _straight() -> Run:
    return launch_once((V2, *MODEL, *RUN), 1)


@pytest.mark.parametrize(("saved", "loaded"), [(TP2_DP2, None), (None, TP2_SP_DP2), (TP2, CP2)], ids=_named)
def test_checkpoints_move_between_layouts(saved: Layout | None, loaded: Layout | None, tmp_path: Path) -> None:
    """Two iterations under one layout, two more under another, as four of one rank."""

    def run(layout: Layout | None, *flags: str) -> Run:
        ranks, own = (1, ()) if layout is None else (layout.ranks, layout.flags)
        done = launch_forked((V2, *MODEL, *RUN, *own, *flags), ranks)
        assert done.returncode == 0, done.stderr[-4000:]
        return done

    run(saved, "--save", str(tmp_path), "--exit-interval", "2")
    found = run(loaded, "--load", str(tmp_path))
    straight = _straight()
    for name in ("lm_loss", "grad_norm"):
        assert len(found.series(name)) == 2
        assert found.series(name) == pytest.approx(straight.series(name)[2:], rel=TOLERANCE), name


DP4 = Layout("dp4", 4, ())
EP = ("--num-experts", "4", "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall")
EP1 = Layout("ep1", 2, EP)
TP2_EP2 = Layout("tp2_etp2_ep2", 4, (*EP, "--expert-model-parallel-size", "2", *SP))
PP2_EP2 = Layout("pp2_ep2", 4, (*EP, "--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"))


@pytest.mark.parametrize(("saved", "between"), [(DP4, TP2_DP2), (EP1, PP2_EP2), (EP1, TP2_EP2)], ids=_named)
def test_weights_and_moments_move_to_another_layout_and_back_bit_for_bit(
    saved: Layout, between: Layout, tmp_path: Path
) -> None:
    model = (*MODEL, *RUN, "--train-iters", "2")
    first = launch_once((V2, *model, *saved.flags, "--save", str(tmp_path), "--save-interval", "2"), saved.ranks)
    assert first.returncode == 0
    source, at = tmp_path, "iter_0000002"
    expected = load_tensors(source / at)
    assert any(key.endswith("exp_avg_sq") and bool(value.any()) for key, value in expected.items())
    for layout in (between, saved):
        target = tmp_path / f"by_{layout.name}"
        words = (*model, *layout.flags, "--load", str(source), "--ckpt-step", "2", "--save", str(target))
        run = launch_forked((V2, *words), layout.ranks, script="tests/functional_tests/load_and_save.py")
        assert run.returncode == 0, run.stderr[-4000:]
        found = load_tensors(target / at)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), layout.name
        source = target


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tensor-model-parallel-size", "3"), r"expected a divisor of the 2 rank\(s\), got 3"),
        ((*TP, "--num-query-groups", "1"), "expected a multiple of --tensor-model-parallel-size 2, got 1 for "),
        ((*TP, "--ffn-hidden-size", "33"), "got 33 for --ffn-hidden-size"),
        ((*SP, "--seq-length", "15"), "got 15 for --seq-length"),
        ((*CP, "--seq-length", "14"), "expected a multiple of 4, twice --context-parallel-size 2, got 14"),
        ((*CP, "--eod-mask-loss"), "got --context-parallel-size 2 without it for --eod-mask-loss"),
        ((*CP, "--reset-attention-mask"), "got --context-parallel-size 2 for --reset-attention-mask"),
        (("--sequence-parallel",), "expected --tensor-model-parallel-size above 1"),
    ],
    ids=lambda value: _named(value) if isinstance(value, tuple) else "",
)
def test_layouts_that_do_not_fit_are_refused(flags: tuple[str, ...], message: str) -> None:
    run = launch_forked((V2, *MODEL, *RUN, *flags), 2)
    assert run.returncode != 0
    assert re.search(message, run.stderr + run.stdout), run.stderr[-2000:]
