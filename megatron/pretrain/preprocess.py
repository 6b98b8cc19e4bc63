# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Turns text or JSON Lines into .bin/.idx pairs that ``pretrain_gpt.py --data-path`` reads.

    python -m megatron.pretrain.preprocess --input corpus.jsonl --output-prefix corpus \
        --tokenizer-type ByteLevelTokenizer --append-eod

writes corpus_text_document.bin and .idx, both or neither, and never over files that are there. The flags are those of
Megatron-LM's tools/preprocess_data.py; ``docs/pretrain.md`` says more.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.pretrain.arguments import FlagParser, read_flags
from megatron.pretrain.encoding import EncodedChunk, Recipe, encode_chunks
from megatron.pretrain.flags import add_tokenizer
from megatron.pretrain.outputs import check_folder
from megatron.pretrain.requirements import TOKENIZER_REQUIREMENT, Requirement, check_requirements
from megatron.pretrain.text_files import JSON_SUFFIXES, TEXT_DOCUMENTS, TEXT_SUFFIXES, document_suffix, iterate_chunks
from megatron.pretrain.tokenizer import Tokenizer, load_tokenizer
from megatron.pretrain.values import integer, one_of

_SENTENCES = "Documents are not split into sentences: drop the flag."
_PARTITIONS = "All files become one pair in the order of --input: drop the flag, and give --workers."
_SEARCH = "The number of processes is not searched for: drop the flag, and give --workers."
_MODEL = "A tokenizer is named as a whole: give --tokenizer-type and --tokenizer-model."
REFUSED_FLAGS: dict[str, str] = {
    **dict.fromkeys(("--split-sentences", "--keep-newlines", "--lang"), _SENTENCES),
    **dict.fromkeys(("--partitions", "--keep-sequential-samples"), _PARTITIONS),
    **dict.fromkeys(
        ("--find-optimal-num-workers", "--workers-to-check", "--max-documents", "--performance-dir"), _SEARCH
    ),
    **dict.fromkeys(("--vocab-file", "--merge-file", "--vocab-size"), _MODEL),
}


def _is_json(args: argparse.Namespace) -> bool:
    return document_suffix(args.input[0]) in JSON_SUFFIXES


_REQUIREMENTS = (
    TOKENIZER_REQUIREMENT,
    Requirement(("--json-keys",), f"--input of {' or '.join(JSON_SUFFIXES)} files", _is_json),
    Requirement(("--text-documents",), "--input of .txt files", lambda args: not _is_json(args)),
)


def build_parser() -> FlagParser:
    """Declare the flags."""
    parser = FlagParser("python -m megatron.pretrain.preprocess", "Turn text or JSON Lines into .bin/.idx pairs.")
    add = parser.add_argument_group("input").add_argument
    add("--input", nargs="+", help=".jsonl or .json (one object a line) or .txt files, also .gz of them")
    add("--json-keys", nargs="+", default=["text"], help="keys of the objects that hold text; one pair for each")
    add(
        "--text-documents",
        type=one_of(*TEXT_DOCUMENTS),
        default="file",
        help="what is a document in a .txt file: the file, a paragraph (lines up to a blank one) or a line",
    )
    add_tokenizer(parser, "how text becomes ids")
    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", help="path of the pairs, without _KEY_document.bin")
    add("--append-eod", action="store_true", help="end each document with the end-of-document id")
    add = parser.add_argument_group("run").add_argument
    add("--workers", type=integer(1), default=1, help="processes that encode; the files are the same for any number")
    add("--log-interval", type=integer(1), default=1000, help="documents between updates of the progress")
    return parser


def read_command(argv: Sequence[str]) -> argparse.Namespace:
    """Read and check the command line, the inputs and the outputs; quick, because megatron-core is not imported yet.

    Raises:
        ValueError: A flag or a value is wrong, or files of two kinds are given.
        FileNotFoundError: An input is missing.
        FileExistsError: An output is there.
    """
    args = read_flags(build_parser(), argv, REFUSED_FLAGS)
    for flag, value, expected in (
        ("--input", args.input, "files"),
        ("--output-prefix", args.output_prefix, "a path"),
        ("--tokenizer-type", args.tokenizer_type, "a tokenizer"),
    ):
        if not value:
            _fail(ValueError, "Command line", expected, "none", flag, "Add it; --help shows all flags")
    check_requirements(args, _REQUIREMENTS)
    for path in args.input:
        _check_input(path, args)
    for key in args.json_keys:
        if "/" in key or args.json_keys.count(key) > 1:
            expected = "keys that differ and can be part of a file name"
            _fail(ValueError, "Keys", expected, " ".join(args.json_keys), "--json-keys", "Correct them")
    for prefix in output_prefixes(args).values():
        _check_free(prefix)
    check_folder("--output-prefix", _output_folder(args))
    return args


