# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt diff``: what differs, by how much, and where; which keys are pairs; the exit code."""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.experimental.checkpoint.boxes import slabs
from megatron.inspector import elements
from megatron.inspector.command import main
from megatron.inspector.elements import Differences, Tolerance
from megatron.inspector.names import canonical, other_half
from tests.unit_tests.checkpoint.files import Evil, save, save_chunks


def _diff(capsys: pytest.CaptureFixture[str], one: Path, other: Path, *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["diff", str(one), str(other), "--json", *words])
    return code, {row["name"]: row for row in json.loads(capsys.readouterr().out)["keys"]}


def test_same_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"w": torch.randn(5, 3), "e": torch.empty(0, 2), "s": torch.tensor(1)}, "x": (1, "a")}
    one, other = save(tmp_path / "a", state), save(tmp_path / "b", state)
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out == "4 keys: 4 same, 0 differs, 0 only in A, 0 only in B, 0 error\n"
    assert main(["diff", str(one), str(other), "--all"]) == 0
    assert capsys.readouterr().out.count("same") == 5


@pytest.mark.parametrize("max_memory", ["1GiB", "160B"])
def test_one_element_is_found_across_layouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_memory: str
) -> None:
    whole = torch.randn(6, 4)
    save_chunks(tmp_path / "a", "w", whole, [((0, 0), (6, 4))])
    changed = whole.clone()
    changed[4, 2], changed[5, 0] = whole[4, 2] + 0.5, whole[5, 0] * 3
    save_chunks(tmp_path / "b", "w", changed, [((0, 0), (2, 4)), ((2, 0), (1, 3)), ((2, 3), (1, 1)), ((3, 0), (3, 4))])
    code, rows = _diff(capsys, tmp_path / "a", tmp_path / "b", "--max-memory", max_memory)
    found = rows["w"]["found"]
    assert code == 1 and rows["w"]["status"] == "differs"
    assert found["num_differing"] == 2 and found["first"] == [4, 2]
    distance = (whole.double() - changed.double()).abs()
    assert found["max_abs"] == pytest.approx(float(distance.max()), rel=1e-12)
    assert found["max_rel"] == pytest.approx(float((distance / changed.double().abs()).max()), rel=1e-12)


def test_keys_shapes_kinds_and_entries_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"w": torch.ones(2), "a": 1, "k": torch.ones(1), "n": argparse.Namespace(lr=1, x=2), "v": "one", "r": 1}
    other = {"w": torch.ones(3), "b": 1, "k": "text", "n": argparse.Namespace(lr=1, x=3, y=4), "v": "two", "r": 1}
    code, rows = _diff(capsys, save(tmp_path / "a", one), save(tmp_path / "b", other))
    assert code == 1
    assert {name: row["status"] for name, row in rows.items()} == {
        "a": "only in A",
        "b": "only in B",
        "k": "differs",
        "n": "differs",
        "r": "same",
        "v": "differs",
        "w": "differs",
    }
    assert rows["w"]["note"] == "shape (2,) and (3,)" and rows["v"]["note"] == "'one' and 'two'"
    assert rows["n"]["note"] == "in x, y" and rows["k"]["note"] == "a tensor in one, a byte entry in the other"


def test_nan_zero_and_tolerances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = save(
        tmp_path / "a", {"nan": torch.tensor([1.0, math.nan]), "zero": torch.tensor([0.0]), "w": torch.tensor([2.0])}
    )
    other = save(
        tmp_path / "b", {"nan": torch.tensor([1.0, math.nan]), "zero": torch.tensor([-0.0]), "w": torch.tensor([2.1])}
    )

    def differing(*words: str) -> set[str]:
        _, rows = _diff(capsys, one, other, *words)
        return {name for name, row in rows.items() if row["status"] == "differs"}

    assert differing() == {"nan", "zero", "w"}  # bit for bit, +0 is not -0
    assert differing("--equal-nan") == {"zero", "w"}
    assert differing("--equal-nan", "--atol", "0.2") == set()
    assert differing("--equal-nan", "--rtol", "0.04") == {"w"}
    assert differing("--equal-nan", "--rtol", "0.05") == set()


def test_another_dtype_differs_unless_values_are_tolerated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.tensor([1.0, 2.0])
    one, other = save(tmp_path / "a", {"w": values}), save(tmp_path / "b", {"w": values.bfloat16()})
    code, rows = _diff(capsys, one, other)
    assert code == 1 and rows["w"]["found"]["num_differing"] == 0 and rows["w"]["note"] == "dtype float32 and bfloat16"
    assert _diff(capsys, one, other, "--atol", "1e-6")[0] == 0


