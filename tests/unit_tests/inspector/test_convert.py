# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt convert``: what megatron-core wrote loads in fsdp_dtensor, and back into megatron-core; bit for bit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core import dist_checkpointing
from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.experimental.checkpoint import CheckpointError, OpenCheckpoint, Ranks
from megatron.core.distributed.fsdp.experimental.checkpoint.folder import read_manifest, verify_files
from megatron.core.distributed.fsdp.experimental.checkpoint.reader import load_entry, load_metadata, read_box
from megatron.core.distributed.fsdp.torch_dist_checkpoint import COMMON_KEY, read_common
from megatron.inspector import convert, streams
from tests.unit_tests import mcore
from tests.unit_tests.checkpoint.files import save
from tests.unit_tests.checkpoint.megatron_files import (
    SLOTS,
    STEP,
    Source,
    Truth,
    arguments,
    build,
    contents,
    make_source,
    saving_on_cpu,
    train,
)
from tests.unit_tests.launch import run_ranks

SOURCES = {
    "distributed": Source(ranks=2, distributed=True, tied=True),
    "swiglu": Source(swiglu=True),
    "halves": Source(distributed=True, swiglu=True, content=(("singleton_local_shards", True),)),
}


def _convert(*words: object) -> int:
    parser = argparse.ArgumentParser()
    convert.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["convert", *map(str, words)])
    code: int = args.run(args)
    return code


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, Truth]]:
    """Return each source, what it was converted to in pieces of few elements, and what is in it."""
    folder = tmp_path_factory.mktemp("sources")
    made = {}
    for name, source in SOURCES.items():
        truth = make_source(folder / name, source)
        assert _convert(folder / name, folder / f"{name}_fsdp", "--to", "fsdp_dtensor", "--max-memory", "1KiB") == 0
        made[name] = (folder / name, folder / f"{name}_fsdp", truth)
    return made


def _load_fsdp_dtensor(path: str, source: Source) -> tuple[Truth, list[dict[str, Any]], list[float]]:
    """Load as the training script does."""
    mcore.start()
    with mcore.cpu_shim():
        chunk = mcore.wrap(source.model())
        optimizer = mcore.build_optimizer(chunk, **source.optimizer_options())
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.fill_(-7.0)
        opened = OpenCheckpoint(Path(path), Ranks(torch.device("cpu")), "checksums")
        tensors = names.find_model(chunk, opened.keys) | names.find_optimizer(optimizer, chunk, opened.keys)
        opened.check(tensors, strict=True, others=[key for key in opened.keys if not opened.is_tensor(key)])
        opened.read(tensors)
        names.load_settings(optimizer, chunk, opened.objects(names.settings_keys(opened.keys)))
        found: Truth = {"weight": mcore.full_weights(chunk), **{slot: {} for slot in SLOTS}}
        steps = []
        for name, values in mcore.full_state(optimizer, chunk).items():
            steps.append(float(values["step"]))
            for slot in SLOTS:
                found[slot][name] = values[slot]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return found, groups, steps


def _assert_equal(found: Mapping[str, Mapping[str, torch.Tensor]], truth: Truth) -> None:
    for slot, values in found.items():
        assert values.keys() == truth[slot].keys()
        for name, value in values.items():
            assert value.dtype == truth[slot][name].dtype
            assert torch.equal(value, truth[slot][name]), f"{slot} of {name}"


@pytest.mark.parametrize("name", SOURCES)
def test_torch_dist_loads_as_fsdp_dtensor(sources: dict[str, tuple[Path, Path, Truth]], name: str) -> None:
    _, converted, truth = sources[name]
    for found, groups, steps in run_ranks(2, _load_fsdp_dtensor, str(converted), SOURCES[name]):
        _assert_equal(found, truth)
        assert set(steps) == {STEP}
        assert sorted((group["wd_mult"], group["lr"]) for group in groups) == [(0.0, 0.01), (1.0, 0.01)]
        assert not any("step" in group for group in groups)


