# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import argparse
import re

import pytest

from megatron.pretrain.arguments import parse_arguments
from megatron.pretrain.moe_flags import expert_config
from megatron.pretrain.requirements import REQUIREMENTS
from megatron.pretrain.tokenizer import ByteLevelTokenizer
from megatron.pretrain.validation import validate


def checked(line: str, world_size: int = 1) -> argparse.Namespace:
    args = parse_arguments(line.split())
    validate(args, world_size)
    return args


def test_values_that_follow_from_others_are_filled_in() -> None:
    args = checked("--hidden-size 96 --num-attention-heads 6 --micro-batch-size 3", world_size=2)
    assert (args.kv_channels, args.num_query_groups, args.ffn_hidden_size) == (16, 6, 384)
    assert (args.global_batch_size, args.lr_decay_iters) == (6, 100)
    assert (args.vocabulary.num_ids, args.vocabulary.eod, args.padded_vocab_size) == (257, 256, 384)
    assert args.start_weight_decay == args.end_weight_decay == args.weight_decay == 0.01
    assert args.is_byte_corpus


def test_the_gated_mlp_is_two_thirds_as_wide() -> None:
    assert checked("--hidden-size 192 --swiglu").ffn_hidden_size == 512
    assert checked("--hidden-size 16 --swiglu").ffn_hidden_size == 64


