# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt list`` and ``show``, its errors, and the texts they print."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.inspector import opened
from megatron.inspector.command import main
from megatron.inspector.text import bytes_text, parse_bytes, safe, table
from megatron.inspector.values import is_same, lines, short_text
from tests.unit_tests.checkpoint.files import Evil, save, save_chunks

WEIGHT = torch.tensor([[3.0, -4.0], [math.nan, math.inf], [0.5, 0.0]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {
        "model": {"w": WEIGHT, "b": torch.arange(5, dtype=torch.int32)},
        "args": argparse.Namespace(lr=0.1, name="a\x1b[31mb"),
        "iteration": 7,
    }
    return save(tmp_path / "iter_0000007", state)


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_list_prints_every_key_and_totals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "list", folder)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["key", "shape", "dtype", "size", "chunks"]
    assert rows[1] == ["model.b", "(5,)", "int32", "20", "B", "1"]
    assert rows[2] == ["model.w", "(3,", "2)", "float32", "24", "B", "1"]
    assert [row[:2] for row in rows[3:5]] == [["args", "bytes"], ["iteration", "bytes"]]
    assert out.splitlines()[-1].startswith("2 tensors: 11 elements, 44 B; 2 byte entries: ")


def test_list_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(capsys, "list", folder, "--json")
    content = json.loads(out)
    assert content["tensors"]["model.w"] == {"shape": [3, 2], "dtype": "float32", "bytes": 24, "chunks": 1}
    assert set(content["byte_entries"]) == {"args", "iteration"} and content["totals"]["elements"] == 11


def test_a_training_folder_stands_for_its_latest_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert json.loads(_run(capsys, "list", folder.parent, "--json")[1])["folder"] == str(folder)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("")
    code, _, err = _run(capsys, "list", folder.parent)
    assert code == 2 and "latest_checkpointed_iteration.txt: expected" in err


@pytest.mark.parametrize("max_memory", ["1GiB", "64B"])
def test_show_a_tensor(folder: Path, capsys: pytest.CaptureFixture[str], max_memory: str) -> None:
    _, out, _ = _run(capsys, "show", folder, "model.w", "--first", 3, "--max-memory", max_memory)
    printed = out.splitlines()
    assert printed[0] == "model.w: (3, 2) float32, 24 B"
    assert printed[2].startswith("(0, 0)    (3, 2)  __0_0.distcp at ")
    assert printed[3] == f"L2 norm {math.sqrt(9 + 16 + 0.25):.9g}, min / max -4 / 3, not finite 2"
    assert printed[4] == "first values: 3, -4, nan"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.arange(4), "min / max 0 / 3"),
        (torch.tensor([True, False]), "min / max 0 / 1"),
        (torch.empty(0, 2), "min / max none"),
        (torch.tensor(2.0).to(torch.float8_e4m3fn), "min / max 2 / 2"),
        (torch.tensor([3 + 4j]), "L2 norm 5, min / max none"),
    ],
)
def test_show_tensors_of_any_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: torch.Tensor, expected: str
) -> None:
    code, out, _ = _run(capsys, "show", save(tmp_path / "c", {"w": value}), "w")
    assert code == 0 and expected in out


def test_show_several_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_chunks(tmp_path / "c", "w", torch.ones(4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))])
    _, out, _ = _run(capsys, "show", tmp_path / "c", "w")
    assert "(3, 0)    (1, 2)  __0_0.distcp at" in out and "L2 norm 2.82842712" in out


def test_show_a_byte_entry_is_safe_for_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(capsys, "show", folder, "args")
    assert out.startswith("args: argparse.Namespace, byte entry of ") and "  lr: 0.1\n" in out
    assert "\x1b" not in out and "\\x1b[31m" in out
    assert _run(capsys, "show", folder, "iteration")[1].endswith("  7\n")


