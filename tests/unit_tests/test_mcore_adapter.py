# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`FullyShardedDataParallel`: config fields are honoured or refused, and training under it equals training alone."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.experimental import FsdpDTensor, FsdpModule, fully_shard_optimizer
from tests.unit_tests import mcore
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore import (
    Tower,
    adapter,
    assert_close,
    assert_equal,
    build_gpt,
    build_tower,
    cpu_shim,
    ddp_config,
    full_gradients,
    full_weights,
    gpt_losses,
    my_rank,
    run_schedule,
    start,
    tokens,
    tower_gradients,
    tower_loss,
    wrap,
)
from tests.unit_tests.oracle import assert_at_rest, assert_same_on_all_ranks
from tests.unit_tests.trace import CollectiveLog

HONOURED = {
    "average_in_collective",
    "check_for_nan_in_grad",
    "data_parallel_sharding_strategy",
    "expert_data_parallel_sharding_strategy",
    "expert_outer_dp_sharding_strategy",
    "fp4_param_gather",
    "fp8_param_gather",
    "grad_reduce_in_fp32",
    "keep_fp8_transpose_cache",
    "megatron_fsdp_backward_prefetch_units",
    "megatron_fsdp_create_all_gather_group",
    "megatron_fsdp_forward_prefetch_units",
    "megatron_fsdp_grad_comm_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_min_unit_numel",
    "megatron_fsdp_quantized_gather",
    "megatron_fsdp_reshard_after_forward",
    "megatron_fsdp_static_gradients",
    "megatron_fsdp_trace_pool",
    "megatron_fsdp_unify_communication_stream",
    "nccl_ub",
    "num_distributed_optimizer_instances",
    "outer_dp_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "use_megatron_fsdp_v2",
}
STEPS = 10


