# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What the script reads, writes and refuses when it is started as a user starts it."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from .launch_script import Run, launch, launch_once, launch_ranks_apart

SMALL = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--num-workers", "0", "--micro-batch-size", "2"),
)
LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration        2/       4 \| "
    r"consumed samples:            8 \| elapsed time per iteration \(ms\): \d+\.\d \| "
    r"learning rate: 5\.000000E-04 \| global batch size:     4 \| lm loss: \d\.\d{6}E\+00 \| "
    r"loss scale: 1\.0 \| grad norm: \d+\.\d{3} \| num zeros: \d+\.0 \| "
    r"number of skipped iterations:   0 \| number of nan iterations:   0 \|$",
    re.MULTILINE,
)


def write_data(prefix: Path, vocab_size: int, seed: int) -> None:
    rng = np.random.RandomState(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(40):
        tokens = rng.randint(0, vocab_size, size=rng.randint(20, 60)).astype(np.uint16)
        builder.add_document(np.append(tokens, np.uint16(vocab_size)), [len(tokens) + 1])
    builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder / "first", vocab_size=50, seed=1)
    write_data(folder / "second", vocab_size=50, seed=2)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Almost every feature at once: a blend of files, bf16, masks, outputs."""
    flags = (
        *(*SMALL, "--data-path", "30", str(folder / "first"), "70", str(folder / "second")),
        *("--vocab-size", "50", "--split", "80,10,10", "--reset-attention-mask"),
        *("--reset-position-ids", "--eod-mask-loss", "--bf16", "--grad-reduce-in-bf16"),
        *("--group-query-attention", "--num-query-groups", "2", "--qk-layernorm"),
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--add-qkv-bias"),
        *("--train-iters", "4", "--log-interval", "2", "--eval-iters", "1"),
        *("--log-num-zeros-in-grad", "--tensorboard-dir", str(folder / "events")),
        *("--plot", str(folder / "out" / "loss.png"), "--overlap-grad-reduce"),
        *("--profile-schedule", str(folder / "schedule"), "--profile-step-start", "1", "--profile-step-end", "3"),
    )
    return launch_once(flags, 2)


def test_log_line_is_that_of_megatron_lm(run: Run) -> None:
    assert LINE.search(run.stdout), run.stdout


def test_validation_and_test_set_are_reported(run: Run) -> None:
    for name in ("validation", "test"):
        line = re.search(
            rf"^(-+)\n( validation loss at iteration 4 on {name} set \| lm loss value: "
            r"\d\.\d{6}E\+00 \| lm loss PPL: \d\.\d{6}E\+02 \| )\n\1$",
            run.stdout,
            re.MULTILINE,
        )
        assert line, run.stdout
        assert len(line[1]) == len(line[2]) + 1


def test_only_one_rank_writes(run: Run) -> None:
    assert len(LINE.findall(run.stdout)) == 1
    assert [record["iteration"] for record in run.records] == [2, 4, 4, 4]


def test_json_holds_the_printed_numbers_unrounded(run: Run) -> None:
    record = run.records[0]
    assert f"{record['lm_loss']:.6E}" == run.printed()["lm loss"][0]
    assert record["consumed_samples"] == 8
    assert record["learning_rate"] == pytest.approx(5e-4)
    assert record["tokens_per_s"] == pytest.approx(4 * 16 * 1000 / record["elapsed_ms"])


def test_plot_and_events_are_written(run: Run, folder: Path) -> None:
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"Loss curve: {folder / 'out' / 'loss.png'}" in run.stdout
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events"))
    events.Reload()
    assert [point.step for point in events.Scalars("lm loss")] == [1, 2, 3, 4]
    assert [point.step for point in events.Scalars("lm loss vs samples")] == [4, 8, 12, 16]
    assert [point.step for point in events.Scalars("lm loss validation")] == [4]


def test_a_timeline_is_written_by_one_rank(run: Run, folder: Path) -> None:
    found = re.findall(
        r"^Schedule: exposed communication: \S+ ms a step, .* mean of 2 steps\)$", run.stdout, re.MULTILINE
    )
    assert len(found) == 1
    page = (folder / "schedule" / "schedule.html").read_text()
    assert found[0].removeprefix("Schedule: ") in page and "<h3>step 2, " in page and "<h3>step 3, " in page
    assert {path.suffix for path in (folder / "schedule").iterdir()} == {".gz", ".png", ".html"}


def test_next_command_trains_with_the_other_wrapper(run: Run) -> None:
    line = next(line for line in run.stdout.splitlines() if line.startswith("Next"))
    assert "torchrun --nproc_per_node 2 pretrain_gpt.py --use-megatron-fsdp-v2 --num-layers" in line
    assert "--overlap-grad-reduce" not in line


def test_without_a_data_flag_the_standard_library_is_read(tmp_path: Path) -> None:
    flags = (*SMALL, "--train-iters", "2", "--log-interval", "1", "--eval-iters", "1")
    run = launch(flags, 2, environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert run.returncode == 0, run.stderr
    # The model knows nothing yet: the logarithm of 257 ids padded to 384.
    assert run.series("lm_loss")[0] == pytest.approx(math.log(384), abs=0.1)
    assert len(run.series("validation_loss")) == len(run.series("test_loss")) == 1
    names = sorted(path.name for path in (tmp_path / "megatron-fsdp-v2").iterdir())
    assert [name.rsplit(".", 1)[-1] for name in names] == ["indices", "bin", "idx"]


def assert_refused(flags: Sequence[str], error: str) -> None:
    """Both ranks must end by themselves with the same error, and none may wait for the other."""
    for run in launch_ranks_apart(flags, 2):
        assert run.returncode != 0
        assert error in run.stderr.splitlines()[-1], run.stderr
        assert run.stdout == ""


def test_an_unknown_flag_is_refused_on_every_rank() -> None:
    error = "got --hiden-size for the command line. Did you mean --hidden-size?"
    assert_refused(("--hiden-size", "64"), error)


def test_instances_that_do_not_divide_the_ranks_are_refused_on_every_rank() -> None:
    flags = ("--use-megatron-fsdp-v2", "--num-distributed-optimizer-instances", "3")
    assert_refused(flags, "expected a divisor of the 2 data-parallel rank(s), got 3 for --num-distributed-opt")


def test_a_damaged_index_is_refused_on_every_rank(folder: Path) -> None:
    write_data(folder / "cut", vocab_size=50, seed=3)
    index = folder / "cut.idx"
    index.write_bytes(index.read_bytes()[:-4])
    error = "ValueError: Data: expected 842 bytes for 40 sequences, got 838 bytes"
    assert_refused((*SMALL, "--data-path", str(folder / "cut"), "--vocab-size", "50"), error)


def test_too_little_data_is_refused_on_every_rank(folder: Path) -> None:
    paths = [str(folder / name) for name in ("first", "second", "first")]
    flags = (*SMALL, "--data-path", *paths, "--vocab-size", "50", "--split", "1")
    error = "ValueError: Data: expected at least 4000 samples of 16 tokens for train"
    assert_refused((*flags, "--eval-iters", "0", "--train-iters", "1000"), error)


def test_a_token_outside_the_vocabulary_is_refused(folder: Path) -> None:
    flags = (*SMALL, "--data-path", str(folder / "first"), "--vocab-size", "20", "--split", "1")
    (run,) = launch_ranks_apart((*flags, "--eval-iters", "0"), 1)
    assert run.returncode != 0
    assert re.search(r"expected token ids up to 20 .* got \d+ for --vocab-size", run.stderr)


def test_a_negative_token_is_refused(folder: Path) -> None:
    builder = IndexedDatasetBuilder(f"{folder / 'negative'}.bin", dtype=np.int32)
    builder.add_document(np.full(500, -1, dtype=np.int32), [500])
    builder.finalize(f"{folder / 'negative'}.idx")
    flags = (*SMALL, "--data-path", str(folder / "negative"), "--vocab-size", "20", "--split", "1")
    (run,) = launch_ranks_apart((*flags, "--eval-iters", "0", "--train-iters", "1"), 1)
    assert run.returncode != 0
    assert "expected token ids >= 0, got -1 for --vocab-size" in run.stderr


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    (run,) = launch_ranks_apart((*SMALL, "--eval-iters", "0", "--lr", "1e30"), 1)
    assert run.returncode != 0
    assert re.search(r"RuntimeError: Loss: expected a finite sum, got \w+ on rank 0", run.stderr)
