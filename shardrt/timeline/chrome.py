"""Timelines as Chrome's trace-event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

| here            | there                                                                                        |
|-----------------|----------------------------------------------------------------------------------------------|
| a rank          | a process: `pid` is the rank, or `FORECAST_PID` + rank for a forecast                        |
| a track         | a thread; one more for spans that neither lie inside each other nor follow each other        |
| a span          | a complete event, `X`                                                                        |
| a counter       | `C`: Perfetto shows one track for each series                                                |
| an arrow        | a flow, from `s` in the source to `f` (`bp`: `e`) in the target                              |
| names and order | metadata, `M`                                                                                |

Times are in microseconds. Perfetto makes whole nanoseconds of them, and leaves out a span that neither lies inside of the one
before it on its thread nor follows it. So times here are whole nanoseconds too, plus a quarter: rounded or cut off, what
remains is the number that was meant. Every span takes a nanosecond at least, since no arrow binds to one that takes none.
Source: "Trace Event Format", Google.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, cast, get_type_hints

from .events import ALL_REDUCE, COMPUTE, GATHER, REDUCE, Counter, Events, Span

FORECAST_PID = 1 << 20
VERSION = 1
_FIRST = (COMPUTE, GATHER, REDUCE, ALL_REDUCE)  # the order of tracks; others follow
_FIRST_TID = 1
_FLOWS = 1 << 28  # of one process, at most
Event = dict[str, object]


@dataclass(frozen=True, slots=True)
class TimelineProcess:
    """The process whose timeline a file has.

    job: what the timelines of one job have in common: the UTC time at which rank 0 began, so that later ones are greater.
    host: its name.   error: of the alignment of its clock with rank 0's, in seconds.
    offset: its clock minus rank 0's, in seconds.   drift: how much of a second it gained in each.
    """

    rank: int
    size: int
    job: str
    host: str
    forecast: bool
    offset: float = 0.0
    error: float = 0.0
    drift: float = 0.0

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> TimelineProcess:
        """Make a process of the JSON that `write` has written. Raises TypeError for other fields, or other types of them."""
        made = cls(**cast("Any", fields))
        for name, kind in get_type_hints(cls).items():
            if type(getattr(made, name)) is not kind:
                raise TypeError(f"{name}: expected {kind.__name__}, found {getattr(made, name)!r}")
        return made

    @property
    def pid(self) -> int:
        """The number of the process in the file."""
        return self.rank + (FORECAST_PID if self.forecast else 0)

    @property
    def name(self) -> str:
        """The name of the process in the file."""
        return f"rank {self.rank}{' forecast' if self.forecast else ''}"


def chrome_events(events: Events, process: TimelineProcess) -> Iterator[Event]:
    """The trace events of one rank, by time; those that name its tracks come first."""
    # Of spans that begin at once, outer ones come first, and those on other tracks before those that use what they make.
    spans = sorted(events.spans, key=lambda span: (_ticks(span)[0], span.track == COMPUTE, -_ticks(span)[1]))
    placed = list(_place(spans))
    rows = sorted({row for _, row in placed}, key=_rank_of)
    tids = {row: tid for tid, row in enumerate(rows, _FIRST_TID)}
    pid = process.pid
    yield _metadata(pid, _FIRST_TID, "process_name", name=process.name)
    yield _metadata(pid, _FIRST_TID, "process_labels", labels=process.host)
    yield _metadata(pid, _FIRST_TID, "process_sort_index", sort_index=2 * process.rank + process.forecast)
    for (track, copy), tid in tids.items():
        yield _metadata(pid, tid, "thread_name", name=track if copy == 0 else f"{track} ({copy + 1})")
        yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
    tid_of = {id(span): tids[row] for span, row in placed}
    ends: dict[int, list[Event]] = defaultdict(list)  # of arrows, by the id of the span
    for number, arrow in enumerate(events.arrows, pid * _FLOWS):
        for span, event in ((arrow.source, {"ph": "s"}), (arrow.target, {"ph": "f", "bp": "e"})):
            ends[id(span)].append(event | {"id": number, "cat": "use", "name": "use"})
    timed = [_value(counter, pid) for counter in events.counters if counter.values]
    for span in spans:
        shared = {"pid": pid, "tid": tid_of[id(span)], "ts": _microseconds(_ticks(span)[0])}
        timed.append(_complete(span) | shared)
        timed += [event | shared for event in ends[id(span)]]  # behind the span: an arrow binds to the newest that has begun
    yield from sorted(timed, key=itemgetter("ts"))


def _place(spans: Sequence[Span]) -> Iterator[tuple[Span, tuple[str, int]]]:
    """Each span with its track, and the number of the copy of that track on which it nests."""
    copies: dict[str, list[list[float]]] = {}  # by track: for each copy, the ends of the spans around the newest one
    for span in spans:
        start, end = _ticks(span)
        of_track = copies.setdefault(span.track, [])
        for ends in of_track:
            while ends and ends[-1] <= start:
                ends.pop()
        copy = next((copy for copy, ends in enumerate(of_track) if not ends or end <= ends[-1]), len(of_track))
        if copy == len(of_track):
            of_track.append([])
        of_track[copy].append(end)
        yield span, (span.track, copy)


def _rank_of(row: tuple[str, int]) -> tuple[int, str, int]:
    track, copy = row
    return (_FIRST.index(track) if track in _FIRST else len(_FIRST), track, copy)


def _ticks(span: Span) -> tuple[int, int]:
    """Where a span begins and ends, in nanoseconds."""
    start = round(span.start * 1e9)
    return start, max(round(span.end * 1e9), start + 1)


def _microseconds(ticks: int) -> float:
    return (ticks + 0.25) / 1e3


def _metadata(pid: int, tid: int, what: str, **arguments: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}


def _complete(span: Span) -> Event:
    start, end = _ticks(span)
    arguments = {"subject": span.subject, **span.arguments}
    name = f"{span.name} {span.subject}".strip()
    return {"ph": "X", "dur": _microseconds(end - start), "name": name, "cat": span.track, "args": arguments}


def _value(counter: Counter, pid: int) -> Event:
    at = _microseconds(round(counter.at * 1e9))
    return {"ph": "C", "pid": pid, "tid": _FIRST_TID, "ts": at, "name": counter.name, "args": dict(counter.values)}


def write(path: Path, traced: Iterable[Event], processes: Sequence[TimelineProcess]) -> None:
    """Write a file, which takes its name when it is complete. Raises: OSError."""
    about = {"shardrt_timeline": VERSION, "processes": [asdict(process) for process in processes]}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, traced)))
            file.write("\n]}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
