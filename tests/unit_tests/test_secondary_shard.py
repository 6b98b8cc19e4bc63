# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""A number for reshard_after_forward: the same bits, gathers inside subgroups, what is kept and when it is dropped."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp.experimental import (
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    capture_iteration,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.experimental.allocator import default_allocator
from megatron.core.distributed.fsdp.experimental.device import observe
from tests.unit_tests.accounting import Cost
from tests.unit_tests.graph_double import graphs_on_the_host
from tests.unit_tests.launch import lasting_mesh, run_ranks
from tests.unit_tests.models import Block, build, loss_of, make_batch, shard_layers
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks
from tests.unit_tests.trace import CollectiveLog, Trace

Step = Callable[[Any, torch.Tensor], None]
WIDTH, NUM_KEEPING = 6, 2
ZERO3 = Placements.from_strategy("optim_grads_params")


def _model(dtype: torch.dtype, frozen: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(WIDTH) for _ in range(4)]).to(dtype)
    model[1].requires_grad_(not frozen)
    return model


def _plain(model: Any, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def _accumulated(model: Any, batch: torch.Tensor) -> None:
    for index in range(2):
        with microbatch(model.context, is_last=index == 1):
            _plain(model, batch * (1 + index))


def _two_forwards(model: Any, batch: torch.Tensor) -> None:
    """The second forward drops the copies of the first, and makes its own, which the first backward uses up."""
    losses = [model(batch * (1 + index)).square().mean() for index in range(2)]
    for index, loss in enumerate(losses):
        with microbatch(model.context, is_last=index == 1):
            loss.backward()


def _evaluation_between(model: Any, batch: torch.Tensor) -> None:
    loss = model(batch).square().mean()
    with torch.no_grad():
        model(batch)
    assert not _kept(model), "an evaluation drops what is kept"
    loss.backward()


def _recomputed(model: Any, batch: torch.Tensor, use_reentrant: bool = False) -> None:
    hidden = batch.requires_grad_(True)
    for layer in model:
        hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
    hidden.square().mean().backward()


def _unused_end(model: Any, batch: torch.Tensor) -> None:
    """Backward does not come to the last layer, whose copy is dropped at its end."""
    hidden = model[0](batch)
    model[3](hidden)
    assert len(_kept(model)) == _num_keeping(model, (0, 3))
    hidden.square().mean().backward()


def _kept(model: Any) -> list[str]:
    groups = [group for layer in model for group in getattr(layer, "parameter_groups", ())]
    return [group.name for group in groups if hasattr(group, "kept_weight") and group.kept_weight.has_storage]


def _num_keeping(model: Any, layers: tuple[int, ...]) -> int:
    return sum(hasattr(group, "kept_weight") for index in layers for group in model[index].parameter_groups)


def _train(
    reshard: bool | int,
    step: Step = _plain,
    *,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    joint: bool = False,
    captured: bool = False,
    mesh: tuple[int, ...] = (4,),
    placements: Placements = ZERO3,
    pool: bool = False,
) -> tuple[list[torch.Tensor], list[list[Any]]]:
    """Return the weights after four steps on this rank's data, and what was communicated in each."""
    model = _model(dtype, frozen)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    options: dict[str, Any] = {"placements": placements, "mixed_precision_policy": policy}
    with fully_shard_context("cpu", trace_pool=pool) as context:
        for unit in [[model[0], model[1]], [model[2], model[3]]] if joint else list(model):
            fully_shard(unit, lasting_mesh(mesh), reshard_after_forward=reshard, **options)
        fully_shard(model, lasting_mesh(mesh), reshard_after_forward=reshard, **options)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trainable, fused=True, capturable=captured))

    def iteration(batch: torch.Tensor) -> torch.Tensor:
        step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        return batch

    logs = []
    with graphs_on_the_host():
        generator = torch.Generator().manual_seed(dist.get_rank())
        batches = [torch.randn(3, WIDTH, generator=generator).to(dtype) for _ in range(4)]
        run = capture_iteration(model, optimizer, iteration, batches[:1], warmup=1) if captured else iteration
        for batch in batches:
            # An observed host has streams that never equal each other, which a pool takes for several.
            with nullcontext() if pool else CollectiveLog() as log:
                run(batch)
            assert_at_rest(model)
            if log is not None:
                assert_same_on_all_ranks(log.entries)
                logs.append(log.entries)
    if pool:
        found: Any = context.pool
        assert found.is_active and found.num_fallbacks == 0
        assert not reshard or type(reshard) is bool or any("kept_weight" in name for name in found.slots)
    return [parameter.full_tensor() for parameter in model.parameters()], logs


