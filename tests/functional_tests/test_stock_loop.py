# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own training loop with Megatron-FSDP v2: its losses with DDP, its checkpoints, what it refuses."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.megatron_training import MegatronTraining, enable_megatron_fsdp_v2

from .forked import run_forked
from .launch_script import free_port, launch_forked
from .tensors import load_tensors

pytestmark = pytest.mark.skipif(
    find_spec("megatron.training") is None, reason="megatron-core older than 0.19 has no training loop"
)

SCRIPT = "tests/functional_tests/stock_on_cpu.py"
V2 = "--use-megatron-fsdp-v2"
TIMEOUT_S = 300.0
MODEL = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--swiglu"),
    *("--max-position-embeddings", "32", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--disable-bias-linear", "--mock-data", "--bf16"),
)
TRAINING = (
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "5", "--lr", "1e-2", "--min-lr", "1e-3"),
    *("--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--num-workers", "0", "--log-interval", "1"),
    *("--eval-interval", "10", "--eval-iters", "1", "--seed", "1234"),
)
STOCK = (
    *("--transformer-impl", "local", "--attention-backend", "unfused", "--no-persist-layer-norm"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-dropout-fusion"),
    *("--no-bias-swiglu-fusion", "--no-rope-fusion", "--distributed-backend", "gloo"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "128"),
)
FLAGS = (*MODEL, *TRAINING, *STOCK)
# The loop adds no id for ends of documents, of which pretrain_gpt.py makes the 128th.
OURS = (*MODEL, *TRAINING, "--vocab-size", "127", V2)
_LINE = re.compile(r"iteration +(\d+)/ .* lm loss: (\S+) \|.* grad norm: (\S+) \|(?:.* params norm: (\S+) \|)?")
_VALIDATION = re.compile(r"validation loss at iteration \d+ on (validation|test) set \| lm loss value: (\S+) \|")


@dataclass(frozen=True)
class Lines:
    """What the loop printed: losses, norms of gradients and of parameters by iteration, and validation losses."""

    losses: dict[int, str]
    norms: dict[int, str]
    parameters: dict[int, str]
    validation: tuple[tuple[str, str], ...]


def _read(output: str) -> Lines:
    rows = [(int(row[0]), *row[1:]) for row in _LINE.findall(output)]
    columns = ({row[0]: row[column] for row in rows} for column in (1, 2, 3))
    return Lines(*columns, tuple(_VALIDATION.findall(output)))


def run(*words: str, num_ranks: int = 2) -> Lines:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_forked(words, num_ranks, free_port(), Path(folder), TIMEOUT_S, script=SCRIPT)
    for code, stdout, stderr in ranks:
        assert code == 0, f"{words}\n{stdout[-2000:]}\n{stderr[-4000:]}"
    return _read("".join(stdout for _, stdout, _ in ranks))


@cache
def _ddp() -> Lines:
    return run(*FLAGS, "--log-params-norm")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lines, Path]]:
    """A run that has saved after three iterations and at the end, and what it printed."""
    folder = tmp_path_factory.mktemp("stock")
    save = ("--save", str(folder), "--save-interval", "3")
    yield run(*FLAGS, V2, "--log-params-norm", *save), folder


def test_zero3_prints_the_lines_of_ddp(saved: tuple[Lines, Path]) -> None:
    expected, found = _ddp(), saved[0]
    assert list(found.losses) == list(expected.losses) == [1, 2, 3, 4, 5]
    assert found.parameters == expected.parameters and len(set(found.parameters.values())) > 3
    assert len(found.validation) == len(expected.validation) == 2
    # Gradients of microbatches are summed before those of ranks, or after: fp32 sums in another order, which bf16
    # weights of the next iteration may round the other way.
    for name in ("losses", "norms"):
        want, have = (list(map(float, getattr(lines, name).values())) for lines in (expected, found))
        assert have == pytest.approx(want, rel=2e-3), name
    assert found.losses[1] == expected.losses[1]


def test_zero1_from_a_provider_prints_the_same_digits_as_ddp() -> None:
    flags = ("--data-parallel-sharding-strategy", "optim", "--log-params-norm")
    assert run("--by-provider", *FLAGS, V2, *flags) == _ddp()


