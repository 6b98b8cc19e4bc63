# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The examples in README and documents run as printed; links in the documents lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional_tests.forked import run_forked
from tests.functional_tests.launch_script import free_port

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _write_block(document: str, folder: Path, index: int = 0, number: int = 1) -> Path:
    """Write one of a document's examples, of which there are so many, to a file."""
    blocks = re.findall(
        r"<!-- run by tests/unit_tests/test_documents\.py -->\n```python\n(.*?)```",
        (ROOT / document).read_text(),
        re.DOTALL,
    )
    assert len(blocks) == number
    script = folder / "train.py"
    script.write_text(blocks[index])
    return script


def _assert_learns(printed: str) -> None:
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 5 and losses[-1] < 0.6 * losses[0]


def test_the_first_example_shards_and_learns(tmp_path: Path) -> None:
    """As a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), str(_write_block("README.md", tmp_path))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    _assert_learns(result.stdout)


def test_the_compiled_example_shards_and_learns(tmp_path: Path) -> None:
    script = str(_write_block("docs/compile.md", tmp_path))
    ranks = run_forked((), 2, free_port(), tmp_path, timeout_s=120, script=script)
    for rank, (code, printed, errors) in enumerate(ranks):
        assert code == 0, errors
        assert f"rank {rank}: 2 graphs for 8 layers" in printed
    _assert_learns(ranks[0][1])


@pytest.mark.parametrize("index", [0, 1], ids=["muon", "normalised rows"])
def test_the_examples_of_matrix_optimizers_shard_and_learn(index: int, tmp_path: Path) -> None:
    script = str(_write_block("docs/muon.md", tmp_path, index, 2))
    ranks = run_forked((), 2, free_port(), tmp_path, timeout_s=120, script=script)
    assert [code for code, _, _ in ranks] == [0, 0], ranks[0][2]
    _assert_learns(ranks[0][1])
    assert ("Muon" in ranks[0][1]) == (index == 0) and not ranks[1][1], "the first rank reports"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:tests|docs|examples|megatron)/[\w/]+\.(?:py|md|sh))", text):
        assert (ROOT / path).exists(), path
