# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Writes Megatron-LM's log lines, JSON lines, TensorBoard events and a progress bar.

Only the last rank writes, as in Megatron-LM. The lines keep its format byte for byte because
parsers depend on it; the JSON lines hold the same numbers unrounded.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm


@dataclass(frozen=True)
class StepResult:
    """What one iteration gave.

    Attributes:
        lm_loss: Mean over the unmasked tokens of the global batch.
        grad_norm: Before clipping; 0 when clipping is off; None when the update was skipped.
        num_zeros: Zeros in the gradient; when not counted, the optimizer's 0 or None, which Megatron-LM
            prints and leaves out respectively.
        loss_scale: Factor on the loss.
        learning_rate: Of the next update, which is what Megatron-LM logs.
        is_skipped: The optimizer refused the update.
        added_losses: What routers and further predictions add to the loss, by name and without their weights.
    """

    lm_loss: float
    grad_norm: float | None
    num_zeros: float | None
    loss_scale: float
    learning_rate: float
    is_skipped: bool
    added_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LoggedIteration:
    """One JSON line."""

    iteration: int
    consumed_samples: int
    lm_loss: float
    grad_norm: float | None
    learning_rate: float
    num_zeros: float | None
    loss_scale: float
    elapsed_ms: float
    tokens_per_s: float
    added_losses: Mapping[str, float] = field(default_factory=dict)


def format_training_line(logged: LoggedIteration, args: argparse.Namespace, *, num_skipped: int, num_nan: int) -> str:
    """Format Megatron-LM's training line, without its time stamp.

    Args:
        logged: The numbers, averaged over the log interval as in Megatron-LM.
        args: Gives the number of iterations and the global batch size.
        num_skipped: Skipped iterations since the last line.
        num_nan: Iterations with a loss that is no number since the last line.
    """
    line = f" iteration {logged.iteration:8d}/{args.train_iters:8d} |"
    line += f" consumed samples: {logged.consumed_samples:12d} |"
    line += f" elapsed time per iteration (ms): {logged.elapsed_ms:.1f} |"
    line += f" learning rate: {logged.learning_rate:.6E} |"
    line += f" global batch size: {args.global_batch_size:5d} |"
    if not math.isnan(logged.lm_loss):
        line += f" lm loss: {logged.lm_loss:.6E} |"
    for name, value in logged.added_losses.items():
        line += f" {name}: {value:.6E} |"
    line += f" loss scale: {logged.loss_scale:.1f} |"
    if logged.grad_norm is not None:
        line += f" grad norm: {logged.grad_norm:.3f} |"
    if logged.num_zeros is not None:
        line += f" num zeros: {logged.num_zeros} |"
    line += f" number of skipped iterations: {num_skipped:3d} |"
    line += f" number of nan iterations: {num_nan:3d} |"
    return line


def format_validation_lines(lm_loss: float, place: str) -> list[str]:
    """Format Megatron-LM's block of three lines after an evaluation.

    Args:
        lm_loss: Mean over the evaluated tokens, in nats.
        place: Such as "iteration 100 on validation set".
    """
    line = f" validation loss at {place} | lm loss value: {lm_loss:.6E} | "
    line += f"lm loss PPL: {math.exp(min(20, lm_loss)):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


