# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import sysconfig
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.pretrain.corpus import build_corpus, cache_folder, corpus_prefix, iterate_sources


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name, text in {
        "b.py": "b = 'ü'\n",
        "a.py": "a = 1\n",
        "empty.py": "",
        "data.txt": "no",
        "pkg/c.py": "c\n",
        "pkg/tests/d.py": "d\n",
        "site-packages/e.py": "e\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_each_file_is_a_document_of_its_bytes_and_an_end(sources: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "cache" / "corpus")
    build_corpus(prefix, sources)
    documents = [list(document) for document in IndexedDataset(prefix)]
    texts = ["a = 1\n", "b = 'ü'\n", "c\n"]
    assert documents == [[*text.encode(), 256] for text in texts]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["corpus.bin", "corpus.idx"]


def test_a_sound_corpus_is_kept_and_a_damaged_one_replaced(sources: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "corpus")
    build_corpus(prefix, sources)
    index = Path(f"{prefix}.idx")
    sound, stamp = index.read_bytes(), index.stat().st_mtime_ns
    build_corpus(prefix, sources)
    assert index.stat().st_mtime_ns == stamp
    index.write_bytes(sound[:-3])
    build_corpus(prefix, sources)
    assert index.read_bytes() == sound


def test_no_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match=r"expected Python sources, got none under .*nothing"):
        build_corpus(str(tmp_path / "cache" / "corpus"), tmp_path / "nothing")
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_is_an_error(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"expected a folder to write to, got .* for XDG_CACHE_HOME"):
        build_corpus(str(tmp_path / "file" / "corpus"), sources)


def test_the_standard_library_gives_several_megabytes() -> None:
    paths = list(iterate_sources(Path(sysconfig.get_paths()["stdlib"])))
    assert sum(path.stat().st_size for path in paths) > 3_000_000
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in paths)


def test_the_cache_follows_the_environment_and_the_python_version(tmp_path: Path) -> None:
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert folder == tmp_path / "megatron-fsdp-v2"
    assert cache_folder({}) == Path.home() / ".cache" / "megatron-fsdp-v2"
    assert corpus_prefix(folder).startswith(str(folder / "python-3."))
