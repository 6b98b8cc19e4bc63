# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Decides whether the values of the flags fit together, and fills in those that follow from others.

It looks at nothing but the arguments, the tokenizer that they name and the number of ranks, so that every rank comes
to the same answer before the first collective. Files are checked by ``data.py``.
"""

import argparse

from megatron.pretrain.checkpoint_flags import complete_checkpoint_flags
from megatron.pretrain.layouts import check_context_parallelism, check_tensor_parallelism, data_parallel_size
from megatron.pretrain.low_bit_flags import check_low_bit_shapes, complete_low_bits
from megatron.pretrain.moe_flags import complete_experts
from megatron.pretrain.muon_flags import check_muon_flags
from megatron.pretrain.pipeline import check_microbatches, complete_pipeline
from megatron.pretrain.precision_flags import check_fsdp_dtypes, complete_precision
from megatron.pretrain.prediction_flags import check_prediction
from megatron.pretrain.quantized_gather_flags import check_quantized_gather_flags
from megatron.pretrain.recompute_flags import choose_granularity, complete_recompute
from megatron.pretrain.requirements import check_requirements, has_files
from megatron.pretrain.tokenizer import ByteLevelTokenizer, Vocabulary, load_tokenizer, vocabulary_without_tokenizer


def validate(args: argparse.Namespace, world_size: int) -> None:
    """Check the arguments against each other and complete them in place.

    Args:
        args: From ``parse_arguments``.
        world_size: Number of ranks.

    Raises:
        ValueError: Two values do not fit together, a flag would do nothing, or a tokenizer cannot be loaded.
        NotImplementedError: A parallelism or an optimizer that is not supported here.
    """
    choose_granularity(args)
    check_requirements(args)
    complete_precision(args)
    check_muon_flags(args)
    check_quantized_gather_flags(args)
    complete_low_bits(args)
    num_copies = data_parallel_size(args, world_size)
    _check_fsdp(args, num_copies)
    _complete_model(args)
    complete_experts(args, world_size)
    check_tensor_parallelism(args)
    check_context_parallelism(args)
    complete_pipeline(args)
    _complete_data(args)
    _complete_batch(args, num_copies)
    check_microbatches(args, num_copies)
    check_low_bit_shapes(args)
    _complete_schedules(args)
    complete_recompute(args)
    check_prediction(args)
    _check_profile(args)
    _check_graph(args)
    complete_checkpoint_flags(args)


def _fail(what: str, expected: str, found: str, flag: str, cure: str) -> None:
    raise ValueError(f"{what}: expected {expected}, got {found} for {flag}. {cure}.")


def _check_fsdp(args: argparse.Namespace, num_copies: int) -> None:
    """Check Megatron-FSDP v2's mesh against the ranks, and its dtypes against those of model and reduction."""
    if not args.use_megatron_fsdp_v2:
        return
    if num_copies % args.num_distributed_optimizer_instances:
        _fail(
            "Optimizer instances",
            f"a divisor of the {num_copies} data-parallel rank(s)",
            str(args.num_distributed_optimizer_instances),
            "--num-distributed-optimizer-instances",
            "Change it or the number of ranks",
        )
    check_fsdp_dtypes(args)


def _complete_model(args: argparse.Namespace) -> None:
    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.kv_channels is None:
        if hidden % heads:
            _fail(
                "Head width",
                f"a divisor of --hidden-size {hidden}",
                str(heads),
                "--num-attention-heads",
                "Change one of them, or give --kv-channels",
            )
        args.kv_channels = hidden // heads
    if args.position_embedding_type == "rope" and args.kv_channels % 2:
        _fail(
            "Head width",
            "an even width for rotary embeddings",
            str(args.kv_channels),
            "--kv-channels",
            "Change the width or --position-embedding-type",
        )
    if not args.group_query_attention:
        args.num_query_groups = heads
    if heads % args.num_query_groups:
        _fail(
            "Query groups",
            f"a divisor of --num-attention-heads {heads}",
            str(args.num_query_groups),
            "--num-query-groups",
            "Change one of them",
        )
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int(4 * hidden * 2 / 3 / 64) * 64 or 64 if args.swiglu else 4 * hidden
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        _fail(
            "Sequence length",
            f"at most --max-position-embeddings {args.max_position_embeddings}",
            str(args.seq_length),
            "--seq-length",
            "Raise --max-position-embeddings or shorten the sequences",
        )