def test_a_run_goes_on_where_it_was_saved(saved: tuple[Lines, Path], tmp_path: Path) -> None:
    straight, folder = saved
    found = run(*FLAGS, V2, "--load", str(folder), "--ckpt-step", "3", "--save", str(tmp_path), "--save-interval", "5")
    assert list(found.norms) == [4, 5]
    assert found.norms == {iteration: straight.norms[iteration] for iteration in (4, 5)}
    # After its first iteration the loop does not clear the sum of losses: the second line has the mean of both.
    assert found.losses[4] == straight.losses[4] and found.validation == straight.validation
    expected, have = (load_tensors(at / "iter_0000005") for at in (folder, tmp_path))
    assert any(key.endswith("linear_fc1.weight_v.exp_avg_sq") for key in expected) and have.keys() == expected.keys()
    assert all(torch.equal(have[key], value) for key, value in expected.items())


def test_checkpoints_move_to_pretrain_gpt_and_back(saved: tuple[Lines, Path], tmp_path: Path) -> None:
    straight, folder = saved
    save = ("--load", str(folder), "--ckpt-step", "3", "--save", str(tmp_path), "--exit-interval", "4")
    ours = launch_forked((*OURS, *save), 1, TIMEOUT_S)
    assert ours.returncode == 0, ours.stderr[-4000:]
    # Its attention is another kernel, in bf16; one rank adds up in another order.
    assert ours.series("lm_loss") == pytest.approx([float(straight.losses[4])], rel=2e-3)
    back = run(*FLAGS, V2, "--load", str(tmp_path))
    assert list(back.losses) == [5]
    assert float(back.losses[5]) == pytest.approx(float(straight.losses[5]), rel=2e-3)
    assert float(back.norms[5]) == pytest.approx(float(straight.norms[5]), rel=2e-2)


def test_muon_trains_goes_on_and_refuses_adams_checkpoint(saved: tuple[Lines, Path], tmp_path: Path) -> None:
    muon = (V2, "--optimizer", "muon", "--muon-nesterov", "--muon-split-gate-up")
    save = ("--save", str(tmp_path), "--save-interval", "3")
    straight = run(*FLAGS, *muon, *save)
    assert list(straight.losses) == [1, 2, 3, 4, 5] and straight.losses[1] == saved[0].losses[1]
    assert straight.losses[3] != saved[0].losses[3]
    expected = load_tensors(tmp_path / "iter_0000005")
    folder = tmp_path / "gone_on"
    save_again = ("--save", str(folder), "--save-interval", "5")
    found = run(*FLAGS, *muon, "--load", str(tmp_path), "--ckpt-step", "3", *save_again)
    assert found.norms == {iteration: straight.norms[iteration] for iteration in (4, 5)}
    have = load_tensors(folder / "iter_0000005")
    assert sum(key.endswith(".momentum_buffer") for key in expected) == 10 and have.keys() == expected.keys()
    assert all(torch.equal(have[key], value) for key, value in expected.items())
    ours = launch_forked((*OURS, *muon[1:], "--load", str(tmp_path), "--ckpt-step", "3"), 2, TIMEOUT_S)
    assert ours.returncode == 0, ours.stderr[-4000:]
    # Its attention is another kernel, in bf16.
    assert ours.series("lm_loss")[0] == pytest.approx(float(straight.losses[4]), rel=2e-3)
    # The loop reads before it asks the optimizer, so that the message is torch's.
    with tempfile.TemporaryDirectory() as logs:
        words = (*FLAGS, *muon, "--load", str(saved[1]))
        for code, _, stderr in run_forked(words, 2, free_port(), Path(logs), TIMEOUT_S, script=SCRIPT):
            assert code != 0 and "Missing key in checkpoint state_dict: optimizer.state." in stderr, stderr[-4000:]


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Iterator[MegatronTraining]:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    # The loop asks for the generation of the devices.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    with enable_megatron_fsdp_v2() as enabled:
        yield enabled