def test_what_cannot_be_shown_is_an_error(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, "show", folder, "model.none")
    assert code == 2 and "mfsdp-ckpt: model.none: expected a key of the checkpoint" in err
    code, _, err = _run(capsys, "list", tmp_path / "nothing")
    assert code == 2 and "expected the folder of a checkpoint, got no folder" in err
    code, _, err = _run(capsys, "list", tmp_path)
    assert code == 2 and ".metadata: expected a checkpoint's metadata, got no such file" in err
    save(tmp_path / "evil", {"x": {"y": Evil(tmp_path / "witness")}})
    code, _, err = _run(capsys, "show", tmp_path / "evil", "x.y")
    assert code == 2 and "names posix.system" in err and not (tmp_path / "witness").exists()


def test_a_chunk_that_cannot_be_streamed_has_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strided = save(tmp_path / "c", {"w": torch.ones(40, 30).t()})
    code, _, err = _run(capsys, "show", strided, "w", "--max-memory", "8KiB")
    assert code == 2 and "w: expected a chunk that can be read in parts or fits --max-memory 8192, got 9600" in err
    assert _run(capsys, "show", strided, "w", "--max-memory", "10KiB")[0] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["show", "a", "k", "--max-memory", "much"],
            "size: expected a number of bytes such as 256MiB or 5GB, got 'much'",
        ),
        (["show", "a", "k", "--first", "-1"], "expected a number of values, got '-1'"),
        (["diff", "a", "b", "--rtol", "-1"], "expected a number of at least 0, got '-1'"),
        (["diff", "a"], "the following arguments are required"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_words_exit_with_two(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_as_a_process_into_a_reader_that_leaves(folder: Path) -> None:
    command = f"{sys.executable} -m megatron.inspector list {folder} | head -1"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout.split()[0] == "key" and "Traceback" not in result.stderr and "Warning" not in result.stderr


def test_the_console_command_is_main() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'mfsdp-ckpt = "{main.__module__}:{main.__name__}"' in text


def test_sizes_are_read_and_written() -> None:
    assert [parse_bytes(text) for text in ("7", "1k", "256MiB", "1.5 GB")] == [7, 1000, 256 << 20, 1_500_000_000]
    for wrong in ("", "0", "-1", "5XB", "0.2"):
        with pytest.raises(ValueError, match="size: expected a number of bytes"):
            parse_bytes(wrong)
    assert [bytes_text(count) for count in (5, 1536, 5 << 40)] == ["5 B", "1.50 KiB", "5.00 TiB"]


def test_texts() -> None:
    assert safe("a.ä") == "a.ä" and safe("a\nb\x1b") == "a\\nb\\x1b"
    assert table(("a", "num"), [("xyz", "1")], right=(1,)) == "a    num\nxyz    1"
    assert len(short_text("x" * 1000)) == 60 and short_text([1, 2]) == "[1, 2]"
    assert lines({"a": 1, "b": 2, "c": 3}, 2) == ["a: 1", "b: 2", "… and 1 more"]


def test_values_are_compared_part_by_part() -> None:
    nan = float("nan")
    namespace = argparse.Namespace(a=[1, (nan, torch.ones(2))])
    same = argparse.Namespace(a=[1, (nan, torch.ones(2))])
    assert is_same(namespace, same, equal_nan=True) and not is_same(namespace, same, equal_nan=False)
    assert not is_same(1, 1.0, equal_nan=True) and not is_same({"a": 1}, {"b": 1}, equal_nan=True)
    assert not is_same(torch.ones(2), torch.ones(2).double(), equal_nan=True)


def test_slabs_of_a_command_fit_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", {"w": torch.zeros(64, 8)})
    monkeypatch.setattr(opened, "_MAX_SLAB_BYTES", 100)
    assert {box.sizes for box in opened.Checkpoint(tmp_path / "c").slab_boxes("w")} == {(3, 8), (1, 8)}
    assert {box.sizes for box in opened.Checkpoint(tmp_path / "c", 64).slab_boxes("w")} == {(1, 2)}
