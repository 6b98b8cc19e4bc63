# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: bytes, and one that transformers saves and loads without a network."""

import importlib.util
from pathlib import Path

import pytest

from megatron.pretrain.tokenizer import ByteLevelTokenizer, load_tokenizer

from .hugging_face import EOD, save_tokenizer

TEXT = "low lower lowest <|endoftext|> ü"


def test_bytes_are_ids_and_the_next_id_ends_documents() -> None:
    tokenizer = load_tokenizer("ByteLevelTokenizer", None)
    assert list(tokenizer.encode("aü\n")) == [97, 195, 188, 10]
    vocabulary = ByteLevelTokenizer.vocabulary
    assert (vocabulary.num_ids, vocabulary.eod, vocabulary.flag) == (257, 256, "--tokenizer-type")


def test_a_hugging_face_tokenizer_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    reference = save_tokenizer(tmp_path)
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert tokenizer.encode(TEXT) == reference(TEXT).input_ids
    assert len(tokenizer.encode("lowest")) < len("lowest"), "merges are not applied"
    vocabulary = tokenizer.vocabulary
    assert (vocabulary.num_ids, vocabulary.eod) == (len(reference), reference.convert_tokens_to_ids(EOD))


def test_ids_with_holes_end_at_the_last_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = tmp_path / "tokenizer.json"
    # 257 ids are 0 … 256, and the last letter moves to 1000.
    config.write_text(config.read_text().replace('"ÿ":', '"ÿ": 1000, "unused":'))
    assert load_tokenizer("HuggingFaceTokenizer", str(tmp_path)).vocabulary.num_ids == 1001


def test_a_document_longer_than_the_context_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tokenizer(tmp_path, model_max_length=4)
    assert len(load_tokenizer("HuggingFaceTokenizer", str(tmp_path)).encode("abcdefgh")) == 8
    assert not caplog.records


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, eos_token=None)
    message = "expected a token that ends a text, got no eos_token in .* for --tokenizer-model. Name one"
    with pytest.raises(ValueError, match=f"Tokenizer: {message}"):
        load_tokenizer("HuggingFaceTokenizer", str(tmp_path))


@pytest.mark.parametrize("content", [None, "{"])
def test_a_tokenizer_that_cannot_be_loaded_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "nowhere"
    if content is not None:
        save_tokenizer(folder)
        (folder / "tokenizer.json").write_text(content)
    message = rf"that transformers can load, got {folder} \(.+\) for --tokenizer-model\. Name the folder"
    with pytest.raises(ValueError, match=message):
        load_tokenizer("HuggingFaceTokenizer", str(folder))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    message = r"expected an installed transformers, got none for --tokenizer-type HuggingFaceTokenizer\. .* extra hf:"
    with pytest.raises(ValueError, match=f"Tokenizer: {message}"):
        load_tokenizer("HuggingFaceTokenizer", "folder")


def test_a_hugging_face_tokenizer_needs_a_name() -> None:
    with pytest.raises(ValueError, match=r"expected a folder or a name on the Hub, got none for .*\. Add"):
        load_tokenizer("HuggingFaceTokenizer", None)
