# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`OverlapDriver`: gathers and reduces where megatron-core's schedule plans run the parts of a layer one by one.

With ``overlap_moe_expert_parallel_comm`` a microbatch's tokens travel to their experts while another microbatch
computes. megatron-core then calls neither a layer nor its backward as a whole, but the nodes of a plan: attention and
router, dispatch, experts, combine. The plan and its order are megatron-core's; no hook of a unit takes part.

[Note: uses of a unit]
One layer can be in the forward of a microbatch and in the backward of the one before at the same time. So uses are
counted: the first one gathers the weights, the last one that ends lets them go.

    unit                   in forward, from .. to               in backward, from .. to (then reduced)
    experts                mlp .. mlp                           mlp .. mlp, weight gradients
    the layer, what else   first node .. last node with work    combine (dense: mlp) .. first node, weight gradients
    is inside it
    all others (root)      the plan's first node, to the end of its backward
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import NoopScheduleNode
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron.core.distributed.fsdp.experimental import FsdpContext, FsdpModule

_FIRST_NODES = ("pre_dispatch_computation", "attn")
"""What a layer's first node is called, by megatron-core 0.19 and by 0.16."""

Action = Callable[[], None]


def _nothing() -> None:
    pass


class _Node:
    """A node of a schedule plan, with what is to happen around it.

    Args:
        node: megatron-core's.
        abandon: called when an exception ends what the node does.
    """

    def __init__(
        self,
        node: Any,
        abandon: Action,
        *,
        before_forward: Action = _nothing,
        after_forward: Action = _nothing,
        before_backward: Action = _nothing,
        after_backward: Action = _nothing,
        after_weight_gradients: Action = _nothing,
    ) -> None:
        self._node = node
        self._abandon = abandon
        self._before_forward, self._after_forward = before_forward, after_forward
        self._before_backward, self._after_backward = before_backward, after_backward
        self._after_weight_gradients = after_weight_gradients

    def forward(self, *args: Any) -> Any:
        """Run the node's forward."""
        return self._run(self._before_forward, partial(self._node.forward, *args), self._after_forward)

    def backward(self, *args: Any) -> Any:
        """Run the node's backward."""
        return self._run(self._before_backward, partial(self._node.backward, *args), self._after_backward)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward has left for later, if any; the plan always calls it."""
        self._run(_nothing, self._node.backward_dw, self._after_weight_gradients)

    def _run(self, before: Action, work: Callable[[], Any], after: Action) -> Any:
        try:
            before()
            found = work()
            after()
        except BaseException:
            self._abandon()
            raise
        return found


class OverlapDriver:
    """Drives the units of one chunk, which have no hooks for training, through megatron-core's schedule plans.

    Its life is that of the model, whose `build_schedule_plan` it takes the place of.

    Args:
        context: of the chunk's units.
        module: the chunk: megatron-core's model, or modules around it.
    """

    def __init__(self, context: FsdpContext, module: nn.Module) -> None:
        self._context = context
        model: Any = get_attr_wrapped_model(module, "build_schedule_plan", return_model_obj=True)
        self._model = weakref.ref(model)
        self._build = type(model).build_schedule_plan
        # The schedule asks the model itself, and 0.16 wants that to be a GPTModel.
        model.build_schedule_plan = self._build_driven
        # The model holds the driver, which must not hold it.
        self._uses: weakref.WeakKeyDictionary[FsdpModule, int] = weakref.WeakKeyDictionary()
        for unit in self._units():
            unit.leave_to_scheduler()
            self._uses[unit] = 0
            hooked: Any = unit
            hooked.register_forward_pre_hook(self._before_call)
            hooked.register_forward_hook(self._after_call, always_call=True)

    def _build_driven(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's plan of one microbatch, whose nodes gather weights and reduce gradients."""
        plan = self._build(self._model(), *args, **kwargs)
        layers = [plan.get_layer(index) for index in range(plan.num_layers())]
        units = [list(_units_of(layer.layer)) for layer in layers]
        inside = {unit for of_layer in units for unit in of_layer}
        outside = [unit for unit in self._units() if unit not in inside]
        for index, layer in enumerate(layers):
            following = units[index + 1] if index + 1 < len(units) else []
            self._drive_layer(layer, units[index], following, units[index - 1] if index else [])
        plan.pre_process = _Node(
            plan.pre_process,
            self.abandon,
            before_forward=partial(self._use, outside, units[0] if units else []),
            after_backward=partial(self._reduce, outside),
        )
        return plan

    def _drive_layer(
        self, layer: Any, units: list[FsdpModule], following: list[FsdpModule], preceding: list[FsdpModule]
    ) -> None:
        first = next(name for name in _FIRST_NODES if hasattr(layer, name))
        inner = set(_units_of(getattr(layer.layer.mlp, "experts", None)))
        experts = [unit for unit in units if unit in inner]
        rest = [unit for unit in units if unit not in inner]
        combines = not isinstance(layer.moe_combine, NoopScheduleNode)
        end_forward = partial(self._release, rest)

        def end_experts() -> None:
            self._release(experts)
            if not combines:
                end_forward()

        def begin_backward() -> None:
            if not combines:
                self._use(rest)
            self._use(experts, preceding)

        setattr(
            layer,
            first,
            _Node(
                getattr(layer, first),
                self.abandon,
                before_forward=partial(self._use, rest, [*experts, *following]),
                after_weight_gradients=partial(self._reduce, rest),
            ),
        )
        layer.mlp = _Node(
            layer.mlp,
            self.abandon,
            before_forward=partial(self._use, experts),
            after_forward=end_experts,
            before_backward=begin_backward,
            after_weight_gradients=partial(self._reduce, experts),
        )
        if combines:
            layer.moe_combine = _Node(
                layer.moe_combine,
                self.abandon,
                after_forward=end_forward,
                before_backward=partial(self._use, rest, experts),
            )

    def _units(self) -> Iterator[FsdpModule]:
        for unit in self._context.forward_order:
            assert isinstance(unit, FsdpModule)
            yield unit

    def _gather_ahead(self, units: Sequence[FsdpModule]) -> None:
        for unit in units:
            if not self._uses[unit]:
                self._context.unshard(unit, is_ahead=True)

    def _use(self, units: Sequence[FsdpModule], ahead: Sequence[FsdpModule] = ()) -> None:
        for unit in units:
            # Nothing happens to weights that are there and current.
            unit.unshard()
            self._uses[unit] += 1
        self._gather_ahead(ahead)

    def _release(self, units: Sequence[FsdpModule]) -> None:
        for unit in units:
            self._uses[unit] -= 1
            if not self._uses[unit]:
                unit.reshard()

    def _reduce(self, units: Sequence[FsdpModule]) -> None:
        for unit in units:
            self._context.reduce(unit)
        self._release(units)

    def abandon(self) -> None:
        """Bring all units to rest and forget plans that are under way, after an exception."""
        for unit in self._uses:
            self._uses[unit] = 0
        self._context.abandon()

    def begin_step(self) -> None:
        """Forget plans that an exception outside of their nodes has left."""
        if any(self._uses.values()):
            self.abandon()

    # --- evaluation, and modules that a node calls ----------------------------------------------------------------

    def _before_call(self, unit: Any, unused: Any) -> None:
        is_outside = torch.is_grad_enabled() and not self._uses[unit]
        # Torch calls the hook after it in any case.
        self._use([unit])
        if is_outside:
            raise RuntimeError(
                f"forward of unit {unit.name}: expected the nodes of a schedule plan, or torch.no_grad(), with "
                "overlap_moe_expert_parallel_comm, got a forward that records gradients. Train with megatron-core's "
                "schedules, whose forward step returns model.build_schedule_plan(...)."
            )

    def _after_call(self, unit: Any, unused_args: Any, unused_output: Any) -> None:
        self._release([unit])


def refuse_shared_modules(shared: Sequence[nn.Module]) -> None:
    """Refuse modules that several units contain: it is not known which nodes of a plan call them.

    Raises:
        NotImplementedError: there are such.
    """
    if shared:
        raise NotImplementedError(
            f"overlap_moe_expert_parallel_comm: expected units without common modules, got "
            f"{[type(module).__name__ for module in shared]} in several. Give each layer its own, or drop "
            "--overlap-moe-expert-parallel-comm."
        )


def _units_of(module: nn.Module | None) -> Iterator[FsdpModule]:
    """Yield the units at a module and inside it."""
    for child in () if module is None else module.modules():
        if isinstance(child, FsdpModule):
            yield child
