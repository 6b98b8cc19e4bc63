# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Weights that stages share, names of layers over stages, and what is refused of pipeline parallelism.

tests/functional_tests/test_pipeline.py trains.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp import mcore_fsdp_v2_finalize as finalize
from megatron.core.distributed.fsdp import mcore_fsdp_v2_shared_weights as shared_weights
from megatron.core.distributed.fsdp.experimental import GradientStatistics, MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.mcore_fsdp_v2_config import check_pipeline
from megatron.core.optimizer import fully_sharded_optimizer
from megatron.core.optimizer.fully_sharded_optimizer import get_megatron_optimizer
from tests.unit_tests.launch import DEVICE, run_ranks, run_ranks_expecting
from tests.unit_tests.mcore import build_tower, ddp_config, model_config, optimizer_config, start, wrap


class Stage(nn.Module):
    """A first stage with both embeddings, or a last one with its copy of the words'; beside other parameters."""

    share_embeddings_and_output_weights = True

    def __init__(self, number: int, words: int = 6) -> None:
        super().__init__()
        self.rest = nn.Linear(3, 5 + 2 * number)
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(words, 4)})
        self.position_embeddings = nn.Embedding(3, 4)

    def shared_embedding_or_output_weight(self) -> Any:
        return self.embedding["word_embeddings"].weight


def _groups() -> ProcessGroupCollection:
    groups = ProcessGroupCollection()
    groups.embd = groups.pos_embd = dist.group.WORLD
    return groups


def _stage(words: int = 6, is_apart: bool = True, policy: Any = None) -> tuple[Stage, Any]:
    """Return this rank's stage, which it alone holds, and the weights that it shares."""
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("stage", "dp"))["dp"]
    stage = Stage(dist.get_rank(), words).to(DEVICE)
    if is_apart:
        shared_weights.set_apart(shared_weights.find_shared_weights(stage, _groups()))
    fully_shard(stage, mesh, mixed_precision_policy=policy)
    return stage, shared_weights.find_shared_weights(stage, _groups())


def _add() -> None:
    _kept, shared = _stage()
    assert list(shared) == ["embd", "pos_embd"]
    shared_weights.check_equal_shards(shared, _groups())
    for value, (weight,) in enumerate(shared.values(), start=1):
        weight.grad = torch.full_like(weight, value * (1.0 + dist.get_rank()))
    chunks = [SimpleNamespace(shared_weights=shared)]
    places = [weight.grad.to_local().data_ptr() for (weight,) in shared.values()]
    finalize._add_over_stages(chunks, _groups())
    for value, (weight,) in enumerate(shared.values(), start=1):
        assert bool((weight.grad.to_local() == 3.0 * value).all())
    assert places == [weight.grad.to_local().data_ptr() for (weight,) in shared.values()]


def test_gradients_of_shared_weights_are_added_in_place() -> None:
    run_ranks(2, _add)


def _another_place(words: int, is_apart: bool) -> None:
    _, shared = _stage(words + 2 * dist.get_rank() if is_apart else words, is_apart)
    shared_weights.check_equal_shards(shared, _groups())


@pytest.mark.parametrize("is_apart", (True, False))
def test_shared_weights_that_lie_elsewhere_are_refused(is_apart: bool) -> None:
    """Other sizes; and equal ones, in a buffer that other parameters share."""
    for message in run_ranks_expecting(2, ValueError, _another_place, 6, is_apart):
        assert "weights that stages share over embd: expected the same elements on all of them, got [" in message
        assert "on stage 1 of those that hold them. Wrap the chunks of all stages with the same config" in message


def _another_gradient_dtype() -> None:
    dtype = (torch.bfloat16, torch.float32)[dist.get_rank()]
    _, shared = _stage(policy=MixedPrecisionPolicy(main_grads_dtype=dtype))
    shared_weights.check_equal_shards(shared, _groups())


def test_shared_weights_with_gradients_of_other_dtypes_are_refused() -> None:
    for message in run_ranks_expecting(2, ValueError, _another_gradient_dtype):
        assert "torch.bfloat16 gradients" in message and "torch.float32 gradients" in message


def _apart() -> None:
    places = []
    for number in range(2):
        stage = Stage(number).to(DEVICE)
        stage.embedding["word_embeddings"].weight.fsdp_group = "words"
        fully_shard(stage)
        assert len(stage.parameter_groups) == 2
        places.append(stage.embedding["word_embeddings"].weight.geometry.cut)
    assert places[0] == places[1]


def test_a_parameter_set_apart_lies_in_the_same_place_in_any_unit() -> None:
    run_ranks(2, _apart)


def _without_stages() -> None:
    groups = ProcessGroupCollection()
    groups.embd = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups.pos_embd = groups.embd
    assert shared_weights.find_shared_weights(Stage(0), groups) == {}
    untied = Stage(0)
    untied.share_embeddings_and_output_weights = False
    assert list(shared_weights.find_shared_weights(untied, _groups())) == ["pos_embd"]


def test_nothing_is_shared_on_one_stage_or_untied() -> None:
    run_ranks(2, _without_stages)


