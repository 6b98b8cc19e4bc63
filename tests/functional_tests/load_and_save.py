# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Reads the checkpoint of --load into a run and writes it to --save, without an iteration in between."""

import os
import sys

from megatron.pretrain.main import ignore_expected_warnings, read_command, stop_process_groups

if __name__ == "__main__":
    command = read_command(sys.argv[1:], os.environ)
    ignore_expected_warnings()

    from megatron.pretrain import cpu, data, launcher, training
    from megatron.pretrain.checkpointing import Checkpoints
    from megatron.pretrain.log import TrainingLog

    cpu.install()
    args = command.args
    args.transformer_impl = "local"
    launcher.start_process_groups(args, command.place)
    data.prepare_corpus(args, command.place)
    log = TrainingLog(args, is_writer=command.place.rank == 0)
    checkpoints = Checkpoints(args, log)
    iteration = checkpoints.open()
    state = training.build_train_state(args, data.build_iterators(args, iteration), log, iteration)
    checkpoints.load(state)
    checkpoints.save(state, iteration)
    log.close()
    stop_process_groups()
