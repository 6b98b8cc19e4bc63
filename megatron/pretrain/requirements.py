# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Refuses a flag in a run in which it would do nothing, by one table.

Whether a value is a sensible one is not decided here.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.pretrain.low_bit_flags import (
    DELAYED_FLAGS,
    EDGE_FLAGS,
    FP8_FLAGS,
    computes_in_low_bits,
    has_delayed_scales,
    keeps_transposes,
)
from megatron.pretrain.moe_flags import EXPERT_FLAGS, balances_by_loss
from megatron.pretrain.muon_flags import MUON_FLAGS, uses_tensor_parallelism
from megatron.pretrain.precision_flags import DYNAMIC_SCALE_FLAGS, MOMENT_FLAGS, has_dynamic_scale
from megatron.pretrain.prediction_flags import PREDICTION_FLAGS
from megatron.pretrain.quantized_gather_flags import QUANTIZED_GATHER_FLAGS
from megatron.pretrain.recompute_flags import FULL_RECOMPUTE_FLAGS, SELECTIVE_RECOMPUTE_FLAGS

FSDP_V2_FLAGS = (
    "--use-megatron-fsdp-v2",
    "--data-parallel-sharding-strategy",
    "--num-distributed-optimizer-instances",
    "--outer-dp-sharding-strategy",
    "--expert-data-parallel-sharding-strategy",
    "--expert-outer-dp-sharding-strategy",
    "--megatron-fsdp-main-params-dtype",
    "--megatron-fsdp-main-grads-dtype",
    "--megatron-fsdp-grad-comm-dtype",
    "--use-precision-aware-optimizer",
    "--megatron-fsdp-static-gradients",
    "--cuda-graph-impl",
    "--cuda-graph-warmup-steps",
    "--fsdp-trace-pool",
    "--create-all-gather-group",
    "--megatron-fsdp-min-unit-numel",
    "--nccl-ub",
    "--quantized-gather",
    *("--fp8-param-gather", "--fp4-param-gather", "--keep-fp8-transpose-cache"),
)
DDP_FLAGS = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--ddp-bucket-size",
    "--ddp-average-in-collective",
)
SAVE_FLAGS = ("--save-interval", "--async-save", "--keep-last", "--no-save-optim", "--no-save-rng")
LOAD_FLAGS = (
    "--ckpt-step",
    "--no-load-optim",
    "--no-load-rng",
    "--finetune",
    "--exit-on-missing-checkpoint",
    "--verify-checksums",
    "--override-opt_param-scheduler",
    "--use-checkpoint-opt_param-scheduler",
)
CHECKPOINT_FLAGS = ("--save", "--load", "--ckpt-format", "--exit-interval", *SAVE_FLAGS, *LOAD_FLAGS)
PROFILE_FLAGS = ("--profile-step-start", "--profile-step-end")
OUTPUT_FLAGS = (
    *("--plot", "--log-json", "--tensorboard-dir", "--tensorboard-log-interval"),
    *("--profile-schedule", *PROFILE_FLAGS),
)
_ADAM_FLAGS = ("--adam-beta1", "--adam-beta2", "--adam-eps")
_WSD_FLAGS = ("--lr-wsd-decay-style", "--lr-wsd-decay-iters")


@dataclass(frozen=True)
class Requirement:
    """Flags that do something only in a run for which ``is_met`` holds."""

    flags: tuple[str, ...]
    needs: str
    is_met: Callable[[argparse.Namespace], bool]


def has_files(args: argparse.Namespace) -> bool:
    """Whether the run reads .bin/.idx files that the user named."""
    return any((args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path))


def _reads_one_blend(args: argparse.Namespace) -> bool:
    return bool(args.data_path) or not (has_files(args) or args.mock_data)


def _has_sharded_overlap(args: argparse.Namespace) -> bool:
    return bool(args.use_distributed_optimizer and args.overlap_grad_reduce)


