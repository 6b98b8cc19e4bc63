# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Streams do not change a bit: slow ones, one in place of two, compute on a side stream; and every wait is needed.

Each check trains the same model with delays that would let a stream overtake another if the runtime did not order
them, and compares bits with a run in which the host waits after each use of a stream. That the delays are long enough
is checked by leaving out one wait at a time: then bits must differ.

On the host the order of streams is followed with vector clocks instead: a race stands for a difference.

[Note: a delay for every wait]
A wait of X for Y shows only if Y is late and nothing else holds X up. Collectives of one communicator run one after
another whatever their streams, so that a gather behind a late reduction is late, too. Therefore

    unshard              compute sleeps before the optimizer: gathers would send the weights before the step
    wait_for_unshard     gathers sleep: compute would read memory that is not filled
    reshard              compute sleeps before a second microbatch, whose gathers wait for no step: they would overwrite
                         what it is about to read
    start                compute sleeps before backward: reductions would send what is not packed
    release              reductions sleep while weights stay gathered, so that no gather of backward is held up: packing
                         would overwrite what they have not sent
    finish               reductions sleep: the optimizer would read gradients that have not arrived
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.experimental.device import observe
from tests.gpu.checks import IS_DRY, Check
from tests.gpu.streams import COMPUTE_SLEEP_CYCLES, Tampering, sleep, synchronize, tampered
from tests.unit_tests.launch import DEVICE
from tests.unit_tests.trace import Trace

WIDTH = 16 if IS_DRY else 1024
NUM_ROWS = 64
NUM_STEPS = 3
NUM_MICROBATCHES = 2
NUM_UNITS = 6
SMALL_NUMEL = 1024


class Layer(nn.Module):
    """A residual layer; with more groups, its norm is wider than the rest and a frozen weight is added."""

    def __init__(self, hidden: int, *, has_more_groups: bool = False) -> None:
        super().__init__()
        wide = torch.float32 if has_more_groups else torch.bfloat16
        self.norm = nn.LayerNorm(WIDTH, dtype=wide)
        self.up = nn.Linear(WIDTH, hidden, dtype=torch.bfloat16)
        self.down = nn.Linear(hidden, WIDTH, bias=False, dtype=torch.bfloat16)
        if has_more_groups:
            self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        y = self.down(F.gelu(self.up(y)))
        return x + (self.mix(y) if hasattr(self, "mix") else y)


class Model(nn.Module):
    """Layers of one size, or one that is larger than the others below a root with parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        hidden = [3 * WIDTH] * NUM_UNITS
        if kind == "uneven":
            hidden[NUM_UNITS // 2] *= 4
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.layers = nn.ModuleList([Layer(size, has_more_groups=kind == "groups") for size in hidden])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "scale"):
            x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Program:
    """One training run.

    Attributes:
        kind: which model.
        slow: communication streams that sleep whenever they are used.
        compute_sleeps_before: "forward", "backward" and "step".
        policy: when weights are gathered and released.
        has_one_stream: whether gathers and reductions share a stream.
        has_pool: whether buffers have fixed places.
        is_on_side_stream: whether the whole run is issued on a stream of its own.
        is_synchronised: whether the host waits for everything all the time.
        dropped_wait: the wait that is left out.
    """

    kind: str = "equal"
    slow: tuple[str, ...] = ()
    compute_sleeps_before: tuple[str, ...] = ()
    policy: SchedulePolicy = field(default_factory=SchedulePolicy)
    has_one_stream: bool = False
    has_pool: bool = False
    is_on_side_stream: bool = False
    is_synchronised: bool = False
    dropped_wait: str | None = None


@dataclass
class Outcome:
    """Full weights and last gradients, the functions that waited, most units of packed gradients at a time, races."""

    tensors: list[torch.Tensor]
    sites: set[str]
    max_packed: int
    races: list[str]


def train(program: Program) -> Outcome:
    """Run a program on this rank's data."""
    tampering = Tampering(program.slow, program.dropped_wait, program.is_synchronised)
    trace = Trace()
    side = torch.cuda.Stream() if program.is_on_side_stream and not IS_DRY else None
    with tampered(tampering), observe(trace) if IS_DRY else nullcontext():
        torch.manual_seed(0)
        model = Model(program.kind).to(DEVICE)
        with fully_shard_context(
            DEVICE, unify_communication_stream=program.has_one_stream, trace_pool=program.has_pool
        ) as context:
            for layer in model.layers:
                fully_shard(layer, schedule_policy=program.policy)
            fully_shard(model, schedule_policy=program.policy)
        synchronize()
        with torch.cuda.stream(side):
            max_packed = _run_steps(model, program)
        synchronize()
        assert context.pool is None or (context.pool.is_active and context.pool.num_fallbacks == 0)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        tensors = [parameter.full_tensor().detach() for parameter in parameters]
        tensors += [parameter.grad.full_tensor() for parameter in parameters]
    return Outcome(tensors, tampering.sites, max_packed, trace.races)


