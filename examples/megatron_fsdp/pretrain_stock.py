# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Pretrains a GPT with megatron-core's own training loop, ``megatron.training``; docs/stock_loop.md has flags for it.

All there is of Megatron-FSDP v2 here is ``enable_megatron_fsdp_v2()``: with it the loop takes
``--use-megatron-fsdp-v2``, and without that flag it trains as before.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets import utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.core.distributed.fsdp.megatron_training import enable_megatron_fsdp_v2


def build_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> list[Any]:
    """Return the training, validation and test set."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()


# Every rank reads its own samples; nothing is sent between ranks of tensor parallelism.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one microbatch; return its losses by token, and what makes the loss of them."""
    batch = {key: value.cuda(non_blocking=True) for key, value in next(data).items()}
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(sum_losses, batch["loss_mask"])


def sum_losses(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of a microbatch's losses, the number of its tokens, and both for the log."""
    total, num_tokens = torch.sum(losses.float() * mask), mask.sum().to(torch.int)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.to(total.dtype)])}


if __name__ == "__main__":
    enable_megatron_fsdp_v2()
    if not Path(utils.__file__).with_name("Makefile").exists():
        # The wheel has what the loop would compile now, and no Makefile.
        utils.compile_helpers = lambda: None
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)
