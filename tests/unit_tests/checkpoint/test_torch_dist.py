# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by megatron-core's DDP and distributed optimizer go on under FSDP v2, bit for bit, on any ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint.ranks import Ranks
from megatron.core.distributed.fsdp.torch_dist_checkpoint import TorchDistCheckpoint, is_torch_dist
from megatron.core.distributed.fsdp.torch_dist_groups import match_groups, saved_groups
from megatron.core.distributed.fsdp.torch_dist_names import locate, sort_keys
from tests.unit_tests import mcore
from tests.unit_tests.checkpoint.files import Evil, save, save_chunks
from tests.unit_tests.checkpoint.megatron_files import SLOTS, STEP, Source, Truth, make_source
from tests.unit_tests.launch import run_ranks

SOURCES = {
    "ddp1": Source(tied=True),
    "ddp2_swiglu": Source(ranks=2, swiglu=True),
    "distributed1_halves": Source(distributed=True, swiglu=True, content=(("singleton_local_shards", True),)),
    "distributed2": Source(ranks=2, distributed=True, tied=True),
    "fp32": Source(dtype=torch.float32, swiglu=True),
}
STRATEGIES = ("optim_grads_params", "optim")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Truth]]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: (folder / name, make_source(folder / name, source)) for name, source in SOURCES.items()}


def _live(source: Source, strategy: str) -> tuple[Any, Any]:
    """Return a wrapped model with other weights than any checkpoint's, and its optimizer."""
    model = source.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-7.0)
    chunk = mcore.wrap(model, data_parallel_sharding_strategy=strategy)
    return chunk, mcore.build_optimizer(chunk, **source.optimizer_options())


def _targets(chunk: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    weights = dict(chunk.module.named_parameters())
    state = optimizer.sharded_state_dict({}, is_loading=True)["state"]
    states = {name: {slot: values[slot] for slot in SLOTS} for name, values in state.items()}  # of wrappers, too
    return weights, states


def _load(path: str, source: Source, strategy: str) -> tuple[Any, ...]:
    mcore.start()
    with mcore.cpu_shim():
        chunk, optimizer = _live(source, strategy)
        weights, states = _targets(chunk, optimizer)
        mcore.run_schedule(chunk, 0, 1, forward_only=True)  # gathers weights that the load must make stale
        checkpoint = TorchDistCheckpoint(Path(path), Ranks(torch.device("cpu")))
        report = checkpoint.read(weights, states, chunk.config)
        groups = match_groups(saved_groups(checkpoint.common), optimizer.param_groups)
        found: Truth = {"weight": mcore.full_weights(chunk), **{slot: {} for slot in SLOTS}}
        for name, values in mcore.full_state(optimizer, chunk).items():
            for slot in SLOTS:
                found[slot][name] = values[slot]
        plain = source.model()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(found["weight"][name])
        text, labels, _ = mcore.tokens(0, 0, 0)
        with torch.no_grad():
            losses = [mcore.gpt_losses(model, text, labels) for model in (chunk, plain)]
        return found, report, groups, torch.equal(*losses)


CASES = [
    ("ddp1", 1, 0),
    ("ddp1", 3, 0),
    ("ddp2_swiglu", 2, 0),
    ("ddp2_swiglu", 3, 1),
    ("distributed1_halves", 3, 0),
    ("distributed1_halves", 2, 1),
    ("distributed2", 1, 1),
    ("distributed2", 2, 0),
    ("fp32", 2, 0),
]


@pytest.mark.parametrize(("name", "ranks", "strategy"), CASES)
def test_loads_bit_for_bit(sources: dict[str, tuple[Path, Truth]], name: str, ranks: int, strategy: int) -> None:
    path, truth = sources[name]
    source = SOURCES[name]
    assert is_torch_dist(path)
    for found, report, groups, has_equal_losses in run_ranks(ranks, _load, str(path), source, STRATEGIES[strategy]):
        for slot, values in found.items():
            assert values.keys() == truth[slot].keys()
            for parameter, value in values.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, truth[slot][parameter]), f"{slot} of {parameter}"
        assert has_equal_losses, "compute weights are those that were loaded"
        assert report.cast == []
        has_masters = source.is_mixed or source.distributed
        assert len(report.from_masters if has_masters else report.from_model) == len(found["weight"])
        assert [group["step"] for group in groups] == [STEP, STEP]
        assert sorted(group["wd_mult"] for group in groups) == [0.0, 1.0]