def _same_bits(variants: dict[str, dict[str, Any]]) -> None:
    for name, options in variants.items():
        expected, plain_logs = _train(True, **options)
        found, logs = _train(NUM_KEEPING, **options)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)), name
        within = Counter(entry[3] for log in logs for entry in log if entry[0] == "all_gather")[NUM_KEEPING]
        # A forward that is recomputed by a reentrant checkpoint does not know that it has a backward.
        assert bool(within) == (name not in ("reentrant", "pool")), name
        assert sum(map(len, logs)) == sum(map(len, plain_logs)), f"{name}: as many calls"


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16, "step": _accumulated},
    "frozen": {"frozen": True},
    "joint": {"joint": True},
    "pool": {"pool": True, "step": _accumulated},
    "captured": {"captured": True},
    "two_forwards": {"step": _two_forwards},
    "recomputed": {"step": _recomputed},
    "reentrant": {"step": partial(_recomputed, use_reentrant=True)},
    "unused_end": {"step": _unused_end},
    **{
        outer: {"mesh": (1, 4), "placements": Placements.from_strategy("optim_grads_params", outer=outer)}
        for outer in ("no_shard", "optim")
    },
}


def test_numbers_are_those_of_full_resharding() -> None:
    """Bit for bit: only from where backward gathers differs."""
    run_ranks(4, _same_bits, VARIANTS)


def _dropped() -> None:
    _train(NUM_KEEPING, _evaluation_between)
    model = _model(torch.bfloat16, False)
    for layer in model:
        fully_shard(layer, reshard_after_forward=NUM_KEEPING)
    fully_shard(model, reshard_after_forward=NUM_KEEPING)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batch = torch.full((3, WIDTH), 0.1 * (1 + dist.get_rank()), dtype=torch.bfloat16)
    # Without gradients nothing is kept, and without a backward nothing that is kept is ever gathered from.
    kept_in_forward: list[str] = []
    handle = model[3].register_forward_pre_hook(lambda *unused: kept_in_forward.extend(_kept(model)))
    with torch.no_grad():
        model(batch)
    assert not kept_in_forward
    _plain(model, batch)
    assert len(kept_in_forward) == 3
    handle.remove()
    before = model(batch)
    assert len(_kept(model)) == 4
    optimizer.step()
    assert not torch.equal(model(batch), before)
    with torch.no_grad():
        assert not torch.equal(model(batch), before) and not _kept(model)
    # What nobody sees being written between two forwards counts, as without a copy.
    before = model(batch)
    for parameter in model.parameters():
        parameter.to_local().data.mul_(1.5)
    after = model(batch)
    assert not torch.equal(after, before)
    with torch.no_grad():
        assert torch.equal(model(batch), after)
    # Copies of a backward that fails, and of a forward that is abandoned.
    model(batch)
    model.context.abandon()
    assert not _kept(model)
    model[3].register_full_backward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        _plain(model, batch)
    assert not _kept(model)


def _fail(*unused: Any) -> None:
    raise ZeroDivisionError


def test_copies_are_dropped() -> None:
    run_ranks(4, _dropped)


