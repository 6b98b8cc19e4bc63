# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models on PyTorch DCP: atomic, verified, and readable without executing anything in them."""

from .background_writer import BackgroundWriter
from .checkpoint import CheckpointSaver, load_checkpoint, save_checkpoint
from .errors import CheckpointError
from .folder import (
    LATEST,
    clean_interrupted,
    commit,
    committed_iterations,
    iteration_folder,
    keep_last,
    read_latest,
    staging_path,
    write_latest,
    write_manifest,
)
from .locks import being_written
from .manifest import checksum_file
from .optimizer_state import create_state, require_same_rules, set_settings, set_state, settings_by_name, state_by_name
from .pieces import Piece, is_whole, read_pieces
from .planner import CompleteSavePlanner
from .ranks import Ranks
from .read import LoadReport, OpenCheckpoint, Verification
from .reader import load_entry, load_metadata
from .unpickle import load_torch_file
from .write import write_checkpoint

__all__ = [
    "LATEST",
    "BackgroundWriter",
    "CheckpointError",
    "CheckpointSaver",
    "CompleteSavePlanner",
    "LoadReport",
    "OpenCheckpoint",
    "Piece",
    "Ranks",
    "Verification",
    "being_written",
    "checksum_file",
    "clean_interrupted",
    "commit",
    "committed_iterations",
    "create_state",
    "is_whole",
    "iteration_folder",
    "keep_last",
    "load_checkpoint",
    "load_entry",
    "load_metadata",
    "load_torch_file",
    "read_latest",
    "read_pieces",
    "require_same_rules",
    "save_checkpoint",
    "set_settings",
    "set_state",
    "settings_by_name",
    "staging_path",
    "state_by_name",
    "write_checkpoint",
    "write_latest",
    "write_manifest",
]