def _copies() -> None:
    """Rank 1 holds a copy of the first parameter of rank 0, and one of its own."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("stage", "dp"))["dp"]
    module = nn.ParameterList(parameters).to(DEVICE)
    if rank == 1:
        next(iter(module.parameters())).shared = True
    fully_shard(module, mesh)
    one, other = module.parameters()
    one.grad, other.grad = torch.full_like(one, 2.0), torch.full_like(other, float(rank))
    mine = [one, other]
    statistics = GradientStatistics(dist.group.WORLD, torch.device(DEVICE), shared_weights.is_counted)
    assert float(statistics.norm(mine)) == pytest.approx(math.sqrt(3 * 4 + 2), rel=1e-15)
    assert float(statistics.count_zeros(mine)) == 2
    assert len(statistics.counted_gradients(mine)) == (2 if rank == 0 else 1)
    statistics.clip(mine, 1.0, statistics.norm(mine))
    assert float(one.grad.to_local()[0]) < 1, "a copy is clipped like its original"


def test_statistics_count_a_copy_once() -> None:
    run_ranks(2, _copies)


class _Layer(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(2, 2)
        self.layer_number = number


def _chunk(first: int, has_copy: bool) -> Any:
    module = nn.Module()
    module.decoder = nn.Module()
    module.decoder.layers = nn.ModuleList(_Layer(first + index) for index in range(2))
    module.output_layer = nn.Linear(2, 3, bias=False)
    module.output_layer.weight.shared = has_copy
    return SimpleNamespace(module=module, config=SimpleNamespace(gated_linear_unit=False))


def test_layers_have_their_number_in_the_model() -> None:
    """The second of two chunks of two layers, whose local number 1 is not the model's layer 1 of neither."""
    chunk = _chunk(2, has_copy=True)
    tensors = names.model_keys(chunk)
    assert set(tensors) == {
        *(f"module.decoder.layers.{index}.{kind}" for index in (1, 2) for kind in ("weight", "bias")),
        "module.embedding.word_embeddings.weight",
    }
    assert tensors["module.decoder.layers.1.bias"] is chunk.module.decoder.layers[0].bias
    own = chunk.module.state_dict()
    for given in (tensors, own):
        loaded = names.join_gated(given, chunk)
        assert loaded.keys() == own.keys()
        for name, tensor in own.items():
            assert loaded[name].data_ptr() == tensor.data_ptr(), name
    assert "module.output_layer.weight" in names.model_keys(_chunk(1, has_copy=False))


def test_exchanges_that_would_pair_wrongly_are_refused() -> None:
    for overlaps, batches, stages, chunks in (
        (False, True, 2, 2),
        (False, False, 2, 2),
        (True, True, 2, 2),
        (True, True, 4, None),
    ):
        config = model_config()
        config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size = stages, chunks
        config.overlap_p2p_comm, config.batch_p2p_comm = overlaps, batches
        message = f"never both True, got {overlaps} with batch_p2p_comm={batches}; stages would exchange wrong tensors"
        with pytest.raises(ValueError, match=message):
            check_pipeline(config)
    for overlaps, batches, stages, chunks in ((True, False, 2, 2), (False, True, 4, 2), (False, True, 2, None)):
        config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size = stages, chunks
        config.overlap_p2p_comm, config.batch_p2p_comm = overlaps, batches
        check_pipeline(config)


class Predicting(nn.Module):
    """A last stage whose further layers read an embedding, beside an output layer of the same shape."""

    pre_process, post_process, mtp_process = False, True, True

    def __init__(self, is_tied: bool, predicts: int | None = 1) -> None:
        super().__init__()
        self.share_embeddings_and_output_weights = is_tied
        self.config = SimpleNamespace(mtp_num_layers=predicts)
        self.embedding, self.output_layer = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)

    def shared_embedding_or_output_weight(self) -> Any:
        return self.embedding.weight


def test_an_embedding_of_further_layers_is_shared_tied_or_not() -> None:
    for is_tied in (True, False):
        stage = Predicting(is_tied)
        assert list(shared_weights._word_embeddings(nn.Sequential(stage))) == [stage.embedding.weight]
    assert not list(shared_weights._word_embeddings(Predicting(False, None)))


def test_an_output_weight_that_nothing_reads_is_taken_away() -> None:
    """That of a tied last stage with further layers: it is given the embedding's."""
    tied, untied, first, plain = Predicting(True), Predicting(False), Predicting(True), Predicting(True, None)
    first.pre_process, plain.mtp_process = True, False
    shared_weights.drop_spare_weights(nn.ModuleList([tied, untied, first, plain]))
    assert [stage.output_layer.weight is None for stage in (tied, untied, first, plain)] == [True, False, False, False]
    assert len(list(tied.parameters())) == 1


def _wrong_number_of_stages() -> None:
    start()
    tower = build_tower()
    tower.config.pipeline_model_parallel_size = 2
    wrap(tower)


def test_another_number_of_stages_than_the_groups_have_is_refused() -> None:
    for message in run_ranks_expecting(1, ValueError, _wrong_number_of_stages):
        assert "pipeline_model_parallel_size: expected the size 1 of the process group pp, got 2 in the" in message


def _without_trained_parameters() -> None:
    start()
    chunk = wrap(build_tower())
    found = [] if dist.get_rank() == 1 else [{"params": list(chunk.parameters())}]
    with mock.patch.object(fully_sharded_optimizer.mcore_optimizer, "_get_param_groups", lambda *unused: found):
        get_megatron_optimizer(optimizer_config(), [chunk])


def test_a_rank_without_trained_parameters_ends_all() -> None:
    for message in run_ranks_expecting(2, ValueError, _without_trained_parameters):
        assert "model_chunks: expected trainable parameters, got none on ranks [1]. Unfreeze some on every" in message


def _different_configs() -> None:
    start()
    chunks = [wrap(build_tower(), config=ddp_config(data_parallel_sharding_strategy=s)) for s in ("optim", "no_shard")]
    get_megatron_optimizer(optimizer_config(), chunks)


def test_chunks_with_different_configs_are_refused() -> None:
    for message in run_ranks_expecting(1, ValueError, _different_configs):
        assert "expected chunks wrapped with equal data-parallel configs, got different ones for 2 chunks" in message
