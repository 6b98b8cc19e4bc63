# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs megatron-core's own training loop with its DDP and with Megatron-FSDP v2, and resumes from a checkpoint.

    python -m tests.gpu.stock_loop --ranks 1

trains examples/megatron_fsdp/pretrain_stock.py five times: a few iterations in fp32 with DDP and with
--use-megatron-fsdp-v2, whose losses and gradient norms are compared; then in bf16 with DDP, with the flag, which saves
halfway and at the end, and from halfway on, when all lines and the checkpoint at the end have to be the same. It needs
megatron-core 0.19.2 and no network. Without a GPU it is a dry run of a small model on the host.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.functional_tests.tensors import load_tensors

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, ON_HOST = "examples/megatron_fsdp/pretrain_stock.py", "tests/functional_tests/stock_on_cpu.py"
LOOP = (
    *("--transformer-impl", "local", "--attention-backend", "unfused", "--no-persist-layer-norm", "--mock-data"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-dropout-fusion"),
    *("--no-bias-swiglu-fusion", "--no-rope-fusion", "--tokenizer-type", "NullTokenizer"),
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--lr", "1e-3", "--min-lr", "1e-4"),
    *("--lr-decay-style", "cosine", "--lr-warmup-iters", "5", "--log-interval", "1", "--eval-interval", "1000"),
    *("--eval-iters", "1", "--micro-batch-size", "4", "--seed", "1234", "--num-workers", "0"),
)
SIZES = {
    True: (("--num-layers", "8"), ("--hidden-size", "1024"), ("--seq-length", "1024"), ("--vocab-size", "32000")),
    False: (("--num-layers", "2"), ("--hidden-size", "64"), ("--seq-length", "64"), ("--vocab-size", "500")),
}
LINE = re.compile(
    r"iteration +(\d+)/ .*elapsed time per iteration \(ms\): (\S+) \|.* lm loss: (\S+) \|.* grad norm: (\S+) \|"
)
# Of the first iterations in fp32, in which sums of another order differ in their last bits. At this learning rate one
# such bit grows tenfold in two iterations, and in bf16 it rounds a weight to the next of 256 steps: later lines are
# shown, and not compared.
TOLERANCE, COMPARED = 1e-5, 5
SHOWN = (1, 2, 3, 5, 10, 20, 50)


@dataclass(frozen=True)
class Line:
    """What one iteration printed."""

    step_ms: float
    loss: float
    norm: float


def train(flags: Sequence[str], ranks: int, name: str) -> dict[int, Line]:
    """Run the script; return its lines by iteration."""
    has_gpu = torch.cuda.is_available()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    found = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{found}" if found else str(ROOT)}
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in one order
    # The loop refuses it as 1 with its FSDP, and asks for it with DDP and tensor parallelism only.
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    size = [word for pair in SIZES[has_gpu] for word in pair]
    words = (*LOOP, *size, "--max-position-embeddings", size[5], "--num-attention-heads", "8")
    script = (SCRIPT,) if has_gpu else (ON_HOST, "--distributed-backend", "gloo")
    finished = subprocess.run(
        [*command, *script, *words, *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if finished.returncode != 0:
        raise SystemExit(f"FAILED  stock_loop: {name} run\n{finished.stdout[-2000:]}\n{finished.stderr[-6000:]}")
    return {int(at): Line(*map(float, values)) for at, *values in LINE.findall(finished.stdout)}


def difference(expected: dict[int, Line], found: dict[int, Line], what: str, iterations: Sequence[int]) -> float:
    """Return the largest relative difference of a column over some iterations."""
    pairs = [(getattr(expected[at], what), getattr(found[at], what)) for at in iterations]
    return max(abs(have - want) / abs(want) for want, have in pairs)


def step_ms(lines: dict[int, Line]) -> float:
    """Return the median time of the later half of the iterations."""
    later = sorted(lines)[len(lines) // 2 :]
    return statistics.median(lines[at].step_ms for at in later)


def report(is_right: bool, text: str) -> bool:
    """Print one line of a check."""
    print(f"{'ok     ' if is_right else 'FAILED '} stock_loop, {text}", flush=True)
    return is_right


def main() -> None:
    """Train three times and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--strategy", default="optim_grads_params")
    arguments = parser.parse_args()
    ranks, last = arguments.ranks, arguments.iterations
    half = last // 2
    batch = ("--global-batch-size", str(8 * ranks), "--train-iters")
    v2 = ("--use-megatron-fsdp-v2", "--data-parallel-sharding-strategy", arguments.strategy)
    where = f"{ranks} rank(s) on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'the host'}"
    short = (*batch, str(min(COMPARED, last)), "--lr-decay-iters", str(last))
    wide = [train((*short, *wrapper), ranks, "fp32") for wrapper in ((), v2)]
    results = [compare(*wide, where)]
    bf16 = (*batch, str(last), "--bf16")
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        ddp = train(bf16, ranks, "DDP")
        ours = train((*bf16, *v2, "--save", str(first), "--save-interval", str(half)), ranks, "Megatron-FSDP v2")
        resumed_from = ("--load", str(first), "--ckpt-step", str(half), "--save", str(second))
        resumed = train((*bf16, *v2, *resumed_from, "--save-interval", str(half)), ranks, "resumed")
        ends = [load_tensors(saved / f"iter_{last:07d}") for saved in (first, second)]
    show("bf16", ddp, ours)
    results.append(compare_resumed(ours, resumed, ends, half, where))
    print(f"        {where}: ms an iteration in bf16: DDP {step_ms(ddp):.1f}, Megatron-FSDP v2 {step_ms(ours):.1f}")
    sys.exit(not all(results))


def show(name: str, ddp: dict[int, Line], ours: dict[int, Line]) -> None:
    """Print losses and gradient norms of both runs, DDP's first."""
    for at in (at for at in SHOWN if at in ddp and at in ours):
        print(f"        {name}, iteration {at}: loss {ddp[at].loss:.6f} {ours[at].loss:.6f}, ", end="")
        print(f"gradient norm {ddp[at].norm:.3f} {ours[at].norm:.3f}")


def compare(ddp: dict[int, Line], ours: dict[int, Line], where: str) -> bool:
    """Compare all lines of two wrappers."""
    show("fp32", ddp, ours)
    losses, norms = (difference(ddp, ours, what, list(ddp)) for what in ("loss", "norm"))
    # The forward of the first iteration has the same weights, and so the same loss.
    is_right = list(ddp) == list(ours) == list(range(1, len(ddp) + 1)) and ddp[1].loss == ours[1].loss
    is_right &= losses < TOLERANCE and norms < 10 * TOLERANCE and ours[len(ours)].loss < ours[1].loss
    return report(
        is_right,
        f"{where}: {len(ddp)} iterations in fp32 beside DDP; largest relative differences: losses {losses:.1e}, "
        f"gradient norms {norms:.1e}",
    )


def compare_resumed(
    ours: dict[int, Line], resumed: dict[int, Line], ends: Sequence[dict[str, torch.Tensor]], half: int, where: str
) -> bool:
    """Compare the lines after a resume with those of the straight run, and what both have saved at the end."""
    later = [at for at in ours if at > half]
    norms = difference(ours, resumed, "norm", later)
    # The loop's second line after a start from a checkpoint has the mean of two losses.
    losses = difference(ours, resumed, "loss", [at for at in later if at != half + 2])
    differ = [key for key in ends[0] if key not in ends[1] or not torch.equal(ends[0][key], ends[1][key])]
    return report(
        list(resumed) == later and not differ and ends[0].keys() == ends[1].keys() and norms == losses == 0,
        f"{where}: resumed after iteration {half}: differences of losses {losses:.1e}, of norms {norms:.1e}; "
        f"{len(differ)} of {len(ends[0])} tensors of the last checkpoint differ {differ[:3]}",
    )


if __name__ == "__main__":
    main()
