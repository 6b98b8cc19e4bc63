# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Modules made from a program's tree; they know nothing of sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.leaves import LEAVES
from tests.fuzz.program import Call, Cell, Leaf, Program


class Fault(Exception):
    """What a program raises on purpose."""


@dataclass
class Tape:
    """What all modules of one process look at while they run.

    Attributes:
        step: number of the running step.
        rank: whose data runs.
        aside: results that were left beside the outputs of the running forward.
        leaves_until_fault: calls of leaves before one fails; None for no fault.
        fails_in_backward: whether it is the gradient of that leaf's output that fails.
    """

    step: int = 0
    rank: int = 0
    aside: list[torch.Tensor] = field(default_factory=list)
    leaves_until_fault: int | None = None
    fails_in_backward: bool = False


@dataclass
class Bundle:
    """An input or output."""

    x: torch.Tensor
    aux: Any = None


class Pair(NamedTuple):
    """An output."""

    x: torch.Tensor
    aux: Any


class LeafModule(nn.Module):
    """Half the input plus what its body makes of it."""

    def __init__(self, leaf: Leaf, program: Program, tape: Tape) -> None:
        super().__init__()
        self.spec, self.tape = leaf, tape
        self.compute_dtype = getattr(torch, program.dtype if leaf.dtype == "same" else leaf.dtype)
        self.body = LEAVES[leaf.kind](program.width, leaf.size).to(self.compute_dtype)
        if leaf.is_frozen:
            self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 0.5 * x + self.body(x.to(self.compute_dtype)).to(x.dtype)
        if self.tape.leaves_until_fault is not None:
            self.tape.leaves_until_fault -= 1
            if self.tape.leaves_until_fault == 0:
                _fail(self.tape, y)
        return y


def _fail(tape: Tape, y: torch.Tensor) -> None:
    if not tape.fails_in_backward:
        raise Fault("forward")

    def fail(grad: torch.Tensor) -> None:
        raise Fault("backward")

    if y.requires_grad:
        y.register_hook(fail)


class CellModule(nn.Module):
    """Runs a cell's calls."""

    PARTS = "parts"

    def __init__(self, cell: Cell, program: Program, tape: Tape) -> None:
        super().__init__()
        self.spec, self.tape = cell, tape
        setattr(self, self.PARTS, nn.ModuleList([_module(part, program, tape) for part in cell.parts]))
        if cell.is_tied:
            self._tie()

    @property
    def inside(self) -> Any:
        """The parts."""
        return getattr(self, self.PARTS)

    def _tie(self) -> None:
        plain = [part for part in self.inside if part.spec in (Leaf(), Leaf(is_frozen=True))]
        if len(plain) > 1 and plain[0].spec == plain[1].spec:
            plain[1].body.weight = plain[0].body.weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, *extras = self._run(_unpack(self.spec.takes, args, kwargs), self.spec.calls)
        x = self._finish(x)
        if self.spec.aux == "none":
            return _pack_output(self.spec.gives, x, {"losses": extras})
        aux = x.square().mean()
        if self.spec.aux == "aside":
            self.tape.aside.append(aux)
        elif self.spec.aux == "loss":
            extras.append(aux)
        return _pack_output(
            self.spec.gives, x, {"losses": extras, "other": aux if self.spec.aux == "ignored" else None}
        )

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.3, self.training) if self.spec.has_dropout else x

    def _run(self, x: torch.Tensor, calls: Sequence[Call]) -> tuple[torch.Tensor, ...]:
        extras: list[torch.Tensor] = []
        index = 0
        while index < len(calls):
            call = calls[index]
            if call.recompute == "no":
                x, *more = self._call(x, call)
                index += 1
            else:
                inside = (replace(call, recompute="no"), *calls[index + 1 : index + call.span])
                x, *more = checkpoint(self._run, x, inside, use_reentrant=call.recompute == "reentrant")
                index += len(inside)
            extras += more
        return (x, *extras)

    def _call(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, ...]:
        if (call.skip == "odd_step" and self.tape.step % 2) or (call.skip == "odd_rank" and self.tape.rank % 2):
            return (x,)
        y, *extras = call_part(self.inside[call.part % len(self.inside)], x)
        if call.after == "inplace":
            y.mul_(0.9)
        elif call.after == "view":
            y = y.view(y.shape[::-1]).view(y.shape)
        elif call.after == "detach":
            y = y.detach()
        return ((x + y) * 0.7 if call.is_branch or call.after == "detach" else y, *extras)


