# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Cuts text and JSON Lines files into documents, as bytes and in order, in chunks that are worth sending to a worker.

Nothing is decoded here, so that reading never holds up the workers; ``encoding.py`` does that.
"""

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt",)
TEXT_DOCUMENTS = ("file", "paragraph", "line")
_CHUNK_BYTES = 1 << 20
_CHUNK_DOCUMENTS = 256


@dataclass(frozen=True)
class RawDocument:
    """A document as it lies in its file, and the line that it starts in, from 1."""

    line: int
    content: bytes


@dataclass(frozen=True)
class Chunk:
    """Neighbouring documents of one file.

    Attributes:
        path: The file.
        documents: At least one.
        position: Bytes of all files read so far, as they lie on the disk.
    """

    path: str
    documents: tuple[RawDocument, ...]
    position: int


def document_suffix(path: str) -> str:
    """Return the suffix that says what is in a file, in lower case and without .gz."""
    name = Path(path.lower())
    return (name.with_suffix("") if name.suffix == ".gz" else name).suffix


def iterate_chunks(paths: Iterable[str], text_documents: str) -> Iterator[Chunk]:
    """Yield the documents of all files in order; blank lines between documents are left out.

    Args:
        paths: JSON Lines or text files, compressed with gzip if their names end in .gz.
        text_documents: What is a document in a text file: the file, a paragraph (lines up to a blank one) or a line.

    Raises:
        ValueError: A compressed file is damaged.
        OSError: A file cannot be read.
    """
    num_bytes_before = 0
    for path in paths:
        cut = _iterate_lines if document_suffix(path) in JSON_SUFFIXES else _CUTS[text_documents]
        with open(path, "rb") as raw:
            for documents in _group(_iterate_documents(raw, path, cut)):
                yield Chunk(path, documents, num_bytes_before + raw.tell())
            num_bytes_before += raw.tell()


def _iterate_documents(
    raw: IO[bytes], path: str, cut: Callable[[Iterable[bytes]], Iterator[RawDocument]]
) -> Iterator[RawDocument]:
    if not path.lower().endswith(".gz"):
        yield from cut(_without_mark(raw))
        return
    try:
        yield from cut(_without_mark(gzip.GzipFile(fileobj=raw)))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"Text: expected whole gzip data, got damage ({error}) for {path}. "
            "Copy it again, or take .gz off its name if it is not compressed."
        ) from error


def _without_mark(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines without the mark that some editors put before UTF-8."""
    lines = iter(stream)
    first = next(lines, b"")
    return chain((first.removeprefix(codecs.BOM_UTF8),), lines)


def _iterate_lines(lines: Iterable[bytes]) -> Iterator[RawDocument]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield RawDocument(number, line.rstrip(b"\r\n"))


def _iterate_paragraphs(lines: Iterable[bytes]) -> Iterator[RawDocument]:
    paragraph: list[bytes] = []
    for number, line in enumerate(chain(lines, (b"",)), start=1):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield RawDocument(number - len(paragraph), b"".join(paragraph).rstrip(b"\r\n"))
            paragraph.clear()


def _whole_file(lines: Iterable[bytes]) -> Iterator[RawDocument]:
    yield RawDocument(1, b"".join(lines))


_CUTS = {"file": _whole_file, "paragraph": _iterate_paragraphs, "line": _iterate_lines}


def _group(documents: Iterable[RawDocument]) -> Iterator[tuple[RawDocument, ...]]:
    group: list[RawDocument] = []
    num_bytes = 0
    for document in documents:
        group.append(document)
        num_bytes += len(document.content)
        if len(group) == _CHUNK_DOCUMENTS or num_bytes >= _CHUNK_BYTES:
            yield tuple(group)
            group.clear()
            num_bytes = 0
    if group:
        yield tuple(group)
