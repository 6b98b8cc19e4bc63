# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`ContextGraphs`: the graphs of all units of a context, and when they are dropped together.

They go together since they lie in one pool, and since a graph that was captured late could not be replayed after those
of its neighbours (unit_graph.py says why).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from .graph_device import graph_device
from .unit_graph import GraphOrder, UnitGraph

PATIENCE = 8
"""Calls that would rather have other graphs until all are dropped; twice as many each time."""


class ContextGraphs:
    """All graphs of one context.

    Args:
        device: of the context.

    Attributes:
        order: of those that there are now.

    Raises:
        NotImplementedError: the device has no CUDA graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._place = device
        self._patience, self._num_refused, self._is_due = PATIENCE, 0, False
        self._tables: list[dict[Hashable, UnitGraph]] = []
        self._num_captures = self._num_replays = 0
        self._device = graph_device(device, (), "fully_shard cuda_graph", "Leave it out; results are the same.")
        self.order = GraphOrder(self._device, device)

    @property
    def num_captures(self) -> int:
        """How many graphs have been captured."""
        return self._num_captures + self.order.num_captures

    @property
    def num_replays(self) -> int:
        """How often graphs have been replayed."""
        return self._num_replays + self.order.num_replays

    def table(self) -> dict[Hashable, UnitGraph]:
        """Return a place for the graphs of one unit."""
        self._tables.append({})
        return self._tables[-1]

    def drop(self) -> None:
        """Drop all graphs, with their memory; units capture anew when they are called next."""
        for graph in self._graphs():
            graph.close()
        for table in self._tables:
            table.clear()
        self._num_captures, self._num_replays = self.num_captures, self.num_replays
        # Somebody may still hold memory of the old pool.
        self._device.renew()
        self.order = GraphOrder(self._device, self._place)
        self._is_due = False

    def ask_for_drop(self, is_certain: bool) -> None:
        """Have all graphs dropped at the next forward without a pending backward.

        Args:
            is_certain: whether some are of no use any more; otherwise many calls have to ask.
        """
        self._num_refused += 1
        if is_certain:
            self._is_due = True
        elif self._num_refused >= self._patience:
            self._is_due, self._num_refused = True, 0
            self._patience *= 2

    def settle(self) -> None:
        """Drop all graphs if that was asked for and no backward is pending."""
        if self._is_due and not self.order.is_pending:
            self.drop()

    def may_replay(self, graph: UnitGraph) -> bool:
        """Return whether a forward may be replayed now."""
        if self.order.may_replay(graph):
            return True
        if self.order.pending_generation != graph.generation:
            self.ask_for_drop(is_certain=False)
        return False

    def _graphs(self) -> Iterator[UnitGraph]:
        return (graph for table in self._tables for graph in table.values())


def graphs_of(context: Any) -> ContextGraphs:
    """Return the graphs of a context, which has some from now on.

    Raises:
        NotImplementedError: its device has no CUDA graphs.
    """
    if context.graphs is None:
        context.graphs = ContextGraphs(context.device)
    graphs: ContextGraphs = context.graphs
    return graphs
