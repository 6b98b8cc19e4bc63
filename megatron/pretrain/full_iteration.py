# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs training iterations as replays of one CUDA graph, for --cuda-graph-impl full_iteration.

What an iteration is, the loop decides; when to capture, the runtime.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states
from torch import nn

from megatron.core.distributed.fsdp.experimental import CapturedIteration, capture_iteration
from megatron.pretrain.data import Batch


def require_gpu() -> None:
    """Refuse to go on without a GPU.

    Raises:
        NotImplementedError: There is none.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError(
            "CUDA graphs: expected a GPU, got a host without one for --cuda-graph-impl full_iteration. Drop the flag."
        )


@dataclass(frozen=True)
class IterationResult:
    """What one iteration leaves on this rank.

    Attributes:
        losses: [microbatches, 2] float32; sum of the losses and number of tokens of each microbatch.
        is_updated: Whether the optimizer has stepped.
        grad_norm: None without clipping.
        num_zeros: None unless they are counted.
    """

    losses: torch.Tensor
    is_updated: bool
    grad_norm: Any
    num_zeros: Any


class FullIteration:
    """Runs iterations as they are during the warm-up, and replays them afterwards.

    Args:
        model: The wrapped model.
        optimizer: Megatron-Core's optimizer around the adapted one.
        run: Runs one iteration on microbatches.
        num_warmup: Iterations before the capture.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, run: Callable[[Iterator[Batch]], IterationResult], num_warmup: int
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._run = run
        self._num_warmup = num_warmup
        self._names: list[list[str]] = []
        self._captured: CapturedIteration | None = None

    def __call__(self, batches: Sequence[Batch]) -> IterationResult:
        """Run one iteration on new microbatches, with the same keys as in the first one."""
        inputs = [tensor for batch in batches for tensor in batch.values()]
        names = [list(batch) for batch in batches]
        if self._captured is None:
            self._names = names
            self._captured = capture_iteration(
                self._model,
                self._optimizer.optimizer,
                self._step,
                inputs,
                warmup=self._num_warmup,
                generators=[state for state in get_all_rng_states().values() if isinstance(state, torch.Generator)],
            )
        if names != self._names:
            raise RuntimeError(
                f"CUDA graphs: expected microbatches with {self._names[0]} each, got {names}. Drop --cuda-graph-impl."
            )
        losses, grad_norm = self._captured(*inputs)
        return IterationResult(losses, is_updated=True, grad_norm=grad_norm, num_zeros=None)

    def release(self) -> None:
        """Give the graphs' memory back; called before the process groups are destroyed."""
        if self._captured is not None:
            self._captured.release()
            # It holds this object, which would keep the model until Python looks for cycles.
            self._captured = None

    def _step(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        tensors = iter(inputs)
        batches = [{name: next(tensors) for name in names} for names in self._names]
        result = self._run(iter(batches))
        return result.losses, result.grad_norm
