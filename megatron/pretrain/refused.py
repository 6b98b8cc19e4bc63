# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Names flags of Megatron-LM that this script does not honour, and what to do instead.

A flag that would change nothing is refused rather than ignored. Flags in neither this table nor the
parser get the nearest known name.
"""

_CHECKPOINT = "This loop neither saves nor loads checkpoints yet: drop the flag and train from the start."
_KERNELS = "Kernels and fusions follow from the host and --transformer-impl: drop the flag."
_TOKENS = "The data holds token ids already: drop the flag and give their number with --vocab-size."
_FP16 = "Half precision with loss scaling is not offered: use --bf16, or neither for fp32."
_FSDP_V1 = "This script trains with --use-megatron-fsdp-v2, or without it with megatron-core's DDP."
_SAMPLES = "Training is counted in iterations: give --train-iters and --lr-decay-iters."
_DEFAULT = "It is what this script does anyway: drop the flag."

REFUSED_FLAGS: dict[str, str] = {
    **dict.fromkeys(
        (
            "--save",
            "--load",
            "--save-interval",
            "--ckpt-format",
            "--finetune",
            "--no-load-optim",
            "--no-load-rng",
        ),
        _CHECKPOINT,
    ),
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
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            "--tokenizer-type",
            "--tokenizer-model",
            "--vocab-file",
            "--merge-file",
            "--padded-vocab-size",
        ),
        _TOKENS,
    ),
    **dict.fromkeys(("--fp16", "--loss-scale", "--initial-loss-scale", "--min-loss-scale"), _FP16),
    **dict.fromkeys(("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2"), _FSDP_V1),
    **dict.fromkeys(("--train-samples", "--lr-decay-samples", "--lr-warmup-samples"), _SAMPLES),
    **dict.fromkeys(
        (
            "--use-mcore-models",
            "--no-create-attention-mask-in-dataloader",
        ),
        _DEFAULT,
    ),
    "--num-experts": "Mixture-of-experts models are not offered yet: drop the flag.",
    "--sequence-parallel": "It comes with tensor parallelism, which is not offered yet: drop it.",
    "--rampup-batch-size": "The global batch size is constant: give --global-batch-size instead.",
    "--use-rotary-position-embeddings": "Write --position-embedding-type rope.",
    "--accumulate-allreduce-grads-in-fp32": "It is so unless --grad-reduce-in-bf16: drop the flag.",
}
