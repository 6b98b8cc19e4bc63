# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizer contract over parameters and gradients that FSDP v2 owns, and the factory for it.

Gradient statistics are read off each gradient's own DTensor layout. Main weights and gradients live in the runtime's
buffers: there is nothing to copy between model and optimizer here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.config_logger import has_config_logger_enabled, log_config_to_disk
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.fsdp_dtensor_checkpoint import get_global_unique_param_name
from megatron.core.transformer.module import MegatronModule
from torch.distributed.tensor import DTensor

from megatron.core import optimizer as mcore_optimizer
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.experimental import (
    FsdpDTensor,
    clip_grads_with_norm_,
    fully_shard_optimizer,
    shard_dtensor,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_adapter import is_fully_sharded


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

    Args:
        optimizer: base optimizer over the chunks' sharded parameters; adapted in place if it is not yet.
        config: optimizer configuration.
        grad_scaler: loss scaler, or None for a loss that is not scaled.
        init_state_fn: megatron-core's state initialiser; kept for its interface, since state is made by a step.
        model_chunks: the chunks, wrapped by FSDP v2.

    Raises:
        NotImplementedError: a config field that FSDP v2 does not support.
        ValueError: chunks that FSDP v2 does not wrap, parameters that are not theirs, or fp16 without a loss scaler.
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
        if not hasattr(optimizer, "_fsdp_step"):
            fully_shard_optimizer(optimizer)
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
        self.grad_stats_parallel_group = model_chunks[0].data_parallel_group
        self._reduced_gradients: list[tuple[FsdpDTensor, FsdpDTensor, FsdpDTensor]] = []
        self._check_ownership()

    @staticmethod
    def _validate_config(config: OptimizerConfig, model_chunks: list[MegatronModule]) -> None:
        foreign = [type(chunk).__name__ for chunk in model_chunks if not is_fully_sharded(chunk)]
        if foreign or not model_chunks:
            raise ValueError(
                f"FullyShardedOptimizer model_chunks: expected chunks wrapped by Megatron-FSDP v2, got {foreign}. "
                "Wrap every chunk with mcore_fsdp_v2_adapter.FullyShardedDataParallel."
            )
        for name in (
            "optimizer_cpu_offload",
            "overlap_param_gather_with_optimizer_step",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "use_precision_aware_optimizer",
            "optimizer_cuda_graph",
            "use_layer_wise_distributed_optimizer",
        ):
            if getattr(config, name, False):
                raise NotImplementedError(
                    f"OptimizerConfig.{name}: expected False, got True; not supported with Megatron-FSDP v2 yet. "
                    f"Drop --{name.replace('_', '-')}."
                )

        threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
        if math.isfinite(threshold):
            raise NotImplementedError(
                f"OptimizerConfig.grad_norm_skip_threshold: expected inf, got {threshold}; not supported with "
                "Megatron-FSDP v2 yet. Drop --grad-norm-skip-threshold."
            )

    def _check_ownership(self) -> None:
        owned = {id(parameter) for chunk in self.model_chunks for parameter in chunk.parameters()}
        foreign = [parameter.geometry.fqn for parameter in self.get_parameters() if id(parameter) not in owned]
        if foreign:
            raise ValueError(
                f"FullyShardedOptimizer optimizer: expected parameters of model_chunks, got {foreign[:3]} of another "
                "model. Build it from the chunks' own parameters."
            )

    # --- gradient statistics --------------------------------------------------------------------------------------

    def _gradients(self) -> Iterator[DTensor]:
        for parameter in self.get_parameters():
            if parameter.grad is not None:
                yield parameter.grad

    def _sum_over_gradients(self, statistic: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the sum of a float64 statistic of every logical gradient element, over the grad-stats group.

        Each rank contributes its local part divided by its number of copies, whichever mesh the gradient lies on. Sums
        are kept in float64, so that norm and clipping do not depend on how many ranks share the gradients.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in self._gradients():
            local = gradient.to_local()
            if local.numel():
                total += statistic(local) / count_replication(gradient)
        torch.distributed.all_reduce(total, group=self.get_grad_stats_parallel_group())
        return total

    @torch.no_grad()
    def get_grad_norm(self) -> torch.Tensor:
        """Return the global L2 norm of the gradients, a 0-d float32 tensor; every rank must call it."""
        squares = self._sum_over_gradients(lambda local: torch.linalg.vector_norm(local, dtype=torch.float64).square())
        return squares.sqrt().float()

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> torch.Tensor:
        """Scale the gradients to a norm of at most `clip_grad`; return the norm before, a 0-d float32 tensor."""
        norm = self.get_grad_norm()
        clip_grads_with_norm_(self.get_parameters(), clip_grad, norm)
        return norm

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Return how many elements of the gradients are zero, over all ranks; every rank must call it."""
        zeros = self._sum_over_gradients(lambda local: (local == 0).sum(dtype=torch.float64))
        return float(zeros)

    # --- the step -------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the sharded gradients."""
        self._reduced_gradients = []
        self.optimizer.zero_grad(set_to_none)

    def prepare_grads(self) -> bool:
        """Cast, unscale and check the gradients; return whether one of them, on any rank, is not finite."""
        found_inf: bool = super().prepare_grads()
        if found_inf:
            self._restore_gradients()
        return found_inf

    def step_with_ready_grads(self) -> bool:
        """Step the base optimizer, then give every ``.grad`` its own dtype back; return whether it stepped."""
        is_updated: bool = super().step_with_ready_grads()
        self._restore_gradients()
        return is_updated

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients, for the loss scaler to unscale in place."""
        return [gradient.to_local() for gradient in self._gradients()]

    def _copy_model_grads_to_main_grads(self) -> None:
        """Put gradients of another dtype than their main weights aside, for copies in the dtype of the weights.

        So that unscaling and clipping do not round, or lose, what a narrow dtype cannot hold.
        """
        self._reduced_gradients = []
        for parameter in self.get_parameters():
            reduced = parameter.grad
            if reduced is not None and reduced.dtype is not parameter.dtype:
                parameter.grad = shard_dtensor(reduced.to_local().to(parameter.dtype), parameter.geometry)
                self._reduced_gradients.append((parameter, reduced, parameter.grad))

    def _restore_gradients(self) -> None:
        for parameter, reduced, installed in self._reduced_gradients:
            if parameter.grad is installed:
                parameter.grad = reduced
        self._reduced_gradients = []

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

    def _named_parameters(self) -> dict[str, FsdpDTensor]:
        return {get_global_unique_param_name(self.model_chunks, p): p for p in self.get_parameters()}

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return optimizer state in the fsdp_dtensor format, with the same keys on every rank.

        Args:
            model_sharded_state_dict: part of the interface; state is read from the optimizer itself.
            is_loading: create state that does not exist yet, so that a load has tensors to write into.
            metadata: part of the interface; the format has no options.

        Returns:
            ``{"state": {fqn: {"exp_avg": DTensor, ...}}, "param_to_group_meta": {fqn: {"lr": ..., ...}}}``. The
            DTensors share memory with the optimizer.
        """
        if is_loading:
            self._create_state()
        names = {id(parameter): name for name, parameter in self._named_parameters().items()}
        state, meta = {}, {}
        for group in self.optimizer.param_groups:
            hyperparameters = _hyperparameters(group)
            for parameter in group["params"]:
                name = names[id(parameter)]
                meta[name] = dict(hyperparameters)
                if parameter in self.optimizer.state:
                    state[name] = {
                        key: _as_dtensor(value, parameter) for key, value in self.optimizer.state[parameter].items()
                    }
        return {"state": state, "param_to_group_meta": meta}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `sharded_state_dict` returned, after a checkpoint has been read into it.

        Raises:
            KeyError: parameters are missing from it, or unknown.
            ValueError: parameters of one group have different settings in it.
        """
        named = self._named_parameters()
        names = {id(parameter): name for name, parameter in named.items()}
        state, meta = state_dict["state"], state_dict["param_to_group_meta"]
        with_state = {name for name, parameter in named.items() if parameter in self.optimizer.state}
        for what, missing in (("settings", named.keys() - meta.keys()), ("state", with_state - state.keys())):
            if missing:
                raise KeyError(
                    f"FullyShardedOptimizer.load_state_dict: expected {what} of every parameter, got none for "
                    f"{sorted(missing)[:5]}. Load a checkpoint of the same model."
                )
        if unknown := (meta.keys() | state.keys()) - named.keys():
            raise KeyError(
                f"FullyShardedOptimizer.load_state_dict: expected this optimizer's parameters only, got "
                f"{sorted(unknown)[:5]}. Load a checkpoint of the same model."
            )
        settings = [
            _common_settings({names[id(parameter)]: meta[names[id(parameter)]] for parameter in group["params"]})
            for group in self.optimizer.param_groups
        ]
        for group, loaded in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(loaded)
        for name, values in state.items():
            self.optimizer.state[named[name]] = {
                key: value.to_local() if isinstance(value, DTensor) else value for key, value in values.items()
            }

    @torch.no_grad()
    def _create_state(self) -> None:
        """Make the base optimizer create its state, without moving a weight or a step count."""
        every = self.get_parameters()
        new = [parameter for parameter in every if parameter not in self.optimizer.state]
        if not new:
            return
        saved = [_hyperparameters(group) for group in self.optimizer.param_groups]
        gradients = [parameter.grad for parameter in every]
        for parameter in every:
            parameter.grad = None
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            # Zero gradients move nothing by themselves. The rate stays: some rules start their state from it.
            group.update(weight_decay=0.0)
        self.optimizer.step()
        for group, settings in zip(self.optimizer.param_groups, saved, strict=True):
            _restore_settings(group, settings)
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient
        for parameter in new:
            state = self.optimizer.state[parameter]
            if "step" in state:
                state["step"] = _zero_like(state["step"])


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _restore_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Give a group its settings back; a step count that a first step has added to it stays, as zero."""
    for key in group.keys() - settings.keys() - {"params"}:
        if key == "step":
            group[key] = _zero_like(group[key])
        else:
            del group[key]
    group.update(settings)


def _zero_like(step: Any) -> Any:
    return torch.zeros_like(step) if torch.is_tensor(step) else 0


def _common_settings(by_name: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that all parameters of one group share."""
    (first, settings), *others = by_name.items()
    for name, other in others:
        if other.keys() != settings.keys() or any(bool(other[key] != value) for key, value in settings.items()):
            raise ValueError(
                f"FullyShardedOptimizer.load_state_dict: expected equal settings within a parameter group, got {other} "
                f"for {name} and {settings} for {first}. Group the parameters as in the checkpoint."
            )
    return settings


def _as_dtensor(value: Any, parameter: FsdpDTensor) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == parameter.to_local().shape and value.ndim:
        return shard_dtensor(value, parameter.geometry)
    return value


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
        ValueError: FSDP v2 chunks together with others or without trainable parameters, or an optimizer that is
            neither adam nor sgd.
        NotImplementedError: `dump_param_to_param_group_map` with FSDP v2.
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
    if not param_groups:
        raise ValueError(
            "get_megatron_optimizer model_chunks: expected trainable parameters, got none. Unfreeze some, or train "
            "without an optimizer."
        )
    base = _base_optimizer(config, param_groups, model_chunks[0].device)
    optimizer = FullyShardedOptimizer(base, config, _grad_scaler(config), None, model_chunks)
    optimizer.grad_stats_parallel_group = _grad_stats_group(pg_collection, model_chunks)
    optimizer.tp_group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    return optimizer


def _base_optimizer(
    config: OptimizerConfig, param_groups: Sequence[dict[str, Any]], device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer that megatron-core would use: TransformerEngine's or Apex's if installed, else torch's."""
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if mcore_optimizer.USING_PYTORCH_OPTIMIZER and device.type != "cpu":
        settings["fused"] = True
    if config.optimizer == "sgd":
        return mcore_optimizer.SGD(param_groups, momentum=config.sgd_momentum, **settings)
    if config.optimizer != "adam":
        raise ValueError(
            f"OptimizerConfig.optimizer: expected 'adam' or 'sgd' with Megatron-FSDP v2, got {config.optimizer!r}. "
            "Use one of the two."
        )
    settings.update(betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    if mcore_optimizer.USING_PYTORCH_OPTIMIZER:
        adam = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        return adam(param_groups, **settings)
    return mcore_optimizer.Adam(param_groups, adam_w_mode=config.decoupled_weight_decay, **settings)


def _grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def _grad_stats_group(pg_collection: ProcessGroupCollection | None, model_chunks: list[MegatronModule]) -> Any:
    """Return the group in which every gradient shard is held by exactly one rank or by counted copies."""
    group = getattr(pg_collection, "intra_dist_opt", None)
    if group is None:
        group = parallel_state.get_intra_distributed_optimizer_instance_group()
    # With several optimizer instances megatron-core's group ends at one, whose ranks hold some of the copies or shards.
    everybody = model_chunks[0].data_parallel_group
    return everybody if group.size() < everybody.size() else group
