# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizer contract over parameters and gradients that FSDP v2 owns, and the factory for it.

Gradient statistics are read off each gradient's own DTensor layout. Main weights and gradients live in the runtime's
buffers: there is nothing to copy between model and optimizer here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from megatron.core.config_logger import has_config_logger_enabled, log_config_to_disk
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.fsdp_dtensor_checkpoint import get_global_unique_param_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import log_single_rank
from torch.distributed.tensor import DTensor

from megatron.core import optimizer as mcore_optimizer
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.experimental import FsdpDTensor, GradientStatistics, fully_shard_optimizer
from megatron.core.distributed.fsdp.experimental.checkpoint import create_state
from megatron.core.distributed.fsdp.mcore_fsdp_v2_adapter import is_fully_sharded
from megatron.core.distributed.fsdp.mcore_fsdp_v2_shared_weights import is_counted, shared_name
from megatron.core.optimizer.fully_sharded_optimizer_config import (
    base_optimizer,
    check_config,
    check_gradient_dtypes,
    check_precision_aware,
    grad_scaler_of,
)
from megatron.core.optimizer.fully_sharded_optimizer_gradients import WideGradients
from megatron.core.optimizer.fully_sharded_optimizer_muon import check_muon, muon_optimizer
from megatron.core.optimizer.fully_sharded_optimizer_state import (
    load_scaler_state,
    load_sharded_state,
    scaler_state,
    sharded_state,
)

_logger = logging.getLogger(__name__)
_grad_of = attrgetter("grad")


