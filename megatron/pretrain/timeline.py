# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads from a trace of torch's profiler what ran when, and how much communication had no compute beside it.

It records and draws nothing. Where the trace has kernels, those of NCCL are communication and all others compute;
in a trace of CPUs, gloo's calls are communication and torch's operators compute.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
"""An entry of ``traceEvents``; ``ts`` and ``dur`` are in microseconds."""

Interval = tuple[float, float]

ALL_GATHER, COMPUTE, REDUCE_SCATTER, OTHER = "all-gather", "compute", "reduce-scatter", "other communication"
LANES = (ALL_GATHER, COMPUTE, REDUCE_SCATTER, OTHER)
STEP_PREFIX = "fsdp.step "
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# What FSDP v2 and PyTorch's fully_shard call the stretches in which a unit's communication is issued.
_UNIT_RANGE = re.compile(
    r"fsdp\.(?P<verb>unshard|reduce) (?P<unit>.*)"
    r"|FSDP::(?P<other_verb>all_gather|post_backward_reduce)(?: \((?P<other_unit>.*)\))?"
)


@dataclass(frozen=True)
class Span:
    """A stretch of time in microseconds, and what ran in it."""

    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Step:
    """One step: when it ran, in microseconds, and the spans of each of LANES."""

    name: str
    start: float
    end: float
    lanes: dict[str, list[Span]]


@dataclass(frozen=True)
class LaneTime:
    """Milliseconds a step in which a lane is busy, and those of them in which no compute runs."""

    busy_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Exposure:
    """How much of the steps' communication is not hidden, in milliseconds a step.

    Attributes:
        num_steps: over how many steps the mean is taken.
        step_ms: how long a step takes.
        communication: all kinds of it together.
        lanes: each kind that there is.
    """

    num_steps: int
    step_ms: float
    communication: LaneTime
    lanes: dict[str, LaneTime]

    @property
    def share(self) -> float:
        """The part of a step in which communication runs and no compute."""
        return self.communication.exposed_ms / self.step_ms

    def __str__(self) -> str:
        if not self.lanes:
            return f"no communication in {self.num_steps} steps of {self.step_ms:.2f} ms"
        kinds = ", ".join(f"{name} {time.exposed_ms:.2f} of {time.busy_ms:.2f}" for name, time in self.lanes.items())
        exposed = f"{self.communication.exposed_ms:.2f} ms a step, {100 * self.share:.1f}% of {self.step_ms:.2f} ms"
        return f"exposed communication: {exposed} ({kinds}; mean of {self.num_steps} steps)"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches of time without overlaps, in order: [(0, 2), (5, 6), (1, 3)] is [(0, 3), (5, 6)]."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def difference(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return what of some stretches of time lies in no other: [(2, 6)] without [(0, 3), (5, 9)] is [(3, 5)]."""
    remaining: list[Interval] = []
    theirs = union(others)
    first = 0
    for start, end in union(intervals):
        while first < len(theirs) and theirs[first][1] <= start:
            first += 1
        index = first
        while index < len(theirs) and theirs[index][0] < end:
            if start < theirs[index][0]:
                remaining.append((start, theirs[index][0]))
            start = max(start, theirs[index][1])
            index += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def length(intervals: Iterable[Interval]) -> float:
    """Return how long some stretches of time are together."""
    return sum(end - start for start, end in union(intervals))


def intervals_of(spans: Iterable[Span]) -> list[Interval]:
    """Return the spans without their labels."""
    return [(span.start, span.end) for span in spans]