def _run_steps(model: Any, program: Program) -> int:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Not Adam: with GPUs as default devices its step counts lie there, and reading them holds the host up.
    optimizer = fully_shard_optimizer(torch.optim.SGD(trainable, lr=1e-2, momentum=0.9))
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (NUM_STEPS, NUM_MICROBATCHES, NUM_ROWS, WIDTH)
    # Made beforehand: a copy from the host would wait for a stream that sleeps.
    batches = torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)
    packed: list[int] = []
    for layer in model.layers:
        layer.register_post_backward_hook(lambda unit: packed.append(_num_packed(model)))

    def pause(point: str) -> None:
        if point in program.compute_sleeps_before:
            sleep(COMPUTE_SLEEP_CYCLES)

    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for index in range(NUM_MICROBATCHES):
            with microbatch(model.context, is_last=index == NUM_MICROBATCHES - 1):
                pause("forward")
                loss = model(batches[step, index]).float().square().mean()
                pause("backward")
                loss.backward()
            _poison_free_memory(model)
        pause("step")
        optimizer.step()
    return max(packed)


def _num_packed(model: Any) -> int:
    units = [[group.gradients for group in layer.parameter_groups] for layer in model.layers]
    return sum(any(gradients is not None and gradients.at.full.has_storage for gradients in unit) for unit in units)


def _poison_free_memory(model: Any) -> None:
    """Write to whatever the compute stream may have taken back: many small blocks, and some of a unit's size."""
    numels = [SMALL_NUMEL] * 256 + [group.layout.global_numel for group in model.layers[0].parameter_groups] * 3
    poison = [torch.full((numel,), torch.nan, device=DEVICE) for numel in numels]
    del poison


@functools.cache
def synchronised(kind: str) -> Outcome:
    """Return what training is without any concurrency; once for each worker."""
    outcome = train(Program(kind, is_synchronised=True))
    assert all(tensor.isfinite().all() for tensor in outcome.tensors) and not outcome.races
    return outcome


def num_different(outcome: Outcome, kind: str) -> int:
    """Return how many tensors differ in a bit from those of the synchronised run."""
    expected = synchronised(kind).tensors
    return sum(not torch.equal(ours, theirs) for ours, theirs in zip(outcome.tensors, expected, strict=True))


def bits_are_equal(programs: dict[str, Program]) -> str:
    """Every program gives the bits of the synchronised run."""
    for name, program in programs.items():
        outcome = train(program)
        assert not outcome.races, f"{name}: {outcome.races}"
        number = num_different(outcome, program.kind)
        assert number == 0, f"{name}: {number} of {len(outcome.tensors)} tensors differ"
    return "equal bits: " + ", ".join(programs)


SLOW = ("all_gather", "reduce_scatter")
ALWAYS = ("forward", "backward", "step")
KEEP = SchedulePolicy(reshard_after_forward=False)

STREAMS = {
    "several streams": Program(),
    "one stream": Program(has_one_stream=True),
    "one slow stream": Program(has_one_stream=True, slow=SLOW, compute_sleeps_before=ALWAYS),
    "slow gathers": Program(slow=("all_gather",)),
    "slow reductions": Program(slow=("reduce_scatter",)),
    "slow compute": Program(compute_sleeps_before=ALWAYS),
    "no prefetch": Program(policy=SchedulePolicy(forward_prefetch_units=0, backward_prefetch_units=0)),
    "deep prefetch": Program(policy=SchedulePolicy(forward_prefetch_units=3, backward_prefetch_units=3)),
    "weights kept": Program(policy=KEEP, slow=SLOW),
}

SIDE_STREAM = {
    "fast": Program(is_on_side_stream=True),
    "slow communication": Program(is_on_side_stream=True, slow=SLOW),
    "slow compute": Program(is_on_side_stream=True, compute_sleeps_before=ALWAYS),
}

