# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`capture_iteration` without a GPU: a double stands in for CUDA graphs. tests/gpu/graphs.py has the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp.experimental import capture_iteration, clip_grad_norm_, fully_shard_optimizer
from megatron.core.distributed.fsdp.experimental.graph import MAX_GRAPHS
from tests.gpu.graphs import equals_eager
from tests.unit_tests.graph_double import graphs_on_the_host
from tests.unit_tests.launch import run_ranks
from tests.unit_tests.models import build, loss_of, make_batch, shard_layers

CASES = [
    ("no_shard", None, 1),
    ("optim", None, 3),
    ("optim_grads_params", None, 3),
    ("optim_grads_params", "no_shard", 1),
    ("optim_grads_params", "optim", 3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replays_equal_eager_steps(case: Any) -> None:
    run_ranks(2, equals_eager, *case)


class _Training:
    def __init__(self, optimizer: Any = None) -> None:
        self.model = shard_layers(build("mlp"))
        adamw = torch.optim.AdamW(self.model.parameters(), lr=0.5, fused=True, capturable=True)
        self.optimizer: Any = fully_shard_optimizer(adamw if optimizer is None else optimizer(self.model.parameters()))
        self.batch = make_batch(self.model, 6, seed=1)
        self.num_calls = 0

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        loss = loss_of(self.model, inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def capture(self, **options: Any) -> Any:
        return capture_iteration(self.model, self.optimizer, self.step, self.batch, **options)


def _recaptures() -> None:
    with graphs_on_the_host():
        training = _Training()
        captured = training.capture(warmup=2)
        for calls, captures in ((1, 0), (2, 0), (3, 1), (4, 1)):
            captured(*training.batch)
            assert (calls, captured.num_captures) == (calls, captures)
        captured(*make_batch(training.model, 4, seed=2))
        assert captured.num_captures == 2, "another shape"
        captured(*training.batch)
        assert captured.num_captures == 2, "a shape that is known"
        training.optimizer.param_groups[0]["weight_decay"] = 0.3
        captured(*training.batch)
        assert captured.num_captures == 3, "a setting that kernels have as a constant"
        training.optimizer.param_groups[0]["lr"] = 0.1
        captured(*training.batch)
        assert captured.num_captures == 3, "a learning rate"
        training.model.eval()
        captured(*training.batch)
        assert captured.num_captures == 4, "another mode"
        next(iter(training.model.layers[0].parameters())).requires_grad_(False)
        captured(*training.batch)
        assert captured.num_captures == 5, "a frozen parameter"
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        captured(*training.batch)
        assert captured.num_captures == 6, "state that was replaced"
        captured.release()
        captured(*training.batch)
        assert captured.num_captures == 7, "memory that was given back"


def test_captures_anew_what_a_graph_cannot_follow() -> None:
    run_ranks(2, _recaptures)


def _bounded() -> None:
    with graphs_on_the_host():
        training = _Training()
        captured = training.capture(warmup=1)
        for size in range(1, MAX_GRAPHS + 3):
            captured(*make_batch(training.model, size, seed=size))
        assert captured.num_captures == MAX_GRAPHS + 1
        captured(*make_batch(training.model, MAX_GRAPHS + 2, seed=1))
        assert captured.num_captures == MAX_GRAPHS + 1, "the newest is kept"
        captured(*make_batch(training.model, 2, seed=1))
        assert captured.num_captures == MAX_GRAPHS + 2, "the oldest is not"


def test_keeps_a_bounded_number_of_graphs() -> None:
    run_ranks(1, _bounded)


def _outputs_and_rates() -> None:
    with graphs_on_the_host():
        training = _Training()
        captured = training.capture(warmup=1)
        seen = [captured(*training.batch) for _ in range(4)]
        values = [float(loss) for loss in seen]
        assert len(set(values)) == 4 and values == [float(loss) for loss in seen], "outputs are the caller's own"
        assert training.optimizer.param_groups[0]["lr"] == 0.5, "the caller's learning rate stays where it was"
        before = [parameter.to_local().clone() for parameter in training.model.parameters()]
        for rate in (0.0, torch.tensor(0.0)):
            training.optimizer.param_groups[0].update(lr=rate)
            captured(*training.batch)
            after = [parameter.to_local() for parameter in training.model.parameters()]
            assert all(map(torch.equal, before, after)), rate


def test_outputs_and_learning_rates() -> None:
    run_ranks(2, _outputs_and_rates)


def _failed() -> None:
    with graphs_on_the_host():
        training = _Training()
        is_broken = False

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if not is_broken:
                return training.step(inputs, targets)
            loss = loss_of(training.model, inputs, targets)
            loss.backward()
            raise ValueError("no graph can hold this")

        captured = capture_iteration(training.model, training.optimizer, step, training.batch, warmup=1)
        captured(*training.batch)
        before = [parameter.to_local().clone() for parameter in training.model.parameters()]
        is_broken = True
        with pytest.raises(RuntimeError, match=r"expected a step_fn that only issues work.*no graph can hold this"):
            captured(*training.batch)
        assert all(parameter.grad is None for parameter in training.model.parameters())
        assert all(map(torch.equal, before, (parameter.to_local() for parameter in training.model.parameters())))
        is_broken = False
        losses = [float(captured(*training.batch)) for _ in range(2)]
        assert losses[1] != losses[0] and captured.num_captures == 1


def test_failed_capture_leaves_everything_as_it_was() -> None:
    run_ranks(2, _failed)


def _waiting() -> None:
    with graphs_on_the_host():
        training = _Training()

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = training.step(inputs, targets)
            assert loss.item() > 0
            return loss

        captured = capture_iteration(training.model, training.optimizer, step, training.batch, warmup=1)
        captured(*training.batch)
        with pytest.raises(RuntimeError, match=r"got RuntimeError at .*: operation _local_scalar_dense not permitted"):
            captured(*training.batch)


def test_a_step_that_waits_for_a_value_is_refused() -> None:
    run_ranks(1, _waiting)


def _refusals() -> None:
    training = _Training()
    with pytest.raises(NotImplementedError, match="expected a model on a CUDA device, got one on cpu"):
        training.capture()
    for warmup in (0, True, 1.5):
        with pytest.raises(ValueError, match="warmup: expected an int >= 1, got"):
            training.capture(warmup=warmup)
    with pytest.raises(TypeError, match="expected a sharded model, got one without units"):
        capture_iteration(nn.Linear(1, 1), training.optimizer, training.step, training.batch)
    with pytest.raises(TypeError, match="expected an adapted optimizer, got SGD"):
        sgd = torch.optim.SGD(training.model.parameters(), lr=0.1)
        capture_iteration(training.model, sgd, training.step, training.batch)
    stuck = _Training(lambda parameters: torch.optim.AdamW(parameters, fused=True))
    with pytest.raises(ValueError, match=r"expected capturable=True, got False in param_groups \[0\].*FsdpAdamW"):
        stuck.capture()
    with graphs_on_the_host():
        captured = training.capture()
        with pytest.raises(TypeError, match=r"expected 2 tensors, got \['Tensor'\]"):
            captured(training.batch[0])
        with pytest.raises(TypeError, match=r"expected 2 tensors, got \['Tensor', 'float'\]"):
            captured(training.batch[0], 1.0)
    assert training.num_calls == 0


def test_refusals() -> None:
    run_ranks(1, _refusals)


def _tensor_norm() -> None:
    norms = []
    for max_norm in (0.01, torch.tensor(0.01)):
        training = _Training()
        loss_of(training.model, *training.batch).backward()
        clip_grad_norm_(training.model.parameters(), max_norm)
        norms.append([parameter.grad.to_local().clone() for parameter in training.model.parameters()])
    assert all(map(torch.equal, *norms))


def test_clipping_norm_may_be_a_tensor() -> None:
    run_ranks(2, _tensor_norm)
