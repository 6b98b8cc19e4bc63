# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Turns text into token ids: its bytes, or what a Hugging Face tokenizer makes of it.

Preprocessing encodes with it; training only asks for the vocabulary. It does not know where text comes from.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

BYTE_VOCAB_SIZE = 256
TOKENIZER_TYPES = ("ByteLevelTokenizer", "HuggingFaceTokenizer")


@dataclass(frozen=True)
class Vocabulary:
    """The ids that data may hold.

    Attributes:
        num_ids: Ids are in [0, num_ids), the end of a document among them.
        eod: The id that ends a document.
        flag: What it comes from, for messages.
    """

    num_ids: int
    eod: int
    flag: str


class Tokenizer(Protocol):
    """What preprocessing asks of a tokenizer."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The ids that ``encode`` returns, and the one that ends a document."""

    def encode(self, text: str) -> npt.ArrayLike:
        """Return the ids of a text without its end, [number of tokens], integers."""


def vocabulary_without_tokenizer(vocab_size: int) -> Vocabulary:
    """Return the ids 0 … vocab_size, the last of which ends documents, as for Megatron-LM's NullTokenizer."""
    return Vocabulary(vocab_size + 1, vocab_size, "--vocab-size")


class ByteLevelTokenizer:
    """One id per byte of UTF-8; 256 ends a document, as in the byte corpus."""

    vocabulary = Vocabulary(BYTE_VOCAB_SIZE + 1, BYTE_VOCAB_SIZE, "--tokenizer-type")

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), dtype=np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer that transformers loads; special tokens that it puts around a text are kept, as in Megatron-LM.

    Args:
        model: A folder with its files, or its name on the Hub.

    Raises:
        ValueError: transformers is missing, cannot load it, or it has no token that ends a text.
    """

    def __init__(self, model: str) -> None:
        self._tokenizer = _load(model)
        eod = self._tokenizer.eos_token_id
        if eod is None:
            raise ValueError(
                f"Tokenizer: expected a token that ends a text, got no eos_token in {model} for --tokenizer-model. "
                "Name one in tokenizer_config.json."
            )
        # Ids may have holes: then the number of tokens is not where they end.
        num_ids = max(self._tokenizer.get_vocab().values()) + 1
        self.vocabulary = Vocabulary(num_ids, eod, "--tokenizer-model")

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        # verbose=False: a document may be longer than the model's context, since samples are cut later.
        ids: list[int] = self._tokenizer(text, verbose=False).input_ids
        return ids


def load_tokenizer(tokenizer_type: str, model: str | None) -> Tokenizer:
    """Return the tokenizer that --tokenizer-type and --tokenizer-model name.

    Raises:
        ValueError: --tokenizer-model is missing or cannot be loaded.
    """
    if tokenizer_type == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if model is None:
        raise ValueError(
            "Tokenizer: expected a folder or a name on the Hub, got none for --tokenizer-model. "
            "Add it: HuggingFaceTokenizer needs one."
        )
    return HuggingFaceTokenizer(model)


def _load(model: str) -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "Tokenizer: expected an installed transformers, got none for --tokenizer-type HuggingFaceTokenizer. "
            "Install the extra hf: pip install '.[hf]'."
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # The formats behind it raise almost anything.
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        raise ValueError(
            f"Tokenizer: expected a folder or a name on the Hub that transformers can load, got {model} ({reason}) for "
            "--tokenizer-model. Name the folder that holds tokenizer.json and tokenizer_config.json."
        ) from error
