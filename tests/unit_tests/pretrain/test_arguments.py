# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import pytest

from megatron.pretrain.arguments import _build_parser, parse_arguments
from megatron.pretrain.refused import REFUSED_FLAGS


def test_values_are_converted_and_the_written_flags_remembered() -> None:
    args = parse_arguments(["--num-layers", "3", "--lr=2e-3", "--swiglu", "--data-path", "0.5", "a"])
    assert (args.num_layers, args.lr, args.swiglu) == (3, 2e-3, True)
    assert args.data_path == ["0.5", "a"]
    assert args.given == {"--num-layers", "--lr", "--swiglu", "--data-path"}


def test_the_empty_command_line_is_a_run() -> None:
    args = parse_arguments([])
    assert args.given == set()
    assert not args.use_megatron_fsdp_v2


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--num-layer", "--num-layers"),
        ("--use-megatron-fsdp-2", "--use-megatron-fsdp-v2"),
        ("--warmup-iters", "--lr-warmup-iters"),
        ("--fsdp-v2", "--use-megatron-fsdp-v2"),
        ("--num-heads", "--num-attention-heads"),
        ("--trian-iters", "--train-iters"),
        ("--batch-size", "--micro-batch-size"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest(flag: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown flag: .* got {flag} .* Did you mean {nearest}?"):
        parse_arguments(["--swiglu", flag, "4"])


def test_an_unknown_flag_that_is_near_none_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match=r"got --zzz for the command line\. See --help") as error:
        parse_arguments(["--zzz"])
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_refused_flag_says_what_to_do(flag: str) -> None:
    with pytest.raises(ValueError, match="Unsupported flag") as error:
        parse_arguments([flag])
    assert f"got {flag} for the command line. {REFUSED_FLAGS[flag]}" in str(error.value)
    assert flag not in _build_parser()._option_string_actions


def test_all_bad_flags_are_listed_at_once() -> None:
    with pytest.raises(ValueError, match="Unsupported flag") as error:
        parse_arguments(["--use-flash-attn", "--num-layer=4", "--swiglu", "--profile", "--use-flash-attn"])
    first, second, third = str(error.value).splitlines()
    assert "got --use-flash-attn for" in first
    assert "Did you mean --num-layers?" in second
    assert "got --profile for" in third


def test_hints_name_flags_that_exist() -> None:
    known = _build_parser()._option_string_actions
    named = {word.rstrip(".,:;") for hint in REFUSED_FLAGS.values() for word in hint.split() if word.startswith("--")}
    assert named - {"--save"} <= set(known)


@pytest.mark.parametrize(
    ("flag", "cure"),
    [
        ("--checkpoint-activations", "--recompute-activations"),
        ("--no-position-embedding", "--position-embedding-type none"),
        ("--exit-duration-in-mins", "--train-iters"),
        ("--decoupled-lr", "--lr"),
        ("--log-throughput", "--log-json"),
        ("--wandb-project", "--tensorboard-dir"),
        ("--squared-relu", "--swiglu"),
        ("--fp8-dot-product-attention", "--fp8-recipe"),
        ("--reuse-grad-buf-for-mxfp8-param-ag", "--use-megatron-fsdp-v2"),
        ("--main-grads-dtype", "--megatron-fsdp-main-grads-dtype"),
        ("--overlap-param-gather-with-optimizer-step", "there is no gather to start within the step"),
        ("--cross-entropy-loss-fusion", "--transformer-impl"),
        ("--muon-scalar-optimizer", "Whatever is no matrix is adam's"),
        ("--lion-beta1", "Optimizers are adam, sgd and muon"),
    ],
)
def test_common_flags_of_megatron_lm_name_the_cure(flag: str, cure: str) -> None:
    with pytest.raises(ValueError, match=rf"^Unsupported flag: expected .*, got {flag} for .*{cure}\b"):
        parse_arguments([flag, "1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-layers", "0"], "expected an integer >= 1, got '0' for --num-layers"),
        (["--num-layers", "two"], "expected an integer >= 1, got 'two' for --num-layers"),
        (["--lr", "nan"], "expected a number >= 0, got 'nan' for --lr"),
        (["--lr", "-1"], "expected a number >= 0, got '-1' for --lr"),
        (["--lr", "inf"], "expected a number >= 0, got 'inf' for --lr"),
        (["--hidden-dropout", "1.5"], r"expected a number in \[0, 1\], got '1.5' for --hidden-drop"),
        (["--adam-beta1", "1.0"], r"expected a number in \[0, 1\), got '1.0' for --adam-beta1"),
        (["--adam-beta2", "1"], r"expected a number in \[0, 1\), got '1' for --adam-beta2"),
        (["--adam-beta2", "x"], r"expected a number in \[0, 1\), got 'x' for --adam-beta2"),
        (["--loss-scale", "0"], "expected a number > 0, got '0' for --loss-scale"),
        (["--initial-loss-scale", "inf"], "expected a number > 0, got 'inf' for --initial-loss-scale"),
        (["--min-loss-scale", "x"], "expected a number > 0, got 'x' for --min-loss-scale"),
        (["--hysteresis", "0"], "expected an integer >= 1, got '0' for --hysteresis"),
        (["--exp-avg-dtype", "fp16"], "expected one of fp32, bf16, got 'fp16' for --exp-avg-dtype"),
        (["--seed", "0"], r"expected an integer in \[1, 4294967295\], got '0' for --seed"),
        (["--seed", "4294967296"], r"expected an integer in \[1, 4294967295\], got '4294967296' for --seed"),
        (["--optimizer", "lion"], "expected one of adam, sgd, muon, got 'lion' for --optimizer"),
        (["--optimizer", "dist_muon"], "expected muon, which shards what it keeps .*, got 'dist_muon' for --optimizer"),
        (["--muon-num-ns-steps", "0"], r"expected an integer in \[1, 99\], got '0' for --muon-num-ns-steps"),
        (["--muon-momentum", "1"], r"expected a number in \[0, 1\), got '1' for --muon-momentum"),
        (["--muon-fp32-matmul-prec", "low"], "expected one of medium, high, highest, got 'low' for --muon-fp32"),
        (["--lr"], "expected one argument, got no value for --lr"),
        (["--data-path"], "expected at least one argument, got no value for --data-path"),
        (["--swiglu=1"], "ignored explicit argument '1', got a bad one for --swiglu"),
        (["--swiglu", "1"], "expected flags that start with --, got '1' for no flag"),
        (["-x"], "expected flags that start with --, got '-x' for no flag"),
    ],
)
def test_a_bad_value_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"Command line: {message}"):
        parse_arguments(words)


def test_help_shows_defaults_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "(default: 0.001)" in text
    assert "default: None" not in text
    assert all(action.help for action in _build_parser()._actions)
