"""Merges the files of several ranks, or of a run and its forecast, into one.

The times of all files count from the moment at which rank 0 began, so a forecast lies over its run. Of several runs the newest
counts. Of two files of one process, one of fewer processes counts, as an earlier result has more; then the newer one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .chrome import VERSION, Event, TimelineProcess, write


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A file's content."""

    path: Path
    processes: Sequence[TimelineProcess]
    events: Sequence[Event]
    written_ns: int  # when the file changed last


def merge(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], say: Callable[[str], object]) -> int:
    """Merge files, and those in folders, into the file `out`. say: takes a line for each file that is left out.

    Returns how many were left out. Raises: OSError; ValueError if none remained.
    """
    out, left_out, found = Path(out), list[str](), list[Traced]()
    for path in _files(map(Path, paths), out):
        try:
            found.append(_load(path))
        except ValueError as error:
            left_out.append(f"{path}: left out: {error}")
    kept = list(_newest(found, left_out))
    for line in left_out:
        say(line)
    if not kept:
        raise ValueError(f"no timeline in {', '.join(map(str, paths))}: give the folder that shardrt.Timeline wrote to")
    write(out, (event for each in kept for event in each.events), [process for each in kept for process in each.processes])
    return len(left_out)


def _files(paths: Iterable[Path], out: Path) -> Iterator[Path]:
    """The files, and those of folders; not an earlier result."""
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            if file.resolve() != out.resolve():
                yield file


def _load(path: Path) -> Traced:
    """Raises: OSError; ValueError for what is not a timeline of ours."""
    try:
        content = json.loads(path.read_bytes())
        about, events = content["otherData"], content["traceEvents"]
        version, processes = about["shardrt_timeline"], [TimelineProcess.read(process) for process in about["processes"]]
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise ValueError("not a file of shardrt.Timeline") from None
    if version != VERSION:
        raise ValueError(f"a timeline of version {version}, expected {VERSION}")
    if not processes or not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("not a file of shardrt.Timeline")
    return Traced(path, processes, events, path.stat().st_mtime_ns)


def _newest(found: Sequence[Traced], left_out: list[str]) -> Iterator[Traced]:
    """The files of the newest run, and forecasts; one of each process, by rank."""
    newest = max((process.job for each in found for process in each.processes if not process.forecast), default="")
    by_pid: dict[int, Traced] = {}
    for each in sorted(found, key=lambda each: (len(each.processes), -each.written_ns)):
        old = [process for process in each.processes if not process.forecast and process.job != newest]
        taken = [process for process in each.processes if process.pid in by_pid]
        if old:
            left_out.append(f"{each.path}: left out: of job {old[0].job}; the newest is {newest}")
        elif taken:
            left_out.append(f"{each.path}: left out: {by_pid[taken[0].pid].path} is of {taken[0].name} as well")
        else:
            by_pid.update((process.pid, each) for process in each.processes)
    yield from dict.fromkeys(by_pid[pid] for pid in sorted(by_pid))
