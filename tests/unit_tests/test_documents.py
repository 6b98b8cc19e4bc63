# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The examples in README and documents run as printed; links in the documents lead somewhere."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _run_block(document: Path, folder: Path) -> str:
    """Run a document's example on two ranks and return what it prints."""
    (block,) = re.findall(
        r"<!-- run by tests/unit_tests/test_documents\.py -->\n```python\n(.*?)```", document.read_text(), re.DOTALL
    )
    script = folder / "train.py"
    script.write_text(block)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, env=environment, cwd=folder
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("document", ["README.md", "docs/compile.md"])
def test_examples_shard_and_learn(document: str, tmp_path: Path) -> None:
    printed = _run_block(ROOT / document, tmp_path)
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 5 and losses[-1] < 0.6 * losses[0]
    if document == "docs/compile.md":
        assert sorted(re.findall(r"rank \d: 2 graphs for 8 layers", printed)) == [
            "rank 0: 2 graphs for 8 layers",
            "rank 1: 2 graphs for 8 layers",
        ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:tests|docs|examples|megatron)/[\w/]+\.(?:py|md|sh))", text):
        assert (ROOT / path).exists(), path
