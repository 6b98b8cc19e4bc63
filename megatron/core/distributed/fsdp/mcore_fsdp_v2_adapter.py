# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Wraps a Megatron-Core model chunk with Megatron-FSDP v2, from a data-parallel config.

It gives the chunk the methods of megatron-core's wrappers. What the config means is mcore_fsdp_v2_config.py's;
sharding, schedule and numbers are the runtime's (`megatron.core.distributed.fsdp.experimental`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as _StockConfig,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import (
    FullyShardedDataParallel as _StockFullyShardedDataParallel,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    FsdpContext,
    FsdpModule,
    check_shardable,
    fully_shard,
    fully_shard_context,
    grad_norm,
    microbatch,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_checkpoint import join_gated, model_keys
from megatron.core.distributed.fsdp.mcore_fsdp_v2_config import (
    DistributedDataParallelConfig,
    check_ddp_config,
    check_fused_gradients,
    check_gather_group,
    check_model_config,
    check_overlap,
    check_pipeline,
    check_primary_weights,
    unit_options,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_experts import (
    check_expert_pieces,
    check_expert_strategies,
    expert_modules,
    expert_options,
    units_with_experts,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_mesh import (
    check_stages,
    data_parallel_mesh,
    find_group,
    whole_model_group,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_overlap import OverlapDriver, refuse_shared_modules
from megatron.core.distributed.fsdp.mcore_fsdp_v2_precision import LowBitUnits
from megatron.core.distributed.fsdp.mcore_fsdp_v2_shared_weights import (
    check_equal_shards,
    drop_spare_weights,
    find_seen_in_parts,
    find_shared_weights,
    set_apart,
)
from megatron.core.distributed.fsdp.mcore_fsdp_v2_units import (
    find_units,
    join_units,
    keep_gathered,
    resolve_classes,
    shared_modules,
)

__all__ = ["DistributedDataParallelConfig", "FullyShardedDataParallel", "is_fully_sharded"]


class FullyShardedDataParallel(_StockFullyShardedDataParallel):
    """A Megatron-Core model chunk whose parameters, gradients and optimizer state are sharded over data parallelism.

    What is sharded is the config's `data_parallel_sharding_strategy`; of experts that ranks share it may be another
    one. With several optimizer instances the mesh has two
    axes: the ranks of one instance shard, and corresponding ranks of the instances hold replicas (HSDP) or, with
    `outer_dp_sharding_strategy="optim"`, shard the optimizer state further (HFSDP).

    It is a subclass of megatron-core's wrapper of the same name only so that megatron-core's own ``isinstance`` checks
    (unwrap_model, training loops) treat it alike; it shares no code with it.

    Args:
        config: the model's config.
        ddp_config: this module's config, or megatron-core's own.
        module: the model chunk, on its device; parameters equal on every data-parallel rank.
        fsdp_unit_modules: classes, or their dotted names, whose instances become units; None means megatron-core's
            layers: transformer, Mamba and multi-token prediction. What they do not contain (embedding, head, final
            norm) is the root unit's.
        disable_bucketing: make the whole chunk one unit.
        device: device of the shards; None means the current accelerator, or the host without one.
        pg_collection: process groups (`dp_cp`; with several instances `intra_dp_cp` and `inter_dist_opt`, with tensor
            parallelism `tp` and `intra_dist_opt`, with expert parallelism `expt_dp` as well); None means
            megatron-core's global ones.

    Raises:
        NotImplementedError: a parallel layout or a config field that FSDP v2 does not support yet.
        ValueError: config fields that contradict each other or the process groups, or unit modules that do not occur.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: _StockConfig,
        module: nn.Module,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        check_model_config(config)
        check_pipeline(config)
        check_ddp_config(ddp_config)
        check_expert_strategies(ddp_config, config)
        check_overlap(config, ddp_config)
        check_primary_weights(config, ddp_config, module)
        check_expert_pieces(module, config)
        if disable_bucketing and fsdp_unit_modules:
            raise ValueError(
                "FullyShardedDataParallel disable_bucketing: expected False with fsdp_unit_modules, got True. "
                "Give one of the two."
            )
        unit_classes = () if disable_bucketing else resolve_classes(fsdp_unit_modules)
        experts = expert_modules(module)
        units = find_units(module, unit_classes, experts, is_default=fsdp_unit_modules is None)
        options = unit_options(ddp_config, config, module)
        check_fused_gradients(config, options["mixed_precision_policy"], module)
        target = _default_device() if device is None else torch.device(device)
        tensor_parallel_size = config.tensor_model_parallel_size
        check_stages(pg_collection, config.pipeline_model_parallel_size)
        instances = ddp_config.num_distributed_optimizer_instances
        of_experts: dict[str, Any] = {}
        if experts:
            of_experts = unit_options(ddp_config, config, module, of_experts=True)
            of_experts = expert_options(of_experts, instances, pg_collection, target.type, config)
        check_gather_group(ddp_config, config, of_experts["mesh"].size() if experts else 1)
        options["mesh"] = data_parallel_mesh(instances, pg_collection, target.type, tensor_parallel_size)
        _BaseDataParallel.__init__(self, config=config, module=module)
        self.ddp_config = ddp_config
        self.device = target
        self.force_all_reduce = False
        self.data_parallel_group = find_group(pg_collection, "dp_cp")
        self._pg_collection = pg_collection
        kinds = [options, of_experts] if experts else [options]
        replicates = [at.is_replicate() for kind in kinds for at in kind["placements"].optimizer]
        has_parts = tensor_parallel_size * config.pipeline_model_parallel_size > 1 or bool(experts)
        self._has_replicas = any(replicates) or has_parts
        self._has_whole_gradients = all(replicates)
        options_of_all = {
            "use_symmetric_memory": getattr(ddp_config, "nccl_ub", False),
            "unify_communication_stream": getattr(ddp_config, "megatron_fsdp_unify_communication_stream", False),
            "trace_pool": getattr(ddp_config, "megatron_fsdp_trace_pool", False),
            "separate_communicators": getattr(ddp_config, "megatron_fsdp_create_all_gather_group", False),
        }
        min_numel = getattr(ddp_config, "megatron_fsdp_min_unit_numel", 0)
        shared = shared_modules(module, units)
        is_planned = getattr(config, "overlap_moe_expert_parallel_comm", False)
        if is_planned:
            refuse_shared_modules(shared)
        joined = join_units(module, [unit for unit in units if unit is not module], min_numel, shared)
        # All of them before the first, so that a chunk that is refused is left as it was.
        inner_first = [*([part] for part in reversed(shared)), *reversed(joined), [module]]
        if shared:
            # A shared module may be inside a unit and have units inside: what contains another has more modules.
            inner_first.sort(key=lambda run: sum(1 for member in run for _ in member.modules()))
        low_bits, runs = LowBitUnits(module, config), []
        for run, has_experts in units_with_experts(inner_first):
            of_run = of_experts if has_experts else options
            of_run = keep_gathered(of_run) if run[0] in shared else of_run
            runs.append((run, low_bits.options_of(run, of_run)))
        low_bits.check(options, config.pipeline_model_parallel_size)
        check_shardable([unit for run, _ in runs for unit in run], options["mixed_precision_policy"])
        drop_spare_weights(module)
        set_apart(find_shared_weights(module, pg_collection))
        with fully_shard_context(self.device, **options_of_all) as context:
            for run, of_run in runs:
                unit = run[0] if len(run) == 1 else list(run)
                fully_shard(unit, **of_run, register_hooks=not is_planned)
        self.fsdp_context: FsdpContext = context
        self._driver = OverlapDriver(context, module) if is_planned else None
        self.shared_weights = find_shared_weights(module, pg_collection)
        check_equal_shards(self.shared_weights, pg_collection)
        # Walking all parameters costs more than the few of them do at the end of each step.
        self.seen_in_parts = find_seen_in_parts(module, config)
        for parameter in self.module.parameters():
            parameter.__fsdp_param__ = True

    @property
    def model_group(self) -> torch.distributed.ProcessGroup:
        """The process group of all ranks whose gradients make one norm."""
        size = self.config.tensor_model_parallel_size * self.config.pipeline_model_parallel_size
        return whole_model_group(self._pg_collection, size)

    def fsdp_units(self) -> Iterator[FsdpModule]:
        """Yield the chunk's units in forward order."""
        for unit in self.fsdp_context.forward_order:
            assert isinstance(unit, FsdpModule)
            yield unit

    # --- microbatches and gradients -------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark backwards inside as microbatches that others follow.

        Their gradients are reduced over the axes that shard accumulating gradients (ZeRO-2 and -3), and otherwise stay
        each rank's own sum until the last microbatch.
        """
        with microbatch(self.fsdp_context, is_last=False):
            yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Start what earlier microbatches have left to reduce; the others' reductions start as their backwards end.

        Every rank must call it, as with `finish_grad_sync`.
        """
        self.fsdp_context.finish_gradients()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Make all gradients final, whichever microbatches were inside `no_sync`, and check them.

        Args:
            force_all_reduce: ask for whole gradients on every rank, as replicated optimizers have them in any case.

        Raises:
            NotImplementedError: `force_all_reduce` with gradients that exist in shards only.
            RuntimeError: `check_for_nan_in_grad` is set and a gradient, on any rank, is not finite.
        """
        if force_all_reduce and not self._has_whole_gradients:
            raise NotImplementedError(
                "finish_grad_sync force_all_reduce: expected False where the optimizer is sharded, got True; gradients "
                "exist in shards only. Use full_tensor() on the gradients that you need, or "
                "--data-parallel-sharding-strategy no_shard."
            )
        self.fsdp_context.finish_gradients()
        if self.ddp_config.check_for_nan_in_grad:
            self._check_gradients()

    def _check_gradients(self) -> None:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        is_bad = ~torch.isfinite(grad_norm(parameters))
        if self._has_replicas:
            # A norm is summed over shards, so that a replica alone would not know what has happened to another.
            votes = is_bad.to(self.device, torch.int32)
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group=self.model_group)
            is_bad = votes.bool()
        if not bool(is_bad):
            return
        bad = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad.to_local()).all())
        ]
        raise RuntimeError(
            f"gradients: expected finite values, got nan or inf on this rank in {bad or 'no parameter'} (other ranks "
            "name theirs). Check data and learning rate, or pass --no-check-for-nan-in-loss-and-grad to go on."
        )

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all main gradients of this rank by a number or a 0-d tensor."""
        with torch.no_grad():
            for unit in self.fsdp_units():
                for group in unit.parameter_groups:
                    if group.gradients is not None:
                        group.gradients.scale(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Clear all gradients, those that wait for a reduction included; the next backward overwrites them.

        Their memory is freed, but with `megatron_fsdp_static_gradients` or `megatron_fsdp_trace_pool`.
        """
        if self._driver is not None:
            self._driver.begin_step()
        for unit in self.fsdp_units():
            for group in unit.parameter_groups:
                group.clear_gradients()

    # --- parameters -----------------------------------------------------------------------------------------------

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Do nothing: every unit gathers its weights when forward or backward comes to it.

        Weights that are whole on every rank are refreshed from the optimizer's shards in the same way, unit by unit and
        one ahead. Parameters read between steps are main weights, which are current.
        """

    def synchronize_param_gather(self) -> None:
        """Do nothing, as `start_param_sync`."""

    def enable_forward_pre_hook(self) -> None:
        """Do nothing: the hooks that gather weights are part of every unit."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Do nothing, as `enable_forward_pre_hook`; a unit that runs always has current weights."""

    def stop_communication(self) -> None:
        """Return all units to sharded parameters, e.g. before parameters are read."""
        self.fsdp_context.reshard_idle_units()

    def free_overlap_buffers(self) -> None:
        """Free weights that were gathered ahead, e.g. before a checkpoint is written."""
        self.fsdp_context.reshard_idle_units()

    def broadcast_params(self) -> None:
        """Refuse: shards differ between ranks by design.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "broadcast_params: expected parameters made equal before wrapping, got a call after it, when every rank "
            "holds another shard. Initialise all data-parallel ranks with one seed (no --data-parallel-random-init)."
        )

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Refuse: gradients are shards, and stay on the device.

        Raises:
            NotImplementedError: always.
        """
        raise _no_offload("offload_grad_buffers")

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Refuse, as `offload_grad_buffers`.

        Raises:
            NotImplementedError: always.
        """
        raise _no_offload("restore_grad_buffers")

    def reset_param_sync_dispatch_state(self) -> None:
        """Do nothing: each unit knows by itself which weights it has gathered (megatron-core 0.19 calls this)."""

    def sync_rng_states_across_tp_group(self) -> None:
        """Do nothing: initial values were computed before the chunk was wrapped."""

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return main weights and buffers as ``fsdp_dtensor`` checkpoints name them: ``module.`` before every name.

        Gated linear units come as two tensors, ``..._w`` and ``..._v``. All share memory with the model, so that what
        torch.distributed.checkpoint reads into them is loaded.
        """
        tensors = model_keys(self)
        return {prefix + name: tensor if keep_vars else tensor.detach() for name, tensor in tensors.items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Load values in place, the next forward uses them: the module's own, or what a checkpoint was read into.

        Args:
            state_dict: of the wrapped module, or as `state_dict_for_save_checkpoint` names it.
            strict: refuse missing and unexpected names.
        """
        self.module.load_state_dict(join_gated(state_dict, self), strict=strict)


def _no_offload(method: str) -> NotImplementedError:
    return NotImplementedError(
        f"{method}: expected gradients to stay on the device, got a call to move them; not supported yet. Free them "
        "with zero_grad_buffer() between steps."
    )


def is_fully_sharded(model_chunk: nn.Module) -> bool:
    """Return whether a model chunk is wrapped by FSDP v2."""
    return isinstance(model_chunk, FullyShardedDataParallel)


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
