# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import gzip
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.pretrain import encoding, preprocess
from megatron.pretrain.encoding import Encoder, Recipe
from megatron.pretrain.indexed_files import check_indexed_files
from megatron.pretrain.preprocess import REFUSED_FLAGS, build_parser, main
from megatron.pretrain.text_files import Chunk, RawDocument, iterate_chunks
from megatron.pretrain.tokenizer import ByteLevelTokenizer, Vocabulary, load_tokenizer

from .hugging_face import save_tokenizer

BYTES = ("--tokenizer-type", "ByteLevelTokenizer")
EOD = 256


def run(folder: Path, inputs: list[Path], *flags: str) -> str:
    """Preprocess into ``folder``/out and return the prefix of the outputs."""
    tokenizer = () if "--tokenizer-type" in flags else BYTES
    main(["--input", *map(str, inputs), "--output-prefix", str(folder / "out" / "a"), *tokenizer, *flags])
    return str(folder / "out" / "a")


def write_lines(path: Path, *objects: object) -> Path:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in objects), encoding="utf-8")
    return path


def read(prefix: str) -> list[list[int]]:
    """Return the documents of a pair, with those that have no tokens."""
    check_indexed_files(prefix, "the test")
    data = IndexedDataset(prefix)
    bounds = data.document_indices
    return [
        [int(token) for index in range(first, last) for token in data[index]]
        for first, last in itertools.pairwise(bounds)
    ]


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir())


def test_each_line_is_a_document_under_the_name_of_megatron_lm(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    corpus = write_lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "zwölf", "other": 3})
    run(tmp_path, [corpus], "--append-eod")
    assert left_behind(tmp_path) == ["a_text_document.bin", "a_text_document.idx"]
    prefix = str(tmp_path / "out" / "a_text_document")
    assert read(prefix) == [[*b"one", EOD], [*"zwölf".encode(), EOD]]
    assert IndexedDataset(prefix)[0].dtype == np.uint16
    written, following = capsys.readouterr().out.splitlines()
    assert written == f"Wrote {prefix}.bin and .idx (documents: 2, without text: 0, tokens: 11)."
    command = f"python pretrain_gpt.py --data-path {prefix} --tokenizer-type ByteLevelTokenizer"
    assert following == f"Next: {command} --split 1 --eval-iters 0"


def test_without_append_eod_documents_end_with_their_text(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    assert read(f"{run(tmp_path, [corpus])}_text_document") == [[*b"one"]]


def test_each_key_gets_a_pair(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "a.json", {"title": "t", "body": "one"}, {"title": "", "body": "two"})
    prefix = run(tmp_path, [corpus], "--append-eod", "--json-keys", "title", "body")
    # The second title is a document without tokens, so that the n-th documents of both belong together.
    assert read(f"{prefix}_title_document") == [[*b"t", EOD], []]
    assert read(f"{prefix}_body_document") == [[*b"one", EOD], [*b"two", EOD]]


def test_documents_without_text_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    corpus = write_lines(tmp_path / "a.jsonl", {"text": ""}, {"text": "x"}, {"text": ""})
    corpus.write_text(corpus.read_text().replace("\n", "\n\n \n"))
    assert read(f"{run(tmp_path, [corpus], '--append-eod')}_text_document") == [[], [120, EOD], []]
    assert "(documents: 3, without text: 2, tokens: 2)." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("unit", "documents"),
    [
        ("file", ["one\r\ntwo\n \n\nthree", "x"]),
        ("paragraph", ["one\r\ntwo", "three", "x"]),
        ("line", ["one", "two", "three", "x"]),
    ],
)
def test_a_text_file_is_cut_into_documents(tmp_path: Path, unit: str, documents: list[str]) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.TXT"
    first.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n \n\nthree")
    second.write_bytes(b"x")
    prefix = run(tmp_path, [first, second], "--text-documents", unit)
    assert read(f"{prefix}_text_document") == [[*text.encode()] for text in documents]


