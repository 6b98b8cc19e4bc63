# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Muon under megatron-core's contract: steps in every layout, statistics, schedules, checkpoints.

What an OptimizerConfig means for it is test_mcore_muon_config.py's.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp import mcore_fsdp_v2_checkpoint as names
from megatron.core.distributed.fsdp.experimental import CheckpointError
from megatron.core.distributed.fsdp.experimental.checkpoint import Ranks
from megatron.pretrain import training
from megatron.pretrain.torch_dist import TorchDistSource
from tests.functional_tests.tensors import load_tensors
from tests.unit_tests.launch import run_ranks, run_ranks_expecting
from tests.unit_tests.mcore_muon import TINY, train_beside_plain, train_state

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
GQA = "--group-query-attention --num-query-groups 2"
GATED = "--swiglu --muon-split-gate-up"
MOE = "--num-experts 4 --moe-ffn-hidden-size 12 --disable-bias-linear --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2"
LAYOUTS = [
    *[(2, f"--data-parallel-sharding-strategy {name}") for name in STRATEGIES],
    (1, f"{GQA} --muon-nesterov"),
    (3, f"{GQA} {GATED} --global-batch-size 3"),
    (2, "--untie-embeddings-and-output-weights --muon-no-split-qkv --muon-fp32-matmul-prec highest"),
    (2, f"--bf16 {GATED}"),
    (4, f"--num-distributed-optimizer-instances 2 {GQA}"),
    (4, f"--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim {GATED}"),
    (2, f"{TP2} {GQA}"),
    (2, f"{TP2} {GQA} --muon-tp-mode duplicated"),
    (4, f"{TP2} {GQA} {GATED} --sequence-parallel"),
    (4, f"{TP2} {GQA} {GATED} --sequence-parallel --muon-tp-mode duplicated"),
    (4, f"{TP2} --swiglu --muon-tp-mode duplicated"),
    (2, "--pipeline-model-parallel-size 2"),
    (4, f"--pipeline-model-parallel-size 2 {GATED} --untie-embeddings-and-output-weights"),
    (2, f"{MOE} --expert-model-parallel-size 2"),
    (4, f"{MOE} --expert-model-parallel-size 2 {GATED} --muon-router-adam"),
]


def _named(value: object) -> str:
    return str(value).replace("--", "")


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS, ids=_named)
def test_steps_equal_those_of_a_plain_loop(world_size: int, flags: str) -> None:
    """Bit for bit over ten steps with other data on every rank; the loop gets the gradients that Muon gets."""
    results = run_ranks(world_size, train_beside_plain, flags)
    losses = [[result.lm_loss for result in of_rank] for of_rank in results]
    assert all(of_rank == losses[0] for of_rank in losses)
    assert all(map(math.isfinite, losses[0])) and len(set(losses[0])) == len(losses[0])


# --- statistics and schedules -----------------------------------------------------------------------------------------


def _statistics(flags: str) -> None:
    """Norm and zeros of a step, beside those of whole gradients; words that do not occur have zeros."""
    line = f"{TINY} --log-num-zeros-in-grad --clip-grad 1e9 --untie-embeddings-and-output-weights --vocab-size 95"
    with train_state(f"{line} {flags}") as state:
        original = state.optimizer.step_with_ready_grads
        whole: list[torch.Tensor] = []

        def step() -> Any:
            whole.extend(p.grad.full_tensor().flatten() for p in state.optimizer.get_parameters())
            return original()

        state.optimizer.step_with_ready_grads = step
        result = training.train_step(state)
        gradient = torch.cat(whole)
        # Sums in another order.
        assert result.grad_norm == pytest.approx(float(gradient.double().norm()), rel=1e-5)
        assert result.num_zeros == int((gradient == 0).sum()) > 0


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(1, ""), (2, "--data-parallel-sharding-strategy no_shard"), (4, f"{TP2} {GQA} --muon-tp-mode duplicated")],
    ids=_named,
)
def test_norm_and_zeros_are_those_of_whole_gradients(world_size: int, flags: str) -> None:
    run_ranks(world_size, _statistics, flags)