def test_the_vocabulary_holds_the_end_of_document_and_is_padded() -> None:
    args = checked("--mock-data --vocab-size 255 --make-vocab-size-divisible-by 128")
    assert args.padded_vocab_size == 256
    assert (args.vocabulary.num_ids, args.vocabulary.eod, args.vocabulary.flag) == (256, 255, "--vocab-size")
    assert checked("--data-path a --tokenizer-type ByteLevelTokenizer").vocabulary == ByteLevelTokenizer.vocabulary
    assert checked("--make-vocab-size-divisible-by 1").padded_vocab_size == 257


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--save x --ckpt-format fsdp_dtensor", "torch_dist, which is what megatron-core's DDP writes, got fsdp_dt"),
        ("--use-megatron-fsdp-v2 --load x --ckpt-format torch_dist", "fsdp_dtensor, .* without being told, got torch_"),
        (
            "--use-megatron-fsdp-v2 --load x --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
            "one of --override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler, got both",
        ),
        (
            "--use-megatron-fsdp-v2 --cuda-graph-impl full_iteration --weight-decay-incr-style linear "
            "--start-weight-decay 0 --end-weight-decay 1",
            "a constant weight decay, .*, got --weight-decay-incr-style linear for --cuda-graph-impl",
        ),
        ("--num-attention-heads 3", "a divisor of --hidden-size 128, got 3 for --num-attention-hea"),
        ("--kv-channels 7 --position-embedding-type rope", "an even width .* got 7 for --kv-chann"),
        ("--group-query-attention --num-query-groups 3", "a divisor of --num-attention-heads 4, got 3"),
        ("--seq-length 64 --max-position-embeddings 32", "at most --max-position-embeddings 32, got 64"),
        ("--mock-data --data-path a --vocab-size 9", "--mock-data or files, got both for --mock-data"),
        ("--data-path a --train-data-path b", "--data-path or one flag per split, got both"),
        ("--valid-data-path b --vocab-size 9", "a training set, got none for --train-data-path"),
        ("--mock-data", "the number of token ids in the data, got none for --vocab-size"),
        ("--data-path a", "the number of token ids in the data, got none for --vocab-size"),
        ("--data-path a --vocab-size 9 --tokenizer-type ByteLevelTokenizer", "--vocab-size or --tokenizer-type, got"),
        ("--mock-data --tokenizer-type HuggingFaceTokenizer", "a folder or a name on the Hub, got none for --tokeni"),
        ("--split 1,2,3,4", "up to three weights .* got '1,2,3,4' for --split"),
        ("--split 90,x", "up to three weights .* got '90,x' for --split"),
        ("--split=0,1", "up to three weights .* got '0,1' for --split"),
        ("--split=-1,1", "up to three weights .* got '-1,1' for --split"),
        ("--split nan", "up to three weights .* got 'nan' for --split"),
        ("--split 1", "data to evaluate on, got none for --eval-iters"),
        ("--train-data-path a --vocab-size 9", "data to evaluate on, got none for --eval-iters"),
        ("--global-batch-size 10", r"a multiple of 8 \(--micro-batch-size 4 x 2 data-par.* got 10 for --glob"),
        ("--lr-warmup-iters 100", "less than the 100 iterations of the decay, got 100 for --lr-warmup-iters"),
        ("--lr-warmup-fraction 1", "less than the 100 iterations of the decay, got 100 for --lr-warmup-fraction"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", "--lr-warmup-iters or --lr-warmup-fraction, got both"),
        ("--lr 1e-3 --min-lr 1e-2", "at most --lr 0.001, got 0.01 for --min-lr"),
        ("--lr 1e-3 --lr-warmup-init 1", "at most --lr 0.001, got 1 for --lr-warmup-init"),
        ("--lr-decay-style WSD", "the length of the last phase of WSD, got none for --lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 101", r"at most 100 \(--lr-decay-iters 100 less .* got 101 for"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 91 --lr-warmup-iters 10", "at most 90 .* got 91 for --lr-wsd"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-decay-iters 9 --lr-warmup-fraction 0.5", "at most 4.5 .* 9"),
        ("--use-megatron-fsdp-v2 --megatron-fsdp-main-params-dtype bf16", "one of fp32, auto .* got bf16 for --mega"),
        ("--use-megatron-fsdp-v2 --megatron-fsdp-main-params-dtype fp16 --bf16", "one of fp32, bf16, auto .* got fp16"),
        ("--use-megatron-fsdp-v2 --megatron-fsdp-main-grads-dtype bf16", "fp32 or auto .* or add --bf16 --grad-r"),
        ("--use-megatron-fsdp-v2 --num-distributed-optimizer-instances 3", r"a divisor of the 2 data-par.* got 3 for"),
        ("--use-megatron-fsdp-v2 --num-distributed-optimizer-instances 4", r"a divisor of the 2 data-par.* got 4 for"),
        ("--weight-decay-incr-style linear", "a start and an end, got at most one for --weight-decay-incr"),
        ("--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay 0", "at least --st.* 1, got 0"),
        ("--use-megatron-fsdp-v2 --cuda-graph-impl full_iteration --log-num-zeros-in-grad", "an iteration in which the "
         "host waits for nothing, got --log-num-zeros-in-grad for --cuda-graph-impl"),
        ("--use-megatron-fsdp-v2 --cuda-graph-impl full_iteration --calculate-per-token-loss", "an iteration in which "
         "the host waits for nothing, got --calculate-per-token-loss for --cuda-graph-impl"),
        ("--use-megatron-fsdp-v2 --cuda-graph-impl full_iteration --fp16", "an iteration in which the host waits for "
         "nothing, got --fp16 for --cuda-graph-impl"),
        ("--use-megatron-fsdp-v2 --cuda-graph-impl full_iteration --bf16 --loss-scale 8", "an iteration in which the "
         "host waits for nothing, got --loss-scale for --cuda-graph-impl"),
        ("--fp16 --bf16", "--fp16 or --bf16, got both for --fp16"),
        ("--fp16 --min-loss-scale 8 --initial-loss-scale 4", "at most --initial-loss-scale 4, got 8 for --min-loss-sc"),
        ("--use-megatron-fsdp-v2 --fp16 --megatron-fsdp-main-params-dtype auto", "fp32 with --fp16, in which unscaled "
         "gradients would vanish, got auto for --megatron-fsdp-main-params-dtype"),
        ("--use-megatron-fsdp-v2 --fp16 --accumulate-allreduce-grads-in-fp32 --megatron-fsdp-main-grads-dtype fp16",
         "fp32 or auto with --accumulate-allreduce-grads-in-fp32, got fp16 .* Drop one of the two"),
        ("--use-megatron-fsdp-v2 --fp16 --megatron-fsdp-grad-comm-dtype bf16", "fp16 or auto with gradients that acc"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_together_are_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"expected {message}") as error:
        checked(line, world_size=2)
    assert re.fullmatch(r"[\w -]+: expected .+, got .+ for --[\w-]+\. .+\.", str(error.value))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--first-last-layers-bf16 --num-layers 2",
            "fewer than the 2 layers kept in the model's dtype, got 2 for --first-last-layers-bf16. Lower --num-la",
        ),
        (
            "--bf16 --fp8-format e4m3 --fp8-param-gather",
            "no --fp8-param-gather or --fp4-param-gather, .*, got one for --quantized-gather nvfp4. Drop one",
        ),
    ],
)
def test_quantized_gathers_without_a_weight_for_them_are_refused(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ValueError, match=f"Low-bit weights: expected {message}"):
        checked(f"--use-megatron-fsdp-v2 --quantized-gather nvfp4 {line}")


