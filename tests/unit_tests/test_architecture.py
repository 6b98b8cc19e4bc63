# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The layers of docs/design.md, checked on the source: who imports whom, who names an accelerator, who communicates."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import SHARING_RUNS, group_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron/core/distributed/fsdp/experimental"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Bottom up; the right side is every file of the package that the left side may import.
MAY_IMPORT: dict[str, set[str]] = {
    "placement": set(),
    "packing": set(),
    "layout": {"packing"},
    "layout_report": {"layout"},
    "indexed_order": set(),
    "countdown": set(),
    "compiling": set(),
    "boundary": {"compiling"},
    "backward_task": {"compiling"},
    "operations": set(),
    "replaced": set(),
    "lent": set(),
    "phase": set(),
    "device": set(),
    "quantization": set(),
    "float_bits": set(),
    "block_views": {"float_bits"},
    "format_checks": {"quantization"},
    "triton_dequantize": {"block_views", "float_bits"},
    "triton_quantize": {"block_views", "float_bits", "triton_dequantize"},
    "format_kernels": {"triton_dequantize", "triton_quantize"},
    "number_formats": {"block_views", "float_bits", "format_checks", "format_kernels", "quantization"},
    "recipes": {"number_formats", "quantization"},
    "te_formats": {"block_views", "float_bits", "number_formats", "quantization"},
    "te_weights": {"number_formats", "quantization", "te_formats"},
    "scale_plan": {"layout", "quantization"},
    "policy": {"placement", "recipes"},
    "collectives": {"device"},
    "checksum": set(),
    "lockstep": {"collectives"},
    "allocator": set(),
    "slot_plan": set(),
    "trace_pool": {"allocator", "device", "slot_plan"},
    "scalars": set(),
    "shard_mesh": {"placement"},
    "model_cut": {"layout"},
    "geometry": {"layout", "collectives", "placement", "shard_mesh", "model_cut"},
    "chunks": {"geometry", "layout"},
    "dtensor": {"chunks", "geometry", "layout", "model_cut", "operations", "scalars", "shard_mesh"},
    "full_values": {"dtensor"},
    "waiting": {"compiling", "dtensor", "geometry", "operations"},
    "group_options": {"allocator", "layout", "model_cut", "policy", "te_weights"},
    "dbuffer": {"placement", "layout", "collectives", "allocator", "device", "shard_mesh"},
    "fused_gradients": {"dbuffer", "device"},
    "gradient_buffers": {"dbuffer", "group_options", "placement"},
    "gradients": {
        "allocator",
        "dbuffer",
        "device",
        "dtensor",
        "fused_gradients",
        "geometry",
        "gradient_buffers",
        "waiting",
    },
    "parameter_pair": {"dtensor", "geometry"},
    "parameter_group": {
        "checksum",
        "dbuffer",
        "device",
        "geometry",
        "gradient_buffers",
        "gradients",
        "group_options",
        "layout",
        "lent",
        "parameter_pair",
        "placement",
        "shard_mesh",
    },
    "initial_values": {"dtensor", "parameter_group"},
    "unit": {"device", "parameter_group", "indexed_order", "policy"},
    "communicators": {"collectives", "parameter_group", "placement", "unit"},
    "secondary_shard": {
        "backward_task",
        "collectives",
        "communicators",
        "dbuffer",
        "device",
        "group_options",
        "parameter_group",
        "placement",
        "shard_mesh",
        "unit",
    },
    "weight_planes": {"dbuffer", "device", "layout", "placement", "quantization", "scale_plan"},
    "quantized_group": {
        "collectives",
        "dbuffer",
        "device",
        "group_options",
        "layout",
        "parameter_group",
        "quantization",
        "secondary_shard",
        "weight_planes",
    },
    "te_group": {
        "backward_task",
        "compiling",
        "dbuffer",
        "device",
        "group_options",
        "layout",
        "parameter_group",
        "quantization",
        "quantized_group",
        "te_formats",
        "te_weights",
        "weight_planes",
    },
    "reductions": {"device", "gradients", "unit"},
    "agreement": {"checksum", "collectives", "group_options", "unit"},
    "learnt_order": {"indexed_order", "unit"},
    "prefetch": {"backward_task", "unit"},
    "symmetric_memory": {"allocator", "collectives", "device"},
    "context_memory": {"allocator", "device", "parameter_group", "symmetric_memory", "trace_pool", "unit"},
    "schedule": {
        "agreement",
        "backward_task",
        "communicators",
        "context_memory",
        "device",
        "indexed_order",
        "initial_values",
        "learnt_order",
        "prefetch",
        "quantized_group",
        "reductions",
        "secondary_shard",
        "unit",
    },
    "controls": {"compiling", "policy", "prefetch", "schedule", "unit"},
    "graph_device": set(),
    "graph_values": set(),
    "sealed": set(),
    "module": {
        "backward_task",
        "schedule",
        "unit",
        "parameter_group",
        "boundary",
        "controls",
        "phase",
        "countdown",
        "policy",
        "device",
        "sealed",
    },
    "hooks": {"boundary", "compiling", "module", "phase"},
    "unit_recording": {"allocator", "graph_values", "hooks", "parameter_group"},
    "unit_graph": {"allocator", "graph_device", "graph_values", "unit_recording"},
    "context_graphs": {"graph_device", "unit_graph"},
    "graphed_forward": {
        "backward_task",
        "compiling",
        "context_graphs",
        "device",
        "graph_values",
        "module",
        "unit_graph",
    },
    "joint": {"backward_task", "compiling", "hooks", "module", "phase"},
    "registration": {"compiling", "dtensor", "module"},
    "ownership": {"group_options", "module", "recipes"},
    "checks": {"controls", "group_options", "initial_values", "module", "ownership", "policy", "te_weights"},
    "step_guard": {"compiling", "dtensor", "parameter_group"},
    "fully_shard": {
        "agreement",
        "allocator",
        "checks",
        "context_graphs",
        "device",
        "full_values",
        "graphed_forward",
        "group_options",
        "hooks",
        "joint",
        "module",
        "ownership",
        "parameter_group",
        "policy",
        "quantized_group",
        "registration",
        "replaced",
        "schedule",
        "secondary_shard",
        "step_guard",
        "te_group",
        "te_weights",
    },
    "norms": {"collectives", "compiling"},
    "elementwise": {"operations"},
    "local_step": {"dtensor", "parameter_group", "step_guard"},
    "graph_state": set(),
    "graph": {"graph_device", "graph_state", "graphed_forward", "module"},
    "matrix_rule": set(),
    "optimizer": {"compiling", "parameter_group", "dtensor", "elementwise", "full_values", "local_step", "matrix_rule"},
    "triton_matrix": set(),
    "matrix_arithmetic": {"triton_matrix"},
    "newton_schulz": {"matrix_arithmetic"},
    "matrix_blocks": set(),
    "matrix_plan": set(),
    "matrix_pipeline": {"collectives", "device", "matrix_plan"},
    "matrix_work": {
        "dtensor",
        "matrix_arithmetic",
        "matrix_blocks",
        "matrix_pipeline",
        "matrix_plan",
        "matrix_rule",
        "shard_mesh",
    },
    "matrix_optimizer": {"compiling", "dtensor", "matrix_blocks", "matrix_rule", "matrix_work"},
    "matrix_report": {"layout", "layout_report", "matrix_optimizer", "matrix_plan", "newton_schulz"},
    "matrix_choice": set(),
    "muon": {"matrix_choice", "matrix_optimizer", "matrix_rule", "newton_schulz", "optimizer"},
}
COMMUNICATION = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
}
FILES = sorted(PACKAGE.glob("*.py"))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _package_imports(path: Path) -> set[str]:
    """Return what a file imports from the package, but for what it does as a program, having been imported before."""
    tree = _tree(path)
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def _dotted_names(path: Path) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute)}


