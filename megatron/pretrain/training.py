# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Trains and evaluates, with megatron-core's schedules and optimizers.

The loop treats the model as any of megatron-core's data-parallel wrappers; what is sharded, when
weights are gathered and when gradients are reduced is the wrapper's affair.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.pretrain.added_losses import take_added_losses
from megatron.pretrain.checkpointing import Checkpoints
from megatron.pretrain.context_parallel import cut_sequences
from megatron.pretrain.data import Batch, DataIterators
from megatron.pretrain.full_iteration import FullIteration, IterationResult, require_gpu
from megatron.pretrain.log import StepResult, TrainingLog
from megatron.pretrain.model import DTYPES, build_model
from megatron.pretrain.muon_flags import muon_fields
from megatron.pretrain.precision_flags import compute_dtype, optimizer_dtypes
from megatron.pretrain.profiling import ScheduleProfiler
from megatron.pretrain.stages import iterators_of, losses_on_every_stage, seed_of_stage


@dataclass(frozen=True)
class TrainState:
    """All that a run holds on this rank."""

    args: argparse.Namespace
    chunks: list[MegatronModule]
    optimizer: Any
    scheduler: OptimizerParamScheduler
    data: DataIterators
    log: TrainingLog
    first_iteration: int = 1
    graph: FullIteration | None = None