class FirstRoot(CellModule):
    """A root: its output passes through one more linear module, so that its loss always needs a gradient."""

    HEAD = "head"

    def __init__(self, cell: Cell, program: Program, tape: Tape) -> None:
        super().__init__(cell, program, tape)
        setattr(self, self.HEAD, LeafModule(Leaf(is_unit=program.has_unit_head), program, tape))

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, self.HEAD)(super()._finish(x))
        return y


class SecondRoot(FirstRoot):
    """A root whose units, and with them their buffers, have other names than the first root's."""

    PARTS = "others"
    HEAD = "tail"


def build_roots(program: Program, tape: Tape) -> list[CellModule]:
    """Return the roots, with weights that depend on the program alone."""
    roots: list[CellModule] = [
        cls(cell, program, tape) for cls, cell in zip((FirstRoot, SecondRoot), program.roots, strict=False)
    ]
    generator = torch.Generator().manual_seed(program.seed)
    with torch.no_grad():
        for root in roots:
            for parameter in root.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return roots


def unit_modules(root: CellModule) -> Iterator[nn.Module]:
    """Yield the modules that are to be units, inner ones first."""
    for module in reversed(list(root.modules())):
        if isinstance(module, (LeafModule, CellModule)) and module.spec.is_unit:
            yield module


def joint_units(root: CellModule, joins: bool) -> Iterator[list[nn.Module]]:
    """Yield the modules of each unit, inner units first; with `joins`, leaves beside each other form one."""
    parents = {id(child): id(parent) for parent in root.modules() for child in parent.children()}
    run: list[nn.Module] = []
    for module in unit_modules(root):
        is_beside = run and parents.get(id(module)) == parents.get(id(run[0]))
        if joins and is_beside and isinstance(module, LeafModule) and isinstance(run[0], LeafModule):
            run.insert(0, module)
            continue
        if run:
            yield run
        run = [module]
    yield run


def call_part(part: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Call a module the way it takes its input; return its first output and those that join the loss."""
    if isinstance(part, LeafModule):
        return (part(x),)
    assert isinstance(part, CellModule)
    args, kwargs = _INPUTS[part.spec.takes](x)
    output = part(*args, **kwargs)
    if isinstance(output, torch.Tensor):
        return (output,)
    if isinstance(output, Bundle):
        output = (output.x, output.aux)
    x, aux = output.values() if isinstance(output, dict) else output
    return (x, *aux["losses"])


def _module(part: Leaf | Cell, program: Program, tape: Tape) -> nn.Module:
    return LeafModule(part, program, tape) if isinstance(part, Leaf) else CellModule(part, program, tape)


_INPUTS: dict[str, Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "tensor": lambda x: ((x,), {}),
    "tuple": lambda x: (((None, x),), {}),
    "dict": lambda x: (({"x": x, "flag": True},), {}),
    "keyword": lambda x: ((), {"x": x, "flag": True}),
    "dataclass": lambda x: ((Bundle(x),), {}),
}


def _unpack(takes: str, args: Any, kwargs: Any) -> torch.Tensor:
    if takes == "keyword":
        x = kwargs["x"]
    elif takes == "tuple":
        x = args[0][1]
    elif takes == "dict":
        x = args[0]["x"]
    else:
        x = args[0].x if takes == "dataclass" else args[0]
    return x


def _pack_output(gives: str, x: torch.Tensor, aux: dict[str, Any]) -> Any:
    if gives == "dict":
        return {"x": x, "aux": aux}
    if gives == "namedtuple":
        return Pair(x, aux)
    if gives == "dataclass":
        return Bundle(x, aux)
    return x if gives == "tensor" and aux == {"losses": []} else (x, aux)
