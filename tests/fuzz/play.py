# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What one rank does in one microbatch: the same code runs sharded and in the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.fuzz.model import CellModule, Fault, Tape, call_part
from tests.fuzz.program import Microbatch, Program, Step

AUX_WEIGHT = 0.1
FAULT_INDEX, EVALUATION_INDEX, PEEK_INDEX = 100, 101, 102

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    # A large eps keeps Adam from making large steps of gradients that are nothing but rounding.
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02, eps=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-3, weight_decay=0.1),
}
MAX_NORM = 0.5
SCALE = 0.9


@dataclass
class Record:
    """What a run has shown; lists have one entry per step, in which gradients are full tensors by name.

    Attributes:
        losses: of this rank, evaluations included, in the order in which they were computed.
        input_gradients: of this rank's inputs, likewise.
        norms: before clipping.
        gradients: after clipping.
        weights: main weights at the end.
        races: what the trace has found.
    """

    losses: list[float] = field(default_factory=list)
    input_gradients: list[torch.Tensor | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)


@dataclass
class Player:
    """Runs one rank's forwards and backwards on given roots.

    Attributes:
        program: what is run.
        roots: the model.
        tape: what its modules look at.
        record: where losses and input gradients go.
        after_backward: called after every backward.
    """

    program: Program
    roots: Sequence[CellModule]
    tape: Tape
    record: Record
    after_backward: Callable[[], None] = lambda: None

    def microbatch(self, microbatch: Microbatch, step: int, index: int, rank: int) -> None:
        """Run one microbatch."""
        inputs, targets = self._data(step, index, rank, microbatch.needs_input_grad)
        form = microbatch.form
        if form == "input_grad":
            (loss, _) = self._forward(inputs, targets)
            self.record.input_gradients += torch.autograd.grad(loss, inputs)
            self.after_backward()
            return
        if form in ("same", "reversed", "joint"):
            losses = [self._forward(inputs, targets)[0], self._forward(inputs * 0.5, targets)[0]]
            if form == "joint":
                losses = [losses[0] + losses[1]]
            for loss in losses[::-1] if form == "reversed" else losses:
                self._backward(loss)
        elif form == "two_losses":
            first, second = self._forward(inputs, targets)
            self._backward(first, retain_graph=True)
            self._backward(second)
        else:
            loss, _ = self._forward(inputs, targets)
            if form == "retain":
                self._backward(loss, retain_graph=True)
            if form != "forward_only":
                self._backward(loss)
        self.record.input_gradients.append(inputs.grad)

    def evaluate(self, step: Step, index: int, rank: int) -> None:
        """Compute a loss without gradients."""
        with torch.inference_mode() if step.evaluates == "inference_mode" else torch.no_grad():
            for root in self.roots:
                root.eval()
            self._forward(*self._data(index, EVALUATION_INDEX, rank, False))
            for root in self.roots:
                root.train()

    def peek(self, step: int, rank: int) -> None:
        """Run a forward whose backward never comes."""
        self._forward(*self._data(step, PEEK_INDEX, rank, False))

    def fail(self, step: Step, index: int, rank: int) -> None:
        """Run a forward and a backward that an exception ends somewhere in the middle, or a whole one."""
        self.tape.leaves_until_fault = 2
        self.tape.fails_in_backward = step.fault == "backward"
        try:
            loss, _ = self._forward(*self._data(index, FAULT_INDEX, rank, True))
            if step.fault == "backward":
                loss.backward()
        except Fault:
            pass
        finally:
            self.tape.leaves_until_fault = None

    def _data(self, step: int, index: int, rank: int, needs_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
        self.tape.step, self.tape.rank = step, rank
        seed = (self.program.seed * 1000 + step) * 1000 + index * 8 + rank
        generator = torch.Generator().manual_seed(seed % 2**63)
        shape = (self.program.batch, self.program.width)
        inputs, targets = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        # Dropout draws the same on either side. torch.manual_seed formats three stacks besides: 3 ms a call.
        torch.default_generator.manual_seed(seed % 2**63)
        return inputs.to(getattr(torch, self.program.dtype)).requires_grad_(needs_grad), targets

    def _forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.tape.aside.clear()
        extras: list[torch.Tensor] = []
        if self.program.root_order == "chain":
            output = inputs
            for root in self.roots:
                output, *more = call_part(root, output)
                extras += more
        else:
            output = torch.zeros_like(inputs)
            for root in self.roots if self.program.root_order == "sum" else self.roots[::-1]:
                part, *more = call_part(root, inputs)
                output = output + part
                extras += more
        aux = sum((extra.double() for extra in [*extras, *self.tape.aside]), torch.zeros((), dtype=torch.float64))
        loss = (output.double() - targets).square().mean() + AUX_WEIGHT * aux
        self.record.losses.append(loss.item())
        return loss, output.double().sin().mean()

    def _backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)
        self.after_backward()