def _load_torch_dist(path: str, source: Source) -> tuple[list[Any], list[dict[str, Any]], Any]:
    """Load by megatron-core into its own model and optimizer."""
    mcore.start()
    with mcore.cpu_shim(), saving_on_cpu():
        model, chunk, optimizer = build(source)
        train(model, chunk, optimizer, 1)  # megatron-core needs a state to load into, with torch's Adam
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-7.0)
        content = dist_checkpointing.load_content_metadata(path)
        sharded = model.sharded_state_dict(metadata=content)
        wanted = {
            "model": sharded,
            "optimizer": optimizer.sharded_state_dict(sharded, is_loading=True, metadata=content),
        }
        state = dist_checkpointing.load(wanted, path)
        model.load_state_dict(state["model"])
        (inner,) = optimizer.chained_optimizers
        load = inner._set_main_param_and_optimizer_states
        # megatron-core 0.16.1 looks for the step of torch's Adam here, which it has saved, and set, with the groups.
        inner._set_main_param_and_optimizer_states = lambda parameter, tensors: load(
            parameter, {**tensors, "step": inner._get_main_param_and_optimizer_states(parameter)["step"]}
        )
        optimizer.load_state_dict(state["optimizer"])
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return list(contents(model, optimizer)), groups, state["iteration"]


@pytest.mark.parametrize("name", SOURCES)
def test_fsdp_dtensor_loads_in_megatron_core(
    sources: dict[str, tuple[Path, Path, Truth]], tmp_path: Path, name: str
) -> None:
    original, converted, truth = sources[name]
    assert _convert(converted, tmp_path / "back", "--to", "torch_dist", "--max-memory", "2KiB") == 0
    source = SOURCES[name]
    live = Source(ranks=2, distributed=True, swiglu=source.swiglu, tied=source.tied)
    for path in (original, tmp_path / "back") if name == "distributed" else (tmp_path / "back",):
        _assert_loads(path, live, truth)


def _assert_loads(path: Path, live: Source, truth: Truth) -> None:
    found: Truth = {}
    for parts, groups, iteration in run_ranks(2, _load_torch_dist, str(path), live):
        for slot, parameter, shape, begin, part in parts:
            whole = found.setdefault(slot, {}).setdefault(parameter, torch.full(shape, torch.nan, dtype=part.dtype))
            whole.view(-1)[begin : begin + part.numel()] = part.view(-1)
        assert iteration == 40
        assert sorted(group["wd_mult"] for group in groups) == [0.0, 1.0]
    _assert_equal(found, truth)


def test_back_and_forth_has_the_keys_of_the_source(
    sources: dict[str, tuple[Path, Path, Truth]], tmp_path: Path
) -> None:
    source, converted, _ = sources["distributed"]
    _convert(converted, tmp_path / "back", "--to", "torch_dist")
    ours, theirs = load_metadata(tmp_path / "back"), load_metadata(source)
    # Plain content goes to a file, from which every release reads it; 0.19 has an object for it.
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys() - {COMMON_KEY}
    for key, entry in theirs.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            other = ours.state_dict_metadata[key]
            assert isinstance(other, TensorStorageMetadata)
            assert (other.size, other.properties.dtype) == (entry.size, entry.properties.dtype)
            zeros = [0] * len(entry.size)
            pair = [
                read_box(folder, metadata, key, zeros, entry.size)
                for folder, metadata in ((source, theirs), (tmp_path / "back", ours))
            ]
            assert torch.equal(*pair), key
    assert set(read_manifest(tmp_path / "back") or {}) == {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}
    assert verify_files(tmp_path / "back", checksums=True) == []
    config = json.loads((tmp_path / "back/metadata.json").read_text())
    assert json.loads((source / "metadata.json").read_text()).items() <= config.items()
    assert config["common_backend"] == "torch"


