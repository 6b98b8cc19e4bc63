# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs of the training script that save, load, go on and are refused; in worker processes, without torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

from megatron.core.distributed.fsdp.experimental import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint import committed_iterations, read_latest
from megatron.pretrain import main
from tests.unit_tests import mcore
from tests.unit_tests.checkpoint.files import fill_disk
from tests.unit_tests.launch import run_ranks

TINY = (
    "--use-megatron-fsdp-v2 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 1 --mock-data --num-workers 0 --micro-batch-size 1 --global-batch-size 4 --swiglu "
    "--train-iters 8 --eval-interval 3 --eval-iters 1 --log-interval 1 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 "
    "--lr-decay-style cosine --position-embedding-type rope"
)
PLAIN = f"{TINY} --attention-dropout 0 --hidden-dropout 0"


def run(flags: str, line: str = TINY) -> list[str]:
    """Train as the script does; return what it prints on the rank that prints, without times."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    environment = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}
    mcore.start()
    with pytest.MonkeyPatch.context() as patch, mcore.cpu_shim(), redirect_stdout(StringIO()) as printed:
        for name in ("start_process_groups", "stop_process_groups"):  # Workers have them, and keep them.
            patch.setattr(main, name, lambda *_: None)
        patch.setattr(MockGPTLowLevelDataset, "size", 100)  # Shuffling 100,000 documents takes most of the time.
        main.pretrain(main.read_command(f"{line} {flags}".split(), environment))
    return [_without_times(line) for line in printed.getvalue().splitlines()]


def _without_times(line: str) -> str:
    return re.sub(r"elapsed time per iteration \(ms\): \S+ \|", "", re.sub(r"^ \[[^]]*\] ", "", line))


def results(lines: list[str], after: int = 0) -> list[str]:
    """Return the lines of iterations after one, and of evaluations from there on."""
    kept: list[str] = []
    for line in lines:
        match = re.match(r"iteration +(\d+)/", line)
        if match:
            is_wanted = int(match[1]) > after
        elif "validation loss" not in line:
            continue
        else:
            at = re.search(r"iteration (\d+)", line)
            assert at is not None, line
            is_wanted = int(at[1]) > after
        kept += [line] if is_wanted else []
    return kept


def refused(flags: str, line: str = TINY) -> str:
    """Require that a run is refused with the same error on every rank; return it."""
    with pytest.raises(CheckpointError) as caught:
        run(flags, line)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    return str(caught.value)


# --- a run that goes on ---


def _resume(folder: str, dropout: str) -> None:
    line = TINY + dropout
    whole, is_writer = run("", line), dist.get_rank() == dist.get_world_size() - 1
    assert not is_writer or len(results(whole)) == 8 + 4  # evaluations after 3, 6, 8, and of the test set
    sync, background = f"{folder}/sync", f"{folder}/async"
    first = run(f"--save {sync} --exit-interval 4", line)
    assert results(first) == [text for text in results(whole) if text not in results(whole, 4)]
    second = run(f"--load {sync} --save {background} --async-save --save-interval 1 --keep-last 2", line)
    assert results(second) == results(whole, 4)
    assert (committed_iterations(Path(background)), read_latest(Path(background))) == ([7, 8], 8)
    # After the evaluation of iteration 6, whose samples are not seen again; with checksums.
    third = run(f"--load {background} --ckpt-step 7 --verify-checksums", line)
    assert results(third) == results(whole, 7)
    assert results(run(f"--load {background}/iter_0000007", line)) == results(whole, 7)
    if is_writer:
        assert f"successfully loaded checkpoint from {background}/iter_0000007 at iteration 7" in " ".join(third)


FP16 = " --hidden-dropout 0 --fp16 --initial-loss-scale 2097152 --loss-scale-window 2 --hysteresis 1"


@pytest.mark.parametrize("dropout", [" --hidden-dropout 0.2", " --attention-dropout 0 --hidden-dropout 0 --bf16", FP16])
def test_a_resumed_run_prints_what_the_straight_one_does(dropout: str, tmp_path: Path) -> None:
    run_ranks(2, _resume, str(tmp_path), dropout, timeout_s=120)


def _loss(lines: list[str], iteration: int) -> float:
    (found,) = re.findall(rf"iteration +{iteration}/.*lm loss: (\S+) \|", "\n".join(lines))
    return float(found)


def _choose(folder: str) -> None:
    line = TINY + " --hidden-dropout 0.2"
    whole = run(f"--save {folder} --save-interval 4 --keep-last 5", line)
    finetuned = run(f"--load {folder} --finetune", line)
    without_optimizer = run(f"--load {folder} --ckpt-step 4 --no-load-optim", line)
    without_generators = run(f"--load {folder} --ckpt-step 4 --no-load-rng", line)
    if dist.get_rank() == 1:
        assert _loss(finetuned, 1) < 0.9 * _loss(whole, 1)
        assert "learning rate: 5.000000E-03" in next(text for text in finetuned if "iteration        1/" in text)
        for found in (without_optimizer, without_generators):
            assert len(results(found)) == len(results(whole, 4)) and results(found) != results(whole, 4)
        assert _loss(without_generators, 5) == pytest.approx(_loss(whole, 5), rel=0.1)
    little = f"{folder}/little"
    run(f"--save {little} --no-save-optim --no-save-rng --exit-interval 4", line)
    assert "optimizer.state." in refused(f"--load {little}", line)
    assert "expected states of random number generators, got none. Use --no-load-rng" in refused(
        f"--load {little} --no-load-optim", line
    )
    found = run(f"--load {little} --no-load-optim --no-load-rng", line)
    assert len(results(found)) == len(results(whole, 4))


def test_flags_choose_what_is_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(2, _choose, str(tmp_path), timeout_s=120)


# --- refusals ---


def _refuse(folder: str) -> None:
    save, rank = f"{folder}/save", dist.get_rank()
    run(f"--save {save} --exit-interval 4")
    before = sorted(str(path) for path in Path(folder).rglob("*"))
    error = refused(f"--load {folder}/none --exit-on-missing-checkpoint")
    assert f"load of {folder}/none: expected a checkpoint, got none. Correct --load" in error
    started = run(f"--load {folder}/none --exit-interval 1")
    assert rank == 0 or f"WARNING: no checkpoint in {folder}/none: starting from random weights" in started
    error = refused(f"--load {save} --ckpt-step 5")
    assert "expected iter_0000005 there, got no such folder. It has checkpoints of iterations: 4." in error
    error = refused(f"--load {save}", TINY.replace("--global-batch-size 4", "--global-batch-size 8"))
    assert "expected --global-batch-size 4, with which it was trained, got 8" in error
    error = refused(f"--load {save} --seed 77")
    assert "expected --seed 1234, with which it was trained, got 77; samples would be skipped or seen twice" in error
    error = refused(f"--load {save}/iter_0000004 --ckpt-step 4")
    assert "expected the folder of a run with --ckpt-step 4, got one checkpoint" in error
    error = refused(f"--load {save}", TINY.replace("--train-iters 8", "--train-iters 3"))
    assert "expected an iteration up to --train-iters 3, got 4. Raise it, or use --finetune." in error
    error = refused(f"--load {save}", TINY.replace("--hidden-size 16", "--hidden-size 32"))
    assert "model.module.embedding.word_embeddings.weight: expected shape (33, 32), got (33, 16)" in error
    error = refused(f"--load {save}", TINY.replace("--num-layers 1", "--num-layers 2"))
    assert "decoder.layers.1.mlp.linear_fc1.weight_w: not in the checkpoint" in error
    error = refused(f"--load {save}", TINY.replace("--min-lr 1e-3", "--min-lr 2e-3"))
    assert "Give the flags of the run that saved it, --override-opt_param-scheduler" in error
    other = TINY.replace("--min-lr 1e-3", "--min-lr 2e-3")
    overridden = run(f"--load {save} --override-opt_param-scheduler", other)
    taken = run(f"--load {save} --use-checkpoint-opt_param-scheduler", other)
    assert rank == 0 or "learning rate: 2.000000E-03" in next(t for t in overridden if "iteration        8/" in t)
    assert rank == 0 or "learning rate: 1.000000E-03" in next(t for t in taken if "iteration        8/" in t)
    assert before == sorted(str(path) for path in Path(folder).rglob("*"))
    dist.barrier()
    if rank == 0:
        (Path(save) / "latest_checkpointed_iteration.txt").write_text("forty")
    dist.barrier()
    assert "expected the number of an iteration, got 'forty'" in refused(f"--load {save}")
    dist.barrier()
    if rank == 0:
        (Path(save) / "latest_checkpointed_iteration.txt").unlink()
        (Path(save) / "iter_0000004/manifest.json").unlink()
    dist.barrier()
    error = refused(f"--load {save}")
    assert "latest_checkpointed_iteration.txt, got none beside the checkpoints of iterations 4." in error
    assert "expected a manifest, got no file" in refused(f"--load {save} --ckpt-step 4")


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, _refuse, str(tmp_path), timeout_s=120)


def _fail(folder: str, flags: str) -> None:
    run(f"--save {folder} --exit-interval 4")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            fill_disk(patch, ".distcp")
        error = refused(f"--load {folder} --save {folder} --save-interval 2 {flags}")
    assert "No space left on device" in error
    assert read_latest(Path(folder)) == 4
    assert sorted(os.listdir(folder)) == ["iter_0000004", "latest_checkpointed_iteration.txt"]
    run(f"--load {folder} --save {folder} --save-interval 2 --keep-last 1 {flags}")
    assert sorted(os.listdir(folder)) == ["iter_0000008", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_a_failed_save_ends_the_run_and_keeps_the_last_checkpoint(flags: str, tmp_path: Path) -> None:
    run_ranks(2, _fail, str(tmp_path), flags, timeout_s=120)


# --- other numbers of ranks ---


def _save_part(folder: str) -> list[str]:
    run(f"--save {folder} --exit-interval 4", PLAIN)
    return run("", PLAIN)


def _load_part(folder: str) -> list[str]:
    return run(f"--load {folder}", PLAIN)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_goes_on_with_another_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    whole = run_ranks(2, _save_part, str(tmp_path), timeout_s=120)[-1]
    found = run_ranks(ranks, _load_part, str(tmp_path), timeout_s=120)[-1]
    for iteration in range(5, 9):
        # Sums of the same microbatches in another order.
        assert _loss(found, iteration) == pytest.approx(_loss(whole, iteration), rel=1e-5)
    number: Callable[[str], list[str]] = re.compile(r"lm loss value: (\S+)").findall
    pairs = zip(number("\n".join(results(found))), number("\n".join(results(whole, 4))), strict=True)
    assert all(float(one) == pytest.approx(float(other), rel=1e-5) for one, other in pairs)