def test_prefixes_and_swiglu_halves_are_matched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fused = {f"decoder.layers.{layer}.mlp.linear_fc1.weight": torch.randn(8, 3) for layer in (2, 10)}
    plain = {**fused, **{f"optimizer.state.{key}.exp_avg": torch.randn(8, 3) for key in fused}, "w": torch.ones(2)}
    v1 = {"model.module.w": torch.ones(2)}
    for key, value in plain.items():
        if "fc1" not in key:
            continue
        moment = key.endswith(".exp_avg")
        name = key.removeprefix("optimizer.state.").removesuffix(".exp_avg")
        start = "optimizer.state.module.module.module." if moment else "model.module."
        for letter, half in zip("wv", value.chunk(2), strict=True):
            v1[f"{start}{name}_{letter}{'.exp_avg' if moment else ''}"] = half.clone()
    one, other = save(tmp_path / "a", plain), save(tmp_path / "b", v1)
    for words in ([], ["--max-memory", "200B"]):
        for pair in ((one, other), (other, one)):
            code, rows = _diff(capsys, *pair, *words)
            assert code == 0 and len(rows) == 5, rows
    v1["model.module.decoder.layers.2.mlp.linear_fc1.weight_v"][1, 2] += 1
    code, rows = _diff(capsys, one, save(tmp_path / "c", v1))
    assert rows["decoder.layers.2.mlp.linear_fc1.weight"]["found"]["first"] == [5, 2] and code == 1
    # Both in halves: nothing to join.
    assert _diff(capsys, other, other)[0] == 0


def test_keys_that_differ_only_in_prefixes_stay_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model.w": torch.ones(2), "module.w": torch.zeros(2)}
    one, other = save(tmp_path / "a", state), save(tmp_path / "b", state)
    code, rows = _diff(capsys, one, other)
    assert code == 0 and set(rows) == {"model.w", "module.w"}


def test_names_by_the_examples() -> None:
    assert canonical("optimizer.state.module.module.decoder.w.exp_avg") == "optimizer.state.decoder.w.exp_avg"
    assert canonical("model.module.w") == "w" and canonical("model_w") == "model_w" and canonical("model.") == "model."
    gate = "decoder.layers.0.mlp.linear_fc1.weight"
    assert other_half(f"{gate}_w.exp_avg") == (f"{gate}.exp_avg", f"{gate}_v.exp_avg")
    assert other_half(gate) is None and other_half("linear_fc2.weight_w") is None


def test_damage_and_refused_entries_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"w": torch.ones(4), "x": 1, "bad": {"y": Evil(tmp_path / "witness")}}
    one, other = save(tmp_path / "a", state), save(tmp_path / "b", state)
    file = other / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    assert main(["diff", str(one), str(other)]) == 2
    printed = capsys.readouterr()
    assert "error: w at (0,) in " in printed.err and "the file is truncated" in printed.err
    assert "error: bad.y in " in printed.err and "1 same, 0 differs, 0 only in A, 0 only in B, 2 error" in printed.out
    assert not (tmp_path / "witness").exists()
    assert main(["diff", str(one), str(tmp_path / "none")]) == 2


def test_elements_against_a_plain_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_BLOCK_NUMEL", 5)
    draw = random.Random(0)
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1.0 + 1e-6]
    for _ in range(100):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
        one = torch.tensor([draw.choice(special) for _ in range(math.prod(shape))]).reshape(shape)
        other = torch.where(torch.rand(shape) < 0.6, one, torch.tensor(draw.choice(special)))
        tolerance = Tolerance(draw.choice([0.0, 1e-5]), draw.choice([0.0, 1e-5]), draw.choice([True, False]))
        found = Differences()
        for box in slabs(shape, draw.randint(1, 9)):
            index = tuple(slice(begin, begin + size) for begin, size in zip(*box, strict=True))
            found.add(box, one[index], other[index], tolerance)
        if tolerance.is_exact:
            close = (one == other) & (torch.signbit(one) == torch.signbit(other))
            close |= tolerance.equal_nan & one.isnan() & other.isnan()
        else:
            close = torch.isclose(
                one.double(), other.double(), tolerance.rtol, tolerance.atol, equal_nan=tolerance.equal_nan
            )
        assert found.num_differing == int((~close).sum())
        positions = (~close).nonzero().tolist()
        assert found.first == (tuple(positions[0]) if positions else None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e5m2, torch.complex64, torch.bfloat16])
def test_elements_of_every_dtype(dtype: torch.dtype) -> None:
    one = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    other = torch.tensor([0.0, 1.0, 0.0]).to(dtype)
    for second, count in ((one.clone(), 0), (other, 1)):
        found = Differences()
        (box,) = slabs((3,), 3)
        found.add(box, one, second, Tolerance())
        assert found.num_differing == count and found.max_abs == count
