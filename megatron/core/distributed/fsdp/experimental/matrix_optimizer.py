# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`MatrixOptimizer`: a torch optimizer whose rule looks at whole matrices, of which each rank may hold a part.

What the rule computes is a `MatrixRule`'s, which rank computes it matrix_plan.py's, how matrices travel
matrix_pipeline.py's. Parameters that are no matrices are another, element-wise optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from .compiling import untraced
from .dtensor import FsdpDTensor
from .matrix_blocks import JoinedPieces, MatrixBlock, blocks_of
from .matrix_rule import MatrixRule, is_of_matrices, require, require_same_rule
from .matrix_work import Entry, MatrixWork, make_works

PACKAGE_BYTES = 256 << 20
"""Default bound on what an owner has of one package, unless a single matrix has more."""


class MatrixOptimizer(Optimizer):
    """Steps matrices by a rule that needs all of each one, and all other parameters by an element-wise optimizer.

    With sharded parameters it has to be adapted by `fully_shard_optimizer`; each matrix is then computed by one rank,
    see [Note: owners] in matrix_plan.py. Plain parameters are stepped as they are. Gradients are alike on all ranks in
    which are None, as those of units are.

    Args:
        params: matrices, or param_groups of them. A group's ``is_stack`` says that dim 0 of its parameters counts
            matrices; its ``parts`` are the rows of the matrices that are fused in each parameter, repeated as often as
            they fit; ``joins_pieces`` says that a matrix cut by tensor parallelism is computed with as a whole.
            Convolutions with more than two dims count all but the first as columns.
        rule: what is computed.
        lr: learning rate.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        decoupled_weight_decay: otherwise `weight_decay` times the weights is added to the gradients.
        rest: an element-wise optimizer, whose param_groups and state become this one's, too; it is stepped here.
        package_bytes: bound on the matrices that travel to one owner at a time, see [Note: packages].
        settings: further defaults of param_groups, which the rule knows.

    Attributes:
        rule: as given.
        rest: as given.
        guard_rest: returns a context in which `rest` is stepped; with sharded parameters it refuses what is not
            element-wise.

    Raises:
        ValueError: settings without a meaning, parameters that hold no matrices, or the same ones as `rest` has.
    """

    steps_shards = True
    """Tells `fully_shard_optimizer` that the step knows how the shards that it is lent are cut."""

    def __init__(
        self,
        params: Any,
        rule: MatrixRule,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = True,
        rest: Optimizer | None = None,
        package_bytes: int = PACKAGE_BYTES,
        **settings: Any,
    ) -> None:
        self.rule = rule
        self.rest = rest
        self.guard_rest: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._package_bytes = package_bytes
        self._works: list[MatrixWork] = []
        self._known: list[Any] = []
        self._known_settings: list[tuple[Any, ...]] = []
        defaults = rule.defaults()
        if unknown := sorted(settings.keys() - defaults.keys()):
            raise ValueError(f"{rule.name}: expected settings among {sorted(defaults)}, got {unknown}. Drop them.")
        if not isinstance(package_bytes, int) or package_bytes < 1:
            raise ValueError(
                f"{rule.name} package_bytes: expected an int >= 1, got {package_bytes!r}. Give what an owner may hold "
                "at a time."
            )
        defaults |= {
            "lr": lr,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "is_stack": False,
            "parts": (),
            "joins_pieces": False,
            **settings,
        }
        self._settings = frozenset(defaults)
        super().__init__(params, defaults)
        if rest is not None:
            self._take_rest(rest)

    def _take_rest(self, rest: Optimizer) -> None:
        mine = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for group in rest.param_groups:
            if shared := [tuple(p.shape) for p in group["params"] if id(p) in mine]:
                raise ValueError(
                    f"{self.rule.name} rest: expected other parameters than the matrices, got some of shapes "
                    f"{shared[:3]} in both. Give each parameter to one of the two."
                )
            group["algorithm"] = type(rest).__name__
        self.state.update(rest.state)
        self.param_groups.extend(rest.param_groups)
        rest.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices, or other parameters: these with the name of `rest`'s class as ``algorithm``.

        Raises:
            ValueError: settings without a meaning, or parameters that hold no matrices; nothing is added then.
        """
        if self.rest is not None and param_group.get("algorithm") == type(self.rest).__name__:
            self.rest.add_param_group(param_group)
            self.param_groups.append(self.rest.param_groups[-1])
            return
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            group.setdefault("algorithm", self.rule.name)
            self._check(group)
            for index, parameter in enumerate(group["params"]):
                name = f"parameter {index} of param_groups[{len(self.param_groups) - 1}]"
                require(parameter.dtype is not torch.float64, self.rule.name, name, "float32 or narrower", "float64")
                _blocks(parameter, group, name)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: Mapping[str, Any]) -> None:
        """Refuse settings of matrices that are missing or have no meaning; no host synchronisation."""
        name = self.rule.name
        if missing := sorted(self._settings - group.keys()):
            raise ValueError(
                f"{name} settings: expected all of {sorted(self._settings)}, got none for {missing}. Add them."
            )
        require(group["algorithm"] == name, name, "algorithm", repr(name), group["algorithm"])
        require(group["weight_decay"] >= 0, name, "weight_decay", ">= 0", group["weight_decay"])
        rate = group["lr"]
        is_rate = rate.ndim == 0 if isinstance(rate, torch.Tensor) else rate >= 0
        require(is_rate, name, "lr", "a number >= 0 or a 0-d tensor", rate)
        self.rule.check(group)

    def state_dict(self) -> dict[str, Any]:
        """Return what torch does, with dtypes by their names, which every format of checkpoints takes."""
        found = super().state_dict()
        groups = [{key: _name_of(value) for key, value in group.items()} for group in found["param_groups"]]
        return {**found, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but for what belongs to this optimizer: how parameters hold matrices, dtypes of state.

        Raises:
            ValueError: state that another rule has made, or settings without a meaning.
        """
        saved: list[dict[str, Any]] = []

        def see(_: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
            groups = []
            for number, (ours, theirs) in enumerate(zip(self.param_groups, found["param_groups"], strict=True)):
                require_same_rule(f"param_groups[{number}]", ours, theirs)
                group = {key: _dtype_of(value) if key.endswith("_dtype") else value for key, value in theirs.items()}
                groups.append({**group, **{key: ours[key] for key in _OWN if key in ours}})
                if is_of_matrices(ours):
                    self._check(groups[-1])
            saved.append({**found, "param_groups": groups})
            return saved[-1]

        # The last hook: it sees what others have made of the state dict.
        hook = self.register_load_state_dict_pre_hook(see)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        ids = [key for group in saved[0]["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        matrices = {id(parameter) for group in self.matrix_groups for parameter in group["params"]}
        for key, parameter in zip(ids, parameters, strict=True):
            if id(parameter) in matrices and key in saved[0]["state"]:
                self.state[parameter] = {
                    name: value.to(parameter.device) if isinstance(value, torch.Tensor) else value
                    for name, value in saved[0]["state"][key].items()
                }

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: plans are made anew."""
        kept = {name: getattr(self, name) for name in ("rule", "rest", "_package_bytes", "_settings")}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state and param_groups that were loaded, or all of a copy; `rest` shares them."""
        super().__setstate__(state)
        self._known, self._known_settings, self._works = [], [], []
        self.__dict__.setdefault("guard_rest", nullcontext)
        if self.rest is not None:
            groups = [group for group in self.param_groups if group["algorithm"] != self.rule.name]
            self.rest.__setstate__({"state": self.state, "param_groups": groups})

    @property
    def matrix_groups(self) -> list[dict[str, Any]]:
        """The param_groups that the rule steps."""
        return [group for group in self.param_groups if group["algorithm"] == self.rule.name]

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; with sharded parameters every rank must call it.

        Raises:
            ValueError: a closure, or parameters whose elements do not lie in order.
            RuntimeError: sharded parameters, and nobody has adapted the optimizer.
        """
        if closure is not None:
            raise ValueError(
                f"{type(self).__name__}.step: expected no closure, got one. Compute the loss before the step."
            )
        for group in self.matrix_groups:
            self._check(group)
        for work in self._current_works():
            work.run(self.state)
        if self.rest is not None:
            self._step_rest(self.rest)

    def _step_rest(self, rest: Optimizer) -> None:
        """Step the other optimizer on what this one steps now; hooks of all optimizers are told of this one only."""
        step: Any = type(rest).step
        before = rest.state
        rest.state = self.state
        try:
            with self.guard_rest():
                (step.__wrapped__ if getattr(step, "hooked", False) else step)(rest)
        finally:
            rest.state = before

    @property
    def works(self) -> Sequence[MatrixWork]:
        """What the last step has computed, by mesh and dtypes: plans, and the bytes of their buffers."""
        return self._works

    def _current_works(self) -> list[MatrixWork]:
        parameters = [parameter for group in self.matrix_groups for parameter in group["params"]]
        settings = [self._planned_by(group) for group in self.matrix_groups]
        is_known = len(parameters) == len(self._known) and not any(map(_differ, parameters, self._known))
        if not is_known or settings != self._known_settings:
            self._works = make_works(self._entries(), self.rule, self._package_bytes)
            self._known, self._known_settings = parameters, settings
        return self._works

    def _planned_by(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the settings of a group that plans depend on; loading changes them, or whoever trains."""
        dtypes = self.rule.travel_dtype(group), self.rule.result_dtype(group)
        return id(group), len(group["params"]), group["is_stack"], tuple(group["parts"]), group["joins_pieces"], *dtypes

    def _entries(self) -> Iterable[Entry]:
        lender = getattr(self, "_fsdp_step", None)
        for group in self.matrix_groups:
            for index, parameter in enumerate(group["params"]):
                if isinstance(parameter, FsdpDTensor):
                    raise RuntimeError(
                        f"{type(self).__name__}.step: expected an optimizer that is adapted to sharded parameters, got "
                        f"one of {parameter.geometry.fqn}. Call fully_shard_optimizer first."
                    )
                if not parameter.is_contiguous():
                    raise ValueError(
                        f"{type(self).__name__}.step: expected parameters in contiguous memory, got shape "
                        f"{tuple(parameter.shape)} with strides {parameter.stride()}. Make them contiguous() first."
                    )
                sharded = parameter if lender is None else lender.sharded_of(parameter)
                geometry = getattr(sharded, "geometry", None)
                name = f"parameter {index}" if geometry is None else geometry.fqn
                joined, blocks = _blocks(sharded, group, name)
                yield Entry(name, parameter, group, sharded if geometry is not None else None, joined, tuple(blocks))


_OWN = ("algorithm", "is_stack", "joins_pieces", "parts")
"""Settings that say how this optimizer's parameters hold matrices, whatever was saved."""


def _name_of(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _dtype_of(value: Any) -> Any:
    return getattr(torch, value) if isinstance(value, str) else value


def _differ(one: object, other: object) -> bool:
    return one is not other


def _blocks(parameter: Any, group: Mapping[str, Any], name: str) -> tuple[JoinedPieces, list[MatrixBlock]]:
    """Return how pieces make a parameter, and its blocks, or those of each piece."""
    geometry = getattr(parameter, "geometry", None)
    cut = None if geometry is None else geometry.model_cut
    joined = JoinedPieces()
    if group["joins_pieces"] and cut is not None:
        joined = JoinedPieces(cut.size, cut.dim, cut.stride)
    shape = parameter.shape if geometry is None else geometry.piece_shape
    name = name if geometry is None else geometry.fqn
    if joined.size > 1 and (len(shape) > 2 or group["is_stack"]):
        raise ValueError(
            f"joins_pieces of {name}: expected 2-D parameters, got shape {tuple(shape)}. Set joins_pieces=False there."
        )
    return joined, blocks_of(shape, is_stack=group["is_stack"], parts=group["parts"], joined=joined, name=name)