def _complete_data(args: argparse.Namespace) -> None:
    if args.mock_data and has_files(args):
        _fail("Data", "--mock-data or files", "both", "--mock-data", "Drop one of them")
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.data_path and any(per_split):
        _fail("Data", "--data-path or one flag per split", "both", "--data-path", "Drop one of them")
    if any(per_split) and not args.train_data_path:
        _fail("Data", "a training set", "none", "--train-data-path", "Add it")
    args.is_byte_corpus = not (args.mock_data or has_files(args))
    _check_split(args)
    args.vocabulary = _find_vocabulary(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocabulary.num_ids // multiple) * multiple


def _find_vocabulary(args: argparse.Namespace) -> Vocabulary:
    if args.is_byte_corpus:
        return ByteLevelTokenizer.vocabulary
    if args.vocab_size is not None and args.tokenizer_type:
        _fail("Vocabulary", "--vocab-size or --tokenizer-type", "both", "--vocab-size", "Drop one of them")
    if args.tokenizer_type:
        return load_tokenizer(args.tokenizer_type, args.tokenizer_model).vocabulary
    if args.vocab_size is None:
        _fail(
            "Vocabulary",
            "the number of token ids in the data",
            "none",
            "--vocab-size",
            "Add it, or the --tokenizer-type that made the data: files and mock data do not say it",
        )
    return vocabulary_without_tokenizer(args.vocab_size)


def _check_split(args: argparse.Namespace) -> None:
    try:
        weights = [float(word) for word in args.split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or not weights[0] > 0 or sum(weights) == float("inf"):
        _fail(
            "Split",
            "up to three weights such as 969,30,1 and the first above 0",
            repr(args.split),
            "--split",
            "Correct it",
        )
    weights += [0.0] * (3 - len(weights))
    reads_split = args.is_byte_corpus or bool(args.data_path)
    has_validation = args.mock_data or bool(args.valid_data_path) or (reads_split and weights[1] > 0)
    has_test = args.mock_data or bool(args.test_data_path) or (reads_split and weights[2] > 0)
    if args.eval_iters > 0 and not (has_validation or has_test):
        _fail(
            "Evaluation",
            "data to evaluate on",
            "none",
            "--eval-iters",
            "Give validation a weight in --split or name --valid-data-path, or set --eval-iters 0",
        )


def _complete_batch(args: argparse.Namespace, num_copies: int) -> None:
    per_step = args.micro_batch_size * num_copies
    if args.global_batch_size is None:
        args.global_batch_size = per_step
    if args.global_batch_size % per_step:
        _fail(
            "Batch size",
            f"a multiple of {per_step} (--micro-batch-size {args.micro_batch_size} x {num_copies} data-parallel ranks)",
            str(args.global_batch_size),
            "--global-batch-size",
            "Change one of the three",
        )


def _complete_schedules(args: argparse.Namespace) -> None:
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    if args.lr_warmup_fraction is not None and "--lr-warmup-iters" in args.given:
        _fail(
            "Warm-up",
            "--lr-warmup-iters or --lr-warmup-fraction",
            "both",
            "--lr-warmup-iters",
            "Drop one of them",
        )
    warmup = args.lr_warmup_iters if args.lr_warmup_fraction is None else args.lr_warmup_fraction * args.lr_decay_iters
    if warmup >= args.lr_decay_iters:
        _fail(
            "Warm-up",
            f"less than the {args.lr_decay_iters} iterations of the decay",
            f"{warmup:g}",
            "--lr-warmup-iters" if args.lr_warmup_fraction is None else "--lr-warmup-fraction",
            "Shorten the warm-up or raise --lr-decay-iters",
        )
    if args.min_lr > args.lr:
        _fail(
            "Learning rate",
            f"at most --lr {args.lr:g}",
            f"{args.min_lr:g}",
            "--min-lr",
            "Lower it or raise --lr",
        )
    if args.lr_warmup_init > args.lr:
        _fail(
            "Learning rate",
            f"at most --lr {args.lr:g}",
            f"{args.lr_warmup_init:g}",
            "--lr-warmup-init",
            "Lower it or raise --lr",
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        _fail(
            "Learning rate",
            "the length of the last phase of WSD",
            "none",
            "--lr-wsd-decay-iters",
            "Add it",
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters > args.lr_decay_iters - warmup:
        _fail(
            "Learning rate",
            f"at most {args.lr_decay_iters - warmup:g} (--lr-decay-iters {args.lr_decay_iters} less the warm-up)",
            str(args.lr_wsd_decay_iters),
            "--lr-wsd-decay-iters",
            "Shorten the last phase of WSD or raise --lr-decay-iters",
        )
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
        return
    if args.start_weight_decay is None or args.end_weight_decay is None:
        _fail(
            "Weight decay",
            "a start and an end",
            "at most one",
            "--weight-decay-incr-style",
            "Give --start-weight-decay and --end-weight-decay",
        )
    if args.end_weight_decay < args.start_weight_decay:
        _fail(
            "Weight decay",
            f"at least --start-weight-decay {args.start_weight_decay:g}",
            f"{args.end_weight_decay:g}",
            "--end-weight-decay",
            "Raise it",
        )


def _check_profile(args: argparse.Namespace) -> None:
    start, end = args.profile_step_start, args.profile_step_end
    if args.profile_schedule and not start < end <= args.train_iters:
        _fail(
            "Profile",
            f"a number above --profile-step-start {start}, up to --train-iters {args.train_iters}",
            str(end),
            "--profile-step-end",
            "Change one of them",
        )


def _check_graph(args: argparse.Namespace) -> None:
    """Refuse what the host has to know in the middle of an iteration."""
    if args.cuda_graph_impl == "none":
        return
    # With a loss scale the host decides whether to skip; what TransformerEngine's Adam does in a graph was not tried.
    for name in (
        *("log_num_zeros_in_grad", "calculate_per_token_loss"),
        *("fp16", "loss_scale", "use_precision_aware_optimizer"),
    ):
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            _fail(
                "CUDA graphs", "an iteration in which the host waits for nothing", flag, "--cuda-graph-impl", "Drop one"
            )
    if args.weight_decay_incr_style != "constant":
        _fail(
            "CUDA graphs",
            "a constant weight decay, which kernels in a graph cannot change",
            f"--weight-decay-incr-style {args.weight_decay_incr_style}",
            "--cuda-graph-impl",
            "Drop one",
        )
