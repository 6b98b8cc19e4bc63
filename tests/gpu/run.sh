#!/usr/bin/env bash
# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
#
# All checks that need GPUs; run it from an environment in which the project is installed:
#
#     tests/gpu/run.sh [folder for logs and plots]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="${1:-runs/gpu}"
mkdir -p "$out"
python="${PYTHON:-python3}"
gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
"$python" -c 'import torch, megatron.core as m; print("torch", torch.__version__, "megatron-core", m.__version__, torch.cuda.get_device_name())'

for ranks in 1 2; do
    if [ "$ranks" -le "$gpus" ]; then
        "$python" -m torch.distributed.run --nproc_per_node "$ranks" tests/gpu/check_runtime.py
    fi
done

ranks=$((gpus < 2 ? gpus : 2))
NPROC="$ranks" PYTHON="$python" examples/megatron_fsdp/pretrain_bytes.sh --use-megatron-fsdp-v2 \
    --bf16 --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 \
    --train-iters 50 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 5 --log-interval 5 --eval-interval 50 --eval-iters 5 \
    --plot "$out/loss_bf16.png" --log-json "$out/loss_bf16.json"
