# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`capture_iteration`: a whole training iteration, optimizer and collectives included, as one CUDA graph.

It decides when to capture, what is copied before a replay, and what Python must be told after it. What the iteration
does is the caller's function; how units gather and reduce is the schedule's, and is the same as without a graph.

[Note: what a replay may rely on]
A graph repeats kernels on addresses. What lives from one iteration to the next has to stay where it is: main weights,
compute weights, optimizer state, and the static copies of inputs and learning rates, all of them made outside of the
graph. Everything else (gathered weights, gradients, activations) is allocated during the capture from the graph's own
pool. A capture refreshes all compute weights, whoever has written the main ones, and Python learns after each replay
that they have been stepped. So evaluation, checkpoints and loads in place may come between replays.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .graph_device import graph_device
from .module import FsdpModule

MAX_GRAPHS = 8
"""Graphs that are kept for different inputs and settings; the one that was replayed longest ago goes first."""

_PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of optimizer settings that a captured kernel has as constants."""


def capture_iteration(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    step_fn: Callable[..., Any],
    example_inputs: Sequence[torch.Tensor],
    *,
    warmup: int = 3,
    generators: Sequence[torch.Generator] = (),
) -> CapturedIteration:
    """Return a function that does what `step_fn` does, from its fourth call on by replaying one CUDA graph.

    Every call is one training step. The first `warmup` calls run `step_fn` as it is, the next one captures it and
    replays it. All ranks must make the same calls.

    Args:
        model: a sharded model, or several of them.
        optimizer: an adapted optimizer with ``capturable=True`` where it has that option; with ``fused=True`` a graph
            gives the bits of an eager step whose learning rate is a float32 number.
        step_fn: takes tensors like `example_inputs` and runs one whole iteration: all microbatches, clipping,
            `optimizer.step()` and `zero_grad()`. It may not wait for the device (``item()``, printing a loss). What it
            does in Python happens at the capture only, so that schedulers are stepped outside.
        example_inputs: tensors of the shapes, dtypes and device of the inputs. A number that changes, such as a
            clipping norm, is passed as a 0-d tensor.
        warmup: steps before the capture, >= 1; they create optimizer state and communicators.
        generators: those of random numbers on the device that `step_fn` uses besides the default one.

    Returns:
        A `CapturedIteration`; call it with new inputs.

    Raises:
        TypeError: a model without units, an optimizer that is not adapted, inputs that are no tensors.
        ValueError: `warmup` is out of range, or the optimizer is not capturable.
        NotImplementedError: the model is on a device without CUDA graphs.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    units = [unit for root in models for unit in root.modules() if isinstance(unit, FsdpModule)]
    if not units:
        raise TypeError("capture_iteration model: expected a sharded model, got one without units. Call fully_shard.")
    if not hasattr(optimizer, "_fsdp_step"):
        raise TypeError(
            f"capture_iteration optimizer: expected an adapted optimizer, got {type(optimizer).__name__}. Pass what "
            "fully_shard_optimizer returns."
        )
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 1:
        raise ValueError(
            f"capture_iteration warmup: expected an int >= 1, got {warmup!r}; the steps before the capture create what "
            "has to lie outside of the graph."
        )
    stuck = [index for index, group in enumerate(optimizer.param_groups) if group.get("capturable") is False]
    if stuck:
        raise ValueError(
            f"capture_iteration optimizer: expected capturable=True, got False in param_groups {stuck}, whose step "
            f"count is on the host. Build {type(optimizer).__name__} with capturable=True."
        )
    return CapturedIteration(models, units, optimizer, step_fn, example_inputs, warmup, generators)


