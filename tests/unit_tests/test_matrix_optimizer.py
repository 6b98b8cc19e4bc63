# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Matrix optimizers: settings, plain parameters, fused matrices and stacks, state, memory, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.experimental import (
    MatrixOptimizer,
    Muon,
    MuonRule,
    fully_shard,
    fully_shard_muon,
    fully_shard_optimizer,
)
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.matrix_oracle import PlainMuon, Split, give_gradients, step_plainly, weight_of

# --- settings ---------------------------------------------------------------------------------------------------------


REFUSED_SETTINGS = [
    ({"momentum": 1.0}, "muon momentum: expected in [0, 1), got 1.0."),
    ({"momentum": -0.1}, "muon momentum: expected in [0, 1), got -0.1."),
    ({"momentum_dtype": torch.float16}, "muon momentum_dtype: expected float32 or bfloat16, got torch.float16."),
    ({"travel_dtype": torch.float16}, "muon travel_dtype: expected float32, bfloat16 or None, got torch.float16."),
    ({"num_ns_steps": 0}, "muon num_ns_steps: expected an int from 1 to 99, got 0."),
    ({"num_ns_steps": 100}, "muon num_ns_steps: expected an int from 1 to 99, got 100."),
    ({"num_ns_steps": 5.0}, "muon num_ns_steps: expected an int from 1 to 99, got 5.0."),
    ({"extra_scale_factor": 0.0}, "muon extra_scale_factor: expected > 0, got 0.0."),
    (
        {"coefficients": "cubic"},
        "muon coefficients: expected one of ('simple', 'quintic', 'polar_express'), got 'cubic'.",
    ),
    ({"precision": "low"}, "muon precision: expected one of ('medium', 'high', 'highest'), got 'low'."),
    ({"scale_mode": "x"}, "muon scale_mode: expected one of ('spectral', 'shape_scaling', 'unit_rms_norm'), got 'x'."),
    ({"weight_decay": -1.0}, "muon weight_decay: expected >= 0, got -1.0."),
    ({"lr": -1.0}, "muon lr: expected a number >= 0 or a 0-d tensor, got -1.0."),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED_SETTINGS, ids=lambda value: str(value)[:30])
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Muon([weight_of(3, 4)], **settings)
    assert str(raised.value) == f"{message} Correct it in the param_group."
    optimizer = Muon([weight_of(3, 4)])
    with pytest.raises(ValueError) as raised:
        optimizer.add_param_group({"params": [weight_of(5, 4)], **settings})
    assert message in str(raised.value) and len(optimizer.param_groups) == 1


def test_settings_that_no_rule_knows_are_refused() -> None:
    with pytest.raises(ValueError) as raised:
        MatrixOptimizer([weight_of(3, 4)], MuonRule(), betas=(0.9, 0.99))
    assert str(raised.value).startswith("muon: expected settings among ['coefficients', 'extra_scale_factor',")
    assert str(raised.value).endswith("got ['betas']. Drop them.")


@pytest.mark.parametrize("package_bytes", [0, -1, 1e6])
def test_packages_without_a_size_are_refused(package_bytes: Any) -> None:
    with pytest.raises(ValueError) as raised:
        Muon([weight_of(3, 4)], package_bytes=package_bytes)
    assert str(raised.value) == (
        f"muon package_bytes: expected an int >= 1, got {package_bytes!r}. Give what an owner may hold at a time."
    )


def test_groups_of_another_algorithm_are_refused() -> None:
    with pytest.raises(ValueError, match="muon algorithm: expected 'muon', got 'shampoo'"):
        Muon([{"params": [weight_of(3, 4)], "algorithm": "shampoo"}])


def test_parameters_without_matrices_are_refused() -> None:
    with pytest.raises(ValueError) as raised:
        Muon([{"params": [weight_of(3, 4), nn.Parameter(torch.zeros(5))]}])
    assert str(raised.value) == (
        "matrices of parameter 1 of param_groups[0]: expected a matrix, 2-D or more, got shape (5,). Leave it to the "
        "other rule."
    )
    with pytest.raises(ValueError, match=r"parts of parameter 0 of param_groups\[0\]: expected numbers of rows whose"):
        Muon([{"params": [weight_of(3, 4)], "parts": (2, 2)}])