def test_plain_content_is_kept(sources: dict[str, tuple[Path, Path, Truth]], tmp_path: Path) -> None:
    source, converted, _ = sources["swiglu"]
    metadata = load_metadata(converted)
    for key, value in {
        "iteration": 40,
        "checkpoint_version": 3.0,
        "opt_param_scheduler.num_steps": 320,
        "args": arguments(SOURCES["swiglu"]),
        "optimizer.param_to_group_meta.module.module.module.decoder.layers.1.mlp.linear_fc1.weight.wd_mult": 1.0,
        "optimizer.param_to_group_meta.module.module.module.decoder.layers.1.input_layernorm.bias.wd_mult": 0.0,
    }.items():
        assert load_entry(converted, metadata, key) == value
    assert metadata.planner_data["opt_param_scheduler.num_steps"] == ("opt_param_scheduler", "num_steps")
    _convert(converted, tmp_path / "back", "--to", "torch_dist")
    first, second = (read_common(folder) for folder in (source, tmp_path / "back"))
    for key in ("iteration", "args", "opt_param_scheduler", "checkpoint_version"):
        assert first[key] == second[key]
    groups = [common["optimizer"]["optimizer"]["param_groups"] for common in (first, second)]
    by_kind = [sorted(each, key=lambda group: group["wd_mult"]) for each in groups]
    assert by_kind[1] == [{**group, "step": float(STEP)} for group in by_kind[0]]


def test_weights_only(sources: dict[str, tuple[Path, Path, Truth]], tmp_path: Path) -> None:
    source, converted, truth = sources["swiglu"]
    _convert(source, tmp_path / "fsdp", "--to", "fsdp_dtensor", "--weights-only")
    _convert(converted, tmp_path / "dist", "--to", "torch_dist", "--weights-only")
    for folder in ("fsdp", "dist"):
        metadata = load_metadata(tmp_path / folder)
        assert not any(key.startswith(("optimizer", "opt_param")) for key in metadata.state_dict_metadata)
    value = read_box(tmp_path / "dist", metadata, "output_layer.weight", (0, 0), (29, 12))
    assert torch.equal(value, truth["weight"]["output_layer.weight"]), "main weights, as they are"
    assert "optimizer" not in torch.load(tmp_path / "dist/common.pt", weights_only=False)


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        ("local", "decoder.layers.{}.input_layernorm.weight"),
        ("transformer_engine", "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"),
    ],
)
def test_layer_norms_have_the_names_of_the_layers(tmp_path: Path, implementation: str, name: str) -> None:
    value = torch.randn(2, 4)
    source = _torch_dist(tmp_path / "c", {"decoder.layers.self_attention.linear_qkv.layer_norm_weight": value}, {})
    _convert(source, tmp_path / "out", "--to", "fsdp_dtensor", "--transformer-impl", implementation)
    metadata = load_metadata(tmp_path / "out")
    assert metadata.state_dict_metadata.keys() == {f"model.module.{name.format(layer)}" for layer in range(2)}
    for layer in range(2):
        key = f"model.module.{name.format(layer)}"
        assert torch.equal(read_box(tmp_path / "out", metadata, key, (0,), (4,)), value[layer])


def test_decoupled_learning_rates_are_those_of_embedding_and_head(tmp_path: Path) -> None:
    groups = [{"wd_mult": wd, "is_decoupled_lr": is_it, "lr": lr} for wd, is_it, lr in ((1, True, 3), (1, False, 2))]
    groups.append({"wd_mult": 0.0, "is_decoupled_lr": False, "lr": 1, "step": 5})
    names_and_rates = {"embedding.word_embeddings.weight": 3, "a.weight": 2, "a.bias": 1}
    tensors = {
        f"{start}{key}": torch.ones(4) if key == "a.bias" else torch.ones(4, 2)
        for key in names_and_rates
        for start in ("", "optimizer.state.exp_avg.")
    }
    source = _torch_dist(tmp_path / "c", tensors, {"optimizer": {"optimizer": {"param_groups": groups}}})
    _convert(source, tmp_path / "out", "--to", "fsdp_dtensor")
    metadata = load_metadata(tmp_path / "out")
    for name, rate in names_and_rates.items():
        start = f"optimizer.param_to_group_meta.module.module.module.{name}"
        assert load_entry(tmp_path / "out", metadata, f"{start}.lr") == rate
    assert load_entry(tmp_path / "out", metadata, f"{start}.step") == 5, "of a group, as TransformerEngine counts"


