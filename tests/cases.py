# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Failures that users of sharded runtimes have reported, and the tests that show what is right here.

    python -m tests.cases

writes docs/cases.md. A test belongs to a case by its name (`test_pb009_…`; on GPUs `check_pb068_…` or `pb068_…` in
tests/gpu), which is read from the source: nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/cases.md"

RUNTIME = "runtime"
LAYOUTS = "parallel layouts"
SCOPES = {
    RUNTIME: "Every case has a test.",
    LAYOUTS: "Tensor, context and expert parallelism beside data parallelism.",
}

_OTHER_OPERATIONS = "or use the parameter inside its unit's forward"
_DIAGNOSED = "a call that others do not make is diagnosed by MEGATRON_FSDP_CHECK_RANKS"


@dataclass(frozen=True)
class Case:
    """One reported failure.

    Attributes:
        number: its number; case 9 is PB-009.
        kind: what users saw: silent, hang, crash, memory or ergonomics.
        title: what went wrong elsewhere.
        scope: a key of `SCOPES`.
        note: what is handled and how, where that needs words.
        refused: words of the error, as they stand in the source, where the answer is a refusal.
    """

    number: int
    kind: str
    title: str
    scope: str = RUNTIME
    note: str = ""
    refused: str = ""

    @property
    def name(self) -> str:
        """The number as the tests spell it."""
        return f"pb{self.number:03}"

    @property
    def verdict(self) -> str:
        """What is right here."""
        if not self.refused:
            return f"handled: {self.note}" if self.note else "handled"
        refusal = f"refused: `{self.refused}`"
        return f"handled: {self.note}; otherwise {refusal}" if self.note else refusal


CASES = (
    # Reduction, scaling, accumulation
    Case(1, "silent", "averaging on gloo sums", note="gradients are divided before a sum"),
    Case(2, "silent", "a group of one rank doubles gradients"),
    Case(4, "silent", "hybrid sharding keeps the last microbatch only"),
    Case(5, "silent", "partial sums never cross the replicas"),
    Case(7, "silent", "the outer reduction is not finished at the step"),
    Case(8, "silent", "the unsharded strategy reduces nothing"),
    Case(9, "silent", "a parameter unused in a step stops its unit's reduction", note="what is unused gets zeros"),
    Case(12, "silent", "a unit called twice in one forward reduces too early"),
    Case(
        13,
        "silent",
        "reduced and unreduced microbatches mix",
        note="every microbatch is reduced",
        refused="expected gradients of all microbatches, got a last backward",
    ),
    Case(
        16,
        "silent",
        "kernels that add into the main gradient lose microbatches",
        note="kernels that ask get_main_grad() write where it says",
        refused="expected gradients in .grad, or where get_main_grad() says, got",
    ),
    Case(17, "silent", "expert gradients miss a divisor", note="a unit has a mesh and a divisor of its own"),
    # Weights, precision, optimizer
    Case(19, "silent", "compute weights are stale after a step"),
    Case(20, "silent", "compute weights are stale after a load"),
    Case(21, "silent", "load_state_dict(assign=True) is lost", refused="expected assign=False, got"),
    Case(22, "silent", "creating optimizer state changes the first update"),
    Case(23, "silent", "microbatches accumulate in a narrow dtype"),
    Case(25, "silent", "the communication dtype is not the one that was asked for"),
    Case(28, "silent", "the optimizer holds parameters from before wrapping", refused="Build the optimizer after"),
    Case(31, "silent", "two parameter groups collapse at load", note="groups are matched by parameter names"),
    Case(
        33,
        "silent",
        "matrix optimizers on shards",
        note="fully_shard_muon steps whole matrices",
        refused="expected an element-wise optimizer such as AdamW",
    ),
    Case(34, "silent", "casting an output detaches it", note="outputs are never cast"),
    Case(35, "silent", "casting inputs loses precision", note="inputs are never cast"),
    # Norms and non-finite values
    Case(37, "silent", "the gradient norm of one rank is returned"),
    Case(38, "silent", "the gradient norm counts replicas", note="summed over the axes that shard"),
    Case(
        39,
        "silent",
        "the norm counts replicated or ignored parameters wrongly",
        LAYOUTS,
        note="tied, frozen and plain ones, experts and pieces, for every strategy",
    ),
    Case(40, "silent", "norm and clipping read another gradient than the optimizer"),
    Case(43, "silent", "only one rank skips an overflowing step"),
    # Layout and views
    Case(44, "silent", "uneven shards are saved as even ones"),
    Case(45, "silent", "padding shifts saved optimizer state"),
    Case(48, "silent", "uneven shards gather into wrong tensors", note="gathering", refused=_OTHER_OPERATIONS),
    Case(50, "silent", "shards of parameters with more than two dims"),
    Case(52, "silent", "rows permuted under tensor parallelism", LAYOUTS),
    Case(53, "silent", "fused tensors cut by shard borders"),
    # Ties, start values, hooks
    Case(
        55,
        "silent",
        "rows of a weight tied across units never move",
        note="as one unit",
        refused="a weight tied across two units",
    ),
    Case(56, "silent", "a weight tied inside one unit splits or counts twice"),
    Case(58, "silent", "meta parameters stay uninitialised", note="initialised as in an ordinary start"),
    Case(60, "silent", "ranks start from different weights", note="a warning names the first unit"),
    Case(62, "silent", "a sharded parameter is read outside its unit", refused=_OTHER_OPERATIONS),
    Case(
        63,
        "silent",
        "forward or another method bypasses the hooks",
        note="methods can be registered",
        refused=_OTHER_OPERATIONS,
    ),
    Case(66, "silent", "recomputation leaves a unit gathered"),
    # Races on GPUs
    Case(68, "silent", "memory is reused on another stream"),
    Case(69, "silent", "a staging buffer is refilled too early"),
    Case(70, "silent", "communication waits for the default stream only"),
    Case(
        71,
        "silent",
        "expert gradients are wrong now and then",
        LAYOUTS,
        note="the same bits in every run on CPUs; not tried on GPUs",
    ),
    # Hangs
    Case(72, "hang", "the order of collectives follows hashes"),
    Case(73, "hang", "a unit runs on some ranks only", note=_DIAGNOSED),
    Case(
        74,
        "hang",
        "an expert without tokens",
        note="no rows are fine; " + _DIAGNOSED,
    ),
    Case(75, "hang", "ranks call units in different orders", note=_DIAGNOSED),
    Case(78, "hang", "ranks without shards save other state"),
    Case(80, "hang", "ranks without elements leave early"),
    Case(82, "hang", "one rank alone inspects the model"),
    # Crashes
    Case(84, "crash", "two forwards, then two backwards"),
    Case(
        86, "crash", "two backwards over one graph", note="and gradients of inputs", refused="expected an element-wise"
    ),
    Case(
        89,
        "crash",
        "structured outputs hide tensors",
        note="tuples, lists, mappings and dataclasses",
        refused="in which tensors that need gradients cannot be found",
    ),
    Case(91, "crash", "outputs or parameters without gradient"),
    Case(93, "crash", "recomputation sees another dtype"),
    Case(
        96,
        "crash",
        "several dtypes in one unit",
        note="each is kept",
        refused="expected main_params_dtype at least as wide as",
    ),
    Case(97, "crash", "buffers under mixed precision", note="buffers keep their dtype and are each rank's own"),
    Case(98, "crash", "frozen and trainable parameters in one unit"),
    Case(99, "crash", "scalars, empty parameters, containers", note="all but scalars", refused="got the scalar"),
    Case(100, "crash", "a full state into an uneven model", refused="expected assign=False, got"),
    Case(
        102,
        "crash",
        "foreach and fused optimizers over mixed parameters",
        note="sharded ones, on several meshes",
        refused="which belongs to no unit",
    ),
    Case(103, "crash", "gradients of another dtype than their parameters", note="cast by an adapted optimizer"),
    Case(107, "crash", "tied names in checkpoints"),
    Case(108, "crash", "calls by keyword or without tensors"),
    Case(
        109,
        "crash",
        "a container computes with its children's weights",
        note="if the container is the unit",
        refused=_OTHER_OPERATIONS,
    ),
    Case(
        111,
        "crash",
        "compiled modules and graphs",
        note="torch.compile, with graph breaks at units: docs/compile.md; "
        "whole iterations in one CUDA graph: docs/cuda_graphs.md",
        refused="expected a mode without CUDA graphs",
    ),
    Case(112, "crash", "a unit larger than the pool", note="in a trace pool it has a place of its own size"),
    # Memory
    Case(113, "memory", "frozen units stay gathered in backward"),
    Case(114, "memory", "a deleted model keeps its memory"),
    Case(118, "memory", "the whole model is materialised before sharding"),
    # Ergonomics
    Case(119, "ergonomics", "options that do nothing", refused="strategy: expected one of"),
    Case(120, "ergonomics", "local shapes leak to tools", note="shapes are logical"),
    Case(121, "ergonomics", "wrapping in a wrong order", refused="Call fully_shard once per module"),
    Case(
        122,
        "ergonomics",
        "a bad RANK becomes rank 0",
        note="the group's rank counts",
        refused="expected an integer >= 0, got",
    ),
    Case(123, "ergonomics", "an adapter lacks a keyword of the trainer"),
)

