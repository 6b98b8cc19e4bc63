#!/usr/bin/env bash
# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
#
# Trains a 0.8-million-parameter GPT on the bytes of the Python standard library, on two CPU cores
# in about a minute:
#
#     examples/megatron_fsdp/pretrain_bytes.sh --use-megatron-fsdp-v2
#     examples/megatron_fsdp/pretrain_bytes.sh                  # the same with megatron-core's DDP
#
# Further flags are passed on and win over those below; NPROC ranks (default 2) are started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-python}" -m torch.distributed.run --nproc_per_node "${NPROC:-2}" \
    --master_port "${MASTER_PORT:-29500}" pretrain_gpt.py \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 1 \
    --global-batch-size 16 --micro-batch-size "$((16 / ${NPROC:-2}))" --split 98,2,0 --num-workers 0 \
    --train-iters 400 --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 30 \
    --weight-decay 0.1 --adam-beta2 0.95 \
    --log-interval 10 --eval-interval 150 --eval-iters 10 "$@"
