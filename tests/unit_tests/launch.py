# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs a function on n ranks: worker processes are started once per world size and reused by every test.

Ranks are gloo processes on the host, or, with FSDP_TEST_DEVICE=cuda, NCCL processes with a GPU each
([Note: the same tests on GPUs]).

[Note: the same tests on GPUs]
A worker on a GPU makes tensors there by default, so that a test that names no device runs on either kind; where one has
to be named, it is `DEVICE`. Random numbers of a host generator stay those of the host, and results go back to the test
as host tensors.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import reduce_tensor
from torch.overrides import TorchFunctionMode

DEVICE = os.environ.get("FSDP_TEST_DEVICE", "cpu")
_context = multiprocessing.get_context("forkserver")
# What megatron-core imports on a machine with GPUs initialises CUDA, with which no process may be forked.
_context.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch.optim"]
    + ([] if DEVICE == "cuda" else ["megatron.core.distributed.fsdp.experimental"])
)
_pools: dict[int, _Pool] = {}
_lasting_groups: dict[str, set[dist.ProcessGroup]] = {}

# Convolutions on GPUs round to TF32 by default, in which two runs that should be equal differ.
torch.backends.cudnn.allow_tf32 = False

DEFAULT_TIMEOUT_S = 300
GRACE_S = 30


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Call `function(*args)` on every rank and return the results in rank order.

    A rank that raises, or the time-out, fails the test with every rank's traceback or stack. On GPUs a test that needs
    more of them than there are is skipped.
    """
    if DEVICE == "cuda" and world_size > torch.cuda.device_count():
        raise unittest.SkipTest(f"needs {world_size} GPUs, this machine has {torch.cuda.device_count()}")
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.run(function, args, timeout_s)
    except BaseException:
        _pools.pop(world_size).close()
        raise


def run_ranks_expecting(world_size: int, error: type[Exception], function: Callable[..., Any], *args: Any) -> list[str]:
    """Call `function` on every rank, require `error` on each of them, and return the messages."""
    return run_ranks(world_size, _expect, error, function, args)


def _expect(error: type[Exception], function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    try:
        function(*args)
    except error as raised:
        return str(raised)
    raise AssertionError(f"expected {error.__name__} from {function.__name__}{args}, got none")


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="fsdp-ranks-")
        self.connections = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(theirs, rank, world_size, self.folder, list(sys.path)), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for connection in self.connections:
            connection.send((list(sys.path), function, args))
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < len(self.connections):
            waiting = [c for rank, c in enumerate(self.connections) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(
                    self._report(results, f"no answer within {timeout_s} s, or {GRACE_S} s of a failure")
                )
            for connection in ready:
                rank = self.connections.index(connection)
                try:
                    results[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    self.processes[rank].join(GRACE_S)
                    results[rank] = (False, f"worker died, exit code {self.processes[rank].exitcode}")
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not all(ok for ok, _ in results.values()):
            raise AssertionError(self._report(results, "a rank failed"))
        return [results[rank][1] for rank in range(len(self.connections))]

    def _report(self, results: dict[int, tuple[bool, Any]], reason: str) -> str:
        lines = [reason]
        for rank, process in enumerate(self.processes):
            if rank in results:
                ok, value = results[rank]
                lines.append(f"--- rank {rank}: {'finished' if ok else value}")
                continue
            lines.append(f"--- rank {rank} is stuck in:")
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
            with open(os.path.join(self.folder, f"stack{rank}")) as file:
                lines.append(file.read())
        return "\n".join(lines)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(connection: Any, rank: int, world_size: int, folder: str, path: list[str]) -> None:
    sys.path[:] = path
    try:
        _start(rank, world_size, folder)
    except BaseException:
        connection.recv_bytes()
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            path, function, args = connection.recv()
        except EOFError:
            return
        except BaseException:  # what is to be called cannot be imported here
            connection.send((False, traceback.format_exc()))
            continue
        sys.path[:] = path
        _destroy_subgroups()
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def _start(rank: int, world_size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    stack_file = open(os.path.join(folder, f"stack{rank}"), "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    backend, device_id = ("nccl", _use_gpu(rank)) if DEVICE == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device_id)
    # What has been imported stays: a collection that looks through megatron-core takes 0.2 s, and tasks end in one.
    gc.freeze()


@cache
def lasting_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of all ranks that later tasks of this process may use, too; every rank must call it."""
    with lasting_groups(f"mesh {shape} {names}"):
        return init_device_mesh(DEVICE, shape, mesh_dim_names=names)


@contextmanager
def lasting_groups(purpose: str) -> Iterator[None]:
    """Keep the process groups that are made inside for later tasks, instead of earlier ones for this purpose."""
    earlier = set(_groups())
    yield
    _lasting_groups[purpose] = set(_groups()) - earlier


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def _destroy_subgroups() -> None:
    """End the process groups of the last task, which all ranks have finished: each costs threads and open files."""
    kept = {dist.group.WORLD}.union(*_lasting_groups.values())
    ended = [group for group in _groups() if group not in kept]
    for group in ended:
        dist.destroy_process_group(group)
    if ended:
        ended.clear()
        gc.collect()  # Raised errors keep their frames, and so meshes, in cycles.


def _use_gpu(rank: int) -> torch.device:
    """Let this process compute on one GPU; returns it."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    _HostGenerators().__enter__()
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce_on_host)
    return device


class _HostGenerators(TorchFunctionMode):
    """Draws from a host generator on the host and moves the numbers to the default device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        is_drawn = function in (torch.randn, torch.rand, torch.randint, torch.randperm)
        if is_drawn and generator is not None and generator.device.type == "cpu" and kwargs.get("device") is None:
            return function(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return function(*args, **kwargs)


def _reduce_on_host(tensor: torch.Tensor) -> Any:
    return reduce_tensor(tensor.detach().cpu())


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()