def build_train_state(
    args: argparse.Namespace, data: DataIterators, log: TrainingLog, iteration: int = 0
) -> TrainState:
    """Build model, optimizer and schedules; called on every rank.

    Args:
        args: Validated arguments.
        data: This rank's iterators.
        log: Where the loop reports.
        iteration: The last one that has been trained.
    """
    if args.cuda_graph_impl == "full_iteration":
        require_gpu()
    _seed_everything(seed_of_stage(args.seed), args.cuda_graph_impl == "full_iteration")
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(
        rank=torch.distributed.get_rank(),
        rampup_batch_size=None,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )
    chunks = build_model(args)
    optimizer = _build_optimizer(args, chunks)
    if args.optimizer == "muon":
        log.print(f"What Muon steps on this rank:\n{optimizer.table}")
    scheduler = _build_scheduler(args, optimizer)
    config = get_model_config(chunks[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = _finalize_function(args)
    if args.overlap_grad_reduce or args.use_megatron_fsdp_v2:
        # Without it the wrapper reduces with every microbatch.
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    graph = None
    if args.cuda_graph_impl == "full_iteration":
        run = partial(_run_iteration, args, chunks, optimizer)
        graph = FullIteration(chunks[0], optimizer, run, args.cuda_graph_warmup_steps)
    return TrainState(args, chunks, optimizer, scheduler, data, log, iteration + 1, graph)


def train(state: TrainState, checkpoints: Checkpoints, profiler: ScheduleProfiler) -> bool:
    """Run all iterations, with an evaluation after every --eval-interval and a checkpoint after every --save-interval.

    Returns:
        Whether all of --train-iters are done, and not only those up to --exit-interval.
    """
    args, log = state.args, state.log
    for chunk in state.chunks:
        chunk.train()
    log.restart_clock()
    for iteration in range(state.first_iteration, args.train_iters + 1):
        checkpoints.poll()
        with profiler.step():
            result = train_step(state)
        log.record_step(iteration, result)
        if iteration % args.log_interval == 0:
            log.write_interval(iteration, result)
        if iteration % args.eval_interval == 0:
            started_s = time.perf_counter()
            report_evaluation(state, iteration, state.data.valid, f"iteration {iteration}")
            log.exclude(time.perf_counter() - started_s)
        ends = args.exit_interval is not None and iteration % args.exit_interval == 0
        if checkpoints.is_due(iteration) or ends:
            started_s = time.perf_counter()
            checkpoints.save(state, iteration)
            log.exclude(time.perf_counter() - started_s)
        if ends:
            log.print(f"exiting program at iteration {iteration}")
            return iteration == args.train_iters
    return True


def train_step(state: TrainState) -> StepResult:
    """Run one iteration: all microbatches, then one update of the weights.

    Returns:
        Numbers that are equal on all ranks.
    """
    args, optimizer = state.args, state.optimizer
    if torch.cuda.is_available():
        _round_learning_rates(optimizer)
    if state.graph is None:
        result = _run_iteration(args, state.chunks, optimizer, state.data.train)
    else:
        result = state.graph([next(state.data.train) for _ in range(get_num_microbatches())])
        if args.check_for_nan_in_loss_and_grad:
            _check_losses(result.losses)
            _check_norm(result.grad_norm)
    if result.is_updated:
        state.scheduler.step(increment=args.global_batch_size)
    total, num_tokens = _sum_over_ranks(result.losses)
    return StepResult(
        lm_loss=total / num_tokens if num_tokens else math.nan,
        grad_norm=_counted(result.grad_norm),
        num_zeros=_counted(result.num_zeros) if args.log_num_zeros_in_grad else result.num_zeros,
        loss_scale=float(optimizer.get_loss_scale()),
        learning_rate=_current_learning_rate(optimizer),
        is_skipped=not result.is_updated,
        added_losses=take_added_losses(args),
    )


def _run_iteration(
    args: argparse.Namespace, chunks: list[MegatronModule], optimizer: Any, data: Iterator[Batch]
) -> IterationResult:
    """Run all microbatches and update the weights; this is what a CUDA graph holds."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = _run_schedule(args, chunks, data, forward_only=False)
    is_updated, grad_norm, num_zeros = optimizer.step()
    return IterationResult(losses, is_updated, grad_norm, num_zeros)


def report_evaluation(
    state: TrainState,
    iteration: int,
    data: Iterator[Batch] | None,
    place: str,
    *,
    is_test: bool = False,
) -> None:
    """Evaluate --eval-iters global batches and log the mean loss; without data, do nothing.

    Args:
        state: The run.
        iteration: After which the evaluation takes place.
        data: This rank's microbatches.
        place: For the log line.
        is_test: Whether it is the test set.
    """
    if data is None:
        return
    for chunk in state.chunks:
        chunk.eval()
    total = num_tokens = 0.0
    with torch.no_grad():
        for _ in range(state.args.eval_iters):
            part, part_tokens = _sum_over_ranks(_run_schedule(state.args, state.chunks, data, forward_only=True))
            total += part
            num_tokens += part_tokens
    for chunk in state.chunks:
        chunk.train()
    lm_loss = total / num_tokens if num_tokens else math.nan
    state.log.write_validation(iteration, lm_loss, place, is_test=is_test)


def _run_schedule(
    args: argparse.Namespace, chunks: list[MegatronModule], data: Iterator[Batch], *, forward_only: bool
) -> torch.Tensor:
    """Run all microbatches; return [microbatches, 2], the sum of the losses and the number of tokens of each.

    Raises:
        RuntimeError: With pipeline stages, on all of them: a loss is no number.
    """
    found: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, args),
        data_iterator=iterators_of(data, len(chunks)),
        model=chunks,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    losses = [loss["lm loss"] for loss in found]
    if args.pipeline_model_parallel_size == 1:
        return torch.stack(losses)
    shared = losses_on_every_stage(losses, get_num_microbatches())
    if args.check_for_nan_in_loss_and_grad:
        _check_losses(shared)
    return shared


def _forward_step(
    args: argparse.Namespace, data: Iterator[Batch], model: MegatronModule, return_schedule_plan: bool = False
) -> Any:
    """Run one microbatch's forward, or return the plan by which a schedule runs it in parts, and the loss function."""
    batch = cut_sequences(next(data), parallel_state.get_context_parallel_group())
    run = model.build_schedule_plan if return_schedule_plan else model
    # Layers that predict further tokens look at other labels of the same sequence, of which the mask holds as well.
    further = {} if args.mtp_num_layers is None else {"loss_mask": batch["loss_mask"]}
    mask = batch.get("attention_mask")
    token_losses = run(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"], **further)
    return token_losses, partial(_sum_losses, args, batch["loss_mask"])


def _sum_losses(args: argparse.Namespace, mask: torch.Tensor, token_losses: torch.Tensor) -> Any:
    """Sum the losses of one microbatch; the schedule divides by the number of tokens.

    Returns:
        Sum, number of unmasked tokens, and both again for the log.

    Raises:
        RuntimeError: The loss is no number.
    """
    mask = mask.view(-1).float()
    total = torch.sum(token_losses.float().view(-1) * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    # With a graph the host sees losses once the iteration is over; a stage that raised would let the others wait.
    is_seen = args.cuda_graph_impl == "none" and args.pipeline_model_parallel_size == 1
    if args.check_for_nan_in_loss_and_grad and is_seen:
        _check_losses(total[None, None])
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.to(total.dtype)])}


def _counted(value: Any) -> float | None:
    """Return a statistic as a number; a skipped update has none."""
    return None if value is None else float(value)


def _check_losses(losses: torch.Tensor) -> None:
    """Refuse sums of losses, [microbatches, ...], that are no numbers; waits for the device."""
    found = losses[:, 0]
    if not bool(torch.isfinite(found).all()):
        raise RuntimeError(
            f"Loss: expected a finite sum, got {found[~torch.isfinite(found)][0].item()} on rank "
            f"{torch.distributed.get_rank()} for the current "
            "microbatch. Lower --lr or check the data; --no-check-for-nan-in-loss-and-grad goes on "
            "regardless."
        )


def _check_norm(grad_norm: Any) -> None:
    """Refuse a gradient norm that is no number; waits for the device."""
    if grad_norm is not None and not math.isfinite(grad_norm):
        raise RuntimeError(
            f"Gradient norm: expected a finite one, got {float(grad_norm)}; the weights have been updated with it, as "
            "a CUDA graph does all of an iteration. Go on from a checkpoint with a lower --lr, or without "
            "--cuda-graph-impl, which names the parameters; --no-check-for-nan-in-loss-and-grad goes on regardless."
        )


def _sum_over_ranks(losses: torch.Tensor) -> tuple[float, float]:
    """Add up [sum of losses, number of tokens] over microbatches and data-parallel ranks."""
    pair = losses.double().sum(dim=0)
    torch.distributed.all_reduce(pair, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    total, num_tokens = pair.tolist()
    return total, num_tokens


def _seed_everything(seed: int, is_captured: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    # States that a graph can hold give the same numbers as others.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=is_captured)


def _one_or_all(functions: list[Any]) -> Any:
    """Return what a schedule calls: the function of a single chunk, or a list."""
    return functions[0] if len(functions) == 1 else functions


def _build_optimizer(args: argparse.Namespace, chunks: list[MegatronModule]) -> Any:
    kind: type[OptimizerConfig] = OptimizerConfig
    if args.use_megatron_fsdp_v2:
        from megatron.core.optimizer.fully_sharded_optimizer import get_megatron_optimizer
        from megatron.core.optimizer.fully_sharded_optimizer_config import FullyShardedOptimizerConfig as kind
    else:
        from megatron.core.optimizer import get_megatron_optimizer
    config = kind(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        sgd_momentum=args.sgd_momentum,
        clip_grad=args.clip_grad,
        log_num_zeros_in_grad=args.log_num_zeros_in_grad,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=DTYPES[compute_dtype(args)],
        loss_scale=args.loss_scale,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        overlap_param_gather=args.overlap_param_gather,
        **_precision_aware(args),
        **muon_fields(args, kind),
    )
    return get_megatron_optimizer(config, chunks)


def _precision_aware(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a precision-aware optimizer, which megatron-core ties to its distributed one."""
    if not args.use_precision_aware_optimizer:
        return {"use_distributed_optimizer": args.use_distributed_optimizer}
    dtypes = {field: DTYPES[name] for field, name in optimizer_dtypes(args).items()}
    return {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, **dtypes}


def _build_scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    batch = args.global_batch_size
    decay_steps = args.lr_decay_iters * batch
    if args.lr_warmup_fraction is None:
        warmup_steps = args.lr_warmup_iters * batch
    else:
        warmup_steps = args.lr_warmup_fraction * decay_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style=args.weight_decay_incr_style,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        wsd_decay_steps=None if args.lr_wsd_decay_iters is None else args.lr_wsd_decay_iters * batch,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def _finalize_function(args: argparse.Namespace) -> Any:
    """Return what makes gradients final at the end of a step."""
    if args.use_megatron_fsdp_v2:
        from megatron.core.distributed.fsdp import mcore_fsdp_v2_finalize

        return mcore_fsdp_v2_finalize.finalize_model_grads
    return finalize_model_grads


def _round_learning_rates(optimizer: Any) -> None:
    """Round to float32, in which a CUDA graph reads learning rates: a run has the same numbers with and without one."""
    for group in optimizer.param_groups:
        group["lr"] = float(np.float32(group["lr"]))


def _current_learning_rate(optimizer: Any) -> float:
    return float(next(group["lr"] for group in optimizer.param_groups if group.get("default_config", True)))
