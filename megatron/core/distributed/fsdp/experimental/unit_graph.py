# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`UnitGraph`: CUDA graphs of one unit's forward and backward for one kind of inputs; `GraphOrder`: who may come when.

Which calls are replayed is graphed_forward.py's; gathers, reductions and hooks are outside and know of no graphs.

[Note: one forward at a time]
A graph's activations are in one place. From a replay of the forward on they belong to the autograd node that the
caller's outputs lead to, until its backward has been replayed or nobody can reach it any more.

[Note: the order of replays]
All graphs of a context share one pool: what one capture has freed, a later one takes. A replay may therefore write over
whatever later captures have left, and is right only while nobody needs that. Graphs are captured in generations: first
forwards, then their backwards, so that all activations of a generation lie apart from what its backwards write. A
forward may be replayed while those before it in its own generation wait for their backward, and no others.

[Note: inputs that are not copied]
Outputs leave as copies, which are the caller's own. A unit that is called with such a copy, unchanged, reads the
original, which saves memory for each unit. No replay has written over that yet if all since have come in the order of
their captures (a run), and none will while the reader waits for its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from .graph_device import FailedCaptureError, GraphDevice, capture
from .graph_values import rebuild
from .unit_recording import Run, SharedMemory, UnitRecording


class UnitGraph:
    """Graphs of one unit for one kind of inputs; captures the forward.

    Args:
        unit: an `FsdpModule` in forward, with full parameters.
        run: calls its forward without a graph.
        args: of the forward.
        kwargs: of the forward.
        tensors: those in the arguments.
        order: of all graphs in the pool.
        stamp: what else the graphs depend on; kept alive.

    Attributes:
        stamp: as given.
        name: the unit's.
        generation: see [Note: the order of replays].
        number: of the forward, in the order of captures.

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
        order: GraphOrder,
        stamp: Sequence[object],
    ) -> None:
        self.name: str = unit.name
        self._order = order
        self.stamp = stamp
        self.generation, self.number = order.begin_capture()
        self._originals = [order.original(tensor) for tensor in tensors]
        inputs = [_static(*pair) for pair in zip(tensors, self._originals, strict=True)]
        self._recording = UnitRecording(unit, run, args, kwargs, inputs, order.memory)
        try:
            self._replay_forward, self._outputs = self._capture(self._recording.forward, "forward")
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
        self._needs = [output.requires_grad for output in self._recording.outputs]
        self._replay_backward: Callable[[], None] | None = None
        self._gradients: list[torch.Tensor | None] = []

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
        """Return whether the inputs whose originals are read are copies of these."""
        return all(
            original is None or self._order.original(tensor) is original
            for tensor, original in zip(tensors, self._originals, strict=True)
        )

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Replay the forward.

        Args:
            tensors: the inputs, like those of the capture.
        """
        use, parameters = _Use(self, self._recording.views_of_weights()), self._recording.trainable
        outputs = _Replayed.apply(use, len(parameters), *parameters, *tensors)  # type: ignore[no-untyped-call]
        self._order.note(use, outputs, self._outputs)
        return rebuild(self._recording.result, iter(outputs))

    def forward(self, context: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Replay the forward; outside of autograd."""
        for tensor, static, original in zip(tensors, self._recording.inputs, self._originals, strict=True):
            if original is None:
                static.copy_(tensor, non_blocking=True)
        self._replay_forward()
        self._order.num_replays += 1
        given = tuple([output.clone() for output in self._outputs])
        context.mark_non_differentiable(*(out for out, needs in zip(given, self._needs, strict=True) if not needs))
        return given

    def backward(self, gradients: Sequence[torch.Tensor | None], wants_weights: bool) -> Iterator[torch.Tensor | None]:
        """Replay the backward; return the inputs' gradients.

        Args:
            gradients: of the outputs.
            wants_weights: whether gradients of weights are asked for; ``torch.autograd.grad`` of others does not.
        """
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
        self._order.end_run()
        if is_new:
            self._order.end_generation()
            self._replay_backward, _ = self._capture(partial(recording.backward, self._gradients), "backward")
        assert self._replay_backward is not None, "captured above"
        self._replay_backward()
        self._order.num_replays += 1
        if wants_weights:
            recording.lend_gradients()
        # Autograd may keep them while the next graph writes its own.
        return (None if place is None else place.clone() for place in recording.input_gradients)


def _static(tensor: torch.Tensor, original: torch.Tensor | None) -> torch.Tensor:
    static = tensor.detach().clone() if original is None else original.detach()
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
    """Stands in the caller's autograd graph for a unit's forward.

    The weights are inputs so that a weight that other calls have used, too, waits for all of them, as without graphs.
    """

    @staticmethod
    def forward(context: Any, use: _Use, num_weights: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replay the forward."""
        context.use, context.num_weights = use, num_weights
        context.set_materialize_grads(False)
        return use.graph.forward(context, tensors[num_weights:])

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor | None) -> Any:
        """Replay the backward."""
        # torch refuses here a second backward.
        context.saved_tensors  # noqa: B018
        use, num_weights = context.use, context.num_weights
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise NotImplementedError(
                f"backward of unit {use.graph.name}: expected retain_graph=False with cuda_graph=True, got True: the "
                "next forward writes over what a second backward would read. Add the losses up, or build this unit "
                "without cuda_graph."
            )
        wants = num_weights > 0 and torch._C._will_engine_execute_node(context.next_functions[0][0])
        found = [*use.graph.backward(gradients, wants)]
        use.end()
        del context.use
        # Gradients of weights are in `.grad` already.
        return None, None, *[None] * num_weights, *found


