# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon beside the one that megatron-core has with emerging_optimizers, where that package is installed."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core import parallel_state
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.mcore_muon import Plain, train_beside_plain

HAS_BOTH = (
    find_spec("emerging_optimizers") is not None
    and find_spec("megatron.core.optimizer.emerging_optimizers") is not None
)
pytestmark = pytest.mark.skipif(not HAS_BOTH, reason="needs megatron-core 0.19 and the package emerging_optimizers")

GQA = "--group-query-attention --num-query-groups 2 --muon-nesterov --muon-extra-scale-factor 0.2"
TP2 = "--tensor-model-parallel-size 2"


class OfMegatronCore(Plain):
    """Steps this rank's pieces of whole matrices with megatron-core's `TensorParallelMuon`."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

        group = optimizer.optimizer.matrix_groups[0]
        self.pieces: dict[int, Any] = {}
        for parameter, of in self._parameters():
            if of["algorithm"] == "muon":
                piece: Any = torch.nn.Parameter(self.weights[id(parameter)])
                cut = parameter.geometry.model_cut
                piece.partition_dim = -1 if cut is None else cut.dim
                piece.is_qkv = parameter.geometry.fqn.endswith("linear_qkv.weight")
                self.pieces[id(parameter)] = piece
        shapes = next((of["parts"] for of in optimizer.optimizer.matrix_groups if of["parts"]), None)
        tp = parallel_state.get_tensor_model_parallel_group()
        self.muon = TensorParallelMuon(
            list(self.pieces.values()),
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            split_qkv=shapes is not None,
            is_qkv_fn=lambda parameter: parameter.is_qkv,
            qkv_split_shapes=shapes,
            fp32_matmul_prec=group["precision"],
            coefficient_type=group["coefficients"],
            num_ns_steps=group["num_ns_steps"],
            scale_mode=group["scale_mode"],
            extra_scale_factor=group["extra_scale_factor"],
            pg_collection=SimpleNamespace(tp=tp, expt_tp=tp, gtp_remat=None, expt_gtp_remat=None),
            tp_mode="duplicated" if group["joins_pieces"] else "blockwise",
        )

    def _whole(self, value: Any, parameter: Any, group: dict[str, Any]) -> torch.Tensor:
        return super()._whole(value, parameter, {**group, "joins_pieces": False})

    def _step_matrix(self, key: int, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Step one matrix: the others have no gradient."""
        for mine in self.muon.param_groups:
            mine.update(lr=group["lr"], weight_decay=group["weight_decay"])
        self.pieces[key].grad = gradient
        self.muon.step()
        self.pieces[key].grad = None
        self.momenta[key] = self.muon.state[self.pieces[key]]["momentum_buffer"]

    def require_equal(self, optimizer: Any) -> None:
        """Require momenta bit by bit, and weights but for the last places.

        It multiplies an update by its scale and by the rate, and adds, in other roundings.
        """
        for parameter, group in self._parameters():
            name, key = parameter.geometry.fqn, id(parameter)
            if group["algorithm"] == "muon":
                momentum = optimizer.optimizer.state[parameter]["momentum_buffer"]
                assert torch.equal(self._whole(momentum, parameter, group), self.momenta[key]), name
                found = self._whole(parameter, parameter, group)
                torch.testing.assert_close(found, self.weights[key], rtol=1e-6, atol=1e-6, msg=name)
                # The run goes on from equal weights, so that nothing adds up.
                self.weights[key].copy_(found)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, GQA),
        (2, f"{GQA} --muon-fp32-matmul-prec high --muon-scale-mode unit_rms_norm --muon-num-ns-steps 7"),
        (2, "--muon-no-split-qkv --muon-coefficient-type polar_express --muon-num-ns-steps 10"),
        (2, f"{GQA} {TP2}"),
        (2, f"{GQA} {TP2} --muon-tp-mode duplicated"),
        (4, f"{GQA} {TP2} --muon-tp-mode duplicated --muon-scale-mode shape_scaling --muon-coefficient-type simple"),
    ],
    ids=lambda value: str(value).replace("--", ""),
)
def test_steps_are_those_of_megatron_core(world_size: int, flags: str) -> None:
    run_ranks(world_size, train_beside_plain, flags, 10, OfMegatronCore)
