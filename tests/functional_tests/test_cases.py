# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Every case under test_cases/gpt must print its golden values."""

import pytest

from .golden import case_names, compare, environment, read_golden, run_case

HERE = {"torch": "2.13.0", "cpu_capability": "AVX512", "cpu": "a model"}


@pytest.mark.parametrize("name", case_names())
def test_case_prints_its_golden_values(name: str) -> None:
    compare(read_golden(name), run_case(name).printed(), environment())


def golden(loss: str = "5.735671E+00", norm: str = "1.234") -> dict:
    return {"environment": HERE, "values": {"lm loss": [loss], "grad norm": [norm]}}


def test_the_last_printed_digit_counts_where_the_golden_values_were_made() -> None:
    with pytest.raises(AssertionError, match=r"lm loss, value 1: expected 5.735671E\+00"):
        compare(golden(), {"lm loss": ["5.735672E+00"], "grad norm": ["1.234"]}, HERE)


def test_elsewhere_values_must_be_close() -> None:
    elsewhere = {**HERE, "cpu_capability": "AVX2"}
    compare(golden(), {"lm loss": ["5.735672E+00"], "grad norm": ["1.235"]}, elsewhere)
    with pytest.raises(AssertionError, match=r"within 5\.7e-05"):
        compare(golden(), {"lm loss": ["5.737671E+00"], "grad norm": ["1.234"]}, elsewhere)
    with pytest.raises(AssertionError, match="grad norm, value 1"):
        compare(golden(), {"lm loss": ["5.735671E+00"], "grad norm": ["1.239"]}, elsewhere)


def test_a_missing_line_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="lm loss: 0 of 1"):
        compare(golden(), {"lm loss": [], "grad norm": []}, HERE)


def test_a_case_without_golden_values_names_the_command() -> None:
    with pytest.raises(AssertionError, match=r"golden no_such_case"):
        read_golden("no_such_case")