def _clipped() -> None:
    norms = []
    for clip in (1e9, 1e-3):
        with train_state(f"{TINY} --clip-grad {clip}") as state:
            original = state.optimizer.step_with_ready_grads

            def step(state: Any = state, original: Any = original) -> Any:
                norms.append(float(state.optimizer.get_grad_norm()))
                return original()

            state.optimizer.step_with_ready_grads = step
            training.train_step(state)
    assert norms[0] > 0.1 and norms[1] == pytest.approx(1e-3, rel=1e-4)


def test_gradients_are_clipped_for_both_kinds() -> None:
    run_ranks(2, _clipped)


def _schedules() -> None:
    """Rates follow the schedule, and weight decay its own, in every group; biases and norms have none."""
    line = f"{TINY} --min-lr 1e-3 --lr-decay-style cosine --weight-decay-incr-style linear {GQA}"
    with train_state(f"{line} --start-weight-decay 0.1 --end-weight-decay 0.3") as state:
        kinds = {(group["algorithm"], group["wd_mult"]) for group in state.optimizer.param_groups}
        assert kinds == {("muon", 1.0), ("AdamW", 1.0), ("AdamW", 0.0)}
        seen = []
        for step in range(4):
            for group in state.optimizer.param_groups:
                decay = 0.1 + 0.2 * step / 10
                assert group["weight_decay"] == pytest.approx(decay * group["wd_mult"])
            (rate,) = {group["lr"] for group in state.optimizer.param_groups}
            seen.append(rate)
            training.train_step(state)
    assert seen[:3] == pytest.approx([1e-3, 5.5e-3, 1e-2]) and 1e-3 < seen[3] < 1e-2


def test_rates_and_weight_decay_follow_their_schedules() -> None:
    run_ranks(1, _schedules)


def test_a_growing_weight_decay_is_that_of_a_plain_loop() -> None:
    growing = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.9"
    run_ranks(2, train_beside_plain, growing, 4)


# --- checkpoints ------------------------------------------------------------------------------------------------------

SAVED = 3
WHOLE = f"{GQA} --swiglu"


def _save(folder: str, flags: str) -> None:
    with train_state(f"{TINY} {flags} --save {folder} --exit-interval {SAVED}") as state:
        for _ in range(SAVED):
            training.train_step(state)


