"""Compare the forecast of a process's peak memory with the peak itself, on the cores of this machine.

    python scripts/bench/peak.py --models gpt mlp --ranks 1 2

Each rank measures its resident memory before the model is built, after a step of a small model has loaded what torch loads at
first use. Then it resets the kernel's high-water mark (/proc/self/clear_refs), builds the model and trains. The forecast is
that base, and the peak of parameters, gradients, optimizer, buffers and live tensors.

Not in it is what the allocator keeps: shardrt has glibc keep freed blocks (`comm/bootstrap.py`), and some do not fit what is
allocated later. So each job runs twice, once with glibc giving large blocks back at once, which is what the forecast is
compared with, and once as usual. Nor is in it the whole model that is built before its blocks are sharded, scratch memory of
libraries, and memory of other ranks of the node, which the kernel counts again where this rank has read it.
The models, batches and optimizer are those of scripts/bench/step.py.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from bench.forecast import forecast_step
from common.jobs import mpirun, run_job
from common.models import CASES, MLP, Case, shard
from common.options import Parser, at_least
from shardrt.plan.hardware import parse_sheet

STEPS = 3
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt
HOST = """
name = "a host, whatever its speed"
device = "cpu"
ranks_per_node = 1024
memory = {nbytes = 1_000_000_000_000, bandwidth = 1e10}
compute = {flops = {float32 = 1e11}}
overhead = {operation = 1e-6}
within = {bandwidth = 1e10, latency = 1e-6}
"""


def memory_of_process(entry: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    found = re.search(rf"^{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "the kernel is Linux"
    return 1024 * int(found[1])


def train(case: Case, steps: int) -> None:
    policy = shardrt.MixedPrecisionPolicy(case.param_dtype, torch.float32)
    model = case.build()
    shard(model, partial(shardrt.fully_shard, mp_policy=policy))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = case.batch(torch.Generator())
    for _ in range(steps):
        case.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def work(name: str, folder: Path, *, gives_back: bool) -> None:
    """One rank: write base and peak. gives_back: glibc keeps no freed block of 64 KiB or more."""
    world = shardrt.init("cpu")
    if gives_back:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 16)
    small = CASES["mlp"]
    train(Case(lambda: MLP(layers=2, width=16), lambda _: (torch.ones(8, 16), torch.ones(8, 1)), small.loss), 2)
    base = memory_of_process("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train(CASES[name], STEPS)
    (folder / str(world.rank)).write_text(json.dumps([base, memory_of_process("VmHWM")]))


def measured(model: str, ranks: int, timeout: float, *options: str) -> tuple[int, int]:
    """Base and peak of the rank with the highest peak."""
    with tempfile.TemporaryDirectory(prefix="bench-peak-") as folder:
        launcher = mpirun(ranks) if ranks > 1 else [sys.executable]
        run_job([*launcher, __file__, "--worker", model, "--results", folder, *options], timeout)
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    base, peak = max(found, key=lambda pair: pair[1])
    return base, peak


def main() -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(CASES), default=["gpt", "mlp", "tiny"])
    add("--ranks", type=at_least(1), nargs="+", default=[1, 2])
    add("--timeout", type=at_least(1, float), default=600.0, help="time limit of a job in seconds")
    add("--worker", help="a model: run as a rank of a measurement")
    add("--results", type=Path, help="with --worker: the folder to write to")
    add("--gives-back", action="store_true", help="with --worker: give freed blocks back to the system at once")
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.results, gives_back=options.gives_back)
        return
    print("model  ranks  base MiB  measured MiB  forecast MiB  ratio  as usual MiB")
    for ranks in options.ranks:
        for model in options.models:
            base, peak = measured(model, ranks, options.timeout, "--gives-back")
            _, kept = measured(model, ranks, options.timeout)
            expected = base + forecast_step(CASES[model], ranks, parse_sheet(HOST, __file__)).peak_nbytes
            sizes = "".join(f"{nbytes / 2**20:14.1f}" for nbytes in (peak, expected))
            print(f"{model:8}{ranks:4}{base / 2**20:10.1f}{sizes}{expected / peak:7.3f}{kept / 2**20:14.1f}", flush=True)


if __name__ == "__main__":
    main()
