# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism for any `torch.nn.Module`: the public names.

Outside code imports from here only. `docs/design.md` says where each part lives.
"""

from .checkpoint import CheckpointError, CheckpointSaver, LoadReport, load_checkpoint, save_checkpoint
from .checks import check_shardable
from .controls import microbatch
from .dbuffer import DBuffer
from .dtensor import FsdpDTensor, gather_full, rows_of, shard_dtensor
from .fully_shard import fully_shard, fully_shard_context
from .graph import CapturedIteration, capture_iteration
from .hooks import register_fsdp_forward_method
from .lockstep import check_ranks
from .matrix_choice import MatrixChoice, MatrixParameter, describe_choice
from .matrix_optimizer import MatrixOptimizer
from .matrix_rule import MatrixRule
from .module import FsdpModule
from .muon import Muon, MuonRule, fully_shard_muon
from .norms import GradientStatistics, clip_grad_norm_, clip_grads_with_norm_, grad_norm
from .optimizer import fully_shard_optimizer
from .placement import Flat
from .policy import OUTER_STRATEGIES, STRATEGIES, MixedPrecisionPolicy, Placements, SchedulePolicy
from .recipes import Fp8Recipe, Mxfp8Recipe, Nvfp4Recipe, QuantizationRecipe
from .schedule import FsdpContext
from .te_weights import is_primary_weight

__all__ = [
    "OUTER_STRATEGIES",
    "STRATEGIES",
    "CapturedIteration",
    "CheckpointError",
    "CheckpointSaver",
    "DBuffer",
    "Flat",
    "Fp8Recipe",
    "FsdpContext",
    "FsdpDTensor",
    "FsdpModule",
    "GradientStatistics",
    "LoadReport",
    "MatrixChoice",
    "MatrixOptimizer",
    "MatrixParameter",
    "MatrixRule",
    "MixedPrecisionPolicy",
    "Muon",
    "MuonRule",
    "Mxfp8Recipe",
    "Nvfp4Recipe",
    "Placements",
    "QuantizationRecipe",
    "SchedulePolicy",
    "capture_iteration",
    "check_ranks",
    "check_shardable",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "describe_choice",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_muon",
    "fully_shard_optimizer",
    "gather_full",
    "grad_norm",
    "is_primary_weight",
    "load_checkpoint",
    "microbatch",
    "register_fsdp_forward_method",
    "rows_of",
    "save_checkpoint",
    "shard_dtensor",
]