@dataclass
class History:
    """The points of the loss curve: (iteration, loss)."""

    train: list[tuple[int, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)


class TrainingLog:
    """Collects the iterations of one log interval and writes them, on one rank only.

    Args:
        args: Validated arguments.
        is_writer: True on one rank.
    """

    def __init__(self, args: argparse.Namespace, *, is_writer: bool) -> None:
        self.history = History()
        self._args = args
        self.is_writer = is_writer
        self._json: IO[str] | None = None
        self._events: Any = None
        self._progress: Any = None
        if is_writer:
            self._open()
        self.restart_clock()
        self._reset()

    def _open(self) -> None:
        args = self._args
        if args.log_json:
            Path(args.log_json).parent.mkdir(parents=True, exist_ok=True)
            self._json = open(args.log_json, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        if args.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(args.tensorboard_dir)
        self._progress = tqdm(total=args.train_iters, unit="it", disable=not sys.stderr.isatty())

    def _reset(self) -> None:
        self._losses: list[float] = []
        self._added_losses: dict[str, list[float]] = {}
        self._num_iterations = self._num_skipped = self._num_nan = 0

    def restart_clock(self) -> None:
        """Start the interval's time anew, so that an evaluation does not count as training."""
        self._paused_s = 0.0
        self._started_s = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """Leave time spent on something else, such as an evaluation, out of the interval.

        Args:
            seconds: How long it took.
        """
        self._paused_s += seconds

    def print(self, line: str) -> None:
        """Print a line on the writing rank, above the progress bar."""
        if self.is_writer:
            self._progress.write(line, file=sys.stdout)
            sys.stdout.flush()

    def record_step(self, iteration: int, result: StepResult) -> None:
        """Take in one iteration.

        Args:
            iteration: Counted from 1.
            result: Equal on all ranks.
        """
        self._num_iterations += 1
        self._num_skipped += result.is_skipped
        if math.isfinite(result.lm_loss) and not result.is_skipped:
            self._losses.append(result.lm_loss)
        self._num_nan += not math.isfinite(result.lm_loss)
        for name, value in result.added_losses.items():
            self._added_losses.setdefault(name, []).append(value)
        self.history.train.append((iteration, result.lm_loss))
        if not self.is_writer:
            return
        self._progress.update()
        self._progress.set_postfix_str(f"lm loss {result.lm_loss:.3f}", refresh=False)
        if self._events is not None and iteration % self._args.tensorboard_log_interval == 0:
            self._add_events(iteration, result)

    def _add_events(self, iteration: int, result: StepResult) -> None:
        samples = iteration * self._args.global_batch_size
        scalars = {
            "learning-rate": result.learning_rate,
            "lm loss": result.lm_loss,
            "grad-norm": result.grad_norm,
            "num-zeros": result.num_zeros,
            "loss-scale": result.loss_scale,
            **result.added_losses,
        }
        for name, value in scalars.items():
            if value is not None:
                self._events.add_scalar(name, value, iteration)
                self._events.add_scalar(f"{name} vs samples", value, samples)

    def write_interval(self, iteration: int, result: StepResult) -> None:
        """Write the line of an interval that ends with ``iteration`` and start the next one."""
        args = self._args
        elapsed_s = (time.perf_counter() - self._started_s - self._paused_s) / self._num_iterations
        lm_loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        logged = LoggedIteration(
            iteration=iteration,
            consumed_samples=iteration * args.global_batch_size,
            lm_loss=lm_loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            num_zeros=result.num_zeros,
            loss_scale=result.loss_scale,
            elapsed_ms=elapsed_s * 1000,
            tokens_per_s=args.global_batch_size * args.seq_length / elapsed_s,
            added_losses={name: sum(values) / len(values) for name, values in self._added_losses.items()},
        )
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
        line = format_training_line(logged, args, num_skipped=self._num_skipped, num_nan=self._num_nan)
        self.print(f" [{stamp}]{line}")
        if self._json is not None:
            record = asdict(logged) | ({} if args.log_num_zeros_in_grad else {"num_zeros": None})
            added = {name.replace(" ", "_"): value for name, value in record.pop("added_losses").items()}
            # JSON knows no nan.
            record["lm_loss"] = None if math.isnan(lm_loss) else lm_loss
            self._json.write(json.dumps(record | added) + "\n")
        self._reset()
        self.restart_clock()

    def write_validation(self, iteration: int, lm_loss: float, place: str, *, is_test: bool = False) -> None:
        """Write the result of an evaluation.

        Args:
            iteration: After which it took place.
            lm_loss: Mean over the evaluated tokens, in nats.
            place: For Megatron-LM's line.
            is_test: Keeps it out of the loss curve.
        """
        for line in format_validation_lines(lm_loss, place):
            self.print(line)
        if self._json is not None:
            kind = "test_loss" if is_test else "validation_loss"
            self._json.write(json.dumps({"iteration": iteration, kind: lm_loss}) + "\n")
        if is_test:
            return
        self.history.valid.append((iteration, lm_loss))
        if self._events is not None:
            samples = iteration * self._args.global_batch_size
            self._events.add_scalar("lm loss validation", lm_loss, iteration)
            self._events.add_scalar("lm loss validation vs samples", lm_loss, samples)

    def close(self) -> None:
        """Flush and close everything."""
        for target in (self._progress, self._json, self._events):
            if target is not None:
                target.close()
