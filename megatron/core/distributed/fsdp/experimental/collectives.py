# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Collectives on flat tensors: the only file that communicates.

Every call is synchronous with respect to the current stream: on an accelerator it returns once the work is enqueued,
on the host once it is done. Buffers, placements and schedules are other files' business.

Every call is told `what` it communicates, a unit's buffer as a rule, for errors and for the `CallCheck`.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from .device import report_collective

Reduction = Literal["sum", "avg", "max", "min"]

_ProcessGroup: Any = dist.ProcessGroup
# torch.distributed's own functions around these methods cost the host several times what the call itself does. Their
# names are those of torch 2.13, and before.
_all_gather = getattr(_ProcessGroup, "all_gather_single", None) or _ProcessGroup._allgather_base
_reduce_scatter = getattr(_ProcessGroup, "reduce_scatter_single", None) or _ProcessGroup._reduce_scatter_base

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _in_order(options: Any, operation: Any = None) -> Any:
    """Return options of a call that is done, for the current stream, when it returns."""
    options.asyncOp = False
    if operation is not None:
        options.reduceOp = operation
    return options


_gather_options = _in_order(AllgatherOptions())
_scatter_options = {name: _in_order(ReduceScatterOptions(), operation) for name, operation in _OPERATIONS.items()}
_all_reduce_options = {name: _in_order(AllreduceOptions(), operation) for name, operation in _OPERATIONS.items()}

_STDERR = 2
"""A descriptor rather than ``sys.stderr``, which notebooks and test runners replace by objects without one."""


