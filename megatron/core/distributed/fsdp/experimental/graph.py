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

import warnings
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .graph_device import FailedCaptureError, capture, graph_device
from .graph_state import LearningRate, OptimizerState, constant
from .graphed_forward import has_graphs
from .module import FsdpModule

MAX_GRAPHS = 8
"""Graphs that are kept for different inputs and settings; the one that was replayed longest ago goes first."""

_LEAVES = (torch.Tensor, bool, int, float, str, type(None))
"""What `step_fn` may return, in tuples, lists and dicts."""


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
        model: a sharded model, or all of those that `step_fn` runs.
        optimizer: an adapted optimizer with ``capturable=True`` where it has that option; with ``fused=True`` a graph
            gives the bits of an eager step whose learning rate is a float32 number.
        step_fn: takes tensors like `example_inputs` and runs one whole iteration: all microbatches, clipping,
            `optimizer.step()` and `zero_grad()`. It may not wait for the device (``item()``, printing a loss). What it
            does in Python happens at the capture only: schedulers are stepped outside, and numbers that it reads or
            returns stay what they were. It returns tensors, in tuples, lists and dicts.
        example_inputs: as many tensors as there are inputs, none of which requires gradients. A number that changes,
            such as a clipping norm, is passed as a 0-d tensor.
        warmup: steps before the capture, >= 1; they create optimizer state and communicators.
        generators: those of random numbers on the device that `step_fn` uses besides the default one.

    Returns:
        A `CapturedIteration`; call it with new inputs.

    Raises:
        TypeError: a model without units, an optimizer that is not adapted, inputs that are no tensors.
        ValueError: `warmup` is out of range, the optimizer is not capturable, an input requires gradients, or units
            have graphs of their own.
        NotImplementedError: the model is on a device without CUDA graphs.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    units = [unit for root in models for unit in root.modules() if isinstance(unit, FsdpModule)]
    _check_sharded(units, optimizer)
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 1:
        raise ValueError(
            f"capture_iteration warmup: expected an int >= 1, got {warmup!r}; the steps before the capture create what "
            "has to lie outside of the graph."
        )
    of_all = getattr(optimizer, "capturable", None)
    stuck = [index for index, group in enumerate(optimizer.param_groups) if group.get("capturable", of_all) is False]
    if stuck:
        raise ValueError(
            f"capture_iteration optimizer: expected capturable=True, got False in param_groups {stuck}, whose step "
            f"count is on the host. Build {type(optimizer).__name__} with capturable=True."
        )
    return CapturedIteration(models, units, optimizer, step_fn, example_inputs, warmup, generators)