def output_prefixes(args: argparse.Namespace) -> dict[str, str]:
    """Return the prefix of the .bin/.idx pair of each key, as Megatron-LM names it."""
    return {key: f"{args.output_prefix}_{key}_document" for key in args.json_keys}


def _output_folder(args: argparse.Namespace) -> Path:
    return Path(f"{args.output_prefix}_").parent


def _fail(kind: type[Exception], what: str, expected: str, found: str, name: str, cure: str) -> None:
    raise kind(f"{what}: expected {expected}, got {found} for {name}. {cure}.")


def _check_input(path: str, args: argparse.Namespace) -> None:
    if not os.path.isfile(path):
        found = "a folder" if os.path.isdir(path) else "a pipe or a device" if os.path.exists(path) else "none"
        _fail(
            FileNotFoundError,
            "Input",
            f"a regular file {path}",
            found,
            "--input",
            "Correct the path, or name the files",
        )
    if not os.access(path, os.R_OK):
        _fail(ValueError, "Input", "a file that can be read", path, "--input", "Change its permissions")
    kinds = JSON_SUFFIXES if _is_json(args) else TEXT_SUFFIXES
    if document_suffix(path) not in kinds:
        _fail(
            ValueError,
            "Input",
            f"files of one kind, {', '.join(JSON_SUFFIXES)} or {', '.join(TEXT_SUFFIXES)} (or .gz of them)",
            path,
            "--input",
            "Rename it by what is in it, and give other kinds to a run of their own",
        )


def _check_free(prefix: str) -> None:
    for suffix in (".bin", ".idx"):
        if os.path.lexists(prefix + suffix):
            cure = "Name another prefix, or remove the pair"
            _fail(FileExistsError, "Output", "a path without a file", prefix + suffix, "--output-prefix", cure)


