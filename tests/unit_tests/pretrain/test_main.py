# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.pretrain.main import read_command, suggest_next

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_next_drops_the_flags_of_the_wrapper_that_was_used() -> None:
    line = (
        "--use-megatron-fsdp-v2 --data-parallel-sharding-strategy optim_grads_params --fsdp-trace-pool "
        "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim --num-layers 2"
    )
    command = read_command(line.split(), LAUNCHED)
    assert suggest_next(command) == "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2"


def test_next_after_muon_is_adam_with_the_other_wrapper() -> None:
    line = "--optimizer muon --muon-momentum 0.9 --use-megatron-fsdp-v2 --muon-no-split-qkv --lr 1e-2"
    assert suggest_next(read_command(line.split(), {})) == "python pretrain_gpt.py --lr 1e-2"


def test_next_overwrites_no_output_and_counts_the_ranks_of_one_node(tmp_path: Path) -> None:
    folder = str(tmp_path)
    line = (
        f"--plot {folder}/a.png --seed 3 --log-json={folder}/b --tensorboard-dir {folder} --tensorboard-log-interval 2 "
        f"--profile-schedule {folder} --profile-step-start 3 --profile-step-end 5"
    )
    command = read_command(line.split(), LAUNCHED | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert suggest_next(command) == "torchrun --nproc_per_node 4 pretrain_gpt.py --use-megatron-fsdp-v2 --seed 3"


def test_next_without_a_launcher() -> None:
    line = "--overlap-grad-reduce --ddp-bucket-size 7 --lr=1e-2 --seed 3"
    command = read_command(line.split(), {})
    assert suggest_next(command) == ("python pretrain_gpt.py --use-megatron-fsdp-v2 --lr=1e-2 --seed 3")


def test_the_batch_is_checked_against_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"a multiple of 8 .* got 12 for --global-batch-size"):
        read_command(["--global-batch-size", "12"], LAUNCHED)


def test_reading_the_command_line_does_not_import_megatron_core() -> None:
    script = (
        "import sys; from megatron.pretrain.main import read_command; read_command([], {});"
        "assert not any(name.startswith('megatron.core') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
