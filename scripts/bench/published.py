"""Compare forecasts with the throughput that others have published, and print the table of docs/planner.md.

    python scripts/bench/published.py --models llama3-8b mpt-7b

Each run is forecast on the sheet of its machine, with the settings that its source states: bfloat16 parameters, reduced in
every micro-batch. The sheets' fraction of matrix multiplications was fitted to the runs that the table marks, those of
attention and memory to all runs on A100s and on H100s of 700 W; none was fitted to the H100s of 500 W.
Progress is the table itself; the last line is the largest deviation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
from common.options import Parser
from shardrt.fsdp.base.policy import MixedPrecisionPolicy
from shardrt.plan.machine.hardware import Curve, Sheet, load_sheet
from shardrt.plan.program.job import Job
from shardrt.plan.program.known_models import PRESETS, Preset
from shardrt.plan.program.presets import preset_factory
from shardrt.plan.question.planning import Planner
from shardrt.plan.question.report import PlannedJob

# The sources, by the letters that docs/planner.md lists them under.
TORCHTITAN_A100, TORCHTITAN_H100, TORCHTITAN_405B, FMS, FOUNDRY = "abcde"
MOST_MICRO_BATCHES = 3  # that are forecast: another one takes what the third takes


@dataclass(frozen=True, slots=True)
class Run:
    """A published run. rate: tokens per second and GPU.   again: as `Job.checkpoint_activations`.

    fitted: the sheets' fractions were chosen with it.
    """

    source: str
    model: str
    machine: str
    ranks: int
    sequence: int
    batch: int
    again: bool | int | str
    rate: float
    micro_batches: int = 1
    replicas: int = 1
    tp: int = 1
    reduce_dtype: torch.dtype = torch.float32
    fitted: bool = False


HALF: dict[str, Any] = {"reduce_dtype": torch.bfloat16}
RUNS = (
    Run(TORCHTITAN_A100, "llama3-8b", "A100", 64, 8192, 1, "op", 2973, fitted=True),
    Run(TORCHTITAN_A100, "llama3-8b", "A100", 64, 8192, 1, 2, 2904),
    Run(TORCHTITAN_A100, "llama3-70b", "A100", 64, 8192, 1, True, 331),
    Run(TORCHTITAN_A100, "llama2-13b", "A100", 64, 4096, 2, False, 2162, fitted=True),
    Run(TORCHTITAN_A100, "llama2-13b", "A100", 64, 4096, 2, 2, 1914),
    Run(TORCHTITAN_A100, "llama2-13b", "A100", 64, 4096, 2, "op", 1904),
    Run(TORCHTITAN_A100, "llama2-70b", "A100", 64, 4096, 1, "op", 355),
    Run(TORCHTITAN_A100, "llama2-70b", "A100", 64, 4096, 2, True, 353),
    Run(FMS, "llama2-7b", "A100, 400 Gb/s a node", 128, 4096, 2, False, 3700, replicas=16, **HALF),
    Run(FMS, "llama2-34b", "A100, 400 Gb/s a node", 128, 4096, 2, True, 700, **HALF),
    Run(FOUNDRY, "mpt-1b", "A100", 8, 2048, 14, False, 20513, micro_batches=4),
    Run(FOUNDRY, "mpt-3b", "A100", 8, 2048, 10, False, 10811, micro_batches=2),
    Run(FOUNDRY, "mpt-7b", "A100", 8, 2048, 6, False, 4641, micro_batches=2, fitted=True),
    Run(FOUNDRY, "mpt-7b", "A100", 8, 4096, 16, True, 3684, micro_batches=2),
    Run(FOUNDRY, "mpt-13b", "A100", 8, 2048, 2, False, 2262, micro_batches=3),
    Run(FOUNDRY, "mpt-30b", "A100", 8, 2048, 3, True, 916, micro_batches=21),
    Run(FOUNDRY, "mpt-70b", "A100", 64, 2048, 8, True, 410, micro_batches=4, **HALF),
    Run(FOUNDRY, "mpt-1b", "H100", 8, 2048, 14, False, 45455),
    Run(FOUNDRY, "mpt-3b", "H100", 16, 2048, 10, False, 24142, micro_batches=3),
    Run(FOUNDRY, "mpt-7b", "H100", 8, 2048, 6, False, 10643, fitted=True),
    Run(FOUNDRY, "mpt-7b", "H100", 8, 4096, 16, True, 8611, micro_batches=2),
    Run(FOUNDRY, "mpt-13b", "H100", 8, 2048, 2, False, 4792),
    Run(FOUNDRY, "mpt-30b", "H100", 8, 2048, 3, True, 2002, micro_batches=21, fitted=True),
    Run(FOUNDRY, "mpt-70b", "H100", 64, 2048, 8, True, 1039, micro_batches=4),
    Run(FMS, "llama2-7b", "H100, 800 Gb/s a node", 96, 4096, 2, False, 7500, replicas=12, **HALF, fitted=True),
    Run(FMS, "llama2-34b", "H100, 800 Gb/s a node", 96, 4096, 2, True, 1550, **HALF),
    Run(TORCHTITAN_H100, "llama3-8b", "H100 at 500 W", 8, 8192, 2, "op", 5762),
    Run(TORCHTITAN_H100, "llama3-8b", "H100 at 500 W", 128, 8192, 2, "op", 5605),
    Run(TORCHTITAN_405B, "llama3-405b", "H100 at 500 W", 128, 8192, 2, True, 109, tp=8),
)


# ---------------------------------------------------------------------- machines


def machine(name: str) -> Sheet:
    """The sheet of a machine; where a source states other links or memory, with these."""
    kind, _, other = name.partition(",")
    sheet = load_sheet(kind.split()[0].lower())
    if "Gb/s a node" in other:
        assert sheet.across is not None
        rate = float(other.split()[0]) / 8 * 1e9 / sheet.ranks_per_node
        sheet = replace(sheet, across=replace(sheet.across, bandwidth=Curve((1.0,), (rate,))))
    if "500 W" in kind:  # with HBM2e of 96 GB and 2.4 TB/s, as torchtitan says
        memory = replace(sheet.memory, nbytes=102_000_000_000, bandwidth=Curve((1.0,), (2.4e12,)))
        sheet = replace(sheet, memory=memory)
    return sheet


# ---------------------------------------------------------------------- models


def _llama2(layers: int, width: int, inner: int, heads: int, kv_heads: int) -> Preset:
    other = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32_000,
    }
    return replace(PRESETS["llama3-8b"], config={**PRESETS["llama3-8b"].config, **other}, source="arXiv:2307.09288")


LLAMA2 = {
    "llama2-7b": _llama2(32, 4_096, 11_008, 32, 32),
    "llama2-13b": _llama2(40, 5_120, 13_824, 40, 40),
    "llama2-34b": _llama2(48, 8_192, 22_016, 64, 8),
    "llama2-70b": _llama2(80, 8_192, 28_672, 64, 8),
}
MPT: Mapping[str, tuple[int, int, int]] = {  # layers, width, heads
    "mpt-1b": (24, 2_048, 16),
    "mpt-3b": (32, 2_560, 20),
    "mpt-7b": (32, 4_096, 32),
    "mpt-13b": (40, 5_120, 40),
    "mpt-30b": (48, 7_168, 56),
    "mpt-70b": (80, 8_192, 64),
}


class MPTBlock(nn.Module):
    """A block of MPT: no biases, four times as wide inside."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, width)."""
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPTModel(nn.Module):
    """The model, whose output layer is its embedding."""

    def __init__(self, layers: int, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50_368, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(MPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (B, T) int64. Returns logits, (B, T, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def factory_of(name: str) -> Callable[..., Any]:
    """The factory of a model."""
    if name in MPT:
        return lambda job: MPTModel(*MPT[name], job.sequence)
    with patch.dict(PRESETS, LLAMA2):
        return preset_factory(name)


# ---------------------------------------------------------------------- the table


def forecast_rate(run: Run) -> float:
    """Tokens per second and GPU, as forecast."""
    sheet = machine(run.machine)
    job = Job(
        run.ranks,
        tp=run.tp,
        replicas=run.replicas,
        batch=run.batch,
        sequence=run.sequence,
        micro_batches=min(run.micro_batches, MOST_MICRO_BATCHES),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, run.reduce_dtype),
        checkpoint_activations=run.again,
    )
    planner = Planner(factory_of(run.model), run.model, sheet, sheet.ranks_per_node)
    found = planner.forecast(job)
    plan = PlannedJob(run.model, planner.numel, job, sheet, sheet.ranks_per_node, found)
    return plan.tokens_per_second / run.ranks


def table_row(run: Run, rate: float) -> str:
    """A row of the table."""
    again = {False: "nothing", True: "blocks", "op": "op", 2: "every 2nd block"}[run.again]
    shape = f"{run.batch} x {run.sequence:,}" + (f", {run.micro_batches} times" if run.micro_batches > 1 else "")
    parts = ", ".join(f"{size} {name}" for name, size in (("replicas", run.replicas), ("tensor-parallel", run.tp)) if size > 1)
    ranks = f"{run.ranks} ({parts})" if parts else f"{run.ranks}"
    reduced = "bf16" if run.reduce_dtype == torch.bfloat16 else "fp32"
    ratio = f"{rate / run.rate:.2f}{' (fitted)' if run.fitted else ''}"
    cells = (run.model, run.machine, ranks, shape, again, reduced, f"{run.rate:,.0f}", f"{rate:,.0f}", ratio, run.source)
    return f"| {' | '.join(cells)} |"


HEAD = ("model", "machine", "GPUs", "batch", "recomputed", "reduced in", "published", "forecast", "ratio", "source")


def main() -> None:
    parser = Parser(description=__doc__)
    known = sorted({run.model for run in RUNS})
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    options = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|---|---|--:|---|---|---|--:|--:|--:|---|")
    largest = 0.0
    for run in RUNS:
        if run.model in options.models:
            rate = forecast_rate(run)
            largest = max(largest, abs(math.log(rate / run.rate)))
            print(table_row(run, rate), flush=True)
    print(f"largest deviation: {math.expm1(largest):.1%}")


if __name__ == "__main__":
    main()
