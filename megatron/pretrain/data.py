# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Turns the data flags into iterators over this rank's microbatches, with megatron-core's datasets.

Sequences, blends, splits and shuffling are megatron-core's; the samples of a global batch go to the
ranks as in Megatron-LM, so that the same global batch holds the same samples on any number of
ranks. Files are checked before any collective; tokenising is somebody else's job.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list

from megatron.core import parallel_state
from megatron.pretrain.corpus import build_corpus, cache_folder, corpus_prefix
from megatron.pretrain.indexed_files import check_indexed_files
from megatron.pretrain.launcher import Place
from megatron.pretrain.tokenizer import Vocabulary

Batch = dict[str, torch.Tensor]
SPLITS = ("train", "valid", "test")
_BYTE_CORPUS = "the run without a data flag"
_MOST_FILES_WITHOUT_TEST_SET, _SPLIT_WITHOUT_TEST_SET = 500, "97,3,0"
"""Of so few files, which some systems' Python has, the default split 969,30,1 gives the test set none."""


@dataclass(frozen=True)
class DataIterators:
    """This rank's microbatches per split; None where there is no data or no evaluation."""

    train: Iterator[Batch]
    valid: Iterator[Batch] | None
    test: Iterator[Batch] | None


class TokenIds:
    """What the datasets ask of a tokenizer: the number of ids and which of them ends documents."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.num_ids
        self.eod = vocabulary.eod
        # megatron-core's own, -1, would replace a damaged token by 0 and leave it out of the loss.
        self.pad = -(2**63)
        self.unique_identifiers = {"class": type(self).__name__, "vocab_size": self.vocab_size, "eod": self.eod}


def check_data(args: argparse.Namespace) -> None:
    """Check every file that the flags name; called on every rank before the process groups exist.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, a weight is no weight, or a split would hold no token.
    """
    for flag, words in _named_data(args).items():
        blend = _read_blend(flag, words)
        split = args.split if flag == "--data-path" else "1"
        for prefix in blend[0]:
            _check_split_sizes(check_indexed_files(prefix, flag).sequence_lengths, split, prefix, flag)


def prepare_corpus(args: argparse.Namespace, place: Place) -> None:
    """Build the byte corpus where no data was named: one rank per node builds, the others wait.

    Called on every rank once the process groups exist.
    """
    if not args.is_byte_corpus:
        return
    folder = cache_folder(os.environ)
    prefix = corpus_prefix(folder)
    if place.local_rank == 0:
        build_corpus(prefix)
    torch.distributed.barrier()
    lengths = check_indexed_files(prefix, _BYTE_CORPUS).sequence_lengths
    if "--split" not in args.given and len(lengths) <= _MOST_FILES_WITHOUT_TEST_SET:
        args.split = _SPLIT_WITHOUT_TEST_SET
    _check_split_sizes(lengths, args.split, prefix, "--split")
    args.data_path = [prefix]
    if args.data_cache_path is None:
        args.data_cache_path = str(folder / "indices")


def build_iterators(args: argparse.Namespace, iteration: int = 0) -> DataIterators:
    """Build the datasets and this rank's iterators; called on every rank after ``prepare_corpus``.

    Args:
        args: Validated arguments.
        iteration: How many iterations have been trained, whose samples are skipped.

    Raises:
        ValueError: The data holds fewer samples than the run needs.
    """
    num_evaluations = args.train_iters // args.eval_interval + 1
    needed = [
        args.train_iters * args.global_batch_size,
        num_evaluations * args.eval_iters * args.global_batch_size,
        args.eval_iters * args.global_batch_size,
    ]
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        needed,
        lambda: True,
        _dataset_config(args),
    ).build()
    used = [
        iteration * args.global_batch_size,
        iteration // args.eval_interval * args.eval_iters * args.global_batch_size,
        0,
    ]
    iterators: list[Iterator[Batch] | None] = []
    for name, dataset, num_samples, num_used in zip(SPLITS, datasets, needed, used, strict=True):
        if dataset is None or num_samples == 0:
            iterators.append(None)
            continue
        if len(dataset) < num_samples:
            raise ValueError(
                f"Data: expected at least {num_samples} samples of {args.seq_length} tokens for "
                f"{name}, got "
                f"{len(dataset)} for --data-path. Give weights to the prefixes so that they "
                "repeat, or shorten the run."
            )
        iterators.append(_iterate(dataset, num_used, num_samples, args))
    train, valid, test = iterators
    assert train is not None, "validation refuses a run without training data"
    return DataIterators(train, valid, test)


def _named_data(args: argparse.Namespace) -> dict[str, list[str]]:
    named = {
        "--data-path": args.data_path,
        "--train-data-path": args.train_data_path,
        "--valid-data-path": args.valid_data_path,
        "--test-data-path": args.test_data_path,
    }
    return {flag: words for flag, words in named.items() if words}


def _read_blend(flag: str, words: list[str]) -> tuple[list[str], list[float] | None]:
    """Read prefixes, or weights and prefixes in turn."""
    are_numbers = [_is_number(word) for word in words[::2]]
    if len(words) % 2 == 0 and any(are_numbers) and not all(are_numbers):
        raise ValueError(
            f"Blend: expected a weight before every prefix or before none, got {' '.join(words)} "
            f"for {flag}. "
            "Write: weight prefix weight prefix ..."
        )
    prefixes, weights = get_blend_from_list(words)
    if weights is not None and not (min(weights) >= 0 and 0 < sum(weights) < float("inf")):
        raise ValueError(
            f"Blend: expected weights >= 0 with a sum above 0, got {weights} for {flag}. Correct the weights."
        )
    return prefixes, weights


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_split_sizes(lengths: "np.ndarray[Any, Any]", split: str, prefix: str, flag: str) -> None:
    """Refuse a split with a weight but no token, whose epochs megatron-core would count for ever.

    With lengths of 20 sequences and the split 969,30,1, training gets sequences 0 … 18, validation
    19, test none.
    """
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, bounds in zip(SPLITS, matrix, strict=True):
        if bounds is None:
            continue
        first, last = (round(bound * len(lengths)) for bound in bounds)
        if lengths[first:last].sum() == 0:
            raise ValueError(
                f"Split: expected tokens for {name}, got none of the {len(lengths)} sequences in "
                f"{prefix} with "
                f"--split {split} for {flag}. Give {name} the weight 0 or a larger one."
            )


def _dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    named = {flag: _read_blend(flag, words) for flag, words in _named_data(args).items()}
    per_split = [named.get(f"--{name}-data-path") for name in SPLITS]
    is_per_split = any(per_split)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=named.get("--data-path"),
        blend_per_split=per_split if is_per_split else None,
        split=None if is_per_split else args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=TokenIds(args.vocabulary),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,
    )


def _iterate(dataset: Any, num_used: int, num_samples: int, args: argparse.Namespace) -> Iterator[Batch]:
    """Yield this rank's microbatches on its device; loader processes start with the first one.

    Raises:
        ValueError: A token id is not in the vocabulary.
    """
    rank = parallel_state.get_data_parallel_rank()
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=list(
            microbatch_indices(
                num_samples,
                args.micro_batch_size,
                rank,
                parallel_state.get_data_parallel_world_size(),
                num_used,
            )
        ),
        num_workers=args.num_workers,
        pin_memory=torch.cuda.is_available(),
        # The default generator draws the dropout masks: loading must not advance it.
        generator=torch.Generator().manual_seed(args.seed),
    )
    for batch in loader:
        check_token_ids(batch, args.vocabulary)
        device = torch.cuda.current_device()
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def check_token_ids(batch: Batch, vocabulary: Vocabulary) -> None:
    """Check that every token id is in the vocabulary; called on each microbatch before it leaves the CPU.

    Raises:
        ValueError: One is negative or above the last id.
    """
    extremes = [tensor.aminmax() for tensor in (batch["tokens"], batch["labels"])]
    smallest, largest = min(int(e.min) for e in extremes), max(int(e.max) for e in extremes)
    if smallest < 0:
        raise ValueError(
            f"Data: expected token ids >= 0, got {smallest} for {vocabulary.flag}. "
            "The data is damaged or holds no token ids: build it again."
        )
    if largest >= vocabulary.num_ids:
        raise ValueError(
            f"Data: expected token ids up to {vocabulary.num_ids - 1} (the last one), got {largest} for "
            f"{vocabulary.flag}. Give the tokenizer that made the data, or its vocabulary size."
        )


def microbatch_indices(
    num_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int, num_used: int = 0
) -> Iterator[list[int]]:
    """Yield the sample indices of one rank's microbatches in order.

    Each run of micro_batch_size * dp_size samples goes to the ranks in turn, as in Megatron-LM. For
    8 samples, microbatches of 2 and 2 ranks: rank 0 gets [0, 1], [4, 5]; rank 1 gets [2, 3], [6,
    7].

    Args:
        num_samples: Samples to hand out; a last incomplete run is dropped.
        micro_batch_size: Samples per microbatch.
        dp_rank: This rank among the data-parallel ranks.
        dp_size: Number of data-parallel ranks.
        num_used: Samples at the beginning that are left out; whole global batches.
    """
    stride = micro_batch_size * dp_size
    for start in range(num_used + dp_rank * micro_batch_size, num_samples - num_samples % stride, stride):
        yield list(range(start, start + micro_batch_size))
