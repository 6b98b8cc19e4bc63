# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`HostStaging`: copies a state dict to host memory that is used again, so that training goes on while it is written.

It knows nothing of files and communicates with nobody.

[Note: blocks]
Tensors are packed into blocks of host memory, the largest first, each into the first block with room. Blocks have sizes
of powers of two, because torch's allocator of pinned memory rounds up to one: a buffer for each tensor would take up to
twice its size, and thousands of pinned allocations take long.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..device import Stream, current_stream, finish_stream, host_buffer, new_stream
from ..dtensor import FsdpDTensor

_LEAST_BLOCK_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64
_ATTRIBUTES_OF_PARAMETERS = ("_fsdp_", "_is_param")


class HostStaging:
    """Host memory for one state dict at a time: the next `stage` overwrites what the last one returned."""

    def __init__(self) -> None:
        self._shapes: list[tuple[torch.device, torch.dtype, torch.Size]] = []
        self._buffers: list[torch.Tensor] = []
        self._streams: dict[torch.device, Stream] = {}

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state dict; waits until all of it has arrived. Called on the stream that has computed its tensors.

        The caller must have waited for whatever still reads the last result.

        Args:
            state_dict: nested dicts, lists and tuples of tensors, DTensors and other values.

        Returns:
            The same structure: tensors on the host, contiguous, with the attributes that they had; DTensors of the same
            class and mesh around a local part on the host, connected to no unit; deep copies of other values.

        Raises:
            TypeError: a tensor of another class that wraps tensors.
        """
        tensors = {id(tensor): tensor for tensor in _tensors(state_dict)}
        sources = [_local(tensor) for tensor in tensors.values()]
        shapes = [(source.device, source.dtype, source.shape) for source in sources]
        if shapes != self._shapes:
            self._shapes, self._buffers = [], []  # Their memory is free before more is allocated.
            self._buffers = _allocate(sources)
            self._shapes = shapes
        self._copy(sources)
        copies: dict[int, Any] = {
            key: _wrap(tensor, buffer.view(buffer.shape))
            for (key, tensor), buffer in zip(tensors.items(), self._buffers, strict=True)
        }
        return dict(copy.deepcopy(state_dict, copies))

    def release(self) -> None:
        """Give the host memory up; what `stage` has returned stays valid as long as somebody holds it."""
        self._shapes, self._buffers = [], []

    def _copy(self, sources: list[torch.Tensor]) -> None:
        """Fill the buffers: every device on a stream of its own, the host meanwhile."""
        pairs = list(zip(sources, self._buffers, strict=True))
        devices = {source.device for source in sources if source.device.type != "cpu"}
        for device in devices:
            stream = self._streams.get(device) or new_stream(device, "staging")
            self._streams[device] = stream
            stream.wait_stream(current_stream(device))
            with stream:
                for source, buffer in pairs:
                    if source.device == device:
                        buffer.copy_(source, non_blocking=True)
        for source, buffer in pairs:
            if source.device.type == "cpu":
                buffer.copy_(source)
        for device in devices:
            finish_stream(self._streams[device])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that lie on this rank."""
    if isinstance(tensor, FsdpDTensor):
        tensor.geometry.notify_use(writes=False)
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"stage of a state dict: expected tensors and DTensors, got a {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)}. Put what it is made of into the state dict, or its dequantized value."
        )
    return tensor.detach()


def _allocate(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a host buffer for each tensor."""
    buffers: dict[int, torch.Tensor] = {}
    blocks: list[tuple[torch.Tensor, torch.device]] = []
    used: list[int] = []
    for index in sorted(range(len(sources)), key=lambda index: -sources[index].nbytes):
        source = sources[index]
        room = -(-source.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        fitting = (
            number
            for number, (block, device) in enumerate(blocks)
            if device == source.device and used[number] + room <= block.numel()
        )
        number = next(fitting, len(blocks))
        if number == len(blocks):
            size = max(_LEAST_BLOCK_BYTES, 1 << math.ceil(math.log2(max(1, room))))
            blocks.append((host_buffer(size, source.device), source.device))
            used.append(0)
        start, used[number] = used[number], used[number] + room
        buffers[index] = blocks[number][0][start : start + source.nbytes].view(source.dtype).view(source.shape)
    return [buffers[index] for index in range(len(sources))]


def _wrap(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Return what `tensor` is, around a local part on the host, with references to its attributes."""
    if not isinstance(tensor, DTensor):
        return _with_attributes(host, tensor)
    source: Any = tensor
    kind: Any = DTensor
    names, context = source.__tensor_flatten__()
    inner = {name: getattr(source, name) for name in names}
    inner["_local_tensor"] = _with_attributes(host, source._local_tensor)
    # Not `from_local`, which would bring the local part to the mesh's device.
    wrapped = kind.__tensor_unflatten__(inner, context, source.size(), source.stride())
    wrapped = _with_attributes(wrapped.requires_grad_(False), source)
    wrapped.__class__ = source.__class__
    if isinstance(wrapped, FsdpDTensor):
        wrapped._geometry = dataclasses.replace(wrapped._geometry, owner=None)
    result: torch.Tensor = wrapped
    return result


def _with_attributes(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    kept = {name: value for name, value in vars(source).items() if not name.startswith(_ATTRIBUTES_OF_PARAMETERS)}
    vars(target).update(kept)
    return target
