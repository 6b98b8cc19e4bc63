# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares every flag, by Megatron-LM's names; each of them is honoured.

What a flag's value may be by itself is said here; whether values fit together is decided in
``validation.py``.
"""

import argparse

from megatron.pretrain.checkpoint_flags import add_checkpoint_flags
from megatron.pretrain.low_bit_flags import add_low_bit_flags
from megatron.pretrain.moe_flags import add_moe_flags
from megatron.pretrain.muon_flags import add_muon_flags, optimizer_name
from megatron.pretrain.parallelism_flags import add_parallelism
from megatron.pretrain.precision_flags import add_precision_flags
from megatron.pretrain.prediction_flags import add_prediction_flags
from megatron.pretrain.quantized_gather_flags import add_quantized_gather_flags
from megatron.pretrain.recompute_flags import add_recompute_flags
from megatron.pretrain.tokenizer import TOKENIZER_TYPES
from megatron.pretrain.values import decay, integer, number, one_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare all flags, in groups."""
    groups = (
        _add_model,
        add_moe_flags,
        add_prediction_flags,
        _add_data,
        _add_training,
        add_recompute_flags,
        _add_optimizer,
        add_muon_flags,
        add_precision_flags,
        add_quantized_gather_flags,
        add_low_bit_flags,
        add_parallelism,
        add_checkpoint_flags,
        _add_output,
    )
    for add_group in groups:
        add_group(parser)