class CallCheck(Protocol):
    """Sees every call before the backend does; plugged in by the debug mode in `lockstep.py`."""

    def before(self, operation: str, what: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Raise if the ranks of `group` have not all come with this call; `tensor` is its larger side."""
        ...


_check: CallCheck | None = None
_NOTHING = torch.empty(0, device="cpu")
"""What ranks that exchange different tensors show to a `CallCheck`."""


def set_call_check(check: CallCheck | None) -> CallCheck | None:
    """Let `check` see every call from now on, or none; returns the previous one."""
    global _check
    previous, _check = _check, check
    return previous


def register(tensor: torch.Tensor, group: dist.ProcessGroup, *, what: str) -> None:
    """Register symmetric memory with the ranks of a group; its first collective must have run before.

    Args:
        tensor: of one size on every rank, allocated in `device.symmetric_pool`.
        group: whose collectives will use it.
        what: names it.
    """
    all_reduce(torch.zeros(1, device=tensor.device), "sum", group, what=f"registration of {what}")
    symmetric.rendezvous(tensor, group)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, *, what: str) -> None:
    """Gather equal shards in rank order.

    Args:
        output: [ranks * n], overwritten.
        input: [n], same dtype.
        group: the ranks that take part.
        what: names what is gathered, in errors.

    Raises:
        RuntimeError: ranks disagree, or the backend has failed; on every rank that came.
    """
    report_collective("all_gather", output.dtype, output.numel(), group.size())
    if group.size() == 1:
        output.copy_(input)
        return
    if _check is not None:
        _check.before("all_gather", what, output, group)
    try:
        _wait(_all_gather(group, output, input, _gather_options))
    except RuntimeError as error:
        raise _explain(error, "all_gather", what, group) from error


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup, *, what: str
) -> None:
    """Reduce over ranks and keep this rank's shard.

    Args:
        output: [n], overwritten.
        input: [ranks * n], same dtype; its contents are undefined afterwards.
        reduction: "sum" or "avg".
        group: the ranks that take part.
        what: names what is reduced, in errors.

    Raises:
        RuntimeError: see `all_gather`.
    """
    report_collective("reduce_scatter", input.dtype, input.numel(), group.size())
    if group.size() == 1:
        output.copy_(input)
        return
    if _check is not None:
        _check.before(f"reduce_scatter {reduction}", what, input, group)
    options = _scatter_options[_prescale(input, reduction, group)]
    try:
        _wait(_reduce_scatter(group, output, input, options))
    except RuntimeError as error:
        raise _explain(error, "reduce_scatter", what, group) from error


def all_reduce(tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup, *, what: str) -> None:
    """Reduce `tensor` over ranks in place; `what` names it in errors.

    Raises:
        RuntimeError: see `all_gather`.
    """
    report_collective("all_reduce", tensor.dtype, tensor.numel(), group.size())
    if group.size() == 1:
        return
    if _check is not None:
        _check.before(f"all_reduce {reduction}", what, tensor, group)
    options = _all_reduce_options[_prescale(tensor, reduction, group)]
    try:
        _wait(group.allreduce([tensor], options))
    except RuntimeError as error:
        raise _explain(error, "all_reduce", what, group) from error


def exchange(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    group: dist.ProcessGroup,
    *,
    what: str,
) -> None:
    """Send tensors to other ranks and receive from others, all in one batch.

    Every rank of `group` must call it, those with nothing to send or receive, too. Between two ranks tensors arrive in
    the order in which they are listed.

    Args:
        sends: contiguous tensors, each with the global rank that it goes to.
        receives: contiguous tensors, overwritten, each with the global rank that it comes from.
        group: the ranks that take part.
        what: names what travels, in errors.

    Raises:
        RuntimeError: see `all_gather`.
    """
    sample = next((tensor for tensor, _ in (*sends, *receives)), None)
    if sample is not None:
        report_collective("exchange", sample.dtype, sum(tensor.numel() for tensor, _ in sends), group.size())
    if _check is not None:
        _check.before("exchange", what, _NOTHING, group)
    operations = [*_numbered(dist.isend, sends, group), *_numbered(dist.irecv, receives, group)]
    if not operations:
        return
    try:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    except RuntimeError as error:
        raise _explain(error, "exchange", what, group) from error


def _numbered(
    function: Any, messages: Sequence[tuple[torch.Tensor, int]], group: dist.ProcessGroup
) -> Iterator[dist.P2POp]:
    """Yield the operations of a batch, tagged by their number among those with the same rank."""
    numbers: dict[int, int] = {}
    for tensor, peer in messages:
        tag = numbers[peer] = numbers.get(peer, -1) + 1
        yield dist.P2POp(function, tensor, peer, group, tag)


def all_gather_uneven(
    local: torch.Tensor, numels: Sequence[int], groups: Sequence[dist.ProcessGroup], *, what: str
) -> list[torch.Tensor]:
    """Gather 1-D tensors whose sizes differ between ranks but are known to all.

    Args:
        local: this rank's tensor.
        numels: size of every rank's tensor, the same on all ranks; ranks are counted with the last group's as the most
            significant digit.
        groups: gathered over one after another; each rank is in all of them.
        what: names the tensors in errors.

    Returns:
        Every rank's tensor, in the order of `numels`.
    """
    width = max(numels)
    if width == 0:
        return [local.new_empty(0) for _ in numels]
    gathered = local.new_zeros(width)
    gathered[: local.numel()].copy_(local)
    for group in groups:
        shards, gathered = gathered, local.new_empty(gathered.numel() * group.size())
        all_gather(gathered, shards, group, what=what)
    rows = gathered.view(len(numels), width)
    return [rows[rank, :numel] for rank, numel in enumerate(numels)]


def all_gather_bytes(data: bytes, device: torch.device, group: dist.ProcessGroup, *, what: str) -> list[bytes]:
    """Gather byte strings of any sizes in rank order, through tensors on `device`; waits for the device."""
    size = torch.tensor([len(data)], device=device)
    sizes = size.new_empty(group.size())
    all_gather(sizes, size, group, what=what)
    local = torch.tensor(list(data), dtype=torch.uint8, device=device)
    parts = all_gather_uneven(local, sizes.tolist(), [group], what=what)
    return [bytes(part.tolist()) for part in parts]


def dump_stacks() -> None:
    """Print what every thread of this process is doing to stderr."""
    faulthandler.dump_traceback(_STDERR, all_threads=True)


def _explain(error: RuntimeError, operation: str, what: str, group: dist.ProcessGroup) -> RuntimeError:
    """Return what to raise for a failure of the backend, which knows sockets but no units; keep what is no failure."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    dump_stacks()
    return RuntimeError(
        f"{operation} of {what}: expected all {group.size()} ranks of the process group to take part, got from the "
        f"{dist.get_backend(group)} backend: {error}. If the ranks may have come to different points of the program, "
        "set MEGATRON_FSDP_CHECK_RANKS=1: that run says which rank was where."
    )


def _wait(work: Any) -> None:
    """Finish a call of a backend that returns before it is done; others return nothing, or what is done."""
    if work is not None:
        work.wait()


def _prescale(input: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup) -> Reduction:
    """Return what the backend is to do, dividing `input` first where the backend has no average of its own.

    Dividing before the sum cannot overflow where the average does not. Backends other than NCCL are not trusted with
    AVG: gloo returned the sum for it, without an error (pytorch/pytorch#162338).
    """
    if reduction == "avg" and dist.get_backend(group) != "nccl":
        input.div_(group.size())
        return "sum"
    return reduction
