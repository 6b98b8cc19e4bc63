# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Workers that encode; what they make of documents is tested in test_preprocess.py."""

import multiprocessing

import numpy as np
import pytest

from megatron.pretrain.encoding import Recipe, encode_chunks
from megatron.pretrain.text_files import Chunk, RawDocument
from megatron.pretrain.tokenizer import ByteLevelTokenizer


def test_a_worker_that_ends_is_named() -> None:
    chunks = (Chunk("a.txt", (RawDocument(1, b"text"),), position) for position in range(50))
    recipe = Recipe("ByteLevelTokenizer", None, (), append_eod=False, dtype=np.uint16)
    others = set(multiprocessing.active_children())
    encoded = encode_chunks(chunks, recipe, ByteLevelTokenizer(), 2)
    assert next(encoded).documents["text"].lengths == (4,)
    for worker in set(multiprocessing.active_children()) - others:
        worker.kill()
        worker.join()
    message = "Workers: expected 2 processes until the end of the text, got one that ended before for --workers. See"
    with pytest.raises(RuntimeError, match=message):
        list(encoded)
