# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Text on the disk becomes a pair, and the command that preprocessing prints trains on it."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit_tests.pretrain.hugging_face import save_tokenizer

from .launch_script import REPOSITORY, launch_forked

SMALL = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--num-workers", "0", "--micro-batch-size", "2", "--train-iters", "3", "--log-interval", "1"),
    "--use-megatron-fsdp-v2",
)


def preprocess(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron.pretrain.preprocess", *flags],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(("tokenizer_type", "count"), [("ByteLevelTokenizer", "2"), ("HuggingFaceTokenizer", "1")])
def test_training_reads_what_preprocessing_wrote(tmp_path: Path, tokenizer_type: str, count: str) -> None:
    """With as many workers as ranks."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps({'text': f'lower {n} and lowest {n * n}'})}\n" for n in range(600)))
    tokenizer = ["--tokenizer-type", tokenizer_type]
    if tokenizer_type == "HuggingFaceTokenizer":
        save_tokenizer(tmp_path / "tokenizer")
        tokenizer += ["--tokenizer-model", str(tmp_path / "tokenizer")]
    prefix = str(tmp_path / "data" / "corpus")
    made = preprocess("--input", str(corpus), "--output-prefix", prefix, *tokenizer, "--append-eod", "--workers", count)
    assert made.returncode == 0, made.stderr
    written, following = made.stdout.splitlines()
    assert written.startswith(f"Wrote {prefix}_text_document.bin and .idx (documents: 600, without text: 0, tokens: ")
    launcher, script, *flags = shlex.split(following.removeprefix("Next: "))
    assert (launcher, script) == ("python", "pretrain_gpt.py")
    trained = launch_forked((*flags, *SMALL), int(count))
    assert trained.returncode == 0, trained.stderr
    # The model knows nothing yet: the logarithm of 257 or 259 ids padded to 384.
    assert trained.series("lm_loss")[0] == pytest.approx(math.log(384), abs=0.1)
    assert len(trained.series("lm_loss")) == 3
    assert len(trained.series("validation_loss")) == 1


def test_the_documented_commands_print_what_is_documented(tmp_path: Path) -> None:
    section = (REPOSITORY / "docs" / "pretrain.md").read_text().split("## Preprocessing\n")[1]
    commands, printed = (textwrap.dedent(block) for block in re.findall(r"(?:^    .+\n)+", section, re.MULTILINE)[:2])
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    made = subprocess.run(
        ["sh", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.stdout == printed, made.stderr
