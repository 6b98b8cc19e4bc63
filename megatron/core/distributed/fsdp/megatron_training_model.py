# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The wrapper, the optimizer and the checkpoints of FSDP v2 as megatron-core's training loop asks for them."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as _StockConfig,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.mcore_fsdp_v2_adapter import FullyShardedDataParallel, is_fully_sharded
from megatron.core.distributed.fsdp.mcore_fsdp_v2_finalize import finalize_model_grads
from megatron.core.distributed.fsdp.megatron_training import Seam
from megatron.core.distributed.fsdp.megatron_training_arguments import MUON_FLAGS
from megatron.core.distributed.fsdp.megatron_training_arguments import ddp_config as config_of_arguments
from megatron.core.optimizer.fully_sharded_optimizer import get_megatron_optimizer


class LoopFullyShardedDataParallel(FullyShardedDataParallel):
    """`FullyShardedDataParallel` with the arguments that the loop has for its own FSDP.

    Args:
        config: of the model; it is told how gradients become final.
        ddp_config: the loop's, which has a size of buckets and lacks our fields. The command line's is taken instead.
        module: the chunk.
        disable_bucketing: part of the interface; later chunks have units, too.
        pg_collection: process groups.

    Raises:
        ValueError: the model's config has another function that makes gradients final.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: _StockConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        from megatron.training import get_args

        if config.finalize_model_grads_func not in (None, finalize_model_grads):
            raise ValueError(
                "finalize_model_grads_func: expected None with --use-megatron-fsdp-v2, got "
                f"{config.finalize_model_grads_func!r}; gradients would not become final. Leave it to Megatron-FSDP v2."
            )
        super().__init__(config, config_of_arguments(get_args()), module, pg_collection=pg_collection)
        config.finalize_model_grads_func = finalize_model_grads


def _wrapper(stock: Any) -> Any:
    del stock
    return LoopFullyShardedDataParallel


def _guarded_optimizer(stock: Any) -> Any:
    @functools.wraps(stock)
    def get_optimizer(config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        # Arguments from a YAML file have no flags of ours.
        if not getattr(get_args(), "use_megatron_fsdp_v2", False):
            return stock(config, model_chunks, *args, **kwargs)
        foreign = [type(chunk).__name__ for chunk in model_chunks if not is_fully_sharded(chunk)]
        if foreign:
            raise RuntimeError(
                "get_megatron_optimizer: expected chunks wrapped by Megatron-FSDP v2 with --use-megatron-fsdp-v2, got "
                f"{foreign}; validate_args was imported before enable_megatron_fsdp_v2(), or the arguments come from "
                "--yaml-cfg. Make that call first, and give flags."
            )
        for name in MUON_FLAGS.values():
            setattr(config, name, getattr(get_args(), name))
        return get_megatron_optimizer(config, model_chunks, *args, **kwargs)

    return get_optimizer


def _unwrapping(stock: Any) -> Any:
    @functools.wraps(stock)
    def unwrap_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave our chunks as they are: they know the names that checkpoints have."""
        chunks = model if isinstance(model, list) else [model]
        return model if all(map(is_fully_sharded, chunks)) else stock(model, *args, **kwargs)

    return unwrap_model


def _naming(stock: Any) -> Any:
    @functools.wraps(stock)
    def preprocess_fsdp_dtensor_state_dict(args: argparse.Namespace, raw_state_dict: Any, model: Any) -> Any:
        """Name the optimizer's state as checkpoints do; the model's weights come with their names.

        A load reads into it: tensors share memory with the optimizer, and settings of a parameter stay one dictionary.
        """
        if not is_fully_sharded(model):
            return stock(args, raw_state_dict, model)
        state_dict = dict(raw_state_dict)
        if "optimizer" in state_dict:
            state_dict["optimizer"] = names.optimizer_entries(state_dict["optimizer"], model.config)
        return state_dict

    return preprocess_fsdp_dtensor_state_dict


SEAMS = (
    Seam("training", "megatron_FSDP", _wrapper, ("config", "ddp_config", "module", "disable_bucketing")),
    Seam("models.dist_utils", "FullyShardedDataParallel", _wrapper, ("config", "ddp_config", "module")),
    Seam("checkpointing", "unwrap_model", _unwrapping, ("model",)),
    Seam("checkpointing", "preprocess_fsdp_dtensor_state_dict", _naming, ("args", "raw_state_dict", "model")),
)
OPTIMIZER_SEAM = Seam("training", "get_megatron_optimizer", _guarded_optimizer, ("config", "model_chunks"))
