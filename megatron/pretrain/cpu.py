# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Lets megatron-core train on a host without CUDA by answering its hard-coded "cuda" with the CPU.

The runtime of this project needs none of this: only the training script calls ``install()``, and
only where torch finds no CUDA device. It does not make CUDA libraries (TransformerEngine, Apex,
CUDA graphs) work, and it covers what GPT training reaches, not every line of megatron-core;
``docs/pretrain.md`` lists what is replaced.
"""

import contextlib
import importlib
import logging
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

CPU = torch.device("cpu")

# Modules of megatron-core that create tensors with a literal device="cuda", or in memory that CUDA pins.
_MODULES_WITH_CUDA_LITERALS = (
    "models.common.embeddings.rope_utils",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "transformer.utils",
    "utils",
)
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")

_installed = False


class ImmediateStream:
    """Stands for a CUDA stream or event whose work is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def wait_stream(self, stream: "ImmediateStream") -> None:
        """Wait for nothing: the other stream's work is done."""

    def wait_event(self, event: "ImmediateStream") -> None:
        """Wait for nothing: the event's work is done."""

    def wait(self, stream: "ImmediateStream | None" = None) -> None:
        """Wait for nothing: this event's work is done."""

    def record_event(self, event: "ImmediateStream | None" = None) -> "ImmediateStream":
        """Return an event that has already happened."""
        return event if event is not None else ImmediateStream()

    def record(self, stream: "ImmediateStream | None" = None) -> None:
        """Record nothing: the event has already happened."""

    def synchronize(self) -> None:
        """Wait for nothing: all work is done."""

    def query(self) -> bool:
        """Say that all work is done."""
        return True


def install() -> None:
    """Replace what megatron-core asks of CUDA, for the whole process; a second call does nothing.

    Called by ``pretrain_gpt.py`` before the model is built.

    Raises:
        RuntimeError: On a host with CUDA, where the replacements would silently move work to the
            CPU.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError(
            "CPU shim: expected a host without CUDA, got one with "
            f"{torch.cuda.device_count()} CUDA device(s) for install(). Train on the devices, or "
            "hide them "
            "with CUDA_VISIBLE_DEVICES=''."
        )
    if _installed:
        return
    _replace_cuda_functions()
    _replace_rng_state()
    read_cuda_as_cpu(f"megatron.core.{name}" for name in _MODULES_WITH_CUDA_LITERALS)
    _replace_in_experts()
    _replace_uneven_gather()
    _replace_tensor_methods()
    _installed = True


def _replace_cuda_functions() -> None:
    """Answer ``torch.cuda.*`` with the CPU device, its generator and a stream that never waits."""
    stream = ImmediateStream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.Stream = cuda.Event = ImmediateStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None


def _replace_rng_state() -> None:
    """Let megatron-core's RNG tracker keep states of the CPU generator."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The tracker warns on every fork that the CPU generator changed: here that is its purpose.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


class _TorchOnCpu(types.ModuleType):
    """The name ``torch`` as one module sees it: its factories take "cuda" for the CPU.

    Replacing the name in a few modules costs nothing per operation; a global ``TorchFunctionMode``
    doubles the cost of each small one.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def read_cuda_as_cpu(modules: Iterable[str]) -> None:
    """Give modules that write ``device="cuda"`` a torch whose factories read it as the CPU.

    Args:
        modules: Their dotted names.
    """
    proxy = _TorchOnCpu("torch")
    for name in _FACTORIES:
        setattr(proxy, name, _on_cpu(getattr(torch, name)))
    for name in modules:
        module: Any = importlib.import_module(name)
        module.torch = proxy


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _replace_in_experts() -> None:
    """Let tokens find their experts without CUDA, TransformerEngine and a compiler."""
    utils, router, dispatcher = (
        importlib.import_module(f"megatron.core.transformer.moe.{name}")
        for name in ("moe_utils", "router", "token_dispatcher")
    )
    # megatron-core 0.16 reads the name, and defines it beside TransformerEngine only.
    utils.te_general_gemm = getattr(utils, "te_general_gemm", None)
    # Numbers of tokens are brought to the host if they are on CUDA: here they are there, and are not converted.
    dispatcher.maybe_move_tensor_to_cpu = _as_on_the_host
    method = router.TopKRouter._apply_expert_bias
    # Compiling what adds up a few numbers needs a C++ compiler, and takes seconds.
    router.TopKRouter._apply_expert_bias = getattr(method, "_torchdynamo_orig_callable", method)


def _replace_uneven_gather() -> None:
    """Let ranks that share experts gather tokens of which each has another number: gloo wants equal ones."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    stock = mappings._gather_along_first_dim

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return stock(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        found = padded.new_empty(len(sizes), *padded.shape)
        torch.distributed.all_gather_into_tensor(found.flatten(0, 1), padded, group=group)
        return torch.cat([piece[:size] for piece, size in zip(found, sizes, strict=True)])

    mappings._gather_along_first_dim = gather


def _as_on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _replace_tensor_methods() -> None:
    """Satisfy megatron-core's optimizers, which want type names that start with torch.cuda."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        is_cpu_name = isinstance(result, str) and not result.startswith("torch.cuda.")
        return result.replace("torch.", "torch.cuda.", 1) if is_cpu_name else result

    # Tensor subclasses go by the name of an operation, sharded parameters among them.
    type_name.__name__ = "type"
    tensor: Any = torch.Tensor
    tensor.type = type_name
    tensor.cuda = lambda self, *args, **kwargs: self
    # Memory is given back when the work on it is done, as on one stream.
    tensor.record_stream = lambda self, stream: None