def _continue(folder: str, flags: str) -> float:
    """Load, compare everything with the file bit by bit, and train on; return the loss."""
    with train_state(f"{TINY} {flags} --load {folder} --no-load-rng") as state:
        assert state.first_iteration == SAVED + 1
        found: dict[str, Any] = {}
        for name, values in names.optimizer_keys(state.optimizer, state.chunks[0])["state"].items():
            found |= {f"optimizer.state.{name}.{key}": value for key, value in values.items()}
        for chunk in state.chunks:
            found |= {f"model.{name}": value for name, value in names.model_keys(chunk).items()}
        expected = load_tensors(Path(folder) / f"iter_{SAVED:07d}")
        momenta = [key for key in found if key.endswith(".momentum_buffer")]
        assert len(momenta) == 10 and found.keys() == expected.keys()
        for key, value in found.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(whole, expected[key]), key
        assert all(bool(expected[key].count_nonzero()) for key in momenta)
        before = {
            id(group): (group["parts"], group["joins_pieces"]) for group in state.optimizer.optimizer.matrix_groups
        }
        loss: float = training.train_step(state).lm_loss
        groups = state.optimizer.optimizer.matrix_groups
        assert before == {id(group): (group["parts"], group["joins_pieces"]) for group in groups}
        return loss


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((2, ""), (4, "")),
        ((2, "--data-parallel-sharding-strategy optim"), (1, "")),
        ((1, ""), (2, f"{TP2} --muon-tp-mode duplicated")),
        ((4, f"{TP2} --sequence-parallel"), (2, "--data-parallel-sharding-strategy no_shard")),
        ((2, "--muon-split-gate-up --muon-no-split-qkv"), (4, f"{TP2} --muon-split-gate-up")),
    ],
    ids=_named,
)
def test_a_checkpoint_moves_to_another_layout(one: tuple[int, str], other: tuple[int, str], tmp_path: Path) -> None:
    """Momentum and weights bit by bit; how matrices are split is the loading run's own choice."""
    run_ranks(one[0], _save, str(tmp_path), f"{WHOLE} {one[1]}")
    same = run_ranks(one[0], _continue, str(tmp_path), f"{WHOLE} {one[1]}")
    moved = run_ranks(other[0], _continue, str(tmp_path), f"{WHOLE} {other[1]}")
    # The same weights and samples; sums come in another order.
    assert moved[0] == pytest.approx(same[0], rel=1e-5)


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ("muon", "adam", "got that of muon"),
        ("adam", "muon", "got that of an element-wise optimizer"),
        ("muon", "sgd", "got that of muon"),
        ("sgd", "muon", "got that of an element-wise optimizer"),
    ],
)
def test_another_optimizers_state_is_refused_on_every_rank(
    saved: str, loaded: str, message: str, tmp_path: Path
) -> None:
    """SGD's state has the name of Muon's."""
    run_ranks(2, _save, str(tmp_path), f"--optimizer {saved}")
    for text in run_ranks_expecting(2, CheckpointError, _continue, str(tmp_path), f"--optimizer {loaded}"):
        assert "optimizer state of decoder.layers." in text and message in text
        assert "Go on with the optimizer, and the choice of matrices, that has saved it" in text


def _copies_of_the_embedding(flags: str) -> list[tuple[str, float]]:
    with train_state(f"{TINY} {flags} --optimizer muon") as state:
        for _ in range(2):
            training.train_step(state)
        groups = {id(p): group["algorithm"] for group in state.optimizer.param_groups for p in group["params"]}
        return [
            (groups[id(parameter)], float(parameter.full_tensor().double().sum()))
            for name, parameter in state.chunks[0].named_parameters()
            if "word_embeddings" in name
        ]


def test_copies_of_an_embedding_on_two_stages_stay_equal() -> None:
    """The last stage's copy, for predictions, lacks megatron-core's mark of embeddings."""
    flags = "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --position-embedding-type rope"
    first, last = run_ranks(2, _copies_of_the_embedding, flags)
    assert first == last and [kind for kind, _ in first] == ["AdamW"]


def test_a_checkpoint_of_fewer_layers_is_named_as_such(tmp_path: Path) -> None:
    run_ranks(1, _save, str(tmp_path), "--optimizer muon")
    for text in run_ranks_expecting(1, CheckpointError, _continue, str(tmp_path), "--optimizer muon --num-layers 3"):
        assert "decoder.layers.2" in text and "expected that of muon" not in text


def _continue_anew(folder: str, flags: str) -> None:
    with train_state(f"{TINY} {flags} --load {folder} --no-load-rng --no-load-optim") as state:
        assert not state.optimizer.optimizer.state
        training.train_step(state)


def test_weights_alone_are_loaded_whatever_has_saved_them(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), "--optimizer adam")
    run_ranks(2, _continue_anew, str(tmp_path), "--optimizer muon")


def _read_of_ddp() -> None:
    source = TorchDistSource.__new__(TorchDistSource)
    source._saved, source._ranks = SimpleNamespace(common={}), Ranks(torch.device("cpu"))  # type: ignore[assignment]
    source.path = Path("saved")
    state: Any = SimpleNamespace(args=SimpleNamespace(optimizer="muon"))
    source.load(state, loads_optimizer=True, loads_rng=False)


def test_adams_state_of_megatron_cores_ddp_is_refused() -> None:
    for text in run_ranks_expecting(2, CheckpointError, _read_of_ddp):
        assert "expected --no-load-optim with --optimizer muon, since state of megatron-core's DDP is read for" in text