def _load_into_another_model(path: str, source: Source, live: Source, weights_only: bool) -> str:
    mcore.start()
    with mcore.cpu_shim():
        chunk, optimizer = _live(live, "optim_grads_params")
        weights, states = _targets(chunk, optimizer)
        weights["decoder.final_layernorm.weight"] = torch.zeros(5)
        checkpoint = TorchDistCheckpoint(Path(path), Ranks(torch.device("cpu")))
        with pytest.raises(CheckpointError) as error:
            checkpoint.read(weights, {} if weights_only else states, chunk.config)
        values = [parameter.to_local() for parameter in chunk.module.parameters()]
        assert all(bool((value == -7).all()) for value in values), "nothing has been written"
        assert not any(bool(value.to_local().any()) for slots in states.values() for value in slots.values())
        return str(error.value)


def test_another_model_is_refused_with_all_differences(sources: dict[str, tuple[Path, Truth]]) -> None:
    path, live = sources["ddp1"][0], Source(layers=3, swiglu=True)
    errors = run_ranks(2, _load_into_another_model, str(path), SOURCES["ddp1"], live, False)
    assert len(set(errors)) == 1
    for part in (
        "; decoder.layers.mlp.linear_fc2.weight: expected shape (3, 12, 20), got (2, 12, 20)",
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight: expected shape (3, 40, 12), got (2, 20, 12)",
        "; output_layer.weight: not in the checkpoint",
        "optimizer.state.exp_avg_sq.output_layer.weight: not in the checkpoint",
        "decoder.final_layernorm.weight: expected shape (5,), got (12,)",
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.bias: in the checkpoint, and not in the model",
    ):
        assert errors[0].count(part) == 1, part
    (error, _) = run_ranks(2, _load_into_another_model, str(path), SOURCES["ddp1"], live, True)
    assert "output_layer.weight: not in the checkpoint" in error and "exp_avg" not in error


def _load_buckets(path: str, source: Source) -> tuple[str, dict[str, torch.Tensor]]:
    mcore.start()
    with mcore.cpu_shim():
        chunk, optimizer = _live(source, "optim_grads_params")
        weights, states = _targets(chunk, optimizer)
        checkpoint = TorchDistCheckpoint(Path(path), Ranks(torch.device("cpu")))
        with pytest.raises(CheckpointError) as error:
            checkpoint.read(weights, states, chunk.config)
        report = checkpoint.read(weights, {}, chunk.config)
        assert report.from_model == list(weights) and report.cast and report.unread
        return str(error.value), mcore.full_weights(chunk)


def test_buckets_of_the_distributed_optimizer_give_weights_only(tmp_path: Path) -> None:
    source = Source(distributed=True, content=(("distrib_optim_sharding_type", "dp_reshardable"),))
    truth = make_source(tmp_path / "source", source)
    for error, weights in run_ranks(2, _load_buckets, str(tmp_path / "source"), source):
        assert "dp_reshardable" in error and "--no-load-optim" in error
        assert "--dist-ckpt-optim-fully-reshardable" in error
        for name, weight in weights.items():
            assert torch.equal(weight, truth["model"][name].float()), name


def _open(path: str) -> None:
    TorchDistCheckpoint(Path(path), Ranks(torch.device("cpu")))


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("__0_0.distcp", None, "__0_0.distcp"),
        ("common.pt", b"PK", "common.pt: expected what torch.save writes"),
        ("metadata.json", b"{}", "expected metadata.json with sharded_backend torch_dist"),
    ],
)
def test_damage_is_named(
    sources: dict[str, tuple[Path, Truth]], tmp_path: Path, file: str, content: bytes | None, error: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sources["ddp1"][0], copy)
    (copy / file).unlink() if content is None else (copy / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(error)):
        _open(str(copy))


