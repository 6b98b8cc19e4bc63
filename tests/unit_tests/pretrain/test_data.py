# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.pretrain.arguments import parse_arguments
from megatron.pretrain.data import check_data, check_token_ids, microbatch_indices, prepare_corpus
from megatron.pretrain.indexed_files import check_indexed_files
from megatron.pretrain.launcher import Place
from megatron.pretrain.tokenizer import vocabulary_without_tokenizer
from megatron.pretrain.validation import validate

NUM_SEQUENCES = 20


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """20 sequences of 3, 4, 5, 3, 4, 5, … tokens of 2 bytes: 79 tokens, 158 bytes."""
    path = str(tmp_path / "text")
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for index in range(NUM_SEQUENCES):
        length = 3 + index % 3
        builder.add_document(np.arange(length, dtype=np.uint16), [length])
    builder.finalize(f"{path}.idx")
    return path


def test_a_sound_pair_is_accepted(prefix: str) -> None:
    files = check_indexed_files(prefix, "--data-path")
    assert files.sequence_lengths.tolist() == [3 + index % 3 for index in range(NUM_SEQUENCES)]


def test_a_multimodal_index_is_accepted(prefix: str) -> None:
    with open(f"{prefix}.idx", "ab") as stream:
        stream.write(bytes(NUM_SEQUENCES))
    assert len(check_indexed_files(prefix, "--data-path").sequence_lengths) == NUM_SEQUENCES


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_refused(prefix: str, suffix: str) -> None:
    Path(prefix + suffix).unlink()
    message = f"expected a file {prefix}{suffix}, got none for --data-path. Give the path without"
    with pytest.raises(FileNotFoundError, match=message):
        check_indexed_files(prefix, "--data-path")


# Offsets in .idx: magic 0, version 9, dtype 17, sequences 18, boundaries 26, lengths 34,
# byte offsets 34 + 20 * 4 = 114, boundaries 114 + 20 * 8 = 274.
@pytest.mark.parametrize(
    ("offset", "patch", "message"),
    [
        (0, b"X", r"expected an index that starts with b'MMIDIDX\\x00\\x00', got b'XMIDIDX.*'"),
        (9, struct.pack("<Q", 2), "expected version 1, got version 2"),
        (17, b"\x07", "expected an integer dtype code .* got code 7"),
        (18, struct.pack("<Q", 0), "expected at least one sequence, got none"),
        (18, struct.pack("<Q", 21), "expected 454 bytes for 21 sequences, got 442 bytes"),
        (26, struct.pack("<Q", 2**40), r"expected \d+ bytes for 20 sequences, got 442 bytes"),
        (34, struct.pack("<i", -1), "expected lengths >= 0, got length -1"),
        (17, b"\x04", "expected 316 bytes for the sequences in .idx, got 158 bytes"),
        (34 + 19 * 4, struct.pack("<i", 5), "expected 160 bytes .* got 158 bytes"),
        (34 + 19 * 4, struct.pack("<i", 2), "expected 154 bytes .* got 158 bytes"),
        (34, struct.pack("<ii", 4, 3), "expected byte offset 8 of sequence 1, got 6"),
        (114, struct.pack("<q", -2), "expected byte offset 0 of sequence 0, got -2"),
        (114 + 8, struct.pack("<q", 8), "expected byte offset 6 of sequence 1, got 8"),
        (
            114 + 19 * 8,
            struct.pack("<q", 2**63 - 1),
            "expected byte offset 150 of sequence 19, got 9223372036854775807",
        ),
        (274, struct.pack("<q", 9), "expected 0 as the first document boundary, got 9"),
        (274, struct.pack("<q", -1), "expected 0 as the first document boundary, got -1"),
        (274 + 8, struct.pack("<q", 9), "expected document boundaries that never fall, got 2 after 9"),
        (274 + 16, struct.pack("<q", -3), "expected document boundaries that never fall, got -3 after 1"),
        (
            274 + 16,
            struct.pack("<q", -(2**63)),
            "expected document boundaries that never fall, got -9223372036854775808",
        ),
        (274 + 20 * 8, struct.pack("<q", 7), "expected 20 as the last document boundary, got 7"),
    ],
)
def test_a_damaged_index_is_refused(prefix: str, offset: int, patch: bytes, message: str) -> None:
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    content[offset : offset + len(patch)] = patch
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"Data: {message} .* for --data-path. The file is damaged"):
        check_indexed_files(prefix, "--data-path")


def test_an_index_without_boundaries_is_refused(prefix: str) -> None:
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes()[:274])
    content[26:34] = struct.pack("<Q", 0)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected 0 as the first document boundary, got none"):
        check_indexed_files(prefix, "--data-path")


def test_the_documented_example_of_an_index(tmp_path: Path) -> None:
    path = str(tmp_path / "example")
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    builder.add_document(np.arange(3, dtype=np.uint16), [3])
    builder.add_document(np.arange(9, dtype=np.uint16), [4, 5])
    builder.finalize(f"{path}.idx")
    assert check_indexed_files(path, "--data-path").sequence_lengths.tolist() == [3, 4, 5]
    index = Path(f"{path}.idx").read_bytes()
    assert struct.unpack("<6q", index[34 + 3 * 4 :]) == (0, 6, 14, 0, 1, 3)
    assert Path(f"{path}.bin").stat().st_size == 24