_R = Requirement
TOKENIZER_REQUIREMENT = _R(
    ("--tokenizer-model",),
    "--tokenizer-type HuggingFaceTokenizer",
    lambda a: a.tokenizer_type == "HuggingFaceTokenizer",
)
REQUIREMENTS = (
    TOKENIZER_REQUIREMENT,
    _R(("--num-query-groups",), "--group-query-attention", lambda a: a.group_query_attention),
    _R(
        ("--rotary-base", "--rotary-percent"),
        "--position-embedding-type rope",
        lambda a: a.position_embedding_type == "rope",
    ),
    _R(
        ("--reset-position-ids",),
        "--position-embedding-type learned_absolute (the others do not read position ids)",
        lambda a: a.position_embedding_type == "learned_absolute",
    ),
    _R(("--add-qkv-bias",), "--disable-bias-linear", lambda a: a.disable_bias_linear),
    _R(("--split",), "--data-path or no data flag", _reads_one_blend),
    _R(
        ("--data-cache-path", "--no-mmap-bin-files"),
        "data in files, not --mock-data",
        lambda a: not a.mock_data,
    ),
    _R(
        ("--vocab-size", "--tokenizer-type"),
        "--data-path or --mock-data (the byte corpus has 256 ids)",
        lambda a: has_files(a) or a.mock_data,
    ),
    _R(("--eval-interval",), "--eval-iters above 0", lambda a: a.eval_iters > 0),
    _R(FULL_RECOMPUTE_FLAGS, "--recompute-granularity full", lambda a: a.recompute_granularity == "full"),
    _R(
        SELECTIVE_RECOMPUTE_FLAGS,
        "--recompute-granularity selective",
        lambda a: a.recompute_granularity == "selective",
    ),
    _R(_ADAM_FLAGS, "--optimizer adam or muon", lambda a: a.optimizer in ("adam", "muon")),
    _R(MUON_FLAGS, "--optimizer muon", lambda a: a.optimizer == "muon"),
    _R(("--muon-split-gate-up",), "--swiglu", lambda a: a.swiglu),
    _R(("--muon-router-adam",), "--num-experts", lambda a: a.num_experts is not None),
    _R(
        ("--muon-tp-mode",),
        "--tensor-model-parallel-size or --expert-tensor-parallel-size above 1",
        uses_tensor_parallelism,
    ),
    _R(("--sgd-momentum",), "--optimizer sgd", lambda a: a.optimizer == "sgd"),
    _R(_WSD_FLAGS, "--lr-decay-style WSD", lambda a: a.lr_decay_style == "WSD"),
    _R(
        ("--start-weight-decay", "--end-weight-decay"),
        "--weight-decay-incr-style linear or cosine",
        lambda a: a.weight_decay_incr_style != "constant",
    ),
    _R(
        ("--weight-decay",),
        "--weight-decay-incr-style constant",
        lambda a: a.weight_decay_incr_style == "constant",
    ),
    _R(("--grad-reduce-in-bf16",), "--bf16", lambda a: a.bf16),
    _R(
        ("--accumulate-allreduce-grads-in-fp32",),
        "--fp16 (otherwise it is so unless --grad-reduce-in-bf16)",
        lambda a: a.fp16,
    ),
    _R(("--loss-scale",), "--fp16 or --bf16", lambda a: a.fp16 or a.bf16),
    _R(DYNAMIC_SCALE_FLAGS, "--fp16 without --loss-scale", has_dynamic_scale),
    _R(
        ("--no-check-for-nan-in-loss-and-grad",),
        "no --fp16, or a constant --loss-scale (a dynamic one skips and lowers itself instead)",
        lambda a: not has_dynamic_scale(a),
    ),
    _R(("--use-precision-aware-optimizer",), "--optimizer adam", lambda a: a.optimizer == "adam"),
    _R(MOMENT_FLAGS, "--use-precision-aware-optimizer", lambda a: a.use_precision_aware_optimizer),
    _R(FP8_FLAGS, "--fp8-format", lambda a: a.fp8_format is not None),
    _R(DELAYED_FLAGS, "--fp8-format with --fp8-recipe delayed", has_delayed_scales),
    _R(("--fp4-param-gather",), "--fp4-format", lambda a: a.fp4_format is not None),
    _R(
        ("--first-last-layers-bf16",),
        "--fp8-format, --fp4-format or --quantized-gather",
        lambda a: computes_in_low_bits(a) or a.quantized_gather is not None,
    ),
    _R(EDGE_FLAGS, "--first-last-layers-bf16", lambda a: a.first_last_layers_bf16),
    _R(
        ("--keep-fp8-transpose-cache",),
        "--fp8-param-gather with another --fp8-recipe than mxfp8 (which quantizes for both directions)",
        keeps_transposes,
    ),
    _R(("--cuda-graph-warmup-steps",), "--cuda-graph-impl full_iteration", lambda a: a.cuda_graph_impl != "none"),
    _R(FSDP_V2_FLAGS, "--use-megatron-fsdp-v2", lambda a: a.use_megatron_fsdp_v2),
    _R(QUANTIZED_GATHER_FLAGS, "--quantized-gather", lambda a: a.quantized_gather is not None),
    _R(
        ("--quantized-gather-scaling",),
        "--quantized-gather fp8 (the others' blocks have one size)",
        lambda a: a.quantized_gather == "fp8",
    ),
    _R(
        ("--megatron-fsdp-static-gradients",),
        "no --fsdp-trace-pool (with which gradients keep their memory in any case)",
        lambda a: not a.fsdp_trace_pool,
    ),
    _R(
        ("--create-all-gather-group",),
        "--data-parallel-sharding-strategy optim_grads_params (the others gather while nothing is reduced)",
        lambda a: a.data_parallel_sharding_strategy == "optim_grads_params",
    ),
    _R(("--nccl-ub",), "--fsdp-trace-pool", lambda a: a.fsdp_trace_pool),
    _R(
        ("--sequence-parallel",),
        "--tensor-model-parallel-size above 1",
        lambda a: a.tensor_model_parallel_size > 1,
    ),
    _R(PREDICTION_FLAGS, "--mtp-num-layers", lambda a: a.mtp_num_layers is not None),
    _R(EXPERT_FLAGS, "--num-experts", lambda a: a.num_experts is not None),
    _R(
        ("--moe-router-bias-update-rate",),
        "--moe-router-enable-expert-bias",
        lambda a: a.moe_router_enable_expert_bias,
    ),
    _R(
        ("--moe-aux-loss-coeff",),
        "--moe-router-load-balancing-type aux_loss, seq_aux_loss or global_aux_loss",
        balances_by_loss,
    ),
    _R(
        ("--moe-router-pre-softmax",),
        "--moe-router-score-function softmax",
        lambda a: a.moe_router_score_function == "softmax",
    ),
    _R(
        ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
        "--pipeline-model-parallel-size above 1",
        lambda a: a.pipeline_model_parallel_size > 1,
    ),
    _R(
        ("--expert-data-parallel-sharding-strategy", "--expert-outer-dp-sharding-strategy"),
        "--expert-model-parallel-size above 1 (otherwise experts are sharded as everything else)",
        lambda a: a.expert_model_parallel_size > 1,
    ),
    _R(
        ("--expert-data-parallel-sharding-strategy",),
        "another strategy than --data-parallel-sharding-strategy",
        lambda a: a.expert_data_parallel_sharding_strategy != a.data_parallel_sharding_strategy,
    ),
    _R(
        ("--expert-outer-dp-sharding-strategy",),
        "another strategy than --outer-dp-sharding-strategy",
        lambda a: a.expert_outer_dp_sharding_strategy != a.outer_dp_sharding_strategy,
    ),
    _R(
        ("--outer-dp-sharding-strategy", "--expert-outer-dp-sharding-strategy"),
        "--num-distributed-optimizer-instances above 1",
        lambda a: a.num_distributed_optimizer_instances > 1,
    ),
    _R(
        DDP_FLAGS,
        "megatron-core's DDP, not --use-megatron-fsdp-v2 (which shards and overlaps by itself)",
        lambda a: not a.use_megatron_fsdp_v2,
    ),
    _R(
        ("--overlap-param-gather",),
        "--use-distributed-optimizer --overlap-grad-reduce",
        _has_sharded_overlap,
    ),
    _R(("--ddp-bucket-size",), "--overlap-grad-reduce", lambda a: a.overlap_grad_reduce),
    _R(SAVE_FLAGS, "--save", lambda a: a.save),
    _R(
        ("--async-save", "--keep-last", "--no-save-rng"),
        "--use-megatron-fsdp-v2 (megatron-core's DDP saves at once, without random number generators)",
        lambda a: a.use_megatron_fsdp_v2,
    ),
    _R(LOAD_FLAGS, "--load", lambda a: a.load),
    _R(("--ckpt-format",), "--save or --load", lambda a: a.save or a.load),
    _R(PROFILE_FLAGS, "--profile-schedule", lambda a: a.profile_schedule),
    _R(("--tensorboard-log-interval",), "--tensorboard-dir", lambda a: a.tensorboard_dir),
)


def check_requirements(args: argparse.Namespace, requirements: Sequence[Requirement] = REQUIREMENTS) -> None:
    """Check the flags written on the command line against a table, by default that of training.

    Raises:
        ValueError: A flag would do nothing.
    """
    for requirement in requirements:
        for flag in requirement.flags:
            if flag in args.given and not requirement.is_met(args):
                raise ValueError(
                    f"Flag without effect: expected {requirement.needs}, got a run without it "
                    f"for {flag}. Add what it needs, or drop {flag}."
                )