def _check_sharded(units: Sequence[FsdpModule], optimizer: object) -> None:
    if not units:
        raise TypeError("capture_iteration model: expected a sharded model, got one without units. Call fully_shard.")
    if graphed := [unit.name for unit in units if has_graphs(unit)]:
        raise ValueError(
            f"capture_iteration model: expected units without cuda_graph=True, got {graphed[:3]}; one graph holds the "
            "whole iteration, theirs would have no effect. Build the units without it."
        )
    if not hasattr(optimizer, "_fsdp_step"):
        raise TypeError(
            f"capture_iteration optimizer: expected an adapted optimizer, got {type(optimizer).__name__}. Pass what "
            "fully_shard_optimizer returns."
        )


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
        self._units = units
        self._groups = [group for unit in units for group in unit.parameter_groups]
        self._modules = [module for root in models for module in root.modules()]
        device = self._contexts[0].device
        self._device = graph_device(device, generators, "capture_iteration", "Run step_fn itself there.")
        self._rates: list[LearningRate] = []
        self._iterations: dict[Any, _Iteration] = {}
        self._state: list[Any] = []
        self._num_moves: list[int] = []
        self.num_captures = 0
        self._check(example_inputs)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run one iteration on new inputs; no host synchronisation.

        Args:
            inputs: tensors as `step_fn` takes them; other shapes are captured anew. Pinned host memory may be written
                again only when the device has read it, as after any copy that does not block.

        Returns:
            What `step_fn` returns, with tensors that the next call leaves alone; those of a replay have no history.

        Raises:
            TypeError: another number of inputs, inputs that are no tensors, or results in unknown containers.
            ValueError: an input requires gradients.
            RuntimeError: `step_fn` does what no graph can hold; the model is at rest then, and unchanged.
        """
        self._check(inputs)
        self._follow_rates()
        if self._eager_left:
            self._eager_left -= 1
            return self._device.run(lambda: self._run(inputs))
        if self._has_moved():
            self._iterations.clear()
        key = self._key(inputs)
        iteration = self._iterations.pop(key, None) or self._capture(inputs)
        if iteration is None:
            return self._device.run(lambda: self._run(inputs))
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
        if needing := [index for index, value in enumerate(inputs) if value.requires_grad]:
            raise ValueError(
                f"inputs of a captured iteration: expected tensors without requires_grad, got it set for {needing}, "
                "whose gradients would not come back. Pass detach() of them, and ask for gradients inside step_fn."
            )

    def _follow_rates(self) -> None:
        """Take the learning rates that a scheduler or the user has set, of new param_groups, too."""
        param_groups = self._optimizer.param_groups
        while len(self._rates) < len(param_groups):
            self._rates.append(LearningRate(self._contexts[0].device))
        for group, rate in zip(param_groups, self._rates, strict=False):
            rate.follow(group)

    def _key(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return all that a graph has as constants."""
        shapes = tuple((value.shape, value.dtype) for value in inputs)
        settings = tuple(
            (len(group["params"]), *((name, constant(value)) for name, value in group.items() if name not in _VARYING))
            for group in self._optimizer.param_groups
        )
        modes = tuple(module.training for module in self._modules)
        units = tuple(_schedule_of(unit) for unit in self._units)
        contexts = tuple(
            (context.is_last_microbatch, context.is_finalized and context.learnt_order.num_changes)
            for context in self._contexts
        )
        return shapes, settings, modes, units, contexts, sum(group.num_freezes for group in self._groups)

    def _has_moved(self) -> bool:
        """Return whether something that graphs have the address of lies elsewhere: optimizer state, or a pool."""
        current = self._optimizer_state()
        is_same = len(current) == len(self._state) and all(map(is_, current, self._state))
        return not is_same or self._pool_moves() != self._num_moves

    def _optimizer_state(self) -> list[Any]:
        return [value for state in self._optimizer.state.values() for value in state.values()]

    def _pool_moves(self) -> list[int]:
        return [context.pool.num_moves for context in self._contexts if context.pool is not None]

    def _capture(self, inputs: Sequence[torch.Tensor]) -> _Iteration | None:
        """Return the captured iteration; None if the optimizer has to create state first, outside of a graph."""
        self._make_room()
        self._prepare()
        device = self._contexts[0].device
        with torch.no_grad():
            static = [torch.empty_like(value, device=device).copy_(value) for value in inputs]
        before, kept = OptimizerState(self._optimizer, device), self._kept_gradients()
        try:
            replay, outputs = capture(self._device, lambda: self._run(static))
        except BaseException as error:
            self._bring_to_rest(before)
            if not isinstance(error, FailedCaptureError):
                raise
            raise RuntimeError(
                f"capture_iteration: expected a step_fn that only issues work to the device, got {error}. "
                "Leave out item(), print of a tensor, copies to the host and synchronisation, and whatever depends on "
                "values; step_fn itself can still be called."
            ) from error
        has_grown, problem = before.has_grown(), before.problem()
        if problem is None and any(group.gradients and group.gradients.num_starts == num for group, num in kept):
            problem = (
                "capture_iteration step_fn: expected it to clear gradients to None, got some from before it that it "
                "keeps, whose memory may be freed between replays. Call zero_grad(set_to_none=True) in it."
            )
        if problem is not None or has_grown:
            self._bring_to_rest(before)
            if problem is not None:
                raise RuntimeError(problem)
            return None
        self._state, self._num_moves = self._optimizer_state(), self._pool_moves()
        self.num_captures += 1
        return _Iteration(static, replay, outputs)

    def _make_room(self) -> None:
        while len(self._iterations) >= MAX_GRAPHS:
            oldest = self._iterations.pop(next(iter(self._iterations)))
            if oldest.num_replays == 1:
                warnings.warn(
                    f"captured iteration: expected inputs and settings that come back, got more than {MAX_GRAPHS} "
                    "kinds of them, and a capture takes longer than a step. Pad inputs to fewer shapes, and keep the "
                    "optimizer's settings but the learning rate; or call step_fn itself.",
                    stacklevel=4,
                )

    def _prepare(self) -> None:
        """Let nothing that lives outside of the graph be read or freed inside it, and all weights be made anew.

        Raises:
            RuntimeError: gradients wait for a reduction.
        """
        for group in self._groups:
            if group.has_unreduced_gradients:
                raise RuntimeError(
                    f"capture_iteration: expected no gradients from before step_fn, got some of {group.name} that wait "
                    "for a reduction. Run all microbatches inside step_fn, or zero_grad() first."
                )
        for unit in self._units:
            if unit.is_resting() and unit.unshard_event is not None:
                unit.reshard()
        for context in self._contexts:
            context.reshard_idle_units()
        for group in self._groups:
            group.mark_main_weight_written()

    def _kept_gradients(self) -> list[tuple[Any, int]]:
        """Return groups with gradients in memory that clearing would free, and how often they have begun anew."""
        return [
            (group, group.gradients.num_starts)
            for group in self._groups
            if group.gradients is not None and group.gradients.holds_memory
        ]

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
            for group, rate in zip(param_groups, self._rates, strict=False):
                rate.lend(group)
            result = self._step_fn(*inputs)
            for index, (group, rate) in enumerate(zip(param_groups, self._rates, strict=False)):
                rate.take_back(group, index)
        finally:
            for group, rate in zip(param_groups, given, strict=True):
                group["lr"] = rate
        for stream in streams:
            # A capture ends with all of its streams joined, one with a gather that nobody used included.
            current.wait_stream(stream)
        if others := [type(leaf).__name__ for leaf in tree_leaves(result) if not isinstance(leaf, _LEAVES)]:
            raise TypeError(
                f"result of a captured iteration's step_fn: expected tensors in tuples, lists and dicts, got {others}, "
                "in which a replay could not find them. Return one of these."
            )
        return result

    def _bring_to_rest(self, before: OptimizerState) -> None:
        """Forget what a capture has begun that nobody will replay; nothing of it was executed."""
        # Graphs captured before have the random numbers of a generator that is replaced now.
        self._iterations.clear()
        for context in self._contexts:
            context.abandon()
        for group in self._groups:
            group.clear_gradients()
            # Compute weights that the capture has refreshed are still those of before.
            group.mark_main_weight_written()
        before.restore()


_VARYING = frozenset({"lr", "params"})
"""Items of a param_group that are no constants of a graph."""


def _schedule_of(unit: FsdpModule) -> Any:
    """Return what has been set on a unit, which a capture follows and a replay does not."""
    named = (unit.prefetch_targets("forward"), unit.prefetch_targets("backward"))
    targets = tuple(None if units is None else tuple(map(id, units)) for units in named)
    return unit.reduces_gradients, unit.schedule_policy, targets


class _Iteration:
    """One graph with the tensors that it reads and leaves."""

    def __init__(self, inputs: Sequence[torch.Tensor], replay: Callable[[], None], outputs: Any) -> None:
        self._inputs = inputs
        self._replay = replay
        # Their history has had its backward, and would keep activations.
        self._outputs = tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        self.num_replays = 0

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        with torch.no_grad():
            for static, value in zip(self._inputs, inputs, strict=True):
                static.copy_(value, non_blocking=True)
        self._replay()
        self.num_replays += 1
        # The next replay writes over what this one has left.
        return tree_map_only(torch.Tensor, torch.Tensor.clone, self._outputs)
