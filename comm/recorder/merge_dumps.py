"""Merge the dumps of a job's ranks: which rank is at which call.

    python -m shardrt.comm.recorder merge FOLDER-OR-FILES...

Each file is read by itself: one that is not a dump is named and left out. Of several jobs, the one with the newest dump
counts; of several dumps of a rank, the newest.
Exit code: 0; 1 if a file was left out; 2 if none remained.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..core.fingerprint import printable
from ..ending.words import name_ranks
from ..program.options import Parser

_MAX_NBYTES = 1 << 29  # of a file; 2000 calls take about one million, and 5 for each rank of each call's communicator
# But for the ranks of equal communicators: sixty thousand calls.
_MAX_CHARACTERS, _MAX_VALUES = 1 << 26, 2_000_000
_MAX_SHOWN = 500  # characters of a text
_RANKS = re.compile(rb'"ranks": \[[-0-9, ]*\]')

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a dump."""

    comm: str
    ranks: tuple[int, ...]
    number: int
    what: str
    started: float
    ended: float  # 0.0 while it has not

    @property
    def phase(self) -> str:
        """How far the call has come."""
        return "done" if self.ended > 0.0 else "under way" if self.started else "called"


@dataclass(frozen=True, slots=True)
class Dump:
    """What the merge needs of a dump. Its texts can be printed: control characters are escaped."""

    rank: int
    size: int
    job: str
    time: float
    calls: tuple[Call, ...]
    noted: str | None  # the last note


def merge(dumps: Sequence[Dump]) -> str:
    """A line for each communicator: which rank is at which call. Communicators whose ranks differ are marked with "!".

    dumps: one of each rank.
    """
    places: dict[tuple[str, tuple[int, ...]], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    noted: dict[str, list[int]] = defaultdict(list)
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        newest: dict[tuple[str, tuple[int, ...]], Call] = {}
        for call in dump.calls:
            key = call.comm, call.ranks
            if key not in newest or newest[key].ended > 0.0:
                newest[key] = call
        for key, call in newest.items():
            places[key][f"#{call.number} {call.what}, {call.phase}"].append(dump.rank)
        if dump.noted is not None:
            noted[dump.noted].append(dump.rank)
    lines = _missing(max(dump.size for dump in dumps), sorted(dump.rank for dump in dumps))
    for (comm, ranks), at in places.items():
        apart = len(at) > 1 or sum(map(len, at.values())) < len(ranks)
        lines.append(f"{'! ' if apart else '  '}'{comm}' of {name_ranks(ranks)}: {_positions(at, len(ranks))}")
    return "\n".join([*lines, *(f"  last noted by {name_ranks(ranks)}: {what}" for what, ranks in noted.items())])


def _missing(size: int, present: Sequence[int]) -> list[str]:
    """A line that names the ranks without a dump. Its cost grows with the ranks that are present, not with `size`."""
    pairs = zip([-1, *present], [*present, size], strict=True)
    runs = [(before + 1, after - 1) for before, after in pairs if after > before + 1]
    if not runs:
        return []
    names = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs]
    return [f"no dump of rank{'' if names == [str(runs[0][0])] else 's'} {', '.join(names)}"]


def _positions(at: dict[str, list[int]], size: int) -> str:
    """The smallest set of ranks first; the largest as "all others"."""
    positions = sorted(at.items(), key=lambda item: len(item[1]))
    parts = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at {what}" for what, ranks in positions]
    what, ranks = positions[-1]
    if len(positions) == 1 and len(ranks) == size:
        parts[-1] = f"all at {what}"
    elif len(ranks) > 1 and sum(map(len, at.values())) == size:
        parts[-1] = f"all others at {what}"
    return "; ".join(parts)


# ---------------------------------------------------------------------- reading