def test_compressed_files_give_the_same_pair(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", *({"text": f"{n} times"} for n in range(300)))
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    run(tmp_path / "plain", [plain])
    run(tmp_path / "packed", [packed])
    for suffix in ("bin", "idx"):
        plain_bytes, packed_bytes = (
            (tmp_path / name / "out" / f"a_text_document.{suffix}").read_bytes() for name in ("plain", "packed")
        )
        assert plain_bytes == packed_bytes


def corpus_of_chunks(folder: Path) -> list[Path]:
    """Two files of several chunks: by number of documents, and by one long document."""
    rng = np.random.RandomState(1)
    texts = ["wört " * int(rng.randint(0, 40)) + str(n) for n in range(1500)]
    texts[700] = "x" * (3 << 20)
    return [
        write_lines(folder / "a.jsonl", *({"text": text} for text in texts[:900])),
        write_lines(folder / "b.jsonl", *({"text": text} for text in texts[900:])),
    ]


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    corpus = corpus_of_chunks(tmp_path)
    assert len(list(iterate_chunks(map(str, corpus), "file"))) >= 7
    pairs = []
    for num_workers in (1, 2, 3):
        prefix = run(tmp_path / str(num_workers), corpus, "--append-eod", "--workers", str(num_workers))
        pairs.append([Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert pairs[0] == pairs[1] == pairs[2]
    documents = read(f"{prefix}_text_document")
    lines = [json.loads(line) for path in corpus for line in path.read_text().splitlines()]
    assert documents == [[*line["text"].encode(), EOD] for line in lines]


def test_a_hugging_face_tokenizer_is_loaded_by_every_worker(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "tokenizer"))
    texts = [f"low {n} lower" for n in range(600)]
    corpus = write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts), {"text": ""})
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer"))
    prefix = run(tmp_path, [corpus], *flags, "--append-eod", "--workers", "2")
    expected = [[*tokenizer.encode(text), tokenizer.vocabulary.eod] for text in texts]
    assert read(f"{prefix}_text_document") == [*expected, []]


LINE = b'{"text": "fine"}\n'
BAD = {
    "no JSON": (b"{'text': 1}", r"JSON: expected a JSON object on one line, got {'text': 1} \(Expecting .*\)"),
    "cut": (b'{"text": "a', r'expected a JSON object on one line, got {"text": "a \(Unterminated string .*\)'),
    "two": (b'{"text": "a"} {"text": "b"}', r"expected a JSON object on one line, got .* \(Extra data.*\)"),
    "array": (b'[{"text": "a"}]', r"expected a JSON object on one line, got \[{.*}\]"),
    "deep": (b"[" * 100_000, r"expected a JSON object on one line, got \[+… \(.*recursion.*\)"),
    "key": (b'{"txt": "a", "b": 1}', "expected the key 'text', got 'txt', 'b'"),
    "no key": (b"{}", "expected the key 'text', got none"),
    "number": (b'{"text": 12}', "expected a string under 'text', got 12"),
    "null": (b'{"text": null}', "expected a string under 'text', got null"),
    "list": (b'{"text": ["a"]}', r"expected a string under 'text', got \[\"a\"\]"),
    "latin": (b'{"text": "\xe9"}', "Text: expected UTF-8, got byte 0xe9"),
    "surrogate": (b'{"text": "a\\ud800"}', r"expected whole characters under 'text', got half of .* \(U\+D800\)"),
}


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 1) for name in BAD), ("cut", 2)])
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path: Path, name: str, num_workers: int) -> None:
    line, message = BAD[name]
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(LINE * 700 + line + b"\n" + LINE * 700)
    with pytest.raises(ValueError, match=rf"{message} for {corpus}, line 701\. .+\.$") as error:
        run(tmp_path, [corpus], "--workers", str(num_workers))
    assert re.fullmatch(r"\w+: expected .+, got .+ for .+\. .+\.", str(error.value))
    assert error.value.__cause__ is None
    assert left_behind(tmp_path) == []


def test_bytes_that_are_not_utf_8_are_found_in_a_text_file(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"one\ntwo\n\xff")
    with pytest.raises(ValueError, match=r"expected UTF-8, got byte 0xff for .*a\.txt, line 3\. Convert"):
        run(tmp_path, [text])


@pytest.mark.parametrize("cut", [slice(-9), slice(1, None)])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, cut: slice) -> None:
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(LINE * 100)[cut])
    with pytest.raises(
        ValueError, match=r"Text: expected whole gzip data, got damage \(.+\) for .*a\.jsonl\.gz\. Copy"
    ):
        run(tmp_path, [packed])
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("content", ["", "\n", '{"text": ""}\n'])
def test_inputs_without_a_token_are_refused(tmp_path: Path, content: str) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_text(content)
    with pytest.raises(
        ValueError, match=r"Text: expected at least one token, got [01] documents .* for 'text' in .*a\.js"
    ):
        run(tmp_path, [corpus])
    assert left_behind(tmp_path) == []


