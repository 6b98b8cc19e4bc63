# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""What an `OptimizerConfig` means for FSDP v2: the base optimizer, the loss scaler, and which fields are refused.

It knows no model chunks and steps nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron.core import optimizer as mcore_optimizer

_UNSUPPORTED = (
    "optimizer_cpu_offload",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "optimizer_cuda_graph",
    "use_layer_wise_distributed_optimizer",
)
_OPTIMIZERS = ("adam", "sgd", "muon")


@dataclass
class FullyShardedOptimizerConfig(OptimizerConfig):
    """megatron-core's config with further options of Muon, which has no effect with another optimizer.

    Attributes:
        muon_coefficient_type: coefficients of Newton-Schulz steps; a field of newer releases of megatron-core.
        muon_split_gate_up: orthogonalise the two matrices of a gated MLP's first layer one by one.
        muon_router_adam: leave the routers of experts to Adam.
    """

    muon_coefficient_type: str = "quintic"
    muon_split_gate_up: bool = False
    muon_router_adam: bool = False


def check_config(config: OptimizerConfig) -> None:
    """Refuse fields that FSDP v2 does not support.

    Raises:
        NotImplementedError: one of them is set, or the optimizer is another.
    """
    for name in _UNSUPPORTED:
        if getattr(config, name, False):
            raise NotImplementedError(
                f"OptimizerConfig.{name}: expected False, got True; not supported with Megatron-FSDP v2 yet. "
                f"Drop --{name.replace('_', '-')}."
            )
    check_optimizer(config.optimizer)
    if config.overlap_param_gather_with_optimizer_step:
        raise NotImplementedError(
            "OptimizerConfig.overlap_param_gather_with_optimizer_step: expected False with Megatron-FSDP v2, got True. "
            "There is no gather for it to start: the step writes shards, which forward gathers unit by unit. "
            "Drop --overlap-param-gather-with-optimizer-step."
        )
    threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
    if math.isfinite(threshold):
        raise NotImplementedError(
            f"OptimizerConfig.grad_norm_skip_threshold: expected inf, got {threshold}; not supported with "
            "Megatron-FSDP v2 yet. Drop --grad-norm-skip-threshold."
        )
    if config.use_precision_aware_optimizer and not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        raise NotImplementedError(
            f"OptimizerConfig.fp8_recipe: expected None or 'delayed' with use_precision_aware_optimizer, got "
            f"{config.fp8_recipe!r}; not supported with Megatron-FSDP v2 yet. Drop one of the two."
        )


def check_optimizer(name: str) -> None:
    """Refuse the name of an optimizer that FSDP v2 does not have.

    Raises:
        NotImplementedError: it is one.
    """
    if name == "dist_muon":
        raise NotImplementedError(
            "OptimizerConfig.optimizer: expected one of 'adam', 'sgd' and 'muon' with Megatron-FSDP v2, got "
            "'dist_muon'. Use 'muon', which shards what it keeps and computes each matrix on one rank."
        )
    if name not in _OPTIMIZERS:
        raise NotImplementedError(
            "OptimizerConfig.optimizer: expected one of 'adam', 'sgd' and 'muon' with Megatron-FSDP v2, got "
            f"{name!r}; others, such as 'adaptive_muon', 'lion' and 'soap', are not supported yet. Use one "
            "of the three."
        )


def check_precision_aware(config: OptimizerConfig, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a base optimizer that does not read ``decoupled_grad``, and main weights of another dtype than configured.

    Raises:
        ValueError: either.
    """
    takes = [getattr(optimizer, "use_decoupled_grad", False)]
    takes += [group.get("use_decoupled_grad", False) for group in optimizer.param_groups]
    if not any(takes):
        raise ValueError(
            "OptimizerConfig.use_precision_aware_optimizer: expected a base optimizer with use_decoupled_grad=True, "
            f"got {type(optimizer).__name__}, which reads .grad. Use TransformerEngine's FusedAdam, or drop "
            "--use-precision-aware-optimizer."
        )
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    if others := dtypes - {config.main_params_dtype}:
        raise ValueError(
            "OptimizerConfig.main_params_dtype: expected the dtype of the main weights, got "
            f"{config.main_params_dtype} for weights in {sorted(map(str, others))}. Set "
            "megatron_fsdp_main_params_dtype of the data-parallel config, which decides it, to the same."
        )


def check_gradient_dtypes(config: OptimizerConfig, dtypes: set[torch.dtype]) -> None:
    """Refuse gradients of another dtype than a precision-aware optimizer is configured for; alike on all ranks.

    Raises:
        ValueError: there are some.
    """
    if others := dtypes - {config.main_grads_dtype}:
        raise ValueError(
            f"OptimizerConfig.main_grads_dtype: expected the dtype of the gradients, got {config.main_grads_dtype} for "
            f"gradients in {sorted(map(str, others))}. Set megatron_fsdp_main_grads_dtype of the data-parallel config, "
            "which decides it, to the same."
        )


def base_optimizer(
    config: OptimizerConfig, param_groups: Sequence[dict[str, Any]], device: torch.device
) -> torch.optim.Optimizer:
    """Return the adam or sgd that megatron-core would use: TransformerEngine's or Apex's if installed, else torch's.

    Raises:
        ValueError: a precision-aware optimizer without one that takes ``decoupled_grad``.
    """
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if mcore_optimizer.USING_PYTORCH_OPTIMIZER and device.type != "cpu":
        settings["fused"] = True
    assert config.optimizer in ("adam", "sgd"), "check_config lets but one other pass, which is made elsewhere"
    if config.use_precision_aware_optimizer:
        settings.update(_precision_aware_settings(config))
    if config.optimizer == "sgd":
        return mcore_optimizer.SGD(param_groups, momentum=config.sgd_momentum, **settings)
    settings.update(betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    if mcore_optimizer.USING_PYTORCH_OPTIMIZER:
        adam = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        # Its step count lies on the device, where a CUDA graph can advance it; a fused step keeps it there anyway.
        return adam(param_groups, capturable="fused" in settings, **settings)
    return mcore_optimizer.Adam(param_groups, adam_w_mode=config.decoupled_weight_decay, **settings)


def _precision_aware_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return what TransformerEngine's FusedAdam is told; main weights are the runtime's own, in their own dtype."""
    is_able = config.optimizer == "adam" and "use_decoupled_grad" in inspect.signature(mcore_optimizer.Adam).parameters
    if not is_able:
        kind = (mcore_optimizer.Adam if config.optimizer == "adam" else mcore_optimizer.SGD).__name__
        raise ValueError(
            "OptimizerConfig.use_precision_aware_optimizer: expected an Adam with use_decoupled_grad, got "
            f"{kind}. Install TransformerEngine, or drop --use-precision-aware-optimizer."
        )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if (dtype := getattr(config, name)) not in (torch.float32, torch.bfloat16):
            raise NotImplementedError(
                f"OptimizerConfig.{name}: expected torch.float32 or torch.bfloat16 with Megatron-FSDP v2, got {dtype}, "
                "whose scales TransformerEngine keeps to itself, so that checkpoints would lack them. Set "
                f"--{name.replace('_', '-')} to one of the two."
            )
    return {
        "use_decoupled_grad": True,
        "master_weights": False,
        "exp_avg_dtype": config.exp_avg_dtype,
        "exp_avg_sq_dtype": config.exp_avg_sq_dtype,
    }


def grad_scaler_of(config: OptimizerConfig) -> MegatronGradScaler | None:
    """Return the loss scaler: constant with `loss_scale`, else dynamic with fp16, else none."""
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
