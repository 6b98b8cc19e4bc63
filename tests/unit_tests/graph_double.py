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


class _Leaving(TorchDispatchMode):
    """Remembers the memory that operations have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)}
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and _address(value) not in given:
                self.made.append(value.detach())
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class ClobberingDevice(RepeatingDevice):
    """Writes over what later captures have left, whenever a graph is replayed, as kernels in a shared pool may."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._left: list[list[torch.Tensor]] = []

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Call the function and return what repeats it."""
        left_by_all = self._left
        left: list[torch.Tensor] = []

        def leave() -> Any:
            if not self.watches_values:
                return function()
            with _Leaving() as mode:
                result = function()
            left[:] = mode.made
            return result

        repeat, outputs = super().capture(leave)
        results = [value for value in tree_flatten(outputs)[0] if isinstance(value, torch.Tensor)]
        left_by_all.append(left)
        number = len(left_by_all)

        def replay() -> None:
            with torch.no_grad():
                for value in itertools.chain.from_iterable(left_by_all[number:]):
                    value.fill_(float("nan") if value.is_floating_point() else 1)
            repeat()
            # Static outputs are no tensors that a repetition makes.
            left.extend(results)

        return replay, outputs

    def renew(self) -> None:
        """Forget earlier captures."""
        self._left = []


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
