# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.pretrain.log import (
    History,
    LoggedIteration,
    StepResult,
    TrainingLog,
    format_training_line,
    format_validation_lines,
)
from megatron.pretrain.plot import draw_loss_curve

LOGGED = LoggedIteration(
    iteration=7,
    consumed_samples=112,
    lm_loss=5.1234564,
    grad_norm=1.23456,
    learning_rate=0.00015,
    num_zeros=12.0,
    loss_scale=1.0,
    elapsed_ms=1234.56,
    tokens_per_s=1.0,
)
RESULT = StepResult(lm_loss=2.0, grad_norm=1.0, num_zeros=None, loss_scale=1.0, learning_rate=0.5, is_skipped=False)


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        train_iters=100,
        global_batch_size=16,
        seq_length=8,
        log_json=str(tmp_path / "out" / "log.json"),
        log_num_zeros_in_grad=False,
        tensorboard_dir=None,
        tensorboard_log_interval=1,
    )


def test_the_training_line_byte_for_byte(args: argparse.Namespace) -> None:
    assert format_training_line(LOGGED, args, num_skipped=1, num_nan=2) == (
        " iteration        7/     100 | consumed samples:          112 |"
        " elapsed time per iteration (ms): 1234.6 | learning rate: 1.500000E-04 |"
        " global batch size:    16 | lm loss: 5.123456E+00 | loss scale: 1.0 | grad norm: 1.235 |"
        " num zeros: 12.0 | number of skipped iterations:   1 | number of nan iterations:   2 |"
    )


def test_losses_of_routers_follow_the_models(args: argparse.Namespace) -> None:
    logged = replace(LOGGED, added_losses={"load_balancing_loss": 1.5})
    line = format_training_line(logged, args, num_skipped=0, num_nan=0)
    assert "| lm loss: 5.123456E+00 | load_balancing_loss: 1.500000E+00 | loss scale: 1.0 |" in line


def test_what_was_not_measured_is_not_printed(args: argparse.Namespace) -> None:
    logged = replace(LOGGED, grad_norm=None, num_zeros=None, lm_loss=math.nan)
    line = format_training_line(logged, args, num_skipped=0, num_nan=0)
    assert not any(name in line for name in ("grad norm", "num zeros", "lm loss"))


def test_zeros_that_were_not_counted_are_printed_as_megatron_lm_does_but_not_recorded(
    args: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_counted, printed, recorded in ((False, "num zeros: 0 |", None), (True, "num zeros: 3.0 |", 3.0)):
        args.log_num_zeros_in_grad = is_counted
        log = TrainingLog(args, is_writer=True)
        result = replace(RESULT, num_zeros=3.0 if is_counted else 0)
        log.record_step(1, result)
        log.write_interval(1, result)
        log.close()
        assert printed in capsys.readouterr().out
        assert json.loads(Path(args.log_json).read_text())["num_zeros"] == recorded


def test_the_validation_lines_byte_for_byte() -> None:
    line = " validation loss at iteration 5 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    rule = "-" * (len(line) + 1)
    assert format_validation_lines(2.0, "iteration 5") == [rule, line, rule]
    assert "PPL: 4.851652E+08" in format_validation_lines(100.0, "iteration 5")[1]


def test_an_interval_averages_and_counts(args: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    log = TrainingLog(args, is_writer=True)
    log.record_step(1, RESULT)
    log.record_step(2, replace(RESULT, lm_loss=math.nan))
    log.record_step(3, replace(RESULT, lm_loss=100.0, is_skipped=True))
    log.record_step(4, replace(RESULT, lm_loss=4.0, grad_norm=9.0))
    log.exclude(0.0)
    log.write_interval(4, replace(RESULT, grad_norm=9.0))
    log.record_step(5, RESULT)
    log.write_interval(5, RESULT)
    log.write_validation(5, 1.5, "iteration 5")
    log.write_validation(5, 1.25, "iteration 5 on test set", is_test=True)
    log.close()
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "lm loss: 3.000000E+00 | loss scale: 1.0 | grad norm: 9.000" in first
    assert first.endswith("skipped iterations:   1 | number of nan iterations:   1 |")
    assert second.endswith("skipped iterations:   0 | number of nan iterations:   0 |")
    records = [json.loads(line) for line in Path(args.log_json).read_text().splitlines()]
    assert [record.get("lm_loss") for record in records] == [3.0, 2.0, None, None]
    assert records[2:] == [
        {"iteration": 5, "validation_loss": 1.5},
        {"iteration": 5, "test_loss": 1.25},
    ]
    assert log.history.valid == [(5, 1.5)]


def test_time_of_an_evaluation_is_not_training_time(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 20.0, 30.0])
    monkeypatch.setattr("megatron.pretrain.log.time.perf_counter", lambda: next(now))
    log = TrainingLog(args, is_writer=True)
    log.record_step(1, RESULT)
    log.record_step(2, RESULT)
    log.exclude(6.0)
    log.write_interval(2, RESULT)
    log.close()
    record = json.loads(Path(args.log_json).read_text())
    assert record["elapsed_ms"] == 2000.0
    assert record["tokens_per_s"] == 64.0


def test_other_ranks_write_nothing(args: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    log = TrainingLog(args, is_writer=False)
    log.record_step(1, RESULT)
    log.write_interval(1, RESULT)
    log.write_validation(1, 1.0, "iteration 1")
    log.close()
    assert capsys.readouterr().out == ""
    assert not Path(args.log_json).exists()


def test_the_loss_curve_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "new" / "loss.png"
    draw_loss_curve(History([(1, 5.0), (2, 4.0)], [(2, 4.5)]), str(path), "two iterations")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    without = tmp_path / "training.png"
    draw_loss_curve(History([(1, 5.0), (2, 4.0)]), str(without), "two iterations")
    assert without.read_bytes() != path.read_bytes()


def test_losses_of_routers_are_means_over_the_interval(args: argparse.Namespace) -> None:
    log = TrainingLog(args, is_writer=True)
    for iteration, value in ((1, 1.0), (2, 2.0)):
        log.record_step(iteration, replace(RESULT, added_losses={"z_loss": value}))
    log.write_interval(2, RESULT)
    log.record_step(3, RESULT)
    log.write_interval(3, RESULT)
    log.close()
    first, second = (json.loads(line) for line in Path(args.log_json).read_text().splitlines())
    assert first["z_loss"] == 1.5
    assert "z_loss" not in second
    assert "added_losses" not in first
