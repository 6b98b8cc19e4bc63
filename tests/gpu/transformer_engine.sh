#!/usr/bin/env bash
# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
#
# Installs TransformerEngine from files, unless it can be imported, and runs the checks with it on one GPU:
#
#     tests/gpu/transformer_engine.sh FOLDER... [-- options of tests/gpu/transformer_engine.py]
#
# The folders have wheels, a wheel in parts (NAME.00, NAME.01, ...), and the sources of TransformerEngine's extension
# for PyTorch (sdist.tgz), which are built here. Nothing is downloaded. All goes to $TE_SITE, by default a new folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python3}"
site="${TE_SITE:-$(mktemp -d)}"
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export PYTHONWARNINGS=ignore

folders=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    folders+=("$(realpath "$1")")
    shift
done
[ $# -eq 0 ] || shift

if ! "$python" -c 'import transformer_engine.pytorch' 2> /dev/null; then
    [ ${#folders[@]} -gt 0 ] || { echo "expected folders with wheels, got none; see the head of $0"; exit 2; }
    started=$SECONDS
    mkdir -p "$site"
    for folder in "${folders[@]}"; do
        for wheel in "$folder"/*.whl; do
            [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$site"
        done
    done
    parts="$(find "${folders[@]}" -name '*.[0-9][0-9]' -printf '%f %p\n' | sort | cut -d' ' -f2-)"
    if [ -n "$parts" ]; then
        # shellcheck disable=SC2086
        cat $parts > "$site/joined.whl"
        "$python" -m zipfile -e "$site/joined.whl" "$site"
        rm "$site/joined.whl"
    fi
    echo "== unpacked after $((SECONDS - started)) s"
    sdist="$(find "${folders[@]}" -name 'sdist.tgz' | head -1)"
    if [ -n "$sdist" ]; then
        build="$(mktemp -d)"
        tar xzf "$sdist" -C "$build" --strip-components=1
        headers="$("$python" -c 'import glob, sys
print(":".join(p for d in sys.path for p in glob.glob(d + "/nvidia/*/include")))')"
        (
            cd "$build"
            export CPATH="$headers${CPATH:+:$CPATH}" NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS:-$(nproc)}"
            "$python" setup.py build_ext --build-lib "$site" > build.log 2>&1 || { tail -40 build.log; exit 3; }
        )
    fi
    echo "== built after $((SECONDS - started)) s"
    "$python" -c 'import transformer_engine.pytorch, transformer_engine as t; print("TransformerEngine", t.__version__)'
fi

exec "$python" -m tests.gpu.transformer_engine "$@"
