# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon beside a loop over whole tensors, in test workers that train as pretrain_gpt.py does in any layout."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

from megatron.pretrain import data, main, training
from megatron.pretrain.checkpointing import Checkpoints
from megatron.pretrain.log import TrainingLog
from tests.unit_tests import mcore

TINY = (
    "--use-megatron-fsdp-v2 --optimizer muon --num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 "
    "--vocab-size 31 --make-vocab-size-divisible-by 1 --mock-data --num-workers 0 --micro-batch-size 1 "
    "--global-batch-size 4 --ffn-hidden-size 24 --train-iters 10 --eval-iters 0 --lr 1e-2 --lr-warmup-iters 2 "
    "--lr-warmup-init 1e-3 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.3"
)
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def read_args(flags: str) -> argparse.Namespace:
    """Return the arguments of a line on this rank's world."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    args = main.read_command(flags.split(), {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}).args
    args.transformer_impl = "local"
    return args


@contextmanager
def train_state(flags: str) -> Iterator[Any]:
    """Build, and load, what pretrain_gpt.py trains; its iterations run inside. Save it afterwards, with --save."""
    args = read_args(flags)
    mcore.start(
        args.num_distributed_optimizer_instances,
        args.expert_model_parallel_size,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    with pytest.MonkeyPatch.context() as patch, mcore.cpu_shim():
        patch.setattr(MockGPTLowLevelDataset, "size", 100)  # Shuffling 100,000 documents takes most of the time.
        log = TrainingLog(args, is_writer=False)
        checkpoints = Checkpoints(args, log)
        iteration = checkpoints.open()
        state = training.build_train_state(args, data.build_iterators(args, iteration), log, iteration)
        checkpoints.load(state)
        for chunk in state.chunks:
            chunk.train()
        yield state
        checkpoints.save(state, args.exit_interval or args.train_iters)


def orthogonalized(matrix: torch.Tensor, precision: str = "medium") -> torch.Tensor:
    """Return five quintic Newton-Schulz steps of a matrix, in the same operations as the optimizer's."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / max(float(torch.linalg.vector_norm(x)), 1e-7)
    x = x.bfloat16() if precision == "medium" else x
    for a, b, c in QUINTIC:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).float()


def parts_of(matrix: torch.Tensor, parts: tuple[int, ...]) -> list[torch.Tensor]:
    """Return views [repetitions, rows, columns] of the matrices fused in one, which `reshape` makes matrices."""
    return list(matrix.view(-1, sum(parts), matrix.shape[1]).split(list(parts), 1)) if parts else [matrix[None]]


class Plain:
    """Whole weights and momenta, stepped in this process alone by the gradients that the optimizer gets.

    Of a matrix that tensor parallelism has cut, and that is orthogonalised piece by piece, each rank has its piece.
    """

    def __init__(self, optimizer: Any) -> None:
        self.groups = optimizer.param_groups
        self.weights = {id(p): self._whole(p, p, group) for p, group in self._parameters()}
        self.momenta: dict[int, torch.Tensor] = {}
        rest = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [torch.nn.Parameter(self.weights[id(p)]) for p in group["params"]],
            }
            for group in self.groups
            if group["algorithm"] != "muon"
        ]
        self.rest = torch.optim.AdamW(rest) if rest else None

    def _parameters(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for group in self.groups:
            for parameter in group["params"]:
                yield parameter, group

    def _whole(self, value: Any, parameter: Any, group: dict[str, Any]) -> torch.Tensor:
        local = value.to_local() if hasattr(value, "to_local") else value
        full = parameter.geometry.gather(local.detach())
        cut = parameter.geometry.model_cut
        return full.clone() if cut is None or group.get("joins_pieces", False) else cut.take(full)

    def step(self) -> None:
        """Step by the gradients that the parameters have now."""
        gradients = {id(p): self._whole(p.grad, p, group) for p, group in self._parameters()}
        for parameter, group in self._parameters():
            if group["algorithm"] == "muon":
                self._step_matrix(id(parameter), gradients[id(parameter)], group)
        if self.rest is None:
            return
        others = [group for group in self.groups if group["algorithm"] != "muon"]
        for mine, theirs in zip(self.rest.param_groups, others, strict=True):
            mine.update(lr=theirs["lr"], weight_decay=theirs["weight_decay"])
            for weight, parameter in zip(mine["params"], theirs["params"], strict=True):
                weight.grad = gradients[id(parameter)]
        self.rest.step()

    def _step_matrix(self, key: int, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.momenta.setdefault(key, torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - group["momentum"])
        source = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        lr = torch.tensor(group["lr"], dtype=torch.float32)
        for weight, part in zip(
            parts_of(self.weights[key], group["parts"]), parts_of(source, group["parts"]), strict=True
        ):
            matrix = part.reshape(-1, part.shape[-1])
            scale = max(matrix.shape) ** 0.5 * group["extra_scale_factor"]
            update = orthogonalized(matrix, group["precision"]) * scale * lr.item()
            weight *= (1 - lr * group["weight_decay"]).item()
            weight -= update.view(weight.shape)

    def require_equal(self, optimizer: Any) -> None:
        """Require these weights and momenta of an optimizer; those of Adam may round otherwise in the last place.

        Vectorised kernels round multiply-adds otherwise than those for the last few elements of a shard do.
        """
        for parameter, group in self._parameters():
            name = parameter.geometry.fqn
            found, expected = self._whole(parameter, parameter, group), self.weights[id(parameter)]
            if group["algorithm"] != "muon":
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
                continue
            assert torch.equal(found, expected), f"{name}: off by {float((found - expected).abs().max())}"
            momentum = optimizer.optimizer.state[parameter]["momentum_buffer"]
            assert torch.equal(self._whole(momentum, parameter, group), self.momenta[id(parameter)]), name


def train_beside_plain(flags: str, steps: int = 10, kind: type[Plain] = Plain) -> list[Any]:
    """Train, and require what a loop over whole tensors gives after each step; return the results of the steps."""
    results = []
    with train_state(f"{TINY} {flags}") as state:
        plain = kind(state.optimizer)
        original = state.optimizer.step_with_ready_grads

        def step() -> Any:
            plain.step()
            return original()

        state.optimizer.step_with_ready_grads = step
        for _ in range(steps):
            before = {key: weight.clone() for key, weight in plain.weights.items()}
            results.append(training.train_step(state))
            plain.require_equal(state.optimizer)
            moved = [not torch.equal(before[key], weight) for key, weight in plain.weights.items()]
            assert all(moved)
    return results
