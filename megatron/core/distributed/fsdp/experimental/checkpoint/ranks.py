# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`Ranks`: the ranks that save or load together, and how an error of one becomes the error of all.

It knows nothing of tensors and files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from .. import collectives
from .errors import CheckpointError

Result = TypeVar("Result")
_NAMED = 3
"""Ranks whose errors are quoted."""


class Ranks:
    """The ranks of one process group; this process alone where torch.distributed is not initialised.

    Args:
        device: where small tensors for the group's backend lie.
        group: None means all ranks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.group = dist.group.WORLD if group is None and dist.is_initialized() else group
        self._device = device

    @property
    def index(self) -> int:
        """This rank, counted within the group."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self.group is None else self.group.size()

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value; plain JSON values only."""
        if self.group is None:
            return [value]
        data = json.dumps(value).encode()
        return [json.loads(item) for item in collectives.all_gather_bytes(data, self._device, self.group, what=what)]

    def require_same(self, value: str, what: str) -> None:
        """Require an equal text on every rank.

        Raises:
            CheckpointError: texts differ; on every rank.
        """
        digests = self.gather(hashlib.sha256(value.encode()).hexdigest(), what)
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            texts = self.gather(value, what)
            raise CheckpointError(
                f"{what}: expected the same on all {self.size} ranks, got {_first_difference(texts[0], texts[other])} "
                f"on ranks 0 and {other}. Call it with the same arguments and model on every rank."
            )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise on every rank if the block raises on any; nobody waits for a rank that has failed.

        Raises:
            CheckpointError: an error that the block should not hide was raised on some rank.
        """
        error: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as raised:
            error = raised
        texts = self.gather(None if error is None else _text(error), what)
        failed = [rank for rank, text in enumerate(texts) if text is not None]
        if not failed:
            return
        if isinstance(error, CheckpointError) and len(set(texts)) == 1:
            raise error
        quoted = "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed[:_NAMED])
        count = "" if self.size == 1 else f" on {len(failed)} of {self.size} ranks"
        raise CheckpointError(f"{what}: expected it to succeed, got an error{count}. {quoted}") from error

    def first(self, function: Callable[[], Result], what: str) -> Result | None:
        """Call a function on the first rank; return its result there and None elsewhere.

        Raises:
            CheckpointError: it raised; on every rank.
        """
        result = None
        with self.together(what):
            if self.index == 0:
                result = function()
        return result


def _text(error: BaseException) -> str:
    """Return what an error says; of DCP's, which names ranks' errors, the first one."""
    if isinstance(error, CheckpointException):
        inner = [_text(failure[0]) for _, failure in sorted(error.failures.items())]
        return "; ".join(dict.fromkeys(inner))
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _first_difference(one: str, other: str) -> str:
    lines = zip(f"{one}\n".splitlines(), f"{other}\n".splitlines(), strict=False)
    for ours, theirs in lines:
        if ours != theirs:
            return f"{ours!r} and {theirs!r}"
    return f"{len(one.splitlines())} and {len(other.splitlines())} entries"