def test_no_part_is_larger_than_memory_allows(
    sources: dict[str, tuple[Path, Path, Truth]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numels = []

    def recorded(folder: Path, metadata: Any, key: str, offsets: Any, sizes: Any) -> torch.Tensor:
        value = read_box(folder, metadata, key, offsets, sizes)
        numels.append(value.numel())
        return value

    monkeypatch.setattr(streams, "read_box", recorded)
    _convert(sources["swiglu"][0], tmp_path / "out", "--to", "fsdp_dtensor", "--max-memory", "800B")
    assert max(numels) == 40, "a fifth of 800 bytes, of 4 each"


def test_the_loss_scaler_is_kept(tmp_path: Path) -> None:
    """megatron-core has it beside its optimizer's groups, the scale in a tensor; a chain has one a child, all equal."""
    scaler = {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
    child = {"optimizer": {"param_groups": [{"wd_mult": 1.0, "lr": 0.1}]}, "grad_scaler": scaler}
    tensors = {"w": torch.ones(2, 2), "optimizer.state.exp_avg.w": torch.ones(2, 2)}
    content = {"content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"}, "iteration": 3}
    for name, optimizer in (("one", child), ("chain", {0: child, 1: child})):
        folder = tmp_path / name
        _torch_dist(folder, tensors, {**content, "optimizer": optimizer})
        words = ("--no-swiglu", "--transformer-impl", "local")
        assert _convert(folder, tmp_path / f"{name}_fsdp", "--to", "fsdp_dtensor", *words) == 0
        metadata = load_metadata(tmp_path / f"{name}_fsdp")
        for key, value in {"scale": 512.0, "growth_tracker": 3, "hysteresis_tracker": 1}.items():
            found = load_entry(tmp_path / f"{name}_fsdp", metadata, f"optimizer.grad_scaler.{key}")
            assert found == value and type(found) is type(value)
    assert _convert(tmp_path / "one_fsdp", tmp_path / "back", "--to", "torch_dist") == 0
    back = torch.load(tmp_path / "back" / "common.pt", weights_only=False)["optimizer"]
    assert back["grad_scaler"] == scaler and back["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert _convert(tmp_path / "one_fsdp", tmp_path / "weights", "--to", "torch_dist", "--weights-only") == 0
    assert "optimizer" not in torch.load(tmp_path / "weights" / "common.pt", weights_only=False)


# --- what is refused --------------------------------------------------------------------------------------------------


def _torch_dist(folder: Path, tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> Path:
    save(folder, tensors)
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


@pytest.mark.parametrize(
    ("tensors", "common", "words", "error"),
    [
        (
            {"w": (2,)},
            {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}},
            (),
            "in form dp_reshardable.*--no-load-optim",
        ),
        ({"decoder.layers.mlp.linear_fc1.weight": (2, 4, 2)}, {}, (), "--swiglu or --no-swiglu"),
        ({"decoder.layers.mlp.linear_fc1.layer_norm_bias": (2, 4)}, {}, ("--swiglu",), "--transformer-impl local"),
        ({"decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 3, 4, 2)}, {}, (), "model without experts"),
        (
            {"w": (2,), "optimizer.state.exp_avg.w": (2,)},
            {"optimizer": {"param_groups": [{"lr_mult": 1.0}, {"lr_mult": 0.5}]}},
            (),
            "w: expected one parameter group that it can be in, got 2 of 2.*--weights-only",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(
    tmp_path: Path, tensors: dict[str, Any], common: dict[str, Any], words: tuple[str, ...], error: str
) -> None:
    source = _torch_dist(tmp_path / "c", {key: torch.ones(shape) for key, shape in tensors.items()}, common)
    with pytest.raises(CheckpointError, match=error):
        _convert(source, tmp_path / "out", "--to", "fsdp_dtensor", *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_wrong_formats_and_places_are_refused(sources: dict[str, tuple[Path, Path, Truth]], tmp_path: Path) -> None:
    source, converted, _ = sources["swiglu"]
    for folder, to in ((source, "torch_dist"), (converted, "fsdp_dtensor")):
        with pytest.raises(CheckpointError, match=f"expected a checkpoint in .* format for --to {to}"):
            _convert(folder, tmp_path / "out", "--to", to)
    with pytest.raises(CheckpointError, match="expected a folder that does not exist yet"):
        _convert(source, tmp_path, "--to", "fsdp_dtensor")
    with pytest.raises(CheckpointError, match="Leave them out"):
        _convert(converted, tmp_path / "out", "--to", "torch_dist", "--swiglu")
    with pytest.raises(CheckpointError, match=r"no keys that begin with model\."):
        _convert(save(tmp_path / "other", {"w": torch.ones(2)}), tmp_path / "out", "--to", "torch_dist")
    with pytest.raises(SystemExit):
        _convert(source, tmp_path / "out", "--to", "fsdp_dtensor", "--max-memory", "much")
    assert not (tmp_path / "out").exists()


def test_settings_that_differ_within_a_group_are_refused(tmp_path: Path) -> None:
    meta = {f"module.module.module.{name}": {"wd_mult": 1.0, "lr": lr} for name, lr in (("a", 0.5), ("b", 0.25))}
    state = {
        "model": {"module.a": torch.ones(2), "module.b": torch.ones(2)},
        "optimizer": {"param_to_group_meta": meta},
    }
    with pytest.raises(CheckpointError, match=r"the same for a and b.*0\.5.*0\.25"):
        _convert(save(tmp_path / "c", state), tmp_path / "out", "--to", "torch_dist")


def test_damage_leaves_nothing(sources: dict[str, tuple[Path, Path, Truth]], tmp_path: Path) -> None:
    source = save(tmp_path / "c", {"model": {"module.a": torch.ones(5000)}})
    data = (source / "__0_0.distcp").read_bytes()
    (source / "__0_0.distcp").write_bytes(b"\0" * len(data))
    with pytest.raises(CheckpointError, match=r"model\.module\.a at \(0,\) in .*__0_0\.distcp"):
        _convert(source, tmp_path / "out", "--to", "torch_dist")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_a_training_stands_for_its_latest_checkpoint(
    sources: dict[str, tuple[Path, Path, Truth]], tmp_path: Path
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    (tmp_path / "iter_0000040").symlink_to(sources["swiglu"][0])
    assert _convert(tmp_path, tmp_path / "out", "--to", "fsdp_dtensor") == 0


def test_layers_that_are_not_alike_are_not_stacked(tmp_path: Path) -> None:
    shapes = {"decoder.layers.0.mlp.linear_fc2.weight": (2, 3), "decoder.layers.1.mlp.linear_fc2.weight": (2, 5)}
    norm = "decoder.layers.1.pre_mlp_layernorm.weight"  # without a dense layer after it
    state = {"model": {f"module.{name}": torch.ones(shape) for name, shape in {**shapes, norm: (4,)}.items()}}
    _convert(save(tmp_path / "c", state), tmp_path / "out", "--to", "torch_dist")
    found = load_metadata(tmp_path / "out").state_dict_metadata
    assert {*shapes, norm} < found.keys()
    assert "decoder.layers.1.mlp.linear_fc2._extra_state/shard_0_1" in found
    content = torch.load(tmp_path / "out/common.pt", weights_only=False)["content_metadata"]
    assert content["non_homogeneous_layers"] is True
