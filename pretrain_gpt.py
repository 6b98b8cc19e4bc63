# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Pretrains a GPT with Megatron-FSDP v2.

    torchrun --nproc_per_node 2 pretrain_gpt.py --use-megatron-fsdp-v2 --plot runs/loss.png

trains a small model on the bytes of the Python standard library, on CUDA devices or on CPU cores.
Without ``--use-megatron-fsdp-v2`` the same model trains with megatron-core's DDP; ``--help`` lists
the flags, which are Megatron-LM's; ``docs/pretrain.md`` says more.
"""

import os
import sys

from megatron.pretrain.main import ignore_expected_warnings, pretrain, read_command

if __name__ == "__main__":
    command = read_command(sys.argv[1:], os.environ)
    ignore_expected_warnings()

    import torch

    if not torch.cuda.is_available():
        from megatron.pretrain.cpu import install

        install()
    pretrain(command)
