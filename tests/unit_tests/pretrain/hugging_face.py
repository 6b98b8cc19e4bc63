# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny tokenizer in the format of Hugging Face, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOD = "<|endoftext|>"


def save_tokenizer(
    folder: Path, eos_token: str | None = EOD, model_max_length: int = 1 << 20
) -> PreTrainedTokenizerFast:
    """Save a BPE over bytes with merges for "low", and return it."""
    # Not above: they take seconds, and most tests of a file do without.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [EOD, *letters, "lo", "low"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [("l", "o"), ("lo", "w")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOD])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, model_max_length=model_max_length)
    fast.save_pretrained(folder)
    return fast