class CapturedIteration:
    """A training iteration that is replayed; see `capture_iteration`.

    Attributes:
        num_captures: how many graphs have been captured.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        units: Sequence[FsdpModule],
        optimizer: Any,
        step_fn: Callable[..., Any],
        example_inputs: Sequence[torch.Tensor],
        warmup: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        self._models = models
        self._optimizer = optimizer
        self._step_fn = step_fn
        self._num_inputs = len(example_inputs)
        self._eager_left = warmup
        self._contexts = list({id(unit.context): unit.context for unit in units}.values())
        self._groups = [group for unit in units for group in unit.parameter_groups]
        self._device = graph_device(self._contexts[0].device, generators)
        self._rates = [_LearningRate(group, self._contexts[0].device) for group in optimizer.param_groups]
        self._iterations: dict[Any, _Iteration] = {}
        self._state: list[Any] = []
        self.num_captures = 0
        self._check(example_inputs)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run one iteration on new inputs; no host synchronisation.

        Args:
            inputs: tensors as `step_fn` takes them; other shapes are captured anew.

        Returns:
            What `step_fn` returns, with tensors that the next call leaves alone.

        Raises:
            TypeError: another number of inputs, or inputs that are no tensors.
            RuntimeError: `step_fn` does what no graph can hold; the model is at rest then, and unchanged.
        """
        self._check(inputs)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.follow(group)
        if self._eager_left:
            self._eager_left -= 1
            return self._device.run(lambda: self._run(inputs))
        key = self._key(inputs)
        iteration = self._iterations.pop(key, None)
        if iteration is None or self._has_other_state():
            iteration = self._capture(inputs)
        self._iterations[key] = iteration
        result = iteration(inputs)
        for group in self._groups:
            group.begin_step()
            group.mark_main_weight_written()
        return result

    def release(self) -> None:
        """Give the graphs' memory back; the next call captures anew. Call it before the process group is destroyed."""
        self._iterations.clear()

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != self._num_inputs or not all(isinstance(value, torch.Tensor) for value in inputs):
            kinds = [type(value).__name__ for value in inputs]
            raise TypeError(
                f"inputs of a captured iteration: expected {self._num_inputs} tensors, got {kinds}. Pass what changes "
                "between iterations as tensors, numbers as 0-d ones."
            )

    def _key(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return all that a graph has as constants."""
        shapes = tuple((value.shape, value.dtype, value.requires_grad) for value in inputs)
        settings = tuple(
            tuple((name, value) for name, value in group.items() if name != "lr" and isinstance(value, _PLAIN))
            for group in self._optimizer.param_groups
        )
        modes = tuple(model.training for model in self._models)
        return shapes, settings, modes, sum(group.num_freezes for group in self._groups)

    def _has_other_state(self) -> bool:
        """Return whether the optimizer's state has been replaced, whose addresses the graphs have."""
        current = self._optimizer_state()
        is_same = len(current) == len(self._state) and all(map(is_, current, self._state))
        if not is_same:
            self._iterations.clear()
        return not is_same

    def _optimizer_state(self) -> list[Any]:
        return [value for state in self._optimizer.state.values() for value in state.values()]

    def _capture(self, inputs: Sequence[torch.Tensor]) -> _Iteration:
        while len(self._iterations) >= MAX_GRAPHS:
            self._iterations.pop(next(iter(self._iterations)))
        device = self._contexts[0].device
        static = [torch.empty_like(value, device=device).copy_(value) for value in inputs]
        for group in self._groups:
            group.mark_main_weight_written()
        try:
            replay, outputs = self._device.capture(lambda: self._run(static))
        except Exception as error:
            self._bring_to_rest()
            raise RuntimeError(
                f"capture_iteration: expected a step_fn that only issues work to the device, got {_describe(error)}. "
                "Leave out item(), print of a tensor, copies to the host and synchronisation, and whatever depends on "
                "values; step_fn itself can still be called."
            ) from error
        self._state = self._optimizer_state()
        self.num_captures += 1
        return _Iteration(static, replay, outputs)

    def _run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run `step_fn` with static learning rates, all streams forked from the current one and joined to it."""
        streams = [
            stream for context in self._contexts for stream in (context.allgather_stream, context.reduce_scatter_stream)
        ]
        current = self._contexts[0].current_stream()
        for stream in streams:
            # A stream belongs to the capture once it waits for one that does.
            stream.wait_stream(current)
        param_groups = self._optimizer.param_groups
        given = [group["lr"] for group in param_groups]
        try:
            for group, rate in zip(param_groups, self._rates, strict=True):
                group["lr"] = rate.static
            result = self._step_fn(*inputs)
        finally:
            for group, rate in zip(param_groups, given, strict=True):
                group["lr"] = rate
        for stream in streams:
            # A capture ends with all of its streams joined, one with a gather that nobody used included.
            current.wait_stream(stream)
        return result

    def _bring_to_rest(self) -> None:
        """Forget what a capture that failed has begun; nothing of it was executed."""
        # Graphs captured before have the random numbers of a generator that is replaced now.
        self._iterations.clear()
        for context in self._contexts:
            context.abandon()
        for group in self._groups:
            group.clear_gradients()


def _describe(error: BaseException) -> str:
    """Return what went wrong first, and where: the end of a capture that has failed raises once more."""
    while error.__context__ is not None:
        error = error.__context__
    trace = traceback.extract_tb(error.__traceback__)
    where = f" at {trace[-1].filename}:{trace[-1].lineno}" if trace else ""
    return f"{type(error).__name__}{where}: {str(error).partition(chr(10))[0]}"


class _Iteration:
    """One graph with the tensors that it reads and leaves."""

    def __init__(self, inputs: Sequence[torch.Tensor], replay: Callable[[], None], outputs: Any) -> None:
        self._inputs = inputs
        self._replay = replay
        self._outputs = outputs

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        with torch.no_grad():
            for static, value in zip(self._inputs, inputs, strict=True):
                static.copy_(value, non_blocking=True)
        self._replay()
        # The next replay writes over what this one has left.
        return tree_map_only(torch.Tensor, torch.Tensor.clone, self._outputs)


class _LearningRate:
    """A param_group's learning rate where graphs read it: 0-d float32, the type that fused kernels take."""

    def __init__(self, param_group: dict[str, Any], device: torch.device) -> None:
        self.static = torch.zeros((), dtype=torch.float32, device=device)
        self._last: float | None = None
        self.follow(param_group)

    def follow(self, param_group: dict[str, Any]) -> None:
        """Take what a scheduler or the user has set."""
        rate = param_group["lr"]
        if isinstance(rate, torch.Tensor):
            self.static.copy_(rate)
        elif rate != self._last:
            self.static.fill_(rate)
            self._last = rate
