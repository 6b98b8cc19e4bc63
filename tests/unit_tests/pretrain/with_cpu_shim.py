# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the CPU shim and of the attention core; run by test_cpu.py in a process of its own."""

import pytest
import torch

from megatron.pretrain import cpu
from megatron.pretrain.launcher import Place, start_process_groups
from megatron.pretrain.main import read_command

ADAPTED = "expected neither a bias nor packed sequences"


def start() -> None:
    cpu.install()
    cpu.install()
    args = read_command([], {}).args
    start_process_groups(args, Place(0, 1, 0, is_launched=False))
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(5)


def check_cuda_means_cpu() -> None:
    assert torch.cuda.current_device() == torch.device("cpu")
    assert not torch.cuda.is_available()
    from megatron.core.optimizer import clip_grads

    assert clip_grads.torch.zeros(2, device="cuda").device.type == "cpu"
    assert clip_grads.torch.float32 is torch.float32
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|cuda|NVIDIA"):
        torch.zeros(2, device="cuda")
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.int32).dtype == torch.int32


def check_streams_never_wait() -> None:
    stream = torch.cuda.Stream()
    event = stream.record_event()
    event.record(stream)
    event.wait(stream)
    stream.wait_event(event)
    stream.wait_stream(torch.cuda.current_stream())
    stream.synchronize()
    assert event.query()
    with torch.cuda.stream(stream):
        assert torch.ones(1).item() == 1.0


def check_rng_tracker_forks_the_cpu_generator() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(3), first)


def check_rng_of_tracked_generators_goes_into_checkpoints_as_that_of_states() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron.pretrain.fsdp_dtensor import _rng_state, _set_rng_state

    tracker, name = get_cuda_rng_tracker(), "model-parallel-rng"
    states, generator = tracker.get_states(), torch.Generator().manual_seed(7)
    tracker.set_states({name: generator})
    saved = _rng_state()
    found = {**saved, **{f"rng_tracker_states.{key}": value for key, value in saved["rng_tracker_states"].items()}}
    expected = torch.rand(3, generator=generator)
    _set_rng_state(found)
    assert tracker.get_states()[name] is generator and torch.equal(torch.rand(3, generator=generator), expected)
    tracker.set_states(states)
    _set_rng_state(found)
    with tracker.fork():
        assert torch.equal(torch.rand(3), expected)
    tracker.set_states(states)


def build(core: type, **changes: object) -> torch.nn.Module:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
    )
    return core(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        **changes,
    )


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 2, 4, 6), (5, 2, 2, 6), (5, 2, 2, 6))
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def check_attention_is_that_of_megatron_core() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron.pretrain.attention import SdpaCoreAttention

    padded = torch.ones(2, 1, 5, 5).triu(1).bool()
    padded[0, 0, 3:, :3] = True
    for mask in (None, padded):
        for scale in (None, 0.7):
            results = []
            for core in (SdpaCoreAttention, DotProductAttention):
                q, k, v = inputs()
                output = build(core, softmax_scale=scale)(q, k, v, mask)
                (output * torch.linspace(0.0, 1.0, output.numel()).view_as(output)).sum().backward()
                results.append((output, q.grad, k.grad, v.grad))
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def check_attention_dropout_only_in_training() -> None:
    from megatron.pretrain.attention import SdpaCoreAttention

    attention = build(SdpaCoreAttention, attention_dropout=0.5)
    q, k, v = inputs()
    assert not torch.equal(attention(q, k, v, None), attention(q, k, v, None))
    attention.eval()
    assert torch.equal(attention(q, k, v, None), attention(q, k, v, None))


def check_attention_refuses_what_it_cannot() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.pretrain.attention import SdpaCoreAttention

    attention = build(SdpaCoreAttention)
    with pytest.raises(NotImplementedError, match=ADAPTED):
        attention(*inputs(), None, attention_bias=torch.zeros(1))
    with pytest.raises(NotImplementedError, match=ADAPTED):
        attention(*inputs(), None, packed_seq_params=object())
    with pytest.raises(NotImplementedError, match="expected a mask, got none for mask type padding"):
        attention(*inputs(), None, attn_mask_type=AttnMaskType.padding)


def check_transformer_engine_needs_cuda() -> None:
    from megatron.pretrain.model import uses_transformer_engine

    args = read_command(["--transformer-impl", "transformer_engine"], {}).args
    with pytest.raises(ValueError, match="expected CUDA and an installed transformer-engine"):
        uses_transformer_engine(args)
    assert not uses_transformer_engine(read_command([], {}).args)
    args.transformer_impl, args.fp8_format = None, "hybrid"
    with pytest.raises(ValueError, match="got a host that lacks one of them for --fp8-format or --fp4-format"):
        uses_transformer_engine(args)


CHECKS = (
    check_cuda_means_cpu,
    check_streams_never_wait,
    check_rng_tracker_forks_the_cpu_generator,
    check_rng_of_tracked_generators_goes_into_checkpoints_as_that_of_states,
    check_attention_is_that_of_megatron_core,
    check_attention_dropout_only_in_training,
    check_attention_refuses_what_it_cannot,
    check_transformer_engine_needs_cuda,
)

if __name__ == "__main__":
    start()
    for check in CHECKS:
        check()
    print(f"{len(CHECKS)} checks passed")
