"""Measure which share of an all-gather is hidden behind compute that uses no cores.

    mpirun -n 2 python scripts/bench/overlap.py [--mib 32] [--rounds 9] [--streams threaded inline]

The compute is a sleep, in place of an accelerator. Three medians over the rounds are measured: the gather alone (g), the sleep
alone (s, twice as long as the gather), and both: the gather launched before the sleep and waited for after it. The hidden
share is (g + s - both) / g: 100 % if the gather took no extra time, 0 % if gather and sleep ran one after the other.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from shardrt.comm import Stream, World, new_stream


def main() -> None:
    """Measure each kind of stream; rank 0 prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=32, help="size of the gathered tensor")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", nargs="+", choices=("threaded", "inline"), default=["threaded", "inline"])
    options = parser.parse_args()
    world = shardrt.init("cpu")
    torch.set_num_threads(1)
    hidden = {}
    for kind in options.streams:
        stream = new_stream(world.device, "overlap", threaded=kind == "threaded")
        hidden[kind] = measure(world, stream, int(options.mib * 2**20) // 4 // world.size, options.rounds)
        stream.close()
        if world.rank == 0:
            print(f"{kind:<9} {options.mib:g} MiB on {world.size} ranks: {hidden[kind]:.0%} hidden", flush=True)
    if world.rank == 0:
        print(json.dumps({"mib": options.mib, "ranks": world.size, "hidden": hidden}), flush=True)


def measure(world: World, stream: Stream, numel: int, rounds: int) -> float:
    """The hidden share of the gather, averaged over the ranks."""
    inp, out = torch.ones(numel), torch.empty(numel * world.size)

    def gather() -> None:
        world.comm.all_gather(out, inp, stream=stream).synchronize()

    def behind_sleep(seconds: float) -> None:
        work = world.comm.all_gather(out, inp, stream=stream)
        time.sleep(seconds)
        work.synchronize()

    gather()
    alone = max(world.comm.exchange(statistics.median(timed(world, gather) for _ in range(rounds))))
    nap = 2 * alone
    rest = statistics.median(timed(world, lambda: time.sleep(nap)) for _ in range(rounds))
    both = statistics.median(timed(world, lambda: behind_sleep(nap)) for _ in range(rounds))
    return statistics.mean(world.comm.exchange((alone + rest - both) / alone))


def timed(world: World, work: Callable[[], object]) -> float:
    """Seconds that `work()` takes after a barrier."""
    world.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
