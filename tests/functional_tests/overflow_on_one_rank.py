# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Runs pretrain_gpt.py and puts inf, later nan, into one gradient element of a single rank; no other rank knows of it.

Around such an update every rank requires that it is skipped, that no bit of weights and moments changes, and that all
ranks have come to the same loss scale. The first word is part of the parameter's name.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from megatron.pretrain.main import ignore_expected_warnings, pretrain, read_command

OVERFLOWS = {3: (-1, math.inf), 5: (0, math.nan)}
"""By iteration: the rank that overflows, from the end if negative, and with what."""


def main() -> None:
    name = sys.argv[1]
    command = read_command(sys.argv[2:], os.environ)
    ignore_expected_warnings()
    from megatron.pretrain.cpu import install

    install()
    from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer

    original, num_steps = FullyShardedOptimizer.step, 0

    def step(self: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps not in OVERFLOWS:
            return original(self)
        return _overflow(self, original, name, *OVERFLOWS[num_steps])

    FullyShardedOptimizer.step = step  # type: ignore[method-assign]
    pretrain(command)
    assert num_steps > max(OVERFLOWS)


def _overflow(optimizer: Any, step: Any, name: str, rank: int, value: float) -> Any:
    import torch.distributed as dist

    if dist.get_rank() == rank % dist.get_world_size():
        _poison(optimizer, name, value)
    before = _bits(optimizer)
    result = step(optimizer)
    assert result == (False, None, None), result
    assert _bits(optimizer) == before
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {**optimizer.grad_scaler.state_dict(), "scale": optimizer.get_loss_scale().item()})
    assert all(state == found[0] for state in found), found
    print("skipped on all ranks", file=sys.stderr)
    return result


def _poison(optimizer: Any, name: str, value: float) -> None:
    for parameter in optimizer.get_parameters():
        local = parameter.grad.to_local()
        if name in parameter.geometry.fqn and local.numel():
            local.view(-1)[-1] = value
            return
    raise AssertionError(f"no gradient of {name} on this rank")


def _bits(optimizer: Any) -> list[bytes]:
    """Return this rank's weights and moments."""
    from torch.distributed.tensor import DTensor

    tensors = []
    for parameter in optimizer.get_parameters():
        tensors += [parameter, *optimizer.optimizer.state[parameter].values()]
    assert len(tensors) > 2 * len(optimizer.get_parameters()), "no moments"
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().numpy().tobytes() for t in tensors]


if __name__ == "__main__":
    main()
