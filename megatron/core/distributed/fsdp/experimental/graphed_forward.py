# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`GraphedForward`: the forward of a unit with ``cuda_graph=True``: when it is a graph, and when it runs as it is.

It runs inside the unit's hooks, so that weights are gathered before it and gradients reduced after its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from .backward_task import is_in_backward
from .compiling import ForwardRunner, untraced
from .context_graphs import graphs_of
from .device import is_capturing
from .graph_values import UnknownValueError, flatten
from .module import FsdpModule
from .unit_graph import UnitGraph

MAX_KINDS = 2
"""Kinds of inputs of one unit whose graphs are kept at a time; others run without a graph."""

WARM_UP = 2
"""Backwards of a unit after a kind of inputs has come for the first time, before it is captured."""

_MAX_SEEN = 64
"""Kinds of inputs that are remembered without a graph."""


def graph_forward(unit: Any) -> None:
    """Let a unit's forward be replayed where that gives what it would give.

    Raises:
        NotImplementedError: its device has no CUDA graphs.
    """
    graphs_of(unit.context)
    runner = GraphedForward(unit)
    own = vars(unit).get("forward")
    if own is not None:
        runner.forward = own
    unit.forward = runner
    unit.register_post_backward_hook(runner.count_backward)


def has_graphs(module: Any) -> bool:
    """Return whether a unit has been built with ``cuda_graph=True``."""
    return isinstance(vars(module).get("forward"), GraphedForward)


class GraphedForward(ForwardRunner):
    """Calls a unit's forward, or replays it; weak, as all that an attribute of the unit holds."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = weakref.ref(unit)
        self._context: Any = None
        self._graphs: dict[Hashable, UnitGraph] = {}
        self._seen: dict[Hashable, int] = {}
        self._num_backwards, self._last_backward = 0, -1

    def count_backward(self, unit: FsdpModule) -> None:
        """Note that a backward of the unit has ended; several calls in one loss count once, so that all units agree."""
        self._num_backwards += unit.backward_task != self._last_backward
        self._last_backward = unit.backward_task

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, by a graph if that is known to give the same."""
        unit: Any = self._unit()
        if self._is_training(unit) and _has_fixed_weights(unit):
            tensors: list[torch.Tensor] = []
            graph = self._find(unit, args, kwargs, tensors)
            if graph is not None:
                return graph(tensors)
        return run_forward(unit, args, kwargs)

    def _is_training(self, unit: Any) -> bool:
        """Return whether a backward of this call may follow, and nobody looks into it."""
        return (
            torch.is_grad_enabled()
            and not is_in_backward()
            # None where somebody calls forward past the unit's hooks.
            and unit._fsdp_open_call is not None
            # Checkpoints and offloading decide about tensors that a graph keeps where they are.
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            and not is_capturing(unit.context.device)
        )

    def _find(
        self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> UnitGraph | None:
        """Return the graph of a call, captured if it is time to; None if the call is to run without one."""
        graphs, key = graphs_of(unit.context), self._key(unit, args, kwargs, tensors)
        if self._context is not unit.context:
            self._context, self._graphs = unit.context, graphs.table()
        graphs.settle()
        graph, stamp = self._graphs.get(key), self._stamp(unit)
        if graph is not None and not _is_same(graph.stamp, stamp):
            graphs.ask_for_drop(is_certain=True)
            graphs.settle()
            graph = None
        if graph is not None:
            return graph if graphs.may_replay(graph) and graph.takes(tensors) else None
        if key in self._graphs or not self._is_due(key):
            return None
        if len(self._graphs) >= MAX_KINDS or not graphs.order.may_capture():
            graphs.ask_for_drop(is_certain=False)
            return None
        graph = UnitGraph(unit, run_forward, args, kwargs, tensors, graphs.order, stamp)
        self._graphs[key] = graph
        return graph

    def _is_due(self, key: Hashable) -> bool:
        if len(self._seen) > _MAX_SEEN:
            self._seen.clear()
        return self._num_backwards >= self._seen.setdefault(key, self._num_backwards) + WARM_UP

    def _key(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Hashable:
        """Return all that a graph has as constants."""
        device: torch.device = unit.context.device
        try:
            looks = flatten((args, kwargs), tensors)
        except UnknownValueError as error:
            raise TypeError(
                f"arguments of unit {unit.name} with cuda_graph=True: expected tensors, numbers and strings, also in "
                f"tuples, lists and dicts, got {error}, in which a graph could not find tensors. Pass these, or build "
                "this unit without cuda_graph."
            ) from error
        if elsewhere := [str(tensor.device) for tensor in tensors if tensor.device != device]:
            raise ValueError(
                f"arguments of unit {unit.name} with cuda_graph=True: expected tensors on {device}, got some on "
                f"{elsewhere}, whose values a graph would keep. Move them to {device}."
            )
        autocast = torch.is_autocast_enabled(device.type)
        if autocast and torch.is_autocast_cache_enabled():
            raise NotImplementedError(
                f"forward of unit {unit.name} with cuda_graph=True: expected torch.autocast(cache_enabled=False), got "
                "autocast with a cache, which would keep casts of a capture for other calls. Turn the cache off, or "
                "use a policy that computes in the narrow dtype."
            )
        modes = tuple([module.training for module in (unit, *unit._fsdp_inner_modules)])
        return looks, modes, autocast and torch.get_autocast_dtype(device.type)

    def _stamp(self, unit: Any) -> list[object]:
        """Return what makes a graph of the unit useless when it changes."""
        num_moves = unit.context.pool.num_moves if any(group.gathers for group in unit.parameter_groups) else 0
        buffers = [buffer for module in (unit, *unit._fsdp_inner_modules) for buffer in module._buffers.values()]
        return [num_moves, unit._fsdp_version()[1], vars(self).get("forward"), *buffers]


def _is_same(old: Sequence[object], new: Sequence[object]) -> bool:
    # Numbers by value, tensors by identity.
    return len(old) == len(new) and all(a is b or (type(a) is int and a == b) for a, b in zip(old, new, strict=True))


def run_forward(unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a unit's forward without a graph: compiled, if it is."""
    own = vars(vars(unit)["forward"]).get("forward")
    return type(unit).forward(unit, *args, **kwargs) if own is None else own(*args, **kwargs)


def _has_fixed_weights(unit: Any) -> bool:
    """Return whether the weights are where they are in every step."""
    pool = unit.context.pool
    return all(not group.gathers or pool.is_in_place(group.full_weight) for group in unit.parameter_groups)
