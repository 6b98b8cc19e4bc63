# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Units with graphs of their own, without a GPU: a double stands in for CUDA graphs. tests/gpu/unit_graphs.py has the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.unit_graphs import equals_eager
from tests.unit_tests.launch import run_ranks

CASES = [
    ("no_shard", None, 1),
    ("optim", None, 4),
    ("optim_grads", None, 4),
    ("optim_grads_params", None, 1),
    ("optim_grads_params", None, 4),
    ("optim_grads_params", "no_shard", 4),
    ("optim_grads_params", "optim", 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graphs_equal_eager_units(case: Any) -> None:
    run_ranks(2, equals_eager, *case)
