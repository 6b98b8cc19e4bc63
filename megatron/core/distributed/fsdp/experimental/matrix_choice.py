# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model are matrices for a `MatrixOptimizer`, by name and logical shape. It steps nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.conv import _ConvNd


@dataclass(frozen=True)
class MatrixParameter:
    """A parameter that holds matrices.

    Attributes:
        parameter: sharded, or plain.
        is_stack: dim 0 counts matrices.
        parts: rows of the matrices fused in it, repeated as often as they fit; empty for one.
    """

    parameter: Any
    is_stack: bool = False
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class MatrixChoice:
    """The trainable parameters of a model in two sets, by name.

    Attributes:
        matrices: for the matrix rule.
        others: for an element-wise optimizer.
        reasons: why each of the others is not a matrix.
    """

    matrices: dict[str, MatrixParameter] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the rank that reports."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def groups(self) -> list[dict[str, Any]]:
        """Return param_groups of the matrices: one for each way in which parameters hold them."""
        found: dict[tuple[bool, tuple[int, ...]], list[Any]] = {}
        for item in self.matrices.values():
            found.setdefault((item.is_stack, item.parts), []).append(item.parameter)
        return [{"params": params, "is_stack": is_stack, "parts": parts} for (is_stack, parts), params in found.items()]


def choose_matrices(
    model: nn.Module,
    exclude: Sequence[str] = (),
    parts: Mapping[str, Sequence[int]] | None = None,
    include: Sequence[str] = (),
) -> MatrixChoice:
    """Sort the trainable parameters of a model.

    Args:
        model: sharded or plain.
        exclude: patterns of names of parameters that are not for the matrix rule.
        parts: rows of fused matrices, by pattern of names.
        include: patterns of names; one names the parameter that is a matrix although it looks like an output head.

    Raises:
        ValueError: no matrices, or a pattern that no parameter has, or for `include` not what looks like a head.
    """
    choice = MatrixChoice()
    parts = parts or {}
    head, table = _output_head(model)
    used: set[str] = set()
    for name, parameter, module in _trainable(model):
        shape = tuple(parameter.shape)
        matched = [pattern for pattern in exclude if fnmatchcase(name, pattern)]
        wanted = [pattern for pattern in include if fnmatchcase(name, pattern)]
        used |= {*matched, *(wanted if name == head else ())}
        if len(shape) < 2:
            reason = f"{len(shape)}-D"
        elif isinstance(module, _TABLES):
            reason = "embedding"
        elif name == head and not wanted:
            reason = f"shaped like the embedding {table}, and the last one"
        elif matched:
            reason = f"excluded by {matched[0]!r}"
        elif len(shape) > 3 and not isinstance(module, _ConvNd):
            reason = f"{len(shape)}-D, and no convolution's"
        else:
            fitting = [pattern for pattern in parts if fnmatchcase(name, pattern)]
            used |= set(fitting)
            is_stack = len(shape) == 3 and not isinstance(module, _ConvNd)
            choice.matrices[name] = MatrixParameter(parameter, is_stack, tuple(parts[fitting[0]]) if fitting else ())
            continue
        choice.others[name] = parameter
        choice.reasons[name] = reason
    if unused := sorted({*exclude, *parts, *include} - used):
        raise ValueError(
            f"patterns of matrices: expected each to name a parameter, got {unused[:3]} without one. Correct or drop "
            "them; names are those of named_parameters()."
        )
    if not choice.matrices:
        raise ValueError(
            f"matrices of {type(model).__name__}: expected some trainable weight of two dims or more that is no "
            "embedding, got none. Use an element-wise optimizer."
        )
    return choice


_TABLES = (nn.Embedding, nn.EmbeddingBag)


def _output_head(model: nn.Module) -> tuple[str, str]:
    """Return the names of a model's output head and of the embedding that it is shaped like; empty if there is none.

    It is the last weight with the shape of the largest embedding, unless that is tied to a module that is none.
    """
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, _TABLES)]
    if not tables:
        return "", ""
    name, largest = max(tables, key=lambda item: item[1].weight.shape[0])
    tied = [
        module
        for module in model.modules()
        if not isinstance(module, _TABLES) and any(p is largest.weight for p in module._parameters.values())
    ]
    alike = [
        found
        for found, parameter, module in _trainable(model)
        if tuple(parameter.shape) == tuple(largest.weight.shape) and not isinstance(module, _TABLES)
    ]
    return ("", "") if tied or not alike else (alike[-1], name)


def _trainable(model: nn.Module) -> Iterable[tuple[str, Any, nn.Module]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter, module


def describe_choice(choice: MatrixChoice, rest: str) -> str:
    """Return a table of what is stepped how: one line for each shape and kind.

    Args:
        choice: of a model.
        rest: names the optimizer of the others.
    """
    lines = [f"{'optimizer':<12} {'parameters':>10}  {'shape':<20} matrices; why"]
    rows: dict[tuple[str, str, str], int] = {}
    for item in choice.matrices.values():
        what = "stack of matrices" if item.is_stack else "matrix"
        what += f", parts of rows {'+'.join(map(str, item.parts))}" if item.parts else ""
        key = ("Muon", "x".join(map(str, item.parameter.shape)), what)
        rows[key] = rows.get(key, 0) + 1
    for name, parameter in choice.others.items():
        key = (rest, "x".join(map(str, parameter.shape)), choice.reasons[name])
        rows[key] = rows.get(key, 0) + 1
    lines += [f"{kind:<12} {number:>10}  {shape:<20} {what}" for (kind, shape, what), number in rows.items()]
    return "\n".join(lines)
