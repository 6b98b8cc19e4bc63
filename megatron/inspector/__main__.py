# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron.inspector`` is ``mfsdp-ckpt``, where that is not on the path; nothing else."""

import sys

from megatron.inspector.command import main

sys.exit(main())
