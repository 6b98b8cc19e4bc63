#!/usr/bin/env bash
# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
#
# Runs every runtime on the given models in one go, each in processes of its own, and prints a JSON line for each:
#
#     benchmarks/compare.sh small llama1b llama7b
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
ranks="${NPROC:-2}"
for model in "${@:-llama1b}"; do
    for runtime in none fsdp2 fsdp_v2; do
        "$python" -m torch.distributed.run --nproc_per_node "$ranks" --master_port "${MASTER_PORT:-29500}" \
            benchmarks/step.py --runtime "$runtime" --model "$model"
    done
done
