"""The command line of shardrt-stress: its flags, and how they are parsed."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ..program.options import RankParser, at_least
from .faults.faults import FAULTS
from .names import COLLECTIVES, DTYPES, OPS

_NCCL_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}  # in nccl-tests


@dataclass(frozen=True, slots=True)
class StressOptions:
    """The command line, one field per flag."""

    sizes: list[int]  # bytes
    number: int  # timed iterations; with a fault, ranks
    warmup: int
    collectives: list[str]
    dtypes: list[str]
    ops: list[str]
    root: int
    buffers: str
    streams: str | None
    peer: str | None
    compute: bool
    json: Path | None
    plot: Path | None
    soak: int | None  # seconds
    steps: int | None
    seed: int
    faults: list[str]  # names; empty: none
    fault_rank: int | None
    fault_after: int
    inject: bool
    report: Path | None  # `-`: standard output


_EXAMPLES = """\
mpirun -n 4 shardrt-stress -b 1K -e 64M -f 2 --collectives all_reduce,all_gather --dtypes float32,bfloat16 --ops sum,avg
mpirun -n 4 shardrt-stress --soak 10m
shardrt-stress --fault kill,stop

Exit code 1: an element was wrong, something leaked, or a job with a fault did not end as expected."""


def parse(arguments: Sequence[str] | None) -> StressOptions:
    """Parse the command line. Exits with code 2, on every rank alike, if it is not valid."""
    parser = RankParser(prog="shardrt-stress", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_sweep(parser.add_argument_group("sweep, sizes in bytes with K, M or G").add_argument)
    add = parser.add_argument_group("soak, random valid calls on random communicators").add_argument
    add("--soak", type=at_least(1, {"s": 1, "m": 60, "h": 3600}), metavar="TIME", help="duration: 30s, 10m, 8h")
    add("--steps", type=at_least(1), help="number of steps; the same seed then gives the same digest")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("faults, in jobs that this command starts").add_argument
    faults = _listed(FAULTS, join="all")
    add("--fault", dest="faults", type=faults, default=[], metavar="NAME,...", help=f"all, or of {', '.join(FAULTS)}")
    add("--fault-rank", type=int, help="[the last]")
    add("--fault-after", type=at_least(1), default=50, metavar="CALLS", help="[50]")
    add("--report", type=Path, nargs="?", const=Path("-"), metavar="FILE", help="print the table, or put it into a page")
    add("--inject", action="store_true", help=argparse.SUPPRESS)  # set for the ranks of that job
    given = vars(parser.parse_args(arguments))
    if given.pop("gpus") != 1:
        parser.error("-g: expected 1, as each rank has one GPU: start more ranks, as in mpirun -n 8 shardrt-stress -g 1")
    if given.pop("check") == 0:
        parser.error("-c 0: expected 1 or more, as every element is compared")
    begin, end, factor, increment = (given.pop(name) for name in ("begin", "end", "factor", "increment"))
    if begin > end:
        parser.error(f"-b {begin} is more than -e {end}")
    if given["plot"] and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    sizes = [begin]
    while (size := sizes[-1] + increment if increment else max(1, sizes[-1] * factor)) <= end:
        sizes.append(size)
    given["number"] = given["number"] or (2 if given["faults"] else 20)
    return StressOptions(sizes=sizes, **given)


def _add_sweep(add: Callable[..., object]) -> None:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    size = at_least(1, units)
    add("-b", "--minbytes", dest="begin", type=at_least(0, units), default=1 << 10, metavar="SIZE", help="the smallest [1K]")
    add("-e", "--maxbytes", dest="end", type=size, default=64 << 20, metavar="SIZE", help="the largest [64M]")
    add("-f", "--stepfactor", dest="factor", type=at_least(2), default=2, help="factor from one size to the next [2]")
    add("-i", "--stepbytes", dest="increment", type=size, metavar="SIZE", help="from one size to the next, instead of -f")
    add("-n", "--iters", dest="number", type=at_least(1), help="timed iterations [20]; with --fault: ranks [2]")
    add("-w", "--warmup_iters", dest="warmup", type=at_least(0), default=5, help="untimed iterations before [5]")
    add("--collectives", type=_listed(COLLECTIVES), default=list(COLLECTIVES), help="[all]")
    dtypes = _listed(DTYPES, join="all", others=_NCCL_DTYPES)
    add("-d", "--dtypes", type=dtypes, default=["float32"], help=f"of {','.join(DTYPES)} [float32]")
    add("-o", "--ops", type=_listed(OPS, join="all"), default=["sum"], help=f"of {','.join(OPS)} [sum]")
    add(
        "-g", "--ngpus", dest="gpus", type=at_least(1), default=1, metavar="1", help="of a rank: one; for scripts of nccl-tests"
    )
    add("-c", "--check", type=at_least(0), default=1, metavar="1", help="every element is compared; for scripts of nccl-tests")
    add("--root", type=at_least(0), default=0)
    add(
        "--buffers",
        choices=("window", "symmetric", "ordinary"),
        default="window",
        help="from comm.empty [window], or torch's own; symmetric: NCCL's windows",
    )
    add("--streams", choices=("inline", "threaded"), help="[inline; threaded in a soak]")
    add("--peer", choices=("gloo", "mpi4py", "nccl", "c10d-nccl"), help="time it in turns with shardrt, and print the ratios")
    add("--compute", action="store_true", help="measure matrices, memory and small operations as well: for a hardware sheet")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE.png", help="bus bandwidth by size")


def _listed(
    names: Iterable[str], join: str | None = None, others: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], list[str]]:
    """A parser of names separated by commas. join: the name of all of them.   others: other names of some."""
    meant = {**{name: name for name in names}, **others}

    def listed(text: str) -> list[str]:
        if text == join:
            return list(names)
        if unknown := set(text.split(",")) - meant.keys():
            raise argparse.ArgumentTypeError(f"{','.join(sorted(unknown))}: expected names out of {','.join(meant)}")
        return [meant[name] for name in text.split(",")]

    return listed
