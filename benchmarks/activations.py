# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Trains as pretrain_gpt.py does, with the same flags, and prints how many bytes autograd holds at most:

    torchrun --nproc_per_node 2 benchmarks/activations.py --use-megatron-fsdp-v2 --recompute-granularity selective

Counted is what operations keep for their backward, each memory once, without weights; what is recomputed counts while
it is kept. Ranks print their own figures. Gradients and what kernels use inside do not count.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from megatron.pretrain.main import ignore_expected_warnings, pretrain, read_command


class Meter:
    """Knows which memory autograd holds."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._held: dict[int, list[Any]] = {}

    def keep(self, tensor: torch.Tensor) -> Any:
        """Take in what an operation saves; called by autograd.

        Weights are left out: their memory is there in any case, or is gathered again.
        """
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        # Detached: an output would hold the node that holds it.
        kept = Kept(self, tensor.detach())
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage, _ in self._held.values()))
        return kept

    def add(self, tensor: torch.Tensor, times: int) -> None:
        """Count one user more, or less, of a tensor's memory."""
        storage = tensor.untyped_storage()
        entry = self._held.setdefault(storage._cdata, [storage, 0])
        entry[1] += times
        if not entry[1]:
            del self._held[storage._cdata]


class Kept:
    """A tensor that an operation has saved, until autograd drops it."""

    def __init__(self, meter: Meter, tensor: torch.Tensor) -> None:
        self.meter, self.tensor = meter, tensor
        meter.add(tensor, 1)

    def __del__(self) -> None:
        self.meter.add(self.tensor, -1)


def give_back(kept: Any) -> torch.Tensor:
    """Return what was saved; called by autograd."""
    return kept.tensor if isinstance(kept, Kept) else kept


def main() -> None:
    """Train, and print this rank's figure."""
    command = read_command(sys.argv[1:], os.environ)
    ignore_expected_warnings()
    if not torch.cuda.is_available():
        from megatron.pretrain.cpu import install

        install()
    meter = Meter()
    with torch.autograd.graph.saved_tensors_hooks(meter.keep, give_back):
        pretrain(command)
    print(f"rank {command.place.rank}: held for backward at most (bytes): {meter.peak_bytes}", flush=True)


if __name__ == "__main__":
    main()
