# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt export``: safetensors that its own library reads, and Llamas that compute megatron-core's logits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from safetensors.torch import load_file

from megatron.inspector.command import main
from megatron.pretrain.attention import SdpaCoreAttention
from tests.unit_tests import mcore
from tests.unit_tests.checkpoint.files import save, save_chunks
from tests.unit_tests.launch import run_ranks

VOCABULARY = 32
SEQUENCE = 7
ARGUMENTS = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 6,
    "rotary_base": 500,
    "norm_epsilon": 1e-3,
    "max_position_embeddings": 64,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "vocab_size": 30,
    "padded_vocab_size": VOCABULARY,
}


def _export(source: Path, output: Path, *words: str) -> int:
    return main(["export", str(source), "--output", str(output), *words])


def _read(output: Path) -> dict[str, torch.Tensor]:
    """Read all tensors as users do: by the index."""
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = {file: load_file(output / file) for file in sorted(set(index["weight_map"].values()))}
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(map(len, files.values())) == len(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


@pytest.mark.parametrize("words", [[], ["--max-shard-size", "70B"], ["--max-memory", "64B"]])
def test_tensors_of_the_model_by_their_own_names(tmp_path: Path, words: list[str]) -> None:
    model = {
        "w": torch.randn(5, 3),
        "half": torch.randn(4).bfloat16(),
        "small": torch.randn(4).to(torch.float8_e4m3fn),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }
    state = {"model": {"module": {**model, "_extra_state": 1}}, "optimizer": {"state": {"w": torch.ones(5, 3)}}}
    source = save(tmp_path / "c", state)
    assert _export(source, tmp_path / "out", *words) == 0
    read = _read(tmp_path / "out")
    assert read.keys() == model.keys()
    for name, tensor in model.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name].float(), tensor.float())
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == (2 if "--max-shard-size" in words else 1)
    assert not (tmp_path / "out/config.json").exists()


def test_dtype_is_of_floating_point_tensors_only(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    save_chunks(tmp_path / "c", "model.w", whole, [((0, 0), (2, 4)), ((2, 0), (4, 4))])
    assert _export(tmp_path / "c", tmp_path / "out", "--dtype", "bf16") == 0
    assert torch.equal(_read(tmp_path / "out")["w"], whole.bfloat16())
    source = save(tmp_path / "d", {"w": torch.ones(2).half(), "count": torch.tensor([3])})
    assert _export(source, tmp_path / "other", "--dtype", "fp32") == 0
    read = _read(tmp_path / "other")
    assert read["w"].dtype == torch.float32 and read["count"].dtype == torch.int64


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "c", {"w": torch.ones(40), "z": torch.ones(2, dtype=torch.complex128)})
    assert _export(source, tmp_path / "out") == 2
    assert "z: expected a dtype that safetensors has, got torch.complex128" in capsys.readouterr().err
    source = save(tmp_path / "t", {"w": torch.ones(40), "z": torch.ones(2)})
    file = source / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])
    assert _export(source, tmp_path / "out") == 2 and "truncated" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "t"]
    (tmp_path / "out").mkdir()
    assert _export(source, tmp_path / "out") == 2
    assert "out: expected a folder that does not exist yet" in capsys.readouterr().err
    assert _export(save(tmp_path / "d", {"x": 1}), tmp_path / "o") == 2
    assert "expected tensors of a model, got none" in capsys.readouterr().err
    twice = save(tmp_path / "e", {"model.module.w": torch.ones(1), "model.w": torch.ones(1)})
    assert _export(twice, tmp_path / "o") == 2
    assert "got keys that differ only in prefixes" in capsys.readouterr().err
    assert _export(source, tmp_path / "o", "--kv-channels", "2") == 2
    assert "kv_channels: expected only with --format hf" in capsys.readouterr().err


def _train_and_save(folder: Path, kind: str) -> torch.Tensor:
    """Build a GPT with weights that are all different, save it, and return its logits; on a rank of its own."""
    mcore.start()
    biased = kind == "halves"
    with mcore.cpu_shim():
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        torch.manual_seed(5)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
        config = mcore.model_config(
            num_layers=3,
            hidden_size=24,
            ffn_hidden_size=20,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=6,
            normalization="RMSNorm",
            layernorm_epsilon=1e-3,
            gated_linear_unit=True,
            add_bias_linear=biased,
            activation_func=torch.nn.functional.silu,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            position_embedding_type="rope",
            rotary_base=500,
            share_embeddings_and_output_weights=biased,
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            positions = torch.arange(SEQUENCE).expand(2, -1)
            logits: torch.Tensor = model(_tokens(), positions, None)
    save(folder, _saved(model.state_dict(), kind))
    return logits


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))