def test_every_file_is_in_the_table() -> None:
    assert {path.stem for path in FILES} == {*MAY_IMPORT, "__init__"}


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_imports_point_downwards(name: str) -> None:
    assert _package_imports(PACKAGE / f"{name}.py") <= MAY_IMPORT[name]
    order = list(MAY_IMPORT)
    assert all(order.index(imported) < order.index(name) for imported in MAY_IMPORT[name])


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_runtime_imports_only_torch_besides(name: str) -> None:
    for node in ast.walk(_tree(PACKAGE / f"{name}.py")):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        assert not [item for item in names if item.split(".")[0] in {"megatron", "transformer_engine", "apex"}]


@pytest.mark.parametrize("name", sorted(set(MAY_IMPORT) - {"device", "graph_device"}))
def test_only_device_names_an_accelerator(name: str) -> None:
    named = {item for item in _dotted_names(PACKAGE / f"{name}.py") if item.startswith(("torch.cuda", "torch.Stream"))}
    assert not named


@pytest.mark.parametrize("name", sorted(set(MAY_IMPORT) - {"collectives"}))
def test_only_collectives_communicates(name: str) -> None:
    communicating = {
        item
        for item in _dotted_names(PACKAGE / f"{name}.py")
        if item.startswith(("dist.", "torch.distributed.")) and item.rpartition(".")[2] in COMMUNICATION
    }
    assert not communicating


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


def test_outside_code_imports_the_public_names_only() -> None:
    package = "megatron.core.distributed.fsdp.experimental"
    outside = [
        *ROOT.glob("megatron/core/distributed/fsdp/*.py"),
        *ROOT.glob("megatron/core/optimizer/*.py"),
        *ROOT.glob("megatron/pretrain/*.py"),
        *ROOT.glob("examples/**/*.py"),
        *ROOT.glob("*.py"),
    ]
    assert outside
    for path in outside:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package):
                assert node.module in (package, f"{package}.checkpoint"), path


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / "megatron/__init__.py").exists()
    assert not (ROOT / "megatron/core/__init__.py").exists()


def test_files_that_share_runs_are_one_group() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert files > SHARING_RUNS
    groups = [group_of(f"{file}::test_it[1]") for file in sorted(files)]
    assert len(set(groups)) == len(files) - len(SHARING_RUNS) + 1