def count_replication(tensor: DTensor) -> int:
    """Return how many ranks hold a copy of this rank's local part of `tensor`.

    A mesh axis that shards it holds other parts; an axis that replicates it holds copies, which a sum over all ranks
    counts once each. Example: placements (Replicate, Shard(0)) on a (2, 4) mesh give 2.

    Raises:
        TypeError: a plain tensor, whose layout would have to be guessed.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"count_replication: expected a DTensor, got {type(tensor).__name__}. Pass a sharded parameter's gradient."
        )
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, at in enumerate(tensor.placements) if at.is_replicate())


class FullyShardedOptimizer(MixedPrecisionOptimizer):
    """Steps the shards of FSDP v2 model chunks under Megatron-Core's mixed-precision contract.

    Statistics are exact for every layout: each gradient element counts once over the grad-stats group. Under
    megatron-core's ChainedOptimizer so is the joint norm; its zero count is its own, once per replica in that group.

    Args:
        optimizer: base optimizer over the chunks' sharded parameters; adapted in place if it is not yet.
        config: optimizer configuration. `use_precision_aware_optimizer` needs one that reads ``decoupled_grad``.
        grad_scaler: loss scaler, or None for a loss that is not scaled.
        init_state_fn: megatron-core's state initialiser; kept for its interface, since state is made by a step.
        model_chunks: the chunks, wrapped by FSDP v2.

    Attributes:
        table: which parameters of this rank's chunks Muon steps, for a log; empty with another optimizer.

    Raises:
        NotImplementedError: a config field that FSDP v2 does not support.
        ValueError: chunks that FSDP v2 does not wrap or whose configs differ, parameters that are not theirs, fp16
            without a loss scaler, or a base optimizer or dtypes that do not fit a precision-aware config.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        init_state_fn: Callable[..., Any] | None,
        model_chunks: list[MegatronModule],
    ) -> None:
        if has_config_logger_enabled(config):
            log_config_to_disk(config, locals(), prefix=type(self).__name__)
        self._validate_config(config, model_chunks)
        if config.fp16 and grad_scaler is None:
            raise ValueError("FullyShardedOptimizer grad_scaler: expected one with fp16, got None. Set a loss scale.")
        self._is_precision_aware = bool(config.use_precision_aware_optimizer)
        if self._is_precision_aware:
            check_precision_aware(config, optimizer)
        if not hasattr(optimizer, "_fsdp_step"):
            fully_shard_optimizer(optimizer, precision_aware=self._is_precision_aware)
        # MixedPrecisionOptimizer's own constructor allocates on "cuda"; these are its fields on the model's device.
        MegatronOptimizer.__init__(self, optimizer, config, init_state_fn)
        self.is_stub_optimizer = False
        self.grad_scaler = grad_scaler
        self.model_chunks = model_chunks
        self.device = model_chunks[0].device
        self._scale_one = torch.ones(1, dtype=torch.float32, device=self.device)
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=self.device)
        self.grad_norms_by_group: dict[str, float] = {}
        # Without it the base class would reduce statistics over model parallelism only: a norm of one shard.
        self.grad_stats_parallel_group = model_chunks[0].model_group
        self._known_statistics: GradientStatistics | None = None
        stepped = {id(parameter) for parameter in self.get_parameters()}
        self._siblings = [p for chunk in model_chunks for p in chunk.parameters() if id(p) not in stepped]
        self._sibling_statistics = GradientStatistics(self.grad_stats_parallel_group, self.device)
        self._wide_gradients = WideGradients()
        self.table = ""
        self._check_ownership()

    @staticmethod
    def _validate_config(config: OptimizerConfig, model_chunks: list[MegatronModule]) -> None:
        foreign = [type(chunk).__name__ for chunk in model_chunks if not is_fully_sharded(chunk)]
        if foreign or not model_chunks:
            raise ValueError(
                f"FullyShardedOptimizer model_chunks: expected chunks wrapped by Megatron-FSDP v2, got {foreign}. "
                "Wrap every chunk with mcore_fsdp_v2_adapter.FullyShardedDataParallel."
            )
        if any(chunk.ddp_config != model_chunks[0].ddp_config for chunk in model_chunks):
            raise ValueError(
                "FullyShardedOptimizer model_chunks: expected chunks wrapped with equal data-parallel configs, got "
                f"different ones for {len(model_chunks)} chunks. Wrap all of them with the same config."
            )
        check_muon(config)
        check_config(config)

    def _check_ownership(self) -> None:
        owned = {id(parameter) for chunk in self.model_chunks for parameter in chunk.parameters()}
        foreign = [parameter.geometry.fqn for parameter in self.get_parameters() if id(parameter) not in owned]
        if foreign:
            raise ValueError(
                f"FullyShardedOptimizer optimizer: expected parameters of model_chunks, got {foreign[:3]} of another "
                "model. Build it from the chunks' own parameters."
            )

    # --- gradient statistics --------------------------------------------------------------------------------------

    @property
    def _statistics(self) -> GradientStatistics:
        group = self.get_grad_stats_parallel_group()
        if self._known_statistics is None or self._known_statistics.group is not group:
            self._known_statistics = GradientStatistics(group, self.device, is_counted)
        return self._known_statistics

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """Return the local gradients that this rank counts; a ChainedOptimizer sums over those of its children."""
        return self._filter_grads_for_norm(self.get_parameters())

    def _filter_grads_for_norm(
        self, params: Iterable[Any], param_filter: Callable[[Any], bool] | None = None
    ) -> list[torch.Tensor]:
        """Do the same for some of the parameters; megatron-core 0.19 asks so."""
        return self._statistics.counted_gradients([p for p in params if param_filter is None or param_filter(p)])

    @torch.no_grad()
    def get_grad_norm(self) -> torch.Tensor:
        """Return the global L2 norm of the gradients, a 0-d float32 tensor; every rank must call it."""
        return self._statistics.norm(self.get_parameters()).float()

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> torch.Tensor:
        """Scale the gradients to a norm of at most `clip_grad`; return the norm before, a 0-d float32 tensor."""
        norm = self.get_grad_norm()
        self._statistics.clip(self.get_parameters(), clip_grad, norm)
        return norm

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Return how many elements of the gradients are zero, over all ranks; every rank must call it."""
        return float(self._statistics.count_zeros(self.get_parameters()))

    # --- the step -------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the sharded gradients of this optimizer's parameters, with what waits for a reduction."""
        self._restore_gradients()
        self.optimizer.zero_grad(set_to_none)

    def prepare_grads(self) -> bool:
        """Cast, unscale and check the gradients; return whether one of them, on any rank, is not finite."""
        found_inf: bool = super().prepare_grads()
        if found_inf:
            self._restore_gradients()
        return found_inf

    def step_with_ready_grads(self) -> bool:
        """Step the base optimizer, then give every ``.grad`` its own dtype back; return whether it stepped."""
        try:
            is_updated: bool = super().step_with_ready_grads()
        finally:
            self._restore_gradients()
        return is_updated

    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        """Unscale this optimizer's gradients; return whether any of the chunks' is not finite on any rank.

        Those that a sibling in a ChainedOptimizer steps count, too: each has a loss scaler of its own, and scalers that
        decide otherwise would unscale by another factor than the one that the loss has been scaled by.
        """
        assert self.grad_scaler is not None
        self.found_inf.fill_(0.0)
        for gradients, factor in (
            (self._collect_main_grad_data_for_unscaling(), self.grad_scaler.inv_scale),
            (self._sibling_statistics.local_gradients(self._siblings), self._scale_one),
        ):
            if gradients:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, factor)
        torch.distributed.all_reduce(
            self.found_inf, torch.distributed.ReduceOp.MAX, group=self.get_grad_stats_parallel_group()
        )
        return self.found_inf.item() > 0

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients, for the loss scaler to unscale in place."""
        return self._statistics.local_gradients(self.get_parameters())

    def _copy_model_grads_to_main_grads(self) -> None:
        """Have gradients in the dtype of their main weights, in copies where they are narrower.

        A precision-aware optimizer reads them as they are, from ``decoupled_grad``, where megatron-core looks, too.
        """
        parameters = self.get_parameters()
        if not self._is_precision_aware:
            self._wide_gradients.install(parameters)
            return
        with torch._C.DisableTorchFunctionSubclass():
            gradients = list(map(_grad_of, parameters))
            check_gradient_dtypes(self.config, {gradient.dtype for gradient in gradients if gradient is not None})
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.decoupled_grad = gradient

    def _restore_gradients(self) -> None:
        self._wide_gradients.restore()
        if self._is_precision_aware:
            for parameter in self.get_parameters():
                parameter.decoupled_grad = None

    def _copy_main_params_to_model_params(self) -> None:
        """Do nothing: the step marks the main weights as written, and the next gather refreshes compute weights."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Do nothing: loading a model writes main weights."""

    def offload_to_cpu(self) -> None:
        """Refuse: main weights are views of the runtime's buffers.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "FullyShardedOptimizer.offload_to_cpu: expected shards that stay on their device, got a call; not "
            "supported with Megatron-FSDP v2 yet. Leave optimizer state where it is."
        )

    def restore_from_cpu(self) -> None:
        """Do nothing: nothing is ever offloaded."""

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Refuse: it would drop how state is sharded.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "FullyShardedOptimizer.state_dict: expected sharded_state_dict(), got a call that would drop how state is "
            "sharded. Use sharded_state_dict() and a distributed checkpoint."
        )

    def named_parameters(self) -> dict[str, FsdpDTensor]:
        """Return the parameters by their names in checkpoints, which have wrappers' prefixes."""
        # megatron-core's function takes layers' numbers from the last of several chunks.
        chunk_of = {id(p): chunk for chunk in self.model_chunks for p in chunk.parameters()}
        return {shared_name(get_global_unique_param_name([chunk_of[id(p)]], p), p): p for p in self.get_parameters()}

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return optimizer state in the fsdp_dtensor format, with the same keys on every rank.

        Args:
            model_sharded_state_dict: part of the interface; state is read from the optimizer itself.
            is_loading: create state that does not exist yet, so that a load has tensors to write into. With a loss
                scaler it is created for a save, too, if every update so far has been skipped.
            metadata: part of the interface; the format has no options.

        Returns:
            ``{"state": {fqn: {"exp_avg": DTensor, ...}}, "param_to_group_meta": {fqn: {"lr": ..., ...}}}``, and with a
            dynamic loss scaler ``"grad_scaler"``, its numbers. The DTensors share memory with the optimizer.
        """
        if is_loading:
            self._create_state()
        found = sharded_state(self.optimizer, self.named_parameters())
        if self.grad_scaler is not None and not found["state"]:
            self._create_state()
            found = sharded_state(self.optimizer, self.named_parameters())
        scaler = scaler_state(self.grad_scaler)
        return {**found, "grad_scaler": scaler} if scaler else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `sharded_state_dict` returned, after a checkpoint has been read into it.

        Raises:
            KeyError: parameters are missing from it, or unknown, or part of the loss scaler's state is missing.
            ValueError: parameters of one group have different settings in it.

        Warns:
            UserWarning: it has no state of a loss scaler, and there is a dynamic one.
        """
        load_sharded_state(self.optimizer, self.named_parameters(), state_dict)
        load_scaler_state(self.grad_scaler, state_dict.get("grad_scaler", {}))

    def _create_state(self) -> None:
        """Make the base optimizer create its state, without moving a weight or a step count."""
        create_state(self.optimizer, self.config.main_grads_dtype if self._is_precision_aware else None)


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: list[MegatronModule],
    config_overrides: dict[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """Return the optimizer for model chunks: ours for FSDP v2 chunks, megatron-core's own for any other.

    The signature is that of the installed megatron-core.

    Raises:
        ValueError: FSDP v2 chunks together with others or without trainable parameters, or Muon for a model whose
            matrices it cannot tell apart.
        NotImplementedError: with FSDP v2 `dump_param_to_param_group_map`, or a config that it does not support.
    """
    sharded = [is_fully_sharded(chunk) for chunk in model_chunks]
    if not any(sharded):
        return mcore_optimizer.get_megatron_optimizer(
            config,
            model_chunks,
            config_overrides=config_overrides,
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
            dump_param_to_param_group_map=dump_param_to_param_group_map,
        )
    if not all(sharded):
        raise ValueError(
            f"get_megatron_optimizer model_chunks: expected all or none wrapped by Megatron-FSDP v2, got {sharded}. "
            "Wrap every chunk, or none."
        )
    if dump_param_to_param_group_map is not None:
        raise NotImplementedError(
            "get_megatron_optimizer dump_param_to_param_group_map: expected None with Megatron-FSDP v2, got "
            f"{dump_param_to_param_group_map!r}. Leave it out."
        )
    FullyShardedOptimizer._validate_config(config, model_chunks)
    if config_overrides is None:
        config_overrides = mcore_optimizer.get_standard_config_overrides(config)
    mcore_optimizer.check_config_overrides_consistency(config, config_overrides)
    param_groups = [
        group for group in mcore_optimizer._get_param_groups(model_chunks, config, config_overrides) if group["params"]
    ]
    group = model_chunks[0].model_group
    is_empty = [False] * group.size()
    torch.distributed.all_gather_object(is_empty, not param_groups, group=group)
    if any(is_empty):
        ranks = torch.distributed.get_process_group_ranks(group)
        where = [rank for rank, empty in zip(ranks, is_empty, strict=True) if empty]
        raise ValueError(
            f"get_megatron_optimizer model_chunks: expected trainable parameters, got none on ranks {where[:8]}. "
            "Unfreeze some on every pipeline stage, or train without an optimizer."
        )
    table = ""
    if config.optimizer == "muon":
        base, table = muon_optimizer(config, param_groups, model_chunks)
        log_single_rank(_logger, logging.INFO, f"What Muon steps on the first rank:\n{table}")
    else:
        base = base_optimizer(config, param_groups, model_chunks[0].device)
    optimizer = FullyShardedOptimizer(base, config, grad_scaler_of(config), None, model_chunks)
    optimizer.table = table
    optimizer.tp_group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    return optimizer
