# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The table of cases is complete, current, and says what the source says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cases import CASES, DOCUMENT, ROOT, SCOPES, find_tests, missing, render


def test_the_document_is_what_the_generator_prints() -> None:
    assert DOCUMENT.read_text() == render(find_tests()), "run python -m tests.cases"


def test_cases_are_distinct() -> None:
    assert len({case.number for case in CASES}) == len(CASES) == 76
    assert {case.scope for case in CASES} == SCOPES.keys()


def test_no_test_names_a_case_that_does_not_exist() -> None:
    assert find_tests().keys() <= {case.name for case in CASES}


def test_every_case_in_scope_has_a_test() -> None:
    assert not missing(find_tests())


def test_refusals_are_worded_as_in_the_source() -> None:
    words = [
        node.value
        for path in (ROOT / "megatron").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for case in CASES:
        assert any(case.refused in text for text in words), f"{case.name}: {case.refused}"


@pytest.mark.parametrize(
    ("file", "function", "found"),
    [
        ("unit_tests/test_a.py", "test_pb009_x", {"pb009": ["test_pb009_x"]}),
        ("unit_tests/test_a.py", "_pb009_x", {}),
        ("unit_tests/test_a.py", "check_pb068_x", {}),
        ("gpu/check_a.py", "check_pb068_x", {"pb068": ["check_pb068_x (GPU)"]}),
        ("gpu/check_a.py", "pb068_x", {"pb068": ["pb068_x (GPU)"]}),
        ("unit_tests/test_a.py", "test_pb9_x", {"pb9": ["test_pb9_x"]}),
    ],
)
def test_tests_are_found_by_name(tmp_path: Path, file: str, function: str, found: dict[str, list[str]]) -> None:
    path = tmp_path / "tests" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"def {function}():\n    pass\n")
    assert find_tests(tmp_path) == found
    assert "pb009" in missing({}) and "pb009" not in missing({"pb009": ["x"]})
