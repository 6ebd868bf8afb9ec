"""Make the tables of GPUs in docs/performance.md from the results of gpu_check.py in scripts/results.

python scripts/gpu/table.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
from common.options import Parser
from gpu.checks import Outcome

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- scripts/gpu/table.py -->\n", "<!-- end -->\n"
NOTHING = "No GPU has been checked yet.\n"
# Columns after GPU, date and checks: the head, the check, the name of its figure. Of one rank:
COLUMNS = (
    ("copy, TB/s", "bandwidths", "copy TB/s"),
    ("pack f32 to bf16, by copy", "bandwidths", "pack f32 to bf16"),
    ("unpack, by copy", "bandwidths", "unpack bf16 to f32"),
    ("norm, by copy", "bandwidths", "norm f32"),
    ("launch of 100, µs", "launches", "pack, host us"),
    ("GPT step, by FSDP2's", "bench gpt-1b", "ms by FSDP2"),
    ("peak below FSDP2's, MiB", "bench gpt-1b", "MiB below FSDP2"),
    ("host, by FSDP2's", "bench tiny", "host by FSDP2"),
)
# Of a rank on each of several GPUs, the largest number of ranks:
COLUMNS_OF_SEVERAL = (
    ("all-gather of 256 MiB, GB/s", "all_gather", "256M GB/s"),
    ("time by NCCL's own", "all_gather", "256M by library"),
    ("reduce-scatter, sum", "reduce_scatter", "sum 256M GB/s"),
    ("average", "reduce_scatter", "avg 256M GB/s"),
    ("sum in windows", "windows", "reduce_scatter sum 256M"),
    ("all-reduce, sum", "all_reduce", "sum 256M GB/s"),
    ("exposed in a step, ms", "variants", "as is, exposed ms"),
    ("without priority", "variants", "priority 0, exposed ms"),
    ("in windows", "variants", "windows, exposed ms"),
    ("GPT step, by FSDP2's", "bench gpt-1b", "ms by FSDP2"),
    ("peak below FSDP2's, MiB", "bench gpt-1b", "MiB below FSDP2"),
    ("communicator, s", "connecting", "s"),
)
Columns = Sequence[tuple[str, str, str]]


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """The Markdown tables with a row for each machine, one of single ranks and one of several; without any, a sentence."""
    if not summaries:
        return NOTHING
    several = [summary for summary in summaries if summary["gpus"] > 1]
    tables = [_table(COLUMNS, summaries, lambda ranks: ranks == 1)]
    if several:
        tables.append(_table(COLUMNS_OF_SEVERAL, several, lambda ranks: ranks > 1))
    return "\n".join(tables)


def _table(columns: Columns, summaries: Sequence[dict[str, Any]], counts: Callable[[int], bool]) -> str:
    """counts: whether figures of so many ranks are shown; of several numbers, those that were found last."""
    heads = ["GPU", "seen", "checks", *(head for head, _, _ in columns)]
    rows = [heads, ["---"] * len(heads), *(_row(columns, summary, counts) for summary in summaries)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(columns: Columns, summary: dict[str, Any], counts: Callable[[int], bool]) -> list[str]:
    results = [result for result in summary["results"] if counts(result["ranks"])]
    figures = {(result["check"], name): value for result in results for name, value in result["figures"].items()}
    checks = ", ".join(f"{summary[outcome]} {outcome}" for outcome in Outcome if summary[outcome])
    shown = (figures.get((check, name)) for _, check, name in columns)
    name = summary["gpu"] if summary["gpus"] == 1 else f"{summary['gpus']} x {summary['gpu']}"
    return [name, summary["date"], checks, *("" if value is None else f"{value:g}" for value in shown)]


def with_table(text: str, summaries: Sequence[dict[str, Any]]) -> str:
    """The text of a page, with its table replaced by the table of `summaries`."""
    return re.sub(f"(?s)(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", lambda _: table(summaries), text)


def load_summaries() -> list[dict[str, Any]]:
    """The summaries in scripts/results, sorted by file name."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "scripts" / "results").glob("*.json"))]


def main() -> None:
    path = ROOT / "docs" / "performance.md"
    path.write_text(with_table(path.read_text(), load_summaries()))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
