# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`UnitGraph`: CUDA graphs of one unit's forward and backward, for one kind of inputs, and the order of all graphs.

Which calls are replayed is graphed_forward.py's; gathers, reductions and hooks are outside and know of none.

[Note: one forward at a time]
A graph's activations are in one place. From a replay of the forward on they belong to the autograd node that the
caller's outputs lead to, until its backward has been replayed or nobody can reach it any more.

[Note: the order of replays]
All graphs of a context share one pool: what one capture has freed, a later one takes. A replay may therefore write over
whatever later captures have left, and is right only while nobody needs that. Graphs are captured in generations: first
forwards, then their backwards, so that all activations of a generation lie apart from what its backwards write. A
forward may be replayed while those before it in its own generation wait for their backward, and no others.

[Note: outputs that are read where they are]
An output leaves as a copy, unless another unit's graph reads it where it is. Its memory is written again only when
nobody holds it: an eager reader does, and so does the node of a graph that has read it, until its backward. Writes in
place are found by torch's own version counters, as for all that is saved for backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .allocator import num_storage_uses
from .graph_device import FailedCaptureError, GraphDevice, capture, graph_device
from .graph_values import apart, rebuild
from .unit_recording import Run, SharedMemory, UnitRecording


class UnitGraph:
    """Graphs of one unit for one kind of inputs; captures the forward.

    Args:
        unit: an `FsdpModule` in forward, with full parameters.
        run: calls its forward without a graph.
        args: of the forward.
        kwargs: of the forward.
        tensors: those in the arguments.
        shared: for each of them, through what it is read where it is; None to read a copy.
        order: of all graphs in the pool.
        stamp: what else the graphs depend on; kept alive.

    Attributes:
        stamp: as given.
        name: the unit's.
        generation: see [Note: the order of replays].
        number: of the forward, in the order of captures.
        outputs: static ones, each on a Storage of its own.
        num_uses: of these Storages while nobody else holds an output.

    Raises:
        RuntimeError: the forward does what no graph can hold.
    """

    def __init__(
        self,
        unit: Any,
        run: Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor | None],
        order: GraphOrder,
        stamp: Sequence[object],
    ) -> None:
        self.name: str = unit.name
        self._order = order
        self.stamp = stamp
        self.generation, self.number = order.begin_generation()
        self._reads = [each is not None for each in shared]
        inputs = [_static(*pair) for pair in zip(tensors, shared, strict=True)]
        self._recording = UnitRecording(unit, run, args, kwargs, inputs, order.memory)
        try:
            self._replay_forward, outputs = self._capture(self._recording.forward, "forward")
            problem = self._recording.problem()
            if problem is not None:
                raise RuntimeError(
                    f"cuda_graph of unit {self.name}: expected a forward that passes on all it makes as outputs, got "
                    f"{problem}, which a replay would leave as they are. Return them, or build this unit without "
                    "cuda_graph."
                )
        except BaseException:
            self._recording.close()
            raise
        self.outputs = [apart(output) for output in outputs]
        self.num_uses = [num_storage_uses(output) for output in self.outputs]
        self._is_read = [False] * len(outputs)
        self._saves = [self._recording.saves(output) for output in outputs]
        self._needs = [output.requires_grad for output in self._recording.outputs]
        self._replay_backward: Callable[[], None] | None = None
        self._gradients: list[torch.Tensor | None] = []
        self._is_new = True

    def share(self, index: int, given: torch.Tensor) -> torch.Tensor:
        """Return a tensor through which another graph can read an output where it is, for good.

        Args:
            index: of the output.
            given: the output as it has come there.
        """
        before = num_storage_uses(given)
        shared = apart(given)
        self.num_uses[index] += num_storage_uses(given) - before
        self._is_read[index] = True
        return shared

    def close(self) -> None:
        """Let the unit's weights look as without graphs."""
        self._recording.close()

    def _capture(self, function: Callable[[], Any], what: str) -> tuple[Callable[[], None], Any]:
        try:
            captured = capture(self._order.device, function)
        except FailedCaptureError as error:
            raise RuntimeError(
                f"cuda_graph of unit {self.name}: expected a {what} that only issues work to the device, got {error}. "
                "Leave out item(), print of a tensor, copies to the host and whatever depends on values, or build this "
                "unit without cuda_graph."
            ) from error
        self._order.num_captures += 1
        return captured

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether inputs that are read where they are lie there."""
        return all(
            tensor.data_ptr() == static.data_ptr()
            for tensor, static, is_read in zip(tensors, self._recording.inputs, self._reads, strict=True)
            if is_read
        )

    def __call__(self, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
        """Replay the forward.

        Args:
            tensors: the inputs, like those of the capture.
            weights: what is to look as if somebody would read it until the backward.
        """
        use = _Use(self, weights)
        self._order.note(use)
        outputs = _Replayed.apply(use, self._order.anchor, *tensors)  # type: ignore[no-untyped-call]
        return rebuild(self._recording.result, iter(outputs))

    def forward(self, context: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Replay the forward and say what has to stay until the backward; outside of autograd."""
        for tensor, static, is_read in zip(tensors, self._recording.inputs, self._reads, strict=True):
            if not is_read:
                static.copy_(tensor, non_blocking=True)
        self._replay_forward()
        self._order.num_replays += 1
        # Whether somebody reads an output where it is shows when that one is captured.
        stays = [is_read or self._is_new for is_read in self._is_read]
        self._is_new = False
        # `data` gives each use its own version counter.
        given = [out.data if stay else out.clone() for out, stay in zip(self.outputs, stays, strict=True)]
        held = [tensor for tensor, is_read in zip(tensors, self._reads, strict=True) if is_read]
        held += [out for out, *is_held in zip(given, self._saves, stays, strict=True) if all(is_held)]
        context.save_for_backward(*held)
        context.mark_non_differentiable(*(out for out, needs in zip(given, self._needs, strict=True) if not needs))
        return tuple(given)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        """Replay the backward; return the inputs' gradients."""
        memory, recording = self._order.memory, self._recording
        if all(gradient is None for gradient in gradients):
            return iter([None] * len(recording.inputs))
        memory.take_back()
        is_new = self._replay_backward is None
        if is_new:
            self._gradients = [
                None if gradient is None else memory.like(f"output {index}", gradient)
                for index, gradient in enumerate(gradients)
            ]
        for index, (static, gradient) in enumerate(zip(self._gradients, gradients, strict=True)):
            if static is not None:
                static.zero_() if gradient is None else static.copy_(gradient)
            elif gradient is not None:
                raise RuntimeError(
                    f"backward of unit {self.name}: expected gradients of the outputs that had some when it was "
                    f"captured, got one of output {index}, too. Use it in the first loss, or build this unit without "
                    "cuda_graph."
                )
        if is_new:
            self._order.end_generation()
            self._replay_backward, _ = self._capture(lambda: recording.backward(self._gradients), "backward")
        assert self._replay_backward is not None, "captured above"
        self._replay_backward()
        self._order.num_replays += 1
        if self._order.wants_weights:
            recording.lend_gradients()
        # Autograd may keep them while the next graph writes its own.
        return (None if place is None else place.clone() for place in recording.input_gradients)


