# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Compares rows of the benchmark with each other and writes them as a Markdown table. Measures nothing."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
"""A case of `benchmark.py` and its status: "ok" with numbers, "failed" with an error, or why it cannot run here."""

BASE, BARE, FLOOR = "fsdp2", "plain", "floor"
"""What ratios refer to, what has the module's own host time, and what no runtime can beat."""

GIB = 2**30
HEADINGS = (
    *("model", "tokens", "microbatches", "runtime", "ms (min-max)", f"ms / {BASE}", f"ms / {FLOOR}", "tokens/s/GPU"),
    *("host ms", "fwd+bwd", "optimizer", "added µs/unit", "allocated GiB", f"allocated / {BASE}", "reserved GiB"),
    *("reserved / allocated", "cudaMallocs", "loss first → last"),
)


def compared(rows: list[Row]) -> list[Row]:
    """Return the rows with ratios to `BASE` and `FLOOR`, and the host time that a runtime adds to `BARE`'s per unit.

    Only rows of the same model, tokens and microbatches are compared.
    """

    def key(row: Row, runtime: str) -> tuple[Any, ...]:
        return row["model"], row["tokens_asked"], row["accumulation"], runtime

    measured = {key(row, row["runtime"]): row for row in rows if row["status"] == "ok"}
    result = []
    for row in rows:
        more: Row = {}
        if row["status"] == "ok":
            base, bare, floor = (measured.get(key(row, runtime)) for runtime in (BASE, BARE, FLOOR))
            allocated, host_ms = row["peak_allocated_bytes"], row["forward_backward_host_ms"]
            has_added = bare is not None and row is not bare and host_ms is not None
            added_ms = host_ms - bare["forward_backward_host_ms"] if has_added else None
            more = {
                "ms_ratio": row["ms"] / base["ms"] if base else None,
                "floor_ratio": row["ms"] / floor["ms"] if floor else None,
                "allocated_ratio": allocated / base["peak_allocated_bytes"] if base and allocated else None,
                "added_us_per_unit": None if added_ms is None else 1e3 * added_ms / row["units"],
            }
        result.append({**row, **more})
    return result


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown; a dash is a number that this machine or this selection of runtimes cannot give."""

    def number(value: float | None, digits: int = 2, unit: float = 1) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for row in rows:
        if row["status"] != "ok":
            text = f"failed: {row['error']}".replace("|", "\\|") if "error" in row else row["status"]
            tokens = "-" if row["tokens_asked"] is None else str(row["tokens_asked"])
            names = (row["model"], tokens, str(row["accumulation"]), row["runtime"])
            lines.append((*names, text, *("-",) * (len(HEADINGS) - 5)))
            continue
        allocated, reserved = row["peak_allocated_bytes"], row["peak_reserved_bytes"]
        cells = (
            *(row["model"], str(row["tokens"]), str(row["accumulation"]), row["runtime"]),
            f"{row['ms']:.2f} ({row['ms_min']:.2f}-{row['ms_max']:.2f})",
            *(number(row["ms_ratio"]), number(row["floor_ratio"]), number(row["tokens_per_s_per_rank"], 0)),
            *(number(row["host_ms"]), number(row["forward_backward_host_ms"]), number(row["optimizer_host_ms"])),
            *(number(row["added_us_per_unit"], 0), number(allocated, unit=GIB), number(row["allocated_ratio"])),
            *(number(reserved, unit=GIB), number(None if reserved is None else reserved / allocated)),
            *(number(row["device_allocations"], 0), f"{row['first_loss']:.3f} → {row['last_loss']:.3f}"),
        )
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
