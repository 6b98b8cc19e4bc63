# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The losses that layers add to the model's, for the log; gradients have them from megatron-core's layers."""

import argparse

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.core import parallel_state
from megatron.pretrain.stages import from_last_stage

_LOADS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def take_added_losses(args: argparse.Namespace) -> dict[str, float]:
    """Return this iteration's losses by Megatron-LM's names, without their weights, and forget them.

    Every rank calls it.

    Args:
        args: Validated arguments.

    Returns:
        Of routers, then of layers that predict further tokens, by depth.
    """
    return _of_routers(args) | _of_predictions(args)


def _of_predictions(args: argparse.Namespace) -> dict[str, float]:
    """Return means over microbatches and data-parallel ranks, which the last stage knows."""
    if args.mtp_num_layers is None:
        return {}
    found: dict[str, torch.Tensor] = {}
    MTPLossLoggingHelper.track_mtp_metrics(
        loss_scale=1 / get_num_microbatches(),
        iteration=0,  # for writers, of which there are none
        writer=None,
        total_loss_dict=found,
    )
    names = [f"mtp_{depth + 1} loss" for depth in range(args.mtp_num_layers)]
    values = torch.stack([found[name] for name in names]) if found else torch.empty(len(names))
    return dict(zip(names, from_last_stage(values.to(torch.cuda.current_device())).tolist(), strict=True))


def _of_routers(args: argparse.Namespace) -> dict[str, float]:
    """Return means over layers, microbatches and data-parallel ranks."""
    names = []
    if args.moe_aux_loss_coeff > 0:
        names.append(_LOADS[args.moe_router_load_balancing_type])
    if args.moe_z_loss_coeff:
        names.append("z_loss")
    if not names:
        return {}
    found: dict[str, torch.Tensor] = {}
    moe_utils.track_moe_metrics(
        loss_scale=1 / get_num_microbatches(),
        iteration=0,  # for writers, of which there are none
        total_loss_dict=found,
        force_initialize=True,
        track_names=names,
        num_layers=args.num_layers,
        mtp_num_layers=args.mtp_num_layers,
    )
    values = torch.stack([found[name].double() for name in names])
    # megatron-core takes the mean over ranks for some of them only; over equal values it changes nothing.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(values, group=group)
    return dict(zip(names, (values / group.size()).tolist(), strict=True))