# --- training under megatron-core's own schedule ----------------------------------------------------------------------


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def _train_gpt_sharded(model: Any, microbatches: int, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train with megatron-core's schedule; return the chunk and the gradients of the last step."""
    chunk = wrap(model, **options)
    config = get_model_config(chunk)
    config.no_sync_func = chunk.no_sync
    config.grad_sync_func = chunk.start_grad_sync
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = fully_shard_optimizer(_sgd(chunk.parameters()))
    gradients: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with CollectiveLog() as log:
            run_schedule(chunk, step, microbatches)
        assert_at_rest(chunk.module)
        assert_same_on_all_ranks(log.entries)
        gradients = full_gradients(chunk)
        optimizer.step()
    return chunk, gradients


def _train_gpt_alone(model: Any, microbatches: int, *, per_token: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train one process on the data of all ranks."""
    optimizer = _sgd(model.parameters())
    world = dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        total, count = torch.zeros(()), torch.zeros(())
        for index in range(microbatches):
            for rank in range(world):
                text, labels, mask = tokens(step, index, rank)
                loss = (gpt_losses(model, text, labels) * mask).sum()
                if per_token:
                    total, count = total + loss, count + mask.sum()
                else:
                    total, count = total + loss / mask.sum(), torch.tensor(float(world * microbatches))
        (total / count).backward()
        optimizer.step()
    return model, {name: p.grad for name, p in model.named_parameters()}


def _gpt_parity(tied: bool, per_token: bool, microbatches: int) -> None:
    start()
    with cpu_shim():
        reference, expected = _train_gpt_alone(build_gpt(tied=tied), microbatches, per_token=per_token)
        model = build_gpt(tied=tied, calculate_per_token_loss=per_token)
        chunk, gradients = _train_gpt_sharded(
            model, microbatches, overlap_grad_reduce=True, overlap_param_gather=True, check_for_nan_in_grad=True
        )
        assert_close(gradients, expected, rtol=1e-4)
        assert_close(full_weights(chunk), {n: p.detach() for n, p in reference.named_parameters()}, rtol=1e-5)
        assert all(float(gradient.abs().max()) > 1e-3 for gradient in expected.values())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per_token"])
def test_gpt_under_the_schedule_trains_as_one_process(tied: bool, per_token: bool) -> None:
    """Ranks and microbatches differ in their number of tokens, so that mean of means and mean of all differ."""
    run_ranks(2, _gpt_parity, tied, per_token, 3)


def test_gpt_with_a_single_microbatch_never_enters_no_sync() -> None:
    run_ranks(2, _gpt_parity, False, True, 1)


def _mean_and_sum_differ() -> None:
    start()
    with cpu_shim():
        mean, _ = _train_gpt_alone(build_gpt(), 3, per_token=False)
        total, _ = _train_gpt_alone(build_gpt(), 3, per_token=True)
    difference = max(float((a - b).abs().max()) for a, b in zip(mean.parameters(), total.parameters(), strict=True))
    assert difference > 1e-2


def test_the_data_tells_mean_of_means_from_mean_of_tokens() -> None:
    run_ranks(2, _mean_and_sum_differ)


def _recompute_is_bitwise() -> None:
    start()
    with cpu_shim():
        full, gradients = _train_gpt_sharded(build_gpt(), 2)
        again, recomputed = _train_gpt_sharded(
            build_gpt(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1), 2
        )
        assert_equal(recomputed, gradients)
        assert_equal(full_weights(again), full_weights(full))
        prefetched, _ = _train_gpt_sharded(build_gpt(), 2, overlap_param_gather=True)
        assert_equal(full_weights(prefetched), full_weights(full))


def test_recompute_and_prefetch_change_no_bit() -> None:
    run_ranks(2, _recompute_is_bitwise)


def _recompute_inside_a_unit() -> None:
    """Without biases: megatron-core alone recurses for ever where a recomputed MLP returns its bias."""
    start()
    with cpu_shim():
        full, gradients = _train_gpt_sharded(build_gpt(add_bias_linear=False), 2)
        again, recomputed = _train_gpt_sharded(
            build_gpt(add_bias_linear=False, recompute_granularity="selective", recompute_modules=["mlp"]), 2
        )
        assert_equal(recomputed, gradients)
        assert_equal(full_weights(again), full_weights(full))


def test_pb093_selective_recompute_changes_no_bit() -> None:
    run_ranks(2, _recompute_inside_a_unit)


def _evaluation() -> None:
    start()
    with cpu_shim():
        reference, chunk = build_gpt(), wrap(build_gpt(), overlap_param_gather=True)
        get_model_config(chunk).no_sync_func = chunk.no_sync
        chunk.eval()
        with torch.no_grad():
            losses = run_schedule(chunk, 0, 2, forward_only=True)
            expected = [
                (gpt_losses(reference, text, labels) * mask).sum()
                for text, labels, mask in (tokens(0, index, my_rank()) for index in range(2))
            ]
        torch.testing.assert_close(torch.stack([item["loss"] for item in losses]), torch.stack(expected))
        assert_at_rest(chunk.module)
        assert all(parameter.grad is None for parameter in chunk.parameters())


def test_evaluation_under_the_schedule_leaves_the_chunk_at_rest() -> None:
    run_ranks(2, _evaluation)


# --- units ------------------------------------------------------------------------------------------------------------


def _names_by_unit(chunk: Any) -> dict[str, set[str]]:
    return {unit.name: {fqn for g in unit.parameter_groups for fqn in g.fqns} for unit in chunk.fsdp_units()}


def _default_units() -> None:
    start()
    with cpu_shim():
        chunk = wrap(build_gpt())
        units = _names_by_unit(chunk)
        root = type(chunk.module).__name__
        assert list(units) == [root, "decoder.layers.0", "decoder.layers.1"]
        assert units[root] == {
            "embedding.word_embeddings.weight",
            "embedding.position_embeddings.weight",
            "decoder.final_layernorm.weight",
            "decoder.final_layernorm.bias",
            "output_layer.weight",
        }
        assert units["decoder.layers.0"] == units["decoder.layers.1"]
        assert "self_attention.linear_qkv.weight" in units["decoder.layers.1"]
        assert all(isinstance(layer, TransformerLayer) for layer in chunk.module.decoder.layers)
        assert_at_rest(chunk.module)
        for name, parameter in chunk.named_parameters():
            assert isinstance(parameter, FsdpDTensor), name
            assert parameter.__fsdp_param__ is True, name
        tied = wrap(build_gpt(tied=True))
        assert "output_layer.weight" not in dict(tied.module.named_parameters())


def test_default_units_are_transformer_layers() -> None:
    run_ranks(2, _default_units)


def _chosen_units() -> None:
    start()
    for chosen in ([nn.Linear], ["torch.nn.Linear"], [nn.Linear, "torch.nn.Conv2d"]):
        units = _names_by_unit(wrap(build_tower(), fsdp_unit_modules=chosen))
        assert list(units) == ["FsdpTower", "net.layers.0", "net.layers.1", "net.layers.2"]
        assert units["FsdpTower"] == {"net.scale"}
    nested = _names_by_unit(wrap(build_tower(), fsdp_unit_modules=["torch.nn.Linear", "tests.unit_tests.models.Mlp"]))
    assert nested["net"] == {"scale"}
    assert nested["FsdpTower"] == set()
    itself = _names_by_unit(wrap(build_tower(), fsdp_unit_modules=[Tower]))
    assert list(itself) == ["FsdpTower"]
    tower = build_tower()
    whole = _names_by_unit(adapter.FullyShardedDataParallel(tower.config, ddp_config(), tower, disable_bucketing=True))
    assert list(whole) == ["FsdpTower"]
    assert len(whole["FsdpTower"]) == 7


def test_units_by_class_and_dotted_name_and_none_at_all() -> None:
    run_ranks(1, _chosen_units)


def _joined() -> None:
    start()
    expected = None
    for min_numel, num_units in ((0, 4), (1, 4), (10**9, 2)):
        chunk = wrap(build_tower(), megatron_fsdp_min_unit_numel=min_numel)
        units = list(chunk.fsdp_units())
        assert len(units) == num_units, (min_numel, [unit.name for unit in units])
        inputs, _ = mcore.tower_batch(0, 0, my_rank())
        loss = chunk(inputs).square().mean()
        loss.backward()
        names = [name for name, parameter in chunk.named_parameters() if parameter.grad is not None]
        expected = (float(loss), names) if expected is None else expected
        assert expected == (float(loss), names)


def test_small_neighbours_share_a_unit() -> None:
    run_ranks(2, _joined)


def _warns_without_transformer_layers() -> None:
    start()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.core.distributed.fsdp.mcore_fsdp_v2_units")
    logger.addHandler(handler)
    try:
        tower = build_tower()
        chunk = adapter.FullyShardedDataParallel(tower.config, ddp_config(), tower)
    finally:
        logger.removeHandler(handler)
    assert list(_names_by_unit(chunk)) == ["FsdpTower"]
    assert len(records) == 1
    layers = "['TransformerLayer', 'MambaLayer', 'MultiTokenPredictionLayer']"
    assert f"no {layers} in Tower" in records[0].getMessage()


def test_a_model_without_transformer_layers_is_one_unit_and_says_so() -> None:
    run_ranks(1, _warns_without_transformer_layers)


def _one_unit_trains_the_same() -> None:
    start()
    chunks = [wrap(build_tower()), wrap(build_tower(), fsdp_unit_modules=[Tower])]
    for chunk in chunks:
        _train_tower(chunk, microbatches=2)
    assert_equal(full_weights(chunks[1]), full_weights(chunks[0]))


def test_how_units_are_cut_changes_no_bit() -> None:
    run_ranks(2, _one_unit_trains_the_same)


# --- what megatron-core reads -----------------------------------------------------------------------------------------

ATTRIBUTES = (
    "allreduce",
    "is_embedding_or_output_parameter",
    "partition_dim",
    "partition_stride",
    "sequence_parallel",
    "shared",
    "tensor_model_parallel",
    "a_user_attribute",
)


def _attributes_survive() -> None:
    start()
    tower = build_tower()
    expected = {}
    for index, (name, parameter) in enumerate(tower.named_parameters()):
        expected[name] = {attribute: (name, attribute, index) for attribute in ATTRIBUTES[index:]}
        for attribute, value in expected[name].items():
            setattr(parameter, attribute, value)
    chunk = wrap(tower)
    unsharded: dict[str, dict[str, Any]] = {}

    def look(module: nn.Module, args: Any) -> None:
        for name, parameter in chunk.module.named_parameters():
            if not isinstance(parameter, FsdpDTensor):
                unsharded[name] = {key: vars(parameter)[key] for key in ATTRIBUTES if key in vars(parameter)}

    for module in list(chunk.module.modules()):
        module.register_forward_pre_hook(look)
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    sharded = {
        name: {key: getattr(parameter, key) for key in ATTRIBUTES if hasattr(parameter, key)}
        for name, parameter in chunk.module.named_parameters()
    }
    assert sharded == expected
    assert unsharded == expected


def test_parameter_attributes_survive_wrapping() -> None:
    run_ranks(2, _attributes_survive)


def _gpt_attributes_survive() -> None:
    start()
    with cpu_shim():
        model = build_gpt()
        before = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        assert before["output_layer.weight"]["is_embedding_or_output_parameter"]
        chunk = wrap(model)
        for name, parameter in chunk.module.named_parameters():
            for attribute, value in before[name].items():
                assert getattr(parameter, attribute) == value, (name, attribute)


def test_attributes_that_megatron_core_sets_survive_wrapping() -> None:
    run_ranks(1, _gpt_attributes_survive)


def _unwraps() -> None:
    start()
    tower = build_tower()
    chunk = wrap(tower)
    assert unwrap_model(chunk) is tower
    assert unwrap_model([chunk]) == [tower]
    assert get_model_config(chunk) is tower.config
    assert get_attr_wrapped_model(chunk, "net") is tower.net
    assert get_attr_wrapped_model(chunk, "ddp_config") is chunk.ddp_config
    assert isinstance(tower, FsdpModule)
    assert isinstance(tower, Tower)
    assert adapter.is_fully_sharded(chunk)
    assert not adapter.is_fully_sharded(tower)
    inner = build_tower(torch.bfloat16, bf16=True)
    half = wrap(Float16Module(inner.config, inner), fsdp_unit_modules=[nn.Linear])
    assert unwrap_model(half) is inner


def test_megatron_core_reaches_the_model() -> None:
    run_ranks(1, _unwraps)


CALLS_OF_0_16_1_AND_0_19_2: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "no_sync": [((), {})],
    "start_grad_sync": [((), {}), (([],), {})],
    "finish_grad_sync": [((), {}), ((), {"force_all_reduce": False}), ((), {"force_all_reduce": None})],
    "scale_gradients": [((0.5,), {}), ((torch.tensor(0.5),), {}), ((), {"scaling_factor": 1.0})],
    "zero_grad_buffer": [((), {})],
    "start_param_sync": [
        ((), {}),
        (([],), {}),
        ((), {"force_sync": True}),
        ((), {"force_dispatch": True}),
        ((), {"force_sync": False, "force_dispatch": False}),
    ],
    "synchronize_param_gather": [((), {})],
    "stop_communication": [((), {})],
    "enable_forward_pre_hook": [((), {})],
    "disable_forward_pre_hook": [((), {}), ((), {"param_sync": False})],
    "free_overlap_buffers": [((), {})],
    "set_is_first_microbatch": [((), {})],
    "state_dict": [((), {}), ((), {"prefix": "a.", "keep_vars": True})],
    "state_dict_for_save_checkpoint": [((), {}), ((), {"prefix": "a.", "keep_vars": True})],
}


def _public_methods(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("_") and name != "forward"
    }


def _accepts_no_less(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Return whether every call that `theirs` takes is taken by `ours`, with the same defaults."""
    mine = inspect.signature(ours).parameters
    for position, (name, parameter) in enumerate(inspect.signature(theirs).parameters.items()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_accepted = any(p.kind is p.VAR_POSITIONAL for p in mine.values())
        else:
            is_placed = parameter.kind is parameter.KEYWORD_ONLY or list(mine)[position : position + 1] == [name]
            is_accepted = is_placed and name in mine and mine[name].default == parameter.default
        if not is_accepted:
            return False
    return True


def test_pb123_methods_take_what_their_namesakes_take() -> None:
    ours = adapter.FullyShardedDataParallel
    theirs = _public_methods(_BaseDataParallel)
    assert {"finish_grad_sync", "scale_gradients", "broadcast_params", "load_state_dict"} <= theirs.keys()
    for name, method in theirs.items():
        assert _accepts_no_less(getattr(ours, name), method), name
    ddp = {name: method for name, method in _public_methods(DistributedDataParallel).items() if hasattr(ours, name)}
    assert {"no_sync", "start_param_sync", "finish_grad_sync", "enable_forward_pre_hook"} <= ddp.keys()
    for name, method in ddp.items():
        assert _accepts_no_less(getattr(ours, name), method), name
    for name, method in _public_methods(MegatronFSDP).items():
        if name in CALLS_OF_0_16_1_AND_0_19_2:
            assert _accepts_no_less(getattr(ours, name), method), name
    constructor = inspect.signature(adapter._StockFullyShardedDataParallel.__init__)
    assert list(inspect.signature(ours.__init__).parameters) == list(constructor.parameters)


def _every_call_works() -> None:
    start()
    chunk = wrap(build_tower())
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    for name, calls in CALLS_OF_0_16_1_AND_0_19_2.items():
        for args, kwargs in calls:
            getattr(chunk, name)(*args, **kwargs)


def test_pb123_methods_take_the_calls_of_both_releases() -> None:
    run_ranks(1, _every_call_works)


# --- gradients --------------------------------------------------------------------------------------------------------


def _train_tower(chunk: Any, *, steps: int = 3, microbatches: int = 1) -> None:
    optimizer = fully_shard_optimizer(_sgd(chunk.parameters()))
    for step in range(steps):
        chunk.zero_grad_buffer()
        with chunk.no_sync():
            for index in range(microbatches - 1):
                (tower_loss(chunk.module, step, index, my_rank()) / microbatches).backward()
        (tower_loss(chunk.module, step, microbatches - 1, my_rank()) / microbatches).backward()
        chunk.finish_grad_sync()
        optimizer.step()


def _no_sync() -> None:
    start()
    expected = tower_gradients(0, microbatches=3)
    for marked in ([], [0], [1], [0, 1]):
        chunk = wrap(build_tower())
        for index in range(3):
            if index in marked:
                with chunk.no_sync():
                    tower_loss(chunk.module, 0, index, my_rank()).backward()
            else:
                tower_loss(chunk.module, 0, index, my_rank()).backward()
        assert_close(full_gradients(chunk), expected)
    chunk = wrap(build_tower())
    optimizer = fully_shard_optimizer(_sgd(chunk.parameters()))
    with chunk.no_sync():
        tower_loss(chunk.module, 0, 0, my_rank()).backward()
    with pytest.raises(RuntimeError, match="expected gradients of all microbatches"):
        optimizer.step()
    tower_loss(chunk.module, 0, 1, my_rank()).backward()
    optimizer.step()


def test_no_sync_adds_up_and_the_step_wants_the_last_microbatch() -> None:
    run_ranks(2, _no_sync)


def _scale_and_zero() -> None:
    start()
    chunk = wrap(build_tower())
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    first = full_gradients(chunk)
    assert_close(first, tower_gradients(0))
    chunk.scale_gradients(0.5)
    assert_equal(full_gradients(chunk), {name: gradient / 2 for name, gradient in first.items()})
    chunk.scale_gradients(torch.tensor(0.25))
    assert_equal(full_gradients(chunk), {name: gradient / 8 for name, gradient in first.items()})
    chunk.scale_gradients(1.0 / torch.tensor(4, dtype=torch.int))
    assert_equal(full_gradients(chunk), {name: gradient / 32 for name, gradient in first.items()})
    chunk.zero_grad_buffer()
    assert all(parameter.grad is None for parameter in chunk.parameters())
    chunk.scale_gradients(3.0)
    tower_loss(chunk.module, 1, 0, my_rank()).backward()
    assert_close(full_gradients(chunk), tower_gradients(1))


def test_scaling_by_numbers_and_tensors_and_clearing() -> None:
    run_ranks(2, _scale_and_zero)


def _per_token_sums() -> None:
    """With calculate_per_token_loss gradients are summed, whatever average_in_collective says."""
    start()
    expected = {name: 2 * gradient for name, gradient in tower_gradients(0).items()}
    for average in (False, True):
        chunk = wrap(build_tower(calculate_per_token_loss=True), average_in_collective=average)
        tower_loss(chunk.module, 0, 0, my_rank()).backward()
        assert_close(full_gradients(chunk), expected)
        chunk = wrap(build_tower(), average_in_collective=average)
        tower_loss(chunk.module, 0, 0, my_rank()).backward()
        assert_close(full_gradients(chunk), tower_gradients(0))


def test_per_token_losses_are_summed_over_ranks() -> None:
    run_ranks(2, _per_token_sums)


def _process_groups() -> None:
    start()
    tower = build_tower()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunk = adapter.FullyShardedDataParallel(
        tower.config, ddp_config(), tower, fsdp_unit_modules=[nn.Linear], pg_collection=groups
    )
    assert chunk.data_parallel_group is groups.dp_cp
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    assert_close(full_gradients(chunk), tower_gradients(0))
    alone = [dist.new_group([rank]) for rank in range(2)][my_rank()]
    tower, reference = build_tower(), build_tower()
    chunk = adapter.FullyShardedDataParallel(
        tower.config,
        ddp_config(),
        tower,
        fsdp_unit_modules=[nn.Linear],
        device=torch.device("cpu"),
        pg_collection=ProcessGroupCollection(dp_cp=alone),
    )
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    tower_loss(reference, 0, 0, my_rank()).backward()
    assert_close(full_gradients(chunk), {name: p.grad for name, p in reference.named_parameters()})


def test_the_data_parallel_group_comes_from_the_collection() -> None:
    run_ranks(2, _process_groups)


def _finds_nan(value: float, owner: int, name: str) -> list[str]:
    start()
    chunk = wrap(build_tower(), check_for_nan_in_grad=True)
    tower_loss(chunk.module, 0, 0, my_rank()).backward()
    chunk.finish_grad_sync()
    local = dict(chunk.module.named_parameters())[name].grad.to_local()
    assert local.numel()
    if my_rank() == owner:
        local.view(-1)[-1] = value
    with pytest.raises(RuntimeError) as raised:
        chunk.finish_grad_sync(force_all_reduce=False)
    unchecked = wrap(build_tower())
    with CollectiveLog() as log:
        unchecked.finish_grad_sync()
    assert log.entries == []
    return [str(raised.value)]


@pytest.mark.parametrize(
    ("value", "owner", "name"), [(float("nan"), 1, "net.layers.1.weight"), (float("inf"), 0, "net.layers.0.weight")]
)
def test_a_gradient_that_is_not_finite_is_named_where_it_is_and_raises_everywhere(
    value: float, owner: int, name: str
) -> None:
    messages = run_ranks(2, _finds_nan, value, owner, name)
    for rank, [message] in enumerate(messages):
        where = f"['{name}']" if rank == owner else "no parameter"
        assert f"gradients: expected finite values, got nan or inf on this rank in {where} (other ranks" in message


# --- weights and dtypes -----------------------------------------------------------------------------------------------


def _load_is_seen() -> None:
    """PB-020: a forward right after a load uses what was loaded, also where compute weights are a copy."""
    start()
    for dtype in (torch.float32, torch.bfloat16):
        chunk = wrap(build_tower(dtype))
        saved = {name: value.clone() for name, value in chunk.state_dict().items()}
        before = tower_loss(chunk.module, 0, 0, my_rank()).item()
        _train_tower(chunk)
        trained = tower_loss(chunk.module, 0, 0, my_rank()).item()
        assert trained != before
        chunk.load_state_dict(saved)
        assert tower_loss(chunk.module, 0, 0, my_rank()).item() == before
        saved.popitem()
        with pytest.raises(RuntimeError, match="Missing key"):
            chunk.load_state_dict(saved)
        chunk.load_state_dict(saved, strict=False)


def test_pb020_loaded_weights_are_used_at_once() -> None:
    run_ranks(2, _load_is_seen)


def _stop_communication() -> None:
    start()
    for method in ("stop_communication", "free_overlap_buffers"):
        chunk = wrap(build_tower(), megatron_fsdp_reshard_after_forward=False)
        chunk(torch.randn(2, Tower.in_features, generator=torch.Generator().manual_seed(my_rank())))
        with pytest.raises(AssertionError):
            assert_at_rest(chunk.module)
        getattr(chunk, method)()
        assert_at_rest(chunk.module)


def test_gathered_weights_are_given_up_on_request() -> None:
    run_ranks(2, _stop_communication)


def _schedule_options() -> None:
    start()

    def policies(**options: Any) -> set[tuple[Any, ...]]:
        chunk = wrap(build_tower(), **options)
        return {
            (p.forward_prefetch_units, p.backward_prefetch_units, p.reshard_after_forward, p.static_gradients)
            for p in (unit.schedule_policy for unit in chunk.fsdp_units())
        }

    counts = {"megatron_fsdp_forward_prefetch_units": 3, "megatron_fsdp_backward_prefetch_units": 2}
    assert policies() == {(0, 0, None, False)}
    for name, count in counts.items():
        with pytest.raises(NotImplementedError, match=rf"{name}: expected 1, got {count}; it would have no effect"):
            policies(**{name: count})
    assert policies(overlap_param_gather=True) == {(1, 1, None, False)}
    assert policies(overlap_param_gather=True, **counts) == {(3, 2, None, False)}
    assert policies(megatron_fsdp_reshard_after_forward=True) == {(0, 0, True, False)}
    assert policies(megatron_fsdp_static_gradients=True) == {(0, 0, None, True)}
    for unify in (False, True):
        with CollectiveLog():  # without an observer, all streams of a host are one
            context = wrap(build_tower(), megatron_fsdp_unify_communication_stream=unify).fsdp_context
        assert (context.allgather_stream is context.reduce_scatter_stream) is unify
    for pooled in (False, True):
        context = wrap(build_tower(), megatron_fsdp_trace_pool=pooled).fsdp_context
        assert (context.pool is not None) is pooled
    for separate in (False, True):
        context = wrap(build_tower(), megatron_fsdp_create_all_gather_group=separate).fsdp_context
        assert context.communicators.is_separate is separate
    with pytest.raises(ValueError, match=r"static_gradients: expected False with trace_pool=True, .* got True"):
        wrap(build_tower(), megatron_fsdp_trace_pool=True, megatron_fsdp_static_gradients=True)


def test_options_reach_the_schedule() -> None:
    run_ranks(1, _schedule_options)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES: list[tuple[dict[str, Any], tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]]] = [
    # compute dtype and options; then dtype of main weights, of `.grad`, of reduce_scatter, of all_gather
    ({"compute": FP32}, (FP32, FP32, FP32, FP32)),
    ({"compute": BF16}, (FP32, BF16, BF16, BF16)),
    ({"compute": FP16}, (FP32, FP16, FP16, FP16)),
    ({"compute": BF16, "grad_reduce_in_fp32": True}, (FP32, FP32, FP32, BF16)),
    ({"compute": BF16, "megatron_fsdp_main_grads_dtype": FP32}, (FP32, FP32, FP32, BF16)),
    (
        {"compute": BF16, "grad_reduce_in_fp32": True, "megatron_fsdp_grad_comm_dtype": BF16},
        (FP32, FP32, BF16, BF16),
    ),
    ({"compute": FP32, "megatron_fsdp_grad_comm_dtype": BF16}, (FP32, FP32, BF16, FP32)),
    ({"compute": FP32, "megatron_fsdp_main_grads_dtype": BF16}, (FP32, BF16, BF16, FP32)),
    ({"compute": BF16, "megatron_fsdp_main_params_dtype": None}, (BF16, BF16, BF16, BF16)),
    ({"compute": BF16, "megatron_fsdp_main_params_dtype": torch.float64}, (torch.float64, BF16, BF16, BF16)),
]


def _dtypes() -> None:
    start()
    for options, (main, grad, comm, gather) in DTYPES:
        changes = dict(options)
        compute = changes.pop("compute")
        chunk = wrap(build_tower(compute), **changes)
        inputs, _ = mcore.tower_batch(0, 0, my_rank())
        for index in range(2):
            with CollectiveLog() as log:
                chunk(inputs.to(compute) * (index + 1)).float().square().mean().backward()
            found = {(operation, dtype) for operation, dtype, _, _ in log.entries}
            assert found == {("reduce_scatter", str(comm)), ("all_gather", str(gather))}, options
            assert sum(operation == "reduce_scatter" for operation, *_ in log.entries) == 4
        for name, parameter in chunk.named_parameters():
            assert parameter.dtype is main, (options, name)
            assert parameter.grad.dtype is grad, (options, name)
        for gradient in full_gradients(chunk).values():
            wide = gradient.double()
            assert bool(wide.abs().max() > 0)


def test_pb025_every_collective_has_the_configured_dtype() -> None:
    run_ranks(2, _dtypes)


def _comm_dtype_rounds() -> None:
    """A narrow communication dtype rounds what is sent, and only that; accumulation stays wide."""
    start()
    narrow = wrap(build_tower(), megatron_fsdp_grad_comm_dtype=BF16)
    tower_loss(narrow.module, 0, 0, my_rank()).backward()
    once = full_gradients(narrow)
    expected = tower_gradients(0)
    assert_close(once, expected, rtol=2**-7)
    assert all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in once.values())
    tower_loss(narrow.module, 0, 1, my_rank()).backward()
    assert not all(torch.equal(g, g.bfloat16().float()) for g in full_gradients(narrow).values())


def test_a_narrow_comm_dtype_rounds_contributions_not_the_sum() -> None:
    run_ranks(2, _comm_dtype_rounds)


class _MixedTower(Tower):
    """bfloat16, but for one layer that stays in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.layers[0](self.net.scale.float() * x.float())


def _mixed_dtypes() -> None:
    start()
    tower = build_tower(BF16)
    tower.__class__ = _MixedTower
    tower.net.layers[0].float()
    chunk = wrap(tower, fsdp_unit_modules=[nn.Linear])
    chunk(torch.ones(2, 7)).sum().backward()
    gradients = {name: p.grad.dtype for name, p in chunk.module.named_parameters() if p.grad is not None}
    assert gradients == {"net.scale": FP32, "net.layers.0.weight": FP32, "net.layers.0.bias": FP32}


def test_gradients_are_as_wide_as_the_widest_parameter() -> None:
    run_ranks(2, _mixed_dtypes)


def _bf16_parity() -> None:
    """bf16 compute over fp32 main weights, and 3 microbatches that accumulate in fp32 (PB-019, PB-023)."""
    start()
    values = {name: nn.Parameter(p.detach().float()) for name, p in build_tower(BF16).named_parameters()}
    sgd = _sgd(values.values())
    chunk = wrap(build_tower(BF16), grad_reduce_in_fp32=True)
    optimizer = fully_shard_optimizer(_sgd(chunk.parameters()))
    for step in range(STEPS):
        for value in values.values():
            value.grad = torch.zeros_like(value)
        for rank in range(2):
            for index in range(3):
                compute = build_tower(BF16)
                for name, parameter in compute.named_parameters():
                    parameter.data.copy_(values[name].data)
                tower_loss(compute, step, index, rank).backward()
                for name, parameter in compute.named_parameters():
                    values[name].grad += parameter.grad.float() / 2
        chunk.zero_grad_buffer()
        for index in range(3):
            tower_loss(chunk.module, step, index, my_rank()).backward()
        if step == 0:
            assert_close(full_gradients(chunk), {name: value.grad for name, value in values.items()}, rtol=1e-6)
        sgd.step()
        optimizer.step()
    # A main weight that differs in its last bit may round to another bfloat16.
    assert_close(full_weights(chunk), {name: value.data for name, value in values.items()}, rtol=1e-3)


def test_bf16_over_fp32_main_weights() -> None:
    run_ranks(2, _bf16_parity)


# --- what is refused --------------------------------------------------------------------------------------------------


def _other_value(field: Any) -> Any:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        return "optim"
    if isinstance(default, tuple):
        return ("weight",)
    return 1 if default is None else default + 1


def _fields_refused(cls: Any) -> int:
    start()
    refused = 0
    for field in fields(cls):
        config = cls(data_parallel_sharding_strategy="optim_grads_params")
        if field.name in HONOURED:
            continue
        setattr(config, field.name, _other_value(field))
        tower = build_tower()
        with pytest.raises(NotImplementedError, match=rf"ddp_config\.{field.name}: expected .*, got .*no effect"):
            wrap(tower, config=config)
        assert not isinstance(tower, FsdpModule)
        refused += 1
    return refused


@pytest.mark.parametrize("cls", [adapter.DistributedDataParallelConfig, DistributedDataParallelConfig])
def test_every_config_field_is_honoured_or_refused(cls: Any) -> None:
    [refused] = run_ranks(1, _fields_refused, cls)
    assert refused == len({field.name for field in fields(cls)} - HONOURED) > 12


def test_the_config_extends_megatron_cores() -> None:
    ours = {field.name for field in fields(adapter.DistributedDataParallelConfig)}
    assert ours >= {field.name for field in fields(DistributedDataParallelConfig)} | HONOURED


def _plain_config() -> None:
    start()
    plain = wrap(
        build_tower(), config=DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    )
    ours = wrap(build_tower())
    for chunk in (plain, ours):
        _train_tower(chunk, microbatches=2)
    assert_equal(full_weights(plain), full_weights(ours))


def test_a_plain_megatron_core_config_is_accepted() -> None:
    run_ranks(2, _plain_config)


def _refuse(error: type[Exception], match: str, tower: Any, config: Any = None, **options: Any) -> None:
    with pytest.raises(error, match=match):
        adapter.FullyShardedDataParallel(tower.config, config or ddp_config(), tower, **options)
    assert not any(isinstance(module, FsdpModule) for module in tower.modules())


def _refuse_strategies() -> None:
    for options, error in (
        (
            {"data_parallel_sharding_strategy": "zero3"},
            r"data_parallel_sharding_strategy: expected one of \('no_shard', 'optim', 'optim_grads', "
            r"'optim_grads_params'\), got 'zero3'. Set --data-parallel-sharding-strategy to one of them",
        ),
        (
            {"outer_dp_sharding_strategy": "optim_grads", "num_distributed_optimizer_instances": 2},
            r"outer_dp_sharding_strategy: expected one of \('no_shard', 'optim'\), got 'optim_grads'. Set --outer-dp",
        ),
        (
            {"outer_dp_sharding_strategy": "optim"},
            "outer_dp_sharding_strategy: expected 'no_shard' with num_distributed_optimizer_instances=1, got 'optim'",
        ),
        (
            {"num_distributed_optimizer_instances": 0},
            "num_distributed_optimizer_instances: expected an int >= 1, got 0",
        ),
        ({"num_distributed_optimizer_instances": True}, "instances: expected an int >= 1, got True"),
        ({"num_distributed_optimizer_instances": 2.0}, r"instances: expected an int >= 1, got 2\.0"),
        (
            {"num_distributed_optimizer_instances": 2},
            "instances: expected a divisor of the data-parallel size 1, got 2. Change --num-distributed-optimizer-inst",
        ),
        *(
            (
                {"data_parallel_sharding_strategy": strategy, "megatron_fsdp_reshard_after_forward": False},
                rf"reshard_after_forward: expected None with data_parallel_sharding_strategy='{strategy}', which",
            )
            for strategy in ("no_shard", "optim", "optim_grads")
        ),
        (
            {"data_parallel_sharding_strategy": "optim", "megatron_fsdp_create_all_gather_group": True},
            "create_all_gather_group: expected False with data_parallel_sharding_strategy='optim', which keeps whole",
        ),
    ):
        _refuse(ValueError, error, build_tower(), ddp_config(**options), fsdp_unit_modules=[nn.Linear])


def _refusals() -> None:
    start()
    tower = build_tower()
    for name, value, cure in (
        ("defer_embedding_wgrad_compute", True, "no --defer-embedding-wgrad-compute"),
        ("enable_cuda_graph", True, "no --enable-cuda-graph"),
        ("external_cuda_graph", True, "no --external-cuda-graph"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl none"),
        ("delay_wgrad_compute", True, "no --delay-wgrad-compute"),
        ("init_model_with_meta_device", True, "no --init-model-with-meta-device"),
        ("has_cond_embedder", True, "a model without a conditional embedder"),
        ("flextron", True, "a model without it"),
    ):
        tower = build_tower()
        setattr(tower.config, name, value)
        _refuse(NotImplementedError, rf"{name}: expected it off, got {value!r}.*Use {cure}\.", tower)
    for field, gathers, bits in (("fp8_param", "fp8_param_gather", 8), ("fp4_param", "fp4_param_gather", 4)):
        tower = build_tower()
        setattr(tower.config, field, True)
        error = f"ddp_config.{gathers}: expected True, as {field} of .* got False. Set both, with --fp{bits}-param-gat"
        _refuse(ValueError, error, tower)
        error = f"{field}: expected a model with TransformerEngine's weights in FP{bits}, got one without"
        _refuse(ValueError, error, tower, ddp_config(**{gathers: True}))
    error = "ddp_config.keep_fp8_transpose_cache: expected False without weights in FP8 or FP4, got True"
    _refuse(ValueError, error, build_tower(), ddp_config(keep_fp8_transpose_cache=True))
    for name, value, message in (
        ("gtp_weight_remat_size", 2, "gtp_weight_remat_size: expected 1, got 2"),
        ("expert_gtp_weight_remat_size", 4, "expert_gtp_weight_remat_size: expected 1, got 4"),
        ("moe_router_load_balancing_type", ["quantile_balancing"], "expected another than quantile_balancing"),
    ):
        tower = build_tower()
        setattr(tower.config, name, value)
        _refuse(NotImplementedError, message, tower)
    _refuse(TypeError, r"ddp_config: expected DistributedDataParallelConfig, got dict", build_tower(), {"a": 1})
    _refuse_strategies()
    _refuse(
        ValueError,
        "megatron_fsdp_main_grads_dtype: expected torch.float32 or None with grad_reduce_in_fp32, got torch.bfloat16",
        build_tower(),
        ddp_config(grad_reduce_in_fp32=True, megatron_fsdp_main_grads_dtype=BF16),
        fsdp_unit_modules=[nn.Linear],
    )
    _refuse(
        ValueError,
        "megatron_fsdp_grad_comm_dtype: expected no wider than torch.bfloat16, in which gradients accumulate, got "
        "torch.float32. Set --megatron-fsdp-main-grads-dtype as wide, or send less",
        build_tower(BF16),
        ddp_config(megatron_fsdp_grad_comm_dtype=FP32),
        fsdp_unit_modules=[nn.Linear],
    )
    units = "FullyShardedDataParallel fsdp_unit_modules: expected"
    _refuse(ValueError, rf"{units} classes that occur.*\['Conv2d'\]", build_tower(), fsdp_unit_modules=[nn.Conv2d])
    for bad in ("Linear", "torch.nn.NoSuch", "no.such.Linear", "torch.nn.functional.gelu", int, 3):
        _refuse(
            ValueError, rf"{units} module classes or their dotted names, got", build_tower(), fsdp_unit_modules=[bad]
        )
    _refuse(
        ValueError,
        "disable_bucketing: expected False with fsdp_unit_modules, got True",
        build_tower(),
        disable_bucketing=True,
        fsdp_unit_modules=[nn.Linear],
    )


def test_refusals_name_the_option_and_leave_the_model_alone() -> None:
    run_ranks(1, _refusals)


def _methods_refused() -> None:
    start()
    chunk = wrap(build_tower())
    with pytest.raises(NotImplementedError, match="broadcast_params: expected parameters made equal before wrapping"):
        chunk.broadcast_params()


def test_calls_that_would_mislead_are_refused_on_every_rank() -> None:
    run_ranks(2, _methods_refused)


def test_the_model_config_is_not_touched_by_wrapping() -> None:
    run_ranks(1, _config_untouched)


def _config_untouched() -> None:
    start()
    tower = build_tower()
    before, options = dict(vars(tower.config)), ddp_config()
    kept = copy.copy(options)
    wrap(tower, config=options)
    assert vars(tower.config) == before
    assert options == kept