def test_a_precision_aware_optimizer_needs_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--use-megatron-fsdp-v2 --use-precision-aware-optimizer"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"expected TransformerEngine, .* a Python without it for --use-prec"):
        checked(line)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert checked(line)
    with pytest.raises(ValueError, match="waits for nothing, got --use-precision-aware-optimizer for --cuda-graph"):
        checked(f"{line} --cuda-graph-impl full_iteration")


def test_muon_needs_megatron_fsdp_v2() -> None:
    with pytest.raises(ValueError, match=r"expected --use-megatron-fsdp-v2, .* for --optimizer muon. Add it; with meg"):
        checked("--optimizer muon")
    with pytest.raises(
        NotImplementedError, match=r"expected --bf16 or fp32 with Muon, .* got --fp16 for --optimizer mu"
    ):
        checked("--optimizer muon --use-megatron-fsdp-v2 --fp16")
    line = "--optimizer muon --use-megatron-fsdp-v2 --tensor-model-parallel-size 2 --muon-tp-mode"
    with pytest.raises(NotImplementedError, match=r"got distributed for --muon-tp-mode. Write duplicated: each whole"):
        checked(f"{line} distributed", world_size=2)
    assert checked(f"{line} duplicated", world_size=2).muon_tp_mode == "duplicated"