class Progress:
    """Shows how far the run is: a bar on a terminal, else Megatron-LM's line every few documents.

    Args:
        total_bytes: Size of the inputs.
        log_interval: Documents between updates.
    """

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self._log_interval = log_interval
        self._num_documents = 0
        self._position = 0
        self._start = time.monotonic()
        self._has_bar = sys.stderr.isatty()
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=not self._has_bar)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Leave the bar where it is, with the last documents in it."""
        self._show_bar()
        self._bar.close()

    def count_document(self, position: int) -> None:
        """Count a document whose chunk ends at this position of the inputs, in bytes."""
        self._num_documents += 1
        self._position = position
        if self._num_documents % self._log_interval:
            return
        if self._has_bar:
            self._show_bar()
            return
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        rates = f"({self._num_documents / elapsed_s:.1f} docs/s, {position / elapsed_s / 2**20:.2f} MB/s)"
        print(f"Processed {self._num_documents} documents {rates}.", file=sys.stderr)

    def _show_bar(self) -> None:
        self._bar.set_postfix_str(f"{self._num_documents} documents", refresh=False)
        self._bar.update(self._position - self._bar.n)
        self._bar.refresh()


class PairWriter:
    """One .bin/.idx pair in the making, with megatron-core's builder.

    Args:
        prefix: Path without .bin and .idx.
        dtype: Of the ids.
    """

    def __init__(self, prefix: str, dtype: type[np.number]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._prefix = prefix
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        self.num_documents = self.num_empty = self.num_tokens = 0

    def add(self, ids: "np.ndarray[Any, Any]") -> None:
        """Append a document; one without tokens is a boundary in .idx, as in Megatron-LM."""
        self._builder.add_document(ids, [len(ids)] if len(ids) else [])
        self.num_documents += 1
        self.num_empty += not len(ids)
        self.num_tokens += len(ids)

    def finish(self) -> None:
        """Write .idx."""
        self._builder.finalize(f"{self._prefix}.idx")

    def close(self) -> None:
        """Let go of .bin, whether or not it is finished."""
        self._builder.data_file.close()


def preprocess(args: argparse.Namespace) -> dict[str, PairWriter]:
    """Write the pairs: under temporary names first, and under their own names once all of them are complete.

    Args:
        args: From ``read_command``.

    Returns:
        What was written, for each key.

    Raises:
        ValueError: A document is wrong, or none has a token.
        FileExistsError: Another run has written the outputs meanwhile.
        RuntimeError: A worker has ended by itself.
    """
    from megatron.core.datasets.indexed_dataset import DType

    tokenizer = load_tokenizer(args.tokenizer_type, args.tokenizer_model)
    recipe = Recipe(
        args.tokenizer_type,
        args.tokenizer_model,
        tuple(args.json_keys) if _is_json(args) else (),
        args.append_eod,
        DType.optimal_dtype(tokenizer.vocabulary.num_ids),
    )
    prefixes = output_prefixes(args)
    with tempfile.TemporaryDirectory(dir=_output_folder(args), prefix=".preprocess-") as folder, ExitStack() as stack:
        drafts = {key: os.path.join(folder, str(number)) for number, key in enumerate(prefixes)}
        writers = {key: PairWriter(draft, recipe.dtype) for key, draft in drafts.items()}
        for writer in writers.values():
            stack.callback(writer.close)
        _write(args, _encode(args, recipe, tokenizer, stack), writers)
        for key, writer in writers.items():
            _check_tokens(writer, key, args)
            writer.finish()
        _publish(drafts, prefixes)
    return writers


def _encode(args: argparse.Namespace, recipe: Recipe, tokenizer: Tokenizer, stack: ExitStack) -> Iterator[EncodedChunk]:
    chunks = iterate_chunks(args.input, args.text_documents)
    encoded = encode_chunks(chunks, recipe, tokenizer, args.workers)
    # Ends the workers before anything else is cleaned up.
    stack.callback(encoded.close)
    return encoded


def _write(args: argparse.Namespace, encoded: Iterator[EncodedChunk], writers: dict[str, PairWriter]) -> None:
    total_bytes = sum(os.path.getsize(path) for path in args.input)
    with Progress(total_bytes, args.log_interval) as progress:
        for chunk in encoded:
            for key, writer in writers.items():
                documents = chunk.documents[key]
                start = 0
                for length in documents.lengths:
                    writer.add(documents.ids[start : start + length])
                    start += length
            for _ in documents.lengths:
                progress.count_document(chunk.position)


def _check_tokens(writer: PairWriter, key: str, args: argparse.Namespace) -> None:
    if not writer.num_tokens:
        found = f"{writer.num_documents} documents without text"
        where = f"{key!r} in {' '.join(args.input)}"
        _fail(ValueError, "Text", "at least one token", found, where, "Nothing was written: correct --input")


def _publish(drafts: dict[str, str], prefixes: dict[str, str]) -> None:
    """Rename: .idx last, because a pair without it cannot be mistaken for a whole one."""
    for prefix in prefixes.values():
        _check_free(prefix)
    for suffix in (".bin", ".idx"):
        for key, prefix in prefixes.items():
            os.rename(drafts[key] + suffix, prefix + suffix)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM clean up as Ctrl-C does, instead of leaving workers and drafts behind."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main(argv: Sequence[str]) -> None:
    """Preprocess as the command line says, and print what was written and how to train on it."""
    args = read_command(argv)
    # Not above: workers import this file and do without torch.
    from megatron.pretrain.main import ignore_expected_warnings

    ignore_expected_warnings()
    with _terminated_as_interrupted():
        writers = preprocess(args)
    tokenizer = ["--tokenizer-type", args.tokenizer_type]
    if args.tokenizer_model:
        tokenizer += ["--tokenizer-model", args.tokenizer_model]
    for key, prefix in output_prefixes(args).items():
        writer = writers[key]
        words = ["python", "pretrain_gpt.py", "--data-path", prefix, *tokenizer, *_split_flags(writer)]
        counts = f"documents: {writer.num_documents}, without text: {writer.num_empty}, tokens: {writer.num_tokens}"
        print(f"Wrote {prefix}.bin and .idx ({counts}).")
        print(f"Next: {shlex.join(words)}")


def _split_flags(writer: PairWriter) -> list[str]:
    """Return what training needs where the default split, in thousandths, would leave a part without documents."""
    num_sequences = writer.num_documents - writer.num_empty
    if num_sequences >= 1000:
        return []
    return ["--split", "90,10"] if num_sequences >= 10 else ["--split", "1", "--eval-iters", "0"]


if __name__ == "__main__":
    main(sys.argv[1:])
