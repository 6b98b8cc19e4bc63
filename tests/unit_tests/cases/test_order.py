# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""PB-072: the order of collectives does not follow hashes, which programs of their own draw anew."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import io, json, sys
import torch, torch.distributed as dist
from torch import nn
from megatron.core.distributed.fsdp.experimental import clip_grad_norm_, fully_shard, fully_shard_optimizer
from tests.unit_tests.trace import CollectiveLog


def build():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3 + index, 4 + index) for index in range(20)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters()))


def step(model, optimizer, rank):
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main(rank):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
    keep = [object() for _ in range(1000 * rank)]
    with CollectiveLog() as log:
        model, optimizer = build()
        step(model, optimizer, rank)
        saved = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), saved)
        saved.seek(0)
        weights, state = torch.load(saved)
        model, optimizer = build()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        step(model, optimizer, rank)
        for parameter in model.parameters():
            parameter.full_tensor()
    print(json.dumps([hash("a name"), len(keep), log.entries]))
    dist.barrier()
    dist.destroy_process_group()


main(int(sys.argv[1]))
"""


def test_pb072_collective_order_does_not_follow_hashes() -> None:
    """Forward, backward, norm, step, save and load of 20 units of different sizes, on ranks that hash differently."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(rank), str(port)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=100)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    hashes, objects, logs = zip(*map(json.loads, printed), strict=True)
    assert len(set(hashes)) == 2 and objects == (0, 1000)
    # The agreement of two models; gathers for forward and backward and reductions of two steps, but for the last unit,
    # whose weights stay; the norm of either; every parameter in full.
    operations = [entry[0] for entry in logs[0]]
    counts = {operation: operations.count(operation) for operation in set(operations)}
    assert counts == {"all_reduce": 2 + 2, "all_gather": 2 * 2 * 20 + 40, "reduce_scatter": 2 * 20}
    assert logs[0] == logs[1]
