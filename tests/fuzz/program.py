# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What a fuzzed program is: a tree of modules, how it is sharded, and the steps that it runs.

Values only. The default of every field is its simplest value, so that a shrinker may replace any field by its default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

TRAINING_FORMS = ("one", "same", "reversed", "joint", "retain", "two_losses")
"""Ways to run one microbatch that leave gradients of parameters; the others are "input_grad" and "forward_only"."""


@dataclass(frozen=True)
class Leaf:
    """A module with parameters and without parts; maps [batch, width] to [batch, width].

    Attributes:
        kind: a key of `leaves.LEAVES`.
        size: a dim of its own: hidden width, channels, rows.
        dtype: of its parameters; "same" is the program's.
        is_frozen: whether its parameters need no gradient.
        is_unit: whether it is a unit.
    """

    kind: str = "linear"
    size: int = 1
    dtype: str = "same"
    is_frozen: bool = False
    is_unit: bool = False


@dataclass(frozen=True)
class Call:
    """One call of a part.

    Attributes:
        part: which part, modulo their number.
        skip: "never", or "odd_step" or "odd_rank": when the call is left out.
        recompute: "no", "reentrant" or "plain" checkpointing of this call and the `span - 1` after it.
        span: see `recompute`.
        is_branch: whether the result is added to the input rather than taking its place.
        after: what happens to the result: "nothing", an "inplace" edit, a "view", or "detach", as a branch.
    """

    part: int = 0
    skip: str = "never"
    recompute: str = "no"
    span: int = 1
    is_branch: bool = False
    after: str = "nothing"


@dataclass(frozen=True)
class Cell:
    """A module with parts, which it calls in turn.

    Attributes:
        parts: the modules inside.
        calls: what forward does.
        is_unit: whether it is a unit; a root always is one.
        takes: how its input comes: "tensor", "tuple", "dict", "keyword" or "dataclass".
        gives: how its output goes: "tensor", "tuple", "dict", "namedtuple" or "dataclass".
        aux: what becomes of a second result: "none" is made, it joins the "loss", it is "ignored", or it is left
            "aside" in an attribute and joins the loss from there.
        has_dropout: whether it ends with dropout.
        is_tied: whether its first two plain linear parts share one weight.
    """

    parts: tuple[Leaf | Cell, ...] = (Leaf(),)
    calls: tuple[Call, ...] = (Call(),)
    is_unit: bool = False
    takes: str = "tensor"
    gives: str = "tensor"
    aux: str = "none"
    has_dropout: bool = False
    is_tied: bool = False


