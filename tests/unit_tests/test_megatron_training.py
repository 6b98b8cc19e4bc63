# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Which training loops of megatron-core are taken, and how names of theirs are replaced and given back."""

import sys
import types
from importlib.util import find_spec

import pytest

import megatron.core
from megatron.core.distributed.fsdp.megatron_training import MegatronTraining, Seam, enable_megatron_fsdp_v2

HAS_LOOP = find_spec("megatron.training") is not None


@pytest.mark.skipif(HAS_LOOP, reason="this megatron-core has a training loop")
def test_a_release_without_a_loop_is_refused() -> None:
    with pytest.raises(
        NotImplementedError, match=r"expected megatron-core 0\.19\.2, got .*, without megatron\.training"
    ):
        enable_megatron_fsdp_v2()


@pytest.mark.skipif(not HAS_LOOP, reason="megatron-core older than 0.19 has no training loop")
@pytest.mark.parametrize("version", ["0.19.1", "0.19.3", "0.20.0", "0.19.2rc1"])
def test_a_release_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    with pytest.raises(NotImplementedError, match=f"got {version}, whose loop was not tried"):
        enable_megatron_fsdp_v2()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module in the place of one of megatron.training."""
    module = types.ModuleType("megatron.training.stand_in")
    module.first = lambda args: "first"  # type: ignore[attr-defined]
    module.second = lambda args: "second"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def seam(name: str, *parameters: str) -> Seam:
    return Seam("stand_in", name, lambda old: lambda args: f"not {old(args)}", parameters)


def test_names_are_replaced_once_and_given_back(loop: types.ModuleType) -> None:
    first, second = loop.first, loop.second
    with MegatronTraining() as handle:
        handle.replace([seam("first", "args")])
        handle.replace([seam("first", "args"), seam("second")])
        assert handle.is_enabled
        assert (loop.first(None), loop.second(None)) == ("not first", "not second")
    assert not handle.is_enabled
    assert loop.first is first and loop.second is second
    handle.disable()
    assert loop.first is first


@pytest.mark.parametrize(
    ("missing", "found"), [(seam("third"), "got none"), (seam("second", "model"), r"'model',\), got \('args',\)")]
)
def test_a_changed_loop_is_refused_as_a_whole(loop: types.ModuleType, missing: Seam, found: str) -> None:
    first = loop.first
    handle = MegatronTraining()
    with pytest.raises(RuntimeError, match=f"expected {missing.path} with parameters .*{found}"):
        handle.replace([seam("first"), missing])
    assert loop.first is first and not handle.is_enabled


def test_later_changes_of_others_are_not_undone(loop: types.ModuleType) -> None:
    handle = MegatronTraining()
    handle.replace([seam("first"), seam("second")])
    ours, theirs = loop.first, lambda args: "theirs"
    loop.second = theirs  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"got others for \['megatron\.training\.stand_in\.second'\]"):
        handle.disable()
    assert loop.first is ours and loop.second is theirs
