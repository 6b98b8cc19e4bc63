# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which keys of two checkpoints mean the same: prefixes of wrappers, and the halves of a SwiGLU projection.

Names are changed only to find pairs; nothing is renamed in a checkpoint.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.core.distributed.fsdp.experimental.checkpoint.boxes import intersect
from megatron.core.distributed.fsdp.experimental.layout import Box
from megatron.inspector.opened import Checkpoint

_OPTIMIZER = re.compile(r"^(optimizer\.(?:state|param_to_group_meta)\.)(.*)$", re.DOTALL)
_PREFIX = re.compile(r"^(?:model\.|module\.)+")
_GATE = re.compile(r"^(.*linear_fc1\.(?:weight|bias)\d*)_w((?:\.[^.]+)?)$", re.DOTALL)


def canonical(key: str) -> str:
    """Return a key without the prefixes that wrappers of the model add, also inside an optimizer's keys.

    Example: ``optimizer.state.module.module.decoder.w.exp_avg`` is ``optimizer.state.decoder.w.exp_avg``.
    """
    match = _OPTIMIZER.match(key)
    start, rest = match.groups() if match else ("", key)
    return start + (_PREFIX.sub("", rest) or rest)


def other_half(name: str) -> tuple[str, str] | None:
    """Return of a SwiGLU gate's name the fused one and the other half's, or None.

    Example: ``…fc1.weight_w.exp_avg`` gives ``…fc1.weight.exp_avg`` and ``…fc1.weight_v.exp_avg``.
    """
    match = _GATE.match(name)
    return (match[1] + match[2], f"{match[1]}_v{match[2]}") if match else None


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a checkpoint: one key, or two of equal size whose rows follow each other.

    Attributes:
        keys: one, or those of the gate and the up half.
        size: of the whole.
        dtype: of the first part.
    """

    checkpoint: Checkpoint
    keys: tuple[str, ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box) -> torch.Tensor:
        """Read a box of the whole."""
        if len(self.keys) == 1:
            return self.checkpoint.read(self.keys[0], box)
        rows = self.size[0] // 2
        parts = []
        for index, key in enumerate(self.keys):
            found = intersect(box, Box((index * rows, *[0] * (len(self.size) - 1)), (rows, *self.size[1:])))
            if found:
                own = Box((found.offsets[0] - index * rows, *found.offsets[1:]), found.sizes)
                parts.append(self.checkpoint.read(key, own))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def by_name(checkpoint: Checkpoint, other: Iterable[str]) -> tuple[dict[str, NamedTensor], dict[str, str]]:
    """Name a checkpoint's tensors and byte entries so that those of another checkpoint can be found.

    Args:
        checkpoint: whose keys are named.
        other: the keys of the other one; halves are joined only where it has them fused.

    Returns:
        The tensors, and the keys of the byte entries, by canonical name; or by key, where two keys share a name.
    """
    keys = [*checkpoint.tensors, *checkpoint.entries]
    uses = Counter(canonical(key) for key in keys)
    names = {key: canonical(key) if uses[canonical(key)] == 1 else key for key in keys}
    tensors = {
        names[key]: NamedTensor(checkpoint, (key,), tuple(entry.size), entry.properties.dtype)
        for key, entry in checkpoint.tensors.items()
    }
    others = {canonical(key) for key in other}
    for gate_name in list(tensors):
        fused, up_name = other_half(gate_name) or ("", "")
        gate, up = tensors[gate_name], tensors.get(up_name)
        if up is None or fused not in others or fused in tensors or gate_name in others:
            continue
        if (gate.size, gate.dtype) == (up.size, up.dtype) and gate.size:
            size = (2 * gate.size[0], *gate.size[1:])
            tensors[fused] = NamedTensor(checkpoint, (*gate.keys, *up.keys), size, gate.dtype)
            del tensors[gate_name], tensors[up_name]
    return tensors, {names[key]: key for key in checkpoint.entries}
