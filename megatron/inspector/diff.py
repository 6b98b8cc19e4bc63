# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""``mfsdp-ckpt diff``: compares two checkpoints key by key, in slabs; the exit code is 0 same, 1 differ, 2 error."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.distributed.fsdp.experimental.checkpoint.boxes import numel
from megatron.core.distributed.fsdp.experimental.checkpoint.errors import CheckpointError
from megatron.core.distributed.fsdp.experimental.layout import Box
from megatron.inspector.elements import Differences, Tolerance
from megatron.inspector.names import NamedTensor, by_name
from megatron.inspector.opened import Checkpoint
from megatron.inspector.text import Bar, dtype_text, progress, safe, table
from megatron.inspector.values import is_same, short_text


@dataclass(frozen=True)
class Result:
    """One key's comparison.

    Attributes:
        name: the canonical key.
        status: "same", "differs", "only in A", "only in B" or "error".
        numel: elements compared.
        found: what differs in the elements.
        note: what else there is to say.
    """

    name: str
    status: str
    numel: int = 0
    found: Differences | None = None
    note: str = ""


def diff(folders: tuple[Path, Path], tolerance: Tolerance, *, max_memory: int, show_all: bool, as_json: bool) -> int:
    """Compare two checkpoints and print a table of what differs; return the exit code."""
    first, second = (Checkpoint(folder, max_memory) for folder in folders)
    tensors, entries = by_name(first, [*second.tensors, *second.entries])
    other_tensors, other_entries = by_name(second, [*first.tensors, *first.entries])
    names, other_names = {*tensors, *entries}, {*other_tensors, *other_entries}
    results = [Result(name, "only in A") for name in names - other_names]
    results += [Result(name, "only in B") for name in other_names - names]
    common = sorted(names & other_names)
    total = sum(_bytes(tensors[name]) for name in common if name in tensors)
    with progress(total, "compared") as bar:
        for name in common:
            one, other = tensors.get(name), other_tensors.get(name)
            try:
                if one and other:
                    results.append(_compare_tensors(name, one, other, tolerance, bar))
                elif one or other:
                    results.append(Result(name, "differs", note="a tensor in one, a byte entry in the other"))
                else:
                    values = first.entry(entries[name]), second.entry(other_entries[name])
                    results.append(_compare_values(name, *values, tolerance.equal_nan))
            except CheckpointError as error:
                results.append(Result(name, "error", note=str(error)))
    results.sort(key=lambda result: result.name)
    _print(results, show_all=show_all, as_json=as_json)
    statuses = {result.status for result in results}
    return 2 if "error" in statuses else int(bool(statuses - {"same"}))


def _compare_tensors(name: str, one: NamedTensor, other: NamedTensor, tolerance: Tolerance, bar: Bar) -> Result:
    if one.size != other.size:
        return Result(name, "differs", note=f"shape {one.size} and {other.size}")
    found = Differences()
    for box in _boxes(one, other):
        # Without names for the slabs, which would keep them in memory while the next ones are read.
        found.add(box, one.read(box), other.read(box), tolerance)
        bar.update(numel(box) * one.dtype.itemsize)
    note = "" if one.dtype == other.dtype else f"dtype {dtype_text(one.dtype)} and {dtype_text(other.dtype)}"
    differs = found.num_differing > 0 or (bool(note) and tolerance.is_exact)
    return Result(name, "differs" if differs else "same", math.prod(one.size), found, note)


def _boxes(one: NamedTensor, other: NamedTensor) -> Iterator[Box]:
    """Return slabs of the pair's common shape: as the one cuts them that is not in halves, and has larger elements."""
    whole = [tensor for tensor in (one, other) if len(tensor.keys) == 1]
    largest = max(whole, key=lambda tensor: tensor.dtype.itemsize)
    return largest.checkpoint.slab_boxes(largest.keys[0])


def _compare_values(name: str, first: object, second: object, equal_nan: bool) -> Result:
    if is_same(first, second, equal_nan):
        return Result(name, "same")
    pair: tuple[dict[str, object], dict[str, object]] | None = None
    if isinstance(first, dict) and isinstance(second, dict):
        pair = first, second
    elif hasattr(first, "__dict__") and hasattr(second, "__dict__"):
        pair = vars(first), vars(second)
    if pair is None:
        return Result(name, "differs", note=f"{short_text(first)} and {short_text(second)}")
    missing = object()
    changed = [
        key
        for key in sorted({*pair[0], *pair[1]}, key=str)
        if not is_same(pair[0].get(key, missing), pair[1].get(key, missing), equal_nan)
    ]
    return Result(name, "differs", note="in " + short_text(", ".join(map(str, changed)), 200).strip("'"))


def _bytes(tensor: NamedTensor) -> int:
    return math.prod(tensor.size) * tensor.dtype.itemsize


def _print(results: list[Result], *, show_all: bool, as_json: bool) -> None:
    counts = Counter(result.status for result in results)
    if as_json:
        print(json.dumps({"counts": counts, "keys": [asdict(result) for result in results]}, indent=1))
        return
    rows = []
    for result in results:
        if result.status == "error":
            print(f"error: {safe(result.note)}", file=sys.stderr)
        if result.status == "same" and not show_all:
            continue
        found = result.found
        numbers = (
            (
                f"{found.num_differing} of {result.numel}",
                f"{found.max_abs:.3g}",
                f"{found.max_rel:.3g}",
                str(found.first) if found.first is not None else "",
            )
            if found
            else ("", "", "", "")
        )
        note = "" if result.status == "error" else safe(result.note)
        rows.append((safe(result.name), result.status, *numbers, note))
    if rows:
        print(table(("key", "status", "differing", "max abs", "max rel", "first at", "note"), rows, right=(2, 3, 4)))
    parts = [f"{counts[status]} {status}" for status in ("same", "differs", "only in A", "only in B", "error")]
    print(f"{len(results)} keys: {', '.join(parts)}")
