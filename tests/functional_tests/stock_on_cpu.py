# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs examples/megatron_fsdp/pretrain_stock.py, unchanged, on a host without CUDA.

megatron-core's training loop wants CUDA in more places than its models do: for the process groups, the random number
generators and numbers that it logs. Here they are given what the host has; what the loop trains with is its own.
With ``--by-provider`` as the first word the model comes from a function, as in older scripts, and not from a config.
"""

import functools
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch

from megatron.pretrain import cpu
from megatron.pretrain.main import ignore_expected_warnings

EXAMPLE = Path(__file__).parents[2] / "examples/megatron_fsdp/pretrain_stock.py"
BY_PROVIDER = "--by-provider"
_MODULES = (
    "core.rerun_state_machine",
    "core.timers",
    "training.checkpointing",
    "training.training",
    "training.utils.common_utils",
)


def main() -> None:
    """Run the example with this process's command line."""
    ignore_expected_warnings()
    cpu.install()
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(major=9, minor=0)
    cpu.read_cuda_as_cpu(f"megatron.{name}" for name in _MODULES)
    _start_without_cuda()
    if sys.argv[1] == BY_PROVIDER:
        del sys.argv[1]
        _give_a_provider()
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def _start_without_cuda() -> None:
    """Let the loop initialise on a host, with the process groups and seeds that it makes where there is CUDA."""
    from megatron.training import initialize, training

    # It compiles what CUDA kernels would be fused of, which no model here uses.
    training.set_jit_fusion_options = lambda tp_size: None
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    initialize._initialize_distributed = _as_with_a_device(initialize._initialize_distributed)
    initialize._set_random_seed = _as_with_a_device(initialize._set_random_seed)


def _as_with_a_device(function: Any) -> Any:
    """Return a function that finds one device, which it uses through what the CPU shim has replaced."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        count, set_device = torch.cuda.device_count, torch.cuda.set_device
        torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda device: None
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.device_count, torch.cuda.set_device = count, set_device

    return run


def _give_a_provider() -> None:
    """Let pretrain() get a function that builds the model, instead of the model's config."""
    import megatron.training
    from megatron.training.models.gpt import GPTModelBuilder

    pretrain = megatron.training.pretrain

    def with_provider(container: Any, *args: Any) -> None:
        builder, container.model = GPTModelBuilder(container.model), None

        def provide(pg_collection: Any, config: Any = None, **where: Any) -> Any:
            assert config is None
            return builder.build_model(pg_collection, **where)

        pretrain(container, *args, model_provider=provide)

    megatron.training.pretrain = with_provider


if __name__ == "__main__":
    main()
