# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`Muon` and `fully_shard_muon`: momentum orthogonalised by Newton-Schulz, on sharded and on plain parameters.

Which parameters are matrices is matrix_choice.py's; how matrices come together on one rank, matrix_optimizer.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .matrix_choice import choose_matrices, describe_choice
from .matrix_optimizer import PACKAGE_BYTES, MatrixOptimizer
from .matrix_rule import MatrixRule, require
from .newton_schulz import COEFFICIENTS, PRECISIONS, count_operations, newton_schulz
from .optimizer import fully_shard_optimizer

SCALE_MODES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
}
"""What updates of [rows, columns] are multiplied by, by megatron-core's names: arXiv:2502.16982, Jordan's Muon (torch's
"original"), arXiv:2502.07529. torch's "match_rms_adamw" is "spectral" with an extra scale of 0.2."""


class MuonRule(MatrixRule):
    """Orthogonalised momentum. Source: https://kellerjordan.github.io/posts/muon and arXiv:2502.16982."""

    name = "muon"

    def defaults(self) -> dict[str, Any]:
        """See `MatrixRule`; `Muon` says what they mean."""
        return {
            **super().defaults(),
            "num_ns_steps": 5,
            "coefficients": "quintic",
            "precision": "medium",
            "scale_mode": "spectral",
            "extra_scale_factor": 1.0,
        }

    def check(self, group: Mapping[str, Any]) -> None:
        """See `MatrixRule`."""
        super().check(group)
        steps, scale = group["num_ns_steps"], group["extra_scale_factor"]
        require(isinstance(steps, int) and 1 <= steps < 100, self.name, "num_ns_steps", "an int from 1 to 99", steps)
        require(scale > 0, self.name, "extra_scale_factor", "> 0", scale)
        for setting, known in (
            ("coefficients", COEFFICIENTS),
            ("precision", PRECISIONS),
            ("scale_mode", SCALE_MODES),
        ):
            require(group[setting] in known, self.name, setting, f"one of {tuple(known)}", group[setting])

    def cost(self, count: int, rows: int, columns: int, group: Mapping[str, Any]) -> int:
        """See `MatrixRule`."""
        return count_operations(count, rows, columns, group["num_ns_steps"])

    def solve(self, matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """See `MatrixRule`."""
        return newton_schulz(matrix, group["num_ns_steps"], group["coefficients"], group["precision"])

    def scale(self, rows: int, columns: int, group: Mapping[str, Any]) -> float:
        """See `MatrixRule`."""
        factor: float = SCALE_MODES[group["scale_mode"]](rows, columns) * group["extra_scale_factor"]
        return factor

    def result_dtype(self, group: Mapping[str, Any]) -> torch.dtype:
        """See `MatrixRule`."""
        return torch.bfloat16 if group["precision"] == "medium" else torch.float32


class Muon(MatrixOptimizer):
    """Muon over matrices, and perhaps an element-wise optimizer over other parameters.

    Args:
        params: see `MatrixOptimizer`.
        lr: learning rate.
        momentum: share of the old momentum that a step keeps; the gradient gets the rest.
        nesterov: orthogonalise the gradient moved towards the momentum by `momentum`, rather than the momentum.
        weight_decay: see `MatrixOptimizer`.
        decoupled_weight_decay: see `MatrixOptimizer`.
        num_ns_steps: Newton-Schulz steps.
        coefficients: of these steps, one of "simple", "quintic" and "polar_express".
        precision: of their products: "medium" for bfloat16, "high" for TF32, "highest" for float32.
        scale_mode: one of "spectral", "shape_scaling" and "unit_rms_norm".
        extra_scale_factor: what updates are multiplied by besides.
        momentum_dtype: float32 or bfloat16.
        travel_dtype: dtype in which matrices travel to their owners; None for float32. bfloat16 halves the bytes and
            rounds, also where nothing travels.
        rest: see `MatrixOptimizer`.
        package_bytes: see `MatrixOptimizer`.

    Raises:
        ValueError: see `MatrixOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        decoupled_weight_decay: bool = True,
        num_ns_steps: int = 5,
        coefficients: str = "quintic",
        precision: str = "medium",
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        momentum_dtype: torch.dtype = torch.float32,
        travel_dtype: torch.dtype | None = None,
        rest: Optimizer | None = None,
        package_bytes: int = PACKAGE_BYTES,
    ) -> None:
        super().__init__(
            params,
            MuonRule(),
            lr=lr,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            rest=rest,
            package_bytes=package_bytes,
            momentum=momentum,
            nesterov=nesterov,
            num_ns_steps=num_ns_steps,
            coefficients=coefficients,
            precision=precision,
            scale_mode=scale_mode,
            extra_scale_factor=extra_scale_factor,
            momentum_dtype=momentum_dtype,
            travel_dtype=travel_dtype,
        )


def fully_shard_muon(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    rest: Callable[[Any], Optimizer] | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    parts: Mapping[str, Sequence[int]] | None = None,
    joins_pieces: bool = False,
    report: Callable[[str], None] | None = print,
    **settings: Any,
) -> Muon:
    """Return an adapted optimizer for a sharded model: Muon for its matrices, AdamW for everything else.

    Matrices are weights with two dims or more of the logical parameter, but for embeddings, the last weight that is
    shaped like the largest of them (an output head), and what `exclude` names. Those with more dims are flattened if a
    convolution has them; three dims elsewhere are a stack of matrices.

    Args:
        model: sharded, with all of its units; each rank calls this.
        lr: of the matrices.
        rest: makes the optimizer of the other parameters from a list of them; None for AdamW with learning rate 3e-4
            and weight decay 0.1, fused on accelerators.
        exclude: patterns of names, as in a shell, of further parameters that are not for Muon.
        include: patterns of names of parameters that are for Muon although they look like an output head.
        parts: by pattern of names, the rows of matrices that are fused in one parameter; see `MatrixOptimizer`.
        joins_pieces: orthogonalise matrices as a whole that tensor parallelism has cut, rather than piece by piece.
        report: takes the table of what goes where, on the first rank of the program; None for none.
        settings: of `Muon`.

    Raises:
        ValueError: no matrices, patterns that name nothing, parts that do not fit, or settings without a meaning.
    """
    choice = choose_matrices(model, exclude, parts or {}, include)
    rest_optimizer = None
    if choice.others:
        others = list(choice.others.values())
        rest_optimizer = (rest or _adamw)(others)
    groups = [{**group, "joins_pieces": joins_pieces} for group in choice.groups()]
    optimizer = Muon(groups, lr, rest=rest_optimizer, **settings)
    fully_shard_optimizer(optimizer)
    if report is not None and choice.is_first_rank:
        report(describe_choice(choice, type(rest_optimizer).__name__))
    return optimizer


def _adamw(parameters: Sequence[nn.Parameter]) -> Optimizer:
    is_fused = parameters[0].device.type != "cpu"
    return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, fused=is_fused, capturable=is_fused)
