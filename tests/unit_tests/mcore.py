# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-core in test workers: process groups, a scoped CPU shim, tiny chunks, their data, and comparisons."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed.fsdp import mcore_fsdp_v2_adapter as adapter
from megatron.core.distributed.fsdp.experimental import gather_full
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer, get_megatron_optimizer
from megatron.pretrain import cpu
from megatron.pretrain.attention import SdpaCoreAttention
from tests.unit_tests.launch import lasting_groups
from tests.unit_tests.models import Mlp

# Workers are forked from a server that has imported these once.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch.optim", "tests.unit_tests.mcore"]
)

SEQUENCE = 6
VOCABULARY = 29
SAMPLES = 2


_layout: tuple[Any, ...] = ()


def start(instances: int = 1, expert_parallel_size: int = 1, **sizes: int) -> None:
    """Initialise megatron-core's process groups; workers serve many tests, so only where a test wants others.

    Args:
        instances: of the distributed optimizer.
        expert_parallel_size: ranks that share experts.
        sizes: of other kinds of parallelism, by megatron-core's names.
    """
    global _layout
    wanted = (instances, expert_parallel_size, sizes)
    if parallel_state.model_parallel_is_initialized():
        if _layout == wanted:
            return
        parallel_state.destroy_model_parallel()
    with lasting_groups("parallel_state"):
        parallel_state.initialize_model_parallel(
            num_distributed_optimizer_instances=instances, expert_model_parallel_size=expert_parallel_size, **sizes
        )
    _layout = wanted


@contextmanager
def cpu_shim() -> Iterator[None]:
    """Install the training script's CPU shim, and take it away again: workers are shared with tests without it."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    modules = [importlib.import_module(f"megatron.core.{name}") for name in cpu._MODULES_WITH_CUDA_LITERALS]
    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    owners: list[Any] = [torch.cuda, torch.cuda.nvtx, random, mappings, *modules, router.TopKRouter, torch.Tensor]
    before = [dict(vars(owner)) for owner in owners]
    cpu.install()
    torch.Tensor.type.__name__ = "type"  # sharded tensors know operations by name
    try:
        yield
    finally:
        cpu._installed = False
        for owner, values in zip(owners, before, strict=True):
            for name, value in list(vars(owner).items()):
                if name not in values:
                    delattr(owner, name)
                elif value is not values[name] and not name.startswith("__"):
                    setattr(owner, name, values[name])


class Tower(MegatronModule):
    """Plain linear layers of odd sizes: megatron-core's wrappers take it on any device, without a shim."""

    in_features = Mlp.in_features
    out_features = Mlp.out_features

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.net = Mlp()
        self.compute_dtype = config.params_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def model_config(**changes: Any) -> TransformerConfig:
    """Return the config of a model so small that a step takes milliseconds."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 12,
        "num_attention_heads": 2,
        "ffn_hidden_size": 20,
        "init_method_std": 0.3,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }
    return TransformerConfig(**{**values, **changes})


def ddp_config(**changes: Any) -> adapter.DistributedDataParallelConfig:
    """Return a config that the adapter accepts."""
    return adapter.DistributedDataParallelConfig(
        **{"use_megatron_fsdp_v2": True, "data_parallel_sharding_strategy": "optim_grads_params", **changes}
    )


def build_tower(dtype: torch.dtype = torch.float32, **changes: Any) -> Tower:
    torch.manual_seed(7)
    return Tower(model_config(params_dtype=dtype, **changes)).to(dtype)


def build_gpt(*, tied: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> GPTModel:
    """Return a GPT whose weights depend on nothing but a seed; inside `cpu_shim` only."""
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    torch.manual_seed(5)
    spec = get_gpt_layer_local_spec(num_experts=changes.get("num_moe_experts"))
    spec.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    config = model_config(params_dtype=dtype, pipeline_dtype=dtype, **changes)
    predicts = config.mtp_num_layers is not None
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if predicts else None,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))  # biases start at zero: make every one count
    return model.to(dtype)


def wrap(module: nn.Module, *, fsdp_unit_modules: Any = None, config: Any = None, **options: Any) -> Any:
    """Wrap a chunk; a tower's linear layers are its units."""
    if fsdp_unit_modules is None and isinstance(module, Tower):
        fsdp_unit_modules = [nn.Linear]
    return adapter.FullyShardedDataParallel(
        module.config,  # type: ignore[arg-type]
        config or ddp_config(**options),
        module,
        fsdp_unit_modules=fsdp_unit_modules,
    )


