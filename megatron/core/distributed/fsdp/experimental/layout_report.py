# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""How much padding `plan_layout` and two simpler rules cost in well-known models; nothing that trains needs it.

``python -m megatron.core.distributed.fsdp.experimental.layout --report`` prints it; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import plan_layout

NUM_SHARDS = (8, 64, 256, 1024, 4096)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Decoder:
    """One decoder layer with the published sizes of its model.

    Weights are [out, in] and unfused, as in Hugging Face's modules and checkpoints: query, key and value projections
    apart, gate and up projections apart, one weight per expert. (Phi-3 and GPT-3 are fused in some implementations.)

    Attributes:
        hidden: width of the residual stream.
        ffn: inner width of the MLP, or of each expert.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: elements of a head.
        norms: norms over the hidden dim.
        has_gate: whether an MLP has three weights (gate, up, down) rather than two.
        has_biases: whether all linear layers and norms have biases.
        has_qkv_biases: whether the query, key and value projections have.
        has_qk_norms: whether queries and keys have norms, over the head's dim.
        experts: routed experts, with a router; 0 for a dense MLP.
        layers: how many of them the model has.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    norms: int = 2
    has_gate: bool = True
    has_biases: bool = False
    has_qkv_biases: bool = False
    has_qk_norms: bool = False
    experts: int = 0
    layers: int = 1

    def shapes(self) -> list[Shape]:
        """Return the shapes of the layer's parameters."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: list[Shape] = []
        for out in (queries, keys, keys):
            shapes += self._linear(out, self.hidden, self.has_biases or self.has_qkv_biases)
        shapes += self._linear(self.hidden, queries, self.has_biases)
        shapes += [(self.head_dim,)] * (2 if self.has_qk_norms else 0)
        shapes += [(self.experts, self.hidden)] if self.experts else []
        for _ in range(max(1, self.experts)):
            for _ in range(2 if self.has_gate else 1):
                shapes += self._linear(self.ffn, self.hidden, self.has_biases)
            shapes += self._linear(self.hidden, self.ffn, self.has_biases)
        return shapes + [(self.hidden,)] * self.norms * (2 if self.has_biases else 1)

    @staticmethod
    def _linear(rows: int, columns: int, has_bias: bool) -> list[Shape]:
        return [(rows, columns), (rows,)] if has_bias else [(rows, columns)]

    def sizes(self) -> str:
        """Return the sizes in words."""
        parts = [
            f"hidden {self.hidden}",
            f"{self.experts} experts of {self.ffn} with router" if self.experts else f"FFN {self.ffn}",
            f"{self.heads} heads of {self.head_dim}",
            f"{self.kv_heads} key/value heads",
            f"{self.norms} norms",
        ]
        parts += [] if self.has_gate else ["no gate"]
        parts += ["biases"] if self.has_biases else []
        parts += ["QKV biases"] if self.has_qkv_biases else []
        parts += ["QK norms"] if self.has_qk_norms else []
        return ", ".join(parts)


@dataclass(frozen=True)
class LatentDecoder:
    """Attention with low-rank queries, keys and values (MLA), one shared expert and two norms, as in DeepSeek-V3.

    Attributes:
        hidden: width of the residual stream.
        ffn: inner width of the shared expert.
        heads: attention heads.
        query_rank: width of the compressed queries.
        kv_rank: width of the compressed keys and values.
        nope_dim: elements without position of a query's or key's head.
        rope_dim: elements with position of a query's head, and of the one key head that all share.
        value_dim: elements of a value's head.
        layers: how many of them the model has.
    """

    hidden: int
    ffn: int
    heads: int
    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    layers: int = 1

    def shapes(self) -> list[Shape]:
        """Return the shapes of the parameters."""
        return [
            (self.query_rank, self.hidden),
            (self.query_rank,),
            (self.heads * (self.nope_dim + self.rope_dim), self.query_rank),
            (self.kv_rank + self.rope_dim, self.hidden),
            (self.kv_rank,),
            (self.heads * (self.nope_dim + self.value_dim), self.kv_rank),
            (self.hidden, self.heads * self.value_dim),
            (self.ffn, self.hidden),
            (self.ffn, self.hidden),
            (self.hidden, self.ffn),
            (self.hidden,),
            (self.hidden,),
        ]

    def sizes(self) -> str:
        """Return the sizes in words."""
        return (
            f"hidden {self.hidden}, shared expert {self.ffn}, {self.heads} heads of {self.nope_dim} + {self.rope_dim} "
            f"(values {self.value_dim}), ranks {self.query_rank} (queries) and {self.kv_rank} (keys/values), 4 norms"
        )


@dataclass(frozen=True)
class Tensors:
    """A group that is listed tensor by tensor, which a model has once."""

    listed: tuple[Shape, ...]
    layers: int = 1

    def shapes(self) -> list[Shape]:
        """Return the shapes."""
        return list(self.listed)

    def sizes(self) -> str:
        """Return the sizes in words."""
        return ", ".join("x".join(map(str, shape)) for shape in self.listed)