def _parse(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> Any:
    from megatron.training import arguments

    monkeypatch.setattr(sys, "argv", ["pretrain_stock.py", *words])
    return arguments.validate_args(arguments.parse_args(), {})


def _wrappers() -> tuple[Any, ...]:
    from megatron.training import checkpointing, training
    from megatron.training.models import dist_utils

    return (
        training.megatron_FSDP,
        dist_utils.FullyShardedDataParallel,
        checkpointing.unwrap_model,
        checkpointing.preprocess_fsdp_dtensor_state_dict,
    )


def test_only_the_flag_puts_the_wrapper_in_place(handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = _wrappers()
    own = (*FLAGS, "--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor")
    for words in (FLAGS, own):
        args = _parse(monkeypatch, words)
        assert not args.use_megatron_fsdp_v2 and _wrappers() == stock
    args = _parse(monkeypatch, (*FLAGS, V2))
    assert args.use_megatron_fsdp and args.ckpt_format == "fsdp_dtensor" and args.overlap_grad_reduce
    assert not set(_wrappers()) & set(stock)
    handle.disable()
    assert _wrappers() == stock


def test_a_second_call_is_refused_until_the_first_is_undone(handle: MegatronTraining) -> None:
    with pytest.raises(RuntimeError, match="expected one call, got another while it is enabled"):
        enable_megatron_fsdp_v2()
    handle.disable()
    enable_megatron_fsdp_v2().disable()


def test_a_call_after_parsing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import arguments, global_vars

    monkeypatch.setattr(sys, "argv", ["pretrain_stock.py", *FLAGS])
    args = arguments.parse_args()
    with enable_megatron_fsdp_v2(), pytest.raises(RuntimeError, match="got arguments that were parsed before it"):
        arguments.validate_args(args, {})
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    with pytest.raises(RuntimeError, match="expected a call before arguments are parsed, got one afterwards"):
        enable_megatron_fsdp_v2()


def test_what_validates_is_refused_once_disabled(handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import arguments

    monkeypatch.setattr(sys, "argv", ["pretrain_stock.py", *FLAGS, V2])
    args, validate_args = arguments.parse_args(), arguments.validate_args
    stock = _wrappers()
    handle.disable()
    with pytest.raises(RuntimeError, match=r"got arguments after disable\(\)"):
        validate_args(args, {})
    assert _wrappers() == stock


def test_a_model_of_another_wrapper_is_refused(handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import global_vars, training

    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(use_megatron_fsdp_v2=True))
    with pytest.raises(RuntimeError, match=r"got \['Linear'\]; validate_args was imported before"):
        training.get_megatron_optimizer(None, [torch.nn.Linear(2, 2)])


def test_another_end_of_gradients_is_refused() -> None:
    from megatron.core.distributed.fsdp.megatron_training_model import LoopFullyShardedDataParallel

    config: Any = SimpleNamespace(finalize_model_grads_func=print)
    with pytest.raises(ValueError, match="finalize_model_grads_func: expected None with --use-megatron-fsdp-v2, got "):
        LoopFullyShardedDataParallel(config, None, torch.nn.Linear(2, 2))  # type: ignore[arg-type]


STAGES = ("--num-layers", "4", "--pipeline-model-parallel-size", "2")
CHUNKS = (*STAGES, "--num-layers-per-virtual-pipeline-stage", "1")
SAVE = ("--save", "nowhere", "--save-interval", "3")
REFUSED = {
    "--use-megatron-fsdp": ((), "--use-megatron-fsdp: expected it off with --use-megatron-fsdp-v2, got True"),
    "--data-parallel-random-init": ((), "--data-parallel-random-init: expected it off"),
    "--async-save": (SAVE, "--async-save: expected it off"),
    "--skip-train": ((), "--skip-train: expected it off"),
    "--save-wgrads-interval": (("2",), "--save-wgrads-interval: expected it off with --use-megatron-fsdp-v2, got 2"),
    "--ckpt-format": (("torch_dist",), "--ckpt-format: expected fsdp_dtensor with --use-megatron-fsdp-v2, got torch"),
    "--log-params-norm": (STAGES, r"--log-params-norm: expected no pipeline stages .* got 2 and 1"),
    "--save": (("nowhere", "--save-interval", "3", *CHUNKS), "expected one chunk of the model on each stage .* got 2"),
    "--ddp-bucket-size": (("1000",), r"ddp_config\.bucket_size: expected None, got 1000"),
    "--fsdp-double-buffer": ((), r"ddp_config\.fsdp_double_buffer: expected False, got True"),
    "--cuda-graph-impl": (("local", "--te-rng-tracker"), "cuda_graph_impl: expected it off, got 'local'"),
    "--optimizer": (("dist_muon",), "got 'dist_muon'. Use 'muon'"),
    "--muon-tp-mode": (("distributed", "--optimizer", "muon"), "each whole matrix is computed once, by one rank"),
    "--muon-scalar-optimizer": (("lion", "--optimizer", "muon"), "muon_scalar_optimizer: expected 'adam'"),
    "--optimizer-cpu-offload": (
        ("--use-precision-aware-optimizer",),
        r"OptimizerConfig\.optimizer_cpu_offload: expected False, got True",
    ),
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_fsdp_v2_refuses_is_refused(handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    values, message = REFUSED[flag]
    stock = _wrappers()
    with pytest.raises(NotImplementedError, match=message):
        _parse(monkeypatch, (*FLAGS, V2, flag, *values))
    assert _wrappers() == stock


def test_refused_arguments_are_known_to_the_loop(handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import arguments

    from megatron.core.distributed.fsdp.megatron_training_arguments import _REFUSED

    monkeypatch.setattr(sys, "argv", ["pretrain_stock.py"])
    parsed = vars(arguments.parse_args())
    assert {name: parsed[name] for name in _REFUSED} == {name: default for name, (default, _) in _REFUSED.items()}


@pytest.mark.parametrize(
    "words",
    [
        ("--fsdp-trace-pool",),
        ("--megatron-fsdp-min-unit-numel", "9"),
        ("--expert-data-parallel-sharding-strategy", "optim"),
        ("--expert-outer-dp-sharding-strategy", "optim"),
        ("--muon-split-gate-up",),
        ("--muon-router-adam",),
    ],
)
def test_flags_of_v2_alone_are_refused(
    handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=f"expected --use-megatron-fsdp-v2, got a run without it for .*{words[0]}"):
        _parse(monkeypatch, (*FLAGS, *words))


def test_muons_flags_arrive_and_need_muon(handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected --optimizer muon, got a run without it for \['--muon-split-g"):
        _parse(monkeypatch, (*FLAGS, V2, "--muon-split-gate-up"))
    args = _parse(monkeypatch, (*FLAGS, V2, "--optimizer", "muon", "--muon-router-adam"))
    assert (args.optimizer, args.muon_router_adam, args.muon_split_gate_up) == ("muon", True, False)
    assert not args.use_layer_wise_distributed_optimizer


def test_strategies_of_experts_arrive_and_need_experts_that_ranks_share(
    handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.distributed.fsdp.megatron_training_arguments import ddp_config

    words = (*FLAGS, V2, "--expert-data-parallel-sharding-strategy", "optim")
    with pytest.raises(ValueError, match="expert_data_parallel_sharding_strategy: expected None without expert paral"):
        _parse(monkeypatch, words)
    monkeypatch.setenv("WORLD_SIZE", "4")
    shared = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--num-distributed-optimizer-instances", "2")
    config = ddp_config(_parse(monkeypatch, (*words, *shared, "--expert-outer-dp-sharding-strategy", "optim")))
    assert config.data_parallel_sharding_strategy == "optim_grads_params"
    assert (config.expert_data_parallel_sharding_strategy, config.expert_outer_dp_sharding_strategy) == ("optim",) * 2


def test_nccl_buffers_bring_none_of_the_loops(handle: MegatronTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.megatron_training_arguments import ddp_config

    args = _parse(monkeypatch, (*FLAGS, V2, "--use-nccl-ub", "--fsdp-trace-pool"))
    config = ddp_config(args)
    assert config.nccl_ub and config.megatron_fsdp_trace_pool and not config.fsdp_double_buffer
    assert config.grad_reduce_in_fp32 and config.megatron_fsdp_main_params_dtype is torch.float32
