# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""An optimizer that steps on `decoupled_grad`, since TransformerEngine's is not installed everywhere."""

from __future__ import annotations

from typing import Any

import torch


class DecoupledAdamW(torch.optim.AdamW):
    """AdamW that reads and clears `decoupled_grad`, in whatever dtype it has, as TransformerEngine's FusedAdam can."""

    def __init__(self, params: Any, *, use_decoupled_grad: bool = True, **settings: Any) -> None:
        self.use_decoupled_grad = use_decoupled_grad
        self.seen: set[torch.dtype] = set()
        self.settings = {key: settings.pop(key) for key in list(settings) if "dtype" in key or "master" in key}
        settings.pop("adam_w_mode", None)
        super().__init__(params, **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            assert parameter.grad is None
            if parameter.decoupled_grad is not None:
                self.seen.add(parameter.decoupled_grad.dtype)
                parameter.grad = parameter.decoupled_grad.to(parameter.dtype)
        super().step()
        for parameter in parameters:
            parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.decoupled_grad.zero_()