MODELS: dict[str, Decoder | LatentDecoder | Tensors] = {
    "Llama-3 8B": Decoder(hidden=4096, ffn=14336, heads=32, kv_heads=8, layers=32),
    "Llama-3 70B": Decoder(hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=80),
    "Llama-3 405B": Decoder(hidden=16384, ffn=53248, heads=128, kv_heads=8, layers=126),
    "Llama-2 13B": Decoder(hidden=5120, ffn=13824, heads=40, kv_heads=40, layers=40),
    "Qwen2.5 14B": Decoder(hidden=5120, ffn=13824, heads=40, kv_heads=8, has_qkv_biases=True, layers=48),
    "Qwen3 32B": Decoder(hidden=5120, ffn=25600, heads=64, kv_heads=8, has_qk_norms=True, layers=64),
    "Qwen3 30B-A3B": Decoder(hidden=2048, ffn=768, heads=32, kv_heads=4, has_qk_norms=True, experts=128, layers=48),
    "Gemma-2 9B": Decoder(hidden=3584, ffn=14336, heads=16, kv_heads=8, head_dim=256, norms=4, layers=42),
    "GPT-3 175B": Decoder(hidden=12288, ffn=49152, heads=96, kv_heads=96, has_gate=False, has_biases=True, layers=96),
    "Phi-3 14B": Decoder(hidden=5120, ffn=17920, heads=40, kv_heads=10, layers=40),
    "DeepSeek-V3 attention + shared expert": LatentDecoder(
        hidden=7168,
        ffn=2048,
        heads=128,
        query_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        layers=61,
    ),
    # 50,257 tokens and 1,024 positions of width 1,600; final norm with bias.
    "GPT-2 XL embeddings": Tensors(((50257, 1600), (1024, 1600), (1600,), (1600,))),
    # Patches of 14 x 14 in 3 channels, class token, 16 * 16 + 1 positions, final norm, 1,000 classes; width 768.
    "ViT-B/14 without its layers": Tensors(
        ((768, 3, 14, 14), (768,), (1, 1, 768), (257, 768), (768,), (768,), (1000, 768), (1000,))
    ),
}


@dataclass(frozen=True)
class Result:
    """What one model costs at one number of shards; shares are of the tensors' elements.

    Attributes:
        model: key of `MODELS`.
        num_shards: number of shards.
        ours: padding of `plan_layout`.
        whole_rows: share that lies in tensors of which every shard owns whole rows.
        row_lcm: padding if every shard's size is a multiple of the least common multiple of all row sizes; gaps
            between tensors are not counted.
        dim_0: padding if dim 0 of every tensor is padded to a multiple of the number of shards.
        whole_tensors: padding of `plan_layout` if no tensor may be cut.
        planning_s: what `plan_layout` took, in seconds.
    """

    model: str
    num_shards: int
    ours: float
    whole_rows: float
    row_lcm: float
    dim_0: float
    whole_tensors: float
    planning_s: float


def measure(model: str, num_shards: int) -> Result:
    """Plan one model's group and compute what the other rules would pad."""
    shapes = MODELS[model].shapes()
    start = time.perf_counter()
    layout = plan_layout(shapes, num_shards)
    planning_s = time.perf_counter() - start
    total = layout.tensor_numel
    row_aligned = sum(slot.numel for index, slot in enumerate(layout.slots) if layout.is_row_aligned(index))
    shard_numel = _padded(-(-total // num_shards), math.lcm(*(slot.row_numel for slot in layout.slots)))
    uncut = plan_layout(shapes, num_shards, atoms=[math.prod(shape) for shape in shapes])
    dim_0 = sum(_padded(shape[0], num_shards) * math.prod(shape[1:]) for shape in shapes)
    return Result(
        model,
        num_shards,
        ours=layout.padding_numel / total,
        whole_rows=row_aligned / total,
        row_lcm=shard_numel * num_shards / total - 1,
        dim_0=dim_0 / total - 1,
        whole_tensors=uncut.padding_numel / total,
        planning_s=planning_s,
    )


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def render(*, is_markdown: bool = False, has_times: bool = True) -> str:
    """Return the report: the models with their sizes, then one line per model and number of shards.

    Args:
        is_markdown: tables in Markdown rather than aligned with spaces.
        has_times: with a column of planning times, which differ from run to run.
    """
    models = [["group of tensors", "sizes", "tensors", "elements"]]
    for name, entry in MODELS.items():
        shapes = entry.shapes()
        models.append([name, entry.sizes(), str(len(shapes)), f"{sum(map(math.prod, shapes)):,}"])
    heads = ["padding %", "in whole rows %", "row LCM %", "dim 0 %", "whole tensors %", "planned in ms"]
    lines = [["group of tensors", "shards", *heads]]
    for name in MODELS:
        for num_shards in NUM_SHARDS:
            result = measure(name, num_shards)
            shares = (result.ours, result.whole_rows, result.row_lcm, result.dim_0, result.whole_tensors)
            numbers = [f"{100 * share:.2f}" for share in shares]
            lines.append([name, str(num_shards), *numbers, f"{1000 * result.planning_s:.1f}"])
    if not has_times:
        lines = [line[:-1] for line in lines]
    table = markdown if is_markdown else aligned
    return f"{table(models, 2)}\n\n{table(lines, 1)}\n"


def markdown(lines: Sequence[Sequence[str]], num_left: int) -> str:
    """Return a Markdown table, the first line as its head; columns are flush right but for the first `num_left`."""
    head, *body = lines
    rule = ["---" if column < num_left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def aligned(lines: Sequence[Sequence[str]], num_left: int) -> str:
    """Return a table aligned with spaces; columns are flush right but for the first `num_left`."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for line in lines:
        cells = zip(line, widths, strict=True)
        fitted = [cell.ljust(width) if i < num_left else cell.rjust(width) for i, (cell, width) in enumerate(cells)]
        rows.append("  ".join(fitted).rstrip())
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report; called by ``python -m`` with the name of `layout.py`."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron.core.distributed.fsdp.experimental.layout",
        description="Padding of well-known models: the layout planner, row-LCM alignment, and dim-0 sharding.",
    )
    parser.add_argument("--report", action="store_true", required=True, help="print the padding of every model")
    parser.add_argument("--markdown", action="store_true", help="as Markdown tables")
    parser.add_argument("--no-times", action="store_true", help="without planning times, which vary")
    options = parser.parse_args(arguments)
    print(render(is_markdown=options.markdown, has_times=not options.no_times), end="")
