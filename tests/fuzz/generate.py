# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A program from a seed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from tests.fuzz.known import KNOWN
from tests.fuzz.leaves import LEAVES
from tests.fuzz.program import (
    STRATEGIES,
    TRAINING_FORMS,
    Call,
    Cell,
    Leaf,
    Microbatch,
    Program,
    Schedule,
    Step,
    is_valid,
)

T = TypeVar("T")
MAX_DEPTH = 3
MAX_TRIES = 1000


def generate(seed: int, *, known: Collection[str] = ()) -> Program:
    """Return the program of a seed.

    Args:
        seed: any integer.
        known: keys of `KNOWN` that the program may contain all the same.
    """
    random = Random(seed)
    for _ in range(MAX_TRIES):
        program = _program(random, seed)
        for name, item in KNOWN.items():
            if name not in known:
                program = item.avoid(program)
        if is_valid(program):
            return program
    raise AssertionError(f"fuzz seed {seed}: expected a valid program within {MAX_TRIES} tries, got none.")


def _program(random: Random, seed: int) -> Program:
    dtype = _pick(random, {"float64": 4, "float32": 2, "bfloat16": 2})
    is_mixed = random.random() < 0.3
    num_roots = _pick(random, {1: 4, 2: 1})
    frozen_share = _pick(random, {0.0: 2, 0.2: 1, 0.6: 1})
    world_size = _pick(random, {1: 1, 2: 3, 3: 1, 4: 1})
    make = _Tree(random, is_mixed, frozen_share)
    return Program(
        seed=seed,
        world_size=world_size,
        width=random.randint(1, 6),
        batch=random.randint(1, 3),
        dtype=dtype,
        policy=_pick(random, {"wide": 3, "float32": 1, "own": 1, "float32_grads": 1}),
        roots=tuple(make.cell(0) for _ in range(num_roots)),
        root_order=_pick(random, {"chain": 2, "sum": 1, "reversed": 1}),
        has_unit_head=random.random() < 0.5,
        is_implicit=num_roots == 1 and random.random() < 0.3,
        is_unified=random.random() < 0.2,
        schedules=tuple(_schedule(random) for _ in range(random.randint(1, 3))),
        **_sharding(random, world_size),
        reduction=_pick(random, {"average": 3, "sum": 1}),
        divisor=_pick(random, {1.0: 4, 3.0: 1}),
        optimizer=_pick(random, {"sgd": 1, "adam": 1, "adamw": 1}),
        norm_type=_pick(random, {2.0: 4, float("inf"): 1}),
        steps=tuple(_step(random) for _ in range(random.randint(1, 3))),
    )


def _sharding(random: Random, world_size: int) -> dict[str, Any]:
    outer = [size for size in (1, 2, world_size) if world_size % size == 0]
    num_outer = random.choice(outer) if random.random() < 0.4 else None
    if random.random() < 0.5:
        return {"num_outer": num_outer}
    return {"num_outer": num_outer, "strategies": tuple(random.choices(tuple(STRATEGIES), k=random.randint(1, 2)))}


def _schedule(random: Random) -> Schedule:
    forward, backward = random.randint(0, 3), random.randint(0, 3)
    numel = random.randint(1, 100) if forward and backward and random.random() < 0.3 else None
    return Schedule(forward, backward, numel, _pick(random, {None: 2, True: 1, False: 1}))


def _step(random: Random) -> Step:
    forms = {"one": 4, **dict.fromkeys((*TRAINING_FORMS[1:], "input_grad", "forward_only"), 1)}
    microbatches = [
        Microbatch(_pick(random, forms), random.random() < 0.4, random.random() < 0.7)
        for _ in range(_pick(random, {1: 4, 2: 2, 3: 1}))
    ]
    microbatches[-1] = replace(
        microbatches[-1], syncs=True, form=_pick(random, {form: forms[form] for form in TRAINING_FORMS})
    )
    fault = _pick(random, {"no": 12, "forward": 1, "backward": 1})
    return Step(
        fault=fault,
        evaluates=_pick(random, {"no": 4, "no_grad": 1, "inference_mode": 1}),
        zero_grad=_pick(random, {"none": 3, "zero": 1, "keep": 1}) if fault != "backward" else "none",
        microbatches=tuple(microbatches),
        peeks=random.random() < 0.15,
        clips=random.random() < 0.3,
        steps=random.random() < 0.9,
        writes=_pick(random, {"no": 6, "scale": 1, "load": 1}),
    )


class _Tree:
    """Random cells and leaves."""

    def __init__(self, random: Random, is_mixed: bool, frozen_share: float) -> None:
        self._random = random
        self._is_mixed = is_mixed
        self._frozen_share = frozen_share

    def cell(self, depth: int) -> Cell:
        """Return a cell; depth 0 is a root."""
        random = self._random
        parts = tuple(self._part(depth + 1) for _ in range(random.randint(1, 3)))
        calls = [self._call(len(parts)) for _ in range(random.randint(0 if depth else 1, 3))]
        is_tied = random.random() < 0.3
        if is_tied:
            parts = (*parts, Leaf(), Leaf())
            calls += [Call(part=len(parts) - 2), Call(part=len(parts) - 1)]
        if random.random() < 0.25:
            # What one rank may leave out lies behind something that every rank uses.
            parts = (*parts, self._plain_leaf(), self._plain_leaf())
            calls.insert(0, Call(part=len(parts) - 2))
            calls.append(Call(part=len(parts) - 1, skip="odd_rank", is_branch=random.random() < 0.5))
        return Cell(
            parts=parts,
            calls=tuple(calls),
            is_unit=depth == 0 or random.random() < 0.5,
            takes=_pick(random, {"tensor": 4, "tuple": 1, "dict": 1, "keyword": 1, "dataclass": 1}),
            gives=_pick(random, {"tensor": 4, "tuple": 1, "dict": 1, "namedtuple": 1, "dataclass": 1}),
            aux=_pick(random, {"none": 6, "loss": 1, "ignored": 1, "aside": 1}),
            has_dropout=random.random() < 0.2,
            is_tied=is_tied,
        )

    def _part(self, depth: int) -> Leaf | Cell:
        random = self._random
        if depth < MAX_DEPTH and random.random() < 0.3:
            return self.cell(depth)
        leaf = self._plain_leaf()
        return replace(leaf, is_frozen=random.random() < self._frozen_share, is_unit=random.random() < 0.5)

    def _plain_leaf(self) -> Leaf:
        random = self._random
        dtype = _pick(random, {"same": 2, "float32": 1, "bfloat16": 1}) if self._is_mixed else "same"
        return Leaf(kind=random.choice(tuple(LEAVES)), size=random.randint(1, 5), dtype=dtype)

    def _call(self, num_parts: int) -> Call:
        random = self._random
        recompute = _pick(random, {"no": 6, "plain": 1, "reentrant": 1})
        return Call(
            part=random.randrange(num_parts),
            skip=_pick(random, {"never": 8, "odd_step": 1}),
            recompute=recompute,
            span=random.randint(1, 3) if recompute != "no" else 1,
            is_branch=random.random() < 0.3,
            after=_pick(random, {"nothing": 8, "inplace": 1, "view": 1, "detach": 1}),
        )


def _pick(random: Random, weights: dict[T, int]) -> T:
    return random.choices(tuple(weights), tuple(weights.values()))[0]
