# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which backward a thread is executing, and what is called when it ends or fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from .compiling import refuse_compiled_autograd, untraced

_engine: Any = Variable._execution_engine


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the running backward has ended; it is dropped if the backward fails.

    Raises:
        NotImplementedError: the backward is one that torch compiles.
    """
    refuse_compiled_autograd()
    _engine.queue_callback(callback)


def current_backward() -> int:
    """Return which backward this thread is executing; -1 for none."""
    task: int = torch._C._current_graph_task_id()
    return task


def is_in_backward() -> bool:
    """Return whether this thread is executing a backward, e.g. recomputing a forward for it."""
    return current_backward() != -1


class PostBackward:
    """Callback at the end of one backward; weak, so that the engine does not keep a context alive.

    The engine drops the callback of a backward that failed, which brings the units to rest at once.
    """

    def __init__(self, context: weakref.ref[Any], task: int) -> None:
        self._context = context
        self._task = task

    @untraced
    def __call__(self) -> None:
        """Tell the context that the backward has ended."""
        context = self._context()
        if context is not None:
            context.post_backward(self._task)

    @untraced
    def __del__(self) -> None:
        context = self._context()
        if context is not None:
            context.abandon_backward(self._task)
