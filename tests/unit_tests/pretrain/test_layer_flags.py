# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Flags of recomputed layers and of further predictions: what fits together, and why the rest does not."""

import argparse
import re

import pytest

from megatron.pretrain.recompute_flags import MODULES, check_layers_for_recompute

from .test_validation import EXPERTS, checked

FULL = "--recompute-granularity full --recompute-method"
MTP = "--position-embedding-type rope --mtp-num-layers"
TENSOR_PARALLEL = "--tensor-model-parallel-size 2"
GRAPH = "--use-megatron-fsdp-v2 --cuda-graph-impl full_iteration"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--recompute-granularity full", "uniform or block, got none for --recompute-method"),
        (f"{FULL} block --recompute-num-layers 5", "at most --num-layers 4, got 5 for --recompute-num-layers"),
        (f"{FULL} uniform --recompute-num-layers 3", "a divisor of --num-layers 4 with .* uniform, got 3 for --recomp"),
        (
            f"{FULL} uniform --recompute-num-layers 2 --pipeline-model-parallel-size 2 --num-layers 6",
            "a divisor of the 3 of a chunk with --recompute-method uniform, got 2 for --recompute-num-layers",
        ),
        (f"{FULL} uniform --distribute-saved-activations", "--tensor-model-parallel-size above 1, got 1 for --distrib"),
        (
            f"{FULL} uniform --distribute-saved-activations {TENSOR_PARALLEL} --sequence-parallel",
            "activations that are whole on every rank, got --sequence-parallel, .* for --distribute-saved-activations",
        ),
        (
            "--recompute-activations --recompute-granularity selective",
            "--recompute-activations or --recompute-granularity, got --recompute-granularity selective for --recomp",
        ),
        ("--recompute-activations --recompute-modules moe", "modules of .*, got moe without --num-experts for --recom"),
        (
            f"{EXPERTS} --recompute-activations --recompute-modules mlp",
            "modules of the model's layers, got mlp with --num-experts, which replaces it for --recompute-modules",
        ),
        (
            "--recompute-activations --recompute-modules core_attn mlp",
            "a model without biases for mlp, got one with biases for --recompute-modules. Add --disable-bias-linear",
        ),
        ("--recompute-activations --recompute-modules core_attn core_attn", "each module once, got core_attn for"),
        (
            f"{GRAPH} --recompute-activations --hidden-dropout 0",
            "no dropout in a graph, .* got --cuda-graph-impl full_",
        ),
        (f"{GRAPH} {FULL} uniform --attention-dropout 0", "no dropout in a graph, .* for --recompute-granularity"),
        ("--mtp-num-layers 1", "--position-embedding-type rope or none, got learned_absolute for --mtp-num-layers"),
        (f"{MTP} 32 --seq-length 32", "fewer layers than a rank has tokens of a sequence, got 32 for --mtp-num-layers"),
        (f"{MTP} 1 {GRAPH}", "--cuda-graph-impl none, got full_iteration for --mtp-num-layers"),
        (
            f"{MTP} 1 {FULL} uniform --recompute-num-layers 2",
            "--recompute-num-layers 1 with --recompute-method uniform, got 2 for --mtp-num-layers",
        ),
    ],
)
def test_what_does_not_fit_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"expected {message}") as error:
        checked(line, world_size=2)
    assert re.fullmatch(r"[\w -]+: expected .+, got .+ for --[\w-]+\. .+\.", str(error.value))


@pytest.mark.parametrize("name", ["layernorm", "moe_act", "shared_experts", "mla_up_proj", "gdn_norm_out"])
def test_modules_of_megatron_lm_that_cannot_be_recomputed_say_why(name: str) -> None:
    expected = rf"expected one of core_attn, mlp, moe \(\w.+\), got {name} for --recompute-modules. Drop it."
    with pytest.raises(ValueError, match=f"^Recompute: {expected}$"):
        checked(f"--recompute-activations --recompute-modules {name}")


def test_other_modules_are_no_values() -> None:
    with pytest.raises(ValueError, match=r"expected one of core_attn, .*, got 'attn' for --recompute-modules"):
        checked("--recompute-activations --recompute-modules attn")


def test_further_predictions_go_with_stages() -> None:
    assert checked(f"{MTP} 1 --pipeline-model-parallel-size 2 --num-layers 2", world_size=2).mtp_num_layers == 1


def test_what_follows_is_filled_in() -> None:
    args = checked("--recompute-activations")
    assert (args.recompute_granularity, args.recompute_modules) == ("selective", [MODULES[0]])
    assert checked(f"{FULL} uniform").recompute_num_layers == 1
    assert checked(f"{FULL} uniform --distribute-saved-activations {TENSOR_PARALLEL}", 2).distribute_saved_activations
    assert checked(f"{FULL} block --recompute-num-layers 3").recompute_modules is None
    assert checked(f"{EXPERTS} --recompute-activations --recompute-modules moe core_attn")
    without = "--hidden-dropout 0 --attention-dropout 0"
    assert checked(f"{GRAPH} {without} {FULL} uniform").recompute_method == "uniform"
    assert checked("--recompute-granularity selective").mtp_num_layers is None


def _with_layers(line: str, kind: str) -> argparse.Namespace:
    args = checked(line, 2)
    args.transformer_impl = kind
    return args


@pytest.mark.parametrize("mode", [f"{FULL} uniform", "--recompute-activations"])
def test_attention_that_would_draw_other_dropout_is_refused(mode: str) -> None:
    line = f"{mode} {TENSOR_PARALLEL} --sequence-parallel"
    with pytest.raises(
        ValueError,
        match=r"^Recompute: expected --transformer-impl local, or no dropout, where attention is recomputed with "
        r"--sequence-parallel, got transformer_engine for --transformer-impl. Write --attention-dropout 0 or .*\.$",
    ):
        check_layers_for_recompute(_with_layers(line, "transformer_engine"))
    for other in (f"{line} --hidden-dropout 0", f"{line} --attention-dropout 0", f"{mode} {TENSOR_PARALLEL}"):
        check_layers_for_recompute(_with_layers(other, "transformer_engine"))
    check_layers_for_recompute(_with_layers(line, "local"))
