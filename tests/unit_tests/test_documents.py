# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as printed; links in the documents lead somewhere."""

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


def test_readme_example_shards_and_learns(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"<!-- run by tests/unit_tests/test_documents\.py -->\n```python\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(block)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert len(losses) == 5 and losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:tests|docs|examples|megatron)/[\w/]+\.(?:py|md|sh))", text):
        assert (ROOT / path).exists(), path
