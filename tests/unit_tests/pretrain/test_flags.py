# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every flag must arrive where it takes effect, without a training: what is built from the arguments is recorded."""

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import megatron.core.distributed
import megatron.core.optimizer
import megatron.core.optimizer.fully_sharded_optimizer
import megatron.core.optimizer.fully_sharded_optimizer_config
from megatron.core.distributed.fsdp import mcore_fsdp_v2_adapter
from megatron.core.distributed.fsdp.experimental import Fp8Recipe, Mxfp8Recipe, Nvfp4Recipe
from megatron.core.optimizer import OptimizerConfig
from megatron.pretrain import data, low_bit_flags, model, precision_flags, training
from megatron.pretrain.arguments import _build_parser
from megatron.pretrain.low_bit_flags import DELAYED_FLAGS, EDGE_FLAGS, FP8_FLAGS
from megatron.pretrain.main import read_command
from megatron.pretrain.requirements import CHECKPOINT_FLAGS

V2 = "--use-megatron-fsdp-v2"
TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
FOUR_RANKS = TWO_RANKS | {"WORLD_SIZE": "4"}
FILES = "--data-path a --vocab-size 9"
NO_BIAS = "--disable-bias-linear"
MOE = f"--num-experts 4 {NO_BIAS}"
BIASED = f"--moe-router-score-function sigmoid {MOE}"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 30"
MUON = f"--optimizer muon {V2}"
NESTEROV = "muon_nesterov" if hasattr(OptimizerConfig, "muon_nesterov") else "muon_use_nesterov"
"""The field's name in the installed megatron-core."""
GROWING = "--weight-decay-incr-style linear --start-weight-decay 0.25 --end-weight-decay 0.5"

