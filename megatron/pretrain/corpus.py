# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Makes a corpus of real text, one byte a token, from this machine's Python standard library.

Nothing is shipped or downloaded. The corpus is written once per Python version as Megatron
.bin/.idx files into the user's cache and is the same for every run on that Python; another Python
version gives another corpus.
"""

import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.pretrain.indexed_files import check_indexed_files
from megatron.pretrain.tokenizer import BYTE_VOCAB_SIZE

# Tests repeat the code they test, and the codecs in encodings are tables of numbers.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
_FORMAT = 1


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the user's cache for this project.

    Args:
        environment: Usually ``os.environ``; XDG_CACHE_HOME counts, else ~/.cache.
    """
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron-fsdp-v2"


def corpus_prefix(folder: Path) -> str:
    """Return the .bin/.idx prefix of this Python version's corpus in ``folder``."""
    return str(folder / f"python-{platform.python_version()}-bytes-v{_FORMAT}")


def build_corpus(prefix: str, root: Path | None = None) -> None:
    """Write ``prefix``.bin and ``prefix``.idx, unless a sound pair is there.

    One process per node calls this. Two runs that start at once both build, and the second replaces
    the first's files with equal ones in one step.

    Args:
        prefix: From ``corpus_prefix``.
        root: Folder of Python sources; default: the standard library.

    Raises:
        FileNotFoundError: No Python source under ``root``.
        OSError: The folder of ``prefix`` cannot be written.
    """
    if _is_sound(prefix):
        return
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        workplace = tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        raise OSError(
            f"Byte corpus: expected a folder to write to, got {error} for XDG_CACHE_HOME. "
            "Point it to a folder of yours, or give --data-path."
        ) from error
    with workplace:
        draft = os.path.join(workplace.name, "draft")
        _write_corpus(draft, root)
        os.replace(f"{draft}.bin", f"{prefix}.bin")
        os.replace(f"{draft}.idx", f"{prefix}.idx")


def _write_corpus(prefix: str, root: Path) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    num_documents = 0
    for path in iterate_sources(root):
        tokens = np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint16)
        builder.add_document(np.append(tokens, np.uint16(BYTE_VOCAB_SIZE)), [len(tokens) + 1])
        num_documents += 1
    if not num_documents:
        raise FileNotFoundError(
            f"Byte corpus: expected Python sources, got none under {root} for the run without a "
            "data flag. Give --data-path or --mock-data."
        )
    builder.finalize(f"{prefix}.idx")


def iterate_sources(root: Path) -> Iterator[Path]:
    """Yield the non-empty .py files under ``root`` in order, without tests and packages."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(".py") and path.stat().st_size > 0:
                yield path


def _is_sound(prefix: str) -> bool:
    try:
        check_indexed_files(prefix, "the byte corpus")
    except (FileNotFoundError, ValueError):
        return False
    return True
