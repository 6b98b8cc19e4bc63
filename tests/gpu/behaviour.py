# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs the unit tests of parity and behaviour on GPUs: the same tests, with NCCL and a GPU for each rank.

    FSDP_TEST_DEVICE=cuda python -m tests.gpu.behaviour [pytest options]

Tests that ask for more ranks than there are GPUs are skipped and counted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

import pytest

from tests.gpu.checks import print_line

TESTS = Path(__file__).parents[1] / "unit_tests"

# Files whose tests have nothing to do with the device, or cannot leave the host, and why.
HOST_ONLY = {
    "test_architecture.py": "reads source text",
    "test_documents.py": "reads documents",
    "test_layout.py": "computes with integers",
    "test_layout_report.py": "computes with integers",
    "test_matrix_report.py": "computes with integers",
    "test_values.py": "looks at values without tensors",
    "test_cases.py": "reads source text",
    "test_schedule.py": "puts vector clocks in place of host streams; races.py asks the same of real streams",
    "test_learnt_order.py": "puts vector clocks in place of host streams",
    "test_newton_schulz.py": "compares hosts with a decomposition; test_muon.py runs it on GPUs",
    "test_matrix_blocks.py": "computes with integers",
    "test_matrix_plan.py": "computes with integers",
    "test_plain_muon.py": "steps without ranks, on the host",
    "test_trace_pool.py": "puts vector clocks in place of host streams; races.py and memory.py have real ones",
    "test_secondary_shard.py": "puts doubles in place of streams and graphs, on four ranks",
    "test_slot_plan.py": "computes with integers",
    "test_number_formats.py": "compares hosts with numpy; number_formats.py compares GPUs with hosts",
    "test_symmetric_memory.py": "puts a double in place of NCCL's memory",
    "test_graph.py": "puts a double in place of CUDA graphs; graphs.py captures real ones",
    "test_graph_state.py": "puts a double in place of CUDA graphs; graphs.py captures real ones",
    "test_unit_graph.py": "puts a double in place of CUDA graphs; unit_graphs.py captures real ones",
    "test_transformer_engine.py": "puts doubles in place of its classes; transformer_engine.py has the real ones",
    "test_compiling.py": "compiles for longer than all else takes",
    "test_megatron_training.py": "looks at the arguments of megatron-core's loop; stock_loop.py runs it",
    "test_fused_gradients.py": "runs megatron-core on hosts",
    "test_interchange.py": "runs megatron-core on hosts",
    "test_optimizer_strategies.py": "runs megatron-core on hosts; run.sh trains with it on GPUs",
    "test_fully_sharded_optimizer.py": "runs megatron-core on hosts; run.sh trains with it on GPUs",
}

# test_mcore_*.py, too, run megatron-core on hosts, by the CPU shim; run.sh trains with it on GPUs.
_HOST_ONLY_PREFIX = "test_mcore_"

# The same for single tests.
HOST_ONLY_TESTS = {
    "test_backend_failure_names_unit_and_operation": "gloo raises at a time-out, NCCL's watchdog ends the process",
    "test_a_failed_exchange_names_what_travels": "gloo raises at a time-out, NCCL's watchdog ends the process",
    "test_the_next_package_travels_before_one_is_computed_with": "puts vector clocks in place of host streams",
    "test_no_two_uses_of_a_buffer_are_unordered": "puts vector clocks in place of host streams",
    "test_every_wait_is_needed": "puts vector clocks in place of host streams",
    "test_what_waits_for_what": "puts vector clocks in place of host streams, and a model of NCCL's order",
    "test_pb073_environment_and_end_of_the_program": "starts gloo ranks of its own",
}


class _Lines:
    """Prints a line for each test in place of pytest's own report."""

    def __init__(self) -> None:
        self.counts = {"ok": 0, "FAILED": 0, "not run": 0}

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        items[:] = [item for item in items if item.originalname not in HOST_ONLY_TESTS]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print("FAILED", report.nodeid, report.longreprtext, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.failed:
            self._print("FAILED", name, report.longreprtext, report.duration)
        elif report.skipped:
            self._print("not run", name, str(report.longrepr[2]), report.duration)  # type: ignore[index]
        elif report.when == "call":
            self._print("ok", name, "", report.duration)

    def _print(self, status: str, name: str, detail: str, duration_s: float) -> None:
        self.counts[status] += 1
        print_line(status, f"behaviour.{name}", detail, time.monotonic() - duration_s)


def _is_host_only(name: str) -> bool:
    return name in HOST_ONLY or name.startswith(_HOST_ONLY_PREFIX)


def main() -> None:
    """Run the tests and print a summary; exit with an error if one failed or none ran."""
    signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", returncode=128 + number))
    files = [str(path) for path in sorted(TESTS.glob("test_*.py")) if not _is_host_only(path.name)]
    lines = _Lines()
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts=", *sys.argv[1:]]
    code = pytest.main([*files, *options], plugins=[lines])
    print(", ".join(f"{number} {status}" for status, number in lines.counts.items()), flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