# (command line, what is built, field, value); the first flag of the line is the one that is tested.
CASES = [
    ("--num-layers 3", "config", "num_layers", 3),
    ("--hidden-size 64", "config", "hidden_size", 64),
    ("--ffn-hidden-size 96", "config", "ffn_hidden_size", 96),
    ("--num-attention-heads 8", "config", "num_attention_heads", 8),
    ("--kv-channels 8", "config", "kv_channels", 8),
    ("--group-query-attention --num-query-groups 2", "config", "num_query_groups", 2),
    ("--num-query-groups 2 --group-query-attention", "config", "num_query_groups", 2),
    ("--normalization RMSNorm", "config", "normalization", "RMSNorm"),
    ("--norm-epsilon 0.5", "config", "layernorm_epsilon", 0.5),
    ("--qk-layernorm", "config", "qk_layernorm", True),
    ("--swiglu", "config", "gated_linear_unit", True),
    ("--swiglu", "config", "activation_func", torch.nn.functional.silu),
    ("--disable-bias-linear", "config", "add_bias_linear", False),
    ("--add-qkv-bias --disable-bias-linear", "config", "add_qkv_bias", True),
    ("--attention-dropout 0.3", "config", "attention_dropout", 0.3),
    ("--hidden-dropout 0.3", "config", "hidden_dropout", 0.3),
    ("--use-cpu-initialization", "config", "use_cpu_initialization", True),
    ("--init-method-std 0.5", "config", "init_method_std", 0.5),
    ("--calculate-per-token-loss", "config", "calculate_per_token_loss", True),
    ("--recompute-granularity selective", "config", "recompute_granularity", "selective"),
    ("--recompute-method block --recompute-granularity full", "config", "recompute_method", "block"),
    ("--recompute-num-layers 2 --recompute-method block --recompute-granularity full", "config",
     "recompute_num_layers", 2),
    ("--recompute-activations", "config", "recompute_granularity", "selective"),
    (f"--recompute-modules mlp core_attn --recompute-activations {NO_BIAS}", "config", "recompute_modules",
     ["mlp", "core_attn"]),
    ("--mtp-num-layers 2 --position-embedding-type rope", "config", "mtp_num_layers", 2),
    ("--mtp-loss-scaling-factor 0.5 --mtp-num-layers 2 --position-embedding-type rope", "config",
     "mtp_loss_scaling_factor", 0.5),
    ("--bf16", "config", "bf16", True),
    ("--bf16", "config", "params_dtype", torch.bfloat16),
    ("--fp16", "config", "fp16", True),
    ("--fp16", "config", "params_dtype", torch.float16),
    ("--fp16", "config", "pipeline_dtype", torch.float16),
    (f"--num-experts 4 {NO_BIAS}", "config", "num_moe_experts", 4),
    (f"--moe-ffn-hidden-size 24 {MOE}", "config", "moe_ffn_hidden_size", 24),
    (f"--moe-router-topk 3 {MOE}", "config", "moe_router_topk", 3),
    (f"--moe-router-pre-softmax {MOE}", "config", "moe_router_pre_softmax", True),
    (f"--moe-router-score-function sigmoid {MOE}", "config", "moe_router_score_function", "sigmoid"),
    (f"--moe-router-load-balancing-type none {MOE}", "config", "moe_router_load_balancing_type", "none"),
    (f"--moe-router-dtype fp64 {MOE}", "config", "moe_router_dtype", "fp64"),
    (f"--moe-router-enable-expert-bias {BIASED}", "config", "moe_router_enable_expert_bias", True),
    (f"--moe-router-bias-update-rate 0.5 --moe-router-enable-expert-bias {BIASED}", "config",
     "moe_router_bias_update_rate", 0.5),
    (f"--moe-aux-loss-coeff 0.5 {MOE}", "config", "moe_aux_loss_coeff", 0.5),
    (f"--moe-z-loss-coeff 0.5 {MOE}", "config", "moe_z_loss_coeff", 0.5),
    (f"--moe-token-dispatcher-type alltoall {MOE}", "config", "moe_token_dispatcher_type", "alltoall"),
    ("--max-position-embeddings 512", "model", "max_sequence_length", 512),
    ("--position-embedding-type rope", "model", "position_embedding_type", "rope"),
    ("--rotary-base 500 --position-embedding-type rope", "model", "rotary_base", 500),
    ("--rotary-percent 0.5 --position-embedding-type rope", "model", "rotary_percent", 0.5),
    ("--untie-embeddings-and-output-weights", "model", "share_embeddings_and_output_weights", False),
    ("--make-vocab-size-divisible-by 1", "model", "vocab_size", 257),
    ("--vocab-size 999 --mock-data", "model", "vocab_size", 1024),
    ("--tokenizer-type ByteLevelTokenizer --data-path a --make-vocab-size-divisible-by 1", "model", "vocab_size", 257),
    (FILES, "dataset", "blend", (["a"], None)),
    ("--train-data-path a --vocab-size 9 --eval-iters 0", "dataset", "blend_per_split", [(["a"], None), None, None]),
    ("--valid-data-path b --train-data-path a --vocab-size 9", "dataset", "blend_per_split",
     [(["a"], None), (["b"], None), None]),
    ("--test-data-path c --train-data-path a --vocab-size 9", "dataset", "blend_per_split",
     [(["a"], None), None, (["c"], None)]),
    ("--split 8,1,1 --data-path a --vocab-size 9", "dataset", "split", "8,1,1"),
    (f"--data-cache-path c {FILES}", "dataset", "path_to_cache", "c"),
    (f"--no-mmap-bin-files {FILES}", "dataset", "mmap_bin_files", False),
    ("--seq-length 32", "dataset", "sequence_length", 32),
    ("--reset-position-ids", "dataset", "reset_position_ids", True),
    ("--reset-attention-mask", "dataset", "reset_attention_mask", True),
    ("--reset-attention-mask", "dataset", "create_attention_mask", True),
    ("--eod-mask-loss", "dataset", "eod_mask_loss", True),
    ("--seed 77", "dataset", "random_seed", 77),
    ("--seed 77", "seed", "seed", 77),
    ("--num-workers 1", "loader", "num_workers", 1),
    ("--micro-batch-size 2", "loader", "batch_sampler", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("--optimizer sgd", "optimizer", "optimizer", "sgd"),
    (f"--optimizer muon {V2}", "optimizer", "optimizer", "muon"),
    (f"--adam-beta1 0.5 {MUON}", "optimizer", "adam_beta1", 0.5),
    (f"--muon-momentum 0.5 {MUON}", "optimizer", "muon_momentum", 0.5),
    (f"--muon-nesterov {MUON}", "optimizer", NESTEROV, True),
    (f"--muon-use-nesterov {MUON}", "optimizer", NESTEROV, True),
    (f"--muon-no-split-qkv {MUON}", "optimizer", "muon_split_qkv", False),
    (f"--muon-split-gate-up --swiglu {MUON}", "optimizer", "muon_split_gate_up", True),
    (f"--muon-router-adam {MOE} {MUON}", "optimizer", "muon_router_adam", True),
    (f"--muon-scale-mode unit_rms_norm {MUON}", "optimizer", "muon_scale_mode", "unit_rms_norm"),
    (f"--muon-extra-scale-factor 0.2 {MUON}", "optimizer", "muon_extra_scale_factor", 0.2),
    (f"--muon-num-ns-steps 7 {MUON}", "optimizer", "muon_num_ns_steps", 7),
    (f"--muon-coefficient-type simple {MUON}", "optimizer", "muon_coefficient_type", "simple"),
    (f"--muon-fp32-matmul-prec high {MUON}", "optimizer", "muon_fp32_matmul_prec", "high"),
    (f"--muon-tp-mode duplicated --tensor-model-parallel-size 2 {MUON}", "optimizer", "muon_tp_mode", "duplicated"),
    ("--adam-beta1 0.5", "optimizer", "adam_beta1", 0.5),
    ("--adam-beta2 0.5", "optimizer", "adam_beta2", 0.5),
    ("--adam-eps 0.5", "optimizer", "adam_eps", 0.5),
    ("--sgd-momentum 0.5 --optimizer sgd", "optimizer", "sgd_momentum", 0.5),
    ("--clip-grad 0.5", "optimizer", "clip_grad", 0.5),
    ("--lr 0.5", "optimizer", "lr", 0.5),
    ("--lr 0.5", "scheduler", "max_lr", 0.5),
    ("--min-lr 0.0001", "optimizer", "min_lr", 0.0001),
    ("--min-lr 0.0001", "scheduler", "min_lr", 0.0001),
    ("--weight-decay 0.5", "optimizer", "weight_decay", 0.5),
    ("--weight-decay 0.5", "scheduler", "end_wd", 0.5),
    ("--log-num-zeros-in-grad", "optimizer", "log_num_zeros_in_grad", True),
    ("--bf16", "optimizer", "bf16", True),
    ("--fp16", "optimizer", "fp16", True),
    ("--fp16", "optimizer", "params_dtype", torch.float16),
    ("--loss-scale 64 --fp16", "optimizer", "loss_scale", 64.0),
    ("--loss-scale 64 --bf16", "optimizer", "loss_scale", 64.0),
    ("--initial-loss-scale 64 --fp16", "optimizer", "initial_loss_scale", 64.0),
    ("--min-loss-scale 64 --fp16", "optimizer", "min_loss_scale", 64.0),
    ("--loss-scale-window 64 --fp16", "optimizer", "loss_scale_window", 64),
    ("--hysteresis 3 --fp16", "optimizer", "hysteresis", 3),
    ("--use-distributed-optimizer", "optimizer", "use_distributed_optimizer", True),
    ("--overlap-param-gather --use-distributed-optimizer --overlap-grad-reduce", "optimizer",
     "overlap_param_gather", True),
    ("--lr-decay-style cosine", "scheduler", "lr_decay_style", "cosine"),
    ("--lr-decay-iters 50", "scheduler", "lr_decay_steps", 200),
    ("--train-iters 50", "scheduler", "wd_incr_steps", 200),
    ("--global-batch-size 8", "scheduler", "wd_incr_steps", 800),
    ("--lr-warmup-iters 5", "scheduler", "lr_warmup_steps", 20),
    ("--lr-warmup-fraction 0.5", "scheduler", "lr_warmup_steps", 200),
    ("--lr-warmup-init 0.0005", "scheduler", "init_lr", 0.0005),
    ("--lr-wsd-decay-iters 40 --lr-decay-style WSD", "scheduler", "wsd_decay_steps", 160),
    (f"--lr-wsd-decay-style cosine {WSD}", "scheduler", "lr_wsd_decay_style", "cosine"),
    (GROWING, "scheduler", "wd_incr_style", "linear"),
    ("--start-weight-decay 0.25 --end-weight-decay 0.5 --weight-decay-incr-style linear", "scheduler",
     "start_wd", 0.25),
    ("--end-weight-decay 0.5 --start-weight-decay 0.25 --weight-decay-incr-style linear", "scheduler",
     "end_wd", 0.5),
    ("--use-distributed-optimizer", "ddp", "use_distributed_optimizer", True),
    ("--overlap-grad-reduce", "ddp", "overlap_grad_reduce", True),
    ("--overlap-param-gather --use-distributed-optimizer --overlap-grad-reduce", "ddp", "overlap_param_gather", True),
    ("--ddp-bucket-size 99 --overlap-grad-reduce", "ddp", "bucket_size", 99),
    ("--ddp-average-in-collective", "ddp", "average_in_collective", True),
    ("--grad-reduce-in-bf16 --bf16", "ddp", "grad_reduce_in_fp32", False),
    ("--no-check-for-nan-in-loss-and-grad", "ddp", "check_for_nan_in_grad", False),
    ("--fp16", "ddp", "grad_reduce_in_fp32", False),
    ("--fp16", "ddp", "check_for_nan_in_grad", False),
    (f"--fp16 {V2}", "ddp", "grad_reduce_in_fp32", False),
    (f"--fp16 {V2}", "ddp", "check_for_nan_in_grad", False),
    (V2, "ddp", "use_megatron_fsdp_v2", True),
    (f"--grad-reduce-in-bf16 --bf16 {V2}", "ddp", "grad_reduce_in_fp32", False),
    (f"--no-check-for-nan-in-loss-and-grad {V2}", "ddp", "check_for_nan_in_grad", False),
    (f"--data-parallel-sharding-strategy optim {V2}", "ddp", "data_parallel_sharding_strategy", "optim"),
    (f"--num-distributed-optimizer-instances 2 {V2}", "ddp", "num_distributed_optimizer_instances", 2),
    (f"--outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2 {V2}", "ddp",
     "outer_dp_sharding_strategy", "optim"),
    (f"--expert-data-parallel-sharding-strategy optim --expert-model-parallel-size 2 {MOE} {V2}", "ddp",
     "expert_data_parallel_sharding_strategy", "optim"),
    (f"--expert-outer-dp-sharding-strategy optim --expert-model-parallel-size 2 {MOE} "
     f"--num-distributed-optimizer-instances 2 {V2}", "ddp", "expert_outer_dp_sharding_strategy", "optim"),
    (f"--megatron-fsdp-static-gradients {V2}", "ddp", "megatron_fsdp_static_gradients", True),
    (f"--megatron-fsdp-min-unit-numel 99 {V2}", "ddp", "megatron_fsdp_min_unit_numel", 99),
    (f"--fsdp-trace-pool {V2}", "ddp", "megatron_fsdp_trace_pool", True),
    (f"--create-all-gather-group --data-parallel-sharding-strategy optim_grads_params {V2}", "ddp",
     "megatron_fsdp_create_all_gather_group", True),
    (f"--nccl-ub --fsdp-trace-pool {V2}", "ddp", "nccl_ub", True),
    (f"--quantized-gather mxfp8 {V2}", "ddp", "megatron_fsdp_quantized_gather", Mxfp8Recipe()),
    (f"--quantized-gather-rounding stochastic --quantized-gather mxfp8 --seed 8 {V2}", "ddp",
     "megatron_fsdp_quantized_gather", Mxfp8Recipe(rounding="stochastic", seed=8)),
    (f"--quantized-gather-scaling row --quantized-gather fp8 {V2}", "ddp", "megatron_fsdp_quantized_gather",
     Fp8Recipe(scaling="row")),
    (f"--quantized-gather nvfp4 --quantized-gather-rounding stochastic --seed 7 {V2}", "ddp",
     "megatron_fsdp_quantized_gather", Nvfp4Recipe(rounding="stochastic", seed=7)),
    (f"--quantized-gather fp8 --quantized-gather-scaling block {V2}", "ddp", "megatron_fsdp_quantized_gather",
     Fp8Recipe(scaling="block")),
    (f"--megatron-fsdp-main-params-dtype bf16 --bf16 {V2}", "ddp", "megatron_fsdp_main_params_dtype",
     torch.bfloat16),
    (f"--megatron-fsdp-main-grads-dtype bf16 --bf16 --grad-reduce-in-bf16 {V2}", "ddp",
     "megatron_fsdp_main_grads_dtype", torch.bfloat16),
    (f"--megatron-fsdp-grad-comm-dtype bf16 {V2}", "ddp", "megatron_fsdp_grad_comm_dtype", torch.bfloat16),
]  # fmt: skip

# Flags of the loop, the launcher and the log, which other tests try by running or refusing them.
ELSEWHERE = {
    *("--distribute-saved-activations", "--overlap-moe-expert-parallel-comm"),  # functional tests, on two ranks
    "--help",
    "--mock-data",
    "--sequence-parallel",
    "--eval-interval",
    "--eval-iters",
    "--log-interval",
    "--tokenizer-model",
    "--transformer-impl",
    *("--cuda-graph-impl", "--cuda-graph-warmup-steps"),
    *("--accumulate-allreduce-grads-in-fp32", "--use-precision-aware-optimizer", "--exp-avg-dtype"),
    "--exp-avg-sq-dtype",
    *("--fp8-format", "--fp4-format", *FP8_FLAGS, "--fp4-param-gather", "--keep-fp8-transpose-cache"),
    *(*DELAYED_FLAGS, "--first-last-layers-bf16", *EDGE_FLAGS),
    "--distributed-backend",
    "--distributed-timeout-minutes",
    *(
        f"--{name}-parallel-size"
        for name in ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
    ),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    *("--log-json", "--tensorboard-dir", "--tensorboard-log-interval", "--plot"),
    *("--profile-schedule", "--profile-step-start", "--profile-step-end"),
    *CHECKPOINT_FLAGS,
}


class Recorded(torch.nn.Module):
    """Stands for what would be built, and keeps the keywords."""

    def __init__(self, *words: object, **keywords: Any) -> None:
        super().__init__()
        self.words, self.keywords = words, keywords


class Stop(Exception):
    pass


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "GPTModel", Recorded)
    monkeypatch.setattr(model, "get_gpt_mtp_block_spec", lambda *args, **kwargs: None)
    monkeypatch.setattr(model, "Float16Module", lambda config, module: module)
    monkeypatch.setattr(model.ProcessGroupCollection, "use_mpu_process_groups", lambda: None)
    monkeypatch.setattr(mcore_fsdp_v2_adapter, "FullyShardedDataParallel", Recorded)
    monkeypatch.setattr(megatron.core.distributed, "DistributedDataParallel", Recorded)
    for module in (megatron.core.optimizer, megatron.core.optimizer.fully_sharded_optimizer):
        monkeypatch.setattr(module, "get_megatron_optimizer", lambda config, chunks: config)
    monkeypatch.setattr(training, "OptimizerParamScheduler", Recorded)
    monkeypatch.setattr(data.parallel_state, "get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(data.parallel_state, "get_data_parallel_world_size", lambda: 1)


def build(what: str, args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if what == "dataset":
        return vars(data._dataset_config(args))
    if what == "loader":
        return loader_keywords(args, monkeypatch)
    if what == "seed":
        return {"seed": seed_of_the_run(args, monkeypatch)}
    if what == "optimizer":
        return vars(training._build_optimizer(args, None))
    if what == "scheduler":
        return dict(training._build_scheduler(args, None).keywords)
    config, ddp_config, chunk = model.build_model(args)[0].words
    return {"config": vars(config), "ddp": vars(ddp_config), "model": chunk.keywords}[what]


def loader_keywords(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def load(dataset: object, **keywords: Any) -> Iterator[object]:
        found.update(keywords)
        return iter(())

    monkeypatch.setattr(torch.utils.data, "DataLoader", load)
    assert list(data._iterate(None, 0, 8, args)) == []
    return found


def seed_of_the_run(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> int:
    seeds: list[int] = []

    def stop(seed: int, use_cudagraphable_rng: bool) -> None:
        assert not use_cudagraphable_rng
        seeds.extend([torch.initial_seed(), seed])
        raise Stop

    monkeypatch.setattr(training, "seed_of_stage", lambda seed: seed)
    monkeypatch.setattr(training.tensor_parallel, "model_parallel_cuda_manual_seed", stop)
    with torch.random.fork_rng(), pytest.raises(Stop):
        training.build_train_state(args, None, None)
    assert seeds[0] == seeds[1]
    return seeds[0]


@pytest.mark.usefixtures("recorders")
@pytest.mark.parametrize(("line", "what", "field", "value"), CASES)
def test_a_flag_arrives(line: str, what: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build(what, read_command([], {}).args if V2 not in line else read_command([V2], {}).args, monkeypatch)
    assert line == V2 or plain[field] != value, "the default is no test"
    has_two = "instances" in line or "tensor-model" in line
    environment = FOUR_RANKS if "expert-model" in line else TWO_RANKS if has_two else {}
    assert build(what, read_command(line.split(), environment).args, monkeypatch)[field] == value


@pytest.mark.usefixtures("recorders")
@pytest.mark.parametrize("wrapper", [V2, ""])
def test_gradients_of_fp16_are_fp32_on_request_and_checked_with_a_constant_scale(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"--accumulate-allreduce-grads-in-fp32 --fp16 --loss-scale 8 {wrapper}"
    found = build("ddp", read_command(line.split(), {}).args, monkeypatch)
    assert found["grad_reduce_in_fp32"] is True and found["check_for_nan_in_grad"] is True


def test_a_precision_aware_optimizer_is_told_the_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's config refuses itself without TransformerEngine, so that its arguments are recorded."""
    monkeypatch.setattr(precision_flags.importlib.util, "find_spec", lambda name: name)
    config = megatron.core.optimizer.fully_sharded_optimizer_config
    monkeypatch.setattr(config, "FullyShardedOptimizerConfig", lambda **fields: fields)
    optimizer = megatron.core.optimizer.fully_sharded_optimizer
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda config, chunks: config)
    line = f"{V2} --use-precision-aware-optimizer --fp16 --exp-avg-dtype bf16"
    found: Any = training._build_optimizer(read_command(line.split(), {}).args, [])
    assert found["use_precision_aware_optimizer"] is found["use_distributed_optimizer"] is True
    assert (found["main_params_dtype"], found["main_grads_dtype"]) == (torch.float32, torch.float16)
    assert (found["exp_avg_dtype"], found["exp_avg_sq_dtype"]) == (torch.bfloat16, torch.float32)
    line = f"{V2} --use-precision-aware-optimizer --bf16 --megatron-fsdp-main-params-dtype auto --exp-avg-sq-dtype bf16"
    found = training._build_optimizer(read_command(line.split(), {}).args, [])
    assert (found["main_params_dtype"], found["main_grads_dtype"]) == (torch.bfloat16, torch.float32)
    assert (found["exp_avg_dtype"], found["exp_avg_sq_dtype"]) == (torch.float32, torch.bfloat16)


@pytest.mark.usefixtures("recorders")
@pytest.mark.parametrize(
    ("line", "what", "field", "value"),
    [
        ("--fp8-format hybrid", "config", "fp8", "hybrid"),
        ("--fp8-format e4m3", "config", "fp8", "e4m3"),
        ("--fp8-recipe blockwise --fp8-format hybrid", "config", "fp8_recipe", "blockwise"),
        ("--fp8-margin 3 --fp8-format hybrid", "config", "fp8_margin", 3),
        ("--fp8-amax-history-len 9 --fp8-format hybrid", "config", "fp8_amax_history_len", 9),
        ("--fp8-amax-compute-algo max --fp8-format hybrid", "config", "fp8_amax_compute_algo", "max"),
        ("--no-fp8-wgrad --fp8-format hybrid", "config", "fp8_wgrad", False),
        ("--tp-only-amax-red --fp8-format hybrid", "config", "tp_only_amax_red", True),
        ("--first-last-layers-bf16 --fp8-format hybrid --fp8-recipe tensorwise", "config", "first_last_layers_bf16",
         True),
        ("--num-layers-at-start-in-bf16 2 --first-last-layers-bf16 --fp4-format e2m1", "config",
         "num_layers_at_start_in_bf16", 2),
        ("--num-layers-at-end-in-bf16 0 --first-last-layers-bf16 --fp4-format e2m1", "config",
         "num_layers_at_end_in_bf16", 0),
        ("--fp8-param-gather --fp8-format hybrid", "config", "fp8_param", True),
        ("--fp8-param-gather --fp8-format hybrid", "ddp", "fp8_param_gather", True),
        ("--keep-fp8-transpose-cache --fp8-param-gather --fp8-format hybrid", "ddp", "keep_fp8_transpose_cache", True),
        ("--fp4-format e2m1", "config", "fp4", "e2m1"),
        ("--fp4-param-gather --fp4-format e2m1", "config", "fp4_param", True),
        ("--fp4-param-gather --fp4-format e2m1", "ddp", "fp4_param_gather", True),
    ],
)  # fmt: skip
def test_a_flag_of_low_precision_arrives(
    line: str, what: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are TransformerEngine's, which is not installed everywhere: they are not built."""
    monkeypatch.setattr(low_bit_flags, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(model, "uses_transformer_engine", lambda args: True)
    monkeypatch.setattr(model, "get_gpt_layer_with_transformer_engine_spec", lambda **options: None)
    plain = build(what, read_command([V2, "--bf16"], {}).args, monkeypatch)
    assert plain[field] != value, "the default is no test"
    assert build(what, read_command([V2, "--bf16", *line.split()], {}).args, monkeypatch)[field] == value


def test_every_flag_is_tried() -> None:
    tried = {line.split()[0] for line, *_ in CASES}
    assert not tried & ELSEWHERE
    known = {flag for flag in _build_parser()._option_string_actions if flag.startswith("--")}
    assert known == tried | ELSEWHERE
