# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt``: looks into checkpoints, compares and exports them, in one CPU process with bounded memory."""
