#!/usr/bin/env bash
# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
#
# All checks that need GPUs, within 23 minutes on two of them; run it from an environment in which the project, pytest
# and hypothesis are installed:
#
#     tests/gpu/run.sh [folder for logs and plots]
#
# A line for each check (ok, FAILED or not run), a summary for each part, and one at the end; the exit status is that of
# the worst part. Where there is no GPU, or with FSDP_TEST_DEVICE=cpu, the checks run on the host instead (a dry run).
#
#     behaviour   the unit tests of parity and behaviour, under NCCL      python -m tests.gpu.behaviour -k NAME
#     races       streams change no bit, and every wait is needed        python -m tests.gpu.checks --ranks 2 races
#     memory      rest and peak against a formula                        python -m tests.gpu.checks --ranks 2 memory
#     overlap     communication beside compute, no waiting host          python -m tests.gpu.checks --ranks 2 overlap
#     graphs      whole iterations in one CUDA graph, bit for bit        python -m tests.gpu.checks --ranks 2 graphs
#     unit_graphs units with graphs of their own, bit for bit            python -m tests.gpu.checks --ranks 2 unit_graphs
#     quantized   low-bit weights: the host's bits, and in graphs        python -m tests.gpu.checks --ranks 2 quantized
#     muon        matrices' optimizer: bits, graphs, streams, memory      python -m tests.gpu.checks --ranks 2 muon
#     number_formats low-bit weights, bit for bit, and how fast    python -m tests.gpu.checks --ranks 1 number_formats
#     sanitized   no access outside of memory (compute-sanitizer)         see tests/gpu/sanitized.py
#     same_losses a training run in bf16 with and without a graph        python -m tests.gpu.same_losses --ranks 2
#     resume      a save in the background and a resume               python -m tests.gpu.resume --ranks 2
#     stock_loop  megatron-core 0.19's own loop, beside DDP   python -m tests.gpu.stock_loop --ranks 2
#     transformer_engine   FP8 with TransformerEngine's weights, where it is installed; see transformer_engine.sh
#     pretrain    a training run in bf16, with its loss curve
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="${1:-runs/gpu}"
mkdir -p "$out"
python="${PYTHON:-python3}"
# The optional libraries that megatron-core does without are named by every process.
export PYTHONWARNINGS="ignore::UserWarning" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUBLAS_WORKSPACE_CONFIG=:4096:8

gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')" || exit 2
export FSDP_TEST_DEVICE="${FSDP_TEST_DEVICE:-$([ "$gpus" -gt 0 ] && echo cuda || echo cpu)}"
ranks=2
[ "$FSDP_TEST_DEVICE" = cuda ] && [ "$gpus" -lt 2 ] && ranks="$gpus"
"$python" -c 'import sys, torch, megatron.core as m
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print("python", sys.version.split()[0], "torch", torch.__version__, "megatron-core", m.__version__, name)'

failed=()
patience=$([ "$FSDP_TEST_DEVICE" = cuda ] && echo 1 || echo 5)
part() { # name, seconds, command
    local name="$1" limit="$(($2 * patience))" start="$SECONDS" status=0
    shift 2
    timeout --kill-after=15 "$limit" "$@" 2>&1 | tee "$out/$name.log" || status=$?
    echo "== $name: exit status $status after $((SECONDS - start)) s of $limit s"
    [ "$status" -eq 0 ] || failed+=("$name")
}

part behaviour 280 "$python" -m tests.gpu.behaviour
part one_rank 130 "$python" -m tests.gpu.checks --ranks 1 races memory overlap graphs
[ "$ranks" -eq 1 ] || part two_ranks 140 "$python" -m tests.gpu.checks --ranks 2 races memory overlap graphs
part quantized 120 "$python" -m tests.gpu.checks --ranks "$ranks" quantized
part unit_graphs 120 "$python" -m tests.gpu.checks --ranks "$ranks" unit_graphs
part muon_one_rank 150 "$python" -m tests.gpu.checks --ranks 1 muon matrix_arithmetic
[ "$ranks" -eq 1 ] || part muon_two_ranks 120 "$python" -m tests.gpu.checks --ranks 2 muon
part number_formats 120 "$python" -m tests.gpu.checks --ranks 1 number_formats
if [ "$FSDP_TEST_DEVICE" = cuda ] && command -v compute-sanitizer > /dev/null; then
    part sanitized 120 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
        "$python" -m tests.gpu.sanitized
else
    echo "== sanitized: not run, no compute-sanitizer or no GPU"
fi
if [ "$FSDP_TEST_DEVICE" = cuda ]; then
    part same_losses 110 "$python" -m tests.gpu.same_losses --ranks "$ranks"
    part resume 110 "$python" -m tests.gpu.resume --ranks "$ranks"
    if "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("megatron.training"))'; then
        part stock_loop 300 "$python" -m tests.gpu.stock_loop --ranks "$ranks"
    fi
    if "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("transformer_engine"))'; then
        part transformer_engine 420 "$python" -m tests.gpu.transformer_engine
    fi
    part pretrain 70 env NPROC="$ranks" PYTHON="$python" examples/megatron_fsdp/pretrain_bytes.sh --use-megatron-fsdp-v2 \
        --bf16 --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 \
        --train-iters 50 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 5 --log-interval 5 --eval-interval 50 --eval-iters 5 \
        --plot "$out/loss_bf16.png" --log-json "$out/loss_bf16.json"
fi

for name in "${failed[@]}"; do grep -H '^FAILED' "$out/$name.log"; done
echo "== tests/gpu/run.sh on $FSDP_TEST_DEVICE, $ranks rank(s), $SECONDS s: ${failed[*]:+FAILED: }${failed[*]:-all ok}"
[ "${#failed[@]}" -eq 0 ]