class Broken:
    """A tokenizer whose ids leave its vocabulary."""

    vocabulary = Vocabulary(9, 8, "--tokenizer-model")

    def encode(self, text: str) -> list[int]:
        return [8, int(text)]


def encode(text: bytes) -> list[int]:
    recipe = Recipe("", None, (), append_eod=False, dtype=np.uint16)
    chunk = Chunk("a.txt", (RawDocument(4, text),), 0)
    return [int(token) for token in Encoder(recipe, Broken()).encode(chunk).documents["text"].ids]


@pytest.mark.parametrize("token", [-1, 9, 2**16 + 3])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    assert encode(b"7") == [8, 7]
    message = rf"Tokenizer: expected ids up to 8, the last one, got {token} for a\.txt, line 4\. The tokenizer of --tok"
    with pytest.raises(ValueError, match=message):
        encode(str(token).encode())


def test_a_document_too_long_for_the_index_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_MAX_TOKENS", 3)
    corpus = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    run(tmp_path / "fits", [corpus])
    with pytest.raises(
        ValueError, match=r"Text: expected at most 3 tokens in a document, got 4 for .*a.jsonl, line 1\."
    ):
        run(tmp_path / "ends", [corpus], "--append-eod")


@pytest.mark.parametrize(("num_ids", "dtype"), [(65499, np.uint16), (65500, np.int32)])
def test_the_file_holds_every_id_of_the_vocabulary(
    tmp_path: Path, num_ids: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ByteLevelTokenizer()
    monkeypatch.setattr(tokenizer, "vocabulary", Vocabulary(num_ids, num_ids - 1, ""), raising=False)
    monkeypatch.setattr(preprocess, "load_tokenizer", lambda *_: tokenizer)
    prefix = run(tmp_path, [write_lines(tmp_path / "a.jsonl", {"text": "a"})], "--append-eod")
    assert read(f"{prefix}_text_document") == [[97, num_ids - 1]]
    assert IndexedDataset(f"{prefix}_text_document")[0].dtype == dtype


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_an_existing_output_is_refused_before_work_starts(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "preprocess", lambda _: pytest.fail("work started"))
    there = tmp_path / "out" / f"a_b_document.{suffix}"
    there.parent.mkdir()
    there.write_text("precious")
    corpus = write_lines(tmp_path / "a.jsonl", {"text": "a", "b": "b"})
    with pytest.raises(
        FileExistsError, match=rf"a path without a file, got {there} for --output-prefix\. Name another"
    ):
        run(tmp_path, [corpus], "--json-keys", "text", "b")
    assert there.read_text() == "precious"


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "out" / "a_text_document.idx"
    monkeypatch.setattr(preprocess, "_check_tokens", lambda *_: there.write_text("precious"))
    corpus = write_lines(tmp_path / "a.jsonl", {"text": "a"})
    with pytest.raises(FileExistsError, match=rf"got {there} for --output-prefix"):
        run(tmp_path, [corpus])
    assert left_behind(tmp_path) == ["a_text_document.idx"]
    assert there.read_text() == "precious"


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, number: int, kind: type[BaseException], num_workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[str] = []

    def interrupt(self: preprocess.Progress, _: int) -> None:
        drafts.extend(str(path) for path in (tmp_path / "out").rglob("*.bin"))
        signal.raise_signal(number)

    monkeypatch.setattr(preprocess.Progress, "count_document", interrupt)
    before = signal.getsignal(signal.SIGTERM)
    # A shell that starts the tests in the background has them ignore SIGINT.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(kind):
            run(tmp_path, corpus_of_chunks(tmp_path), "--workers", num_workers)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert len(drafts) == 1, "the signal came before the work"
    assert left_behind(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_over_the_bytes_of_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_lines(tmp_path / "a.jsonl", *({"text": str(n)} for n in range(600)))
    monkeypatch.setattr(sys, "stderr", Terminal())
    run(tmp_path, [corpus], "--log-interval", "250")
    bars = sys.stderr.getvalue().split("\r")
    counts = [int(number) for bar in bars for number in re.findall(r"(\d+) documents", bar)]
    assert sorted(set(counts)) == [250, 500, 600]
    assert re.match(r"100%\|.*\| 9\.\d+k/9\.\d+k ", bars[-1]), bars[-1]


def test_elsewhere_there_is_a_line_per_interval(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    corpus = write_lines(tmp_path / "a.jsonl", *({"text": str(n)} for n in range(7)))
    run(tmp_path, [corpus], "--log-interval", "3")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line, count in zip(lines, (3, 6), strict=True):
        assert re.fullmatch(rf"Processed {count} documents \(\d+\.\d docs/s, \d+\.\d\d MB/s\)\.", line)


@pytest.mark.parametrize(
    ("num_documents", "flags"), [(9, " --split 1 --eval-iters 0"), (10, " --split 90,10"), (1000, "")]
)
def test_the_next_command_splits_what_there_is(
    tmp_path: Path, num_documents: int, flags: str, capsys: pytest.CaptureFixture
) -> None:
    run(tmp_path, [write_lines(tmp_path / "a.jsonl", *[{"text": "a"}] * num_documents, {"text": ""})])
    assert capsys.readouterr().out.endswith(f" --tokenizer-type ByteLevelTokenizer{flags}\n")


HERE = "--output-prefix out/a --tokenizer-type ByteLevelTokenizer"
JSON, TEXT = f"--input a.jsonl {HERE}", f"--input a.txt {HERE}"
REFUSED = [
    (HERE, ValueError, "Command line: expected files, got none for --input"),
    ("--input a.txt --tokenizer-type ByteLevelTokenizer", ValueError, "expected a path, got none for --output-prefix"),
    ("--input a.txt --output-prefix out/a", ValueError, "expected a tokenizer, got none for --tokenizer-type"),
    (f"{JSON} --tokenizer-typ x", ValueError, "Unknown flag: .* Did you mean --tokenizer-type"),
    (f"{JSON} --workers 0", ValueError, "expected an integer >= 1, got '0' for --workers"),
    (f"{JSON} --log-interval 0", ValueError, "expected an integer >= 1, got '0' for --log-interval"),
    ("--tokenizer-type NullTokenizer", ValueError, "expected one of Byte.*, Hugging.*, got 'NullTokenizer' for --to"),
    (f"{JSON} --tokenizer-model m", ValueError, "Flag without effect: .* for --tokenizer-model"),
    (f"{JSON} --text-documents line", ValueError, "Flag without effect: expected --input of .txt .* for --text-docu"),
    (f"{TEXT} --json-keys a", ValueError, "Flag without effect: expected --input of .jsonl or .json .* for --json-k"),
    (f"{JSON} --json-keys a a", ValueError, "Keys: expected keys that differ .*, got a a for --json-keys"),
    (f"{JSON} --json-keys a/b", ValueError, "Keys: expected keys .* part of a file name, got a/b for --json-keys"),
    (f"--input none.txt {HERE}", FileNotFoundError, r"a regular file none\.txt, got none for --input"),
    (f"--input . {HERE}", FileNotFoundError, r"a regular file \., got a folder for --input"),
    (f"--input /dev/null {HERE}", FileNotFoundError, "a regular file /dev/null, got a pipe or a device for --input"),
    (f"--input a.csv {HERE}", ValueError, r"files of one kind, \.jsonl, \.json or \.txt .*, got a\.csv for --input"),
    (f"--input a.jsonl a.txt {HERE}", ValueError, r"files of one kind, .*, got a\.txt for --input"),
    ("--input a.txt --output-prefix a.txt/b --tokenizer-type ByteLevelTokenizer", ValueError,
     r"a folder that can be made and written, got a\.txt .* for --output-prefix"),
    ("--input a.txt --output-prefix a --tokenizer-type HuggingFaceTokenizer", ValueError, "got none for --tokenizer-m"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "kind", "message"), REFUSED)
def test_a_wrong_command_line_is_refused(
    tmp_path: Path, line: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "a.txt", "a.csv"):
        Path(name).write_bytes(LINE)
    with pytest.raises(kind, match=message):
        main(line.split())
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".idx")]


def test_an_input_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A superuser may read everywhere, so permissions alone would not do.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"Input: expected a file that can be read, got .*a\.jsonl for --input"):
        run(tmp_path, [write_lines(tmp_path / "a.jsonl", {"text": "a"})])


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_refused_flag_of_megatron_lm_says_what_to_do(flag: str) -> None:
    with pytest.raises(ValueError, match=f"got {flag} for the command line. {re.escape(REFUSED_FLAGS[flag])}"):
        main([flag])
    known = build_parser()._option_string_actions
    assert flag not in known
    named = {word.rstrip(".,:;") for word in REFUSED_FLAGS[flag].split() if word.startswith("--")}
    assert named <= set(known)


def test_the_command_line_and_the_workers_do_not_import_torch() -> None:
    script = (
        "import sys; import megatron.pretrain.preprocess, megatron.pretrain.encoding;"
        "assert not {'torch', 'megatron.core', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