_TEST_NAME = re.compile(r"test_(pb\d+)")
_GPU_NAME = re.compile(r"(?:check_|test_)?(pb\d+)")


def find_tests(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the names of the tests of each case, e.g. {"pb009": ["test_pb009_partly_used_unit"]}.

    Args:
        root: the repository.
    """
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("*.py")):
        is_gpu = "gpu" in path.relative_to(root).parts
        for function in _functions(path):
            match = (_GPU_NAME if is_gpu else _TEST_NAME).match(function)
            if match:
                found.setdefault(match[1], []).append(f"{function} (GPU)" if is_gpu else function)
    return found


def _functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef):
            yield node.name


def missing(tests: dict[str, list[str]]) -> list[str]:
    """Return the cases in scope that have no test."""
    return [case.name for case in CASES if case.scope == RUNTIME and case.name not in tests]


def render(tests: dict[str, list[str]]) -> str:
    """Return the text of docs/cases.md."""
    lines = [
        "# Cases",
        "",
        "Failures that users of sharded runtimes have reported, what is right here, and the tests that show it.",
        "`python -m tests.cases` writes this page from `tests/cases.py` and the names of the tests;",
        "`python -m pytest -k pb009` runs the tests of one case, `tests/gpu/run.sh` those on GPUs.",
    ]
    for scope, sentence in SCOPES.items():
        cases = [case for case in CASES if case.scope == scope]
        lines += ["", f"## {scope[0].upper()}{scope[1:]}", "", f"{sentence} {len(cases)} cases.", ""]
        lines += ["| case | kind | what is right here | tests |", "|---|---|---|---|"]
        for case in cases:
            names = "<br>".join(f"`{name}`" for name in tests.get(case.name, [])) or "-"
            lines.append(f"| PB-{case.number:03} {case.title} | {case.kind} | {case.verdict} | {names} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write docs/cases.md and say which cases have no test."""
    tests = find_tests()
    DOCUMENT.write_text(render(tests))
    print(f"{len(CASES)} cases; in scope without a test: {', '.join(missing(tests)) or 'none'}")


if __name__ == "__main__":
    main()