def test_common_content_is_not_executed(sources: dict[str, tuple[Path, Truth]], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sources["ddp1"][0], copy)
    torch.save({"args": Evil(tmp_path / "witness")}, copy / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt: expected plain data, got .*system"):
        _open(str(copy))
    assert not (tmp_path / "witness").exists()


def test_common_content_lies_in_a_file_or_among_the_tensors(tmp_path: Path) -> None:
    """As megatron-core 0.16 and 0.19 write it."""
    common = {"iteration": 3, "args": None}
    assert _checkpoint(tmp_path / "file", {"a": torch.ones(1)}, common).common == common
    folder = tmp_path / "object"
    content = {"a": torch.ones(1), "common_state/shard_0_1": [common]}
    dcp.save(content, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert TorchDistCheckpoint(folder, Ranks(torch.device("cpu"))).common == common
    save(tmp_path / "none", {"a": torch.ones(1)})
    (tmp_path / "none/metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CheckpointError, match=r"common\.pt: expected a readable file, got No such file"):
        _open(str(tmp_path / "none"))


# --- without processes ------------------------------------------------------------------------------------------------


def _checkpoint(folder: Path, tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> TorchDistCheckpoint:
    save(folder, tensors)
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return TorchDistCheckpoint(folder, Ranks(torch.device("cpu")))


def test_experts_and_layers_are_offsets(tmp_path: Path) -> None:
    fused = torch.randn(2, 3, 8, 4)  # layers, experts, twice the width, hidden
    start = "decoder.layers.{}.mlp.experts."
    grouped = start + "linear_fc1.weight{}"
    local = start + "local_experts.{}.linear_fc2.weight"
    tensors = {
        "module.decoder.layers.mlp.experts.experts.linear_fc1.weight": fused,
        **{f"decoder.layers.{layer}.mlp.experts.experts.linear_fc2.weight": fused[layer, :, :4] for layer in range(2)},
        "count": torch.tensor(5),
    }
    checkpoint = _checkpoint(tmp_path / "c", tensors, {})
    targets = {
        grouped.format(layer, expert): torch.zeros(8, 4, dtype=torch.float64)
        for layer in range(2)
        for expert in range(3)
    }
    targets |= {local.format(layer, expert): torch.zeros(4, 4) for layer in range(2) for expert in range(3)}
    targets["count"] = torch.tensor(0)
    config = SimpleNamespace(num_layers=2, num_moe_experts=3)
    report = checkpoint.read(targets, {}, config)
    assert report.cast == ["module.decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    for layer in range(2):
        for expert in range(3):
            assert torch.equal(targets[grouped.format(layer, expert)], fused[layer, expert].double())
            assert torch.equal(targets[local.format(layer, expert)], fused[layer, expert, :4])
    assert targets["count"] == 5
    with pytest.raises(CheckpointError, match=r"count: expected torch.float32, got torch.int64") as error:
        wrong = {**targets, "count": torch.tensor(0.0)}
        checkpoint.read(wrong, {}, SimpleNamespace(num_layers=2, num_moe_experts=4))
    assert str(error.value).count("expected shape (2, 4, 8, 4), got (2, 3, 8, 4)") == 1


def test_another_padding_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path / "c", {"embedding.word_embeddings.weight": torch.zeros(8, 2)}, {})
    with pytest.raises(CheckpointError, match=r"expected shape \(6, 2\), got \(8, 2\) \(the vocabulary is padded"):
        checkpoint.read({"embedding.word_embeddings.weight": torch.zeros(6, 2)}, {}, None)


def test_main_weights_that_are_not_whole_are_left(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(4, 2), "optimizer.state.fp32_param.w": torch.zeros(8)}  # flattened, as once
    checkpoint = _checkpoint(tmp_path / "c", tensors, {})
    target = torch.zeros(4, 2)
    report = checkpoint.read({"w": target}, {}, None)
    assert bool((target == 1).all()) and report.from_model == ["w"]
    assert report.unread == ["optimizer.state.fp32_param.w"]


def test_chunks_that_leave_gaps_are_refused(tmp_path: Path) -> None:
    save_chunks(tmp_path / "c", "w", torch.ones(4, 2), [((0, 0), (3, 2))])
    torch.save({}, tmp_path / "c/common.pt")
    (tmp_path / "c/metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CheckpointError, match="w: expected saved chunks that hold every element once"):
        TorchDistCheckpoint(tmp_path / "c", Ranks(torch.device("cpu"))).read({"w": torch.zeros(4, 2)}, {}, None)


def test_names_of_layer_norms_and_halves() -> None:
    keys = {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.bias",
        "decoder.layers.0.mlp.linear_fc1.weight_w",
        "decoder.layers.0.mlp.linear_fc1.weight_v",
        "decoder.layers.1.mlp.linear_fc1.weight_w",
    }
    (place,) = locate("module.module.decoder.layers.4.input_layernorm.weight", keys)
    assert place.key == "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert [leading.index for leading in place.leading] == [4]
    (place,) = locate("decoder.layers.1.mlp.linear_fc1.layer_norm_bias", keys)
    assert place.key == "decoder.layers.1.pre_mlp_layernorm.bias" and not place.leading
    assert [place.half for place in locate("decoder.layers.0.mlp.linear_fc1.weight", keys)] == [0, 1]
    assert locate("decoder.layers.1.mlp.linear_fc1.weight", keys) == []
    (place,) = locate("mtp.layers.0.mtp_model_layer.a.weight", {"mtp.layers.0.transformer_layer.a.weight"})
    assert place.key == "mtp.layers.0.transformer_layer.a.weight"


def test_keys_that_differ_in_prefixes_only_are_refused() -> None:
    found = sort_keys(["model.module.w", "chained_0.optimizer.state.exp_avg.module.w", "optimizer.distributed.x"])
    assert found.model == {"w": "model.module.w"}
    assert found.state == {"exp_avg": {"w": "chained_0.optimizer.state.exp_avg.module.w"}}
    assert found.others == ["optimizer.distributed.x"]
    with pytest.raises(CheckpointError, match=r"got w and module\.w"):
        sort_keys(["w", "module.w"])


def _group(wd_mult: float, **more: Any) -> dict[str, Any]:
    return {"params": [], "wd_mult": wd_mult, "lr_mult": 1.0, "lr": 0.1, "foreach": None, **more}


def test_groups_are_matched_by_kind() -> None:
    saved = [_group(0.0, lr=0.3, step=5), _group(1.0, lr=0.2, step=5, unknown=1)]
    live = [_group(1.0, foreach=True), _group(0.0, is_expert_parallel=False)]
    found = match_groups(saved, live)
    assert found == [
        {"wd_mult": 1.0, "lr_mult": 1.0, "lr": 0.2, "step": 5},
        {"wd_mult": 0.0, "lr_mult": 1.0, "lr": 0.3, "step": 5},
    ]
    assert match_groups([*saved, dict(saved[0])], live) == found, "the same group saved by several optimizers"


@pytest.mark.parametrize(
    ("saved", "live", "errors"),
    [
        ([_group(1.0)], [_group(1.0), _group(0.0)], ["none was saved for the live one with wd_mult=0.0"]),
        ([_group(1.0), _group(0.5)], [_group(1.0)], ["no live one for the one saved with wd_mult=0.5"]),
        ([_group(1.0, lr=1.5), _group(1.0, lr=2.5)], [_group(1.0)], ["several with wd_mult=1.0", "1.5", "2.5"]),
        ([_group(1.0)], [_group(1.0), _group(1.0)], ["several with wd_mult=1.0", "live 2"]),
    ],
)
def test_groups_without_one_counterpart_are_named(
    saved: list[dict[str, Any]], live: list[dict[str, Any]], errors: list[str]
) -> None:
    with pytest.raises(CheckpointError) as error:
        match_groups(saved, live)
    assert all(part in str(error.value) for part in errors)


def test_groups_of_chained_optimizers_and_a_common_step_are_found() -> None:
    chained = {
        0: {"optimizer": {"param_groups": [_group(1.0)], "state": {"common_step": torch.tensor(4.0)}}},
        1: {"optimizer": {"param_groups": [_group(1.0, is_expert_parallel=True, step=6)]}},
    }
    assert [group["step"] for group in saved_groups({"optimizer": chained})] == [4, 6]
    assert saved_groups({}) == []


def test_other_folders_are_not_torch_dist(tmp_path: Path) -> None:
    assert not is_torch_dist(tmp_path)
    for text in ("", "[]", '{"sharded_backend": "zarr"}'):
        (tmp_path / "metadata.json").write_text(text)
        assert not is_torch_dist(tmp_path)
