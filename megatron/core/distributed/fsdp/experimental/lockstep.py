# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A debug mode in which ranks compare every collective before any of them issues it: an error instead of a hang.

Comparison goes through the key-value store of torch.distributed, on the host, so that no backend is entered by some
ranks only. It costs some store requests per collective, and knows nothing of collectives that others issue.

[Note: the verdict]
Each rank writes down its call, counts itself in and waits for the verdict on this call. The last to arrive compares
all calls and gives the verdict; a rank whose time is up gives it, too, naming who is missing. The store keeps whichever
came first, so that all ranks go on or none does, and a rank that comes late finds out why the others have left.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from .collectives import dump_stacks, set_call_check

DEFAULT_TIMEOUT_S = 300.0

_AGREED = "agreed"
_block_numbers = count()


@contextmanager
def check_ranks(timeout_s: float | None = None) -> Iterator[None]:
    """Compare every collective of the runtime across ranks before it is issued, inside the block; slow.

    All ranks enter and leave the block; leaving it is compared, too. ``MEGATRON_FSDP_CHECK_RANKS=1`` in the environment
    does the same for a whole program.

    Args:
        timeout_s: how long a rank waits for the others; None means ``MEGATRON_FSDP_TIMEOUT_S`` or else 300.

    Raises:
        ValueError: `timeout_s` or the environment variable is not a number > 0.
        RuntimeError: inside the block, where ranks come with different calls or some do not come in time.
    """
    check = _RankCheck(_timeout_s(timeout_s))
    previous = set_call_check(check)
    try:
        yield
    except BaseException as error:
        check.leave(f"leaving check_ranks with {type(error).__name__}")
        raise
    finally:
        set_call_check(previous)
    check.meet("leaving check_ranks")


def _timeout_s(given: float | None) -> float:
    value = os.environ.get("MEGATRON_FSDP_TIMEOUT_S", DEFAULT_TIMEOUT_S) if given is None else given
    try:
        timeout_s = float(value)
    except (TypeError, ValueError):
        timeout_s = 0.0
    if not 0 < timeout_s < math.inf:
        name = "MEGATRON_FSDP_TIMEOUT_S" if given is None else "check_ranks timeout_s"
        raise ValueError(f"{name}: expected a number of seconds > 0, got {value!r}.")
    return timeout_s


