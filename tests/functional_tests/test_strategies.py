# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The sharding strategies train alike: the same seed and data, and the runs that the golden values come from.

Bit for bit are equal, on two ranks or along mesh axes of two, where a sum has one order:

    ZeRO-2 and ZeRO-3   both reduce every microbatch
    HSDP and HFSDP      the outer axis reduces once in both, to copies or to shards

To rounding all are, with megatron-core's DDP: ZeRO-1 adds up the microbatches on each rank before it adds up ranks;
four ranks add up other microbatches; a per-token loss divides once, at the end (all sequences have as many tokens).
"""

import pytest

from .golden import read_flags
from .launch_script import Run, launch_once

TOLERANCE = 1e-6
"""As in test_parity.py: sums in float32 in another order."""

NUM_ITERATIONS = 5
CASES = ("dp2_zero1", "dp2_zero2", "dp2_per_token_loss", "dp4_hsdp", "dp4_hfsdp")


def run_of(case: str) -> Run:
    return launch_once(*read_flags(case))


def first_values(case: str, name: str) -> list[float]:
    values = run_of(case).series(name)[:NUM_ITERATIONS]
    assert len(values) == NUM_ITERATIONS
    return values


def test_cases_differ_in_strategy_alone() -> None:
    """The two longer cases decay over as many iterations, so that the first ones are the same."""
    strategy = {"--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"}
    strategy |= {"--outer-dp-sharding-strategy", "--calculate-per-token-loss", "--use-megatron-fsdp-v2"}
    length = {"--train-iters", "--lr-decay-iters", "--eval-iters", "--eval-interval"}

    def settings(case: str) -> dict[str, str]:
        words = " ".join(read_flags(case)[0]).removeprefix("--").split(" --")
        pairs = {f"--{flag}": value for flag, _, value in (word.partition(" ") for word in words)}
        assert pairs.get("--lr-decay-iters", pairs["--train-iters"]) == "50"
        return {flag: value for flag, value in pairs.items() if flag not in strategy | length}

    for case in ("dp2_fsdp_v2", *CASES):
        assert settings(case) == settings("dp2_ddp"), case


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reference", ["dp2_ddp", "dp2_fsdp_v2"])
def test_losses_and_norms_are_equal_to_rounding(case: str, reference: str) -> None:
    for name in ("lm_loss", "grad_norm"):
        assert first_values(case, name) == pytest.approx(first_values(reference, name), rel=TOLERANCE)


@pytest.mark.parametrize(("case", "reference"), [("dp2_zero2", "dp2_fsdp_v2"), ("dp4_hfsdp", "dp4_hsdp")])
def test_losses_and_norms_are_equal_bit_for_bit(case: str, reference: str) -> None:
    for name in ("lm_loss", "grad_norm"):
        assert first_values(case, name) == first_values(reference, name)


def test_hybrid_runs_end_with_the_same_weights() -> None:
    """As far as a validation loss can tell."""
    validation = [run_of(case).series("validation_loss") for case in ("dp4_hsdp", "dp4_hfsdp")]
    assert validation[0] == validation[1] != []