def tower_batch(step: int, index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one microbatch of one rank, unlike those of any other."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * index + rank)
    inputs = torch.randn(3, Tower.in_features, generator=generator)
    return inputs, torch.randn(3, Tower.out_features, generator=generator)


def tower_loss(model: Any, step: int, index: int, rank: int) -> torch.Tensor:
    """Return the mean loss of one microbatch."""
    inputs, targets = tower_batch(step, index, rank)
    return F.mse_loss(model(inputs.to(model.compute_dtype)).float(), targets)


def tokens(step: int, index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels and loss mask; ranks and microbatches differ in how many tokens count."""
    generator = torch.Generator().manual_seed(77 + 10_000 * step + 100 * index + rank)
    text = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator)
    mask = torch.ones(SAMPLES, SEQUENCE)
    mask[0, : 1 + (step + index + 2 * rank) % 4] = 0
    return text[:, :-1], text[:, 1:], mask


def gpt_losses(model: Any, text: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of every token, [samples, sequence]."""
    positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
    losses: torch.Tensor = model(text, positions, None, labels=labels)
    return losses.float()


def tower_gradients(step: int, microbatches: int = 1, tower: Any = None) -> dict[str, torch.Tensor]:
    """Return the mean over ranks of the sum over microbatches, computed in this process alone."""
    tower = build_tower() if tower is None else tower
    world = dist.get_world_size()
    for index in range(microbatches):
        for rank in range(world):
            (tower_loss(tower, step, index, rank) / world).backward()
    return {name: parameter.grad for name, parameter in tower.named_parameters()}


def _forward_step(batches: Iterator[Any], model: Any) -> Any:
    text, labels, mask = next(batches)

    def loss_func(losses: torch.Tensor) -> Any:
        total = (losses * mask).sum()
        count = mask.sum().to(torch.int)
        return total, count, {"loss": total.detach().clone()}  # the schedule scales in place

    return gpt_losses(model, text, labels), loss_func


def run_schedule(chunk: Any, step: int, microbatches: int, *, forward_only: bool = False) -> Any:
    """Run one step of a GPT under megatron-core's own schedule."""
    return get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter([tokens(step, index, my_rank()) for index in range(microbatches)]),
        model=[chunk],
        num_microbatches=microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=SAMPLES,
        forward_only=forward_only,
    )


def optimizer_config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, **changes})


def build_optimizer(chunk: Any, **changes: Any) -> FullyShardedOptimizer:
    optimizer = get_megatron_optimizer(optimizer_config(**changes), [chunk])
    assert isinstance(optimizer, FullyShardedOptimizer)
    return optimizer


def full_weights(chunk: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in chunk.module.named_parameters()}


def full_gradients(chunk: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor().clone() for name, p in chunk.module.named_parameters()}


def full_state(optimizer: Any, chunk: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimizer state by the model's own parameter names."""
    state = optimizer.sharded_state_dict(None)["state"]
    named = {f"module.{name}": p for name, p in chunk.module.named_parameters()}
    return {
        name.removeprefix("module."): {
            key: gather_full(value, named[name]) if value.ndim else value for key, value in values.items()
        }
        for name, values in state.items()
    }


def assert_close(found: Any, expected: Any, *, rtol: float = 1e-5) -> None:
    """Compare nested dicts of tensors, each relative to its own largest element.

    Sums over ranks come in another order than in one process, hence a tolerance at all.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_close(found[name], value, rtol=rtol)
            continue
        atol = rtol * float(value.abs().max())
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=atol, check_dtype=False, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal(found: Any, expected: Any) -> None:
    """Compare bit by bit."""
    assert_close(found, expected, rtol=0)


def my_rank() -> int:
    return dist.get_rank()
