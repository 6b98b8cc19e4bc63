# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs pretrain_gpt.py with a double in place of CUDA graphs, whose captures it counts on stderr at the end.

python -m tests.functional_tests.graph_on_the_host --use-megatron-fsdp-v2 --cuda-graph-impl full_iteration
"""

from __future__ import annotations

import os
import sys
from unittest.mock import patch

from megatron.pretrain.main import ignore_expected_warnings, pretrain, read_command


def main() -> None:
    command = read_command(sys.argv[1:], os.environ)
    ignore_expected_warnings()
    from megatron.pretrain.cpu import install

    install()
    import torch

    from megatron.core.optimizer import fully_sharded_optimizer, fully_sharded_optimizer_muon
    from megatron.pretrain import training
    from tests.unit_tests.graph_double import RepeatingDevice, graphs_on_the_host

    seed = training._seed_everything
    base_optimizer = fully_sharded_optimizer.base_optimizer
    captures: list[RepeatingDevice] = []

    def for_gpus(config, groups, device):
        return base_optimizer(config, groups, torch.device("cuda"))

    with (
        graphs_on_the_host(),
        patch.object(training, "require_gpu", lambda: None),
        patch.object(training, "_seed_everything", lambda number, is_captured: seed(number, False)),
        patch.object(RepeatingDevice, "capture", _counted(captures)),
        # The one for GPUs is fused, with its step count and learning rate in tensors.
        patch.object(fully_sharded_optimizer, "base_optimizer", for_gpus),
        patch.object(fully_sharded_optimizer_muon, "base_optimizer", for_gpus),
    ):
        pretrain(command)
    print(f"captures: {len(captures)}", file=sys.stderr)


def _counted(captures: list) -> object:
    from tests.unit_tests.graph_double import RepeatingDevice

    capture = RepeatingDevice.capture

    def counted(self, function):
        captures.append(self)
        return capture(self, function)

    return counted


if __name__ == "__main__":
    main()
