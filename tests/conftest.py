# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which tests each process of pytest-xdist runs (`make test`): whole files, which share ranks, fixtures and runs.

It has no effect on pytest without `-n`.
"""

from typing import Any

import pytest

SHARING_RUNS = {f"tests/functional_tests/test_{name}.py" for name in ("cases", "parity", "resume", "strategies")}
"""Files of which one process runs all: golden.py and launch_script.launch_once keep their runs of pretrain_gpt.py."""


def group_of(nodeid: str) -> str:
    """Return the tests that one process takes together with this one."""
    file = nodeid.split("::")[0]
    return "runs" if file in SHARING_RUNS else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # With pytest 9.2 the groups of xdist 3.8's --dist loadgroup are lost, without a word.
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)
