# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py with --optimizer muon: strategies agree, runs go on with other ranks, and it learns faster.

tests/unit_tests/test_mcore_muon.py compares single steps with a loop over whole matrices, bit by bit.
"""

from pathlib import Path

import pytest

from .launch_script import Run, launch_forked, launch_once

MODEL = (
    *("--use-megatron-fsdp-v2", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--swiglu"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--disable-bias-linear", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--make-vocab-size-divisible-by", "1", "--group-query-attention", "--num-query-groups", "2"),
)
MUON = ("--optimizer", "muon", "--muon-extra-scale-factor", "0.2", "--muon-nesterov", "--muon-momentum", "0.95")
SHORT = (
    *(*MODEL, *MUON, "--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "8", "--eval-iters", "2"),
    *("--log-interval", "1", "--lr", "1e-2", "--lr-warmup-iters", "2", "--lr-decay-style", "cosine"),
)


def _run(*flags: str, num_ranks: int = 2) -> Run:
    return launch_once((*SHORT, *flags), num_ranks)


def _strategy(name: str) -> tuple[str, str]:
    return "--data-parallel-sharding-strategy", name


HSDP = ("--num-distributed-optimizer-instances", "2")
HFSDP = (*HSDP, "--outer-dp-sharding-strategy", "optim")


def _same(one: Run, other: Run) -> None:
    for name in ("lm_loss", "grad_norm", "validation_loss"):
        assert one.series(name) == other.series(name) != []


def test_strategies_agree_bit_for_bit_where_sums_have_one_order() -> None:
    """ZeRO-1 and none add up microbatches before ranks, ZeRO-2 and 3 the other way round (test_strategies.py)."""
    _same(_run(*_strategy("optim")), _run(*_strategy("no_shard")))
    _same(_run(*_strategy("optim_grads")), _run())
    _same(_run(*HSDP, num_ranks=4), _run(*HFSDP, num_ranks=4))


ROUNDING = 1e-4
"""Matrices whose gradients differ in the last place are orthogonalised in bfloat16, which rounds on from there."""


def test_numbers_of_ranks_agree_to_rounding() -> None:
    expected = _run()
    for found in (_run(num_ranks=1), _run(*HFSDP, num_ranks=4)):
        for name in ("lm_loss", "grad_norm"):
            assert found.series(name)[0] == pytest.approx(expected.series(name)[0], rel=1e-6)
            assert found.series(name) == pytest.approx(expected.series(name), rel=ROUNDING)


def test_tensor_parallelism_computes_with_whole_matrices_or_pieces() -> None:
    one = ("--use-cpu-initialization", "--make-vocab-size-divisible-by", "512")
    two = (*one[:-1], "256", "--tensor-model-parallel-size", "2")
    whole = _run(*one, num_ranks=1).series("lm_loss")
    assert _run(*two, "--muon-tp-mode", "duplicated").series("lm_loss") == pytest.approx(whole, rel=ROUNDING)
    pieces = _run(*two).series("lm_loss")
    # Losses after the first step, which is the first one that Muon has a part in.
    assert pieces[0] == pytest.approx(whole[0], rel=ROUNDING) and pieces[-1] != pytest.approx(whole[-1], rel=1e-3)


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    straight = _run()
    saved = launch_forked((*SHORT, "--save", str(tmp_path), "--exit-interval", "4"), 2)
    assert saved.returncode == 0, saved.stderr[-4000:]
    stages = ("--pipeline-model-parallel-size", "2")
    for num_ranks, flags in ((1, ()), (2, ()), (4, ()), (2, stages)):
        resumed = launch_forked((*SHORT, "--load", str(tmp_path), "--no-load-rng", *flags), num_ranks)
        assert resumed.returncode == 0, resumed.stderr[-4000:]
        assert [record["iteration"] for record in resumed.records if "lm_loss" in record] == [5, 6, 7, 8]
        rest = straight.series("lm_loss")[4:]
        if num_ranks == 2 and not flags:
            assert resumed.series("lm_loss") == rest
        assert resumed.series("lm_loss")[0] == pytest.approx(rest[0], rel=1e-6)
        assert resumed.series("lm_loss") == pytest.approx(rest, rel=ROUNDING)


def test_the_table_of_what_is_stepped_how_is_printed() -> None:
    lines = [" ".join(line.split()) for line in _run().stdout.splitlines()]
    start = lines.index("What Muon steps on this rank:")
    assert lines[start + 1] == "optimizer parameters shape matrices; why"
    assert "Muon 2 64x32 matrix, parts of rows 32+16+16" not in lines
    assert "Muon 2 64x32 matrix, parts of rows 16+8+8" in lines
    assert "AdamW 1 257x32 embedding or output layer" in lines


LEARNS = (
    *("--use-megatron-fsdp-v2", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--swiglu"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--disable-bias-linear", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--make-vocab-size-divisible-by", "1", "--micro-batch-size", "8", "--global-batch-size", "16"),
    *("--split", "98,2,0", "--eval-interval", "1000", "--eval-iters", "20", "--log-interval", "20"),
    *("--lr-decay-style", "cosine", "--lr-warmup-iters", "10", "--min-lr", "1e-4", "--adam-beta2", "0.95"),
)


def test_muon_reaches_adams_loss_in_fewer_iterations() -> None:
    """Bytes of the standard library; for either the best rate of a sweep at 300 iterations (docs/LOG.md)."""
    losses = []
    for flags in (("--train-iters", "300", "--lr", "3e-3"), ("--train-iters", "150", "--lr", "2e-2", *MUON)):
        run = launch_once((*LEARNS, *flags), 2)
        losses.append(run.series("validation_loss")[-1])
    assert losses[1] < losses[0] < 2.5, losses