def load(path: Path) -> Dump:
    """Read a dump. Raises: OSError; ValueError for what is not a dump."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer
    with open(file, "rb") as stream:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > _MAX_NBYTES:
            raise ValueError(f"{status.st_size:,} bytes, expected at most {_MAX_NBYTES:,}")
        return parse(stream.read())


def parse(text: bytes) -> Dump:
    """The dump of a text. Raises: ValueError for any other text."""
    tables = dict[bytes, int]()
    short = _RANKS.sub(lambda found: b'"ranks": %d' % tables.setdefault(found[0], len(tables)), text)
    # Cost: a value takes up to a hundred bytes; so many of them are refused before any is made.
    count = sum(part.count(mark) for part in (short, *tables) for mark in (b",", b"[", b"{"))
    if count > _MAX_VALUES or len(short) > _MAX_CHARACTERS:
        raise ValueError(
            f"{count:,} values in {len(short):,} characters, expected at most {_MAX_VALUES:,} in {_MAX_CHARACTERS:,}; "
            "SHARDRT_RECORDER says how many calls are kept"
        )
    try:
        report = json.loads(short)
        ranks = [tuple(json.loads(b"{%b}" % table)["ranks"]) for table in tables]
    except RecursionError:
        raise ValueError("nested too deeply") from None
    rank, size, notes = _field(report, "rank", int), _field(report, "size", int), _field(report, "notes", list)
    job, time = _beginning(_field(report, "job", str)), _field(report, "time", float)
    if not 0 <= rank < size or not math.isfinite(time):
        raise ValueError(f"rank {rank} of {size}, at {time}")
    noted = _element(notes[-1], 1, str) if notes else None
    calls = tuple(_call(call, ranks) for call in _field(report, "calls", list))
    return Dump(rank, size, job, time, calls, None if noted is None else _beginning(noted))


def _call(call: object, ranks: Sequence[tuple[int, ...]]) -> Call:
    """A call of a dump. ranks: those of each communicator that the dump has."""
    number = _field(call, "ranks", int)
    if not 0 <= number < len(ranks):
        raise ValueError("'ranks': expected a list of numbers")
    comm, what = _beginning(_field(call, "comm", str)), _beginning(_field(call, "what", str))
    started, ended = _field(call, "started", float), _field(call, "ended", float)
    return Call(comm, ranks[number], _field(call, "number", int), what, started, ended)


def _field(record: Any, name: str, kind: type[T]) -> T:
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with '{name}', found {type(record).__name__}")
    if type(value := record.get(name)) is not kind:
        raise ValueError(f"'{name}': expected {kind.__name__}, found {type(value).__name__}")
    return value


def _element(record: Any, index: int, kind: type[T]) -> T:
    if not isinstance(record, list) or len(record) <= index or type(record[index]) is not kind:
        raise ValueError(f"expected a list with {kind.__name__} at {index}")
    return record[index]


def _beginning(text: str) -> str:
    """The beginning of a text, as it is printed."""
    return printable(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


# ---------------------------------------------------------------------- command line


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = Parser("shardrt.comm.recorder", description="Tell from the dumps of a job's ranks which rank is at which call.")
    merging = parser.add_subparsers(required=True, metavar="merge").add_parser("merge", help=__doc__.partition("\n")[0])
    merging.add_argument("paths", nargs="+", metavar="FOLDER-OR-FILE", help="a folder of dumps, or one dump of a rank (JSON)")
    given = parser.parse_args(arguments).paths
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    paths = [p for name in given for p in (sorted(Path(name).glob("*.json")) if Path(name).is_dir() else [Path(name)])]
    left_out: list[str] = []
    dumps = _newest(_load_all(dict.fromkeys(paths), left_out), left_out)
    for line in left_out:
        _note(line)
    if not dumps:
        _note(f"no dump (*.json) in {', '.join(given)}")
        return 2
    print(merge(dumps))
    return 1 if left_out else 0


def _load_all(paths: Iterable[Path], left_out: list[str]) -> dict[Path, Dump]:
    dumps = {}
    for path in paths:
        try:
            dumps[path] = load(path)
        except OSError as error:
            left_out.append(f"{path}: left out: {error.strerror}")
        except ValueError as error:
            left_out.append(f"{path}: left out: {error}")
    return dumps


def _newest(found: Mapping[Path, Dump], left_out: list[str]) -> list[Dump]:
    """The newest dump of each rank, of the job that the newest of all is of."""
    newest: dict[int, Path] = {}
    oldest_first = sorted(found.items(), key=lambda item: item[1].time)
    jobs = [f"{dump.job} of {dump.size} ranks" for _, dump in oldest_first]
    for (path, dump), job in zip(oldest_first, jobs, strict=True):
        if job != jobs[-1]:
            left_out.append(f"{path}: left out: of job {job}; the newest is {jobs[-1]}")
            continue
        if dump.rank in newest:
            _note(f"{newest[dump.rank]}: {path} is the newer dump of rank {dump.rank}, and counts")
        newest[dump.rank] = path
    return [found[path] for path in newest.values()]


def _note(line: str) -> None:
    print(printable(line), file=sys.stderr)