def read_steps(events: Iterable[Event]) -> list[Step]:
    """Sort the events of a trace into steps and lanes.

    Args:
        events: ``traceEvents`` of one rank's trace, recorded with ranges that are called STEP_PREFIX and a number.

    Returns:
        The steps in order. A span that crosses the border of a step is cut there.

    Raises:
        ValueError: The trace has no steps.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    named = [event for event in complete if event.get("cat") == "user_annotation"]
    borders = [event for event in named if event["name"].startswith(STEP_PREFIX)]
    if not borders:
        raise ValueError(
            f"Timeline: expected ranges called {STEP_PREFIX}and a number, got none for the trace. "
            "Record it with --profile-schedule."
        )
    lanes = _read_lanes(complete, named)
    return [
        Step(border["name"].removeprefix(STEP_PREFIX), *_interval(border), _cut(lanes, *_interval(border)))
        for border in sorted(borders, key=_interval)
    ]


def measure(steps: Sequence[Step]) -> Exposure:
    """Return the mean over steps of how long communication runs, and how long it does without compute."""
    count = 1e3 * len(steps)
    kinds = [lane for lane in LANES if lane != COMPUTE and any(step.lanes[lane] for step in steps)]

    def time_of(lanes: Sequence[str]) -> LaneTime:
        busy = sum(length(_of_lanes(step, lanes)) for step in steps)
        exposed = sum(length(exposed_in(step, lanes)) for step in steps)
        return LaneTime(busy / count, exposed / count)

    step_ms = sum(step.end - step.start for step in steps) / count
    return Exposure(len(steps), step_ms, time_of(kinds), {lane: time_of([lane]) for lane in kinds})


def exposed_in(step: Step, lanes: Sequence[str] = (ALL_GATHER, REDUCE_SCATTER, OTHER)) -> list[Interval]:
    """Return when one of the lanes is busy and compute is not."""
    return difference(_of_lanes(step, lanes), intervals_of(step.lanes[COMPUTE]))


def _of_lanes(step: Step, lanes: Sequence[str]) -> list[Interval]:
    return [interval for lane in lanes for interval in intervals_of(step.lanes[lane])]


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _read_lanes(complete: list[Event], named: list[Event]) -> dict[str, list[Span]]:
    """Return the spans of each lane over the whole trace."""
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    if kernels:
        communication = [event for event in kernels if "nccl" in event["name"].lower()]
        compute = [event for event in kernels if "nccl" not in event["name"].lower()]
    else:
        communication = [event for event in named if event["name"].startswith("gloo:")]
        compute = [event for event in complete if event["name"].startswith("aten::")]
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in complete
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    ranges = sorted((event for event in named if _UNIT_RANGE.fullmatch(event["name"])), key=_interval)
    starts = [event["ts"] for event in ranges]
    lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
    lanes[COMPUTE] = [Span(*interval, COMPUTE) for interval in union(_interval(event) for event in compute)]
    for event in sorted(communication, key=_interval):
        issued = launches.get(event.get("args", {}).get("correlation"), event["ts"])
        index = bisect_right(starts, issued) - 1
        is_inside = index >= 0 and issued <= _interval(ranges[index])[1]
        lane, label = _classify(event["name"], ranges[index]["name"] if is_inside else None)
        lanes[lane].append(Span(*_interval(event), label))
    return lanes


def _classify(name: str, unit_range: str | None) -> tuple[str, str]:
    """Return lane and label of one communication; an all-reduce of a unit's gradients counts as reduce-scatter."""
    found = None if unit_range is None else _UNIT_RANGE.fullmatch(unit_range)
    verb = (found["verb"] or found["other_verb"]) if found else ""
    unit = (found["unit"] or found["other_unit"] or "root") if found else ""
    letters = name.lower().replace("_", "")
    if "allgather" in letters:
        lane = ALL_GATHER
    elif "reducescatter" in letters or "reduce" in verb:
        lane = REDUCE_SCATTER
    else:
        lane = OTHER
    return lane, f"{unit}: {name}" if unit else name


def _cut(lanes: dict[str, list[Span]], start: float, end: float) -> dict[str, list[Span]]:
    """Return the parts of all spans between two times."""
    return {
        lane: [
            Span(max(span.start, start), min(span.end, end), span.label)
            for span in spans
            if span.start < end and span.end > start
        ]
        for lane, spans in lanes.items()
    }