class _Life:
    """How long a replay of a forward keeps others from being replayed."""

    def __init__(self, use: _Use) -> None:
        self._use = weakref.ref(use)
        self.generation, self.number = use.graph.generation, use.graph.number

    @property
    def is_over(self) -> bool:
        """Whether no backward can come any more."""
        use = self._use()
        return use is None or use.is_over


class _Copy:
    """An output as a caller has got it; weak, since its memory is the caller's."""

    def __init__(self, tensor: torch.Tensor, original: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = tensor._version
        self.original = original

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the copy or a view of all of it, and nobody has written it."""
        copy = self._tensor()
        return (
            copy is not None
            and (tensor is copy or tensor._base is copy)
            and tensor._version == self._version
            and tensor.data_ptr() == copy.data_ptr()
            and tensor.shape == copy.shape
            and tensor.stride() == copy.stride()
            and tensor.dtype == copy.dtype
        )


class GraphOrder:
    """Which graphs of one pool may be captured and replayed now; see [Note: the order of replays].

    Args:
        device: captures and replays.
        place: the context's device.

    Attributes:
        device: as given.
        memory: what the graphs share.
        num_captures: how many graphs have been captured.
        num_replays: how many replays there were.
    """

    def __init__(self, device: GraphDevice, place: torch.device) -> None:
        self.device = device
        self.memory = SharedMemory(place)
        self._lives: list[_Life] = []
        self._copies: list[_Copy] = []
        self._generation, self._is_open, self._num_forwards = 0, False, 0
        self._last_replayed = 0
        self.num_captures = self.num_replays = 0

    @property
    def is_pending(self) -> bool:
        """Whether a backward may come."""
        return not all(life.is_over for life in self._lives)

    @property
    def pending_generation(self) -> int:
        """The generation of the forward that was replayed last and waits for its backward; -1 for none."""
        last = self._last()
        return -1 if last is None else last.generation

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

    def begin_capture(self) -> tuple[int, int]:
        """Return the generation of a forward that is about to be captured, and its number."""
        if not self._is_open:
            self._generation, self._is_open = self._generation + 1, True
        self._num_forwards += 1
        return self._generation, self._num_forwards

    def end_generation(self) -> None:
        """Note that a backward is about to be captured."""
        self._is_open = False

    def note(self, use: _Use, outputs: Sequence[torch.Tensor], originals: Sequence[torch.Tensor]) -> None:
        """Note that a forward has been replayed, and what its caller gets."""
        self._lives.append(_Life(use))
        number = use.graph.number
        if number <= self._last_replayed:
            self.end_run()
        self._last_replayed = number
        self._copies += map(_Copy, outputs, originals)

    def end_run(self) -> None:
        """Note that replays do not go on in the order of captures, so that any may have written over outputs."""
        self._copies.clear()

    def original(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the output that a tensor is a copy of, if a graph can read that instead; None for any other tensor."""
        return next((copy.original for copy in reversed(self._copies) if copy.is_same(tensor)), None)