def test_a_parameter_of_both_optimizers_is_refused() -> None:
    weight = weight_of(3, 4)
    with pytest.raises(ValueError) as raised:
        Muon([weight], rest=torch.optim.AdamW([weight]))
    assert str(raised.value) == (
        "muon rest: expected other parameters than the matrices, got some of shapes [(3, 4)] in both. Give each "
        "parameter to one of the two."
    )


def test_closures_are_refused() -> None:
    with pytest.raises(ValueError) as raised:
        Muon([weight_of(3, 4)]).step(lambda: 0.0)
    assert str(raised.value) == "Muon.step: expected no closure, got one. Compute the loss before the step."


def _not_adapted() -> None:
    model = fully_shard(nn.Linear(4, 6, bias=False))
    optimizer = Muon(list(model.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_sharded_parameters_need_an_adapted_optimizer() -> None:
    for message in run_ranks_expecting(2, RuntimeError, _not_adapted):
        assert message == (
            "Muon.step: expected an optimizer that is adapted to sharded parameters, got one of weight. Call "
            "fully_shard_optimizer first."
        )


def test_elements_that_do_not_lie_in_order_are_refused() -> None:
    weight = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    give_gradients([weight], 0)
    with pytest.raises(ValueError) as raised:
        Muon([weight]).step()
    assert str(raised.value) == (
        "Muon.step: expected parameters in contiguous memory, got shape (2, 3, 4, 5) with strides (60, 1, 15, 3). Make "
        "them contiguous() first."
    )


class _Centred(torch.optim.Optimizer):
    """Subtracts the gradient less its mean, which one shard does not know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad - parameter.grad.mean())


def _other_rest(kind: str) -> None:
    model: Any = fully_shard(nn.Linear(4, 6))
    makers: dict[str, Any] = {
        "own": _Centred,
        "named": lambda parameters: torch.optim.Adafactor(parameters),
        "adapted": lambda parameters: fully_shard_optimizer(torch.optim.SGD(parameters)),
    }
    before = model.bias.full_tensor()
    try:
        optimizer = fully_shard_muon(model, rest=makers[kind], report=None)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    finally:
        assert torch.equal(model.bias.full_tensor(), before)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("own", RuntimeError, "element-wise"),
        ("named", ValueError, "expected an element-wise optimizer such as AdamW or SGD, got Adafactor."),
        ("adapted", RuntimeError, "expected an optimizer that is not adapted yet, got FsdpSGD."),
    ],
)
def test_the_rest_is_element_wise(kind: str, error: type[Exception], message: str) -> None:
    for found in run_ranks_expecting(2, error, _other_rest, kind):
        assert message in found


# --- fused matrices and stacks ----------------------------------------------------------------------------------------


class _Fused(nn.Module):
    """Queries, keys and values of two groups, interleaved; gate and up; a stack of experts; all of them uneven.

    Parts of one fused matrix differ in the scale of their updates: some have more rows than columns.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in (
            ("qkv", (14, 5)),
            ("gate_up", (20, 9)),
            ("experts", (5, 4, 9)),
            ("fused_experts", (3, 12, 5)),
        ):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a loss with given gradients."""
        return sum((gradients[name] * p).sum() for name, p in self.named_parameters())  # type: ignore[return-value]


PARTS = {"qkv": (4, 2, 1), "gate*": (10, 10), "fused_*": (2, 1)}
GROUPED = [  # parameter, is_stack, parts
    ("qkv", False, (4, 2, 1)),
    ("gate_up", False, (10, 10)),
    ("experts", True, ()),
    ("fused_experts", True, (2, 1)),
]


def _fused_gradients(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Multiples of 2**-8 times the number of ranks, whose averages are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randint(-256, 256, p.shape, generator=generator) * dist.get_world_size() / 256
        for name, p in _Fused().named_parameters()
    }


def _qkv_parts(full: torch.Tensor) -> list[torch.Tensor]:
    return list(full.view(1, 2, 7, 5).split([4, 2, 1], dim=2))


def _expert_parts(full: torch.Tensor) -> list[torch.Tensor]:
    return list(full.view(3, 4, 3, 5).split([2, 1], dim=2))


def _step_one_by_one(model: _Fused, momenta: dict[Any, torch.Tensor]) -> None:
    """Every matrix by itself; the experts of a stack as a batch, whose kernels may round otherwise."""
    split: dict[Any, Split] = {
        model.gate_up: lambda full: [full[:10], full[10:]],
        model.qkv: _qkv_parts,
        model.fused_experts: _expert_parts,
    }
    step_plainly(model.parameters(), momenta, PlainMuon(lr=0.02), split)


def _fused_training(uses_muon: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reference, momenta = _Fused(), {}
    model = fully_shard(_Fused())
    if uses_muon:
        tables: list[str] = []
        optimizer = fully_shard_muon(model, 0.02, parts=PARTS, package_bytes=400, report=tables.append)
        assert len(tables) == (rank == 0)
    else:
        groups = [{"params": [getattr(model, n)], "is_stack": s, "parts": p} for n, s, p in GROUPED]
        optimizer = fully_shard_optimizer(MatrixOptimizer(groups, MuonRule(), lr=0.02, weight_decay=0.1, nesterov=True))
    for step in range(10):
        model(_fused_gradients(step, rank)).backward()
        every = [_fused_gradients(step, other) for other in range(ranks)]
        for name, parameter in reference.named_parameters():
            parameter.grad = sum(gradients[name] for gradients in every) / ranks  # type: ignore[assignment]
        optimizer.step()
        optimizer.zero_grad()
        _step_one_by_one(reference, momenta)
    different = [
        name for name, p in reference.named_parameters() if not torch.equal(getattr(model, name).full_tensor(), p)
    ]
    assert not different, different


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fused_matrices_and_stacks_are_stepped_one_by_one(world_size: int) -> None:
    run_ranks(world_size, _fused_training, True)
    run_ranks(world_size, _fused_training, False)


def test_parts_differ_from_the_fused_matrix() -> None:
    """Each part has its own scale: the test above would not pass without them."""
    fused, parted = weight_of(20, 9), weight_of(20, 9)
    for weight, parts in ((fused, ()), (parted, (10, 10))):
        give_gradients([weight], 0)
        Muon([{"params": [weight], "parts": parts}], lr=0.02).step()
    assert not torch.allclose(fused, parted, atol=1e-3)


# --- parameters without gradients -------------------------------------------------------------------------------------


class _Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for index in chosen:
            x = torch.tanh(self.layers[index](x))
        return x


def _unused() -> None:
    torch.manual_seed(0)
    model: Any = _Choosing()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_muon(model, 0.1, report=None)
    torch.manual_seed(1 + dist.get_rank())

    def held(layer: Any) -> list[torch.Tensor]:
        tensors = [layer.weight.full_tensor(), layer.bias.full_tensor()]
        for parameter in (layer.weight, layer.bias):
            for value in optimizer.state.get(parameter, {}).values():
                tensors.append(value.clone())
        return tensors

    for chosen in ((0, 1), (0, 1, 2), (1, 2), (0,), (2, 0)):
        before = [held(layer) for layer in model.layers]
        model(torch.randn(3, 5), chosen).sum().backward()
        optimizer.step()
        for index, layer in enumerate(model.layers):
            after = held(layer)
            if index in chosen:
                assert not torch.equal(after[0], before[index][0])
            else:
                assert len(after) == len(before[index]) and all(map(torch.equal, after, before[index])), (chosen, index)
        optimizer.zero_grad()
    optimizer.step()  # without any gradient


def test_parameters_without_gradients_are_left_alone() -> None:
    run_ranks(2, _unused)


def test_every_rank_has_as_much_to_do() -> None:
    counts = Counter(run_ranks(2, _owners)[0])
    assert counts == {0: 4, 1: 4}


def _owners() -> tuple[int, ...]:
    model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    fully_shard(model)
    optimizer = fully_shard_muon(model, report=None)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    owners: tuple[int, ...] = optimizer.works[0].plan.owners
    return owners