@pytest.mark.parametrize("name", ["tokens", "labels"])
@pytest.mark.parametrize(
    ("token", "message"),
    [
        (-1, r"expected token ids >= 0, got -1 for --vocab-size\. The data"),
        (6, r"expected token ids up to 5 \(the last one\), got 6 for --vocab-size\. Give"),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused(name: str, token: int, message: str) -> None:
    batch = {"tokens": torch.tensor([[0, 3]]), "labels": torch.tensor([[3, 5]])}
    vocabulary = vocabulary_without_tokenizer(5)
    check_token_ids(batch, vocabulary)
    batch[name][0, 1] = token
    with pytest.raises(ValueError, match=f"Data: {message}"):
        check_token_ids(batch, vocabulary)


@pytest.mark.parametrize(("size", "found"), [(0, "b''"), (20, "20 bytes"), (441, "441 bytes")])
def test_a_cut_index_is_refused(prefix: str, size: int, found: str) -> None:
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"Data: expected .* got {found} in .*text\.idx for"):
        check_indexed_files(prefix, "--data-path")


def test_a_cut_data_file_is_refused(prefix: str) -> None:
    path = Path(f"{prefix}.bin")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"expected 158 bytes .* got 157 bytes in .*\.bin"):
        check_indexed_files(prefix, "--data-path")


def check(*words: str) -> None:
    args = parse_arguments([*words, "--vocab-size", "5", "--eval-iters", "0"])
    validate(args, 1)
    check_data(args)


def test_the_flag_that_named_the_file_is_in_the_message(prefix: str) -> None:
    check("--train-data-path", prefix, "--valid-data-path", "0.3", prefix, "0.7", prefix)
    with pytest.raises(FileNotFoundError, match="for --test-data-path"):
        check("--train-data-path", prefix, "--test-data-path", "nowhere")


def test_a_half_weighted_blend_is_refused(prefix: str) -> None:
    check("--data-path", "0.3", prefix, "0.7", prefix, "--split", "1")
    with pytest.raises(ValueError, match="Blend: expected a weight before every prefix or before none"):
        check("--data-path", "0.3", prefix, prefix, prefix)


@pytest.mark.parametrize("weights", [("0", "0"), ("-1", "2"), ("nan", "1")])
def test_weights_that_are_none_are_refused(prefix: str, weights: tuple[str, str]) -> None:
    words = (f"--data-path={weights[0]}", prefix, weights[1], prefix)
    if weights[0] == "-1":
        words = ("--data-path", "1", prefix, "-1", prefix)
    with pytest.raises(ValueError, match=r"(Blend: expected weights >= 0|Command line: expected)"):
        check(*words)


def test_an_empty_split_is_refused(prefix: str) -> None:
    # 969,30,1 of 20 sequences: training 0 … 18, validation 19, test none.
    with pytest.raises(ValueError, match="expected tokens for test, got none of the 20 sequences"):
        check("--data-path", prefix, "--split", "969,30,1")
    check("--data-path", prefix, "--split", "969,31,0")


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_a_global_batch_holds_the_same_samples_on_any_number_of_ranks(dp_size: int) -> None:
    parts = [list(microbatch_indices(48, 2, rank, dp_size)) for rank in range(dp_size)]
    for batch in range(2):
        per_rank = 24 // (2 * dp_size)
        chosen = [part[batch * per_rank : (batch + 1) * per_rank] for part in parts]
        samples = sorted(index for rows in chosen for row in rows for index in row)
        assert samples == list(range(batch * 24, batch * 24 + 24))


def test_the_documented_example_of_the_sampler() -> None:
    assert list(microbatch_indices(8, 2, 0, 2)) == [[0, 1], [4, 5]]
    assert list(microbatch_indices(8, 2, 1, 2)) == [[2, 3], [6, 7]]
    assert list(microbatch_indices(11, 2, 1, 2)) == [[2, 3], [6, 7]]


@pytest.mark.parametrize(("num_files", "split"), [(500, "97,3,0"), (501, "969,30,1")])
def test_a_small_standard_library_has_no_test_set(
    num_files: int, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(prefix: str) -> None:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for _ in range(num_files):
            builder.add_document(np.arange(3, dtype=np.uint16), [3])
        builder.finalize(f"{prefix}.idx")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("megatron.pretrain.data.build_corpus", build)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    args = parse_arguments([])
    validate(args, 1)
    prepare_corpus(args, Place(0, 1, 0, is_launched=False, local_world_size=1))
    assert args.split == split
    given = parse_arguments(["--split", "969,30,1"])
    validate(given, 1)
    if num_files == 500:
        with pytest.raises(ValueError, match="expected tokens for test, got none of the 500 sequences"):
            prepare_corpus(given, Place(0, 1, 0, is_launched=False, local_world_size=1))