def _saved(weights: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a state by the keys of a kind of checkpoint."""
    weights = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    if kind == "stacked":  # torch_dist: layers in one tensor, TransformerEngine's names for norms, no arguments
        names = {name.split(".", 3)[3] for name in weights if name.startswith("decoder.layers.")}
        state = {name: value for name, value in weights.items() if not name.startswith("decoder.layers.")}
        renamed = {
            "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
            "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
        }
        for name in names:
            layers = [weights[f"decoder.layers.{layer}.{name}"] for layer in range(3)]
            state[f"decoder.layers.{renamed.get(name, name)}"] = torch.stack(layers)
        return state
    state = {f"model.module.{name}": value for name, value in weights.items()}
    if kind == "halves":
        for name in [name for name in state if "linear_fc1" in name]:
            gate, up = state.pop(name).chunk(2)
            state |= {f"{name}_w": gate.clone(), f"{name}_v": up.clone()}
    return {**state, "args": argparse.Namespace(**ARGUMENTS), "optimizer.state.w.exp_avg": torch.ones(1)}


FLAGS = (
    "--num-attention-heads 4 --num-query-groups 2 --kv-channels 6 --rotary-base 500 --norm-epsilon 1e-3 "
    "--max-position-embeddings 64"
).split()


@pytest.mark.parametrize("kind", ["fused", "halves", "stacked"])
def test_a_llama_computes_the_logits_of_the_gpt(tmp_path: Path, kind: str) -> None:
    # Not above: it takes seconds.
    from transformers import AutoModelForCausalLM

    (expected,) = run_ranks(1, _train_and_save, tmp_path / "c", kind)
    words = [*(FLAGS if kind == "stacked" else []), "--max-shard-size", "10kB", "--max-memory", "2KiB"]
    assert _export(tmp_path / "c", tmp_path / "out", "--format", "hf", *words) == 0
    llama, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        logits = llama.eval()(_tokens()).logits
    assert (llama.config.tie_word_embeddings, llama.config.mlp_bias) == (kind == "halves", kind == "halves")
    # fp32, other kernels for attention and norms.
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def _llama_state(**changes: torch.Tensor | None) -> dict[str, Any]:
    """Return a state of one layer, hidden size 8, with changes: None takes a tensor away."""
    layer = "decoder.layers.0"
    state: dict[str, torch.Tensor | None] = {
        "embedding.word_embeddings.weight": torch.ones(VOCABULARY, 8),
        f"{layer}.input_layernorm.weight": torch.ones(8),
        f"{layer}.self_attention.linear_qkv.weight": torch.arange(48.0 * 8).reshape(48, 8),
        f"{layer}.self_attention.linear_proj.weight": torch.ones(8, 24),
        f"{layer}.pre_mlp_layernorm.weight": torch.ones(8),
        f"{layer}.mlp.linear_fc1.weight": torch.ones(20, 8),
        f"{layer}.mlp.linear_fc2.weight": torch.ones(8, 10),
        "decoder.final_layernorm.weight": torch.ones(8),
        **changes,
    }
    return {f"model.{name}": value for name, value in state.items() if value is not None}


def _namespace(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**ARGUMENTS, **changes})


def test_rows_of_queries_keys_and_values(tmp_path: Path) -> None:
    state = {**_llama_state(), "args": _namespace()}
    assert _export(save(tmp_path / "c", state), tmp_path / "out", "--format", "hf", "--vocab-size", "30") == 0
    read = _read(tmp_path / "out")
    layer = "model.layers.0.self_attn"
    # 4 heads of 6 in 2 groups: 12 rows of queries, 6 of a key, 6 of a value, and again.
    rows = {name: (read[f"{layer}.{name}_proj.weight"][:, 0] / 8).tolist() for name in "qkv"}
    assert rows["q"] == [*range(12), *range(24, 36)]
    assert rows["k"] == [*range(12, 18), *range(36, 42)] and rows["v"] == [*range(18, 24), *range(42, 48)]
    assert read["model.embed_tokens.weight"].shape == (30, 8)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["vocab_size"] == 30 and config["dtype"] == "float32" and config["num_key_value_heads"] == 2


def test_attention_without_groups_has_one_for_each_head(tmp_path: Path) -> None:
    state = _llama_state(**{"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(72, 8)})
    state["args"] = _namespace(group_query_attention=False, num_query_groups=1)
    assert _export(save(tmp_path / "c", state), tmp_path / "out", "--format", "hf") == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("changes", "arguments", "texts"),
    [
        (
            {"embedding.position_embeddings.weight": torch.ones(4, 8)},
            {},
            ["embedding.position_embeddings.weight (4, 8)"],
        ),
        (
            {"decoder.layers.0.mlp.router.weight": torch.ones(2), "decoder.final_layernorm.bias": torch.ones(8)},
            {},
            ["decoder.layers.0.mlp.router.weight (2,)", "decoder.final_layernorm.bias (8,)"],
        ),
        ({}, {"kv_channels": 5}, ["decoder.layers.0.self_attention.linear_qkv.weight (48, 8)"]),
        (
            {"decoder.layers.0.mlp.linear_fc2.weight": None, "decoder.final_layernorm.weight": None},
            {},
            ["got none for model.layers.0.mlp.down_proj.weight, model.norm.weight"],
        ),
        (
            {"decoder.layers.0.self_attention.linear_qkv.bias": torch.ones(48)},
            {},
            ["got none for model.layers.0.self_attn.o_proj.bias"],
        ),
        (
            {},
            {"swiglu": False, "normalization": "LayerNorm", "rotary_percent": 0.5},
            ["got swiglu=False, normalization='LayerNorm', rotary_percent=0.5"],
        ),
        ({}, {"kv_channels": None, "norm_epsilon": None}, ["got none of kv_channels, norm_epsilon", "--norm-epsilon"]),
    ],
)
def test_models_that_are_no_llama_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, torch.Tensor | None],
    arguments: dict[str, Any],
    texts: list[str],
) -> None:
    state = {**_llama_state(**changes), "args": _namespace(**arguments)}
    assert _export(save(tmp_path / "c", state), tmp_path / "out", "--format", "hf") == 2
    error = capsys.readouterr().err
    assert all(text in error for text in texts), error
    assert not (tmp_path / "out").exists()
