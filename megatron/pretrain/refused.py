# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Names flags of Megatron-LM that this script does not honour, and what to do instead.

A flag that would change nothing is refused rather than ignored. Flags in neither this table nor the
parser get the nearest known name.
"""

_KERNELS = "Kernels and fusions follow from the host and --transformer-impl: drop the flag."
_TOKENS = "The data holds token ids already: give --vocab-size, or the --tokenizer-type that made them."
_OPTIMIZER_DTYPES = (
    "What the optimizer updates and reads, the sharding keeps: give --megatron-fsdp-main-params-dtype and "
    "--megatron-fsdp-main-grads-dtype."
)
_FSDP_V1 = "This script trains with --use-megatron-fsdp-v2, or without it with megatron-core's DDP."
_SAMPLES = "Training is counted in iterations: give --train-iters and --lr-decay-iters."
_ITERATIONS = "The run ends after --train-iters: give that instead."
_ONE_LR = "One learning rate serves all layers: give --lr and --min-lr."
_FP8 = "FP8 is for linear layers, by the recipes of --fp8-recipe: drop the flag."
_MXFP8_BUFFERS = "With --use-megatron-fsdp-v2 gathered weights have memory of their own: drop the flag."
_ROPE_SCALING = "Rotary frequencies follow from --rotary-base and --rotary-percent alone: drop the flag."
_GARBAGE = "Python's garbage collector runs by itself: drop the flag."
_PROFILE = "Write --profile-schedule FOLDER, or start the script under a profiler."
_WANDB = "Curves go to --tensorboard-dir, --log-json and --plot: give one of these instead."
_OTHER_OPTIMIZERS = "Optimizers are adam, sgd and muon: drop the flag."
_DEFAULT = "It is what this script does anyway: drop the flag."

REFUSED_FLAGS: dict[str, str] = {
    "--use-checkpoint-args": "The model is that of the flags: give those of the run that saved it.",
    **dict.fromkeys(
        (
            "--use-flash-attn",
            "--attention-backend",
            "--no-masked-softmax-fusion",
            "--no-bias-gelu-fusion",
            "--no-bias-swiglu-fusion",
            "--no-bias-dropout-fusion",
            "--no-rope-fusion",
            "--no-persist-layer-norm",
            "--no-gradient-accumulation-fusion",
            "--attention-softmax-in-fp32",
            "--apply-layernorm-1p",
            "--cross-entropy-loss-fusion",
            "--cross-entropy-fusion-impl",
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            "--vocab-file",
            "--merge-file",
            "--padded-vocab-size",
        ),
        _TOKENS,
    ),
    **dict.fromkeys(("--main-params-dtype", "--main-grads-dtype"), _OPTIMIZER_DTYPES),
    "--fp16-lm-cross-entropy": "The loss is computed in fp32 from logits of any dtype: drop the flag.",
    "--overlap-param-gather-with-optimizer-step": "With --use-megatron-fsdp-v2 the step writes shards, and forward "
    "gathers them a unit ahead: there is no gather to start within the step. Drop the flag.",
    **dict.fromkeys(("--fsdp", "--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2"), _FSDP_V1),
    **dict.fromkeys(("--train-samples", "--lr-decay-samples", "--lr-warmup-samples"), _SAMPLES),
    **dict.fromkeys(
        (
            "--use-mcore-models",
            "--no-create-attention-mask-in-dataloader",
        ),
        _DEFAULT,
    ),
    "--exit-duration-in-mins": "The run ends after --train-iters or --exit-interval: give one of these instead.",
    **dict.fromkeys(("--decoupled-lr", "--decoupled-min-lr"), _ONE_LR),
    **dict.fromkeys(
        (
            "--fp8-dot-product-attention",
            "--fp8-multi-head-attention",
            "--fp8-output-proj",
            "--fp8-quantizer-factory",
            "--fp8-interval",
            "--fp4-quantizer-factory",
            "--fp4-recipe",
            "--te-precision-config-file",
        ),
        _FP8,
    ),
    "--muon-scalar-optimizer": "Whatever is no matrix is adam's: drop the flag.",
    **dict.fromkeys(("--lion-beta1", "--lion-beta2"), _OTHER_OPTIMIZERS),
    "--reuse-grad-buf-for-mxfp8-param-ag": _MXFP8_BUFFERS,
    **dict.fromkeys(("--use-rope-scaling", "--rope-scaling-factor"), _ROPE_SCALING),
    **dict.fromkeys(("--manual-gc", "--manual-gc-interval", "--manual-gc-eval"), _GARBAGE),
    **dict.fromkeys(("--profile", "--use-pytorch-profiler"), _PROFILE),
    **dict.fromkeys(("--wandb-project", "--wandb-exp-name", "--wandb-save-dir"), _WANDB),
    "--checkpoint-activations": "Write --recompute-activations, or --recompute-granularity and what it takes.",
    "--moe-layer-recompute": "Write --recompute-granularity selective --recompute-modules moe.",
    "--no-position-embedding": "Write --position-embedding-type none.",
    "--log-throughput": "--log-json records tokens_per_s: give that instead.",
    "--init-model-with-meta-device": "The model is built on its device: drop the flag.",
    "--dataloader-type": "Samples are read in the datasets' order, shuffled by --seed: drop the flag.",
    "--empty-unused-memory-level": "The allocator's cache is never emptied: drop the flag.",
    "--squared-relu": "The MLP has GELU, or gated SiLU with --swiglu: drop the flag or write that.",
    "--moe-grouped-gemm": "Experts run one after another; grouped products need kernels that were not tried: drop it.",
    "--rampup-batch-size": "The global batch size is constant: give --global-batch-size instead.",
    "--use-rotary-position-embeddings": "Write --position-embedding-type rope.",
}
