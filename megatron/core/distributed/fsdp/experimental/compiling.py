# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""torch.compile and units: what it must not trace, and a unit's compiled forward.

It knows neither weights nor schedules.

[Note: where graphs end]
What happens at a unit's border (waits, collectives, memory that comes and goes) is no part of a graph. Guards of a
graph are evaluated where its frame begins; the frame must therefore be one that begins after the border's work, when
the modules hold full parameters: a unit's forward, not its call. Guards then look at the class and the shapes of
parameters and never at which ones they are, so that equal units share one graph.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
from torch import nn

_GRAPH_MODES = ("reduce-overhead", "max-autotune")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_REASON = (
    "weights of a fully_shard unit come and go at its border, which is not part of a graph. Compile the units, "
    "unit.compile(fullgraph=True), not what is around them"
)


def untraced(function: FunctionT) -> FunctionT:
    """Keep torch.compile out of a function that torch calls, and of what it calls; costs a quarter of a microsecond."""
    disabled: Any = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]
    return cast(FunctionT, disabled)


def never_trace(*kinds: type[torch.Tensor]) -> None:
    """Let torch.compile break its graph where it comes to a tensor of these classes, rather than look inside."""
    torch._dynamo.config.nontraceable_tensor_subclasses.update(kinds)


def refuse_compiled_autograd() -> None:
    """Raise within a backward that torch compiles, which adds gradients to ``.grad`` after units have looked there.

    Raises:
        NotImplementedError: such a backward is running.
    """
    if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
        raise NotImplementedError(
            "backward through units: expected torch._dynamo.config.compiled_autograd=False, got a backward that torch "
            "compiles, in which units would not see their gradients. Turn it off; compiled forwards have compiled "
            "backwards without it."
        )


def compile_forward(
    module: nn.Module, name: str, args: tuple[Any, ...], options: dict[str, Any], *, replaces: bool
) -> None:
    """Compile a unit's forward, unless somebody has compiled it otherwise; its hooks stay outside.

    Args:
        module: the unit.
        name: the unit's name.
        replaces: whether this takes the place of a ``compile()`` before the module was sharded.
        args: positional arguments of torch.compile.
        options: keyword arguments of torch.compile.

    Raises:
        NotImplementedError: the options ask for CUDA graphs.
    """
    inductor_options = options.get("options") or {}
    if options.get("mode") in _GRAPH_MODES or inductor_options.get("triton.cudagraphs"):
        raise NotImplementedError(
            f"compile of unit {name}: expected a mode without CUDA graphs, got {options}. A graph would remember where "
            'gathered weights lie, which changes with every gather. Use mode="max-autotune-no-cudagraphs", or leave it '
            "out."
        )
    holder = _holder_of_forward(module)
    own: Any = vars(holder).get("forward")
    if isinstance(own, _CompiledForward) or own is None:
        if replaces or module._compiled_call_impl is None:
            module._compiled_call_impl = None
            forward: Any = type(module).forward
            holder.forward = _CompiledForward(module, torch.compile(forward, *args, **options))
    elif not _is_compiled(own):
        holder.forward = torch.compile(own, *args, **options)


def warn_if_uncompiled(module: nn.Module, name: str) -> None:
    """Warn if torch.compile is around a unit's forward and has compiled nothing of it.

    Args:
        module: a unit with none inside, whose forward has just run for the first time.
        name: the unit's name.
    """
    if not _is_inside_compiled() or any(_is_compiled(inner) for inner in module.modules()):
        return
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    if code is None or torch._dynamo.eval_frame._debug_get_cache_entry_list(code):
        return
    warnings.warn(
        f"torch.compile around unit {name}: expected a graph of its forward, got none, so that it runs uncompiled. "
        "torch compiles nothing inside torch.utils.checkpoint and no forward of torch.nn where a graph has ended, as "
        "it does at units. Call compile() on the root, or on each unit, after fully_shard.",
        stacklevel=2,
    )


class ForwardRunner:
    """Stands in a module's attribute ``forward`` for the forward itself, which is its own attribute if it has one."""

    forward: Callable[..., Any]


def _holder_of_forward(module: nn.Module) -> Any:
    own = vars(module).get("forward")
    return own if isinstance(own, ForwardRunner) else module


def _is_compiled(value: Any) -> bool:
    """Return whether a module or function has been compiled on its own."""
    if isinstance(value, nn.Module):
        own = vars(_holder_of_forward(value)).get("forward")
        return isinstance(own, _CompiledForward) or _is_compiled(own)
    return hasattr(value, "_torchdynamo_orig_callable")


def _is_inside_compiled() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


class _CompiledForward:
    """A unit's forward; weak, since a bound method in an attribute would keep a deleted model's memory."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self._module(), *args, **kwargs)
