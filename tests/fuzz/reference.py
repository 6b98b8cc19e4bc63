# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs a program unsharded in this process on the data of all ranks, and compares.

The dtypes are those of the sharded run: an optimizer steps main weights, from which compute weights are cast; each
backward's gradients are cast, averaged over ranks and added in the main-gradient dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.fuzz.model import Bundle, Pair, Tape, build_roots, joint_units
from tests.fuzz.play import MAX_NORM, OPTIMIZERS, SCALE, Player, Record
from tests.fuzz.program import Leaf, Program, Step, cells_and_leaves
from tests.fuzz.sharded import POLICIES, named


class _Participation:
    """Which units took part in a backward: an output, something kept or a parameter of theirs got a gradient."""

    def __init__(self, roots: Any, joins: bool) -> None:
        self._parameters: dict[nn.Module, list[nn.Parameter]] = {}
        self._unit_of: dict[nn.Module, nn.Module] = {}
        self._active: set[nn.Module] = set()
        self._num_kept: list[int] = []
        owned: set[nn.Parameter] = set()
        for root in roots:
            for modules in joint_units(root, joins):
                own = [p for module in modules for p in module.parameters() if p not in owned]
                owned.update(own)
                self._parameters[modules[0]] = [p for p in own if p.requires_grad]
                for module in modules:
                    self._unit_of[module] = modules[0]
                    module.register_forward_pre_hook(self._begin)
                    module.register_forward_hook(self._watch, always_call=True)

    def _begin(self, unit: Any, args: Any) -> None:
        self._num_kept.append(len(unit.tape.aside))

    def _watch(self, unit: Any, args: Any, output: Any) -> Any:
        def see(grad: torch.Tensor) -> None:
            self._active.add(self._unit_of[unit])

        def watch(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                # The first forward of a reentrant checkpoint records nothing.
                if not value.requires_grad or not torch.is_grad_enabled():
                    return value
                # A view's gradient is this call's own, where an output is an input.
                view = value.view_as(value)
                view.register_hook(see)
                return view
            if isinstance(value, dict):
                return {key: watch(item) for key, item in value.items()}
            if isinstance(value, (Bundle, Pair)):
                return type(value)(watch(value.x), watch(value.aux))
            return type(value)(watch(item) for item in value) if isinstance(value, (tuple, list)) else value

        for kept in unit.tape.aside[self._num_kept.pop() :]:
            if kept.requires_grad:
                kept.register_hook(see)
        return watch(output)

    def take(self) -> list[nn.Parameter]:
        """Return the trainable parameters of the units that have taken part since the last call."""
        for unit, parameters in self._parameters.items():
            if any(parameter.grad is not None for parameter in parameters):
                self._active.add(unit)
        found = [parameter for unit in self._active for parameter in self._parameters[unit]]
        self._active.clear()
        return found


class _Reference:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.tape = Tape()
        self.roots = build_roots(program, self.tape)
        self.participation = _Participation(self.roots, program.joins)
        self.parameters = named(self.roots)
        policy = POLICIES[program.policy]
        self.mains: dict[str, Any] = {}
        for name, p in self.parameters.items():
            dtype = policy.main_params_dtype if p.requires_grad and policy.main_params_dtype else p.dtype
            main = self.mains[name] = nn.Parameter(p.detach().to(dtype).clone(), requires_grad=p.requires_grad)
            if p.requires_grad:
                main.grad_dtype = None
        self.grads_dtype = policy.main_grads_dtype
        self.optimizer = OPTIMIZERS[program.optimizer]([p for p in self.mains.values() if p.requires_grad])
        self.records = [Record() for _ in range(program.world_size)]
        self.backwards: list[list[dict[str, torch.Tensor]]] = []

    def run(self, rank: int) -> Record:
        for index, step in enumerate(self.program.steps):
            self._step(step, index)
        record = self.records[0]
        record.weights = {name: main.detach() for name, main in self.mains.items()}
        record.losses, record.input_gradients = self.records[rank].losses, self.records[rank].input_gradients
        return record

    def _players(self) -> list[Player]:
        return [Player(self.program, self.roots, self.tape, record, self._collect) for record in self.records]

    def _step(self, step: Step, index: int) -> None:
        players = self._players()
        for rank, player in enumerate(players):
            if step.fault != "no":
                player.fail(step, index, rank)
            if step.evaluates != "no":
                player.evaluate(step, index, rank)
        if step.fault != "no":
            self._drop()
        if step.zero_grad != "keep":
            self.optimizer.zero_grad(set_to_none=step.zero_grad == "none")
        for number, item in enumerate(step.microbatches):
            shares = []
            for rank, player in enumerate(players):
                self.backwards = []
                player.microbatch(item, index, number, rank)
                shares.append(self.backwards)
            for backward in zip(*shares, strict=True):
                self._reduce(backward)
        if step.clips:
            # torch has no largest element of an empty gradient.
            mains = [main for main in self.mains.values() if main.requires_grad and main.numel()]
            norm = torch.nn.utils.clip_grad_norm_(mains, MAX_NORM, self.program.norm_type)
            self.records[0].norms.append(norm.item())
        self.records[0].gradients.append(
            {name: None if main.grad is None else main.grad.clone() for name, main in self.mains.items()}
        )
        for rank, player in enumerate(players):
            if step.peeks:
                player.peek(index, rank)
        self._update(step)

    def _collect(self) -> None:
        """Take the gradients of one backward of one rank; zeros for parameters of units that took part."""
        taking_part = set(self.participation.take())
        found = {}
        for name, parameter in self.parameters.items():
            if parameter in taking_part:
                found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None
        self.backwards.append(found)

    def _drop(self) -> None:
        self.participation.take()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _reduce(self, shares: Any) -> None:
        assert all(share.keys() == shares[0].keys() for share in shares), "units differ between ranks"
        divisor = self.program.divisor * (len(shares) if self.program.reduction == "average" else 1)
        for name in shares[0]:
            main = self.mains[name]
            dtype = self.grads_dtype or main.dtype
            total = sum(share[name].to(dtype) / divisor for share in shares)
            main.grad = total if main.grad is None else main.grad + total

    def _update(self, step: Step) -> None:
        if step.steps:
            gradients = {main: main.grad for main in self.mains.values()}
            for main, gradient in gradients.items():
                main.grad = None if gradient is None else gradient.to(main.dtype)
            self.optimizer.step()
            for main, gradient in gradients.items():
                main.grad = gradient
        with torch.no_grad():
            for name, main in self.mains.items():
                if step.writes == "scale":
                    main.mul_(SCALE)
                self.parameters[name].copy_(main)


def run_reference(program: Program, rank: int) -> Record:
    """Train on all ranks' data in this process; losses and input gradients are those of `rank`."""
    return _Reference(program).run(rank)


def tolerance(program: Program) -> float:
    """Return the relative and absolute error that rounding may make, weights and gradients being of size one.

    Both sides compute the same in the same dtypes, but a unit's gradients and those of its inputs are added in another
    order than in one process, which costs the last bits of the narrowest dtype.
    """
    parts = [part for root in program.roots for part in cells_and_leaves(root)]
    dtypes = {program.dtype} | {part.dtype for part in parts if isinstance(part, Leaf)}
    if "bfloat16" in dtypes:
        return 3e-2
    return 1e-9 if dtypes <= {"float64", "same"} and program.policy in ("wide", "own") else 1e-4


def difference(record: Record, reference: Record, error: float) -> str | None:
    """Return the first difference between a sharded run and the reference, or None."""
    if record.races:
        return f"race: {record.races[0]}"
    for index, (ours, theirs) in enumerate(zip(record.losses, reference.losses, strict=True)):
        if not abs(ours - theirs) <= error * (1 + abs(theirs)):
            return f"loss {index}: expected {theirs}, got {ours}"
    for index, (ours, theirs) in enumerate(zip(record.norms, reference.norms, strict=True)):
        if not abs(ours - theirs) <= error * (1 + abs(theirs)):
            return f"norm {index}: expected {theirs}, got {ours}"
    for step, (found, expected) in enumerate(zip(record.gradients, reference.gradients, strict=True)):
        for name, gradient in expected.items():
            if (text := _differ(found[name], gradient, error)) is not None:
                return f"gradient of {name} in step {step}: {text}"
    for index, (found_grad, expected_grad) in enumerate(
        zip(record.input_gradients, reference.input_gradients, strict=True)
    ):
        if (text := _differ(found_grad, expected_grad, error)) is not None:
            return f"gradient of input {index}: {text}"
    for name, weight in reference.weights.items():
        if (text := _differ(record.weights[name], weight, error)) is not None:
            return f"weight of {name}: {text}"
    return None


def _differ(found: torch.Tensor | None, expected: torch.Tensor | None, error: float) -> str | None:
    if found is None or expected is None:
        return None if found is expected else f"expected {_shown(expected)}, got {_shown(found)}"
    if torch.allclose(found.double(), expected.double(), rtol=error, atol=error):
        return None
    return f"expected {_shown(expected)}, got {_shown(found)}"


def _shown(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else str(tensor.detach().flatten()[:6].tolist())