_count = integer(1)
_index = integer(0)
_positive = number(0.0)
_probability = number(0.0, 1.0)
_seed = integer(1, 2**32 - 1)  # What NumPy's generators take.


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--num-layers", type=_count, default=4, help="transformer layers")
    add("--hidden-size", type=_count, default=128, help="width of the residual stream")
    add(
        "--ffn-hidden-size",
        type=_count,
        help="width of the MLP; default 4 x hidden, with --swiglu 8/3 x hidden rounded to 64",
    )
    add("--num-attention-heads", type=_count, default=4, help="attention heads")
    add("--kv-channels", type=_count, help="width of one head; default hidden size / heads")
    add(
        "--group-query-attention",
        action="store_true",
        help="share keys and values between groups of heads",
    )
    add("--num-query-groups", type=_count, default=1, help="groups for --group-query-attention")
    add(
        "--max-position-embeddings",
        type=_count,
        help="longest sequence the model can read; default --seq-length",
    )
    add(
        "--position-embedding-type",
        type=one_of("learned_absolute", "rope", "none"),
        default="learned_absolute",
        help="learned_absolute, rope or none",
    )
    add("--rotary-base", type=_count, default=10000, help="base of the rotary period")
    add(
        "--rotary-percent",
        type=_probability,
        default=1.0,
        help="share of each head that is rotated",
    )
    add(
        "--normalization",
        type=one_of("LayerNorm", "RMSNorm"),
        default="LayerNorm",
        help="LayerNorm or RMSNorm",
    )
    add("--norm-epsilon", type=_positive, default=1e-05, help="epsilon of the norms")
    add("--qk-layernorm", action="store_true", help="normalise queries and keys")
    add("--swiglu", action="store_true", help="gated SiLU in the MLP instead of GELU")
    add("--disable-bias-linear", action="store_true", help="no biases in the linear layers")
    add(
        "--add-qkv-bias",
        action="store_true",
        help="biases for query, key and value despite --disable-bias-linear",
    )
    add(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="give the output layer its own weight",
    )
    add(
        "--attention-dropout",
        type=_probability,
        default=0.1,
        help="dropout on attention probabilities",
    )
    add("--hidden-dropout", type=_probability, default=0.1, help="dropout on hidden states")
    add(
        "--init-method-std",
        type=_positive,
        default=0.02,
        help="standard deviation of the initial weights",
    )
    add(
        "--use-cpu-initialization",
        action="store_true",
        help="draw whole initial weights on the host and cut them: the same for any tensor parallelism",
    )
    add(
        "--transformer-impl",
        type=one_of("local", "transformer_engine"),
        help="default: transformer_engine where it is installed beside CUDA, else local",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add(
        "--data-path",
        nargs="+",
        help="prefix of one .bin/.idx pair, several prefixes, or: weight prefix weight prefix ...",
    )
    add("--train-data-path", nargs="+", help="as --data-path, for training only")
    add("--valid-data-path", nargs="+", help="as --data-path, for validation only")
    add("--test-data-path", nargs="+", help="as --data-path, for the test set only")
    add(
        "--split",
        default="969,30,1",
        help="weights of training, validation and test in --data-path or the byte corpus",
    )
    add("--mock-data", action="store_true", help="megatron-core's synthetic token sequences")
    add("--data-cache-path", help="folder for the sample indices; default beside the data")
    add(
        "--no-mmap-bin-files",
        action="store_false",
        dest="mmap_bin_files",
        help="read .bin files instead of mapping them",
    )
    add("--num-workers", type=_index, default=2, help="data loading processes per rank")
    add("--seq-length", type=_count, default=256, help="tokens per sequence")
    add(
        "--vocab-size",
        type=_count,
        help="token ids in the data, without the end-of-document id, which is added above them",
    )
    add_tokenizer(parser, "the tokenizer that made the data, instead of --vocab-size")
    add(
        "--make-vocab-size-divisible-by",
        type=_count,
        default=128,
        help="pad the embedding to a multiple of this",
    )
    add(
        "--reset-position-ids",
        action="store_true",
        help="positions start anew after each end-of-document token",
    )
    add(
        "--reset-attention-mask",
        action="store_true",
        help="no attention across end-of-document tokens",
    )
    add("--eod-mask-loss", action="store_true", help="no loss on end-of-document tokens")


def add_tokenizer(parser: argparse.ArgumentParser, use: str) -> None:
    """Declare the flags that name a tokenizer.

    Args:
        parser: Of training or of preprocessing.
        use: What it is for.
    """
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", type=one_of(*TOKENIZER_TYPES), help=f"{use}: {' or '.join(TOKENIZER_TYPES)}")
    add("--tokenizer-model", help="folder of a Hugging Face tokenizer, or its name on the Hub")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--micro-batch-size", type=_count, default=4, help="sequences per rank and microbatch")
    add(
        "--global-batch-size",
        type=_count,
        help="sequences per iteration; default one microbatch on each rank",
    )
    add("--train-iters", type=_count, default=100, help="iterations")
    add("--eval-interval", type=_count, default=1000, help="iterations between validations")
    add("--eval-iters", type=_index, default=10, help="global batches per validation; 0 for none")
    add("--log-interval", type=_count, default=10, help="iterations between log lines")
    add("--seed", type=_seed, default=1234, help="seed of weights, dropout and data order")
    add(
        "--calculate-per-token-loss",
        action="store_true",
        help="average over the tokens of the global batch instead of microbatch by microbatch",
    )
    add(
        "--no-check-for-nan-in-loss-and-grad",
        action="store_false",
        dest="check_for_nan_in_loss_and_grad",
        help="go on after a loss or gradient that is no number",
    )
    add(
        "--cuda-graph-impl",
        type=one_of("none", "full_iteration"),
        default="none",
        help="Megatron-FSDP v2 on GPUs: full_iteration replays each iteration, the optimizer included, as one CUDA "
        "graph",
    )
    add(
        "--cuda-graph-warmup-steps",
        type=_count,
        default=3,
        help="iterations before the capture",
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimizer and schedules").add_argument
    add(
        "--optimizer",
        type=optimizer_name,
        default="adam",
        help="adam (decoupled weight decay), sgd, or muon for matrices with adam for everything else",
    )
    add("--adam-beta1", type=decay, default=0.9, help="decay of the first moment")
    add("--adam-beta2", type=decay, default=0.999, help="decay of the second moment")
    add("--adam-eps", type=_positive, default=1e-08, help="added to the root of the second moment")
    add("--sgd-momentum", type=_probability, default=0.9, help="momentum of sgd")
    add(
        "--clip-grad",
        type=_positive,
        default=1.0,
        help="largest norm of the gradient; 0 for no clipping",
    )
    add("--lr", type=_positive, default=0.001, help="highest learning rate")
    add("--min-lr", type=_positive, default=0.0, help="lowest learning rate")
    add(
        "--lr-decay-style",
        type=one_of("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        default="linear",
        help="shape of the decay",
    )
    add("--lr-decay-iters", type=_count, help="iterations until --min-lr; default --train-iters")
    add("--lr-warmup-iters", type=_index, default=0, help="iterations of linear warm-up")
    add("--lr-warmup-fraction", type=_probability, help="warm-up as a share of --lr-decay-iters")
    add(
        "--lr-warmup-init",
        type=_positive,
        default=0.0,
        help="learning rate at the start of the warm-up",
    )
    add(
        "--lr-wsd-decay-style",
        type=one_of("exponential", "linear", "cosine", "minus_sqrt"),
        default="exponential",
        help="shape of the last phase of WSD",
    )
    add("--lr-wsd-decay-iters", type=_count, help="iterations of the last phase of WSD")
    add("--weight-decay", type=_positive, default=0.01, help="weight decay")
    add(
        "--start-weight-decay",
        type=_positive,
        help="weight decay at the start, with an increasing --weight-decay-incr-style",
    )
    add("--end-weight-decay", type=_positive, help="weight decay at the end, likewise")
    add(
        "--weight-decay-incr-style",
        type=one_of("constant", "linear", "cosine"),
        default="constant",
        help="how the weight decay grows",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--log-num-zeros-in-grad",
        action="store_true",
        help="count the zeros in the gradient and log them",
    )
    add(
        "--log-json",
        metavar="PATH",
        help="write one JSON object per logged iteration, in full precision",
    )
    add("--tensorboard-dir", help="write TensorBoard events here")
    add(
        "--tensorboard-log-interval",
        type=_count,
        default=1,
        help="iterations between TensorBoard points",
    )
    add(
        "--profile-schedule",
        metavar="FOLDER",
        help="write trace and timeline of some steps of rank 0, and how much communication is exposed",
    )
    add(
        "--profile-step-start",
        type=_count,
        default=10,
        help="steps of this run before the first one that is recorded",
    )
    add("--profile-step-end", type=_count, default=12, help="steps of this run up to the last one that is recorded")
    add("--plot", metavar="PATH", help="draw the loss curve into this .png, .pdf or .svg at the end")