def _static(tensor: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    static = tensor.detach().clone() if shared is None else shared
    return static.requires_grad_(tensor.requires_grad)


class _Use:
    """One replay of a forward, from then to its backward; only the autograd node holds it."""

    def __init__(self, graph: UnitGraph, weights: Sequence[torch.Tensor]) -> None:
        self.graph = graph
        self._weights = weights
        self.is_over = False

    def end(self) -> None:
        """Let the graph be replayed again."""
        self.is_over, self._weights = True, ()


class _Replayed(torch.autograd.Function):
    """Stands in the caller's autograd graph for a unit's forward."""

    @staticmethod
    def forward(context: Any, use: _Use, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replay the forward."""
        context.use = use
        context.set_materialize_grads(False)
        return use.graph.forward(context, tensors)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor | None) -> Any:
        """Replay the backward."""
        # torch refuses here what was written in place since, and a second backward.
        context.saved_tensors  # noqa: B018
        use: _Use = context.use
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise NotImplementedError(
                f"backward of unit {use.graph.name}: expected retain_graph=False with cuda_graph=True, got True: the "
                "next forward writes over what a second backward would read. Add the losses up, or build this unit "
                "without cuda_graph."
            )
        found = [None, None, *use.graph.backward(gradients)]
        use.end()
        del context.use
        return tuple(found)


class _Life:
    """How long a replay of a forward keeps others from being replayed."""

    def __init__(self, use: _Use) -> None:
        self._use = weakref.ref(use)
        self.generation, self.number = use.graph.generation, use.graph.number
        self._outputs, self._num_uses = use.graph.outputs, use.graph.num_uses

    @property
    def is_pending(self) -> bool:
        """Whether a backward may come."""
        use = self._use()
        return use is not None and not use.is_over

    @property
    def is_over(self) -> bool:
        """Whether nobody needs what it has left."""
        return not self.is_pending and [num_storage_uses(output) for output in self._outputs] == self._num_uses


class GraphOrder:
    """Which graphs of one pool may be captured and replayed now; see [Note: the order of replays].

    Args:
        device: of the context.

    Attributes:
        device: captures and replays.
        memory: what the graphs share.
        anchor: an input that needs a gradient, so that every replayed forward has a backward.
        num_captures: how many graphs have been captured.
        num_replays: how many replays there were.

    Raises:
        NotImplementedError: the device has no CUDA graphs.
    """

    def __init__(self, device: torch.device) -> None:
        instead = "Leave it out there; results are the same."
        self.device: GraphDevice = graph_device(device, (), "fully_shard cuda_graph", instead)
        self.memory = SharedMemory(device)
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        view: Any = self.anchor.expand_as(self.anchor)
        self._anchor_node = view.grad_fn.next_functions[0][0]
        self._lives: list[_Life] = []
        self._generation, self._is_open, self._num_forwards = 0, False, 0
        self.num_captures = self.num_replays = 0

    @property
    def wants_weights(self) -> bool:
        """Whether the running backward asks for gradients of weights; ``torch.autograd.grad`` of others does not."""
        return bool(torch._C._will_engine_execute_node(self._anchor_node))

    @property
    def is_pending(self) -> bool:
        """Whether a backward may come."""
        return any(life.is_pending for life in self._lives)

    def _last(self) -> _Life | None:
        # Below one that is not over there may be some that are; they count when it has gone.
        while self._lives and self._lives[-1].is_over:
            self._lives.pop()
        return self._lives[-1] if self._lives else None

    def may_replay(self, graph: UnitGraph) -> bool:
        """Return whether a forward may be replayed now."""
        last = self._last()
        return last is None or (last.generation == graph.generation and last.number < graph.number)

    def may_capture(self) -> bool:
        """Return whether a forward may be captured now."""
        last = self._last()
        return last is None or (last.generation == self._generation and self._is_open)

    def begin_generation(self) -> tuple[int, int]:
        """Return the generation of a forward that is about to be captured, and its number."""
        if not self._is_open:
            self._generation, self._is_open = self._generation + 1, True
        self._num_forwards += 1
        return self._generation, self._num_forwards

    def end_generation(self) -> None:
        """Note that a backward is about to be captured."""
        self._is_open = False

    def note(self, use: _Use) -> None:
        """Note that a forward is replayed."""
        self._lives.append(_Life(use))