def _dropped_before_a_capture() -> None:
    """A graph must neither read nor free what lies outside of it."""
    model = _model(torch.float32, False)
    for layer in model:
        fully_shard(layer, reshard_after_forward=NUM_KEEPING)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True, capturable=True))
    kept: list[int] = []

    def iteration(batch: torch.Tensor) -> torch.Tensor:
        kept.append(len(_kept(model)))
        _plain(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        return batch

    batch = torch.full((3, WIDTH), 1.0 + dist.get_rank())
    with graphs_on_the_host():
        captured = capture_iteration(model, optimizer, iteration, [batch], warmup=1)
        for _ in range(2):
            model(batch)
            assert len(_kept(model)) == 4
            captured(batch)
    assert kept == [4, 0]


def test_copies_are_dropped_before_a_capture() -> None:
    run_ranks(4, _dropped_before_a_capture)


class _GathersIn(torch.autograd.Function):
    """Gathers a unit inside a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, seen: list[torch.Tensor]) -> torch.Tensor:
        ctx.group, ctx.seen = group, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with CollectiveLog() as log:
            ctx.group.unshard()
        ctx.seen += [torch.tensor([entry[3] for entry in log.entries]), ctx.group.full_weight.local.clone()]
        ctx.group.release_full_weight()
        return grad, None, None


def _stale() -> None:
    """Whoever has written main weights since, the copy is not gathered; whether or not compute weights were made."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    with fully_shard_context("cpu"):
        fully_shard(layer, reshard_after_forward=NUM_KEEPING)
    group: Any = layer.parameter_groups[0]  # type: ignore[union-attr, index]
    x = torch.ones(1, requires_grad=True)
    for value, (write, makes_weights, num_ranks) in enumerate(
        [(False, False, 2), (True, False, 4), (True, True, 4)], start=1
    ):
        with torch.no_grad():
            layer.weight.fill_(value)
        layer(torch.ones(1, WIDTH))
        assert group.kept_weight.has_storage
        if write:
            value += 10
            with torch.no_grad():
                layer.weight.fill_(value)
        if makes_weights:
            group.sync_model_weight()  # as load_checkpoint does
        seen: list[torch.Tensor] = []
        _GathersIn.apply(x, group, seen).backward()
        assert seen[0].tolist() == [num_ranks]
        assert bool((seen[1][: WIDTH * WIDTH] == value).all())
        assert not group.kept_weight.has_storage


def test_no_stale_copy_is_gathered() -> None:
    run_ranks(4, _stale)


def _words(policy: SchedulePolicy) -> list[str]:
    """Return the first forward and backward as words; ``ag`` is a gather within a subgroup."""
    trace = Trace()
    with observe(trace):
        model = build("mlp")
        with fully_shard_context("cpu"):
            shard_layers(model, schedule_policy=policy)
        loss_of(model, *make_batch(model, 4, seed=dist.get_rank())).backward()
    short = {"all_gather": "AG", "keep": "keep", "free": "free", "forward": "F", "backward": "B"}
    words = []
    for stream, operation, buffers in trace.events:
        if operation not in short or not buffers or "grad" in buffers[0]:
            continue
        number = re.match(r"layers\.(\d)\.", buffers[0])
        is_kept = buffers[0].endswith("kept_weight")
        word = short[operation]
        if is_kept and operation != "keep":
            word = {"AG": "ag", "free": "drop"}[word]
        words.append(word + ("r" if number is None else number[1]))
        assert stream == ("compute" if word in "FB" else "all_gather")
    assert not trace.races
    return words


def test_schedule() -> None:
    """Copies are made where weights are released, and are gone once backward has gathered from them."""
    for words in run_ranks(4, _words, SchedulePolicy(reshard_after_forward=NUM_KEEPING)):
        assert (
            words
            == (
                "AGr AG0 Fr AG1 F0 keep0 free0 AG2 F1 keep1 free1 F2 keep2 free2 keepr freer "
                "agr dropr ag2 drop2 Br ag1 drop1 B2 free2 ag0 drop0 B1 free1 B0 free0 freer"
            ).split()
        )


def _costs(dtype: torch.dtype) -> None:
    """Bytes at the peak and collectives of a step are those of the formula."""
    depth, width = 6, 16
    cost = Cost(ZERO3, (4,), depth, width * width, dtype.itemsize, 4, dtype is torch.float32, NUM_KEEPING)
    gc.collect()
    before = default_allocator.allocated_bytes
    model: Any = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)]).to(dtype)
    with fully_shard_context("cpu"):
        for layer in model:
            fully_shard(layer, reshard_after_forward=NUM_KEEPING)
        fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for microbatches in (1, 1, 3):
        rest = default_allocator.allocated_bytes - before
        assert rest == cost.rest()
        default_allocator.reset_peak()
        with CollectiveLog() as log:
            for index in range(microbatches):
                with microbatch(model.context, is_last=index == microbatches - 1):
                    between = default_allocator.allocated_bytes
                    loss = model(torch.ones(2, width, dtype=dtype)).sum()
                    kept = depth * width * width * dtype.itemsize // NUM_KEEPING
                    assert default_allocator.allocated_bytes - between == kept
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if microbatches == 1:
            assert default_allocator.peak_bytes - before - rest == cost.peak_above_rest(counts_autograd=False)
        assert Counter(log.entries) == cost.collectives(microbatches, str(dtype), str(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costs_are_those_of_the_formula(dtype: torch.dtype) -> None:
    run_ranks(4, _costs, dtype)


def _ends_of_the_range() -> None:
    """All ranks mean True, one means False, with a warning."""
    layer: Any = fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    assert layer.schedule_policy.reshard_after_forward is True
    with pytest.warns(UserWarning, match="got the number 1, which keeps whole weights on every rank, as False does"):
        layer = fully_shard(nn.Linear(4, 4), schedule_policy=SchedulePolicy(reshard_after_forward=1))
    assert layer.schedule_policy.reshard_after_forward is False
    assert not any(hasattr(group, "kept_weight") for group in layer.parameter_groups)


def test_one_rank_and_all_ranks() -> None:
    run_ranks(2, _ends_of_the_range)


def _set_to_a_bool() -> None:
    """FSDP2's setter takes no number: with True nothing is kept any more, with False the whole weights are."""
    layer: Any = fully_shard(nn.Linear(4, 4), reshard_after_forward=NUM_KEEPING)
    layer.set_reshard_after_forward(True)
    loss = layer(torch.ones(1, 4)).sum()
    assert not layer.parameter_groups[0].kept_weight.has_storage
    loss.backward()
    layer.set_reshard_after_forward(False)
    loss = layer(torch.ones(1, 4)).sum()
    assert not layer.parameter_groups[0].kept_weight.has_storage and layer.parameter_groups[0].full_weight.has_storage
    loss.backward()
    with pytest.raises(TypeError, match="set_reshard_after_forward: expected True or False, got 2"):
        layer.set_reshard_after_forward(2)


def test_setting_it_later() -> None:
    run_ranks(4, _set_to_a_bool)
