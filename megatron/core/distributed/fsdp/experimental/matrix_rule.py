# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`MatrixRule`: what a `MatrixOptimizer` computes with shards, element by element, and with whole matrices.

A rule sees tensors. Where their elements lie, and how they travel, is the optimizer's and the pipeline's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

MOMENTUM = "momentum_buffer"
"""Key of the momentum in an optimizer's state."""


def require(is_good: bool, rule: str, setting: str, expected: str, found: object) -> None:
    """Refuse a setting that is not good.

    Raises:
        ValueError: it is not.
    """
    if not is_good:
        raise ValueError(f"{rule} {setting}: expected {expected}, got {found!r}. Correct it in the param_group.")


def require_same_rule(name: str, ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse state that another optimizer has made; it would mean something else.

    Args:
        name: of the parameter.
        ours: settings of its param_group.
        saved: settings of the param_group that it was saved in.

    Raises:
        ValueError: one of them is of a matrix rule and the other is not of the same.
    """
    expected, found = map(_rule_of, (ours, saved))
    if expected != found:
        raise ValueError(
            f"optimizer state of {name}: expected that of {expected}, got that of {found}. Go on with the optimizer, "
            "and the choice of matrices, that has saved it, or load the weights alone (pretrain_gpt.py: "
            "--no-load-optim or --finetune)."
        )


def _rule_of(settings: Mapping[str, Any]) -> str:
    return str(settings["algorithm"]) if is_of_matrices(settings) else "an element-wise optimizer"


def is_of_matrices(settings: Mapping[str, Any]) -> bool:
    """Return whether settings are those of a param_group of matrices."""
    return "is_stack" in settings


class MatrixRule(ABC):
    """Momentum on shards, and one update of whole matrices; subclasses say which.

    The momentum is ``m + (1 - momentum) * (gradient - m)``; owners are given it, or with ``nesterov`` the gradient
    moved towards it by ``momentum``. What `solve` returns for that is subtracted from the weights, times the learning
    rate and `scale`.
    """

    name: str
    """Names the rule in param_groups, errors and checkpoints."""

    def defaults(self) -> dict[str, Any]:
        """Return the settings of a param_group with their defaults."""
        return {"momentum": 0.95, "nesterov": False, "momentum_dtype": torch.float32, "travel_dtype": None}

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse settings.

        Raises:
            ValueError: a setting that has no meaning.
        """
        require(0.0 <= group["momentum"] < 1.0, self.name, "momentum", "in [0, 1)", group["momentum"])
        floats = (torch.float32, torch.bfloat16)
        require(
            group["momentum_dtype"] in floats,
            self.name,
            "momentum_dtype",
            "float32 or bfloat16",
            group["momentum_dtype"],
        )
        travel = group["travel_dtype"]
        require(travel is None or travel in floats, self.name, "travel_dtype", "float32, bfloat16 or None", travel)

    @abstractmethod
    def cost(self, count: int, rows: int, columns: int, group: Mapping[str, Any]) -> int:
        """Return how many operations `solve` takes for a stack of `count` matrices."""

    @abstractmethod
    def solve(self, matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return the update of a whole matrix.

        Args:
            matrix: [rows, columns], or [count, rows, columns] for matrices of a stack, float32 or the ``travel_dtype``;
                it may be overwritten.
            group: settings.

        Returns:
            The same shape; it is cast to `result_dtype`. That of zeros is finite: state is made by such a step.
        """

    def scale(self, rows: int, columns: int, group: Mapping[str, Any]) -> float:
        """Return what the update of a matrix is multiplied by, besides the learning rate."""
        return 1.0

    def travel_dtype(self, group: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype in which shards travel to owners."""
        return group["travel_dtype"] or torch.float32

    def result_dtype(self, group: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype in which updates travel back."""
        return torch.float32

    def new_state(self, weight: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return state of a shard before its first step; element-wise, so that it can be cut anew."""
        return {MOMENTUM: torch.zeros_like(weight, dtype=group["momentum_dtype"])}

    def match_state(self, state: dict[str, torch.Tensor], group: Mapping[str, Any]) -> None:
        """Bring state to the dtypes of `group`, which may have changed, as by a load."""
        if MOMENTUM in state and state[MOMENTUM].dtype is not group["momentum_dtype"]:
            state[MOMENTUM] = state[MOMENTUM].to(group["momentum_dtype"])

    def accumulate(
        self, gradients: list[torch.Tensor], states: list[dict[str, torch.Tensor]], group: Mapping[str, Any]
    ) -> None:
        """Update the state of shards by their gradients, in place, element by element.

        Args:
            gradients: local shards, float32.
            states: what `new_state` returned for each, as it is now.
            group: settings.
        """
        momenta = [state[MOMENTUM] for state in states]
        if group["momentum_dtype"] is torch.float32:
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            return
        wide = [momentum.float() for momentum in momenta]
        torch._foreach_lerp_(wide, gradients, 1 - group["momentum"])
        torch._foreach_copy_(momenta, wide)

    def prepare(
        self,
        gradients: list[torch.Tensor],
        states: list[dict[str, torch.Tensor]],
        group: Mapping[str, Any],
        into: list[torch.Tensor],
    ) -> None:
        """Write what owners get of runs of elements, element by element.

        Args:
            gradients: flat runs, float32.
            states: flat runs of the state, which is that after `accumulate`.
            group: settings.
            into: one flat tensor for each, in the travel dtype.
        """
        momenta = [state[MOMENTUM] for state in states]
        if not group["nesterov"]:
            torch._foreach_copy_(into, momenta)
            return
        for gradient, momentum, target in zip(gradients, momenta, into, strict=True):
            torch.lerp(gradient, momentum.float(), group["momentum"], out=target)
