"""Print how padding, memory, bytes and time of a training step grow with the ranks, as a Markdown table of forecasts.

    python scripts/bench/growth.py [--models llama3-405b ...] [--ranks 8 512 ...] [--sheet h100] [--batch 1]

Parameters are gathered and computed with in bfloat16, gradients reduced in float32, blocks recomputed in the backward; AdamW.
"padding" is that of the gathered parameters, as a share of them; "received" is by each rank in a step, within its node and from
other nodes. The last two columns are what the forecast itself took: seconds of the processor, and the most memory that its
Python objects had.
"""

import argparse
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import torch

from common import checkout  # noqa: F401  # before shardrt
from shardrt import MixedPrecisionPolicy
from shardrt.plan.machine.cost import Costs
from shardrt.plan.machine.hardware import Sheet, load_sheet
from shardrt.plan.program.factory import make_program
from shardrt.plan.program.forecast_result import Forecast
from shardrt.plan.program.job import Job, Program
from shardrt.plan.program.known_models import PRESETS
from shardrt.plan.program.presets import preset_factory
from shardrt.plan.run.forecast import forecast

GB = 1e9
HEAD = (
    *("model", "ranks", "padding", "FSDP2's", "memory", "of it shards"),
    *("received within", "across", "step", "forecast took", "its objects"),
)


def run(model: str, job: Job, sheet: Sheet) -> Forecast:
    def make(job: Job) -> Program:
        return make_program(preset_factory(model), job, model)

    return forecast(make, job, Costs(sheet))


def table_row(model: str, job: Job, sheet: Sheet) -> str:
    start = time.process_time()
    found = run(model, job, sheet)
    seconds = time.process_time() - start
    tracemalloc.start()
    run(model, job, sheet)
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    payload = sum(group.gathered_nbytes - group.padding_nbytes for group in found.groups)
    cells = (
        model,
        f"{job.ranks:,}",
        f"{found.padding_nbytes / payload:.2%}",
        f"{found.fsdp2_padding_nbytes / payload:.2%}",
        f"{found.peak_nbytes / GB:,.1f} GB",
        f"{sum(found.memory[kind] for kind in ('parameters', 'gradients', 'optimizer')) / GB:,.2f} GB",
        f"{found.received_within_nbytes / GB:,.1f} GB",
        f"{found.received_across_nbytes / GB:,.1f} GB",
        f"{found.step_seconds:,.2f} s",
        f"{seconds:.1f} s",
        f"{nbytes / 1e6:,.0f} MB",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Growth of a training step's costs with the ranks.")
    parser.add_argument("--models", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096, 32_768, 100_000], metavar="N")
    parser.add_argument("--sheet", default="h100", help="hardware: a name or a TOML file")
    parser.add_argument("--batch", type=int, default=1, help="rows of each rank")
    options = parser.parse_args()
    sheet, policy = load_sheet(options.sheet), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    print(f"| {' | '.join(HEAD)} |")
    print(f"|---|{'--:|' * (len(HEAD) - 1)}")
    run(options.models[0], Job(1, sequence=1, mp_policy=policy), sheet)  # the first one imports, and is not measured
    for model in options.models:
        for ranks in options.ranks:
            shape = {"batch": options.batch, "sequence": PRESETS[model].sequence}
            job = Job(ranks, **shape, mp_policy=policy, checkpoint_activations=True)
            print(table_row(model, job, sheet), flush=True)


if __name__ == "__main__":
    main()
