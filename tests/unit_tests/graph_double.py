# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA graphs on the host: a replay calls the function again, on the same tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatron.core.distributed.fsdp.experimental import context_graphs, graph


class _WithoutValues(TorchDispatchMode):
    """Refuses operations that wait for the device to know a value, as a capture does."""

    WAITING = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in self.WAITING:
            raise RuntimeError(f"operation {name} not permitted while a double of a stream is capturing")
        return function(*args, **(kwargs or {}))


class RepeatingDevice:
    """Captures by calling; the first replay finds the work done, later ones do it again into the same outputs."""

    watches_values = True

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator], what: str, instead: str) -> None:
        self.device = device

    def run(self, function: Callable[[], Any]) -> Any:
        """Call the function."""
        return function()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Call the function and return what repeats it."""
        random_state = torch.get_rng_state()
        try:
            with _WithoutValues() if self.watches_values else nullcontext():
                outputs = function()
        except BaseException:
            torch.set_rng_state(random_state)
            raise
        is_fresh, records = True, torch.is_grad_enabled()

        def replay() -> None:
            nonlocal is_fresh
            if not is_fresh:
                with torch.set_grad_enabled(records):
                    values = function()
                pairs = zip(tree_flatten(outputs)[0], tree_flatten(values)[0], strict=True)
                with torch.no_grad():
                    for static, value in pairs:
                        if static is not None:
                            static.copy_(value)
            is_fresh = False

        return replay, outputs

    def renew(self) -> None:
        """Do nothing: what has been captured shares no memory with what comes."""


class ClobberingDevice(RepeatingDevice):
    """Writes over what later captures have left, whenever a graph is replayed, as kernels in a shared pool may."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._outputs: list[list[torch.Tensor]] = []

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Call the function and return what repeats it."""
        repeat, outputs = super().capture(function)
        all_outputs = self._outputs
        all_outputs.append([value for value in tree_flatten(outputs)[0] if isinstance(value, torch.Tensor)])
        number = len(all_outputs)

        def replay() -> None:
            for value in itertools.chain.from_iterable(all_outputs[number:]):
                with torch.no_grad():
                    value.fill_(float("nan") if value.is_floating_point() else 1)
            repeat()

        return replay, outputs

    def renew(self) -> None:
        """Forget earlier captures."""
        self._outputs = []


@contextmanager
def graphs_on_the_host(watches_values: bool = True) -> Iterator[None]:
    """Let the host stand in for a device with CUDA graphs inside the block.

    torch compiles nothing while values are watched, and what is compiled may round otherwise.
    """
    with (
        patch.object(graph, "graph_device", RepeatingDevice),
        patch.object(context_graphs, "graph_device", ClobberingDevice),
        patch.object(RepeatingDevice, "watches_values", watches_values),
    ):
        yield
