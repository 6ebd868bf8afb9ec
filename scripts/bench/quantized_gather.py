"""Time the gather of a group as 8-bit codes beside that of its full precision, and count the bytes that a rank receives.

    mpirun -n 2 python scripts/bench/quantized_gather.py [--mib 64] [--rounds 9] [--dtype bfloat16]

Each line: what is sent, MiB received per rank, and the fastest and the median round in milliseconds, each the slowest rank's.
Encoding and decoding are included. On one machine they cost more than the copies that they spare; codes are for slow links.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.options import at_least
from shardrt.comm import World, current_stream

WIDTH = 1024
KINDS = {"full precision": None, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def main() -> None:
    """Measure each kind of gather; rank 0 prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=at_least(1.0, float), default=64, help="size of the group in the compute dtype")
    parser.add_argument("--rounds", type=at_least(1), default=9)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of compute; shards are float32")
    options = parser.parse_args()
    os.environ.setdefault("SHARDRT_NODE_MEMORY", "0")  # ranks of one machine stand for nodes
    world = shardrt.init()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    rows = max(1, int(options.mib * 2**20) // (WIDTH * dtype.itemsize))
    found = {}
    for name, codes in KINDS.items():
        nbytes, times = measure(world, rows, dtype, codes, options.rounds)
        found[name] = {"received": nbytes, "least_ms": min(times), "median_ms": statistics.median(times)}
        if world.rank == 0:
            least, median = min(times), statistics.median(times)
            print(f"{name:<15} {nbytes / 2**20:8.2f} MiB  {least:8.2f} ms  {median:8.2f} ms", flush=True)
    if world.rank == 0:
        print(json.dumps({"mib": options.mib, "dtype": options.dtype, "ranks": world.size, "gathers": found}), flush=True)


def measure(world: World, rows: int, dtype: torch.dtype, codes: torch.dtype | None, rounds: int) -> tuple[int, list[float]]:
    """Bytes received in a gather, and the milliseconds of the slowest rank in each round."""
    model = shardrt.fully_shard(
        nn.Linear(WIDTH, rows, bias=False, device=world.device),
        mp_policy=shardrt.MixedPrecisionPolicy(param_dtype=dtype),
        quantization_policy=shardrt.QuantizationPolicy(gather=codes),
    )
    unshard(model)
    gather = next(call["what"] for call in reversed(world.recorder.calls()) if "all_gather" in call["what"])
    sent = sum(getattr(torch, kind).itemsize * int(numel) for kind, numel in re.findall(r"all_gather (\w+) (\d+)", gather))
    times = []
    for _ in range(rounds):
        world.barrier()
        times.append(1e3 * unshard(model))
    return (world.size - 1) * sent, [max(each) for each in zip(*world.comm.exchange(times), strict=True)]


def unshard(model: nn.Linear) -> float:
    """Seconds until the parameters are gathered; they are freed after."""
    assert isinstance(model, shardrt.FSDPModule)
    start = time.perf_counter()
    model.unshard()
    current_stream(model.weight.device).synchronize()
    seconds = time.perf_counter() - start
    model.reshard()
    return seconds


if __name__ == "__main__":
    main()