UNEVEN = {
    "fast": Program("uneven"),
    "slow communication": Program("uneven", slow=SLOW),
    "slow compute": Program("uneven", compute_sleeps_before=ALWAYS),
    "deep prefetch": Program("uneven", slow=SLOW, policy=SchedulePolicy(3, 3)),
}

POOL = {
    f"{kind}, {speed}": Program(kind, has_pool=True, **options)
    for kind in ("equal", "uneven", "groups")
    for speed, options in {
        "fast": {},
        "slow gathers": {"slow": ("all_gather",)},
        "slow reductions": {"slow": ("reduce_scatter",)},
        "slow compute": {"compute_sleeps_before": ALWAYS},
    }.items()
}

WAITS = {
    "unshard": Program(compute_sleeps_before=("step",)),
    "wait_for_unshard": Program(slow=("all_gather",)),
    "reshard": Program(compute_sleeps_before=("forward",)),
    "_start": Program(compute_sleeps_before=("backward",)),
    "release": Program(slow=("reduce_scatter",), policy=KEEP),
    "finish": Program(slow=("reduce_scatter",)),
}
"""For each function that waits, a program that goes wrong without: [Note: a delay for every wait]."""


INVISIBLE = {"await_gathers", "release_gradients"}
"""Waits without which no bit differs; test_schedule.py shows their races.

The first is for gathers that nobody reads. Memory that the second guards is not written before the next reduction or
gather of written weights, which wait for compute themselves.
"""


def pb068_memory_reused_before_a_reduction_has_read_it() -> str:
    """Slow reductions, while compute takes back and overwrites whatever is free after backward."""
    return bits_are_equal(
        {
            "slow reductions": Program(slow=("reduce_scatter",)),
            "slow reductions, weights kept": Program(slow=("reduce_scatter",), policy=KEEP),
            "slow reductions of small buffers": Program("groups", slow=("reduce_scatter",), policy=KEEP),
        }
    )


def pb069_two_buffers_of_packed_gradients() -> str:
    """Six units of three groups each take turns at two packed buffers while reductions are slow."""
    for policy in (SchedulePolicy(), KEEP):
        outcome = train(Program("groups", slow=("reduce_scatter",), policy=policy))
        assert num_different(outcome, "groups") == 0 and not outcome.races, outcome.races
        # A unit tells before it packs.
        assert outcome.max_packed == 2, f"{outcome.max_packed} units of packed gradients"
    return f"equal bits; at most {outcome.max_packed} units packed"


def pb070_compute_on_a_side_stream() -> str:
    """The whole step is issued on a side stream, while the default stream is idle."""
    return bits_are_equal(SIDE_STREAM)


def pb112_unit_larger_than_the_others() -> str:
    """A unit four times as large as the others, below a root with parameters."""
    return bits_are_equal(UNEVEN)


def pb068_places_that_do_not_move() -> str:
    """With a trace pool memory is reused in fixed places, whichever stream is slow."""
    return bits_are_equal(POOL)


def one_stream_or_several() -> str:
    """Prefetch, unification and the speed of streams change no bit."""
    return bits_are_equal(STREAMS)


def waits_are_known() -> str:
    """What follows leaves out every wait that there is."""
    sites = train(Program()).sites
    assert sites == {*WAITS, *INVISIBLE}, f"waits of {sorted(sites)}, programs for {sorted(WAITS)}"
    return ", ".join(sorted(sites))


def wait_is_needed(wait: str) -> str:
    """With its delay in place, the program is right, and wrong without the wait."""
    program = WAITS[wait]
    intact = train(program)
    assert num_different(intact, program.kind) == 0 and not intact.races, intact.races
    outcome = train(replace(program, dropped_wait=wait))
    number, total = num_different(outcome, program.kind), len(outcome.tensors)
    if IS_DRY:
        assert outcome.races
        return f"without it {len(outcome.races)} races"
    assert number > 0, f"without it 0 of {total} tensors differ"
    return f"without it {number} of {total} tensors differ"


_CASES: list[Callable[[], str]] = [
    one_stream_or_several,
    pb068_memory_reused_before_a_reduction_has_read_it,
    pb069_two_buffers_of_packed_gradients,
    pb068_places_that_do_not_move,
    pb070_compute_on_a_side_stream,
    pb112_unit_larger_than_the_others,
    waits_are_known,
]
CHECKS = [Check(case.__name__, case) for case in _CASES]
CHECKS += [Check(f"wait_in_{wait.strip('_')}_is_needed", wait_is_needed, (wait,)) for wait in WAITS]