FP8 = "--bf16 --fp8-format hybrid"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{FP8} --fp4-format e2m1", "one of --fp8-format and --fp4-format, got both for --fp8-format. Drop"),
        (f"{FP8} --transformer-impl local", "TransformerEngine's layers, got --transformer-impl local for --fp8-fo"),
        (f"{FP8} --first-last-layers-bf16", "another recipe than delayed, whose maxima .* for --first-last-layers"),
        (f"{FP8} --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 5",
         "at most the 4 layers of a stage, got 5 for --num-layers-at-end-in-bf16"),
        ("--bf16 --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 9",
         "at most the 4 layers of a stage, got 9 for --num-layers-at-start-in-bf16"),
        (f"{FP8} --hidden-size 24 --num-attention-heads 4 --kv-channels 8", "a multiple of 16 .*, got 24 for --hidden"),
        (f"{FP8} --ffn-hidden-size 40", "a multiple of 16 elements on each rank, got 40 for --ffn-hidden-size"),
        (f"{FP8} --num-attention-heads 3 --kv-channels 8", "a multiple of 16 .*, got 24 for --num-attention-heads"),
        (f"{FP8} --kv-channels 4 --num-attention-heads 4 --group-query-attention --num-query-groups 1",
         "a multiple of 16 .*, got 24 for --kv-channels"),
        (f"{FP8} --micro-batch-size 1 --seq-length 40", "a multiple of 16 tokens .*, got 40 for --micro-batch-size"),
        (f"{FP8} --num-experts 4 --disable-bias-linear --moe-ffn-hidden-size 8", "a multiple .*, got 8 for --moe-ffn"),
        (f"{FP8} --fp8-recipe mxfp8 --ffn-hidden-size 48", "a multiple of 32 .*, got 48 for --ffn-hidden-size"),
        ("--bf16 --fp4-format e2m1 --ffn-hidden-size 48", "a multiple of 32 .*, got 48 for --ffn-hidden-size"),
    ],
)  # fmt: skip
def test_low_precision_that_does_not_fit_the_run_is_refused(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.pretrain.low_bit_flags.has_transformer_engine", lambda: True)
    with pytest.raises(ValueError, match=f"^Low precision: expected {message}"):
        checked(line)


def test_low_precision_needs_transformer_engine_and_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.pretrain.low_bit_flags.has_transformer_engine", lambda: False)
    with pytest.raises(NotImplementedError, match=r"expected TransformerEngine, .* got a Python without it for --fp4-"):
        checked("--bf16 --fp4-format e2m1")
    monkeypatch.setattr("megatron.pretrain.low_bit_flags.has_transformer_engine", lambda: True)
    for line in ("--fp8-format hybrid", "--fp8-format hybrid --fp16"):
        with pytest.raises(NotImplementedError, match=r"expected --bf16 beside it, got a run without it for --fp8-fo"):
            checked(line)
    assert checked(FP8) and checked("--bf16 --fp4-format e2m1")


EXPERTS = "--num-experts 4 --disable-bias-linear"
SHARED_EXPERTS = f"{EXPERTS} --expert-model-parallel-size 2"
OVERLAP = f"{EXPERTS} --overlap-moe-expert-parallel-comm"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-experts 3 --expert-model-parallel-size 2", "a divisor of --num-experts 3, got 2 for --expert-model"),
        (
            f"{EXPERTS} --expert-model-parallel-size 4",
            r"a divisor of the 2 rank\(s\) of a stage, got 4 for --expert-model-par.*Change it or the number of ranks",
        ),
        (
            "--num-experts 4",
            "no biases without expert parallelism, got some for --num-experts. Add --disable-bias-linear",
        ),
        (f"{EXPERTS} --moe-router-topk 5", "at most --num-experts 4, got 5 for --moe-router-topk"),
        (
            f"{EXPERTS} --moe-router-topk 1",
            "2 or more, .*, got 1 for --moe-router-topk. Raise it, or add --moe-router-p",
        ),
        (
            f"{EXPERTS} --moe-router-enable-expert-bias",
            "--moe-router-score-function sigmoid, got softmax for --moe-rou",
        ),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", "one of allgather, alltoall, got 'flex' for --moe-token-disp"),
        (
            f"{EXPERTS} --use-megatron-fsdp-v2 --cuda-graph-impl full_iteration",
            "a model without experts, .* for --num-experts. Drop one",
        ),
        (
            f"{EXPERTS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
            "--sequence-parallel with tensor parallelism, got none for --num-experts",
        ),
        (
            f"{EXPERTS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel",
            "a multiple of --tensor-model-parallel-size 2, .*, got 1 for --expert-model-parallel-size",
        ),
        (
            f"{EXPERTS} --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel",
            r"a divisor of the 2 rank\(s\) of a stage, 2 for each expert, got 2 for --expert-model-parallel-size",
        ),
        (
            f"{EXPERTS} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
            r"a divisor of the 1 rank\(s\) of a stage, got 2 for --expert-model-parallel-size",
        ),
        (
            f"{EXPERTS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 4 --sequence-parallel",
            r"1 or --tensor-model-parallel-size 2, got 4 for --expert-tensor-parallel-size. Change one of them",
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 --sequence-parallel",
            r"no biases where ranks share an expert, got 2 for --expert-tensor-parallel-size",
        ),
        (
            f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --moe-ffn-hidden-size 9",
            r"a multiple of --expert-tensor-parallel-size 2, got 9 for --moe-ffn-hidden-size",
        ),
        (f"{OVERLAP} --bf16", "2 or more, got 1 for --expert-model-parallel-size. Raise it, or drop the overlap"),
        (
            f"{OVERLAP} --bf16 --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
            "alltoall, got allgather for --moe-token-dispatcher-type",
        ),
        (
            f"{OVERLAP} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
            "16-bit compute, got none for --bf16",
        ),
        (
            f"{OVERLAP} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16 "
            "--recompute-granularity full --recompute-method uniform",
            "no full recomputation, got full for --recompute-granularity",
        ),
        *(
            (f"{OVERLAP} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16 {more}", message)
            for more, message in (
                ("--use-megatron-fsdp-v2 --fsdp-trace-pool", "a run without it, got True for --fsdp-trace-pool"),
                (
                    "--use-megatron-fsdp-v2 --megatron-fsdp-min-unit-numel 9",
                    "a run without it, got 9 for --megatron-fsdp-min-unit-numel",
                ),
                (
                    "--mtp-num-layers 1 --position-embedding-type rope",
                    "a run without it, got 1 for --mtp-num-layers",
                ),
                (
                    "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
                    "--attention-dropout 0.25 --hidden-dropout 0",
                    "0 with --sequence-parallel, .* got 0.25 for --attention-dropout",
                ),
            )
        ),
        (
            f"{OVERLAP} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16 "
            "--recompute-granularity selective --recompute-modules moe",
            "other modules, as experts run apart, got moe for --recompute-modules",
        ),
        (
            f"{EXPERTS} --expert-model-parallel-size 2 --use-megatron-fsdp-v2 --num-distributed-optimizer-instances 2",
            "a divisor of the 1 copies of each expert, got 2 for --num-distributed-optimizer-instances",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"expected {message}"):
        checked(line, world_size=2)


def test_overlapped_experts_over_stages_need_chunks() -> None:
    line = f"{OVERLAP} --bf16 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --num-layers 4"
    stages = "--pipeline-model-parallel-size 2"
    with pytest.raises(
        ValueError, match="several chunks a rank with stages, got none for --num-virtual-stages-per-pip"
    ):
        checked(f"{line} {stages}", world_size=4)
    assert checked(f"{line} {stages} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 32", world_size=4)


def test_experts_are_as_wide_as_the_mlp_unless_told_otherwise() -> None:
    args = checked(f"{EXPERTS} --hidden-size 64 --expert-model-parallel-size 2 --moe-router-dtype fp64", world_size=2)
    assert (args.moe_ffn_hidden_size, args.expert_tensor_parallel_size) == (256, 1)
    assert expert_config(args)["moe_router_dtype"] == "fp64"
    assert expert_config(checked("")) == {}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_narrow_main_gradients_name_the_cure(name: str) -> None:
    line = f"--use-megatron-fsdp-v2 --bf16 --megatron-fsdp-main-grads-dtype {name}"
    cure = f"got {name} for --megatron-fsdp-main-grads-dtype. Add --grad-reduce-in-bf16."
    with pytest.raises(ValueError, match=f"^Gradients: expected fp32 or auto .*, {cure}$"):
        checked(line)
    assert checked(f"{line} --grad-reduce-in-bf16")


@pytest.mark.parametrize("sent", ["fp32", "fp16"])
@pytest.mark.parametrize("main_grads", ["", "--megatron-fsdp-main-grads-dtype bf16"])
def test_gradients_are_sent_no_wider_than_they_accumulate(main_grads: str, sent: str) -> None:
    line = f"--use-megatron-fsdp-v2 --bf16 --grad-reduce-in-bf16 {main_grads} --megatron-fsdp-grad-comm-dtype"
    cure = f"got {sent} for --megatron-fsdp-grad-comm-dtype. Drop the flag, or add --megatron-fsdp-main-grads-dtype fp"
    with pytest.raises(ValueError, match=f"^Gradients: expected bf16 or auto .*, {cure}32.$"):
        checked(f"{line} {sent}")
    assert checked(f"{line} bf16")
    wide = "--use-megatron-fsdp-v2 --bf16 --grad-reduce-in-bf16 --megatron-fsdp-main-grads-dtype fp32"
    assert checked(f"{wide} --megatron-fsdp-grad-comm-dtype {sent}")


@pytest.mark.parametrize("num_ranks", [2, 4, 6])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_every_sharding_strategy_with_and_without_an_outer_axis(strategy: str, num_ranks: int) -> None:
    line = f"--use-megatron-fsdp-v2 --data-parallel-sharding-strategy {strategy}"
    assert checked(line, num_ranks)
    for outer in ("no_shard", "optim"):
        hybrid = f"--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy {outer}"
        assert checked(f"{line} {hybrid}", num_ranks).num_distributed_optimizer_instances == 2


@pytest.mark.parametrize("line", ["--profile-step-start 12", "--train-iters 11 --profile-step-end 12"])
def test_steps_to_record_are_steps_of_the_run(line: str) -> None:
    assert checked(f"{line} --profile-schedule a --profile-step-end 13 --train-iters 13")
    with pytest.raises(
        ValueError,
        match=r"^Profile: expected a number above --profile-step-start \d+, up to --train-iters \d+, got 12 for "
        r"--profile-step-end\. Change one of them\.$",
    ):
        checked(f"--profile-schedule a {line}")


IDLE = [
    "--profile-step-start 3",
    "--num-layers-per-virtual-pipeline-stage 1",
    "--sequence-parallel",
    "--num-virtual-stages-per-pipeline-rank 2",
    "--profile-step-end 50",
    "--num-query-groups 2",
    "--moe-ffn-hidden-size 8",
    "--moe-router-topk 1",
    "--moe-router-pre-softmax",
    "--moe-router-pre-softmax --num-experts 4 --moe-router-score-function sigmoid",
    "--moe-router-score-function sigmoid",
    "--moe-router-load-balancing-type none",
    "--moe-router-dtype fp32",
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate 1",
    "--moe-router-bias-update-rate 1 --num-experts 4",
    "--moe-aux-loss-coeff 1",
    "--moe-aux-loss-coeff 1 --num-experts 4 --moe-router-load-balancing-type sinkhorn",
    "--moe-z-loss-coeff 1",
    "--moe-token-dispatcher-type alltoall",
    "--expert-model-parallel-size 2",
    "--expert-tensor-parallel-size 2",
    "--overlap-moe-expert-parallel-comm",
    "--sequence-parallel",
    "--rotary-base 500",
    "--rotary-percent 0.5",
    "--reset-position-ids --position-embedding-type rope",
    "--add-qkv-bias",
    "--split 1,1 --mock-data --vocab-size 9",
    "--split 1,1 --train-data-path a --vocab-size 9",
    "--data-cache-path a --mock-data --vocab-size 9",
    "--no-mmap-bin-files --mock-data --vocab-size 9",
    "--vocab-size 9",
    "--tokenizer-type ByteLevelTokenizer",
    "--tokenizer-model a --data-path a --tokenizer-type ByteLevelTokenizer",
    "--eval-interval 9 --eval-iters 0",
    "--recompute-method uniform",
    "--recompute-num-layers 1 --recompute-granularity selective",
    "--recompute-modules mlp --recompute-granularity full --recompute-method block",
    "--distribute-saved-activations --recompute-activations",
    "--mtp-loss-scaling-factor 0.5",
    "--adam-beta1 0.5 --optimizer sgd",
    "--adam-beta2 0.5 --optimizer sgd",
    "--adam-eps 0.5 --optimizer sgd",
    "--sgd-momentum 0.5",
    "--sgd-momentum 0.5 --optimizer muon --use-megatron-fsdp-v2",
    "--muon-momentum 0.5",
    "--muon-nesterov",
    "--muon-use-nesterov --optimizer sgd",
    "--muon-no-split-qkv",
    "--muon-split-gate-up --swiglu",
    "--muon-split-gate-up --optimizer muon --use-megatron-fsdp-v2",
    "--muon-router-adam --optimizer muon --use-megatron-fsdp-v2",
    "--muon-scale-mode spectral",
    "--muon-extra-scale-factor 2",
    "--muon-num-ns-steps 5",
    "--muon-coefficient-type simple",
    "--muon-fp32-matmul-prec high",
    "--muon-tp-mode duplicated --optimizer muon --use-megatron-fsdp-v2",
    "--lr-wsd-decay-style linear",
    "--lr-wsd-decay-iters 5",
    "--start-weight-decay 1",
    "--end-weight-decay 1",
    "--weight-decay 1 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
    "--grad-reduce-in-bf16",
    "--grad-reduce-in-bf16 --fp16",
    "--accumulate-allreduce-grads-in-fp32",
    "--accumulate-allreduce-grads-in-fp32 --bf16",
    "--loss-scale 8",
    "--fp8-recipe tensorwise --bf16",
    "--fp8-param-gather --use-megatron-fsdp-v2",
    "--fp8-param-gather --fp8-format hybrid --bf16",
    "--fp8-margin 1 --fp8-format hybrid --fp8-recipe tensorwise",
    "--fp8-amax-history-len 2",
    "--fp8-amax-compute-algo max",
    "--no-fp8-wgrad --fp4-format e2m1",
    "--tp-only-amax-red",
    "--fp4-param-gather --use-megatron-fsdp-v2",
    "--quantized-gather mxfp8",
    "--quantized-gather-rounding stochastic --use-megatron-fsdp-v2",
    "--quantized-gather-scaling row --use-megatron-fsdp-v2 --quantized-gather mxfp8",
    "--first-last-layers-bf16 --bf16",
    "--num-layers-at-start-in-bf16 2 --fp8-format hybrid",
    "--num-layers-at-end-in-bf16 2 --fp8-format hybrid",
    "--keep-fp8-transpose-cache --fp8-format hybrid --use-megatron-fsdp-v2",
    "--keep-fp8-transpose-cache --fp8-param-gather --fp8-format e4m3 --fp8-recipe mxfp8 --use-megatron-fsdp-v2",
    "--initial-loss-scale 8",
    "--initial-loss-scale 8 --fp16 --loss-scale 8",
    "--min-loss-scale 8",
    "--loss-scale-window 8",
    "--hysteresis 8",
    "--no-check-for-nan-in-loss-and-grad --fp16",
    "--use-precision-aware-optimizer",
    "--use-precision-aware-optimizer --optimizer sgd --use-megatron-fsdp-v2",
    "--exp-avg-dtype bf16",
    "--exp-avg-sq-dtype bf16",
    "--data-parallel-sharding-strategy optim",
    "--num-distributed-optimizer-instances 2",
    "--outer-dp-sharding-strategy optim --use-megatron-fsdp-v2",
    "--expert-data-parallel-sharding-strategy optim",
    "--expert-data-parallel-sharding-strategy optim --use-megatron-fsdp-v2",
    f"--expert-data-parallel-sharding-strategy optim --use-megatron-fsdp-v2 {EXPERTS}",
    f"--expert-data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp-v2 {SHARED_EXPERTS}",
    f"--expert-data-parallel-sharding-strategy optim --data-parallel-sharding-strategy optim {SHARED_EXPERTS} "
    "--use-megatron-fsdp-v2",
    "--expert-outer-dp-sharding-strategy optim",
    f"--expert-outer-dp-sharding-strategy optim --use-megatron-fsdp-v2 {SHARED_EXPERTS}",
    f"--expert-outer-dp-sharding-strategy no_shard --use-megatron-fsdp-v2 {SHARED_EXPERTS} "
    "--num-distributed-optimizer-instances 2",
    "--megatron-fsdp-static-gradients",
    "--megatron-fsdp-min-unit-numel 9",
    "--cuda-graph-impl full_iteration",
    "--cuda-graph-warmup-steps 2 --use-megatron-fsdp-v2",
    "--megatron-fsdp-static-gradients --fsdp-trace-pool --use-megatron-fsdp-v2",
    "--fsdp-trace-pool",
    "--create-all-gather-group",
    "--create-all-gather-group --data-parallel-sharding-strategy optim --use-megatron-fsdp-v2",
    "--nccl-ub --use-megatron-fsdp-v2",
    "--megatron-fsdp-main-params-dtype fp32",
    "--megatron-fsdp-main-grads-dtype fp32",
    "--megatron-fsdp-grad-comm-dtype fp32",
    "--use-distributed-optimizer --use-megatron-fsdp-v2",
    "--overlap-grad-reduce --use-megatron-fsdp-v2",
    "--overlap-param-gather --use-megatron-fsdp-v2",
    "--ddp-bucket-size 9 --use-megatron-fsdp-v2",
    "--ddp-average-in-collective --use-megatron-fsdp-v2",
    "--overlap-param-gather --use-distributed-optimizer",
    "--ddp-bucket-size 9",
    "--tensorboard-log-interval 9",
    "--save-interval 9",
    "--async-save",
    "--async-save --save x",
    "--keep-last 2",
    "--keep-last 2 --save x",
    "--no-save-optim",
    "--no-save-rng",
    "--no-save-rng --save x",
    "--ckpt-format fsdp_dtensor --use-megatron-fsdp-v2",
    "--ckpt-step 9",
    "--no-load-optim",
    "--no-load-rng",
    "--finetune",
    "--exit-on-missing-checkpoint",
    "--verify-checksums",
    "--override-opt_param-scheduler",
    "--use-checkpoint-opt_param-scheduler",
]


@pytest.mark.parametrize("line", IDLE)
def test_a_flag_that_would_do_nothing_is_refused(line: str) -> None:
    flag = line.split()[0]
    with pytest.raises(ValueError, match=f"Flag without effect: expected .* for {flag}. Add what"):
        checked(line)


def test_every_flag_of_the_table_is_tried() -> None:
    tried = {line.split()[0] for line in IDLE}
    listed = {flag for requirement in REQUIREMENTS for flag in requirement.flags}
    assert listed - tried == {"--use-megatron-fsdp-v2"}  # It is what the others need.


@pytest.mark.parametrize(
    "line",
    [
        "--group-query-attention --num-query-groups 2 --position-embedding-type rope --rotary-base 5",
        "--train-data-path a --valid-data-path b --vocab-size 9",
        "--train-data-path a --test-data-path b --vocab-size 9",
        "--data-path a --vocab-size 9 --split 90,10 --no-mmap-bin-files --data-cache-path c",
        "--split 1 --eval-iters 0",
        "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style linear",
        "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 1",
        "--use-megatron-fsdp-v2 --megatron-fsdp-main-params-dtype fp32 --bf16",
        "--use-megatron-fsdp-v2 --megatron-fsdp-main-params-dtype bf16 --bf16",
        "--use-megatron-fsdp-v2 --megatron-fsdp-main-params-dtype auto --megatron-fsdp-main-grads-dtype fp32",
        "--use-megatron-fsdp-v2 --data-parallel-sharding-strategy optim_grads_params",
        "--lr-decay-style WSD --lr-wsd-decay-iters 90 --lr-warmup-iters 10",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--optimizer sgd --sgd-momentum 0.5",
        "--optimizer muon --use-megatron-fsdp-v2 --bf16 --adam-beta1 0.8 --muon-nesterov --muon-num-ns-steps 8",
        "--use-megatron-fsdp-v2 --fp16 --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype fp16",
        "--fp16 --loss-scale 8 --no-check-for-nan-in-loss-and-grad",
    ],
)
def test_flags_that_belong_together_are_accepted(line: str) -> None:
    assert checked(line)
