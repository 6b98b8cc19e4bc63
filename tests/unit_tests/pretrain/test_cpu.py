# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The shim changes torch for the whole process, so what needs it runs in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.pretrain import cpu

CHECKS = Path(__file__).with_name("with_cpu_shim.py")


def test_the_shim_is_refused_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(RuntimeError, match=r"expected a host without CUDA, got one with 3 CUDA"):
        cpu.install()


def test_importing_the_shim_changes_nothing() -> None:
    assert not cpu._installed
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_under_the_shim() -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHECKS)], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "8 checks passed"