class _RankCheck:
    """The calls of one block, by process group; a `CallCheck`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._block = next(_block_numbers)
        # Weak: a process group that outlives the interpreter's shutdown can abort.
        self._calls: WeakKeyDictionary[dist.ProcessGroup, _GroupCalls] = WeakKeyDictionary()

    def before(self, operation: str, what: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """See `CallCheck`."""
        calls = self._calls.get(group)
        if calls is None:
            calls = self._calls[group] = _GroupCalls(group, self._block, self._timeout_s)
        calls.meet(f"{operation} of {what} ({tensor.numel()} x {tensor.dtype})")

    def meet(self, call: str) -> None:
        """Wait for the other ranks of every group seen so far."""
        for calls in self._in_one_order():
            calls.meet(call)

    def leave(self, call: str) -> list[str]:
        """Tell the other ranks of every group seen so far, without waiting; returns what they have complained of."""
        return [complaint for calls in self._in_one_order() if (complaint := calls.leave(call))]

    def _in_one_order(self) -> list[_GroupCalls]:
        return [self._calls[group] for group in sorted(self._calls, key=lambda group: group.group_name)]


class _GroupCalls:
    """The calls of one process group, numbered; see [Note: the verdict]."""

    def __init__(self, group: dist.ProcessGroup, block: int, timeout_s: float) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        self._number = 0
        # A connection of its own: a client that waits would block the backends' own use of theirs.
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        self._last = PrefixStore("megatron_fsdp/last", store)
        self._store = PrefixStore(f"megatron_fsdp/{block}/{group.group_name}/{self._ranks[0]}", store)

    def meet(self, call: str) -> None:
        """Return once every rank has come with the same call.

        Raises:
            RuntimeError: ranks came with different calls, or not in time, or the store is gone.
        """
        number = self._number
        try:
            complaint = self._arrive(call) or self._wait(number, call)
        except dist.DistNetworkError as error:
            dump_stacks()
            raise RuntimeError(
                f"{call}: expected ranks {self._ranks} to compare their calls, got no answer from the store on rank 0: "
                f"{error}. Rank 0 has probably ended; see what it printed."
            ) from error
        if complaint:
            dump_stacks()
            raise RuntimeError(complaint)
        if self._store.add(f"{number}/passed", 1) == len(self._ranks):
            for key in (*map(str, self._ranks), "arrived", "verdict", "passed"):
                self._store.delete_key(f"{number}/{key}")

    def leave(self, call: str) -> str:
        """Arrive without waiting; returns what other ranks have complained of, or nothing."""
        try:
            return self._arrive(call)
        except dist.DistNetworkError:
            # The store is gone with rank 0, and nobody is left to be told.
            return ""

    def _arrive(self, call: str) -> str:
        """Publish this rank's call; the last to arrive judges. Returns a complaint if there is one already."""
        number = self._number
        self._number += 1
        self._store.set(f"{number}/{self._rank}", call)
        self._last.set(str(self._rank), call)
        verdict = b""
        if self._store.add(f"{number}/arrived", 1) == len(self._ranks):
            verdict = self._store.compare_set(f"{number}/verdict", "", self._compare(number) or _AGREED)
        return "" if verdict.decode() == _AGREED else verdict.decode()

    def _wait(self, number: int, call: str) -> str:
        """Return the verdict on call `number`: a complaint, or nothing if all ranks agree."""
        key = f"{number}/verdict"
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
        except dist.DistNetworkError:
            raise
        except RuntimeError:
            # The time is up; the kinds of stores differ in the class of this error.
            missing = [rank for rank in self._ranks if not self._store.check([f"{number}/{rank}"])]
            if missing:
                self._store.compare_set(key, "", self._describe_missing(missing, call))
        # If nobody is missing, the last to arrive is about to judge.
        verdict: str = self._store.get(key).decode()
        return "" if verdict == _AGREED else verdict

    def _compare(self, number: int) -> str:
        """Return which ranks came with which call, or nothing if it is the same one."""
        keys = [f"{number}/{rank}" for rank in self._ranks]
        by_call: dict[str, list[int]] = {}
        for rank, call in zip(self._ranks, self._store.multi_get(keys), strict=True):
            by_call.setdefault(call.decode(), []).append(rank)
        if len(by_call) == 1:
            return ""
        found = "; ".join(f"{call} on ranks {ranks}" for call, ranks in by_call.items())
        return (
            f"call {number} of ranks {self._ranks}: expected the same call on every rank, got {found}. Call the same "
            "units in the same order on every rank; multiply by zero, or pass zero rows, where one is not needed."
        )

    def _describe_missing(self, missing: list[int], call: str) -> str:
        history = "; ".join(f"rank {rank} did last: {self._describe_last(rank)}" for rank in missing)
        return (
            f"{call}: expected ranks {self._ranks} within {self._timeout_s:g} s, got no call from ranks {missing}: "
            f"{history}. Call every unit on every rank: multiply by zero, or pass zero rows, where one is not needed. "
            "If a rank is only slow, raise MEGATRON_FSDP_TIMEOUT_S or check_ranks' timeout_s."
        )

    def _describe_last(self, rank: int) -> str:
        if self._last.check([str(rank)]):
            last: str = self._last.get(str(rank)).decode()
            return last
        return "nothing, or it runs without the debug mode"


def _check_from_environment() -> None:
    """Turn the mode on for the whole program if the environment says so."""
    value = os.environ.get("MEGATRON_FSDP_CHECK_RANKS", "0")
    if value not in ("0", "1"):
        raise ValueError(f"MEGATRON_FSDP_CHECK_RANKS: expected 0 or 1, got {value!r}.")
    if value == "1":
        check = _RankCheck(_timeout_s(None))
        set_call_check(check)
        atexit.register(_report_end, check)


def _report_end(check: _RankCheck) -> None:
    for complaint in check.leave("the end of the program"):
        print(complaint, file=sys.stderr)


_check_from_environment()
