# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Turns chunks of raw documents into token ids, in this process or in workers, and says what is wrong with a document.

The ids are the same for any number of workers, in the order of the chunks. Workers import neither torch nor
megatron-core for themselves; where the results go is the caller's business.
"""

import json
import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.pretrain.text_files import Chunk, RawDocument
from megatron.pretrain.tokenizer import Tokenizer, load_tokenizer

# What the lengths in .idx can hold.
_MAX_TOKENS = 2**31 - 1
_CHUNKS_PER_WORKER = 4


@dataclass(frozen=True)
class Recipe:
    """How documents become ids; what a worker needs to know.

    Attributes:
        tokenizer_type: As for ``load_tokenizer``.
        tokenizer_model: Likewise.
        json_keys: The strings to take out of each JSON object; none where documents are plain text.
        append_eod: Whether the end-of-document id follows each document that has tokens.
        dtype: Of the ids in the files; it holds every id of the vocabulary.
    """

    tokenizer_type: str
    tokenizer_model: str | None
    json_keys: tuple[str, ...]
    append_eod: bool
    dtype: type[np.number]


@dataclass(frozen=True)
class Documents:
    """Encoded documents of one key: ids one after another, [sum of lengths], and the length of each document."""

    ids: npt.NDArray[np.number]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of a chunk, for each key; plain text has one key, "text"."""

    documents: dict[str, Documents]
    position: int


class Encoder:
    """Encodes chunks.

    Args:
        recipe: How.
        tokenizer: The one that the recipe names.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Encode all documents of a chunk.

        Raises:
            ValueError: A document is not UTF-8, not a JSON object with strings under the keys, or too long; or the
                tokenizer returned an id that is not in its vocabulary.
        """
        keys = self._recipe.json_keys or ("text",)
        ids: dict[str, list[npt.NDArray[np.number]]] = {key: [] for key in keys}
        for document in chunk.documents:
            text = _decode(document, chunk.path)
            place = f"{chunk.path}, line {document.line}"
            texts = _read_strings(text, keys, place) if self._recipe.json_keys else (text,)
            for key, value in zip(keys, texts, strict=True):
                ids[key].append(self._encode_text(value, place))
        documents = {
            key: Documents(np.concatenate(parts), tuple(len(part) for part in parts)) for key, parts in ids.items()
        }
        return EncodedChunk(documents, chunk.position)

    def _encode_text(self, text: str, place: str) -> npt.NDArray[np.number]:
        """Return the ids of a document; no text gives none, not even the tokens that a tokenizer puts around texts."""
        vocabulary = self._tokenizer.vocabulary
        ids = np.asarray(self._tokenizer.encode(text) if text else [], dtype=np.int64)
        outside = ids[(ids < 0) | (ids >= vocabulary.num_ids)]
        if len(outside):
            _fail(
                "Tokenizer",
                f"ids up to {vocabulary.num_ids - 1}, the last one",
                str(outside[0]),
                place,
                f"The tokenizer of {vocabulary.flag} does not fit its own vocabulary: repair or replace it",
            )
        if len(ids) and self._recipe.append_eod:
            ids = np.append(ids, vocabulary.eod)
        if len(ids) > _MAX_TOKENS:
            _fail("Text", f"at most {_MAX_TOKENS} tokens in a document", str(len(ids)), place, "Split the document")
        return ids.astype(self._recipe.dtype)


def _fail(what: str, expected: str, found: str, place: str, cure: str) -> None:
    raise ValueError(f"{what}: expected {expected}, got {found} for {place}. {cure}.")


def _decode(document: RawDocument, path: str) -> str:
    try:
        return document.content.decode()
    except UnicodeDecodeError as error:
        line = document.line + document.content.count(b"\n", 0, error.start)
        raise ValueError(
            f"Text: expected UTF-8, got byte 0x{document.content[error.start]:02x} for {path}, line {line}. "
            "Convert the file to UTF-8, for example with iconv, or remove the line."
        ) from None


def _read_strings(text: str, keys: Sequence[str], place: str) -> list[str]:
    one_object = "a JSON object on one line"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        _fail("JSON", one_object, f"{_shorten(text)} ({error})", place, "Correct or remove the line")
    if not isinstance(found, dict):
        _fail("JSON", one_object, _shorten(text), place, "Write one object per line, without an array around them")
    for key in keys:
        if key not in found:
            names = ", ".join(map(repr, found)) or "none"
            _fail("JSON", f"the key {key!r}", names, place, "Add it to the line, or name another with --json-keys")
        if not isinstance(found[key], str):
            value = _shorten(json.dumps(found[key]))
            _fail("JSON", f"a string under {key!r}", value, place, "Make it a string, or remove the line")
        _check_characters(found[key], key, place)
    return [found[key] for key in keys]


def _check_characters(text: str, key: str, place: str) -> None:
    """Refuse half of a surrogate pair, which JSON can escape and no text in UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair (U+{ord(text[error.start]):04X})"
        _fail("JSON", f"whole characters under {key!r}", half, place, "Write the whole pair, or remove the line")


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


def encode_chunks(
    chunks: Iterable[Chunk], recipe: Recipe, tokenizer: Tokenizer, num_workers: int
) -> Generator[EncodedChunk, None, None]:
    """Yield the encoded chunks in order.

    Args:
        chunks: Read as they are needed: a few per worker are in memory at a time.
        recipe: How to encode them.
        tokenizer: The one that the recipe names; a worker loads its own.
        num_workers: 1 encodes in this process.

    Raises:
        ValueError: As `Encoder.encode`.
        RuntimeError: A worker has ended by itself.
    """
    if num_workers == 1:
        yield from map(Encoder(recipe, tokenizer).encode, chunks)
        return
    # Not forked: this process may have threads by now.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(recipe,))
    pending: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            pending.append(executor.submit(_encode_in_worker, chunk))
            if len(pending) >= _CHUNKS_PER_WORKER * num_workers:
                yield _wait_for(pending.popleft())
        while pending:
            yield _wait_for(pending.popleft())
    except BrokenProcessPool:
        raise RuntimeError(
            f"Workers: expected {num_workers} processes until the end of the text, got one that ended before for "
            "--workers. See what it printed; if the host was short of memory, give fewer workers."
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _wait_for(future: Future[EncodedChunk]) -> EncodedChunk:
    try:
        return future.result()
    except ValueError as error:
        # The worker's stack would stand above a message that says it all.
        raise error.with_traceback(None) from None


_worker_encoder: Encoder | None = None


def _start_worker(recipe: Recipe) -> None:
    global _worker_encoder
    # Ctrl-C reaches every process of a terminal; the main process ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker_encoder = Encoder(recipe, load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_model))


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    assert _worker_encoder is not None, "_start_worker runs first"
    return _worker_encoder.encode(chunk)