STRATEGIES = {
    **{name: (name, "no_shard") for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
    "outer_optim": ("optim", "optim"),
    "hfsdp": ("optim_grads_params", "optim"),
}
"""What the inner and the outer mesh axis shard; with one axis, the inner one only."""


@dataclass(frozen=True)
class Schedule:
    """Arguments of a `SchedulePolicy`; `numel` bounds both directions that prefetch at all."""

    forward: int = 1
    backward: int = 1
    numel: int | None = None
    reshard: bool | None = None


@dataclass(frozen=True)
class Microbatch:
    """Forwards and backwards between two zero_grads.

    Attributes:
        form: one of `TRAINING_FORMS`, "input_grad" (torch.autograd.grad of the input) or "forward_only".
        needs_input_grad: whether the input needs a gradient.
        syncs: whether its gradients are reduced, or held back until those of a later one are.
    """

    form: str = "one"
    needs_input_grad: bool = False
    syncs: bool = True


@dataclass(frozen=True)
class Step:
    """One optimizer step and what comes before it, in this order.

    Attributes:
        fault: "no", or an exception in the middle of a "forward" or a "backward".
        evaluates: "no", or an evaluation under "no_grad" or "inference_mode".
        zero_grad: "none" or "zero", what gradients are set to, or "keep" for no call.
        microbatches: what is accumulated; the last one trains.
        peeks: whether a forward whose backward never comes runs before the optimizer steps.
        clips: whether gradients are clipped.
        steps: whether the optimizer steps.
        writes: "no", or how weights are written afterwards: "scale" in place, or "load" of their own state dict.
    """

    fault: str = "no"
    evaluates: str = "no"
    zero_grad: str = "none"
    microbatches: tuple[Microbatch, ...] = (Microbatch(),)
    peeks: bool = False
    clips: bool = False
    steps: bool = True
    writes: str = "no"


@dataclass(frozen=True)
class Program:
    """Everything about one run.

    Attributes:
        seed: of weights and data, and what the program was made from.
        world_size: ranks.
        width: last dim of all activations.
        batch: rows of one rank's microbatch.
        dtype: of activations and of most parameters.
        policy: a key of `sharded.POLICIES`: the main dtypes.
        roots: one or two roots of one context.
        root_order: "chain", "sum" or "reversed" sum: how two roots make one output.
        has_unit_head: whether the linear module that ends each root is a unit rather than the root's own.
        is_implicit: whether fully_shard runs outside a context; one root only.
        is_unified: whether both communication streams are one.
        has_pool: whether buffers have fixed places; not drawn at random.
        is_separate: whether weights are gathered in process groups of their own; not drawn at random.
        joins: whether leaves beside each other that are units form one; not drawn at random.
        schedules: of the units in turn, modulo their number.
        strategies: likewise, keys of `STRATEGIES`.
        num_outer: ranks along the outer of two mesh axes; None for a mesh of one axis.
        reduction: "average" or "sum".
        divisor: of gradients.
        optimizer: a key of `numbers.OPTIMIZERS`.
        norm_type: of clipping.
        steps: what is run.
    """

    seed: int = 0
    world_size: int = 1
    width: int = 2
    batch: int = 1
    dtype: str = "float64"
    policy: str = "wide"
    roots: tuple[Cell, ...] = (Cell(is_unit=True),)
    root_order: str = "chain"
    has_unit_head: bool = False
    is_implicit: bool = False
    is_unified: bool = False
    has_pool: bool = False
    is_separate: bool = False
    joins: bool = False
    schedules: tuple[Schedule, ...] = (Schedule(),)
    strategies: tuple[str, ...] = ("optim_grads_params",)
    num_outer: int | None = None
    reduction: str = "average"
    divisor: float = 1.0
    optimizer: str = "sgd"
    norm_type: float = 2.0
    steps: tuple[Step, ...] = (Step(),)

    def to_json(self) -> str:
        """Return the program as JSON without the fields that have their defaults."""
        return json.dumps(_without_defaults(self))


def program_from_json(text: str) -> Program:
    """Return the program that `to_json` has written."""
    values = json.loads(text)
    for name, make in (("roots", _part), ("schedules", _plain(Schedule)), ("steps", _step)):
        if name in values:
            values[name] = tuple(make(item) for item in values[name])
    if "strategies" in values:
        values["strategies"] = tuple(values["strategies"])
    return Program(**values)


def cells_and_leaves(part: Leaf | Cell) -> Iterator[Leaf | Cell]:
    """Yield a part and everything inside it."""
    yield part
    if isinstance(part, Cell):
        for inner in part.parts:
            yield from cells_and_leaves(inner)


def is_valid(program: Program) -> bool:
    """Return whether a program has a meaning, and the same collectives on every rank by its own doing."""
    if not program.roots or not program.steps or not program.schedules or not program.strategies:
        return False
    if program.num_outer is not None and program.world_size % program.num_outer:
        return False
    if program.is_implicit and len(program.roots) > 1:
        return False
    cells = [part for root in program.roots for part in cells_and_leaves(root)]
    if not all(root.is_unit for root in program.roots):
        return False
    if not all(_is_valid_cell(cell) for cell in cells if isinstance(cell, Cell)):
        return False
    # Checkpointed parts refuse torch.autograd.grad where they are reentrant.
    calls = [call for cell in cells if isinstance(cell, Cell) for call in cell.calls]
    is_reentrant = any(call.recompute == "reentrant" for call in calls)
    # A fault in the same leaf on every rank needs every rank to run the same leaves.
    if any(call.skip == "odd_rank" for call in calls) and any(step.fault != "no" for step in program.steps):
        return False
    return all(_is_valid_step(step, is_reentrant) for step in program.steps) and _fits_policy(program, cells)


def _is_valid_cell(cell: Cell) -> bool:
    if not cell.parts:
        return False
    for call in cell.calls:
        part = cell.parts[call.part % len(cell.parts)]
        if call.skip == "odd_rank" and not (_may_skip_on_a_rank(part) and _starts_with_anchor(cell)):
            return False
        # What a cell returns may be its input, which must not be edited.
        if call.after == "inplace" and isinstance(part, Cell):
            return False
    return True


def _may_skip_on_a_rank(part: Leaf | Cell) -> bool:
    inside = list(cells_and_leaves(part))
    return not any(item.is_unit for item in inside) and all(
        item.aux == "none" for item in inside if isinstance(item, Cell)
    )


def _starts_with_anchor(cell: Cell) -> bool:
    """Return whether what the cell computes needs a gradient on every rank, whichever rank leaves out the rest."""
    first = cell.calls[0]
    part = cell.parts[first.part % len(cell.parts)]
    return isinstance(part, Leaf) and not part.is_frozen and first == Call(part=first.part, is_branch=first.is_branch)


def _is_valid_step(step: Step, is_reentrant: bool) -> bool:
    if not step.microbatches or step.microbatches[-1].form not in TRAINING_FORMS:
        return False
    if step.fault == "backward" and step.zero_grad != "none":
        return False
    for microbatch in step.microbatches:
        if microbatch.form == "input_grad" and (is_reentrant or not microbatch.needs_input_grad):
            return False
    return True


def _fits_policy(program: Program, cells: list[Leaf | Cell]) -> bool:
    dtypes = {program.dtype} | {leaf.dtype for leaf in cells if isinstance(leaf, Leaf)} - {"same"}
    if program.policy == "wide":
        return True
    if program.policy == "float32" and "float64" in dtypes:
        return False
    # Sums of more than two floats depend on their order; rounded to bfloat16, a different last bit is a large one.
    return "bfloat16" not in dtypes or (program.policy == "float32" and program.world_size <= 2)


def _without_defaults(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, (Leaf, Call, Cell, Schedule, Microbatch, Step, Program)):
        return value
    default = type(value)()
    kept = {name: getattr(value, name) for name in asdict(value) if getattr(value, name) != getattr(default, name)}
    if isinstance(value, Cell):
        kept["parts"] = value.parts
    return {name: _without_defaults(item) for name, item in kept.items()}


def _plain(cls: type) -> Any:
    return lambda values: cls(**values)


def _part(values: dict[str, Any]) -> Leaf | Cell:
    if "parts" not in values:
        return Leaf(**values)
    values["parts"] = tuple(_part(item) for item in values["parts"])
    if "calls" in values:
        values["calls"] = tuple(Call(**item) for item in values["calls"])
    return Cell(**values)


def _step(values: dict[str, Any]) -> Step:
    if "microbatches" in values:
        values["microbatches"] = tuple(Microbatch(**item) for item in values["microbatches"])
    return Step(**values)
