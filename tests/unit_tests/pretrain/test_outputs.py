# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import os
import re
from pathlib import Path

import pytest

from megatron.pretrain.main import read_command

FLAGS = ("--plot", "--log-json", "--tensorboard-dir", "--profile-schedule")
LAST_AND_OTHER = [{"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank} for rank in "01"]


def assert_refused(flag: str, path: Path, message: str) -> None:
    for environment in LAST_AND_OTHER:
        with pytest.raises(ValueError, match=rf"expected {message} for {flag}\. .+\.$") as error:
            read_command([flag, str(path)], environment)
        assert re.fullmatch(r"\w+: expected .+, got .+ for --[\w-]+\. .+\.", str(error.value))


@pytest.mark.parametrize("name", ["loss", "loss.gif", "loss.png.txt", "png"])
def test_a_plot_needs_a_suffix_that_can_be_drawn(tmp_path: Path, name: str) -> None:
    assert_refused("--plot", tmp_path / name, rf"a path that ends in \.png, \.pdf, \.svg, got .*{name}")


@pytest.mark.parametrize("name", ["loss.png", "loss.pdf", "loss.svg", "loss.PNG"])
def test_a_sound_path_is_accepted_and_nothing_is_left_but_folders(tmp_path: Path, name: str) -> None:
    words = [word for flag in FLAGS for word in (flag, str(tmp_path / flag[2:] / name))]
    read_command(words, {})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (tmp_path / "plot").is_dir()


def test_a_device_is_accepted_whose_folder_cannot_be_written() -> None:
    assert read_command(["--log-json", os.devnull], {}).args.log_json == os.devnull


@pytest.mark.parametrize("flag", FLAGS)
def test_a_folder_below_a_file_is_refused(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "below" / "loss.png"
    assert_refused(flag, path, r"a folder that can be made and written, got .*below.* \(Not a directory\)")


@pytest.mark.parametrize("flag", FLAGS)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*, dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    # A superuser may write everywhere, so permissions alone would not do.
    monkeypatch.setattr("megatron.pretrain.outputs.tempfile.TemporaryFile", refuse)
    assert_refused(flag, tmp_path / "loss.png", r"a folder that can be made .*, got .* \(Permission denied\)")


@pytest.mark.parametrize("flag", FLAGS[:2])
def test_a_folder_is_no_file(tmp_path: Path, flag: str) -> None:
    (tmp_path / "loss.png").mkdir()
    assert_refused(flag, tmp_path / "loss.png", r"a path of a file, got the folder .*loss\.png")


@pytest.mark.parametrize("flag", FLAGS[:2])
def test_a_read_only_file_is_refused(tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loss.png").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_refused(flag, tmp_path / "loss.png", r"a file that can be written, got the read-only .*loss\.png")


@pytest.mark.parametrize(
    ("flag", "library"),
    [("--plot", "matplotlib"), ("--profile-schedule", "matplotlib"), ("--tensorboard-dir", "tensorboard")],
)
def test_a_missing_library_is_named(tmp_path: Path, flag: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert_refused(flag, tmp_path / "loss.png", f"an installed {library}, got none")
